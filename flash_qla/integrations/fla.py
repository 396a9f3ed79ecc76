"""Let flash-linear-attention (FLA) use flash_qla in its GatedDeltaNet layers too.

    from flash_qla.integrations.fla import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # as it was

FLA's fla.ops.gated_delta_rule.chunk_gated_delta_rule selects an installed flash_qla by itself: on a Hopper GPU, for
bf16 and fp16 with K = V = 128, where gates and betas come ready for use. Everything else FLA runs in its own kernels,
calls of its layers among them: as of 0.6.0, these leave both activations to the function ("in the kernel"). What is
registered here is FLA's backend for flash_qla, with all conditions but three:

- K may be any multiple of 8 up to 128, V any multiple of 8 up to 512;
- the activations are handed on to flash_qla's kernels. Gradients reach A_log, dt_bias and what the activations are
  given;
- so is cp_context.

It also leaves GPUs other than Hopper's to FLA, which by itself takes any flash_qla for one that runs on Blackwell.

FLA_FLASH_QLA=0 in the environment switches flash_qla off. Written for fla-core 0.6.0.
"""

import functools
import inspect

import torch
from fla.backends import register
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

import flash_qla
from flash_qla._binary import MOST_KEY_DIM
from flash_qla._layout import HEAD_DIM_STEP, MOST_VALUE_DIM

_FLA_HEAD_DIM = 128  # the only K and V that FLA's backend lets flash_qla have

# What FLA's own backend refuses, and flash_qla takes by the same names
_ACTIVATIONS = ("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
# Those of FLA's other arguments that mean something to flash_qla
_COMMON = (
    "scale",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "state_v_first",
    "cu_seqlens",
    "cp_context",
)


@functools.cache
def _names() -> list[str]:
    """FLA's arguments, any of which may come by position."""
    *names, _ = inspect.signature(chunk_gated_delta_rule).parameters  # the last one is **kwargs
    return names


def _by_name(args: tuple, kwargs: dict) -> dict:
    return kwargs | dict(zip(_names(), args, strict=False)) if args else kwargs


def _is_head_dim(dim: int, most: int) -> bool:
    return 0 < dim <= most and dim % HEAD_DIM_STEP == 0


def _with_head_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor like x, but for its last dimension, for questions that do not look at its elements."""
    return x if x.shape[-1] == dim else x[..., :1].expand(*x.shape[:-1], dim)


class _Backend(FlashQLABackend):
    """FLA's backend for flash_qla, with all its head dimensions and the activations inside. Both methods take the
    arguments of FLA's chunk_gated_delta_rule."""

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
        call |= {name: _with_head_dim(call[name], _FLA_HEAD_DIM) for name in ("q", "k", "v")}
        if call.pop("use_gate_in_kernel", False) and call.get("A_log") is None:
            return False, "use_gate_in_kernel requires A_log"
        if call.pop("use_beta_sigmoid_in_kernel", False):
            call.pop("allow_neg_eigval", None)  # FLA refuses it for betas that are ready, and says so itself
        return super().chunk_gated_delta_rule_verifier(**call)

    def chunk_gated_delta_rule(self, *args, **kwargs):
        call = _by_name(args, kwargs)
        if not call.get("use_gate_in_kernel"):  # FLA does not look at these then
            call |= {"A_log": None, "dt_bias": None}
        given = {name: call[name] for name in (*_COMMON, *_ACTIVATIONS) if call.get(name) is not None}
        return flash_qla.chunk_gated_delta_rule(*(call[name] for name in ("q", "k", "v", "g", "beta")), **given)


def use_flash_qla() -> None:
    """Have FLA's chunk_gated_delta_rule, and so its layers, take flash_qla for calls whose activations are left to it,
    for other head dimensions than 128, and for context parallelism.

    It registers a backend in the place of FLA's own for flash_qla, by FLA's public registry, for the whole process.
    What it does not take runs in FLA's own kernels, as before: K above 128, which FLA's GatedDeltaNet layer has by
    default, V above 512, head dimensions that are no multiples of 8, other dtypes than bf16 and fp16, and GPUs other
    than Hopper's.

    Raises:
        ImportError: on import of this module, where FLA is not installed or has no backend for flash_qla.
    """
    register("gated_delta_rule")(_Backend)


def restore() -> None:
    """Give FLA its own backend for flash_qla again."""
    register("gated_delta_rule")(FlashQLABackend)
