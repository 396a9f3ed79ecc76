"""A Gated DeltaNet layer of transformers as one op between its projections: flash_qla.gated_delta_net in training and
prefill, and flash_qla.decode_gated_delta_net for one token, on the cache's window and state.

gated_delta_net keeps less for the backward than its parts: not the convolution's result. The layer's own forward, with
flash_qla's functions in it, runs several tokens after a cache's, and each call if a part is not the one that the op
computes: one with a hook, an adapter or another formula.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable

import torch

import flash_qla
from flash_qla import _binary
from flash_qla._layout import MOST_VALUE_DIM
from flash_qla.integrations._layers import is_plain, slots_of

_NEXT = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")  # Qwen3-Next
_PACKED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen3.5
_SEPARATE = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")  # OLMo-Hybrid
_FLAGS = ("cu_seq_lens_q", "max_length_q")  # keywords of the model that the op takes


def norm_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    return getattr(layer, "norm", None) or getattr(layer, "o_norm", None)


def projections(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """mixed, z, b and a of the op, or None if the layer has none of the known projections."""
    if all(hasattr(layer, name) for name in _NEXT):
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        return torch.cat([y.flatten(2) for y in (q, k, v)], -1), z, b, a
    if all(hasattr(layer, name) for name in _PACKED):
        return tuple(getattr(layer, name)(x) for name in _PACKED)
    if all(hasattr(layer, name) for name in _SEPARATE):
        q, k, v, *others = (getattr(layer, name)(x) for name in _SEPARATE)
        return torch.cat((q, k, v), -1), *others
    return None


def layer_cache_of(layer: torch.nn.Module, cache: object) -> object | None:
    """The layer's part of a cache, or None if it is of an unknown kind or keeps what a rollback needs."""
    layers, index = getattr(cache, "layers", ()), getattr(layer, "layer_idx", None)
    layer_cache = layers[index] if index is not None and index < len(layers) else None
    names = ("conv_states", "recurrent_states", "has_previous_state")
    is_known = all(isinstance(getattr(layer_cache, name, None), dict) for name in names)
    return layer_cache if is_known and not getattr(layer_cache, "record_past", False) else None


