"""Context parallelism: sequences whose tokens are spread over the ranks of a process group.

    context = build_cp_context(cu_seqlens, group)  # the offsets of whole sequences
    o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)  # this rank's tokens

Over the tokens that a rank holds of a sequence the state's map is affine, S' = M S + Z. Ranks exchange M and Z of the
sequences that go on elsewhere, in one all-gather; each folds those before it, in the order of the tokens, into the
state that its first sequence starts from, and runs its own tokens from there. In the backward the gradient of the state
goes the other way in the same manner, dS = M^T dS' + dZ, into the gradient of the state behind its last sequence.
"""

import bisect
import dataclasses
import itertools
import os
from typing import NamedTuple

import torch

import flash_qla.ops  # noqa: F401  it loads the library

ops = torch.ops.flash_qla


def _names_of(op, first: int) -> list[str]:
    return [x.name for x in op.default._schema.arguments[first:]]


# The arguments of the ops behind the tokens, and behind the state or gradient that maps may begin with
_OPTIONS = _names_of(ops.chunk_gated_delta_rule, 5)
_MAP_OPTIONS = _names_of(ops.gated_delta_rule_forward_map, 6)
_GRADIENT_OPTIONS = _names_of(ops.gated_delta_rule_backward_map, 7)


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
    """
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
    local = torch.tensor(local, dtype=torch.int32)
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


def _gather(parts: list[torch.Tensor], context: CPContext) -> list[torch.Tensor]:
    """The tensors that all ranks have for their parts, in the order of the parts."""
    rows = torch.stack(parts)
    if context._world_size > 1:
        if os.environ.get("FLASH_QLA_CHECK") == "1" and not torch.compiler.is_compiling():
            _check_agreement(rows, context)
        collectives = torch.ops._c10d_functional
        rows = collectives.all_gather_into_tensor(rows, context._world_size, context._group_name)
        rows = collectives.wait_tensor(rows)
    rows = rows.unbind()
    # Rank by rank: with two parts a rank, the first ones in the order of the ranks, then the others in reverse.
    return list(rows) if len(parts) == 1 else [*rows[::2], *rows[::-2]]


def _check_agreement(rows: torch.Tensor, context: CPContext) -> None:
    """Ranks whose heads, head dimensions or dtypes differ would make each other crash, or hang until they time out."""
    own = (tuple(rows.shape), rows.dtype)
    found = [None] * context._world_size
    torch.distributed.all_gather_object(found, own, context.group)
    if any(other != own for other in found):
        raise RuntimeError(f"flash_qla: what the ranks exchange has other shapes or dtypes on some of them: {found}")


def _fold(maps: list[torch.Tensor], V: int) -> torch.Tensor:
    """The state behind the last of the maps [H_v, V + K, K] from a state of 0 before the first, [H_v, V, K].

    In float64, which no setting that lets float32 be rounded to TF32 reaches.
    """
    state, _ = maps[0].double().tensor_split([V], 1)
    for x in maps[1:]:
        Z, M = x.double().tensor_split([V], 1)
        state = torch.baddbmm(Z, state, M)
    return state.to(maps[0].dtype)


class _ExchangeGradients(torch.autograd.Function):
    """Hands o and the final states on. In the backward, the gradients of these states get what comes from the ranks
    behind."""

    @staticmethod
    def forward(ctx, o, final_state, q, k, v, g_cumsum, beta, context, state_v_first, *options):
        ctx.save_for_backward(q, k, v, g_cumsum, beta)
        ctx.context, ctx.state_v_first, ctx.options = context, state_v_first, options
        ctx.set_materialize_grads(False)
        return o.view_as(o), final_state.view_as(final_state)

    @staticmethod
    def backward(ctx, do, dht):
        tokens, context = ctx.saved_tensors, ctx.context
        q, _, v, g_cumsum, _ = tokens
        do = torch.zeros_like(v) if do is None else do
        H_v, V, K = *v.shape[2:], q.shape[-1]

        def v_first(state):
            return state if ctx.state_v_first else state.mT

        def map_of(part):
            if part.before == 0:
                return g_cumsum.new_zeros(H_v, V + K, K)
            behind = None if dht is None else v_first(dht[part.first : part.first + 1])
            own = (x[:, part.begin : part.first_end] for x in (*tokens, do))
            return ops.gated_delta_rule_backward_map(*own, behind, *ctx.options)[0]

        maps = _gather([map_of(part) for part in context._parts], context)
        for part in context._parts:
            if part.behind:
                gradient = v_first(_fold(maps[part.slot + part.behind : part.slot : -1], V))
                if dht is None:
                    dht = gradient.new_zeros(context.num_seqs, *gradient.shape)
                dht = dht.select_scatter(dht[part.last] + gradient, 0, part.last)
        return do, dht, *(None,) * (len(ctx.needs_input_grad) - 2)


def run(context, q, k, v, g, beta, *options) -> tuple[torch.Tensor, torch.Tensor]:
    """The op chunk_gated_delta_rule, by its arguments, from the states that the ranks before leave."""
    context, call = _as_ours(context), dict(zip(_OPTIONS, options, strict=True))
    for name, x in (("q", q), ("v", v)):
        _check_tokens(name, x, context)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4 ([B, T, heads, dimension])")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:  # maps have no autocast of their own
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    H_v, V, K = *v.shape[2:], q.shape[-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    initial_state, state_v_first = call["initial_state"], call["state_v_first"]

    def v_first(state):
        return state if state_v_first else state.mT

    def map_of(part):
        if part.behind == 0:
            return q.new_zeros(H_v, V + K, K, dtype=dtype)
        state = None
        if initial_state is not None and not (part.before and part.first == part.last):
            state = v_first(initial_state[part.last : part.last + 1])
        own = (x[:, part.last_begin : part.end] for x in (q, k, v, g, beta))
        return ops.gated_delta_rule_forward_map(*own, state, **{name: call[name] for name in _MAP_OPTIONS})[0]

    states = initial_state
    with torch.no_grad():
        maps = _gather([map_of(part) for part in context._parts], context)
    for part in context._parts:
        if part.before:
            with torch.no_grad():
                state = v_first(_fold(maps[part.slot - part.before : part.slot], V))
            if states is None:
                states = state.new_zeros(context.num_seqs, *state.shape)
            states = states.to(dtype).select_scatter(state, 0, part.first)

    state_dtype = call["state_dtype"]
    call |= {"initial_state": states, "cu_seqlens": context.cu_seqlens, "state_dtype": None}
    given = (q, k, v, g, beta, initial_state, call["A_log"], call["dt_bias"])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        call["output_final_state"] |= any(part.behind for part in context._parts)
        g_cumsum, _, o, _, final_state = ops.chunk_gated_delta_rule_fwd(q, k, v, g, beta, **call)
        options = (call[name] for name in _GRADIENT_OPTIONS)
        o, final_state = _ExchangeGradients.apply(
            o, final_state, q, k, v, g_cumsum, beta, context, state_v_first, *options
        )
    else:
        o, final_state = ops.chunk_gated_delta_rule(q, k, v, g, beta, **call)
    return o, final_state if state_dtype is None else final_state.to(state_dtype)


def _check_tokens(name: str, x: torch.Tensor, context: CPContext) -> None:
    if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != context._tokens:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, expected [1, {context._tokens}, ...], the tokens that cp_context gives "
            "this rank"
        )


class _ExchangeHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context):
        ctx.context, ctx.shape = context, x.shape
        size = context.conv1d_kernel_size - 1
        tails = _gather([x[0, max(part.begin, part.end - size) : part.end] for part in context._parts], context)
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
        halos = _gather([_of_first_sequence(halo, part) for halo, part in own], context)
        for part in context._parts:
            # A halo ends where its part begins, so it is about the parts before that as far as it reaches.
            tokens, reach = part.end - part.begin, dhalo.shape[1]
            for halo in halos[part.slot + 1 : part.slot + 1 + reach]:
                count = min(reach, tokens)
                dx[0, part.end - count : part.end] += halo[reach - count : reach]
                reach = max(0, reach - tokens)
        return dx, None


def _of_first_sequence(halo: torch.Tensor, part: _Part) -> torch.Tensor:
    """The halo with zeros where its tokens belong to another sequence than the part's first."""
    others = max(0, halo.shape[0] - part.tokens_before)
    return torch.cat([torch.zeros_like(halo[:others]), halo[others:]])


def exchange_halo(x: torch.Tensor, cp_context: CPContext) -> torch.Tensor:
    """The tokens before those of this rank, for a causal convolution of width W: the last W - 1 ones before each of its
    parts, zeros where they belong to another sequence than the part's first token. All ranks of the group call it.

    Its gradient goes back to the ranks that have these tokens.

    Args:
        x: this rank's tokens, [1, T, ...], any dtype.
        cp_context: of build_cp_context, with conv1d_kernel_size, or FLA's.

    Returns:
        [1, W - 1, ...]; with zigzag [2, W - 1, ...], of the two parts.

    Raises:
        ValueError: the context has no conv1d_kernel_size, or x has other tokens than it says.
    """
    context = _as_ours(cp_context)
    _check_tokens("x", x, context)
    if context.conv1d_kernel_size is None:
        raise ValueError("cp_context has no conv1d_kernel_size, expected the width of the convolution")
    return _ExchangeHalo.apply(x, context)
