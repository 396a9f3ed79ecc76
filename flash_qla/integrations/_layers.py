"""Shared by the integrations that run a layer's convolution, delta rule and gated norm as one call."""

import functools
import logging

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(part: torch.nn.Module) -> bool:
    """Whether calling a part runs its class's forward and nothing else."""
    overridden = any(name in vars(part) for name in ("forward", "_old_forward"))
    return not overridden and not any(getattr(part, hooks) for hooks in _HOOKS)


@functools.cache
def _arange(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, dtype=torch.int32, device=device)


def slots_of(x: torch.Tensor) -> torch.Tensor:
    """A slot for each row of a batch. In eager mode the same tensor each time, because a kernel would make it."""
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or is_captured:
        return torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return _arange(x.shape[0], x.device)


# Layers of inference engines


def why_not(layer: torch.nn.Module, dtype: torch.dtype, windows: torch.dtype, states: torch.dtype) -> str | None:
    """Why an engine's layer does not run as one call, or None.

    Args:
        layer: one of Qwen3-Next or Qwen3.5, with the names that vLLM and SGLang give to its parts.
        dtype: that of the tokens.
        windows, states: the dtypes of its pools.
    """
    norm, weight = layer.norm, layer.conv1d.weight
    K, V, group = layer.head_k_dim, layer.head_v_dim, layer.num_v_heads // layer.num_k_heads
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if dtype != torch.bfloat16 or {windows, weight.dtype} != {dtype}:
        return f"the model has {dtype}, its convolution {weight.dtype} and the windows {windows}, expected bfloat16"
    if states not in (torch.float32, torch.bfloat16, torch.float16):
        return f"states have {states}"
    if K > 128 or K % 8 or V % 8 or group * V > 512 or weight.shape[-1] != 4:
        return f"K = {K}, V = {V}, {group} value heads of a key head, {weight.shape[-1]} taps"
    if norm.activation not in ("silu", "swish", "sigmoid") or layer.activation not in ("silu", "swish"):
        return f"the activations are {layer.activation} and {norm.activation}"
    # A FusedRMSNormGated has neither groups nor the gate before the norm, and no names for them.
    norm_before_gate, groups = getattr(norm, "norm_before_gate", True), getattr(norm, "group_size", None)
    is_known_norm = norm_before_gate and groups in (None, V) and getattr(norm, "bias", None) is None
    return None if is_known_norm else "the norm has a bias, groups, or the gate before it"


@functools.cache
def say(package: str, reason: str | None) -> None:
    """One line of an engine's log per process and reason of why_not."""
    log = logging.getLogger(f"{package}.flash_qla")
    if reason is None:
        log.info("flash_qla runs a layer's convolution, delta rule and norm as one call")
    else:
        log.info("a layer's convolution, delta rule and norm run one by one: %s", reason)


def norm_options(layer: torch.nn.Module) -> dict:
    """Arguments of flash_qla's functions for an engine's norm."""
    activation = "sigmoid" if layer.norm.activation == "sigmoid" else "silu"
    return {"norm_eps": layer.layer_norm_epsilon, "norm_activation": activation}


def split_projections(
    mixed_qkvz: torch.Tensor, ba: torch.Tensor, H_k: int, group: int, K: int, V: int, by_key_heads: bool
) -> tuple[torch.Tensor, ...]:
    """mixed, z, b and a of an engine's two projections, as views.

    Args:
        mixed_qkvz: [tokens, 2 H_k K + 2 H_v V], H_v = H_k group.
        ba: [tokens, 2 H_v].
        by_key_heads: q, k, v and z of a key head follow each other, and so do its b and a.
    """
    if by_key_heads:
        mixed, z = mixed_qkvz.unflatten(-1, (H_k, -1)).split([2 * K + group * V, group * V], -1)
        return mixed, z.unflatten(-1, (group, V)), *ba.unflatten(-1, (H_k, -1)).split(group, -1)
    mixed, z = mixed_qkvz.split([H_k * (2 * K + group * V), H_k * group * V], -1)
    return mixed, z.unflatten(-1, (-1, V)), *ba.split(H_k * group, -1)
