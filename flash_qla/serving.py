"""For inference engines, on states that lie in a pool. Thin functions on torch.ops.flash_qla."""

import torch

from flash_qla.ops.checks import check_offsets


def prefill_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    null_index: int = -1,
    use_qk_l2norm_in_kernel: bool = False,
    checkpoint_every: int = 0,
    checkpoint_indices: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """chunk_gated_delta_rule on states that lie in a pool: read from it and written back, in place, and some of those
    on the way kept for prefix caching. The op has no derivative. It increments the version of what it writes. Under
    autocast q, k and v are cast as by chunk_gated_delta_rule.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of chunk_gated_delta_rule.
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval: likewise.
        state_pool: [slots, H_v, V, K], any floating dtype; on the GPU float32, bfloat16 or float16. Each state is
            contiguous, the slots may be further apart; on the GPU they begin at multiples of 16 bytes. It is written;
            states are rounded to its dtype once, behind the last token.
        state_indices: the slot of each sequence, [N]; int32 or int64, as all indices. A sequence without tokens leaves
            its slot alone, which may be another one's, unless it starts from zero: then its slot becomes zero.
        has_initial_state: [N], bool: False where a sequence starts from zero, whatever its slot holds. All are read by
            default.
        null_index: a sequence whose slot is at most this is nobody's: its output is zero and nothing is written. So is
            an entry of checkpoint_indices that is at most this.
        checkpoint_every: keep the states behind so many tokens of each sequence, twice as many and so on; a multiple of
            64. None by default.
        checkpoint_indices: the slots where these states go, [N, blocks]; those beyond the columns are not kept.
        checkpoints: where they go instead, [total, H_v, V, K], of dtypes and strides like state_pool, in the order of
            the sequences, floor(length / checkpoint_every) of each; of a sequence that is nobody's they are left as
            they are. It is written.
        batch_invariant: a sequence's results are the same bits whatever else is in the batch, wherever it lies and
            however much padding there is. On the GPU long sequences are then not split over the SMs, and the fused
            kernel is not taken. On the CPU they always are.

    Returns:
        o, [B, T, H_v, V], in the dtype of q; zero for tokens that no sequence has.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or strides; states share memory; or, on the CPU or
            with FLASH_QLA_CHECK=1, an index is outside, or one sequence writes a slot that another one writes or reads.
            The message names the argument, what was expected and what came. Otherwise the GPU takes an index outside
            for no slot, and what a slot that is written twice holds is not defined.
        TypeError: cu_seqlens is a list.
        NotImplementedError: a gradient is asked for; the op has no derivative.
    """
    check_offsets("prefill_gated_delta_rule", cu_seqlens)
    return torch.ops.flash_qla.prefill_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        scale,
        cu_seqlens,
        has_initial_state,
        null_index,
        use_qk_l2norm_in_kernel,
        checkpoint_every,
        checkpoint_indices,
        checkpoints,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        batch_invariant,
    )


