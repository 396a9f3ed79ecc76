"""FLA's GatedDeltaNet layer with its region on flash_qla: three convolutions, the delta rule and the gated norm.

use() replaces the forward of FLA's class. A call whose parts are the known ones runs `forward` of this module; FLA's
own forward runs every other call, whose delta rule FLA dispatches to flash_qla. The projections stay three, so nothing
is concatenated.
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

_LAYER = gated_deltanet.GatedDeltaNet
_their_forward = _LAYER.forward
_PARAMETERS = ("self", "hidden_states", "attention_mask", "past_key_values", "use_cache", "output_attentions", "kwargs")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FEW_TOKENS = 64  # FLA decodes up to so many without gradients


def _of_part(part: torch.nn.Module, expected: type) -> str | None:
    """Why a part is not what flash_qla computes, or None."""
    if type(part) is not expected:
        return f"a {type(part).__name__}, not a {expected.__name__}"
    if "forward" in vars(part) or any(getattr(part, x) for x in _HOOKS):
        return "hooked"
    return None


def _of_layer(layer: torch.nn.Module, dtype: torch.dtype) -> str | None:
    """Why the layer's parts are not those that flash_qla computes, or None. dtype: that of the projections."""
    if not layer.use_short_conv or not layer.use_gate:
        return f"the layer has no {'convolution' if layer.use_gate else 'gated norm'}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its dtype is {dtype}"
    for name in _CONVOLUTIONS:
        convolution = getattr(layer, name)
        reason = _of_part(convolution, ShortConvolution)
        if reason is None and not 2 <= convolution.kernel_size[0] <= 4:
            reason = f"{convolution.kernel_size[0]} taps wide"
        if reason is None and convolution.weight.dtype not in (dtype, torch.float32):
            reason = f"of {convolution.weight.dtype} on {dtype}"
        if reason is not None:
            return f"{name} is {reason}"
    reason = _of_part(layer.o_norm, FusedRMSNormGated)
    if reason is None and layer.o_norm.weight is None:
        reason = "without a weight"
    return None if reason is None else f"o_norm is {reason}"


def _of_call(layer: torch.nn.Module, x: torch.Tensor) -> str | None:
    """Why flash_qla's delta rule does not run on the layer's tokens, or None."""
    if not _fla_backend.Backend().is_enabled():
        return "FLA_FLASH_QLA=0"
    if keeps_theirs(x.device):
        return REASON
    K, V = layer.head_k_dim, layer.head_v_dim
    if K % HEAD_DIM_STEP or V % HEAD_DIM_STEP or K > MOST_KEY_DIM or V > MOST_VALUE_DIM:
        return f"K = {K} and V = {V}"
    return None


def _dtype_of(layer: torch.nn.Module, x: torch.Tensor) -> torch.dtype:
    """The dtype of the projections."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.q_proj.weight.dtype


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
    T = hidden_states.shape[1]
    is_decoding = not torch.is_grad_enabled() and ((T <= _FEW_TOKENS and not self.training) or self.mode != "chunk")
    if is_decoding or utils.get_layer_cache(self, past_key_values) is not None:  # FLA's parts keep the states
        return _their_forward(
            self, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs
        )
    reason = _of_call(self, hidden_states)
    parts = "the delta rule alone" if reason is None else "nothing"
    reason = reason or _of_layer(self, _dtype_of(self, hidden_states))
    if not torch.compiler.is_compiling():
        _say(f"{parts} ({reason})" if reason else "convolutions, delta rule and norm")
    if reason is not None:
        return _their_forward(
            self, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs
        )
    return _forward(self, hidden_states, attention_mask, past_key_values, use_cache, kwargs.get("cu_seqlens"))


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
    activation = "sigmoid" if self.o_norm.activation == "sigmoid" else "silu"
    z = self.g_proj(hidden_states).unflatten(-1, (-1, V))
    y = flash_qla.gated_rms_norm(o, z, self.o_norm.weight, eps=self.o_norm.eps, activation=activation)
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
