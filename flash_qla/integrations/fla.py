"""Let flash-linear-attention (FLA) use flash_qla in its GatedDeltaNet layers too.

    from flash_qla.integrations.fla import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # as it was

FLA's fla.ops.gated_delta_rule.chunk_gated_delta_rule selects an installed flash_qla by itself: on a Hopper GPU, for
bf16 and fp16 with K = V = 128, where gates and betas come ready for use. FLA's layers, as of 0.6.0, leave both
activations to the function ("in the kernel"), and such calls FLA runs in its own kernels. What is registered here takes
them: it computes the activations in torch, in float32, and otherwise is FLA's own backend for flash_qla, with all its
conditions. Gradients reach A_log, dt_bias and what the activations are given through autograd.

It also leaves GPUs other than Hopper's to FLA, which by itself takes any flash_qla for one that runs on Blackwell.

FLA_FLASH_QLA=0 in the environment switches flash_qla off. Written for fla-core 0.6.0.
"""

import torch
import torch.nn.functional as F
from fla.backends import register
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend


class _ActivatingBackend(FlashQLABackend):
    """FLA's backend for flash_qla, with the activations done before. Both methods have the arguments of FLA's
    chunk_gated_delta_rule, in its order."""

    def chunk_gated_delta_rule_verifier(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        *args,
        use_gate_in_kernel=False,
        A_log=None,
        **kwargs,
    ):
        if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
            return False, "this flash_qla requires a Hopper GPU (sm_90)"
        if use_gate_in_kernel and A_log is None:
            return False, "use_gate_in_kernel requires A_log"
        return super().chunk_gated_delta_rule_verifier(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            False,
            # FLA refuses 2 * beta for betas that are ready, and says so itself.
            allow_neg_eigval and not use_beta_sigmoid_in_kernel,
            *args,
            **kwargs,
        )

    def chunk_gated_delta_rule(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        *args,
        use_gate_in_kernel=False,
        A_log=None,
        dt_bias=None,
        **kwargs,
    ):
        if use_gate_in_kernel:
            g = _log_decay(g, A_log, dt_bias)
        if use_beta_sigmoid_in_kernel:
            beta = (2 if allow_neg_eigval else 1) * beta.float().sigmoid()
        return super().chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            False,
            False,
            *args,
            **kwargs,
        )


def _log_decay(x: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """-exp(A_log) softplus(x + dt_bias) [B, T, H_v], of x [B, T, H_v] and A_log, dt_bias [H_v]; float32."""
    x = x.float() if dt_bias is None else x.float() + dt_bias.float()
    return -A_log.float().exp() * F.softplus(x)


def use_flash_qla() -> None:
    """Have FLA's chunk_gated_delta_rule, and so its layers, take flash_qla for calls whose activations are left to it.

    It registers a backend in the place of FLA's own for flash_qla, by FLA's public registry, for the whole process.
    What it does not take runs in FLA's own kernels, as before: another head dimension than 128, other dtypes than bf16
    and fp16, cp_context, and GPUs other than Hopper's.

    Raises:
        ImportError: on import of this module, where FLA is not installed or has no backend for flash_qla.
    """
    register("gated_delta_rule")(_ActivatingBackend)


def restore() -> None:
    """Give FLA its own backend for flash_qla again."""
    register("gated_delta_rule")(FlashQLABackend)