def decode_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
    null_index: int = -1,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    write_indices: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    update_state: bool = True,
) -> torch.Tensor:
    """The Gated Delta Rule over one or a few tokens of each sequence, the state of which is read from a pool and goes
    back to it, in place.

    With the log decay g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b) and S a state,

        S_t = exp(g_t) S_p + beta_t k_t (v_t - exp(g_t) S_p^T k_t)^T        o_t = scale * S_t^T q_t

    where p is the token before t or, with `parents`, the one that it says. The arithmetic is in float32, in float64 for
    float64 q; between the tokens of a call states are not rounded to the pool's dtype.

    Args:
        q, k: queries and keys, [B, T, H_k, K]; B sequences of T tokens or, with cu_seqlens, [1, T, H_k, K].
        v: values, [B, T, H_v, V], H_v a multiple of H_k, in the dtype of q.
        a, b: what gate and beta are made of, [B, T, H_v], any floating dtype.
        A_log, dt_bias: [H_v], any floating dtype; dt_bias may be None.
        state_pool: [slots, H_v, V, K], any floating dtype; on the GPU float32, bfloat16 or float16. Each state is
            contiguous, the slots may be further apart; on the GPU they begin at multiples of 16 bytes. It is written.
        state_indices: the slot that each sequence starts from, [N], or with num_accepted_tokens [N, S]; int32 or int64,
            as all indices.
        scale: of the output; K^-0.5 by default.
        null_index: a sequence whose slot is at most this is nobody's: its output is zero and nothing is written. So is
            an entry of write_indices that is at most this.
        use_qk_l2norm_in_kernel: q and k are divided by their norm, x / sqrt(|x|^2 + 1e-6), before anything else.
        cu_seqlens: offsets of the sequences, [N + 1], int32 or int64.
        num_accepted_tokens: [N]: of state_indices [N, S] a sequence starts from column num_accepted_tokens[n] - 1, from
            the first one by default.
        write_indices: [N, S]: the state behind token t of sequence n goes to slot write_indices[n, t]. The slot that
            was read is not written then, unless it is among these. Tokens beyond S columns are not kept.
        intermediate_states: [rows, steps, H_v, V, K], any floating dtype, on the GPU that of the pool, each state
            contiguous. The state behind token t of sequence n goes to intermediate_states[row, t]; it is written.
        intermediate_indices: the row of each sequence, [N]; n by default. Negative: none.
        parents: [N, S], of a tree of drafted tokens the one before each, a smaller number, or -1 for the state at the
            start. Needs update_state=False or write_indices, as a tree has no last state.
        update_state: the state behind the last token goes back to the slot that was read, unless there are
            write_indices.

    Returns:
        o, [B, T, H_v, V], in the dtype of q; zero for tokens that no sequence has.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or strides; states share memory; or, on the CPU or
            with FLASH_QLA_CHECK=1, an index is outside, or one sequence writes a slot, or a row of intermediate_states,
            that another one writes or reads. The message names the argument, what was expected and what came. Otherwise
            the GPU takes an index outside for no slot.
        TypeError: cu_seqlens is a list.
        NotImplementedError: a gradient is asked for; the op has no derivative.
    """
    check_offsets("decode_gated_delta_rule", cu_seqlens)
    return torch.ops.flash_qla.decode_gated_delta_rule(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state_pool,
        state_indices,
        scale,
        null_index,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        num_accepted_tokens,
        write_indices,
        intermediate_states,
        intermediate_indices,
        parents,
        update_state,
    )


def decode_gated_delta_rule_packed(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
    null_index: int = -1,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    write_indices: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    update_state: bool = True,
) -> torch.Tensor:
    """decode_gated_delta_rule with q, k and v in one tensor, as the convolution before it leaves them.

    Args:
        mixed_qkv: [B, T, 2 H_k K + H_v V], of each token q, k and v one behind the other, heads in their order; or
            without T for one token of each sequence. H_v, V and K are those of state_pool.
        a, b: as those of decode_gated_delta_rule, or without T where mixed_qkv has none.
        A_log, dt_bias, state_pool, state_indices: as those of decode_gated_delta_rule.
        scale, null_index, use_qk_l2norm_in_kernel, cu_seqlens: likewise.
        num_accepted_tokens, write_indices, parents, update_state: likewise.
        intermediate_states, intermediate_indices: likewise.

    Returns:
        o, [B, T, H_v, V], in the dtype of mixed_qkv; T is 1 where mixed_qkv has none.

    Raises:
        RuntimeError: as decode_gated_delta_rule.
    """
    check_offsets("decode_gated_delta_rule_packed", cu_seqlens)
    return torch.ops.flash_qla.decode_gated_delta_rule_packed(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state_pool,
        state_indices,
        scale,
        null_index,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        num_accepted_tokens,
        write_indices,
        intermediate_states,
        intermediate_indices,
        parents,
        update_state,
    )
