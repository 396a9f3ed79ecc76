"""Gives the library's ops, torch.ops.flash_qla.*, what only Python can: fake implementations (for torch.compile and
torch.export), autograd and autocast. Schemas and kernels are in the library, which works without this module. Arguments
are known here by the names that the schemas give them.
"""

import collections
import operator

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_qla import _binary  # first: it says what is missing in a tree that has not been built
from flash_qla._layout import CHUNK, HEAD_DIM_STEP, MOST_VALUE_DIM

_forward = torch.ops.flash_qla.chunk_gated_delta_rule.default
_forward_low_level = torch.ops.flash_qla.chunk_gated_delta_rule_fwd.default
_backward = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default
_forward_begin = torch.ops.flash_qla.gated_delta_rule_forward_begin.default
_forward_finish = torch.ops.flash_qla.gated_delta_rule_forward_finish.default
_backward_begin = torch.ops.flash_qla.gated_delta_rule_backward_begin.default
_backward_replay = torch.ops.flash_qla.gated_delta_rule_backward_replay.default
_backward_finish = torch.ops.flash_qla.gated_delta_rule_backward_finish.default
_prefill = torch.ops.flash_qla.prefill_gated_delta_rule.default
_decode = torch.ops.flash_qla.decode_gated_delta_rule.default
_decode_packed = torch.ops.flash_qla.decode_gated_delta_rule_packed.default
_library = torch.library.Library("flash_qla", "FRAGMENT")  # its registrations end with it


def _call_of(op):
    """A named tuple, named like the op, of its arguments and their defaults. The dispatcher leaves out arguments that
    have their defaults, at the end."""
    arguments = op._schema.arguments
    defaults = [x.default_value for x in arguments if x.has_default_value()]
    return collections.namedtuple(op._opname, [x.name for x in arguments], defaults=defaults)


_ForwardCall, _LowLevelCall, _BackwardCall = map(_call_of, (_forward, _forward_low_level, _backward))
_ForwardBeginCall, _ForwardFinishCall = map(_call_of, (_forward_begin, _forward_finish))
_BackwardBeginCall, _BackwardReplayCall = map(_call_of, (_backward_begin, _backward_replay))
_BackwardFinishCall = _call_of(_backward_finish)
_PrefillCall, _DecodeCall, _DecodePackedCall = map(_call_of, (_prefill, _decode, _decode_packed))


def check_offsets(function, cu_seqlens):
    """Says of a list of offsets, to callers of a public function, what the dispatcher says by quoting a schema."""
    if isinstance(cu_seqlens, (list, tuple)):
        raise TypeError(
            f"{function}: cu_seqlens is of type {type(cu_seqlens).__name__}, expected a tensor, int32 or int64, on the "
            "device of q: the kernels read the offsets there, and the host never does"
        )


def check_state_dtype(function, state_dtype):
    """Refuses dtypes before the dispatcher does, which for those that the stable ABI lacks quotes a header."""
    if isinstance(state_dtype, torch.dtype) and state_dtype not in _FLOATING:
        raise RuntimeError(
            f"flash_qla::{function}: state_dtype is {state_dtype}, expected bfloat16, float16, float32 or float64"
        )


# Fake implementations. The library checks everything again on real tensors; the checks here make wrong arguments fail
# when a graph is traced, with the texts of csrc/tokens.cpp and what is beside it.


def _register_fake(op, call_type, fake):
    torch.library.register_fake(op._schema.name, lambda *args, **kwargs: fake(call_type(*args, **kwargs)))


def _check(call, condition, message):
    torch._check(condition, lambda: f"flash_qla::{type(call).__name__}: {message()}")


_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)


def _check_dtype(call, name, expected, text):
    dtype = getattr(call, name).dtype
    names = [str(x).removeprefix("torch.") for x in (dtype, *expected)]
    _check(call, dtype in expected, lambda: f"{name} has dtype {names[0]}, expected {text or ' or '.join(names[1:])}")


def _check_floating(call, *names):
    for name in names:
        if getattr(call, name) is not None:
            _check_dtype(call, name, _FLOATING, "bfloat16, float16, float32 or float64")


