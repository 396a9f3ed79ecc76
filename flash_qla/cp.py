"""Context parallelism: sequences whose tokens are spread over the ranks of a process group.

    context = build_cp_context(cu_seqlens, group)  # the offsets of whole sequences
    o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)  # this rank's tokens

Over the tokens that a rank holds of a sequence the state's map is affine, S' = M S + Z. The first half of the op makes
M and Z of the sequences that go on elsewhere, which ranks exchange in one all-gather; each folds those before it, in
the order of the tokens, into the state that its first sequence starts from, and the second half runs its own tokens
from there. In the backward the gradient of the state goes the other way in the same manner, dS = M^T dS' + dZ, into the
gradient of the state behind its last sequence.
"""

import bisect
import dataclasses
import functools
import itertools
import os
from typing import NamedTuple

import torch
from torch._library.effects import EffectType

from flash_qla.ops.autograd import only_once

ops = torch.ops.flash_qla

_OPTIONS = [x.name for x in ops.chunk_gated_delta_rule.default._schema.arguments[5:]]  # what is behind the tokens
_TENSORS = ("initial_state", "A_log", "dt_bias")  # those that have gradients

# Maps whose norm is smaller are replaced by 0, as within a segment (kernels_tl/maps/segments.cuh)
_NEGLIGIBLE = 2.0**-24


def _by_name(op):
    """The op, by name, of those of the arguments that it has."""
    names = [x.name for x in op.default._schema.arguments]
    return lambda **arguments: op(**{name: arguments[name] for name in names if name in arguments})


_op, _op_fwd, _op_bwd = map(
    _by_name, (ops.chunk_gated_delta_rule, ops.chunk_gated_delta_rule_fwd, ops.chunk_gated_delta_rule_bwd)
)
_begin_forward, _finish_forward = map(
    _by_name, (ops.gated_delta_rule_forward_begin, ops.gated_delta_rule_forward_finish)
)
_begin_backward, _replay_backward, _finish_backward = map(
    _by_name,
    (
        ops.gated_delta_rule_backward_begin,
        ops.gated_delta_rule_backward_replay,
        ops.gated_delta_rule_backward_finish,
    ),
)


class _Part(NamedTuple):
    """A run of tokens that a rank holds. Its first sequence may have begun before it, its last may go on behind it;
    they may be the same."""

    slot: int  # its place among the parts of all ranks, in the order of the tokens
    begin: int  # its tokens, in the rank's tensors
    end: int
    first: int  # row of the first sequence, among those of the rank
    first_end: int  # behind its last token
    last: int
    last_begin: int
    before: int  # parts before this one with tokens of its first sequence
    behind: int
    tokens_before: int  # tokens of the first sequence that they hold


# What FLA has for each part of a rank: its name where there is one part, and where there are two.
_OF_PARTS = {
    "pre_num_ranks": "pre_num_ranks_by_part",
    "post_num_ranks": "post_num_ranks_by_part",
    "is_first_rank": "is_first_by_part",
    "is_last_rank": "is_last_by_part",
    "pre_num_conv_tokens": "pre_num_conv_tokens_by_part",
}


def _check_offsets(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}, expected a tensor [N + 1], int32 or int64")
    if x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {x.dtype} of shape {list(x.shape)}, expected [N + 1], int32 or int64")


