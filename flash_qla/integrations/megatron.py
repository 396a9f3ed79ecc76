"""Let Megatron-core train its Gated DeltaNet layers through flash_qla.

    from flash_qla.integrations.megatron import restore, use_flash_qla

    use_flash_qla()                 # in every process, before the model is built
    restore()                       # Megatron's own functions again, for models that are built from here on

A layer keeps the function that it finds when it is built: FLA's chunk_gated_delta_rule, or Megatron's
torch_chunk_gated_delta_rule with `deterministic_mode`. use_flash_qla puts flash_qla's function in place of both. Its
kernels give the same bits in every run, so deterministic mode needs no other function.

Megatron's layer also takes its l2norm and its convolution from FLA, and refuses to be built without FLA. If FLA is not
installed, use_flash_qla supplies both: the l2norm in torch, and flash_qla's convolution. If FLA is installed, any
release of it, both remain FLA's.

Megatron refuses packed sequences with `deterministic_mode`. Head dimensions are as in flash_qla: K any multiple of 8 up
to 256, V any multiple of 8 up to 512.

Written for Megatron-core 0.19.2.
"""

import torch

import flash_qla
from flash_qla.integrations import fla
from flash_qla.integrations._engines import Replacement, require


def torch_chunk_gated_delta_rule(
    q, k, v, g, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    """Megatron's function of deterministic mode.

    Args:
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as those of
            flash_qla.chunk_gated_delta_rule.
        chunk_size: only 64.

    Returns:
        o, final_state: as flash_qla.chunk_gated_delta_rule.

    Raises:
        NotImplementedError: chunk_size has another value.
    """
    require("torch_chunk_gated_delta_rule", chunk_size=(chunk_size, 64))
    return flash_qla.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in the dtype of x, computed in fp32."""
    y = x.float()
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
    """The convolution of FLA that Megatron's layer calls: flash_qla.causal_conv1d, whose arguments these are."""
    return flash_qla.causal_conv1d(
        x, weight, bias, activation=activation, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


_LAYERS = "megatron.core.ssm.gated_delta_net"
_replacement = Replacement(
    "Megatron-core 0.19.2",
    {f"{_LAYERS}.gdn": {"torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule}},
    unchecked={f"{_LAYERS}.gdn": {"chunk_gated_delta_rule": fla.chunk_gated_delta_rule}},
    absent={
        f"{_LAYERS}.gdn": {"causal_conv1d": causal_conv1d},
        f"{_LAYERS}.common": {"l2norm": l2norm, "HAVE_FLA": True},
    },
)


def use_flash_qla() -> None:
    """Have Megatron's Gated DeltaNet layers that are built from here on call flash_qla, in this process.

    Raises
    ------
    ImportError
        Megatron-core cannot be imported, or its release has no module for these layers.
    RuntimeError
        Megatron-core lacks one of the functions, or has it with other arguments. Then nothing is changed.
    """
    _replacement.use()


def restore() -> None:
    """Give Megatron's modules their own functions again. Existing layers keep the functions that they have."""
    _replacement.restore()
