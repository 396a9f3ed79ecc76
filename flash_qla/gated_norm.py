"""The norm that follows the Gated Delta Rule in every Gated DeltaNet layer."""

from typing import Literal

import torch

from flash_qla.ops import autograd
from flash_qla.ops.checks import explain


def gated_rms_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    activation: Literal["silu", "sigmoid"] = "silu",
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """The gated RMS norm over the last dimension, for each head of each token.

        o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        y = gated_rms_norm(o, z, norm.weight)

    With act(z) = z * sigmoid(z), or sigmoid(z):

        y = rmsnorm(o) * weight * act(z)            norm_before_gate
        y = rmsnorm(o * act(z)) * weight            otherwise
        rmsnorm(x) = x / sqrt(mean(x ** 2) + eps)

    The first is the norm of Gated DeltaNet layers: Qwen3NextRMSNormGated of transformers and FusedRMSNormGated of FLA.
    The second is that of Mamba-2. Arithmetic is in float32 (float64 for float64 inputs), and y is rounded once.

    o, z and the gradient of y may have any strides. The GPU reads them in place if their last stride is 1 and, where V
    elements are a whole number of 16 bytes, their start and their other strides are multiples of 16 bytes, as for
    slices of one projection; it copies other layouts first. torch.autocast changes nothing here.

    y can be differentiated, once, with respect to o, z and weight. The gradients have the dtypes of their tensors. That
    of weight is summed in float32, always in the same order. Autograd saves the inputs for the backward, and nothing
    else.

    Parameters
    ----------
    o : Tensor
        What is normalized, [..., V], typically [B, T, H_v, V]; bfloat16, float16 or float32, on the CPU also float64. V
        is at most 512 on the GPU, and any on the CPU. The GPU takes longer if V elements are no whole number of 16
        bytes.
    z : Tensor
        The input of the gate, of the shape and the dtype of o.
    weight : Tensor
        [V], any floating dtype.
    eps : float, default 1e-6
        Added to the mean of the squares.
    activation : "silu" or "sigmoid", default "silu"
        The function act of the gate.
    norm_before_gate : bool, default True
        Whether the norm comes before the gate.

    Returns
    -------
    y : Tensor
        The shape and the dtype of o, contiguous.

    Raises
    ------
    RuntimeError
        Wrong device, dtype, shape, eps or activation, or a size that the GPU does not support. Nothing has been
        launched then. Or there is no memory.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        Gradients made with create_graph=True are differentiated again; or forward-mode differentiation.
    """
    try:
        return autograd.call(torch.ops.flash_qla.gated_rms_norm, o, z, weight, eps, activation, norm_before_gate)
    except Exception:
        explain(gated_rms_norm, locals())
        raise
