"""The region of a Gated DeltaNet layer between its projections, as one function; on states of its own or in pools."""

from typing import Literal

import torch

from flash_qla.cp import CPContext, published, region as cp_region
from flash_qla.ops import autograd
from flash_qla.ops.checks import explain


def _by_heads(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x with a dimension of heads, those of a, if it has none. The op refuses other shapes."""
    is_flat = x.dim() == 3 and a.dim() == 3 and a.shape[2] > 0 and x.shape[2] % a.shape[2] == 0
    return x.unflatten(-1, (a.shape[2], -1)) if is_flat else x


def gated_delta_net(
    mixed: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    *,
    num_k_heads: int,
    head_k_dim: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_window: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    state_dtype: torch.dtype | None = None,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-6,
    norm_activation: Literal["silu", "sigmoid"] = "silu",
    cp_context: CPContext | published.FlashQLACPContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The convolution, the Gated Delta Rule and the gated norm of a layer: all between its projections.

        y, state, window = gated_delta_net(
            mixed, z, a, b, conv1d.weight, conv1d.bias, norm.weight, A_log, dt_bias, num_k_heads=16, head_k_dim=128
        )

    These are the functions

        x, window = causal_conv1d(mixed, conv_weight, conv_bias)
        o, state = chunk_gated_delta_rule_packed(x, a, b, num_k_heads, head_k_dim, ...)
        y = gated_rms_norm(o, z, norm_weight)

    with the l2norm of q and k and the activations of a (the gate) and b (beta) inside. The results have their bits. Of
    the results of the parts autograd saves o alone, beside the inputs: the backward computes x again.

    y, final_state and final_window can be differentiated, once, with respect to every tensor but cu_seqlens.
    torch.autocast casts mixed and z.

    Parameters
    ----------
    mixed : Tensor
        The projections to q, k and v before the convolution, [B, T, 2 H_k K + H_v V], any strides: the heads of q, then
        of k, then of v of each token. bfloat16, float16 or float32 (on a GPU: a 16-bit dtype); float64 on the CPU
        alone.
    z : Tensor
        The input of the norm's gate, [B, T, H_v, V] or [B, T, H_v V], any strides, in the dtype of mixed. H_v is the
        number of heads of a.
    a : Tensor
        The input of the gate, [B, T, H_v], any floating dtype: g = -exp(A_log) softplus(a + dt_bias).
    b : Tensor
        The input of the step size, [B, T, H_v], any floating dtype: beta = sigmoid(b), or 2 sigmoid(b) with
        allow_neg_eigval.
    num_k_heads : int
        Number of key heads, H_k.
    head_k_dim : int
        Channels of a key head, K.

    Weights
    -------
    conv_weight : Tensor
        [D, W] or [D, 1, W], as weight of causal_conv1d.
    conv_bias : Tensor or None
        [D] or None, as bias of causal_conv1d.
    norm_weight : Tensor
        [V], any floating dtype.
    A_log : Tensor
        [H_v], any floating dtype.
    dt_bias : Tensor or None
        [H_v] or None, any floating dtype.

    States
    ------
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, as in chunk_gated_delta_rule.
    initial_window : Tensor, optional
        Window before the first token of each sequence, [N, D, W - 1] or [N, D, W], as initial_state of causal_conv1d.
    output_final_state : bool, default False
        Return the state and the window after each sequence too.
    state_v_first : bool, default False
        As in chunk_gated_delta_rule.
    state_dtype : torch.dtype, optional
        As in chunk_gated_delta_rule.

    Packed sequences
    ----------------
    cu_seqlens : Tensor, optional
        Offsets, [N + 1], as in chunk_gated_delta_rule.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output of the delta rule, as in chunk_gated_delta_rule.
    auto_cp : bool, default True
        As in chunk_gated_delta_rule.
    allow_neg_eigval : bool, default False
        The step size is 2 sigmoid(b).
    norm_eps : float, default 1e-6
        eps of gated_rms_norm.
    norm_activation : "silu" or "sigmoid", default "silu"
        activation of gated_rms_norm.
    cp_context : CPContext | FlashQLACPContext, optional
        As in chunk_gated_delta_rule, with conv1d_kernel_size = W: the ranks exchange the halo of the convolution
        too. The parts then run one by one, and autograd keeps what they keep. initial_window must be None; a
        final_window is that of the rank's own tokens.

    Returns
    -------
    y : Tensor
        The shape of z, in the dtype of mixed, contiguous.
    final_state, final_window : Tensor or None
        As those of chunk_gated_delta_rule and causal_conv1d; None unless output_final_state.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype or shape. The message names it, what was expected and what came, and
        nothing has run.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected; or state_dtype is no dtype.
    NotImplementedError
        Gradients made with create_graph=True are differentiated again; or forward-mode differentiation.
    """
    if cp_context is not None:
        cp_context, cu_seqlens, auto_cp = published.ranks_of(cp_context, cu_seqlens, auto_cp)
    if cp_context is not None:
        y, *states = cp_region.gated_delta_net(
            cp_context, mixed, _by_heads(z, a), a, b, conv_weight, conv_bias, norm_weight, A_log=A_log, dt_bias=dt_bias,
            num_k_heads=num_k_heads, head_k_dim=head_k_dim, scale=scale, initial_state=initial_state,
            initial_window=initial_window, output_final_state=output_final_state, state_v_first=state_v_first,
            auto_cp=auto_cp, state_dtype=state_dtype, allow_neg_eigval=allow_neg_eigval, norm_eps=norm_eps,
            norm_activation=norm_activation,
        )  # fmt: skip
        return y.view(z.shape), *states
    try:
        heads = _by_heads(z, a)
        y, final_state, final_window, _ = autograd.call(
            torch.ops.flash_qla.gated_delta_net,
            mixed, heads, a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, num_k_heads, head_k_dim, scale,
            initial_state, initial_window, output_final_state, cu_seqlens, max_seqlen, state_v_first, auto_cp,
            state_dtype, allow_neg_eigval, norm_eps, norm_activation,
        )  # fmt: skip
    except Exception:
        explain(gated_delta_net, locals())
        raise
    states = (final_state, final_window) if output_final_state else (None, None)
    return y.view(z.shape), *states


def prefill_gated_delta_net(
    mixed: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    window_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    num_k_heads: int,
    head_k_dim: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    has_initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    null_index: int = -1,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-6,
    norm_activation: Literal["silu", "sigmoid"] = "silu",
    checkpoint_every: int = 0,
    checkpoint_indices: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
    window_checkpoints: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """gated_delta_net on states and windows in pools, which it reads and writes in place.

        states = torch.zeros(slots, H_v, V, K, device="cuda")
        windows = torch.zeros(slots, D, 3, dtype=torch.bfloat16, device="cuda")
        y = prefill_gated_delta_net(
            mixed, z, a, b, conv1d.weight, conv1d.bias, norm.weight, A_log, dt_bias, windows, states, state_indices,
            num_k_heads=16, head_k_dim=128, cu_seqlens=cu_seqlens,
        )

    These are prefill_causal_conv1d, prefill_gated_delta_rule on slices of its result, and gated_rms_norm. The results
    have their bits. A sequence has the same slot in both pools. The function has no derivative. It increments the
    version of the tensors that it writes. torch.autocast casts mixed and z.

    Parameters
    ----------
    mixed : Tensor
        The projections to q, k and v, [B, T, 2 H_k K + H_v V], as in gated_delta_net.
    z : Tensor
        The input of the norm's gate, [B, T, H_v, V] or [B, T, H_v V], as in gated_delta_net.
    a, b : Tensor
        The inputs of the gate and of the step size, [B, T, H_v], as in gated_delta_net.
    num_k_heads : int
        Number of key heads, H_k.
    head_k_dim : int
        Channels of a key head, K.

    Weights
    -------
    conv_weight : Tensor
        [D, W] or [D, 1, W], as in gated_delta_net.
    conv_bias : Tensor or None
        [D], as in gated_delta_net.
    norm_weight : Tensor
        [V], as in gated_delta_net.
    A_log : Tensor
        [H_v], as in gated_delta_net.
    dt_bias : Tensor or None
        [H_v], as in gated_delta_net.

    Pools
    -----
    window_pool : Tensor
        The windows of the convolution, as state_pool of prefill_causal_conv1d, [slots, D, W - 1] or [slots, D, W], any
        strides: pass a pool [slots, W - 1, D] transposed. It is written.
    state_pool : Tensor
        [slots, H_v, V, K], as in prefill_gated_delta_rule. It is written.
    state_indices : Tensor
        Slot of each sequence in both pools, [N]. A sequence without a slot has zeros in y, where z is finite.
    has_initial_state : Tensor, optional
        [N], bool, as in prefill_gated_delta_rule.
    initial_state_indices : Tensor, optional
        Slot that each sequence starts from, [N], as in prefill_gated_delta_rule.
    null_index : int, default -1
        As in prefill_gated_delta_rule.

    Packed sequences
    ----------------
    cu_seqlens : Tensor, optional
        Offsets, [N + 1], as in chunk_gated_delta_rule.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Kept states
    -----------
    checkpoint_every : int, default 0
        Keep the states and windows after this many tokens of each sequence, after twice as many, and so on, as
        prefill_gated_delta_rule keeps states.
    checkpoint_indices : Tensor, optional
        Slots of these states and windows, in both pools.
    checkpoints : Tensor, optional
        Memory for the states, instead of checkpoint_indices: [total, H_v, V, K], as that of prefill_gated_delta_rule.
        It is written.
    window_checkpoints : Tensor, optional
        Memory for the windows, with checkpoints: [total, D, W - 1], or W columns if window_pool has these. It is
        written.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output of the delta rule, as in chunk_gated_delta_rule.
    allow_neg_eigval : bool, default False
        The step size is 2 sigmoid(b).
    norm_eps : float, default 1e-6
        As in gated_delta_net.
    norm_activation : "silu" or "sigmoid", default "silu"
        As in gated_delta_net.
    batch_invariant : bool, default False
        As that of prefill_gated_delta_rule; a prompt in pieces, whose lengths are multiples of 64, then has the bits of
        the whole one.
    out : Tensor, optional
        Memory for y, in the shape of z and the dtype of mixed. Contiguous memory that begins at a multiple of 16 bytes
        is written directly, other memory by a copy. It is written.

    Returns
    -------
    y : Tensor
        The shape of z, in the dtype of mixed, contiguous. With `out` it is `out`.

    Raises
    ------
    RuntimeError
        As prefill_gated_delta_rule and prefill_causal_conv1d. Neither pool has been written then.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    try:
        y = torch.ops.flash_qla.prefill_gated_delta_net(
            mixed, _by_heads(z, a), a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, window_pool, state_pool,
            state_indices, num_k_heads, head_k_dim, scale, cu_seqlens, max_seqlen, has_initial_state,
            initial_state_indices, null_index, allow_neg_eigval, norm_eps, norm_activation, checkpoint_every,
            checkpoint_indices, checkpoints, window_checkpoints, batch_invariant,
            None if out is None else _by_heads(out, a),
        )  # fmt: skip
    except Exception:
        explain(prefill_gated_delta_net, locals())
        raise
    return y.view(z.shape) if out is None else out


def decode_gated_delta_net(
    mixed: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor | None,
    conv_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    window_pool: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    scale: float | None = None,
    null_index: int = -1,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-6,
    norm_activation: Literal["silu", "sigmoid"] = "silu",
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    write_indices: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_windows: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    update_state: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """gated_delta_net for one or a few tokens of each sequence, on windows and states in pools, written in place.

        y = decode_gated_delta_net(
            mixed, z, a, b, conv1d.weight, conv1d.bias, norm.weight, A_log, dt_bias, windows, states, state_indices
        )

    These are the functions

        x = prefill_causal_conv1d(mixed, conv_weight, conv_bias, window_pool, state_indices)
        o = decode_gated_delta_rule_packed(x, a, b, A_log, dt_bias, state_pool, state_indices)
        y = gated_rms_norm(o, z, norm_weight)

    with the l2norm and the activations inside, and x and o rounded as theirs. A sequence's bits do not depend on the
    batch.

    On a GPU the call is one kernel, for one token (T = 1) or up to 8, if W is 4, K is at most 128, V is a multiple of
    8, a key head has at most 2048 value channels (with several tokens 512), conv_weight, conv_bias and window_pool have
    the dtype of mixed, and the strides are those that are named below. Otherwise the functions' kernels run; calls that
    these functions do not take, those with an argument from cu_seqlens to parents or without conv_weight, raise there.

    A projection may have q, k, v and z by key heads, as that of Qwen3-Next. Pass its parts, without a copy:

        qkvz, ba = in_proj_qkvz(x).unflatten(-1, (H_k, -1)), in_proj_ba(x).unflatten(-1, (H_k, -1))
        mixed, z = qkvz.split([2 * K + group * V, group * V], -1)   # group = H_v / H_k
        b, a = ba.split([group, group], -1)
        y = decode_gated_delta_net(mixed, z.unflatten(-1, (group, V)), a, b, ...)

    The function has no derivative. It increments the versions of what it writes. torch.autocast casts mixed and z.

    Parameters
    ----------
    mixed : Tensor
        The projections to q, k and v before the convolution, [B, T, 2 H_k K + H_v V]: the heads of q, then of k, then
        of v of each token. Or by key heads, [B, T, H_k, 2 K + H_v / H_k V]: q, k and the values of each. bfloat16 or
        float16; on the CPU also float32 and float64. One kernel needs neighbouring channels.
    z : Tensor
        The input of the norm's gate, [B, T, H_v, V] or [B, T, H_k, H_v / H_k, V], in the dtype of mixed. One kernel
        needs the values of a key head next to each other, in the first form those of all heads.
    a : Tensor
        The input of the gate, [B, T, H_v] or [B, T, H_k, H_v / H_k], any floating dtype. One kernel needs a last stride
        of 1.
    b : Tensor
        The input of the step size, as a.

    Weights
    -------
    conv_weight : Tensor or None
        [D, W] or [D, 1, W], D = 2 H_k K + H_v V, as weight of causal_conv1d: the channels of q, of k and of v, also if
        mixed is by key heads. None: mixed is the result of the convolution, and there are no windows.
    conv_bias : Tensor or None
        [D] or None.
    norm_weight : Tensor
        [V], any floating dtype.
    A_log : Tensor
        [H_v], as in gated_delta_net.
    dt_bias : Tensor or None
        [H_v], as in gated_delta_net.

    Pools
    -----
    window_pool : Tensor or None
        [slots, D, W - 1] or [slots, D, W], any strides, as state_pool of prefill_causal_conv1d. None without
        conv_weight. It is written.
    state_pool : Tensor
        [slots, H_v, V, K], as in decode_gated_delta_rule. It is written.
    state_indices : Tensor
        Slot of each sequence's window and state, [N], int32 or int64. Or [N, S] as that of decode_gated_delta_rule; the
        window is in the slot of column 0.
    null_index : int, default -1
        An index of at most this is no slot: y of the sequence is 0, and nothing is written.
    update_state : bool, default True
        Write the window after the last token to its slot and, without write_indices, the state to the slot that was
        read.

    Drafts
    ------
    cu_seqlens : Tensor, optional
        As that of decode_gated_delta_rule. On a GPU a sequence has at most 8 tokens; y of more is 0, and they change
        nothing.
    num_accepted_tokens : Tensor, optional
        As that of decode_gated_delta_rule. window_pool then has W - 2 + S columns or more: a sequence starts from the
        W - 1 columns that begin with column num_accepted_tokens[n] - 1, and its tokens' rows are written behind the
        last W - 2 of these, from column 0 on. So the columns that begin with a - 1 are the window after a accepted
        tokens; a prefill writes the first W - 1. Not with parents.
    write_indices : Tensor, optional
        Slot of the state after each token, [N, S], as in decode_gated_delta_rule.
    intermediate_states : Tensor, optional
        Memory for the state after each token, [rows, steps, H_v, V, K], as in decode_gated_delta_rule. It is written.
    intermediate_windows : Tensor, optional
        Memory for the window after each token, [rows, steps, D, W - 1], in the dtype of window_pool, any strides; rows
        and steps as those of intermediate_states. It is written. Without parents the windows of a row may slide over
        one memory, as SGLang keeps them: x.unfold(2, W - 1, 1).transpose(1, 2) of x [rows, D, W - 2 + steps].
    intermediate_indices : Tensor, optional
        Row of each sequence, [N], as in decode_gated_delta_rule.
    parents : Tensor, optional
        Parent of each token, [N, S], as in decode_gated_delta_rule.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output of the delta rule, as in decode_gated_delta_rule.
    allow_neg_eigval : bool, default False
        The step size is 2 sigmoid(b).
    norm_eps : float, default 1e-6
        As in gated_delta_net.
    norm_activation : "silu" or "sigmoid", default "silu"
        As in gated_delta_net.
    out : Tensor, optional
        Memory for y, [B, T, H_v, V], in the dtype of mixed, any strides. It is written.

    Returns
    -------
    y : Tensor
        [B, T, H_v, V], in the dtype of mixed; `out` if that is given.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype or shape; or what is written overlaps itself or another argument. On the
        CPU or with FLASH_QLA_CHECK=1 also: an index is out of range, or two sequences write one slot. The message names
        the argument, what was expected and what came, and nothing has been written. Unchecked, the GPU treats an index
        out of range as no slot, and the contents of a slot that is written twice are undefined.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    try:
        y = torch.ops.flash_qla.decode_gated_delta_net(
            mixed, z, a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, window_pool, state_pool, state_indices,
            scale, null_index, allow_neg_eigval, norm_eps, norm_activation, cu_seqlens, num_accepted_tokens,
            write_indices, intermediate_states, intermediate_windows, intermediate_indices, parents, update_state, out,
        )  # fmt: skip
    except Exception:
        explain(decode_gated_delta_net, locals())
        raise
    return y if out is None else out
