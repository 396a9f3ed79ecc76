"""Both passes of the Gated Delta Rule on a rank's tokens."""

import functools

import torch

from flash_qla.cp.context import CPContext, as_ours, check_tokens
from flash_qla.cp.exchange import in_backward, refuse_transforms, start_gather, wait
from flash_qla.cp.maps import fold, spread
from flash_qla.ops import autograd
from flash_qla.ops.checks import check_state_dtype

ops = torch.ops.flash_qla

_OPTIONS, _LOW_LEVEL_OPTIONS = (
    [x.name for x in op.default._schema.arguments[5:]]  # all but q, k, v, g, beta
    for op in (ops.chunk_gated_delta_rule, ops.chunk_gated_delta_rule_fwd)
)
_BACKWARD_ARGUMENTS = [x.name for x in ops.chunk_gated_delta_rule_bwd.default._schema.arguments]
_TENSORS = ("initial_state", "A_log", "dt_bias")  # the options that have gradients
# The tensors of _backward, in its order
_BACKWARD_TENSORS = ("q", "k", "v", "g", "beta", *_TENSORS, "do", "dht")


def _by_name(op):
    """The op as a function of keywords; it ignores those that are not its arguments."""
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


class _Call:
    """Shapes of a rank's states and maps, for both ops of a pass, begin and finish."""

    def __init__(self, context: CPContext, q: torch.Tensor, v: torch.Tensor, state_v_first: bool):
        self.context, self.state_v_first = context, state_v_first
        (_, _, H_v, self.V), K = v.shape, q.shape[-1]
        self.states_shape = (context.num_seqs, H_v, *((self.V, K) if state_v_first else (K, self.V)))
        self.maps_shape = (len(context._parts), H_v, self.V + K, K)
        self.zeros = functools.partial(q.new_zeros, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)

    def with_row(self, states: torch.Tensor | None, row: int, state: torch.Tensor) -> torch.Tensor:
        """States [N, ...], by default zeros, with `state` in this row."""
        if self.states_shape[0] == 1:
            # One kernel instead of three, and the backward keeps no maps of other ranks
            return state[None].clone(memory_format=torch.contiguous_format)
        states = self.zeros(self.states_shape) if states is None else states.to(state.dtype)
        return states.select_scatter(state, 0, row)

    def with_zeros(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """States with zeros in the rows of sequences that begin in another part."""
        for part in self.context._parts:
            if part.parts_before and states is not None:
                states = self.with_row(states, part.first, self.zeros(self.states_shape[1:]))
        return states

    def with_states_before(self, states: torch.Tensor | None, gathered: torch.Tensor) -> torch.Tensor | None:
        """States with those that earlier parts leave in the rows of sequences that begin there."""
        for part in self.context._parts:
            if part.parts_before:
                state = self.fold(gathered[part.slot - part.parts_before : part.slot], part.parts_before)
                states = self.with_row(states, part.first, state)
        return states

    def fold(self, maps: torch.Tensor, parts: int) -> torch.Tensor:
        state = fold(maps, parts, self.V)
        return state if self.state_v_first else state.mT


def _forward(context: CPContext, for_backward: bool, tokens: tuple, options: dict) -> tuple[torch.Tensor | None, ...]:
    """The forward of this rank.

    Returns:
        o, final_state, workspace, states: the results, the workspace from begin to finish, and the initial states.
    """
    parts, call = context._parts, _Call(context, tokens[0], tokens[2], options["state_v_first"])
    has_later, has_earlier = ([bool(getattr(part, name)) for part in parts] for name in ("parts_after", "parts_before"))
    q, k, v, g, beta = (x.contiguous() for x in tokens)
    arguments = options | {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    states = options["initial_state"]
    if not any(has_later) and not any(has_earlier):  # only the other ranks need this gather
        gathered = start_gather(call.zeros(call.maps_shape), context, for_backward)
        o, final_state = _op(**arguments)
        wait(gathered, context)
        return o, final_state, None, states

    states = call.with_zeros(states)  # the caller's rows of these are ignored
    mapped = [part.last for part in parts if part.parts_after]
    maps, workspace, o = _begin_forward(**arguments | {"initial_state": states, "map_sequences": mapped})
    gathered = start_gather(spread(maps, has_later), context, for_backward)
    if any(has_earlier):
        gathered = wait(gathered, context)
        states = call.with_states_before(states, gathered)
    final_state = _finish_forward(**arguments | {"initial_state": states, "workspace": workspace, "o": o})
    if not any(has_earlier):
        wait(gathered, context)
    return o, final_state, workspace, states


def _backward(context: CPContext, options: dict, *tensors) -> tuple:
    """The gradients of q, k, v, g, beta, initial_state, A_log and dt_bias.

    do and dht may both be None. The pass runs all the same, because the other ranks wait for this rank's maps, and
    their gradients may reach its tokens.
    """
    q, k, v, g, beta, initial_state, A_log, dt_bias, do, dht = tensors
    parts, call = context._parts, _Call(context, q, v, options["state_v_first"])
    has_later, has_earlier = ([bool(getattr(part, name)) for part in parts] for name in ("parts_after", "parts_before"))
    q, k, v, do = (x.contiguous() for x in (q, k, v, torch.zeros_like(v) if do is None else do))
    arguments = options | {"q": q, "k": k, "v": v, "g": None, "beta": beta, "A": None, "do": do, "dht": dht, "g_raw": g}
    arguments |= {"initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias}
    if not any(has_later) and not any(has_earlier):
        gathered = start_gather(in_backward(call.zeros(call.maps_shape)), context)
        dq, dk, dv, db, dg, *sums = _op_bwd(**arguments)
        wait(gathered, context)
        return dq, dk, dv, dg, db, *sums

    mapped = [part.first for part in parts if part.parts_before]
    maps, workspace, dq, dk, dv, db, dg = _begin_backward(**arguments | {"map_sequences": mapped})
    gathered = start_gather(in_backward(spread(maps, has_earlier)), context)
    _replay_backward(**arguments | {"workspace": workspace})
    if any(has_later):
        gathered = wait(gathered, context)
        for part in parts:
            if part.parts_after:
                gradient = call.fold(
                    gathered[part.slot + 1 : part.slot + part.parts_after + 1].flip(0), part.parts_after
                )
                dht = call.with_row(dht, part.last, gradient if dht is None else dht[part.last] + gradient)
    arguments |= {"dht": dht, "workspace": workspace, "dq": dq, "dk": dk, "dv": dv, "db": db, "dg": dg}
    dh0, dA_log, ddt_bias = _finish_backward(**arguments)
    if not any(has_later):
        wait(gathered, context)
    return dq, dk, dv, dg, db, None if initial_state is None else call.with_zeros(dh0), dA_log, ddt_bias


class _Gradients(torch.autograd.Function):
    """_backward under create_graph: to differentiate it again raises, and only then."""

    @staticmethod
    def forward(ctx, backward, *args):
        return backward(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flash_qla: the gradients of chunk_gated_delta_rule cannot be differentiated again (double backward)."
        )


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context, options, *tensors):
        tokens, tensor_options = tensors[:5], dict(zip(_TENSORS, tensors[5:], strict=True))
        o, final_state, workspace, states = _forward(context, True, tokens, options | tensor_options)
        ctx.save_for_backward(*tokens, states, tensor_options["A_log"], tensor_options["dt_bias"])
        ctx.context, ctx.options = context, options
        ctx.set_materialize_grads(False)
        if not options["output_final_state"]:
            ctx.mark_non_differentiable(final_state)
        # The workspace is a result because torch.compile may give its size a new symbol, which has to be returned.
        return o, final_state, workspace

    @staticmethod
    def backward(ctx, do, dht, _):
        backward = functools.partial(_backward, ctx.context, ctx.options)
        arguments = (*ctx.saved_tensors, do, dht)
        create_graph = torch.is_grad_enabled()
        gradients = _Gradients.apply(backward, *arguments) if create_graph else autograd.call(backward, *arguments)
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(dx if is_needed else None for dx, is_needed in needed)


def _prepare_inputs(context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """Our context, and q, k and v as torch.autocast casts them, because begin and finish have no autocast."""
    context = as_ours(context)
    for name, x in (("q", q), ("v", v)):
        if hasattr(x, "device_mesh"):
            raise TypeError(
                f"{name} is a DTensor, expected with cp_context the rank's own tensor, such as its to_local()"
            )
        check_tokens(name, x, context)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 4 ([B, T, heads, dimension])")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    return context, q, k, v


def chunk_gated_delta_rule(context, q, k, v, g, beta, *options) -> tuple[torch.Tensor, torch.Tensor]:
    """The op chunk_gated_delta_rule on this rank's tokens, from the states that earlier parts leave.

    Args:
        context: the CPContext, or FLA's.
        q, k, v, g, beta, *options: all arguments of the op, in its order.

    Returns:
        o, final_state: as the op.
    """
    options = dict(zip(_OPTIONS, options, strict=True))
    context, q, k, v = _prepare_inputs(context, q, k, v)
    options["cu_seqlens"] = context.cu_seqlens
    tokens, tensors = (q, k, v, g, beta), [options[name] for name in _TENSORS]
    if context._world_size == 1 and not any(part.parts_before for part in context._parts):
        return ops.chunk_gated_delta_rule(*tokens, **options)
    refuse_transforms("chunk_gated_delta_rule with cp_context")
    state_dtype = options["state_dtype"]
    check_state_dtype("chunk_gated_delta_rule", state_dtype)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tokens, *tensors))):
        with torch.no_grad():
            return _forward(context, False, tokens, options)[:2]
    plain_options = {name: x for name, x in options.items() if name not in _TENSORS} | {"state_dtype": None}
    o, final_state, _ = _Differentiable.apply(context, plain_options, *tokens, *tensors)
    return o, final_state if state_dtype is None else final_state.to(state_dtype)


