"""Checks of public functions that come before the dispatcher's, whose messages quote schemas and headers."""

import torch

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_offsets(function: str, cu_seqlens: object) -> None:
    """Refuse a list of offsets.

    Raises:
        TypeError: cu_seqlens is a list or a tuple.
    """
    if isinstance(cu_seqlens, (list, tuple)):
        raise TypeError(
            f"{function}: cu_seqlens is of type {type(cu_seqlens).__name__}, expected a tensor, int32 or int64, on the "
            "device of q: the kernels read the offsets there, and the host never does"
        )


def check_state_dtype(function: str, state_dtype: torch.dtype | None) -> None:
    """Refuse dtypes that no state can have; the stable ABI lacks some of them.

    Raises:
        RuntimeError: state_dtype is not a floating dtype of 16, 32 or 64 bits.
    """
    if isinstance(state_dtype, torch.dtype) and state_dtype not in FLOATING:
        raise RuntimeError(
            f"flash_qla::{function}: state_dtype is {state_dtype}, expected bfloat16, float16, float32 or float64"
        )
