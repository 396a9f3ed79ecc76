"""Loads libflash_qla.so and gives its ops, torch.ops.flash_qla.*, what only Python can: fake implementations (for
torch.compile and torch.export) and autograd. Schemas and kernels are in the library, which works without this module.

torch.autocast leaves the ops alone: q, k, v, g and beta are used in the dtypes in which they come.
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
torch.ops.load_library(_LIBRARY)


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


def _fake_forward(
    op, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, output_final_state, output_low_level, output_h
):
    """(g_cumsum, A, o, h, final_state), as allocate_forward in csrc/forward.cpp makes them."""
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
    if cu_seqlens is None:
        N, rows, chunks = B, B, (T + _CHUNK - 1) // _CHUNK
    else:
        torch._check(B == 1, lambda: f"flash_qla::{op}: q has batch size {B}, expected 1 with cu_seqlens")
        N = cu_seqlens.shape[0] - 1
        rows, chunks = 1, (T + (_CHUNK - 1) * N) // _CHUNK
    state_shape = (N, H_v, V, K) if state_v_first else (N, H_v, K, V)
    if initial_state is not None:
        symbols = "[N, H_v, V, K], state_v_first" if state_v_first else "[N, H_v, K, V]"
        _check_shape(op, "initial_state", initial_state, state_shape, symbols)

    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

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
        empty(output_final_state, state_shape, compute_dtype),
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
        output_final_state,
        output_low_level=True,
        output_h=output_h,
    )


def _register_missing_backward(op):
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"flash_qla::{op} has no backward pass yet. Call it under torch.no_grad() or torch.inference_mode(), "
            "or on tensors that do not require gradients."
        )

    torch.library.register_autograd(f"flash_qla::{op}", backward)


_register_missing_backward("chunk_gated_delta_rule")
_register_missing_backward("chunk_gated_delta_rule_fwd")
