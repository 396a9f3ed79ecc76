"""A call that raises has changed nothing: neither the bits of a tensor nor its version."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of all memory behind a tensor, on the CPU."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu()


class Snapshot:
    """Of tensors on a CPU or a GPU."""

    def __init__(self, tensors):
        tensors = [x for x in tensors if torch.is_tensor(x) and not x.is_nested]  # a NestedTensor has no storage
        self._tensors = [x for x in tensors if x.device.type in ("cpu", "cuda")]
        self._before = [self._state(x) for x in self._tensors]

    @staticmethod
    def _state(x: torch.Tensor) -> tuple:
        return bits(x).clone(), None if x.is_inference() else x._version, x.requires_grad, x.grad_fn

    def check(self) -> None:
        for x, (old_bits, *old) in zip(self._tensors, self._before, strict=True):
            new_bits, *new = self._state(x)
            assert torch.equal(old_bits, new_bits), f"a tensor of shape {[*x.shape]} was written"
            assert old == new, f"version, requires_grad, grad_fn of a tensor of shape {[*x.shape]}: {old}, then {new}"


class ErrorsChangeNothing(TorchFunctionMode):
    """Fails if a call of an op of the library raises after it has changed a tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not str(function).startswith("flash_qla"):
            return function(*args, **kwargs)
        snapshot = Snapshot(tree_leaves((args, kwargs)))
        try:
            return function(*args, **kwargs)
        except Exception:
            snapshot.check()
            raise
