"""FLA's backend for flash_qla, in FLA's terms. flash_qla.integrations.fla registers it."""

import functools
import inspect

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

from flash_qla._binary import MOST_KEY_DIM
from flash_qla._layout import CHUNK, HEAD_DIM_STEP, MOST_VALUE_DIM
from flash_qla.integrations import fla

_FLA_HEAD_DIM = 128  # the only K and V of FLA's own backend


@functools.cache
def _names() -> list[str]:
    """Names of FLA's arguments, in their order."""
    *names, _ = inspect.signature(chunk_gated_delta_rule).parameters  # the last one is **kwargs
    return names


def _by_name(args: tuple, kwargs: dict) -> dict:
    """All arguments of a call by name; FLA lets any of them be positional."""
    return kwargs | dict(zip(_names(), args, strict=False)) if args else kwargs


def _is_head_dim(dim: int, most: int) -> bool:
    return 0 < dim <= most and dim % HEAD_DIM_STEP == 0


def _with_head_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A stand-in for x with another last dimension, for checks that read shapes and no elements."""
    return x if x.shape[-1] == dim else x[..., :1].expand(*x.shape[:-1], dim)


class Backend(FlashQLABackend):
    """FLA's backend for flash_qla, with all its head dimensions and with activations.

    Both methods have the arguments of FLA's chunk_gated_delta_rule.
    """

    def chunk_gated_delta_rule_verifier(self, *args, **kwargs):
        call = _by_name(args, kwargs)
        q = call["q"]
        if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
            return False, "this flash_qla requires a Hopper GPU (sm_90)"
        K, V = q.shape[-1], call["v"].shape[-1]
        if not (_is_head_dim(K, MOST_KEY_DIM) and _is_head_dim(V, MOST_VALUE_DIM)):
            return False, (
                f"flash_qla requires multiples of {HEAD_DIM_STEP}, K up to {MOST_KEY_DIM} and V up to "
                f"{MOST_VALUE_DIM}, got K={K} and V={V}"
            )
        cp_context = call.pop("cp_context", None)
        if cp_context is not None and cp_context.cu_seqlens_cpu is None:
            return False, "flash_qla requires cu_seqlens_cpu in cp_context"
        if call.pop("chunk_size", CHUNK) != CHUNK:
            return False, f"flash_qla requires chunk_size={CHUNK}"
        if call.pop("transpose_state_layout", None) is not None and call.get("state_v_first"):
            return False, "flash_qla requires one of state_v_first and transpose_state_layout"
        call |= {name: _with_head_dim(call[name], _FLA_HEAD_DIM) for name in ("q", "k", "v")}
        if call.pop("use_gate_in_kernel", False) and call.get("A_log") is None:
            return False, "use_gate_in_kernel requires A_log"
        if call.pop("use_beta_sigmoid_in_kernel", False):
            call.pop("allow_neg_eigval", None)  # FLA itself refuses it without the sigmoid
        return super().chunk_gated_delta_rule_verifier(**call)

    def chunk_gated_delta_rule(self, *args, **kwargs):
        return fla.chunk_gated_delta_rule(**_by_name(args, kwargs))
