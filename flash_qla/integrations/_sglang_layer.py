"""SGLang's layers of Qwen3-Next and Qwen3.5: a step of decoding is one call of flash_qla's between their projections.

The layer's forward has the projections and the norm, the backend's metadata the slots, and its pools the windows and
states. A step decodes one token of each sequence, or a chain of drafts: then the pools get the window and the state
after each token, and SGLang copies those of the last accepted one. SGLang's own forward runs every other step:
prefills, mixed ones, and trees of drafts, whose parents its own convolution computes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

import flash_qla
from flash_qla.integrations import _layers

_ATTENTION = "sglang.srt.layers.radix_linear_attention"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
_UTILITIES = "sglang.srt.layers.attention.linear.utils"
_MOST_DRAFTS = 8  # of decode_gated_delta_net on a GPU
# What `decode` reads, and _why_not does not
_LAYER_MEMBERS = ("_forward_input_proj", "out_proj", "layer_norm_epsilon")
_ATTENTION_MEMBERS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "bias", "A_log", "dt_bias")
_BACKEND_MEMBERS = ("_track_mamba_state_decode",)
_DRAFT_MEMBERS = ("verify_intermediate_state_indices",)
_TREE_TABLES = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")
# layer -> {whether the step has drafts: why SGLang's own forward runs it, or None}
_reasons = weakref.WeakKeyDictionary()


class Step(NamedTuple):
    """A step that `decode` takes: so many tokens of each sequence."""

    backend: object
    slots: torch.Tensor  # [sequences]
    tokens: int
    has_drafts: bool


def with_region(by_key_heads: bool) -> Callable:
    """Replaces the forward of a layer's class. by_key_heads: the layout of its projections, as in split_projections."""

    def replace_forward(theirs: Callable) -> Callable:
        @functools.wraps(theirs)
        def forward(self, hidden_states, forward_batch):
            step = None if torch.compiler.is_compiling() else _step_of(hidden_states, forward_batch)
            if step is None or not _fits(self, step, hidden_states.dtype):
                return theirs(self, hidden_states, forward_batch)
            return decode(self, step, hidden_states, forward_batch, by_key_heads)

        return forward

    return replace_forward


