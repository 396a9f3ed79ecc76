"""FLA's GatedDeltaNet layer with its region on flash_qla.

use() replaces the forward of FLA's class. If a layer's parts are the known ones, flash_qla runs

  training and prefill          three convolutions, the delta rule and the gated norm; the projections stay three, so
                                nothing is concatenated
  one token after a cache's     decode_gated_delta_net, on the cache's windows and state, in place

FLA's own forward runs every other call, whose delta rule FLA dispatches to flash_qla.
"""

import functools
import inspect
import logging

import torch
from fla.layers import gated_deltanet, utils
from fla.modules import FusedRMSNormGated, ShortConvolution

import flash_qla
from flash_qla._binary import MOST_KEY_DIM
from flash_qla._layout import HEAD_DIM_STEP, MOST_VALUE_DIM
from flash_qla.integrations import _fla_backend
from flash_qla.integrations._gpus import REASON, keeps_theirs
from flash_qla.integrations._layers import is_plain, slots_of

_LAYER = gated_deltanet.GatedDeltaNet
_their_forward = _LAYER.forward
_PARAMETERS = ("self", "hidden_states", "attention_mask", "past_key_values", "use_cache", "output_attentions", "kwargs")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_FEW_TOKENS = 64  # FLA decodes up to so many without gradients


def _why_not_part(part: torch.nn.Module, expected: type) -> str | None:
    """Why a part is not what flash_qla computes, or None."""
    if type(part) is not expected:
        return f"a {type(part).__name__}, not a {expected.__name__}"
    return None if is_plain(part) else "hooked"


def _why_not_layer(layer: torch.nn.Module, dtype: torch.dtype | None) -> str | None:
    """Why the layer's parts are not those that flash_qla computes, or None. dtype: that of the projections."""
    if not layer.use_short_conv or not layer.use_gate:
        return f"the layer has no {'convolution' if layer.use_gate else 'gated norm'}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "q_proj has no weight" if dtype is None else f"its dtype is {dtype}"
    for name in _CONVOLUTIONS:
        convolution = getattr(layer, name)
        reason = _why_not_part(convolution, ShortConvolution)
        if reason is None and not 2 <= convolution.kernel_size[0] <= 4:
            reason = f"{convolution.kernel_size[0]} taps wide"
        if reason is None and convolution.weight.dtype not in (dtype, torch.float32):
            reason = f"of {convolution.weight.dtype} on {dtype}"
        if reason is not None:
            return f"{name} is {reason}"
    reason = _why_not_part(layer.o_norm, FusedRMSNormGated)
    if reason is None and layer.o_norm.weight is None:
        reason = "without a weight"
    return None if reason is None else f"o_norm is {reason}"


def _why_not_rule(layer: torch.nn.Module, x: torch.Tensor) -> str | None:
    """Why flash_qla's delta rule does not run on the layer's tokens, or None."""
    if not _fla_backend.Backend().is_enabled():
        return "FLA_FLASH_QLA=0"
    if keeps_theirs(x.device):
        return REASON
    K, V = layer.head_k_dim, layer.head_v_dim
    if K % HEAD_DIM_STEP or V % HEAD_DIM_STEP or K > MOST_KEY_DIM or V > MOST_VALUE_DIM:
        return f"K = {K} and V = {V}"
    return None


def _dtype_of(layer: torch.nn.Module, x: torch.Tensor) -> torch.dtype | None:
    """The dtype of the projections; None if they have no weights under that name, as some quantized ones."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    weight = getattr(layer.q_proj, "weight", None)
    return None if weight is None else weight.dtype


@functools.cache
def _say(parts: str) -> None:
    """One line per process and text."""
    logging.getLogger("fla.flash_qla").info("flash_qla runs %s of GatedDeltaNet", parts)


def forward(
    self,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values=None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    **kwargs,
):
    """GatedDeltaNet.forward, in FLA's arguments and results."""

    def theirs():
        return _their_forward(
            self, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs
        )

    T, cu_seqlens = hidden_states.shape[1], kwargs.get("cu_seqlens")
    cache = utils.get_layer_cache(self, past_key_values)
    is_decoding = not torch.is_grad_enabled() and ((T <= _FEW_TOKENS and not self.training) or self.mode != "chunk")
    continues = is_decoding or cache is not None
    if continues and not (use_cache and cu_seqlens is None and _is_next_token(self, hidden_states, cache)):
        return theirs()
    all_parts = "decoding as one op" if continues else "convolutions, delta rule and norm"
    reason = _why_not_rule(self, hidden_states)
    parts = "the delta rule alone" if reason is None else "nothing"
    dtype = _dtype_of(self, hidden_states)
    reason = reason or _why_not_layer(self, dtype)
    if reason is None and continues:
        reason = _why_not_decode(self, cache, len(hidden_states), dtype)
    if not torch.compiler.is_compiling():
        _say(f"{parts} ({reason})" if reason else all_parts)
    if reason is not None:
        return theirs()
    if continues:
        return _decode(self, hidden_states, attention_mask, past_key_values, cache)
    return _forward(self, hidden_states, attention_mask, past_key_values, use_cache, cu_seqlens)


def _is_next_token(layer: torch.nn.Module, x: torch.Tensor, cache: dict | None) -> bool:
    """Whether a call decodes one token of each sequence after a cache's, outside of torch.compile."""
    is_step = x.shape[1] == 1 and not (torch.is_grad_enabled() or layer.training or torch.compiler.is_compiling())
    return is_step and cache is not None and cache["conv_state"] is not None and cache["recurrent_state"] is not None


