"""The Gated Delta Rule for inference engines, on states in a pool [slots, H_v, V, K].

The functions are thin: the ops torch.ops.flash_qla.* check the arguments and do the work. Each function has its op's
parameters in the op's order, which is the published interface.
"""

import torch

from flash_qla.ops.checks import explain


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
    initial_state_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """chunk_gated_delta_rule on states in a pool, which it reads and writes in place.

        pool = torch.zeros(slots, H_v, V, K, device="cuda")
        o = prefill_gated_delta_rule(q, k, v, g, beta, pool, state_indices, cu_seqlens=cu_seqlens)

    The function can also keep the states at multiples of checkpoint_every tokens, for prefix caching. It has no
    derivative. It increments the version of the tensors that it writes. torch.autocast casts q, k and v, as for
    chunk_gated_delta_rule.

    Parameters
    ----------
    q, k : Tensor
        Queries and keys, [B, T, H_k, K], as in chunk_gated_delta_rule.
    v : Tensor
        Values, [B, T, H_v, V], as in chunk_gated_delta_rule.
    g, beta : Tensor
        Log decay and step size, [B, T, H_v], as in chunk_gated_delta_rule.
    state_pool : Tensor
        [slots, H_v, V, K], any floating dtype, float8_e4m3fn and float8_e5m2 included; on the GPU not float64, and in 8
        bits K is a multiple of 16. Each state is contiguous, and slots may be further apart; on the GPU they begin at
        multiples of 16 bytes. It is written. A state is rounded to the pool's dtype once, after the last token. In 8
        bits there is no scale, and a number beyond the dtype's largest becomes the largest.
    state_indices : Tensor
        Slot of each sequence, [N], int32 or int64, as all indices. An empty sequence does not change its slot, so the
        slot may be another sequence's. If an empty sequence starts from zero, its slot becomes zero.

    States
    ------
    has_initial_state : Tensor, optional
        [N], bool: False if the sequence starts from zero, whatever its slot holds. True for all sequences by default.
    initial_state_indices : Tensor, optional
        Slot that each sequence starts from, [N]; state_indices by default. The state after the last token still goes to
        state_indices. So requests can start from one checkpoint without a copy. A sequence without such a slot starts
        from zero.
    null_index : int, default -1
        An index of at most this is no slot: the sequence has zero output, and nothing is written. The same holds for an
        entry of checkpoint_indices.

    Packed sequences
    ----------------
    cu_seqlens : Tensor, optional
        Offsets, [N + 1], as in chunk_gated_delta_rule.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Activations inside
    ------------------
    use_qk_l2norm_in_kernel, use_gate_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    A_log, dt_bias : Tensor, optional
        [H_v], as in chunk_gated_delta_rule.
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool, default False
        As in chunk_gated_delta_rule.

    Kept states
    -----------
    checkpoint_every : int, default 0
        Keep the states after this many tokens of each sequence, after twice as many, and so on. 0 keeps none. If it is
        no multiple of 64, the GPU splits no sequence over the SMs and does not use the fused kernel; each checkpoint
        then costs at most one more chunk of 64 tokens.
    checkpoint_indices : Tensor, optional
        Slots of these states, [N, blocks]. States beyond the last column are not kept.
    checkpoints : Tensor, optional
        Memory for these states, instead of checkpoint_indices: [total, H_v, V, K], with dtypes and strides as for
        state_pool. The states follow one another in the order of the sequences, floor(length / checkpoint_every) for
        each sequence. The rows of a sequence without a slot keep their contents. It is written.
    h : Tensor, optional
        Memory for the state at the start of each chunk of 64 tokens, contiguous, V-first: shape, dtype and order as h
        of chunk_gated_delta_rule_intermediates. It is written; zero for a sequence without a slot. A checkpoint_every
        must then be a multiple of 64.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in chunk_gated_delta_rule.
    batch_invariant : bool, default False
        The bits of a sequence's results do not depend on the other sequences, on its index in the batch, or on padding.
        The GPU then splits no sequence over the SMs and does not use the fused kernel. On the CPU this always holds.
        With checkpoints the state is also rounded to their dtype after every checkpoint_every tokens, even where no
        checkpoint is kept. So a call that starts from a checkpoint, with the same checkpoint_every, continues with the
        same bits as the call that wrote the checkpoint.
    out : Tensor, optional
        Memory for o, [B, T, H_v, V], in the dtype of q. Contiguous memory that begins at a multiple of 16 bytes is
        written directly, other memory by a copy. It is written, and shares no memory with another argument.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], in the dtype of q; zero for tokens of no sequence. With `out` it is `out`.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype, shape or strides; or what is written overlaps itself or another
        argument. On the CPU or with FLASH_QLA_CHECK=1 also: an index is out of range, or one sequence writes a slot
        that another one writes or reads. The message names the argument, what was expected and what came, and nothing
        has been written. Unchecked, the GPU treats an index out of range as no slot, and the contents of a slot that is
        written twice are undefined.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    try:
        o = torch.ops.flash_qla.prefill_gated_delta_rule(
            q, k, v, g, beta, state_pool, state_indices, scale, cu_seqlens, has_initial_state, null_index,
            use_qk_l2norm_in_kernel, checkpoint_every, checkpoint_indices, checkpoints, use_gate_in_kernel, A_log,
            dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, batch_invariant, initial_state_indices, out, h,
            max_seqlen,
        )  # fmt: skip
    except Exception:
        explain(prefill_gated_delta_rule, locals())
        raise
    return o if out is None else out


def decode_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor | None = None,
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
    state_v_first: bool = True,
    use_beta_sigmoid_in_kernel: bool | None = None,
    allow_neg_eigval: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Gated Delta Rule over one or a few tokens of each sequence, on states that it reads and writes in place.

        pool = torch.zeros(slots, H_v, V, K, device="cuda")
        o = decode_gated_delta_rule(q, k, v, a, b, A_log, dt_bias, pool, state_indices)  # q [B, 1, H_k, K]

        states = torch.zeros(B, H_v, K, V, device="cuda")  # no pool: a state for each sequence
        o = decode_gated_delta_rule(q, k, v, g, beta, None, None, states, state_v_first=False)

    The log decay is g = -exp(A_log) * softplus(a + dt_bias), the step size is beta = sigmoid(b). Without A_log, a and b
    are g and beta. With a state S:

        S_t = exp(g_t) S_p + beta_t k_t (v_t - exp(g_t) S_p^T k_t)^T        o_t = scale * S_t^T q_t

    p is the token before t or, with `parents`, the parent of t. chunk_gated_delta_rule names the source of the formula.
    The arithmetic is in float32 (float64 for float64 inputs); states are rounded to the pool's dtype only when they are
    written. The function has no derivative.

    Parameters
    ----------
    q : Tensor
        Queries, [B, T, H_k, K], T tokens of B sequences; or [1, T, H_k, K] with cu_seqlens.
    k : Tensor
        Keys, as q.
    v : Tensor
        Values, [B, T, H_v, V], H_v a multiple of H_k, in the dtype of q.
    a : Tensor
        With A_log the input of the gate, otherwise the log decay g (-inf forgets the state), [B, T, H_v], any floating
        dtype.
    b : Tensor
        With A_log the input of the step size, otherwise the step size beta, [B, T, H_v], any floating dtype.
    state_pool : Tensor
        [slots, H_v, V, K], any floating dtype, float8_e4m3fn and float8_e5m2 included; on the GPU not float64, and in 8
        bits K is a multiple of 16 and V comes first. Each state is contiguous, and slots may be further apart; on the
        GPU they begin at multiples of 16 bytes. It is written. In 8 bits there is no scale, and a number beyond the
        dtype's largest becomes the largest.

    States
    ------
    state_indices : Tensor, optional
        Slot from which each sequence starts, [N], or [N, S] with num_accepted_tokens; int32 or int64, as all indices.
        By default sequence n starts from state n, and state_pool has N states.
    null_index : int, default -1
        An index of at most this is no slot: the sequence has zero output, and nothing is written. The same holds for an
        entry of write_indices.
    update_state : bool, default True
        Write the state after the last token to the slot that was read. With write_indices this is ignored.
    state_v_first : bool, default True
        False: all states are [.., H_v, K, V]. The GPU then takes tokens one by one.

    Activations inside
    ------------------
    A_log : Tensor or None
        Parameter of the gate, [H_v], any floating dtype. Without it a is g.
    dt_bias : Tensor or None
        Parameter of the gate, [H_v], any floating dtype, or None.
    use_qk_l2norm_in_kernel : bool, default True
        Divide q and k by their norms first, x / sqrt(|x|^2 + 1e-6).
    use_beta_sigmoid_in_kernel : bool, optional
        True: beta is sigmoid(b). False: beta is b. By default True with A_log, and False without.
    allow_neg_eigval : bool, default False
        beta is 2 * sigmoid(b).

    Drafts
    ------
    cu_seqlens : Tensor, optional
        Offsets of the sequences, [N + 1], int32 or int64.
    num_accepted_tokens : Tensor, optional
        [N]; sequence n starts from column num_accepted_tokens[n] - 1 of state_indices [N, S], by default from column 0.
    write_indices : Tensor, optional
        [N, S]; the state after token t of sequence n goes to slot write_indices[n, t]. The slot that was read is
        written only if write_indices names it. States of tokens beyond S columns are not kept.
    intermediate_states : Tensor, optional
        [rows, steps, H_v, V, K], any floating dtype, on the GPU the pool's dtype; each state is contiguous. The state
        after token t of sequence n goes to intermediate_states[row, t]. It is written.
    intermediate_indices : Tensor, optional
        Row of each sequence, [N]; n by default. A negative row keeps no states.
    parents : Tensor, optional
        [N, S], for a tree of drafted tokens: the index of each token's parent, smaller than its own, or -1 for the
        initial state. Needs update_state=False or write_indices, because a tree has no last state.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output; K ** -0.5 by default.
    out : Tensor, optional
        Memory for o, [B, T, H_v, V], in the dtype of q, any strides. A copy fills it if it is not contiguous.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], in the dtype of q; zero for tokens of no sequence; `out` if that is given.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype, shape or strides; or what is written overlaps itself or another
        argument. On the CPU or with FLASH_QLA_CHECK=1 also: an index is out of range, or one sequence writes a slot, or
        a row of intermediate_states, that another one writes or reads. The message names the argument, what was
        expected and what came, and nothing has been written. Unchecked, the GPU treats an index out of range as no
        slot.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    try:
        o = torch.ops.flash_qla.decode_gated_delta_rule(
            q, k, v, a, b, A_log, dt_bias, state_pool, state_indices, scale, null_index, use_qk_l2norm_in_kernel,
            cu_seqlens, num_accepted_tokens, write_indices, intermediate_states, intermediate_indices, parents,
            update_state, state_v_first, use_beta_sigmoid_in_kernel, allow_neg_eigval, out,
        )  # fmt: skip
    except Exception:
        explain(decode_gated_delta_rule, locals())
        raise
    return o if out is None else out


def decode_gated_delta_rule_packed(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor | None = None,
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
    state_v_first: bool = True,
    use_beta_sigmoid_in_kernel: bool | None = None,
    allow_neg_eigval: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode_gated_delta_rule with q, k and v in one tensor, as a convolution returns them.

        o = decode_gated_delta_rule_packed(mixed_qkv, a, b, A_log, dt_bias, pool, state_indices)

    Parameters
    ----------
    mixed_qkv : Tensor
        [B, T, C] with C = 2 H_k K + H_v V: the heads of q, then of k, then of v of each token. Or [B, C] for one token
        of each sequence. state_pool has H_v, V and K.
    a : Tensor
        The gate, activated or not, [B, T, H_v], as in decode_gated_delta_rule; [B, H_v] for one token of each sequence.
    b : Tensor
        The step size, activated or not, of the shape of a, as in decode_gated_delta_rule.
    A_log, dt_bias : Tensor or None
        [H_v], as in decode_gated_delta_rule.
    state_pool : Tensor
        [slots, H_v, V, K], as in decode_gated_delta_rule. It is written.

    States
    ------
    state_indices : Tensor, optional
        [N], or [N, S] with num_accepted_tokens, as in decode_gated_delta_rule.
    null_index : int, default -1
        As in decode_gated_delta_rule.
    update_state, state_v_first : bool, default True
        As in decode_gated_delta_rule.

    Drafts
    ------
    cu_seqlens : Tensor, optional
        Offsets, [N + 1], as in decode_gated_delta_rule.
    num_accepted_tokens : Tensor, optional
        [N], as in decode_gated_delta_rule.
    write_indices : Tensor, optional
        [N, S], as in decode_gated_delta_rule.
    intermediate_states : Tensor, optional
        [rows, steps, H_v, V, K], as in decode_gated_delta_rule. It is written.
    intermediate_indices : Tensor, optional
        [N], as in decode_gated_delta_rule.
    parents : Tensor, optional
        [N, S], as in decode_gated_delta_rule.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in decode_gated_delta_rule.
    use_qk_l2norm_in_kernel : bool, default True
        As in decode_gated_delta_rule.
    use_beta_sigmoid_in_kernel : bool, optional
        As in decode_gated_delta_rule.
    allow_neg_eigval : bool, default False
        As in decode_gated_delta_rule.
    out : Tensor, optional
        Memory for o, [B, T, H_v, V], as in decode_gated_delta_rule. It is written.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], in the dtype of mixed_qkv; T is 1 for one token of each sequence; `out` if that is given.

    Raises
    ------
    RuntimeError, TypeError, NotImplementedError
        As decode_gated_delta_rule.
    """
    try:
        o = torch.ops.flash_qla.decode_gated_delta_rule_packed(
            mixed_qkv, a, b, A_log, dt_bias, state_pool, state_indices, scale, null_index, use_qk_l2norm_in_kernel,
            cu_seqlens, num_accepted_tokens, write_indices, intermediate_states, intermediate_indices, parents,
            update_state, state_v_first, use_beta_sigmoid_in_kernel, allow_neg_eigval, out,
        )  # fmt: skip
    except Exception:
        explain(decode_gated_delta_rule_packed, locals())
        raise
    return o if out is None else out