def _check_rank(call, name, rank, symbols):
    x = getattr(call, name)
    _check(
        call,
        x.dim() == rank,
        lambda: f"{name} has {x.dim()} dimensions (shape {list(x.shape)}), expected {rank} ({symbols})",
    )


def _check_shape(call, name, expected, symbols):
    tensor = getattr(call, name)
    _check(
        call,
        tensor.dim() == len(expected),
        lambda: f"{name} has shape {list(tensor.shape)}, expected {list(expected)} ({symbols})",
    )
    for size, wanted in zip(tensor.shape, expected, strict=True):
        _check(
            call,
            size == wanted,
            lambda: f"{name} has shape {list(tensor.shape)}, expected {list(expected)} ({symbols})",
        )


def _check_device(call, name):
    device, expected = getattr(call, name).device, call.q.device
    _check(call, device == expected, lambda: f"{name} is on {device}, expected {expected}, the device of q")


def _check_tokens(call, *gates):
    """Checks devices, dtypes and shapes of tokens, `gates` being the arguments [B, T, H_v]. Returns the sequences."""
    for name, x in call._asdict().items():
        if isinstance(x, torch.Tensor):
            # Beside a meta tensor the dispatcher takes the fake implementation, whatever the other tensors are.
            _check_device(call, name)
    q, v = call.q, call.v
    _check_floating(call, "q")
    for name in ("k", "v"):
        _check_dtype(call, name, (q.dtype,), f"{str(q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_rank(call, "q", 4, "[B, T, H_k, K]")
    _check_rank(call, "v", 4, "[B, T, H_v, V]")
    B, T, H_k, K = q.shape
    _, _, H_v, V = v.shape
    _check(
        call,
        H_k >= 1 and K >= 1,
        lambda: f"q has shape {list(q.shape)}, expected at least one head and one head dimension ([B, T, H_k, K])",
    )
    _check(
        call,
        H_v >= 1 and H_v % H_k == 0,
        lambda: f"v has {H_v} heads, expected a positive multiple of the {H_k} heads of q and k",
    )
    _check_shape(call, "k", (B, T, H_k, K), "[B, T, H_k, K], like q")
    _check_shape(call, "v", (B, T, H_v, V), "[B, T, H_v, V]")
    for name in gates:
        _check_floating(call, name)
        _check_shape(call, name, (B, T, H_v), "[B, T, H_v]")
    if call.cu_seqlens is None:
        return B
    _check_dtype(call, "cu_seqlens", _INDICES, None)
    _check_rank(call, "cu_seqlens", 1, "[N + 1]")
    offsets = call.cu_seqlens.shape[0]
    _check(call, offsets >= 1, lambda: "cu_seqlens has shape [0], expected at least one offset ([N + 1])")
    _check(call, B == 1, lambda: f"q has batch size {B}, expected 1 with cu_seqlens (sequences are packed along T)")
    return offsets - 1


def _check_inputs(call, *states):
    """Checks what the ops of chunks have in common, and that the named arguments, where given, have the shape of a
    state. Returns that shape and the dtype of ready g and beta, of states and of all arithmetic."""
    N = _check_tokens(call, "g", "beta")
    q, (_, _, H_v, V) = call.q, call.v.shape
    K = q.shape[-1]
    if call.state_v_first:
        state_shape, symbols = (N, H_v, V, K), "[N, H_v, V, K], state_v_first"
    else:
        state_shape, symbols = (N, H_v, K, V), "[N, H_v, K, V]"
    for name in states:
        if getattr(call, name) is not None:
            _check_floating(call, name)
            _check_shape(call, name, state_shape, symbols)
    _check_activations(call, H_v)
    return state_shape, torch.float64 if q.dtype == torch.float64 else torch.float32


def _without_gate(name):
    return f"{name} is a tensor, expected None without use_gate_in_kernel"


def _check_with_gate(call, name, expected):
    """The argument is there if and only if the gate is inside."""
    given = getattr(call, name) is not None
    _check(call, call.use_gate_in_kernel or not given, lambda: _without_gate(name))
    missing = f"{name} is None, expected {expected} with use_gate_in_kernel"
    _check(call, given or not call.use_gate_in_kernel, lambda: missing)


def _check_activations(call, H_v):
    _check_with_gate(call, "A_log", "a tensor [H_v]")
    for name in ("A_log", "dt_bias"):
        if getattr(call, name) is not None:
            _check(call, call.use_gate_in_kernel, lambda name=name: _without_gate(name))
            _check_floating(call, name)
            _check_shape(call, name, (H_v,), "[H_v]")
    _check(
        call,
        call.use_beta_sigmoid_in_kernel or not call.allow_neg_eigval,
        lambda: "allow_neg_eigval is expected with use_beta_sigmoid_in_kernel only",
    )


def _fake_results(call, output_low_level, output_h):
    """(g_cumsum, A, o, h, final_state), as the library returns them, see allocate_forward in csrc/passes.cpp."""
    state_shape, compute_dtype = _check_inputs(call, "initial_state")
    check_state_dtype(type(call).__name__, call.state_dtype)
    q = call.q
    B, T, _, K = q.shape
    N, (_, _, H_v, V) = state_shape[0], call.v.shape
    if call.cu_seqlens is None:
        rows, chunks = B, (T + CHUNK - 1) // CHUNK
    else:
        rows, chunks = 1, (T + (CHUNK - 1) * N) // CHUNK

    def empty(wanted, shape, dtype):
        return q.new_empty(shape if wanted else (0,), dtype=dtype)

    h = empty(output_h, (rows, chunks, H_v, V, K), q.dtype)
    return (
        empty(output_low_level, (B, T, H_v), compute_dtype),
        empty(output_low_level, (B, T, H_v, CHUNK), q.dtype),
        empty(True, (B, T, H_v, V), q.dtype),
        h.transpose(-2, -1) if output_h and not call.state_v_first else h,
        empty(call.output_final_state, state_shape, compute_dtype if call.state_dtype is None else call.state_dtype),
    )


def _fake_forward(call):
    _, _, o, _, final_state = _fake_results(call, output_low_level=False, output_h=False)
    return o, final_state


def _fake_low_level(call):
    return _fake_results(call, output_low_level=True, output_h=call.output_h)


def _fake_backward(call):
    state_shape, compute_dtype = _check_inputs(call, "initial_state", "dht")
    _check_dtype(call, "A", (call.q.dtype,), f"{str(call.q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_shape(call, "A", (*call.g.shape, CHUNK), f"[B, T, H_v, {CHUNK}]")
    return *_fake_gradients(call, compute_dtype), *_fake_sums(call, state_shape, compute_dtype)


def _fake_gradients(call, compute_dtype):
    """Of what has tokens."""
    _check_floating(call, "do")
    _check_shape(call, "do", call.v.shape, "[B, T, H_v, V], like v")
    with_gate, q = call.use_gate_in_kernel, call.q
    _check_with_gate(call, "g_raw", "the g of the forward, a tensor [B, T, H_v],")
    if with_gate:
        _check_floating(call, "g_raw")
        _check_shape(call, "g_raw", call.g.shape, "[B, T, H_v]")
    return (
        q.new_empty(q.shape),
        q.new_empty(call.k.shape),
        q.new_empty(call.v.shape),
        q.new_empty(call.beta.shape, dtype=call.beta.dtype if call.use_beta_sigmoid_in_kernel else compute_dtype),
        q.new_empty(call.g.shape, dtype=call.g_raw.dtype if with_gate else compute_dtype),
    )


def _fake_sums(call, state_shape, compute_dtype):
    q, H_v = call.q, call.v.shape[2]
    return (
        q.new_empty((0,) if call.initial_state is None else state_shape, dtype=compute_dtype),
        q.new_empty((0,) if call.A_log is None else (H_v,), dtype=compute_dtype),
        q.new_empty((0,) if call.dt_bias is None else (H_v,), dtype=compute_dtype),
    )


def _check_head_dim(call, name, symbol, dim, most):
    _check(
        call,
        0 < dim <= most and dim % HEAD_DIM_STEP == 0,
        lambda: (
            f"{name} has head dimension {symbol} = {dim}, expected a multiple of {HEAD_DIM_STEP} up to {most} on a GPU"
        ),
    )


def _fake_begun(call, N, compute_dtype, workspace_bytes, **of_pass):
    """Maps and workspace: see csrc/halves.h. The dispatch of a GPU's kernels says how much workspace they take."""
    q, (B, T, H_v, V) = call.q, call.v.shape
    H_k, K = q.shape[2:]
    maps = q.new_empty((len(call.map_sequences), H_v, V + K, K), dtype=compute_dtype)
    size = 0
    if any(isinstance(x, torch.SymInt) for x in (B, T, N, H_k, H_v, K, V)):
        size = torch.library.get_ctx().new_dynamic_size()  # the dispatch would fix all sizes that it is asked about
    elif q.device.type == "cuda" and B * T > 0 and N > 0:
        _check_head_dim(call, "q", "K", K, _binary.MOST_KEY_DIM)
        _check_head_dim(call, "v", "V", V, MOST_VALUE_DIM)
        sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count
        shape = {"B": B, "T": T, "N": N, "H_k": H_k, "H_v": H_v, "K": K, "V": V, "sm_count": sm_count, **of_pass}
        flags = {"varlen": call.cu_seqlens is not None, "auto_cp": call.auto_cp}
        size = workspace_bytes(**shape, **flags, use_qk_l2norm=call.use_qk_l2norm_in_kernel)
    return maps, q.new_empty((size,), dtype=torch.uint8)


def _fake_forward_begin(call):
    state_shape, dtype = _check_inputs(call, "initial_state")
    return (
        *_fake_begun(call, state_shape[0], dtype, _binary.forward_workspace_bytes),
        call.q.new_empty(call.v.shape),
        call.q.new_empty(call.g.shape if call.output_g_cumsum else (0,), dtype=dtype),
    )


def _fake_forward_finish(call):
    state_shape, dtype = _check_inputs(call, "initial_state")
    dtype = dtype if call.state_dtype is None else call.state_dtype
    return call.q.new_empty(state_shape if call.output_final_state else (0,), dtype=dtype)


def _fake_backward_begin(call):
    state_shape, dtype = _check_inputs(call, "dht")
    activations = call.use_gate_in_kernel or call.use_beta_sigmoid_in_kernel
    begun = _fake_begun(call, state_shape[0], dtype, _binary.backward_workspace_bytes, activations=activations)
    return *begun, *_fake_gradients(call, dtype)


def _fake_backward_replay(call):
    _check_inputs(call, "initial_state")


def _fake_backward_finish(call):
    return _fake_sums(call, *_check_inputs(call, "initial_state", "dht"))


def _check_pool(call, N, states, tables):
    """Checks states [.., H_v, V, K] and tables of indices that have a row a sequence, by the symbols of their
    dimensions."""
    _, _, H_v, V = call.v.shape
    for name, symbols in states.items():
        x = getattr(call, name)
        if x is not None:
            _check_floating(call, name)
            _check_rank(call, name, len(symbols.split()), symbols)
            _check_shape(call, name, (*x.shape[:-3], H_v, V, call.q.shape[-1]), symbols)
    for name, symbols in tables.items():
        table = getattr(call, name)
        if table is not None:
            _check_dtype(call, name, _INDICES, None)
            _check_rank(call, name, len(symbols.split()), symbols)
            _check(
                call,
                table.shape[0] == N,
                lambda name=name, rows=table.shape[0], symbols=symbols: (
                    f"{name} has {rows} rows, expected {N}, the number of sequences ({symbols})"
                ),
            )


def _check_checkpoints(call):
    every = call.checkpoint_every
    _check(
        call,
        every >= 0 and every % CHUNK == 0,
        lambda: f"checkpoint_every is {every}, expected a multiple of {CHUNK}",
    )
    given = (call.checkpoint_indices is not None) + (call.checkpoints is not None)
    _check(
        call,
        given == (every > 0),
        lambda: (
            f"checkpoint_every is {every} with {given} of checkpoint_indices and checkpoints, expected one of them"
            if every
            else "checkpoint_indices or checkpoints is a tensor, expected None without checkpoint_every"
        ),
    )


def _fake_prefill(call):
    N = _check_tokens(call, "g", "beta")
    _check_activations(call, call.v.shape[2])
    states = {"state_pool": "[slots, H_v, V, K]", "checkpoints": "[total, H_v, V, K]"}
    _check_pool(call, N, states, {"state_indices": "[N]", "checkpoint_indices": "[N, blocks]"})
    if call.has_initial_state is not None:
        _check_dtype(call, "has_initial_state", (torch.bool,), None)
        _check_shape(call, "has_initial_state", (N,), "[N]")
    _check_checkpoints(call)
    return call.q.new_empty(call.v.shape)


def _fake_decode(call):
    N = _check_tokens(call, "a", "b")
    for name in ("A_log", "dt_bias"):
        if getattr(call, name) is not None:
            _check_floating(call, name)
            _check_shape(call, name, call.v.shape[2:3], "[H_v]")
    states = {"state_pool": "[slots, H_v, V, K]", "intermediate_states": "[rows, steps, H_v, V, K]"}
    rank = call.state_indices.dim()
    _check(call, rank in (1, 2), lambda: f"state_indices has {rank} dimensions, expected 1 or 2 ([N] or [N, S])")
    tables = {"state_indices": "[N]" if rank == 1 else "[N, S]", "num_accepted_tokens": "[N]"}
    tables |= {"write_indices": "[N, S]", "intermediate_indices": "[N]", "parents": "[N, S]"}
    _check_pool(call, N, states, tables)
    if rank == 2:
        _check(call, call.state_indices.shape[1] >= 1, lambda: "state_indices has no columns, expected at least one")
    _check(
        call,
        rank == 2 or call.num_accepted_tokens is None,
        lambda: "num_accepted_tokens is a tensor, expected None unless state_indices is [N, S]",
    )
    _check(
        call,
        call.intermediate_states is not None or call.intermediate_indices is None,
        lambda: "intermediate_indices is a tensor, expected None without intermediate_states",
    )
    _check(
        call,
        call.parents is None or call.write_indices is not None or not call.update_state,
        lambda: "update_state is True, expected False with parents: a tree of tokens has no last state",
    )
    return call.q.new_empty(call.v.shape)


def _fake_decode_packed(call):
    """By what the library makes of mixed_qkv, see make_packed_decode_call in csrc/decode.cpp."""
    x, a, b = call.mixed_qkv, call.a, call.b
    _check(call, x.dim() in (2, 3), lambda: f"mixed_qkv has {x.dim()} dimensions, expected 2 or 3")
    _check(call, call.state_pool.dim() == 4, lambda: f"state_pool has {call.state_pool.dim()} dimensions, expected 4")
    if x.dim() == 2:
        x, a, b = (y.unsqueeze(1) for y in (x, a, b))
    _, H_v, V, K = call.state_pool.shape
    keys = x.shape[-1] - H_v * V
    _check(call, keys > 0 and keys % (2 * K) == 0, lambda: "mixed_qkv is expected to have 2 H_k K + H_v V channels")
    q, k, v = x.split([keys // 2, keys // 2, H_v * V], -1)
    fields = {name: y for name, y in call._asdict().items() if name != "mixed_qkv"} | {"a": a, "b": b}
    return _fake_decode(
        _DecodeCall(q=q.unflatten(-1, (-1, K)), k=k.unflatten(-1, (-1, K)), v=v.unflatten(-1, (H_v, V)), **fields)
    )


_register_fake(_forward, _ForwardCall, _fake_forward)
_register_fake(_prefill, _PrefillCall, _fake_prefill)
_register_fake(_decode, _DecodeCall, _fake_decode)
_register_fake(_decode_packed, _DecodePackedCall, _fake_decode_packed)
_register_fake(_forward_low_level, _LowLevelCall, _fake_low_level)
_register_fake(_backward, _BackwardCall, _fake_backward)
_register_fake(_forward_begin, _ForwardBeginCall, _fake_forward_begin)
_register_fake(_forward_finish, _ForwardFinishCall, _fake_forward_finish)
_register_fake(_backward_begin, _BackwardBeginCall, _fake_backward_begin)
_register_fake(_backward_replay, _BackwardReplayCall, _fake_backward_replay)
_register_fake(_backward_finish, _BackwardFinishCall, _fake_backward_finish)


# Autograd. chunk_gated_delta_rule_fwd is what has a formula, because the backward needs its g_cumsum and A. Where
# gradients are wanted chunk_gated_delta_rule calls it; elsewhere it stays what it is and makes neither. The results of
# chunk_gated_delta_rule_bwd do not require gradients, nor do those of the halves, of which cp.py makes one that does.


def _register_autograd(op, differentiable):
    """Makes op differentiable(keyset, *args) where gradients are wanted or forward-mode AD is on, and what it is below
    autograd elsewhere.

    Every call on tensors that are not inference tensors comes here, so this is kept short: as short as PyTorch's own
    fallback for ops without a formula. torch.library.register_autograd costs calls without gradients twice as much.
    """
    redispatch = op._handle.redispatch_boxed  # what op.redispatch calls

    def kernel(keyset, *args):
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or forward_ad._current_level >= 0:
            return differentiable(keyset, *args)
        return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


# What the backward has in common with the forward: tensors, which autograd keeps, and options. g is another there; the
# forward's, where the gate is inside, is g_raw.
_COMMON = [x for x in _backward._schema.arguments if x.name in _LowLevelCall._fields and x.name != "g"]
_TENSORS = [x.name for x in _COMMON if "Tensor" in str(x.type)]
_OPTIONS = [x.name for x in _COMMON if x.name not in _TENSORS]
_tensors_of, _options_of = operator.attrgetter(*_TENSORS), operator.attrgetter(*_OPTIONS)
_DIFFERENTIATED = ("q", "k", "v", "beta", "g", "initial_state", "A_log", "dt_bias")  # in the order of its results
_differentiated_of = operator.attrgetter(*_DIFFERENTIATED)
_backward_arguments_of = operator.itemgetter(*_BackwardCall._fields)


def _apply(function, *args):
    """function.apply, at the level of torch.func's transforms where it is called, because the dispatcher calls it once
    at each. What Function has for transforms goes through the levels by itself."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


class _Differentiable(torch.autograd.Function):
    """chunk_gated_delta_rule_fwd with its formula, of a call and, as autograd looks for them, of the tensors that have
    gradients. Autograd converts gradients to the dtypes of these."""

    @staticmethod
    def forward(ctx, keyset, call, *differentiated):
        # Function switches both modes off, but the levels outside, if there are any, have them too.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            outputs = _forward_low_level.redispatch(keyset & torch._C._after_autograd_keyset, *call)
        g_cumsum, A, _, h, final_state = outputs
        g_raw = call.g if call.use_gate_in_kernel else None
        ctx.save_for_backward(g_cumsum, A, g_raw, *_tensors_of(call))
        ctx.options = _options_of(call)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(g_cumsum, A, h, *(() if call.output_final_state else (final_state,)))
        return outputs

    @staticmethod
    def backward(ctx, dg_cumsum, dA, do, dh, dht):
        if do is None and dht is None:
            return (None,) * len(ctx.needs_input_grad)
        names = ("g", "A", "g_raw", *_TENSORS, *_OPTIONS)
        call = dict(zip(names, (*ctx.saved_tensors, *ctx.options), strict=True))
        call["do"] = torch.zeros_like(call["v"]) if do is None else do
        call["dht"] = dht
        gradients = only_once(_backward, *_backward_arguments_of(call))
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *[x if is_needed else None for x, is_needed in needed])

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flash_qla: chunk_gated_delta_rule has no forward-mode derivative (torch.func.jvp, jacfwd and hessian, "
            "torch.autograd.forward_ad), only gradients (torch.autograd.grad, torch.func.grad, vjp, jacrev)."
        )


def _low_level_for_backward(keyset, *args):
    call = _LowLevelCall(*args)
    return _apply(_Differentiable, keyset, call, *_differentiated_of(call))


def _forward_for_backward(keyset, *args):
    call = _LowLevelCall(**_ForwardCall(*args)._asdict())
    _, _, o, _, final_state = _apply(_Differentiable, keyset, call, *_differentiated_of(call))
    return o, final_state


def only_once(backward, *args):
    """The gradients backward(*args). With backward(create_graph=True) the error comes when they are differentiated, not
    when they are made, as the graph may be wanted for the sake of other parts of a model."""
    return _OnceDifferentiable.apply(backward, *args) if torch.is_grad_enabled() else backward(*args)


class _OnceDifferentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(backward, *args):
        return backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flash_qla: the gradients of chunk_gated_delta_rule cannot be differentiated again (double backward)."
        )

    jvp = backward


_register_autograd(_forward, _forward_for_backward)
_register_autograd(_forward_low_level, _low_level_for_backward)


# The other ops have no derivatives. As with PyTorch's own, results depend on the inputs that require gradients, and the
# backward raises; so does forward-mode AD, which would take the results for constants.


class _Underivable(torch.autograd.Function):
    """Of the results of an op, which are handed on, and the tensors that require gradients."""

    @staticmethod
    def forward(ctx, name, results, *differentiated):
        ctx.name = name
        return results

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"derivative for flash_qla::{ctx.name} is not implemented")


class _Written(_Underivable):
    """Of a tensor that the op has written."""

    @staticmethod
    def forward(ctx, name, written, *differentiated):
        ctx.name = name
        ctx.mark_dirty(written)
        return written


def _written_by(op):
    """A function of the op's arguments that gives those that it writes, if they are there."""
    arguments = op._schema.arguments
    places = [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
    return lambda args: [args[i] for i in places if i < len(args) and args[i] is not None]


def _increment_versions(tensors):
    """So that autograd sees that a saved tensor has changed. Inference tensors have no version."""
    for x in tensors:
        if not x.is_inference():
            torch._C._increment_version([x])


def _register_without_derivative(op):
    redispatch = op._handle.redispatch_boxed
    written_by = _written_by(op)

    def with_gradients(keyset, args):
        written = written_by(args)
        if any(y is not None and y.is_leaf and y.requires_grad for x in written for y in (x, x._base)):
            raise RuntimeError(
                f"flash_qla::{op._opname}: a leaf Variable that requires grad is being used in an in-place operation."
            )
        differentiated = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch._C._AutoDispatchBelowAutograd():
            results = redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        for x in written:
            _apply(_Written, op._opname, x, *differentiated)  # a later version, too
        return results if results is None else _apply(_Underivable, op._opname, results, *differentiated)

    def autograd(keyset, *args):
        if forward_ad._current_level >= 0:
            for x in args:
                if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise NotImplementedError(f"flash_qla: {op._opname} has no forward-mode derivative.")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return with_gradients(keyset, args)
        return in_place(keyset, *args)

    def in_place(keyset, *args):
        results = redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        _increment_versions(written_by(args))
        return results

    _library.impl(op, autograd, "Autograd", with_keyset=True)
    _library.impl(op, in_place, "ADInplaceOrView", with_keyset=True)  # in inference mode nothing comes to autograd


_HALVES = (_forward_begin, _forward_finish, _backward_begin, _backward_replay, _backward_finish)
for _op in (_backward, *_HALVES, _prefill, _decode, _decode_packed):
    _register_without_derivative(_op)


# Autocast: q, k and v come to the autocast dtype, like the factors of a matrix product. The ops convert the rest to
# their compute dtype. The low-level backward goes by A, whose dtype the forward's autocast has chosen.


def _register_autocast(op, device_type, dispatch_key, cast_arguments, dtype_of=None):
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def cast(x, dtype):
        # float64 is left alone, as by PyTorch's own ops.
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    @torch.library.impl(op._schema.name, dispatch_key)
    def _(*args):
        dtype = torch.get_autocast_dtype(device_type) if dtype_of is None else args[dtype_of].dtype
        args = (*(cast(x, dtype) for x in args[:cast_arguments]), *args[cast_arguments:])
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*args)


for _device_type, _dispatch_key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
    for _op in (_forward, _forward_low_level, _prefill, _decode):
        _register_autocast(_op, _device_type, _dispatch_key, 3)
    _register_autocast(_decode_packed, _device_type, _dispatch_key, 1)
    _register_autocast(_backward, _device_type, _dispatch_key, 3, dtype_of=_BackwardCall._fields.index("A"))
