"""Loads libflash_qla.so and gives its ops, torch.ops.flash_qla.*, what only Python can: fake implementations (for
torch.compile and torch.export), autograd and autocast. Schemas and kernels are in the library, which works without this
module.
"""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("libflash_qla.so")
_CHUNK = 64

if not _LIBRARY.exists():
    raise ImportError(
        f"{_LIBRARY} is missing: this flash_qla is a source tree in which nothing has been built, and if flash_qla "
        "is installed as well, this tree hides it. Run Python from another directory to use the installed package, "
        "or build this tree with `pip install -e .`."
    )
try:
    torch.ops.load_library(_LIBRARY)
except OSError as error:
    raise ImportError(
        f"{_LIBRARY} does not load, see above. It needs PyTorch 2.10 or newer, whose stable ABI it uses; this is "
        f"PyTorch {torch.__version__}."
    ) from error
_forward = torch.ops.flash_qla.chunk_gated_delta_rule.default
_forward_low_level = torch.ops.flash_qla.chunk_gated_delta_rule_fwd.default
_backward = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default
_library = torch.library.Library("flash_qla", "FRAGMENT")  # its registrations end with it
_ARGUMENTS = len(_forward_low_level._schema.arguments)


def _check_device(op, q, **tensors):
    # Beside a meta tensor the dispatcher takes the fake implementation, whatever the other tensors are.
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise RuntimeError(f"flash_qla::{op}: {name} is on {tensor.device}, expected {q.device}, the device of q")


def _check_shape(op, name, tensor, expected, symbols):
    """The library checks everything again on real tensors; this makes a wrong shape fail when a graph is traced."""
    torch._check(
        tensor.dim() == len(expected),
        lambda: f"flash_qla::{op}: {name} has {tensor.dim()} dimensions, expected {len(expected)} ({symbols})",
    )
    for size, wanted in zip(tensor.shape, expected, strict=True):
        torch._check(
            size == wanted,
            lambda: f"flash_qla::{op}: {name} has shape {list(tensor.shape)}, expected {list(expected)} ({symbols})",
        )


