"""Let flash-linear-attention (FLA) use flash_qla in its GatedDeltaNet layers too.

    from flash_qla.integrations.fla import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # as it was

FLA's fla.ops.gated_delta_rule.chunk_gated_delta_rule already selects an installed flash_qla, but only on a Hopper GPU,
in bf16 and fp16, for K = V = 128, and if g and beta are computed before the call. FLA runs all other calls in its own
kernels. Its layers make such calls: as of 0.6.0 they leave both activations to the function ("in the kernel").

use_flash_qla registers FLA's backend for flash_qla with other conditions:

- K may be any multiple of 8 up to 128, V any multiple of 8 up to 512;
- flash_qla's kernels compute the activations, and gradients reach A_log, dt_bias and the inputs of the activations;
- flash_qla takes cp_context;
- GPUs other than Hopper's run FLA's kernels. FLA's own backend would run flash_qla on Blackwell.

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

_FLA_HEAD_DIM = 128  # the only K and V of FLA's own backend

# Arguments that FLA's own backend refuses; flash_qla has them under the same names
_ACTIVATIONS = ("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
# Other arguments that FLA and flash_qla share
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


class _Backend(FlashQLABackend):
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
        call |= {name: _with_head_dim(call[name], _FLA_HEAD_DIM) for name in ("q", "k", "v")}
        if call.pop("use_gate_in_kernel", False) and call.get("A_log") is None:
            return False, "use_gate_in_kernel requires A_log"
        if call.pop("use_beta_sigmoid_in_kernel", False):
            call.pop("allow_neg_eigval", None)  # FLA itself refuses it without the sigmoid
        return super().chunk_gated_delta_rule_verifier(**call)

    def chunk_gated_delta_rule(self, *args, **kwargs):
        call = _by_name(args, kwargs)
        if not call.get("use_gate_in_kernel"):  # FLA then ignores these
            call |= {"A_log": None, "dt_bias": None}
        given = {name: call[name] for name in (*_COMMON, *_ACTIVATIONS) if call.get(name) is not None}
        return flash_qla.chunk_gated_delta_rule(*(call[name] for name in ("q", "k", "v", "g", "beta")), **given)


def use_flash_qla() -> None:
    """Have FLA's chunk_gated_delta_rule, and so its layers, run calls with activations, other head dimensions than 128
    and context parallelism on flash_qla.

    FLA's public registry gets this module's backend instead of FLA's own for flash_qla, for the whole process. FLA's
    kernels run the other calls, as before: K above 128, which is the default of FLA's GatedDeltaNet layer, V above 512,
    head dimensions that are not multiples of 8, dtypes other than bf16 and fp16, and GPUs other than Hopper's.

    Raises:
        ImportError: on import of this module, if FLA is not installed or has no backend for flash_qla.
    """
    register("gated_delta_rule")(_Backend)


def restore() -> None:
    """Give FLA its own backend for flash_qla again."""
    register("gated_delta_rule")(FlashQLABackend)