@torch.no_grad()
def chunk_gated_delta_rule_fwd(context, q, k, v, g, beta, *options) -> tuple[torch.Tensor | None, ...]:
    """The op chunk_gated_delta_rule_fwd on this rank's tokens, from the states that earlier parts leave.

    Begin and finish return no A. So the whole op runs from these states after the exchange.

    Args:
        context: the CPContext, or FLA's or the published FlashQLA's.
        q, k, v, g, beta, *options: all arguments of the op, in its order.

    Returns:
        g_cumsum, A, o, h, final_state: as the op.
        states: the initial states that it ran from; None if all are zero.
    """
    options = dict(zip(_LOW_LEVEL_OPTIONS, options, strict=True))
    context, q, k, v = _prepare_inputs(context, q, k, v)
    refuse_transforms("chunk_gated_delta_rule_fwd with cp_context")
    call = _Call(context, q, v, options["state_v_first"])
    has_later = [bool(part.parts_after) for part in context._parts]
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    arguments = options | {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": context.cu_seqlens}
    arguments["initial_state"] = call.with_zeros(options["initial_state"])
    maps = call.zeros(call.maps_shape)
    if any(has_later):
        mapped = [part.last for part in context._parts if part.parts_after]
        maps = spread(_begin_forward(**arguments | {"map_sequences": mapped})[0], has_later)
    gathered = wait(start_gather(maps, context), context)
    arguments["initial_state"] = call.with_states_before(arguments["initial_state"], gathered)
    return *_op_fwd(**arguments), arguments["initial_state"]


@torch.no_grad()
def chunk_gated_delta_rule_bwd(context, cp_cache, *args) -> tuple[torch.Tensor | None, ...]:
    """The op chunk_gated_delta_rule_bwd on this rank's tokens, with the gradients that later parts leave.

    Args:
        context: the CPContext, or FLA's or the published FlashQLA's.
        cp_cache: flash_qla.cp.published.CPCache, of the forward.
        *args: all arguments of the op, in its order. The gates come from cp_cache, and g, A and g_raw do not count.

    Returns:
        As the op.
    """
    arguments = dict(zip(_BACKWARD_ARGUMENTS, args, strict=True))
    context, arguments["q"], arguments["k"], arguments["v"] = _prepare_inputs(
        context, arguments["q"], arguments["k"], arguments["v"]
    )
    refuse_transforms("chunk_gated_delta_rule_bwd with cp_context")
    arguments["cu_seqlens"] = context.cu_seqlens
    tensors = arguments | cp_cache._asdict()
    options = {name: x for name, x in arguments.items() if name in _OPTIONS and name not in _TENSORS}
    dq, dk, dv, dg, db, dh0, dA_log, ddt_bias = _backward(context, options, *(tensors[x] for x in _BACKWARD_TENSORS))
    return dq, dk, dv, db, dg, None if arguments["initial_state"] is None else dh0, dA_log, ddt_bias
