"""The all-gather between ranks."""

import torch
from torch._library.effects import EffectType

from flash_qla.cp.context import CPContext
from flash_qla_environment import is_on


def start_gather(rows: torch.Tensor, context: CPContext, for_backward: bool = False) -> torch.Tensor:
    """Starts the gather of rows [parts of a rank, ...] from all ranks, for wait().

    A rank with `for_backward` starts another gather in its backward, so all ranks need the same value.
    """
    if context._world_size == 1:
        return rows
    if not torch.compiler.is_compiling() and is_on("FLASH_QLA_CHECK"):
        _check_agreement(rows, context, for_backward)
    return torch.ops._c10d_functional.all_gather_into_tensor(rows, context._world_size, context._group_name)


def wait(rows: torch.Tensor, context: CPContext) -> torch.Tensor:
    """The gathered rows, one for each part of all ranks, in the order of the tokens."""
    if context._world_size > 1:
        rows = torch.ops._c10d_functional.wait_tensor(rows)
    if len(context._parts) == 1:
        return rows
    return torch.cat([rows[::2], rows[1::2].flip(0)])  # zigzag: rank r has parts r and 2 W - 1 - r


@torch.library.custom_op("flash_qla::_copy_here", mutates_args=())
def _copy_here(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_copy_here.register_effect(EffectType.ORDERED)


@_copy_here.register_fake
def _(x):
    return torch.empty_like(x)


def in_backward(x: torch.Tensor) -> torch.Tensor:
    """x, with an effect that keeps it in the backward under torch.compile.

    The compiler would move a value that depends on no gradient to the forward, and its collective too, although the
    other ranks have no collective there.
    """
    return _copy_here(x) if torch.compiler.is_compiling() else x


def _check_agreement(rows: torch.Tensor, context: CPContext, for_backward: bool) -> None:
    """Raises if the ranks disagree, which would otherwise make them crash, or hang until they time out.

    They disagree if heads, head dimensions or dtypes differ, or if only some of them need gradients: the others have
    no backward.
    """
    signature = (tuple(rows.shape), rows.dtype, for_backward)
    signatures = [None] * context._world_size
    torch.distributed.all_gather_object(signatures, signature, context.group)
    if any(other != signature for other in signatures):
        raise RuntimeError(
            "flash_qla: the ranks differ in the shape or the dtype of what they exchange, or in whether they need "
            f"gradients; in the order of the ranks these are {signatures}"
        )


def refuse_transforms(function: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"flash_qla: {function} exchanges tensors between ranks, which the transforms of torch.func (grad, vjp, "
            "jacrev, vmap, jvp, ...) do not support; use torch.autograd"
        )
