"""Checks of public functions in addition to the dispatcher's, whose messages quote schemas and headers."""

import difflib
import inspect
import operator
import typing
from collections.abc import Callable, Iterable

import torch

from flash_qla._layout import CHUNK

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # only states in a pool


def explain(function: Callable, arguments: dict[str, object]) -> None:
    """Raise a clearer error after a call has failed, if an argument has a type that no call takes.

    Nothing is looked at before a call, because that would cost every call time.

    Args:
        function: a public function, whose annotations are the types that it takes.
        arguments: those of the call by name, and perhaps more.

    Raises:
        TypeError: a list or an array where a tensor is expected, a NestedTensor, or no dtype as a dtype.
    """
    for name, expected in typing.get_type_hints(function).items():
        if name not in arguments:
            continue
        x, types, subject = arguments[name], (expected, *typing.get_args(expected)), f"{function.__name__}: {name}"
        if isinstance(x, torch.Tensor) and x.is_nested:
            packed = f"the packed tokens, such as {name}.values()[None], and cu_seqlens, such as {name}.offsets()"
            advice = packed if "cu_seqlens" in arguments else "a tensor of all sequences"
            raise TypeError(f"{subject} is a NestedTensor; pass {advice}") from None
        if torch.Tensor in types and not isinstance(x, expected):
            got = "None" if x is None else f"of type {type(x).__name__}"
            raise TypeError(
                f"{subject} is {got}; pass a tensor on the device of the others, because the kernels read it there, "
                "and the host never does"
            ) from None
        if torch.dtype in types:
            check_state_dtype(function.__name__, x)
            if not isinstance(x, expected):
                raise TypeError(f"{subject} is {x!r}, expected a torch.dtype, such as torch.float16") from None


def unexpected_keyword(function: Callable, name: str, others: Iterable[str] = ()) -> TypeError:
    """Python's error, with the name of a parameter or of others that are taken, if it is nearly the same."""
    matches = difflib.get_close_matches(name, [*inspect.signature(function).parameters, *others], 1)
    question = f". Did you mean {matches[0]!r}?" if matches else ""
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{question}")


def longest_sequence(cu_seqlens_cpu: object) -> int | None:
    """Tokens of the longest sequence, or None.

    None where reading the offsets would break a traced graph or wait for a device, and where they give no length.
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
_HINTS = {"transpose_state_layout": "; state_v_first=True is the same"}


def check_ignored(function: Callable, keywords: dict[str, object]) -> None:
    """Refuse keywords that are unknown or would change the result.

    Raises:
        TypeError: a keyword is unknown, or has another value than None and those that change nothing.
    """
    for name, value in keywords.items():
        if name not in IGNORED:
            raise unexpected_keyword(function, name, IGNORED)
        accepted = IGNORED[name]
        if value is None or accepted is None or any(value is x or (value == x) is True for x in accepted):
            continue
        got = repr(value) if isinstance(value, (bool, int, float, str)) else f"of type {type(value).__name__}"
        raise TypeError(f"{function.__name__}: {name} is {got}, expected {accepted[0]}{_HINTS.get(name, '')}")


def check_state_dtype(function: str, state_dtype: torch.dtype | None) -> None:
    """Refuse dtypes that no state can have; the stable ABI lacks some of them.

    Raises:
        RuntimeError: state_dtype is not a floating dtype of 16, 32 or 64 bits.
    """
    if isinstance(state_dtype, torch.dtype) and state_dtype not in FLOATING:
        raise RuntimeError(
            f"flash_qla::{function}: state_dtype is {state_dtype}, expected bfloat16, float16, float32 or float64"
        )
