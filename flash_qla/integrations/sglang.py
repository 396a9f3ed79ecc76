"""Let SGLang run its Gated DeltaNet layers through flash_qla.

    from flash_qla.integrations.sglang import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # SGLang's own functions again

SGLang runs layers in processes of its own. With FLASH_QLA_SGLANG=1 in the environment, SGLang's plugins switch each of
them on.

The functions replace those that SGLang's Triton backend for these layers calls, and the convolution before a prefill.
They have the same names, arguments and meaning, so their signatures are SGLang's. States are [slots, H_v, V, K]; a
sequence whose slot is negative has no state. With --enable-deterministic-inference the bits of a prefill do not depend
on the batch. Other backends stay in use: on Hopper, prefill runs FlashInfer unless --linear-attn-prefill-backend is
triton.

On Hopper a step of decoding, also of a chain of drafts, of a layer of Qwen3-Next and Qwen3.5 in bf16 is one call
between its projections; _sglang_layer.py has the list. SGLang's layer runs the other steps with the functions of this
module. Its log says so, or why every step does.

Written for SGLang 0.5.12 to 0.5.23. SGLang 0.5.17 has generated text on the functions of the delta rule on an H100:
eagerly, in CUDA graphs, with the radix cache, with drafts, and with --enable-linear-replayssm. They have been compared
with the kernels of 0.5.23. Other releases, and causal_conv1d_fn, fused_qkv_split_gdn_prefill and the layer's forward in
all of them, have been compared by signatures, and the functions run with the arguments that their layers pass. Outside
of that call gates and norm stay SGLang's, because its other backends take the gates, and the norm is the model's.
"""

import sys

import torch

import flash_qla
from flash_qla._layout import CHUNK
from flash_qla.integrations import _sglang_layer
from flash_qla.integrations._engines import (
    Replacement,
    earlier,
    gates_of,
    heads_of,
    not_convolved,
    number_of_sequences,
    packed_decode,
    prefill_convolution,
    require,
)
from flash_qla_environment import is_not_off

