"""Loads libflash_qla.so, the ops and their kernels, and its C functions (csrc/inspect.h) for the ops' Python code.

flash_qla._C answers more questions, but is built for one Python only. So no op depends on it.
"""

import contextlib
import ctypes
import importlib
from pathlib import Path

import torch

_PATH = Path(__file__).with_name("libflash_qla.so")

if not _PATH.exists():
    raise ImportError(
        f"{_PATH} is missing: this flash_qla is a source tree in which nothing has been built, and if flash_qla "
        "is installed as well, this tree hides it. Run Python from another directory to use the installed package, "
        "or build this tree with `pip install -e .`."
    )
try:
    torch.ops.load_library(_PATH)
except OSError as error:
    raise ImportError(
        f"{_PATH} does not load, see above. It needs PyTorch 2.10 or newer, whose stable ABI it uses; this is "
        f"PyTorch {torch.__version__}."
    ) from error

with contextlib.suppress(ModuleNotFoundError):  # another Python than the one it was built for
    importlib.import_module("flash_qla._C")  # the library's warnings become Python's; without it they are PyTorch's

_library = ctypes.CDLL(str(_PATH))


def _function(name: str, *arguments: type):
    """A C function that returns a 64-bit integer."""
    function = getattr(_library, f"flash_qla_{name}")
    function.argtypes, function.restype = arguments, ctypes.c_int64
    return function


# B, T, N, H_k, H_v, K, V, varlen, sm_count, auto_cp, use_qk_l2norm
_HALF = (*(ctypes.c_int64,) * 7, ctypes.c_bool, ctypes.c_int, ctypes.c_bool, ctypes.c_bool)

forward_workspace_bytes = _function("forward_workspace_bytes", *_HALF)
backward_workspace_bytes = _function("backward_workspace_bytes", *_HALF, ctypes.c_bool)  # the last one: activations
MOST_KEY_DIM = _function("most_key_dim")()  # the largest K on a GPU
