"""vLLM's layer of Qwen3-Next and Qwen3.5: all between its projections is a call of flash_qla's, or two.

vLLM has a path that takes the norm into the layer's custom op, for its own kernel of drafts. A layer whose parts are
flash_qla's gets that path for every step, and this module's method in it:

  decoding, also with drafts    decode_gated_delta_net
  prefill                       prefill_gated_delta_net
  prefill and decoding          both, because vLLM has the tokens of decoding first

Other steps run the functions that the layer had without it: those with drafts beside other sequences, with checkpoints
of prefixes, with a prefill where windows have columns for drafts, and drafts if VLLM_GDN_DECODE_KERNEL=cuda asks for
vLLM's kernel.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

import torch

import flash_qla
from flash_qla._layout import DECODE_TOKENS
from flash_qla.integrations import _layers
from flash_qla_environment import is_not_off

NULL_INDEX = 0  # vLLM's null slot
_fused_layers = weakref.WeakKeyDictionary()  # layers with the path -> whether vLLM's own configuration gave it to them


def with_region(theirs: Callable) -> Callable:
    """The layer's constructor, which then turns the path on."""

    @functools.wraps(theirs)
    def __init__(self, config, vllm_config, prefix="", gqa_interleaved_layout=False, reduce_results=True):
        theirs(self, config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        reason = _layers.why_not(self, vllm_config.model_config.dtype, *self.get_state_dtype())
        self.has_flash_qla_region = reason is None
        if reason is None:
            _fused_layers[self] = self.enable_fused_gdn_spec_decode
            self.enable_fused_gdn_spec_decode = True
        _layers.say("vllm", reason)

    return __init__


def restore() -> None:
    """Give the layers vLLM's own path again: without this module's method it does not know tokens by key heads."""
    while _fused_layers:
        layer, is_fused = _fused_layers.popitem()
        layer.has_flash_qla_region, layer.enable_fused_gdn_spec_decode = False, is_fused


def forward_core(theirs: Callable) -> Callable:
    """The layer's work between its projections, with the norm."""

    @functools.wraps(theirs)
    def _forward_core_fused_norm_packed(self, mixed_qkvz, ba, core_attn_out):
        metadata = _metadata(self)
        if metadata is not None and _decodes(self, metadata):
            decode(self, metadata, mixed_qkvz, ba, core_attn_out)
        elif metadata is not None and _prefills(self, metadata):
            prefill(self, metadata, mixed_qkvz, ba, core_attn_out)
        elif metadata is None or not self.gqa_interleaved_layout:
            theirs(self, mixed_qkvz, ba, core_attn_out)
        else:  # as the layer without this path
            mixed_qkv, z, b, a = split_packed(self, mixed_qkvz, ba)
            self._forward_core(mixed_qkv=mixed_qkv, b=b.contiguous(), a=a.contiguous(), core_attn_out=core_attn_out)
            o = core_attn_out[: metadata.num_actual_tokens]
            self._rms_norm_gated_cuda(o, z[: o.shape[0]], o)

    return _forward_core_fused_norm_packed


def _metadata(layer):
    """The step's metadata; None where vLLM warms up."""
    metadata = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def _decodes(layer, metadata) -> bool:
    """Whether every sequence of a step has one token, or every one has drafts."""
    if not getattr(layer, "has_flash_qla_region", False) or metadata.num_prefills > 0:
        return False
    if metadata.spec_sequence_masks is None:
        return metadata.num_decodes > 0 and metadata.non_spec_state_indices_tensor.dim() == 1
    is_all_drafts = metadata.num_decodes == 0 < metadata.num_spec_decodes and layer.gdn_decode_kernel != "cuda"
    return is_all_drafts and metadata.spec_state_indices_tensor.shape[1] <= DECODE_TOKENS  # in one kernel


def _prefills(layer, metadata) -> bool:
    """Whether every sequence of a step is a prompt, or a token that follows one, and nothing is kept of it."""
    unsupported = ("spec_sequence_masks", "checkpoint", "flashinfer_checkpoint_plan")
    return (
        getattr(layer, "has_flash_qla_region", False)
        and all(getattr(metadata, x, None) is None for x in unsupported)
        and getattr(metadata, "prefill_state_indices", None) is not None  # of newer releases
        and metadata.num_prefills > 0
        and metadata.num_decodes == metadata.num_decode_tokens
        and _windows(layer).shape[2] == layer.conv1d.weight.shape[-1] - 1
    )


def _windows(layer) -> torch.Tensor:
    """The pool of windows, [slots, D, columns]."""
    windows = layer.kv_cache[0]
    return windows if windows.shape[1] == layer.conv1d.weight.shape[0] else windows.transpose(1, 2)


def _arguments_of(layer, windows: torch.Tensor, slots: torch.Tensor) -> tuple[tuple, dict]:
    """Weights and pools, and the norm and more by name, as both of flash_qla's functions take them."""
    weights = (layer.conv1d.weight.flatten(1), layer.conv1d.bias, layer.norm.weight, layer.A_log, layer.dt_bias)
    return (*weights, windows, layer.kv_cache[1], slots), {"null_index": NULL_INDEX} | _layers.norm_options(layer)


def decode(layer, metadata, mixed_qkvz, ba, core_attn_out, tokens: int | None = None) -> None:
    """A step of decoding, written to core_attn_out [tokens, H_v, V].

    Args:
        layer: with conv1d, norm, A_log, dt_bias, kv_cache and the numbers of heads.
        metadata: a step that _decodes takes, or _prefills.
        mixed_qkvz: [tokens, 2 H_k K + 2 H_v V], packed or by key heads.
        ba: [tokens, 2 H_v], likewise.
        tokens: those of decoding, the first ones; all by default.
    """
    tokens = metadata.num_actual_tokens if tokens is None else tokens
    has_drafts, windows = metadata.spec_sequence_masks is not None, _windows(layer)
    if has_drafts:
        N = metadata.num_spec_decodes
        slots = metadata.spec_state_indices_tensor[:N]
        tables = {
            "cu_seqlens": metadata.spec_query_start_loc[: N + 1],
            "num_accepted_tokens": metadata.num_accepted_tokens[:N],
            "write_indices": slots,
        }
    else:  # with drafts in other steps a window has more columns, of which the first ones count
        slots, tables = metadata.non_spec_state_indices_tensor[:tokens], {}
        windows = windows[..., : layer.conv1d.weight.shape[-1] - 1]

    def step_tokens(x):
        return x[:tokens].unsqueeze(0 if has_drafts else 1)

    mixed, z, b, a = map(step_tokens, split_projections(layer, mixed_qkvz, ba))
    tensors, options = _arguments_of(layer, windows, slots)
    flash_qla.decode_gated_delta_net(mixed, z, a, b, *tensors, out=step_tokens(core_attn_out), **options, **tables)


def prefill(layer, metadata, mixed_qkvz, ba, core_attn_out) -> None:
    """A step that _prefills takes, as decode."""
    begin, end = metadata.num_decode_tokens, metadata.num_actual_tokens
    if begin > 0:
        decode(layer, metadata, mixed_qkvz, ba, core_attn_out, begin)
    mixed, z, b, a = (x[None] for x in split_packed(layer, mixed_qkvz[begin:end], ba[begin:end]))
    tensors, options = _arguments_of(layer, _windows(layer), metadata.prefill_state_indices)
    flash_qla.prefill_gated_delta_net(
        mixed, z, a, b, *tensors, num_k_heads=layer.num_k_heads // layer.tp_size, head_k_dim=layer.head_k_dim,
        cu_seqlens=metadata.prefill_query_start_loc, has_initial_state=metadata.prefill_has_initial_state,
        batch_invariant=is_not_off("VLLM_BATCH_INVARIANT"), out=core_attn_out[None, begin:end], **options,
    )  # fmt: skip


def split_packed(layer, mixed_qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """split_projections, with mixed [tokens, 2 H_k K + H_v V] and z [tokens, H_v, V]; a copy of tokens by key heads."""
    if not layer.gqa_interleaved_layout:
        return split_projections(layer, mixed_qkvz, ba)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(mixed_qkvz, ba)
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
    return mixed, z.reshape(len(z), -1, layer.head_v_dim), b, a


def split_projections(layer, mixed_qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """mixed, z, b and a of the projections, as views."""
    H_k, group = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.num_k_heads
    sizes = (H_k, group, layer.head_k_dim, layer.head_v_dim)
    return _layers.split_projections(mixed_qkvz, ba, *sizes, layer.gqa_interleaved_layout)