_NULL_INDEX = -1


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None,
    head_first=False, use_qk_l2norm_in_kernel=False, inplace_update=True,
):  # fmt: skip
    """SGLang's prefill on states in a pool.

    A sequence without a slot has zero output; SGLang's own function starts it from zero.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of flash_qla.chunk_gated_delta_rule.
        initial_state: the pool, [slots, H_v, V, K], as state_pool of flash_qla.prefill_gated_delta_rule.
        initial_state_indices: slot of each sequence, [N], int32 or int64.
        head_first: only False.
        inplace_update: write the state after the last token of each sequence to its slot.

    Returns:
        o: [B, T, H_v, V], in the dtype of q.
        final_state: None; the states are in the pool.
        h: state at the start of each chunk of 64 tokens, [B, chunks, H_v, V, K], in the dtype of q: the chunks of all
            sequences in their order, then zeros; see flash_qla.chunk_gated_delta_rule_intermediates.

    Raises:
        NotImplementedError: head_first is True; or initial_state or initial_state_indices is None.
    """
    require(
        "chunk_gated_delta_rule",
        initial_state=(initial_state, torch.Tensor),
        initial_state_indices=(initial_state_indices, torch.Tensor),
        head_first=(head_first, False),
    )
    N = number_of_sequences(q, cu_seqlens)
    slots = initial_state_indices[:N]
    if not inplace_update:
        initial_state, slots = _copy_states(initial_state, slots)
    padding = (CHUNK - 1) * (1 if cu_seqlens is None else N)
    h = q.new_empty(q.shape[0], (q.shape[1] + padding) // CHUNK, *initial_state.shape[1:])
    o = flash_qla.prefill_gated_delta_rule(
        q, k, v, g, beta, initial_state, slots, scale, cu_seqlens, null_index=_NULL_INDEX,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, batch_invariant=_is_batch_invariant(), h=h,
    )  # fmt: skip
    return o, None, h


def _is_batch_invariant() -> bool:
    """Whether SGLang runs with --enable-deterministic-inference.

    The flag sets the variable, which processes inherit that are started on the same machine, and the mode in the
    process of a model.
    """
    is_enabled = getattr(sys.modules.get("sglang.srt.batch_invariant_ops"), "is_batch_invariant_mode_enabled", None)
    return is_not_off("SGLANG_ENABLE_DETERMINISTIC_INFERENCE") or (is_enabled is not None and is_enabled())


def _copy_states(pool, slots):
    """The states of the slots as a pool of their own, and the slots there."""
    copy_slots = torch.arange(slots.shape[0], device=slots.device)
    return pool[slots.clamp_min(0)], torch.where(slots >= 0, copy_slots, _NULL_INDEX)


fused_recurrent_gated_delta_rule_packed_decode = packed_decode(__name__, _NULL_INDEX)


def fused_recurrent_linear_replayssm_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices, write_pos,
    force_flush=None, use_qk_l2norm_in_kernel=False, is_kda=False, block_v=None, num_warps=1, num_stages=3, nk=2,
):  # fmt: skip
    """SGLang's decoding of one token of each sequence with --enable-linear-replayssm.

    The caches have the contents that flash_qla.decode_gated_delta_rule_buffered describes. SGLang's own function keeps
    other contents there. So use one of the two functions from a slot's first step to its next flush.

    Args:
        mixed_qkv, a, b, A_log, dt_bias, scale, use_qk_l2norm_in_kernel: as those of
            flash_qla.decode_gated_delta_rule_packed, for one token of each sequence.
        initial_state: the pool, [slots, H_v, V, K], written in place at a flush.
        d_cache, k_cache, g_cache, write_pos, force_flush: as those of flash_qla.decode_gated_delta_rule_buffered: at
            most 32 steps, d_cache and k_cache in float32 or in the dtype of mixed_qkv.
        out: the result, [B, 1, H_v, V], written.
        ssm_state_indices: slot of each sequence, [B].
        is_kda: only False.
        block_v, num_warps, num_stages, nk: ignored; they tune SGLang's kernel.

    Returns:
        out and initial_state.

    Raises:
        NotImplementedError: is_kda is True.
    """
    require("fused_recurrent_linear_replayssm_decode", is_kda=(is_kda, False))
    (_, H_k, _, K), (_, H_v, V, _) = k_cache.shape, initial_state.shape
    q, k, v = mixed_qkv.unsqueeze(1).split([H_k * K, H_k * K, H_v * V], -1)
    flash_qla.decode_gated_delta_rule_buffered(
        q.unflatten(-1, (H_k, K)), k.unflatten(-1, (H_k, K)), v.unflatten(-1, (H_v, V)), a.unsqueeze(1), b.unsqueeze(1),
        A_log, dt_bias, initial_state, ssm_state_indices, d_cache, k_cache, g_cache, write_pos, force_flush, scale,
        _NULL_INDEX, use_qk_l2norm_in_kernel, out=out,
    )  # fmt: skip
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices,
    scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False, lower_bound=None,
    disable_state_update=False, intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None,
    retrieve_parent_token=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None,
    replayssm_beta=None, match_cutedsl_decode=False,
):  # fmt: skip
    """SGLang's decoding from q, k and v, and its verification of drafts.

    A sequence without a slot has zero output, and its states are not kept; SGLang's own function starts it from zero.
    States between the drafts of a tree are not rounded to the dtype of the buffer.

    Args:
        q, k, v, A_log, dt_bias, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.decode_gated_delta_rule.
        a, b: [T, H_v] with cu_seqlens, or [B, T, H_v]; of more rows the first ones.
        initial_state_source: the pool, [slots, H_v, V, K], written in place unless disable_state_update.
        initial_state_indices: slot of each sequence, [N] or more; int32 or int64.
        intermediate_states_buffer: memory for the state after each token, [rows, steps, H_v, V, K].
        intermediate_state_indices: row of each sequence, [N] or more; a negative row keeps no states.
        cache_steps: ignored; the buffer's shape has it.
        retrieve_parent_token: [N, steps] or more rows, if the drafts are a tree: the index of each token's parent.
            Column 0 is ignored. Only with disable_state_update.
        softplus_beta, softplus_threshold: only 1 and 20.
        is_kda, cache_ring, match_cutedsl_decode: only False.
        lower_bound, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta: only None.

    Returns:
        o, [B, T, H_v, V], in the dtype of q.

    Raises:
        NotImplementedError: an argument has another value; or initial_state_source or initial_state_indices is None.
    """
    require(
        "fused_sigmoid_gating_delta_rule_update",
        softplus_beta=(softplus_beta, 1.0),
        softplus_threshold=(softplus_threshold, 20.0),
        initial_state_source=(initial_state_source, torch.Tensor),
        initial_state_indices=(initial_state_indices, torch.Tensor),
        is_kda=(is_kda, False),
        lower_bound=(lower_bound, None),
        cache_ring=(cache_ring, False),
        replayssm_rawv=(replayssm_rawv, None),
        replayssm_rawk=(replayssm_rawk, None),
        replayssm_g=(replayssm_g, None),
        replayssm_beta=(replayssm_beta, None),
        match_cutedsl_decode=(match_cutedsl_decode, False),
    )
    N = number_of_sequences(q, cu_seqlens)
    parents = None
    if retrieve_parent_token is not None:
        require(
            "fused_sigmoid_gating_delta_rule_update with retrieve_parent_token",
            disable_state_update=(disable_state_update, True),
        )
        parents = retrieve_parent_token[:N].clone()
        parents[:, 0] = -1
    a, b, slots = gates_of(a, v), gates_of(b, v), initial_state_indices[:N]
    return flash_qla.decode_gated_delta_rule(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, slots, scale, _NULL_INDEX, use_qk_l2norm_in_kernel,
        cu_seqlens, intermediate_states=intermediate_states_buffer,
        intermediate_indices=None if intermediate_state_indices is None else intermediate_state_indices[:N],
        parents=parents, update_state=not disable_state_update,
    )  # fmt: skip