@dataclasses.dataclass(eq=False)
class CPContext:
    """What a rank holds of all sequences, and how they go on elsewhere. The names are those of FLA's FLACPContext.

    A part is a run of tokens: with layout "contiguous" a rank has one, with "zigzag" two, which follow one another in
    its tensors. Fields that end in _by_part are of the two parts, and None otherwise; their namesakes are of the one.
    """

    group: "torch.distributed.ProcessGroup | None"
    cu_seqlens: torch.Tensor  # [N + 1] int32: the rank's own sequences; one that both parts have is there twice
    cu_seqlens_cpu: torch.Tensor  # the same on the CPU
    layout: str = "contiguous"
    conv1d_kernel_size: int | None = None
    part_len: int | None = None  # tokens a part, with zigzag
    front_num_seqs: int | None = None  # sequences of the first part, with zigzag
    pre_num_ranks: int | None = None  # parts before this one that have tokens of its first sequence
    post_num_ranks: int | None = None  # parts behind it that have tokens of its last sequence
    is_first_rank: bool | None = None  # whether its first sequence begins in it
    is_last_rank: bool | None = None  # whether its last sequence ends in it
    pre_num_conv_tokens: int | None = None  # tokens of its first sequence that lie before it
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None
    sequences: tuple[int, ...] | None = None  # the number of each of the rank's sequences among all; not FLA's

    def __post_init__(self):
        rank, self._world_size = 0, 1
        if self.group is not None:
            from torch.distributed import _functional_collectives  # noqa: F401  it has what compiling needs of its ops

            rank, self._world_size, self._group_name = self.group.rank(), self.group.size(), self.group.group_name
        if self.cu_seqlens_cpu is None:
            raise ValueError(
                "cp_context has no cu_seqlens_cpu, expected the offsets of the rank's sequences on the CPU"
            )
        for name in ("cu_seqlens", "cu_seqlens_cpu"):
            _check_offsets(name, getattr(self, name))
        offsets = self.cu_seqlens_cpu.tolist()
        self._tokens = offsets[-1]
        if self.layout == "contiguous":
            slots, rows = (rank,), (0, len(offsets) - 1)
        else:
            slots, rows = (rank, 2 * self._world_size - 1 - rank), (0, self.front_num_seqs, len(offsets) - 1)
        self._parts = tuple(
            _Part(
                slot=slot,
                begin=offsets[first],
                end=offsets[end],
                first=first,
                first_end=offsets[first + 1],
                last=end - 1,
                last_begin=offsets[end - 1],
                before=self._of_part("pre_num_ranks", i),
                behind=self._of_part("post_num_ranks", i),
                tokens_before=self._of_part("pre_num_conv_tokens", i),
            )
            for i, (slot, (first, end)) in enumerate(zip(slots, itertools.pairwise(rows), strict=True))
        )

    def _of_part(self, name: str, i: int):
        return getattr(self, name) if self.layout == "contiguous" else getattr(self, _OF_PARTS[name])[i]

    @property
    def num_seqs(self) -> int:
        """How many sequences the rank has tokens of."""
        return len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: "torch.distributed.ProcessGroup | None" = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    layout: str = "contiguous",
) -> CPContext:
    """What this rank holds of sequences whose tokens are spread over a group of W ranks.

    It waits for the device unless there is cu_seqlens_cpu; calls with the context do not.

    Args:
        cu_seqlens: offsets of all sequences, [N + 1], int32 or int64, from 0, not decreasing. The last one is the
            number of all tokens, a multiple of W, of 2 W with zigzag. Sequences that are empty are on no rank.
        group: the ranks; the default group if None.
        conv1d_kernel_size: width of the causal convolution before the Gated Delta Rule, for exchange_halo.
        cu_seqlens_cpu: cu_seqlens on the CPU.
        layout: which tokens a rank has. "contiguous": rank r part r of W equal parts; "zigzag": parts r and 2 W - 1 - r
            of 2 W equal parts, one behind the other.

    Returns:
        The context, for the arguments named cp_context. Its cu_seqlens are those of the rank's own sequences, on the
        device of cu_seqlens; its sequences says which ones of all they are.

    Raises:
        ValueError: layout is another word; cu_seqlens is not as above, or the tokens do not divide.
        TypeError: cu_seqlens or cu_seqlens_cpu is not a tensor.
    """
    _check_offsets("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        _check_offsets("cu_seqlens_cpu", cu_seqlens_cpu)
    group = torch.distributed.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group is None, expected a process group, as there is no default group")
    rank, world_size = group.rank(), group.size()
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout is {layout!r}, expected 'contiguous' or 'zigzag'")
    slots = (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)
    count = len(slots) * world_size
    offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if not offsets or offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens is {offsets}, expected offsets that begin with 0 and do not decrease")
    if offsets[-1] == 0 or offsets[-1] % count != 0:
        raise ValueError(
            f"cu_seqlens ends with {offsets[-1]} tokens, expected a positive multiple of {count}, {layout}"
        )
    part_len = offsets[-1] // count

    local, sequences, of_parts = [0], [], []
    for i, slot in enumerate(slots):
        begin, end = slot * part_len, (slot + 1) * part_len
        first, last = bisect.bisect_right(offsets, begin) - 1, bisect.bisect_left(offsets, end) - 1
        rows = [n for n in range(first, last + 1) if offsets[n] < offsets[n + 1]]
        local += [i * part_len + min(offsets[n + 1], end) - begin for n in rows]
        sequences += rows
        before, behind = slot - offsets[first] // part_len, (offsets[last + 1] - 1) // part_len - slot
        of_parts.append((before, behind, before == 0, behind == 0, begin - offsets[first]))
        if i == 0:
            front = len(rows)
    local = torch.tensor(local, dtype=torch.int32, device="cpu")
    if layout == "contiguous":
        fields = dict(zip(_OF_PARTS, of_parts[0], strict=True))
    else:
        fields = dict(zip(_OF_PARTS.values(), zip(*of_parts, strict=True), strict=True))
        fields |= {"part_len": part_len, "front_num_seqs": front}
    return CPContext(
        group=group,
        cu_seqlens=local.to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=local,
        layout=layout,
        conv1d_kernel_size=conv1d_kernel_size,
        sequences=tuple(sequences),
        **fields,
    )


def _as_ours(context) -> CPContext:
    """Takes FLA's FLACPContext as well, which has the same fields."""
    if isinstance(context, CPContext):
        return context
    if not hasattr(context, "cu_seqlens_cpu"):
        raise TypeError(f"cp_context is of type {type(context).__name__}, expected a CPContext, or FLA's FLACPContext")
    fields = [field.name for field in dataclasses.fields(CPContext)]
    return CPContext(**{name: getattr(context, name) for name in fields if hasattr(context, name)})


def _start_gather(rows: torch.Tensor, context: CPContext, for_backward: bool = False) -> torch.Tensor:
    """The rows [parts of a rank, ...] of all ranks, for _wait. Until then they are on their way.

    A rank that is `for_backward` starts another gather in its backward, so all ranks have to.
    """
    if context._world_size == 1:
        return rows
    if os.environ.get("FLASH_QLA_CHECK") == "1" and not torch.compiler.is_compiling():
        _check_agreement(rows, context, for_backward)
    return torch.ops._c10d_functional.all_gather_into_tensor(rows, context._world_size, context._group_name)


def _wait(rows: torch.Tensor, context: CPContext) -> torch.Tensor:
    """What all ranks have for their parts, in the order of the parts."""
    if context._world_size > 1:
        rows = torch.ops._c10d_functional.wait_tensor(rows)
    if len(context._parts) == 1:
        return rows
    return torch.cat([rows[::2], rows[1::2].flip(0)])  # the first ones of the ranks, then the others in reverse


@torch.library.custom_op("flash_qla::_copy_here", mutates_args=())
def _copy_here(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_copy_here.register_effect(EffectType.ORDERED)


@_copy_here.register_fake
def _(x):
    return torch.empty_like(x)


def _in_backward(x: torch.Tensor) -> torch.Tensor:
    """x, which a compiler leaves in the backward because of the effect. Without it the compiler moves a value that
    depends on no gradient to the forward, and its collective with it, where the other ranks have none."""
    return _copy_here(x) if torch.compiler.is_compiling() else x


def _check_agreement(rows: torch.Tensor, context: CPContext, for_backward: bool) -> None:
    """Ranks whose heads, head dimensions or dtypes differ would make each other crash, or hang until they time out. So
    would a rank whose backward never runs, because none of its tensors requires gradients."""
    own = (tuple(rows.shape), rows.dtype, for_backward)
    found = [None] * context._world_size
    torch.distributed.all_gather_object(found, own, context.group)
    if any(other != own for other in found):
        raise RuntimeError(
            "flash_qla: the ranks differ in the shape or the dtype of what they exchange, or in whether they need "
            f"gradients; in the order of the ranks these are {found}"
        )


def _fold(maps: torch.Tensor, parts: int, V: int) -> torch.Tensor:
    """The state behind the last of maps [parts, H_v, V + K, K] from a state of 0 before the first, [H_v, V, K].

    `parts` is given because torch.compile of PyTorch 2.11 would take the size of a slice for a symbol.

    Neighbours are composed, all pairs at once, until one map is left: in log2(parts) rounds. In float64, which no
    setting that lets float32 be rounded to TF32 reaches.
    """
    if parts == 1:
        return maps[0, :, :V]
    folded = maps.double()
    if maps.dtype != torch.float64:
        Z, M = folded.tensor_split([V], 2)
        M = M.masked_fill(M.square().sum((2, 3), keepdim=True) < _NEGLIGIBLE**2, 0)
        folded = torch.cat([Z, M], 2)
    while parts > 1:
        pairs, last = folded.tensor_split([parts // 2 * 2])
        first, second = pairs[::2], pairs[1::2]
        Z, M = (first @ second[:, :, V:]).tensor_split([V], 2)
        folded = torch.cat([torch.cat([Z + second[:, :, :V], M], 2), last])
        parts -= parts // 2
    return folded[0, :, :V].to(maps.dtype)


def _of_parts(made: torch.Tensor, wanted: list[bool]) -> torch.Tensor:
    """The maps that were made, which are those of the parts that are wanted; zeros for the others."""
    if all(wanted):
        return made
    if not any(wanted):
        return made.new_zeros(len(wanted), *made.shape[1:])
    rows, nothing = iter(made.unbind()), made.new_zeros(made.shape[1:])
    return torch.stack([next(rows) if is_wanted else nothing for is_wanted in wanted])


class _Call:
    """A pass of a rank: what its halves have in common."""

    def __init__(self, context: CPContext, q: torch.Tensor, v: torch.Tensor, state_v_first: bool):
        self.context, self.state_v_first = context, state_v_first
        (_, _, H_v, self.V), K = v.shape, q.shape[-1]
        self.states_shape = (context.num_seqs, H_v, *((self.V, K) if state_v_first else (K, self.V)))
        self.maps_shape = (len(context._parts), H_v, self.V + K, K)
        self.zeros = functools.partial(q.new_zeros, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)

    def with_row(self, states: torch.Tensor | None, row: int, state: torch.Tensor) -> torch.Tensor:
        """States [N, ...], zeros if there are none, with another one in a row."""
        if self.states_shape[0] == 1:
            # One kernel in the place of three, and none of the others' maps is kept for the backward
            return state[None].clone(memory_format=torch.contiguous_format)
        states = self.zeros(self.states_shape) if states is None else states.to(state.dtype)
        return states.select_scatter(state, 0, row)

    def with_zeros(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """In the rows of sequences that begin elsewhere."""
        for part in self.context._parts:
            if part.before and states is not None:
                states = self.with_row(states, part.first, self.zeros(self.states_shape[1:]))
        return states

    def fold(self, maps: torch.Tensor, parts: int) -> torch.Tensor:
        state = _fold(maps, parts, self.V)
        return state if self.state_v_first else state.mT


def _forward(context: CPContext, for_backward: bool, tokens: tuple, options: dict) -> tuple[torch.Tensor | None, ...]:
    """o, the final states, the workspace between the halves, and for the backward g_cumsum, A, where it takes one, and
    the states that it starts from."""
    parts, call = context._parts, _Call(context, tokens[0], tokens[2], options["state_v_first"])
    behind, before = ([bool(getattr(part, name)) for part in parts] for name in ("behind", "before"))
    q, k, v, g, beta = (x.contiguous() for x in tokens)
    given = options | {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    states = options["initial_state"]
    if not any(behind) and not any(before):  # it takes part for the sake of the others
        gathered = _start_gather(call.zeros(call.maps_shape), context, for_backward)
        if for_backward:
            g_cumsum, A, o, _, final_state = _op_fwd(**given)
        else:
            (o, final_state), g_cumsum, A = _op(**given), None, None
        _wait(gathered, context)
        return o, final_state, None, g_cumsum, A, states

    states = call.with_zeros(states)  # what was there may be anything
    mapped = [part.last for part in parts if part.behind]
    maps, workspace, o, g_cumsum = _begin_forward(
        **given | {"initial_state": states, "map_sequences": mapped, "output_g_cumsum": for_backward},
    )
    gathered = _start_gather(_of_parts(maps, behind), context, for_backward)
    if any(before):
        gathered = _wait(gathered, context)
        for part in parts:
            if part.before:
                state = call.fold(gathered[part.slot - part.before : part.slot], part.before)
                states = call.with_row(states, part.first, state)
    final_state = _finish_forward(
        **given | {"initial_state": states, "workspace": workspace, "o": o, "g_cumsum": g_cumsum},
    )
    if not any(before):
        _wait(gathered, context)
    return o, final_state, workspace, g_cumsum if for_backward else None, None, states


def _backward(context: CPContext, options: dict, *tensors) -> tuple:
    """The gradients of q, k, v, g, beta, initial_state, A_log and dt_bias.

    do and dht may both be None: the other ranks wait for this rank's maps, and their gradients may reach its tokens.
    """
    q, k, v, g, beta, A, g_raw, initial_state, A_log, dt_bias, do, dht = tensors
    parts, call = context._parts, _Call(context, q, v, options["state_v_first"])
    behind, before = ([bool(getattr(part, name)) for part in parts] for name in ("behind", "before"))
    q, k, v, do = (x.contiguous() for x in (q, k, v, torch.zeros_like(v) if do is None else do))
    given = options | {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A": A, "g_raw": g_raw, "do": do, "dht": dht}
    given |= {"initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias}
    if not any(behind) and not any(before):
        gathered = _start_gather(_in_backward(call.zeros(call.maps_shape)), context)
        dq, dk, dv, db, dg, *sums = _op_bwd(**given)
        _wait(gathered, context)
        return dq, dk, dv, dg, db, *sums

    mapped = [part.first for part in parts if part.before]
    maps, workspace, dq, dk, dv, db, dg = _begin_backward(**given | {"map_sequences": mapped})
    gathered = _start_gather(_in_backward(_of_parts(maps, before)), context)
    _replay_backward(**given | {"workspace": workspace})
    if any(behind):
        gathered = _wait(gathered, context)
        for part in parts:
            if part.behind:
                gradient = call.fold(gathered[part.slot + 1 : part.slot + part.behind + 1].flip(0), part.behind)
                dht = call.with_row(dht, part.last, gradient if dht is None else dht[part.last] + gradient)
    given |= {"dht": dht, "workspace": workspace, "dq": dq, "dk": dk, "dv": dv, "db": db, "dg": dg}
    dh0, dA_log, ddt_bias = _finish_backward(**given)
    if not any(behind):
        _wait(gathered, context)
    return dq, dk, dv, dg, db, None if initial_state is None else call.with_zeros(dh0), dA_log, ddt_bias


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context, options, *tensors):
        tokens, of_heads = tensors[:5], dict(zip(_TENSORS, tensors[5:], strict=True))
        o, final_state, workspace, g_cumsum, A, states = _forward(context, True, tokens, options | of_heads)
        q, k, v, g, beta = tokens
        g_raw = g if options["use_gate_in_kernel"] else None
        ctx.save_for_backward(q, k, v, g_cumsum, beta, A, g_raw, states, of_heads["A_log"], of_heads["dt_bias"])
        ctx.context, ctx.options = context, options
        ctx.set_materialize_grads(False)
        if not options["output_final_state"]:
            ctx.mark_non_differentiable(final_state)
        # Its size may be a new symbol of torch.compile, which has to be in what the function returns.
        return o, final_state, workspace

    @staticmethod
    def backward(ctx, do, dht, _):
        backward = functools.partial(_backward, ctx.context, ctx.options)
        gradients = only_once(backward, *ctx.saved_tensors, do, dht)
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(dx if is_needed else None for dx, is_needed in needed)


def run(context, q, k, v, g, beta, *options) -> tuple[torch.Tensor, torch.Tensor]:
    """The op chunk_gated_delta_rule, by its arguments, from the states that the ranks before leave."""
    context, options = _as_ours(context), dict(zip(_OPTIONS, options, strict=True))
    for name, x in (("q", q), ("v", v)):
        _check_tokens(name, x, context)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4 ([B, T, heads, dimension])")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:  # the halves have no autocast
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    options["cu_seqlens"] = context.cu_seqlens
    tokens, tensors = (q, k, v, g, beta), [options[name] for name in _TENSORS]
    if context._world_size == 1 and not any(part.before for part in context._parts):
        return ops.chunk_gated_delta_rule(*tokens, **options)
    _refuse_transforms("chunk_gated_delta_rule with cp_context")
    state_dtype = options["state_dtype"]
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tokens, *tensors))):
        with torch.no_grad():
            return _forward(context, False, tokens, options)[:2]
    others = {name: x for name, x in options.items() if name not in _TENSORS} | {"state_dtype": None}
    o, final_state, _ = _Differentiable.apply(context, others, *tokens, *tensors)
    return o, final_state if state_dtype is None else final_state.to(state_dtype)


def _refuse_transforms(function: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"flash_qla: {function} exchanges tensors between ranks, which the transforms of torch.func (grad, vjp, "
            "jacrev, vmap, jvp, ...) do not support; use torch.autograd"
        )


def _check_tokens(name: str, x: torch.Tensor, context: CPContext) -> None:
    if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != context._tokens:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, expected [1, {context._tokens}, ...], the tokens that cp_context gives "
            "this rank"
        )


class _ExchangeHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, for_backward):
        ctx.context, ctx.shape = context, x.shape
        size = context.conv1d_kernel_size - 1
        tails = [x[0, max(part.begin, part.end - size) : part.end] for part in context._parts]
        tails = _wait(_start_gather(torch.stack(tails), context, for_backward), context)
        halos = []
        for part in context._parts:
            # A part has a token at least, so no more of them than that are needed.
            before = torch.cat([x.new_zeros(size, *x.shape[2:]), *tails[max(0, part.slot - size) : part.slot]])
            halos.append(_of_first_sequence(before[before.shape[0] - size :], part))
        return torch.stack(halos)

    @staticmethod
    def backward(ctx, dhalo):
        context, dx = ctx.context, dhalo.new_zeros(ctx.shape)
        own = zip(dhalo.unbind(), context._parts, strict=True)
        halos = torch.stack([_of_first_sequence(halo, part) for halo, part in own])
        halos = _wait(_start_gather(_in_backward(halos), context), context)
        for part in context._parts:
            # A halo ends where its part begins, so it is about the parts before that as far as it reaches.
            tokens, reach = part.end - part.begin, dhalo.shape[1]
            for halo in halos[part.slot + 1 : part.slot + 1 + reach]:
                count = min(reach, tokens)
                dx[0, part.end - count : part.end] += halo[reach - count : reach]
                reach = max(0, reach - tokens)
        return dx, None, None


def _of_first_sequence(halo: torch.Tensor, part: _Part) -> torch.Tensor:
    """The halo with zeros where its tokens belong to another sequence than the part's first."""
    others = max(0, halo.shape[0] - part.tokens_before)
    return torch.cat([torch.zeros_like(halo[:others]), halo[others:]])


def exchange_halo(x: torch.Tensor, cp_context: CPContext) -> torch.Tensor:
    """The tokens before those of this rank, for a causal convolution of width W: the last W - 1 ones before each of its
    parts, zeros where they belong to another sequence than the part's first token. All ranks of the group call it.

    Its gradient goes back to the ranks that have these tokens: the backward runs on all ranks or on none, so x requires
    gradients on all or on none, and their losses depend on the result.

    Args:
        x: this rank's tokens, [1, T, ...], any dtype.
        cp_context: of build_cp_context, with conv1d_kernel_size, or FLA's.

    Returns:
        [1, W - 1, ...]; with zigzag [2, W - 1, ...], of the two parts.

    Raises:
        ValueError: the context has no conv1d_kernel_size, or x has other tokens than it says.
        NotImplementedError: the call is under a transform of torch.func.
    """
    context = _as_ours(cp_context)
    _check_tokens("x", x, context)
    if context.conv1d_kernel_size is None:
        raise ValueError("cp_context has no conv1d_kernel_size, expected the width of the convolution")
    _refuse_transforms("exchange_halo")
    return _ExchangeHalo.apply(x, context, torch.is_grad_enabled() and x.requires_grad)
