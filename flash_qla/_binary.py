"""Loads libflash_qla.so, the ops and their kernels, and its C functions (csrc/inspect.h) for the ops' Python code.

flash_qla._C answers more questions, but is built for one Python only. So no op depends on it.
"""

import contextlib
import ctypes
import importlib
from pathlib import Path

import torch

from flash_qla_environment import is_on

PATH = Path(__file__).with_name("libflash_qla.so")

if not PATH.exists():
    raise ImportError(
        f"{PATH} is missing: this flash_qla is a source tree in which nothing has been built, and if flash_qla "
        "is installed as well, this tree hides it. Run Python from another directory to use the installed package, "
        "or build this tree with `pip install -e .`."
    )
try:
    torch.ops.load_library(PATH)
except OSError as error:
    raise ImportError(
        f"{PATH} does not load, see above. It needs PyTorch 2.10 or newer, whose stable ABI it uses; this is "
        f"PyTorch {torch.__version__}."
    ) from error

with contextlib.suppress(ModuleNotFoundError):  # another Python than the one it was built for
    importlib.import_module("flash_qla._C")  # the library's warnings become Python's; without it they are PyTorch's

for _switch in ("FLASH_QLA_CHECK", "FLASH_QLA_QUIET"):
    is_on(_switch)  # the library reads them itself, and does not warn

_library = ctypes.CDLL(str(PATH))


def _function(name: str, *arguments: type):
    """A C function that returns a 64-bit integer."""
    function = getattr(_library, f"flash_qla_{name}")
    function.argtypes, function.restype = arguments, ctypes.c_int64
    return function


def _workspace_bytes(direction: str):
    """Returns a function of a shape's fields (csrc/gpu/shape.h), which it takes by name."""
    names, values = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int64)
    function = _function(f"{direction}_workspace_bytes", ctypes.c_int64, names, values)

    def workspace_bytes(**shape: int) -> int:
        count = len(shape)
        keys = (ctypes.c_char_p * count)(*(name.encode() for name in shape))
        return function(count, keys, (ctypes.c_int64 * count)(*shape.values()))

    return workspace_bytes


_card = _function("card", ctypes.c_int64, *(ctypes.POINTER(ctypes.c_int64),) * 3)


def card(device: int) -> dict[str, int]:
    """The figures of a GPU (csrc/gpu/card.h), which are fields of a shape. Empty: this machine has no such GPU."""
    figures = {name: ctypes.c_int64() for name in ("sm_mhz", "memory_gb_s", "portable")}
    sm_count = _card(device, *figures.values())
    return {} if sm_count < 0 else {"sm_count": sm_count} | {name: x.value for name, x in figures.items()}


forward_workspace_bytes = _workspace_bytes("forward")
backward_workspace_bytes = _workspace_bytes("backward")
_exchange_slow_path_was_said = _function("exchange_slow_path_was_said", ctypes.c_int64)


@contextlib.contextmanager
def slow_path_is_meant():
    """Within the block the line that the CPU is slow is not said."""
    previous = _exchange_slow_path_was_said(1)
    try:
        yield
    finally:
        _exchange_slow_path_was_said(previous)


MOST_KEY_DIM = _function("most_key_dim")()  # the largest K on a GPU
