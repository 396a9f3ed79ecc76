"""Checks of public functions that come before the dispatcher's, whose messages quote schemas and headers."""

import operator

import torch

from flash_qla._layout import CHUNK

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # only states in a pool


def check_offsets(function: str, cu_seqlens: object) -> None:
    """Refuse a list of offsets.

    Raises:
        TypeError: cu_seqlens is a list or a tuple.
    """
    if isinstance(cu_seqlens, (list, tuple)):
        raise TypeError(
            f"{function}: cu_seqlens is of type {type(cu_seqlens).__name__}; pass a tensor, int32 or int64, on the "
            "device of q, because the kernels read the offsets there and the host never does"
        )


def longest_sequence(cu_seqlens_cpu: object) -> int | None:
    """Tokens of the longest sequence, or None.

    None where reading the offsets would break a traced graph or wait for a device, and where they say no length.
    """
    is_readable = type(cu_seqlens_cpu) is torch.Tensor and cu_seqlens_cpu.device.type == "cpu"
    if not is_readable or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    offsets = cu_seqlens_cpu.tolist()
    if cu_seqlens_cpu.dim() != 1 or len(offsets) < 2:
        return None
    return max(0, *map(operator.sub, offsets[1:], offsets))


# Keywords of other implementations that change no result -> the values that have a meaning here; None: any value
IGNORED = {
    "chunk_indices": None,  # computed from cu_seqlens, on the device
    "chunk_size": (CHUNK,),
    "cu_seqlens_cpu": None,  # longest_sequence reads it
    "head_first": (False,),
    "transpose_state_layout": (False,),
}
_INSTEAD = {"transpose_state_layout": "; state_v_first=True says the same"}


def check_ignored(function: str, keywords: dict[str, object]) -> None:
    """Refuse keywords that are unknown or would change the result.

    Raises:
        TypeError: a keyword is unknown, or has another value than None and those that change nothing.
    """
    for name, value in keywords.items():
        if name not in IGNORED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        accepted = IGNORED[name]
        if value is None or accepted is None or any(value is x or (value == x) is True for x in accepted):
            continue
        came = repr(value) if isinstance(value, (bool, int, float, str)) else f"of type {type(value).__name__}"
        raise TypeError(f"{function}: {name} is {came}, expected {accepted[0]}{_INSTEAD.get(name, '')}")


def check_state_dtype(function: str, state_dtype: torch.dtype | None) -> None:
    """Refuse dtypes that no state can have; the stable ABI lacks some of them.

    Raises:
        RuntimeError: state_dtype is not a floating dtype of 16, 32 or 64 bits.
    """
    if isinstance(state_dtype, torch.dtype) and state_dtype not in FLOATING:
        raise RuntimeError(
            f"flash_qla::{function}: state_dtype is {state_dtype}, expected bfloat16, float16, float32 or float64"
        )
