"""A call that raises has changed nothing: neither the bits of a tensor nor its version."""

import random

import pytest
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


def side_by_side(first: torch.Tensor, second: torch.Tensor, shared: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous copies of both in one piece of memory. The second begins `shared` bytes, a multiple of 16, before the
    end of the first."""
    ends = [x.numel() * x.element_size() for x in (first, second)]
    start = -(-ends[0] // 16) * 16 - shared
    memory = torch.zeros(start + ends[1] + 16, dtype=torch.uint8, device=first.device)
    pieces = memory[: ends[0]], memory[start : start + ends[1]]
    copies = [piece.view(x.dtype).view(x.shape).copy_(x) for piece, x in zip(pieces, (first, second), strict=True)]
    return copies[0], copies[1]


class CallsThatFail(TorchFunctionMode):
    """Before each call of an op of the library, makes one that has to raise, and to change nothing: a written tensor
    shares memory with another argument, or an argument lacks its last column."""

    WITH_COLUMNS = ("k", "mixed_qkv", "g", "a", "beta", "b")

    def __init__(self, r: random.Random):
        super().__init__()
        self._r, self.failed = r, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.OpOverload) and str(function).startswith("flash_qla"):
            schema = function._schema.arguments
            arguments = dict(zip((x.name for x in schema), args, strict=False)) | kwargs
            self._fail(function, arguments, {x.name for x in schema if x.alias_info is not None})
        return function(*args, **kwargs)

    def _fail(self, op, arguments: dict, written: set[str]) -> None:
        tensors = [x for x, y in arguments.items() if torch.is_tensor(y) and y.numel()]
        pairs = [(x, y) for x in tensors for y in tensors if x in written and x != y]
        if pairs and self._r.random() < 0.7:
            x, y = self._r.choice(pairs)
            copies = side_by_side(arguments[x].detach(), arguments[y].detach(), 16)
            wrong, text = {x: copies[0], y: copies[1]}, "shares memory"
        else:
            names = [x for x in tensors if x in self.WITH_COLUMNS]
            if not names:
                return
            name = self._r.choice(names)
            wrong, text = {name: arguments[name][..., :-1]}, f"{op._schema.name}: {name} has"
        snapshot = Snapshot((arguments | wrong).values())
        with pytest.raises(RuntimeError, match=text):
            op(**arguments | wrong)
        snapshot.check()
        self.failed += 1