def _why_not_decode(layer: torch.nn.Module, cache: dict, N: int, dtype: torch.dtype) -> str | None:
    """Why decode_gated_delta_net does not take the parts that _why_not_layer takes, or None."""
    convolutions = [getattr(layer, name) for name in _CONVOLUTIONS]
    if len({(x.kernel_size[0], x.bias is None, x.weight.dtype) for x in convolutions}) > 1:
        return "its convolutions differ in taps, bias or dtype"
    if {x.activation for x in convolutions} - {"silu", "swish"}:
        return "a convolution's activation is not silu"
    width = convolutions[0].kernel_size[0]
    for x, convolution in zip(cache["conv_state"], convolutions, strict=True):
        expected = (N, convolution.weight.shape[0], width)
        if x is None or x.dtype != dtype or x.shape != expected:
            got = None if x is None else f"{[*x.shape]} in {x.dtype}"
            return f"a window of its cache is {got}, not {[*expected]} in {dtype}"
    return None


def _as_one_tensor(windows: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """[N, D, W] if the windows, [N, channels, W] each, are its parts in this order, or None."""
    first, D = windows[0], sum(x.shape[1] for x in windows)
    N, _, W = first.shape
    strides, offset = (D * W, W, 1), first.storage_offset()
    for x in windows:
        is_same = type(x) is torch.Tensor and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_same or (x.stride(), x.storage_offset()) != (strides, offset):
            return None
        offset += x.shape[1] * W
    return first.as_strided((N, D, W), strides)


def _merged(windows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The windows in one tensor, and its parts, in which FLA's cache keeps them: then the next token copies nothing.
    Only their addresses tell, because caches are copied, pickled and built again."""
    merged = _as_one_tensor(windows)
    if merged is not None:
        return merged, windows
    merged = torch.cat(tuple(windows), 1)
    return merged, merged.split([x.shape[1] for x in windows], 1)


def _decode(layer, hidden_states, attention_mask, past_key_values, cache):
    """forward for one token of each sequence, [N, 1, hidden_size]. FLA too writes the windows in place."""
    convolutions, V = [getattr(layer, name) for name in _CONVOLUTIONS], layer.head_v_dim
    mixed = torch.cat([getattr(layer, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj")], -1)
    weight = torch.cat([x.weight for x in convolutions])
    bias = None if convolutions[0].bias is None else torch.cat([x.bias for x in convolutions])
    (merged, windows), state = _merged(cache["conv_state"]), cache["recurrent_state"].contiguous()
    slots = slots_of(hidden_states)
    if attention_mask is not None:  # a sequence whose token is padding has no slot
        slots = torch.where(attention_mask[:, -1] != 0, slots, -1)
    y = flash_qla.decode_gated_delta_net(
        mixed, layer.g_proj(hidden_states).unflatten(-1, (-1, V)), layer.a_proj(hidden_states),
        layer.b_proj(hidden_states), weight, bias, layer.o_norm.weight, layer.A_log, layer.dt_bias, merged,
        state, slots, allow_neg_eigval=layer.allow_neg_eigval, norm_eps=layer.o_norm.eps,
        norm_activation=_norm_activation(layer),
    )  # fmt: skip
    utils.update_layer_cache(
        module=layer, past_key_values=past_key_values, recurrent_state=state, conv_state=windows, offset=1
    )
    return layer.o_proj(y.flatten(-2)), None, past_key_values


def _norm_activation(layer: torch.nn.Module) -> str:
    return "sigmoid" if layer.o_norm.activation == "sigmoid" else "silu"


def _forward(self, hidden_states, attention_mask, past_key_values, use_cache, cu_seqlens):
    rows, T, _ = hidden_states.shape
    hidden_states, indices, cu_seqlens = utils.unpad_hidden_states(
        hidden_states=hidden_states, cu_seqlens=cu_seqlens, attention_mask=attention_mask, q_len=T
    )
    N = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def convolve(x: torch.Tensor, convolution: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = convolution.kernel_size[0]  # FLA's windows have so many columns
        window = x.new_zeros(N, x.shape[2], width) if use_cache else None
        return flash_qla.causal_conv1d(
            x, convolution.weight, convolution.bias, activation=convolution.activation, initial_state=window,
            output_final_state=bool(use_cache), cu_seqlens=cu_seqlens,
        )  # fmt: skip

    q, window_of_q = convolve(self.q_proj(hidden_states), self.q_conv1d)
    k, window_of_k = convolve(self.k_proj(hidden_states), self.k_conv1d)
    v, window_of_v = convolve(self.v_proj(hidden_states), self.v_conv1d)
    K, V = self.head_k_dim, self.head_v_dim
    o, state = flash_qla.chunk_gated_delta_rule(
        q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V)),
        self.a_proj(hidden_states), self.b_proj(hidden_states),
        output_final_state=bool(use_cache), use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, state_v_first=True,
        use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=self.allow_neg_eigval,
    )  # fmt: skip
    windows = (window_of_q, window_of_k, window_of_v)
    utils.update_layer_cache(
        module=self, past_key_values=past_key_values, recurrent_state=state, conv_state=windows, offset=T
    )
    z = self.g_proj(hidden_states).unflatten(-1, (-1, V))
    y = flash_qla.gated_rms_norm(o, z, self.o_norm.weight, eps=self.o_norm.eps, activation=_norm_activation(self))
    y = self.o_proj(y.flatten(-2))
    y = utils.repad_hidden_states(hidden_states=y, indices=indices, batch_size=rows, q_len=T)
    return y, None, past_key_values


def use() -> None:
    names = tuple(inspect.signature(_their_forward).parameters)
    if names != _PARAMETERS:
        _say(f"the delta rule alone (its forward has other arguments: {', '.join(names)})")
    else:
        _LAYER.forward = forward


def restore() -> None:
    _LAYER.forward = _their_forward