def _check_inputs(op, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first):
    """Returns the shape of a state and the dtype of g, beta, states and all arithmetic."""
    _check_device(op, q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    torch._check(
        q.dim() == 4 and v.dim() == 4,
        lambda: f"flash_qla::{op}: q and v have {q.dim()} and {v.dim()} dimensions, expected 4",
    )
    B, T, H_k, K = q.shape
    _, _, H_v, V = v.shape
    _check_shape(op, "k", k, (B, T, H_k, K), "[B, T, H_k, K], like q")
    _check_shape(op, "v", v, (B, T, H_v, V), "[B, T, H_v, V]")
    _check_shape(op, "g", g, (B, T, H_v), "[B, T, H_v]")
    _check_shape(op, "beta", beta, (B, T, H_v), "[B, T, H_v]")
    torch._check(
        H_v % H_k == 0, lambda: f"flash_qla::{op}: v has {H_v} heads, expected a multiple of the {H_k} of q and k"
    )
    if cu_seqlens is not None:
        torch._check(B == 1, lambda: f"flash_qla::{op}: q has batch size {B}, expected 1 with cu_seqlens")
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (N, H_v, V, K) if state_v_first else (N, H_v, K, V)
    if initial_state is not None:
        _check_shape(op, "initial_state", initial_state, state_shape, _state_symbols(state_v_first))
    return state_shape, torch.float64 if q.dtype == torch.float64 else torch.float32


def _state_symbols(state_v_first):
    return "[N, H_v, V, K], state_v_first" if state_v_first else "[N, H_v, K, V]"


def _fake_forward(
    op,
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    state_v_first,
    state_dtype,
    output_final_state,
    output_low_level,
    output_h,
):
    """(g_cumsum, A, o, h, final_state), as the library returns them, see allocate_forward in csrc/forward.cpp."""
    state_shape, compute_dtype = _check_inputs(op, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)
    torch._check(
        state_dtype in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64),
        lambda: f"flash_qla::{op}: state_dtype is {state_dtype}, expected bfloat16, float16, float32 or float64",
    )
    B, T, _, K = q.shape
    _, _, H_v, V = v.shape
    N = state_shape[0]
    rows, chunks = (B, (T + _CHUNK - 1) // _CHUNK) if cu_seqlens is None else (1, (T + (_CHUNK - 1) * N) // _CHUNK)

    def empty(wanted, shape, dtype):
        return q.new_empty(shape if wanted else (0,), dtype=dtype)

    h = empty(output_h, (rows, chunks, H_v, V, K), q.dtype)
    if output_h and not state_v_first:
        h = h.transpose(-2, -1)
    return (
        empty(output_low_level, (B, T, H_v), compute_dtype),
        empty(output_low_level, (B, T, H_v, _CHUNK), q.dtype),
        empty(True, (B, T, H_v, V), q.dtype),
        h,
        empty(output_final_state, state_shape, compute_dtype if state_dtype is None else state_dtype),
    )


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule")
def _(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    state_v_first=False,
    auto_cp=True,
    state_dtype=None,
):
    _, _, o, _, final_state = _fake_forward(
        "chunk_gated_delta_rule",
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        state_v_first,
        state_dtype,
        output_final_state,
        output_low_level=False,
        output_h=False,
    )
    return o, final_state


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule_fwd")
def _(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    output_final_state=True,
    output_h=False,
    auto_cp=True,
    state_v_first=False,
    use_qk_l2norm_in_kernel=False,
    state_dtype=None,
):
    return _fake_forward(
        "chunk_gated_delta_rule_fwd",
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        state_v_first,
        state_dtype,
        output_final_state,
        output_low_level=True,
        output_h=output_h,
    )


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule_bwd")
def _(
    q,
    k,
    v,
    g,
    beta,
    A,
    do,
    dht=None,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    state_v_first=False,
    auto_cp=True,
    use_qk_l2norm_in_kernel=False,
):
    op = "chunk_gated_delta_rule_bwd"
    state_shape, compute_dtype = _check_inputs(op, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)
    _check_device(op, q, A=A, do=do, dht=dht)
    _check_shape(op, "A", A, (*g.shape, _CHUNK), "[B, T, H_v, 64]")
    _check_shape(op, "do", do, v.shape, "[B, T, H_v, V], like v")
    if dht is not None:
        _check_shape(op, "dht", dht, state_shape, _state_symbols(state_v_first))
    return (
        q.new_empty(q.shape),
        q.new_empty(k.shape),
        q.new_empty(v.shape),
        q.new_empty(beta.shape, dtype=compute_dtype),
        q.new_empty(g.shape, dtype=compute_dtype),
        q.new_empty((0,) if initial_state is None else state_shape, dtype=compute_dtype),
    )


# Autograd. chunk_gated_delta_rule_fwd is what has a formula, because the backward needs its g_cumsum and A. Where
# gradients are wanted chunk_gated_delta_rule calls it; elsewhere it stays what it is and makes neither. The results of
# chunk_gated_delta_rule_bwd do not require gradients.


def _register_autograd(op, differentiable):
    """Makes op differentiable(keyset, *args) where gradients are wanted, and what it is below autograd elsewhere.

    Every call on tensors that are not inference tensors comes here, so this is kept short: as short as PyTorch's own
    fallback for ops without a formula. torch.library.register_autograd costs calls without gradients twice as much.
    """
    redispatch = op._handle.redispatch_boxed  # what op.redispatch calls

    def kernel(keyset, *args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return differentiable(keyset, *args)
        return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


def _forward_for_backward(
    _keyset,
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    state_v_first=False,
    auto_cp=True,
    state_dtype=None,
):
    _, _, o, _, final_state = _forward_low_level(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        False,
        auto_cp,
        state_v_first,
        use_qk_l2norm_in_kernel,
        state_dtype,
    )
    return o, final_state


class _Differentiable(torch.autograd.Function):
    """chunk_gated_delta_rule_fwd with its formula."""

    @staticmethod
    def forward(ctx, keyset, *args):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _forward_low_level.redispatch(keyset & torch._C._after_autograd_keyset, *args)
            _save_for_backward(ctx, outputs, *args)
        return outputs

    @staticmethod
    def backward(ctx, dg_cumsum, dA, do, dh, dht):
        return None, *_differentiate(ctx, do, dht)


def _save_for_backward(
    ctx,
    outputs,
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    output_final_state=True,
    output_h=False,
    auto_cp=True,
    state_v_first=False,
    use_qk_l2norm_in_kernel=False,
    state_dtype=None,
):
    g_cumsum, A, _, h, final_state = outputs
    ctx.save_for_backward(q, k, v, g_cumsum, beta, A, initial_state, cu_seqlens)
    ctx.g_dtype = g.dtype
    ctx.scale = scale
    ctx.flags = (state_v_first, auto_cp, use_qk_l2norm_in_kernel)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(g_cumsum, A, h, *(() if output_final_state else (final_state,)))


class _OnceDifferentiable(torch.autograd.Function):
    """chunk_gated_delta_rule_bwd for backward(create_graph=True): the error comes when the results are differentiated,
    not when they are made, as the graph may be wanted for the sake of other parts of a model."""

    @staticmethod
    def forward(ctx, *args):
        return _backward(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flash_qla: the gradients of chunk_gated_delta_rule cannot be differentiated again (double backward)."
        )


def _differentiate(ctx, do, dht):
    """The gradients of chunk_gated_delta_rule_fwd's arguments. The dispatcher leaves out arguments that have their
    defaults, at the end; autograd takes more gradients than arguments came if they are None."""
    if do is None and dht is None:
        return (None,) * _ARGUMENTS
    q, k, v, g_cumsum, beta, A, initial_state, cu_seqlens = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    state_v_first, auto_cp, use_qk_l2norm_in_kernel = ctx.flags
    backward = _OnceDifferentiable.apply if torch.is_grad_enabled() else _backward
    dq, dk, dv, db, dg, dh0 = backward(
        q,
        k,
        v,
        g_cumsum,
        beta,
        A,
        do,
        dht,
        ctx.scale,
        initial_state,
        cu_seqlens,
        state_v_first,
        auto_cp,
        use_qk_l2norm_in_kernel,
    )
    _, *needed = ctx.needs_input_grad  # the first argument of _Differentiable is not the op's
    return (
        dq if needed[0] else None,
        dk if needed[1] else None,
        dv if needed[2] else None,
        dg.to(ctx.g_dtype) if needed[3] else None,
        db.to(beta.dtype) if needed[4] else None,
        None,
        dh0.to(initial_state.dtype) if initial_state is not None and needed[6] else None,
        *(None,) * (_ARGUMENTS - 7),
    )


_register_autograd(_forward, _forward_for_backward)
_register_autograd(_forward_low_level, _Differentiable.apply)
torch.library.impl("flash_qla::chunk_gated_delta_rule_bwd", "Autograd", torch.library.fallthrough_kernel)


# Autocast: q, k and v come to the autocast dtype, like the factors of a matrix product. The ops convert the rest to
# their compute dtype.


def _register_autocast(op, device_type, dispatch_key):
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def cast(x, dtype):
        # float64 is left alone, as by PyTorch's own ops.
        wanted = x is not None and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if wanted else x

    @torch.library.impl(op._schema.name, dispatch_key)
    def _(q, k, v, *args):
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(cast(q, dtype), cast(k, dtype), cast(v, dtype), *args)


for _op in (_forward, _forward_low_level):
    _register_autocast(_op, "cuda", "AutocastCUDA")
    _register_autocast(_op, "cpu", "AutocastCPU")
