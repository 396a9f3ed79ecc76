"""SGLang's layers of Qwen3-Next and Qwen3.5: a step of decoding is one call of flash_qla's between their projections.

The layer's forward has the projections and the norm, the backend's metadata the slots, and its pools the windows and
states. SGLang's own forward runs every other step: prefills, mixed ones, and those with drafts. For drafts SGLang keeps
the window after each token, since 0.5.14 in memory that the windows share, which decode_gated_delta_net does not write;
and in a tree its own convolution computes the parents.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable

import torch

import flash_qla
from flash_qla.integrations import _layers

_ATTENTION = "sglang.srt.layers.radix_linear_attention"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
# What `decode` reads beside what _why_not does
_OF_LAYER = ("_forward_input_proj", "out_proj", "layer_norm_epsilon")
_OF_ATTENTION = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "bias", "A_log", "dt_bias")
_OF_BACKEND = ("_track_mamba_state_decode",)
_reasons = weakref.WeakKeyDictionary()  # layer -> why it runs SGLang's own forward, or None


def with_region(by_key_heads: bool) -> Callable:
    """Replaces the forward of a layer's class. by_key_heads: of the layout of its projections, as in _layers.parts."""

    def with_ours(theirs: Callable) -> Callable:
        @functools.wraps(theirs)
        def forward(self, hidden_states, forward_batch):
            backend = None if torch.compiler.is_compiling() else _backend(hidden_states, forward_batch)
            if backend is None or not _fits(self, backend, hidden_states.dtype):
                return theirs(self, hidden_states, forward_batch)
            return decode(self, backend, hidden_states, forward_batch, by_key_heads)

        return forward

    return with_ours


def _backend(hidden_states: torch.Tensor, forward_batch: object) -> object | None:
    """The backend of a step that `decode` takes; None for other steps, and other backends than SGLang's for GPUs."""
    logical = getattr(forward_batch, "logical_forward_mode", forward_batch.forward_mode)
    if not (forward_batch.forward_mode.is_decode() and logical.is_decode() and torch.is_tensor(hidden_states)):
        return None
    current = getattr(sys.modules.get(_ATTENTION), "get_attn_backend", None)  # since 0.5.13
    backend = getattr(forward_batch, "attn_backend", None) if current is None else current()
    backend = getattr(backend, "linear_attn_backend", None)
    if type(backend) is not getattr(sys.modules.get(_BACKEND), "GDNAttnBackend", None):
        return None
    slots = getattr(backend.forward_metadata, "mamba_cache_indices", None)
    # With data-parallel attention a rank may have rows beyond its sequences.
    return backend if slots is not None and slots.shape == hidden_states.shape[:1] else None


def _fits(layer: torch.nn.Module, backend: object, dtype: torch.dtype) -> bool:
    if layer not in _reasons:
        _reasons[layer] = _why_not(layer, backend, dtype)
        _layers.say("sglang", _reasons[layer])
    return _reasons[layer] is None


def _pools(layer: torch.nn.Module, backend: object) -> object:
    return backend.req_to_token_pool.mamba2_layer_cache(layer.attn.layer_id)


def _why_not(layer: torch.nn.Module, backend: object, dtype: torch.dtype) -> str | None:
    """Why SGLang's own forward runs the layer, or None."""
    try:
        for part, names in ((layer, _OF_LAYER), (layer.attn, _OF_ATTENTION), (backend, _OF_BACKEND)):
            for name in names:
                getattr(part, name)
        pools, weight, kernel = _pools(layer, backend), layer.attn.conv_weights, backend.kernel_dispatcher.decode_kernel
        windows = pools.conv[0]
        if type(kernel).__name__ != "TritonGDNKernel":
            return f"{type(kernel).__name__} decodes"
        if getattr(pools, "replayssm_d", None) is not None:  # the name is missing before 0.5.15
            return "--enable-linear-replayssm keeps tokens beside the states"
        if windows.shape[1:] != (weight.shape[0], weight.shape[1] - 1):
            return f"windows are {[*windows.shape]} for weights {[*weight.shape]}"
        if not (_layers.is_plain(layer.attn) and _layers.is_plain(layer.norm)):
            return "its attention or norm has a hook"
        return _layers.why_not(layer, dtype, windows.dtype, pools.temporal.dtype)
    except AttributeError as error:
        return str(error)


@functools.cache
def _takes_layer(track: Callable) -> bool:
    return "layer_id" in inspect.signature(track).parameters  # since 0.5.17


def decode(
    layer: torch.nn.Module, backend: object, hidden_states: torch.Tensor, forward_batch: object, by_key_heads: bool
) -> torch.Tensor:
    """The layer's forward for one token of each sequence, [sequences, channels].

    A sequence without a slot has zero output before the last projection; SGLang starts it from zero.
    """
    attn, slots, pools = layer.attn, backend.forward_metadata.mamba_cache_indices, _pools(layer, backend)
    windows, states = pools.conv[0], pools.temporal
    sizes = (attn.num_k_heads, attn.num_v_heads // attn.num_k_heads, attn.head_k_dim, attn.head_v_dim)
    projected = _layers.parts(*layer._forward_input_proj(hidden_states), *sizes, by_key_heads)
    mixed, z, b, a = (x.unsqueeze(1) for x in projected)
    y = flash_qla.decode_gated_delta_net(
        mixed, z, a, b, attn.conv_weights, attn.bias, layer.norm.weight, attn.A_log, attn.dt_bias,
        windows, states, slots, **_layers.norm_options(layer),
    )  # fmt: skip
    # Copies for the radix cache
    of_layer = (attn.layer_id,) if _takes_layer(type(backend)._track_mamba_state_decode) else ()
    backend._track_mamba_state_decode(forward_batch, windows, states, slots, *of_layer)
    output, _ = layer.out_proj(y.flatten(1))
    return output
