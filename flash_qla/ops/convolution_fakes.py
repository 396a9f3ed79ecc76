"""Fake implementations of the convolution's ops, with the checks and texts of csrc/convolution.cpp."""

import torch

from flash_qla.ops import schemas
from flash_qla.ops.fakes import (
    _INDICES,
    _check,
    _check_dtype,
    _check_floating,
    _check_rank,
    _check_shape,
    _check_tables,
    _fake_of,
)


def _check_dtype_like_x(call, name):
    if getattr(call, name) is not None:
        dtype = str(call.x.dtype).removeprefix("torch.")
        _check_dtype(call, name, (call.x.dtype, torch.float32), f"{dtype}, the dtype of x, or float32")


def _check_inputs(call):
    """Checks what all ops share. Returns N and W."""
    device = call.x.device
    for name, tensor in call._asdict().items():
        if isinstance(tensor, torch.Tensor):
            text = f"{name} is on {tensor.device}, expected {device}, the device of x"
            _check(call, tensor.device == device, lambda text=text: text)
    x, weight = call.x, call.weight
    _check_floating(call, "x")
    _check_rank(call, "x", 3, "[B, T, D]")
    N, _, D = x.shape
    _check(call, D >= 1, lambda: f"x has {D} channels, expected 1 to {2**31 - 1}")
    _check_dtype_like_x(call, "weight")
    shape = list(weight.shape)
    fits = len(shape) in (2, 3) and shape[0] == D and 2 <= shape[-1] <= 4 and (len(shape) == 2 or shape[1] == 1)
    _check(call, fits, lambda: f"weight has shape {shape}, expected [{D}, W] or [{D}, 1, W], W from 2 to 4")
    if call.bias is not None:
        _check_dtype_like_x(call, "bias")
        _check_shape(call, "bias", (D,), "[D]")
    if call.cu_seqlens is not None:
        _check_dtype(call, "cu_seqlens", _INDICES, None)
        _check_rank(call, "cu_seqlens", 1, "[N + 1]")
        offsets = call.cu_seqlens.shape[0]
        _check(call, offsets >= 1, lambda: "cu_seqlens has shape [0], expected at least one offset ([N + 1])")
        _check(call, N == 1, lambda: f"x has batch size {N}, expected 1 with cu_seqlens (sequences are packed along T)")
        N = offsets - 1
    return N, shape[-1]


def _check_windows(call, name, rows, W, symbols):
    """Checks windows, of N sequences or, as a pool, of any number of slots. Returns their columns."""
    windows = getattr(call, name)
    _check_dtype_like_x(call, name)
    _check_rank(call, name, 3, symbols)
    rows = windows.shape[0] if rows is None else rows
    D, columns = call.x.shape[2], windows.shape[2]
    _check(
        call,
        windows.shape[0] == rows and windows.shape[1] == D and columns in (W - 1, W),
        lambda: f"{name} has shape {list(windows.shape)}, expected [{rows}, {D}, {W - 1} or {W}] ({symbols})",
    )
    return columns


def _check_convolution(call):
    """Returns the shape and the dtype of final windows."""
    N, W = _check_inputs(call)
    if call.initial_state is None:
        return (N, call.x.shape[2], W - 1), call.x.dtype
    columns = _check_windows(call, "initial_state", N, W, "[N, D, W - 1] or [N, D, W]")
    return (N, call.x.shape[2], columns), call.initial_state.dtype


@_fake_of(schemas.convolution)
def _fake_convolution(call):
    shape, dtype = _check_convolution(call)
    x = call.x
    return x.new_empty(x.shape), x.new_empty(shape if call.output_final_state else (0,), dtype=dtype)


@_fake_of(schemas.convolution_backward)
def _fake_convolution_backward(call):
    shape, _ = _check_convolution(call)
    x, dtype = call.x, torch.float64 if call.x.dtype == torch.float64 else torch.float32
    _check_floating(call, "dy", "dht")
    _check_shape(call, "dy", x.shape, "[B, T, D], like x")
    if call.dht is not None:
        _check_shape(call, "dht", shape, "[N, D, columns], like the final state")
    return (
        x.new_empty(x.shape),
        x.new_empty(call.weight.shape, dtype=dtype),
        x.new_empty((0,) if call.bias is None else call.bias.shape, dtype=dtype),
        x.new_empty((0,) if call.initial_state is None else shape, dtype=dtype),
    )


@_fake_of(schemas.convolution_prefill)
def _fake_convolution_prefill(call):
    N, W = _check_inputs(call)
    columns = _check_windows(call, "state_pool", None, W, "[slots, D, W - 1] or [slots, D, W]")
    _check_tables(call, N)
    if call.checkpoints is not None:
        _check_dtype_like_x(call, "checkpoints")
        _check_shape(
            call, "checkpoints", (*call.checkpoints.shape[:1], call.x.shape[2], columns), "[total, D, columns]"
        )
    return call.x.new_empty(call.x.shape)