def states_of(layer_cache: object, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The window, [B, D, W], and the state, [B, H_v, V, K], of a layer's part of a cache. None if the state has its
    keys first in memory, as after a reordering of beams, or if the window has another width."""
    window, state = layer_cache.conv_states[0], layer_cache.recurrent_states[0]
    is_known = window is not None and state is not None and window.shape[-1] == width and state.dim() == 4
    return (window, state.mT) if is_known and state.mT.is_contiguous() else None


def forward(
    layer: torch.nn.Module, hidden_states, attention_mask=None, cu_seq_lens_q=None, max_length_q=None, cache=None,
    states=None,
):  # fmt: skip
    """The layer's forward without a previous state, for an empty `cache` or none; with `states` of states_of that of
    one token."""
    norm, conv = norm_of(layer), layer.conv1d
    # FSDP and others make classes from a layer's, in modules of their own.
    modules = (sys.modules.get(x.__module__) for x in type(layer).__mro__)
    apply_mask = next(x.apply_mask_to_padding_states for x in modules if hasattr(x, "apply_mask_to_padding_states"))
    mixed, z, b, a = projections(layer, apply_mask(hidden_states, attention_mask))
    V, K = norm.weight.shape[0], layer.head_k_dim
    tensors = (mixed, z.reshape(*z.shape[:2], -1, V), a, b, conv.weight, conv.bias, norm.weight)
    tensors += (layer.A_log, layer.dt_bias)
    options = {"norm_eps": norm.variance_epsilon, "norm_activation": norm.activation}
    options["allow_neg_eigval"] = getattr(layer, "allow_neg_eigval", False)
    if states is not None:
        y = flash_qla.decode_gated_delta_net(*tensors, *states, slots_of(mixed), **options)
    else:
        options |= {"num_k_heads": (mixed.shape[2] - a.shape[2] * V) // (2 * K), "head_k_dim": K}
        options |= {"output_final_state": cache is not None, "state_v_first": True}
        max_seqlen = max_length_q if isinstance(max_length_q, int) else None
        y, state, _ = flash_qla.gated_delta_net(*tensors, **options, cu_seqlens=cu_seq_lens_q, max_seqlen=max_seqlen)
        if cache is not None:  # which keeps the strides of states
            cache.update_conv_state(mixed.mT, layer.layer_idx, conv_kernel_size=conv.kernel_size[0])
            cache.update_recurrent_state(state.mT, layer.layer_idx)
    out_proj = layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj
    return out_proj(y.flatten(2))


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives x, or None where it is off."""
    device = x.device.type
    is_on = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def why_not(layer: torch.nn.Module, x: torch.Tensor, is_known_norm: Callable) -> str | None:
    """Why a part of the layer is not the op's, or None. is_known_norm: whether a norm runs flash_qla's."""
    conv, norm = layer.conv1d, norm_of(layer)
    if type(conv) is not torch.nn.Conv1d or not is_plain(conv):
        return "its convolution has a hook, or is another one"
    if not is_known_norm(norm) or not is_plain(norm) or len(norm.weight) > MOST_VALUE_DIM:
        return "its norm has a hook, or is another one"
    if not 2 <= conv.kernel_size[0] <= 4 or getattr(layer, "activation", "silu") not in ("silu", "swish"):
        return f"its convolution has {conv.kernel_size[0]} taps and {getattr(layer, 'activation', 'silu')}"
    is_known = conv.weight.dtype in (autocast_dtype(x) or x.dtype, torch.float32)
    return None if is_known else f"its convolution is in {conv.weight.dtype}"


@functools.cache
def _say(name: str, reason: str | None) -> None:
    """One line per process and text."""
    text = "as one op" if reason is None else f"by parts: {reason}"
    logging.getLogger("transformers.flash_qla").info("flash_qla runs %s %s", name, text)


def with_region(theirs: Callable, is_known_norm: Callable, keywords: frozenset[str]) -> Callable:
    """A layer's forward `theirs`, and the op where it can take its place. keywords: those that flash_qla's functions
    read in `theirs`, so a call with another of them is not the op's."""
    _, _, cache, mask, *_ = inspect.signature(theirs).parameters

    @functools.wraps(theirs)
    def layer_forward(self, hidden_states, *args, **kwargs):
        arguments = dict(zip((cache, mask), args, strict=False)) | kwargs
        other_keywords = arguments.keys() & (keywords | {"seq_idx"}) - {*_FLAGS}
        is_packed = arguments.get("cu_seq_lens_q") is not None
        cached, states = arguments.get(cache), None
        is_supported = cached is None
        layer_cache = None if is_supported or is_packed else layer_cache_of(self, cached)
        if layer_cache is not None and not layer_cache.has_previous_state.get(0):
            is_supported = True
        elif layer_cache is not None and hidden_states.shape[1] == 1 and not torch.is_grad_enabled():
            states = states_of(layer_cache, self.conv1d.kernel_size[0])
            is_supported = states is not None
        if is_supported and (is_packed or not other_keywords) and other_keywords <= {"seq_idx"}:
            reason = why_not(self, hidden_states, is_known_norm)
            if not torch.compiler.is_compiling():
                _say(type(self).__name__, reason)
            if reason is None:
                flags = {x: arguments[x] for x in _FLAGS if x in arguments}
                return forward(self, hidden_states, arguments.get(mask), **flags, cache=cached, states=states)
        return theirs(self, hidden_states, *args, **kwargs)

    return layer_forward


class _Probe(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, function: Callable):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x)


def agrees(layer: torch.nn.Module, theirs: Callable) -> bool:
    """Whether `forward` computes what `theirs` does, on a few random numbers on the CPU."""
    names = [*inspect.signature(theirs).parameters]
    on_cpu = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    if len(names) < 4 or not hasattr(layer, "conv1d") or norm_of(layer) is None:
        return False
    try:
        weights = {f"layer.{name}": torch.randn(x.shape, **on_cpu) for name, x in layer.named_parameters()}
        weights = {name: x / max(x.shape[-1], 1) ** 0.5 if x.dim() > 1 else x for name, x in weights.items()}
        x = torch.randn(1, 5, layer.hidden_size, **on_cpu)
        no_autocast = torch.autocast("cpu", enabled=False)
        with _binary.slow_path_is_meant(), torch.no_grad(), torch.device("cpu"), no_autocast:
            expected, actual = (torch.func.functional_call(_Probe(layer, f), weights, (x,)) for f in (theirs, forward))
    except Exception:  # of any kind: the layer has other parts or arguments, or needs a GPU
        return False
    return expected.shape == actual.shape and torch.allclose(expected, actual, rtol=1e-3, atol=1e-4)