def causal_conv1d_fn(
    x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None,
    activation="silu", pad_slot_id=-1, **kwargs,
):  # fmt: skip
    """SGLang's convolution of a prefill, on windows in a pool. SGLang's own function runs other calls: those with
    windows of another width, and with keywords besides seq_lens_cpu.

    Args:
        x: [D, T], the tokens of all sequences.
        weight: [D, W].
        bias: [D], or None.
        query_start_loc: offsets of the sequences, [N + 1].
        cache_indices: slot of each sequence, [N] or more; of at most pad_slot_id: none.
        has_initial_state: [N] or more, bool: whether a sequence starts from its window, or from zeros.
        conv_states: the pool, [slots, D, W - 1], any strides, written in place.
        activation: "silu", "swish" or None.

    Returns:
        y, [D, T], in the dtype of x.

    Raises:
        NotImplementedError: an argument has another value, and SGLang is not there to take the call.
    """
    reason = not_convolved(x, weight, bias, conv_states, query_start_loc, cache_indices, activation)
    unknown = sorted({*kwargs} - {"seq_lens_cpu"})
    if reason is None and unknown:
        reason = f"{unknown[0]} is given"
    if reason is not None:
        return _replacement.call_theirs(
            "causal_conv1d_fn", reason, x, weight, bias, query_start_loc, cache_indices, has_initial_state, conv_states,
            activation, pad_slot_id, **kwargs,
        )  # fmt: skip
    return prefill_convolution(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, pad_slot_id
    )


def fused_qkv_split_gdn_prefill(mixed_qkv, num_q_heads, num_k_heads, num_v_heads, head_q, head_k, head_v):
    """SGLang's q, k and v of a convolution's result, as views: flash_qla reads them where they are.

    Args:
        mixed_qkv: [T, 2 H_k K + H_v V], any strides.
        num_q_heads, num_k_heads, num_v_heads, head_q, head_k, head_v: H_k, H_k, H_v, K, K and V.

    Returns:
        q, k and v, [1, T, heads, channels].
    """
    return heads_of(mixed_qkv[None], num_k_heads, head_k, head_v)


_REPLAY = ("cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
_replacement = Replacement(
    "SGLang 0.5.12 to 0.5.23",
    {
        "sglang.srt.layers.attention.linear.kernels.gdn_triton": {
            "chunk_gated_delta_rule": (
                chunk_gated_delta_rule,
                earlier(chunk_gated_delta_rule, "inplace_update"),  # releases before 0.5.20
            ),
            "fused_recurrent_gated_delta_rule_packed_decode": (fused_recurrent_gated_delta_rule_packed_decode,),
            "fused_recurrent_gdn_replayssm_decode": (fused_recurrent_linear_replayssm_decode, None),  # since 0.5.15
            "fused_sigmoid_gating_delta_rule_update": (
                fused_sigmoid_gating_delta_rule_update,
                earlier(fused_sigmoid_gating_delta_rule_update, "match_cutedsl_decode"),  # releases before 0.5.22
                earlier(  # releases before 0.5.17
                    fused_sigmoid_gating_delta_rule_update, "match_cutedsl_decode", "lower_bound", *_REPLAY
                ),
            ),
        },
        "sglang.srt.layers.attention.linear.gdn_backend": {
            "fused_qkv_split_gdn_prefill": (fused_qkv_split_gdn_prefill, None),  # since 0.5.13
            "causal_conv1d_fn": (causal_conv1d_fn,),
        },
    },
    methods={
        "sglang.srt.models.qwen3_next": {"Qwen3GatedDeltaNet.forward": _sglang_layer.with_region(by_key_heads=True)},
        "sglang.srt.models.qwen3_5": {"Qwen3_5GatedDeltaNet.forward": _sglang_layer.with_region(by_key_heads=False)},
    },
    package="sglang",
    run=("0.5.17",),
)


def use_flash_qla() -> None:
    """Have SGLang's Gated DeltaNet layers call the functions of this module, in this process, and decode in one call
    where they can.

    Raises
    ------
    ImportError
        SGLang cannot be imported.
    RuntimeError
        SGLang lacks one of the functions, or has it with other arguments. Then nothing is changed.
    """
    _replacement.use()


def restore() -> None:
    """Give SGLang's layers their own functions again."""
    _replacement.restore()
