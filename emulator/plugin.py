"""A plugin of pytest: tests of the GPU run on the emulator that build.py has built. CPU tensors stand for GPU tensors.

PYTHONPATH=build/emulator/package:emulator pytest -p plugin -m gpu tests/test_forward.py
"""

import os
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = tuple(map(int, os.environ.get("EMULATED_CAPABILITY", "9.0").split(".")))
PROPERTIES = {"multi_processor_count": int(os.environ.get("EMULATED_SMS", 132)), "total_memory": 80 << 30}


class OnTheCpu(TorchFunctionMode):
    """Replaces the device "cuda" by the CPU, and makes every tensor say that it is on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function == torch.Tensor.is_cuda.__get__:
            return True
        args = tuple("cpu" if isinstance(x, str) and x.startswith("cuda") else x for x in args)
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pytest_configure():
    import poison  # of the tests, which pytest has put on the path

    poison.FRESH_BYTES = 0  # a caching allocator, which there is not, would hand it out again
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda.get_device_name = lambda device=None: "emulated"
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(**PROPERTIES)
    torch.cuda.set_per_process_memory_fraction = lambda fraction, device=None: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.memory_snapshot = list  # no blocks of a caching allocator


@pytest.fixture(autouse=True)
def on_the_cpu():
    with OnTheCpu():
        yield