def decode_gated_delta_rule_buffered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor | None,
    d_cache: torch.Tensor,
    k_cache: torch.Tensor,
    g_cache: torch.Tensor,
    write_pos: torch.Tensor,
    force_flush: torch.Tensor | None = None,
    scale: float | None = None,
    null_index: int = -1,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool | None = None,
    allow_neg_eigval: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode_gated_delta_rule for one token of each sequence, which writes a state only every L-th time.

        d_cache = torch.empty(slots, H_v, L, V, device="cuda")
        k_cache = torch.empty(slots, H_k, L, K, device="cuda", dtype=k.dtype)
        g_cache = torch.empty(slots, H_v, L, device="cuda")
        write_pos = torch.zeros(B, device="cuda", dtype=torch.int32)
        for q, k, v, a, b in tokens:
            o = decode_gated_delta_rule_buffered(
                q, k, v, a, b, A_log, dt_bias, pool, state_indices, d_cache, k_cache, g_cache, write_pos
            )
            write_pos = (write_pos + 1) % L  # 0 after force_flush

    Decoding is bound by the traffic of the state, so this function defers state writes. A slot has a replay buffer of
    up to L steps, and outputs are computed from the state in the pool and the buffer. With j = write_pos[n] steps in
    the buffer, the state of sequence n is

        S = exp(g_1 + ... + g_j) S_pool + sum over i of exp(g_{i+1} + ... + g_j) k_i d_i^T

    The call computes the token from S, as decode_gated_delta_rule does. If j = L - 1, or with force_flush, it writes
    the new state to the pool, and the buffer is empty: pass write_pos[n] = 0 next. Otherwise it writes the token as the
    next step of the buffer: pass j + 1 next. The call does not change write_pos, because all layers of a model
    share it. Flush a slot before another function reads it. Only the device reads write_pos and force_flush, so one
    captured call serves every step.

    With d_cache in float32, results differ from those of decode_gated_delta_rule by the rounding of float32. A pool in
    16 bits rounds a state once in L steps, instead of at each step.

    Parameters
    ----------
    q : Tensor
        Queries, [B, 1, H_k, K].
    k : Tensor
        Keys, [B, 1, H_k, K].
    v : Tensor
        Values, [B, 1, H_v, V], H_v a multiple of H_k, in the dtype of q.
    a : Tensor
        The gate, activated or not, [B, 1, H_v], as that of decode_gated_delta_rule.
    b : Tensor
        The step size, activated or not, [B, 1, H_v], as that of decode_gated_delta_rule.
    A_log, dt_bias : Tensor or None
        [H_v], as in decode_gated_delta_rule.
    write_pos : Tensor
        Number of steps in the replay buffer of each sequence, [B], 0 to L - 1.

    States
    ------
    state_pool : Tensor
        [slots, H_v, V, K], as that of decode_gated_delta_rule, but not in 8 bits. It is written.
    state_indices : Tensor or None
        Slot of each sequence, [B], int32 or int64, as all indices. None: sequence n has slot n, and there are B slots.
    d_cache : Tensor
        Changes in the replay buffers, [slots, H_v, L, V], L from 1 to 32: d = beta (v - exp(g) S^T k), times the factor
        of the l2norm of k. float32 (float64 for float64 inputs); or the dtype of q, which rounds them. Each slot is
        contiguous, and slots may be further apart; on the GPU they begin at multiples of 16 bytes. It is written. Steps
        from write_pos on may have any contents.
    k_cache : Tensor
        Keys of the replay buffers, before the l2norm, [slots, H_k, L, K], dtypes and strides as for d_cache. Both
        dtypes hold keys exactly. It is written.
    g_cache : Tensor
        Log decays of the replay buffers, [slots, H_v, L], float32 (float64 for float64 inputs), strides as for d_cache.
        It is written.
    force_flush : Tensor, optional
        [B]; where it is not 0, the call writes the state. None: it forces no write.
    null_index : int, default -1
        An index of at most this is no slot: the sequence has zero output, and nothing is written.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in decode_gated_delta_rule.
    use_qk_l2norm_in_kernel : bool, default True
        Divide q and k by their norms first, x / sqrt(|x|^2 + 1e-6).
    use_beta_sigmoid_in_kernel : bool, optional
        As in decode_gated_delta_rule.
    allow_neg_eigval : bool, default False
        As in decode_gated_delta_rule.
    out : Tensor, optional
        Memory for o, [B, 1, H_v, V], as in decode_gated_delta_rule. It is written.

    Returns
    -------
    o : Tensor
        [B, 1, H_v, V], in the dtype of q; `out` if that is given.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype, shape or strides; or what is written overlaps itself or another
        argument. On the CPU or with FLASH_QLA_CHECK=1 also: an index or write_pos is out of range, or two sequences
        have the same slot. The message names the argument, what was expected and what came, and nothing has been
        written. Unchecked, the GPU treats an index out of range as no slot, and takes the nearest valid write_pos.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    try:
        o = torch.ops.flash_qla.decode_gated_delta_rule_buffered(
            q, k, v, a, b, A_log, dt_bias, state_pool, state_indices, d_cache, k_cache, g_cache, write_pos, force_flush,
            scale, null_index, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, out,
        )  # fmt: skip
    except Exception:
        explain(decode_gated_delta_rule_buffered, locals())
        raise
    return o if out is None else out
