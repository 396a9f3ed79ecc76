"""FLA's backend for flash_qla, in FLA's terms. flash_qla.integrations.fla registers it."""

import functools
import inspect
import sys
from collections.abc import Callable

import torch
from fla.backends import dispatch, register
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule

from flash_qla._binary import MOST_KEY_DIM
from flash_qla._layout import CHUNK, HEAD_DIM_STEP, MOST_VALUE_DIM
from flash_qla.integrations import fla
from flash_qla.integrations._gpus import REASON, keeps_theirs

_FLA_HEAD_DIM = 128  # the only K and V of FLA's own backend


@functools.cache
def _names(function: Callable) -> list[str]:
    """Names of the arguments of FLA's function, in their order."""
    *names, _ = inspect.signature(function).parameters  # the last one is **kwargs
    return names


def _by_name(function: Callable, args: tuple, kwargs: dict) -> dict:
    """All arguments of a call by name; FLA lets any of them be positional."""
    return kwargs | dict(zip(_names(function), args, strict=False)) if args else kwargs


def _unknown_keyword(function: Callable, call: dict, keywords: frozenset = frozenset()) -> str | None:
    """A message about a keyword that FLA's function ignores and flash_qla's refuses, or None."""
    names = {*_names(function), *keywords, "transpose_state_layout"}
    return next((f"flash_qla has no argument {x}" for x in call if x not in names), None)


def _is_head_dim(dim: int, most: int) -> bool:
    return 0 < dim <= most and dim % HEAD_DIM_STEP == 0


def _with_head_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A stand-in for x with another last dimension, for checks that read shapes and no elements."""
    return x if x.shape[-1] == dim else x[..., :1].expand(*x.shape[:-1], dim)


class Backend(FlashQLABackend):
    """FLA's backend for flash_qla, with all its head dimensions and with activations, and for decoding.

    The methods have the arguments of FLA's functions.
    """

    def chunk_gated_delta_rule_verifier(self, *args, **kwargs):
        call = _by_name(chunk_gated_delta_rule, args, kwargs)
        unknown = _unknown_keyword(chunk_gated_delta_rule, call, fla._KEYWORDS)
        if unknown is not None:
            return False, unknown
        q = call["q"]
        if keeps_theirs(q.device):
            return False, REASON
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
        return fla.chunk_gated_delta_rule(**_by_name(chunk_gated_delta_rule, args, kwargs))

    def fused_recurrent_gated_delta_rule_verifier(self, *args, **kwargs):
        call = _by_name(fused_recurrent_gated_delta_rule, args, kwargs)
        unknown = _unknown_keyword(fused_recurrent_gated_delta_rule, call)
        if unknown is not None:
            return False, unknown
        for name in ("gk", "gv"):
            if call.pop(name, None) is not None:
                return False, f"flash_qla requires {name}=None"
        beta = call.get("beta")
        if beta is not None and beta.ndim == call["v"].ndim:
            return False, "flash_qla requires a step size for each head, beta [B, T, H_v], got one for each channel"
        return self.chunk_gated_delta_rule_verifier(**{"g": None, "beta": None} | call)

    def fused_recurrent_gated_delta_rule(self, *args, **kwargs):
        return fla.fused_recurrent_gated_delta_rule(**_by_name(fused_recurrent_gated_delta_rule, args, kwargs))


# FLA's function for decoding, which asks the registry
_dispatched = dispatch("gated_delta_rule")(fused_recurrent_gated_delta_rule)


def _replace(old: Callable, new: Callable) -> None:
    """Replaces a function in those of FLA's modules that have it; later modules take it from fla.ops."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and name != fused_recurrent_gated_delta_rule.__module__:
            for attribute in [x for x, value in vars(module).items() if value is old]:
                setattr(module, attribute, new)


def use() -> None:
    register("gated_delta_rule")(Backend)
    _replace(fused_recurrent_gated_delta_rule, _dispatched)


def restore() -> None:
    register("gated_delta_rule")(FlashQLABackend)
    _replace(_dispatched, fused_recurrent_gated_delta_rule)