def _step_of(hidden_states: torch.Tensor, forward_batch: object) -> Step | None:
    """None for other steps, and for other backends than SGLang's for GPUs."""
    modes = forward_batch.forward_mode, getattr(forward_batch, "logical_forward_mode", forward_batch.forward_mode)
    has_drafts = all(mode.is_target_verify() for mode in modes)
    if not (has_drafts or all(mode.is_decode() for mode in modes)) or not torch.is_tensor(hidden_states):
        return None
    current = getattr(sys.modules.get(_ATTENTION), "get_attn_backend", None)  # since 0.5.13
    backend = getattr(forward_batch, "attn_backend", None) if current is None else current()
    backend = getattr(backend, "linear_attn_backend", None)
    if type(backend) is not getattr(sys.modules.get(_BACKEND), "GDNAttnBackend", None):
        return None
    slots, rows = getattr(backend.forward_metadata, "mamba_cache_indices", None), hidden_states.shape[0]
    if slots is None:
        return None
    if not has_drafts:  # with data-parallel attention a rank may have rows beyond its sequences
        return Step(backend, slots, 1, False) if slots.shape == (rows,) else None
    # With pipeline parallelism a sequence's row among the intermediate states may be another one.
    has_other_rows = getattr(sys.modules.get(_UTILITIES), "pp_spec_stable_rows_enabled", bool)
    is_tree = any(getattr(backend.forward_metadata, name) is not None for name in _TREE_TABLES)
    tokens = forward_batch.spec_info.draft_token_num
    if is_tree or has_other_rows() or tokens > _MOST_DRAFTS or rows % tokens or slots.shape[0] < rows // tokens:
        return None
    return Step(backend, slots[: rows // tokens], tokens, True)


def _fits(layer: torch.nn.Module, step: Step, dtype: torch.dtype) -> bool:
    reasons = _reasons.setdefault(layer, {})
    if step.has_drafts not in reasons:
        reasons[step.has_drafts] = _why_not(layer, step, dtype)
        _layers.say("sglang", reasons[step.has_drafts])
    return reasons[step.has_drafts] is None


def _pools(layer: torch.nn.Module, backend: object) -> object:
    return backend.req_to_token_pool.mamba2_layer_cache(layer.attn.layer_id)


def _why_not(layer: torch.nn.Module, step: Step, dtype: torch.dtype) -> str | None:
    """Why SGLang's own forward runs the layer, or None."""
    try:
        backend_members = _DRAFT_MEMBERS if step.has_drafts else _BACKEND_MEMBERS
        for part, names in (
            (layer, _LAYER_MEMBERS),
            (layer.attn, _ATTENTION_MEMBERS),
            (step.backend, backend_members),
        ):
            for name in names:
                getattr(part, name)
        pools, weight, kernels = _pools(layer, step.backend), layer.attn.conv_weights, step.backend.kernel_dispatcher
        kernel = kernels.verify_kernel if step.has_drafts else kernels.decode_kernel
        drafts = (pools.intermediate_ssm, pools.intermediate_conv_window[0]) if step.has_drafts else ()
        windows = pools.conv[0]
        if type(kernel).__name__ != "TritonGDNKernel":
            return f"{type(kernel).__name__} decodes"
        # The names are missing in older releases.
        if any(getattr(pools, name, None) is not None for name in ("replayssm_d", "replayssm_rawv")):
            return "--enable-linear-replayssm keeps tokens with the states"
        if windows.shape[1:] != (weight.shape[0], weight.shape[1] - 1):
            return f"windows are {[*windows.shape]} for weights {[*weight.shape]}"
        if any(
            x is None or x.shape[2:] != y.shape[1:] for x, y in zip(drafts, (pools.temporal, windows), strict=False)
        ):
            return "the states and windows after drafts are kept in another form"
        if not (_layers.is_plain(layer.attn) and _layers.is_plain(layer.norm)):
            return "its attention or norm has a hook"
        return _layers.why_not(layer, dtype, windows.dtype, pools.temporal.dtype)
    except AttributeError as error:
        return str(error)


@functools.cache
def _takes_layer(track: Callable) -> bool:
    return "layer_id" in inspect.signature(track).parameters  # since 0.5.17


def decode(
    layer: torch.nn.Module, step: Step, hidden_states: torch.Tensor, forward_batch: object, by_key_heads: bool
) -> torch.Tensor:
    """The layer's forward for one token or the drafts of each sequence, [sequences * tokens, channels].

    A sequence without a slot has zero output before the last projection; SGLang starts it from zero.
    """
    attn, backend, pools = layer.attn, step.backend, _pools(layer, step.backend)
    windows, states = pools.conv[0], pools.temporal
    sizes = (attn.num_k_heads, attn.num_v_heads // attn.num_k_heads, attn.head_k_dim, attn.head_v_dim)
    projected = _layers.split_projections(*layer._forward_input_proj(hidden_states), *sizes, by_key_heads)
    mixed, z, b, a = (x.unflatten(0, (-1, step.tokens)) for x in projected)
    drafts = {}
    if step.has_drafts:
        drafts = {
            "intermediate_states": pools.intermediate_ssm,
            "intermediate_windows": pools.intermediate_conv_window[0],
            "intermediate_indices": backend.verify_intermediate_state_indices[: step.slots.shape[0]],
            "update_state": False,
        }
    y = flash_qla.decode_gated_delta_net(
        mixed, z, a, b, attn.conv_weights, attn.bias, layer.norm.weight, attn.A_log, attn.dt_bias,
        windows, states, step.slots, **_layers.norm_options(layer), **drafts,
    )  # fmt: skip
    if not step.has_drafts:  # copies for the radix cache
        layer_ids = (attn.layer_id,) if _takes_layer(type(backend)._track_mamba_state_decode) else ()
        backend._track_mamba_state_decode(forward_batch, windows, states, step.slots, *layer_ids)
    output, _ = layer.out_proj(y.flatten(0, 1).flatten(1))
    return output
