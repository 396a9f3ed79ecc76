"""The Gated Delta Rule, chunkwise, as functions. They are thin: torch.ops.flash_qla.* is the interface for
TorchScript, torch.export and AOTInductor, and does all the work and all the checking.

Per sequence and value head, with state S [K, V], log decay g_t <= 0 and step size beta_t:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = scale * S_t^T q_t

From: Songlin Yang, Jan Kautz, Ali Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
arXiv:2412.06464.
"""

from typing import Literal, TypeAlias, overload

import torch

from flash_qla import cp
from flash_qla.ops.checks import check_offsets, check_state_dtype

# Keywords of other implementations of this function that callers pass on without meaning anything by them. Each asks
# for something this package does not do, unless it is None or False.
_TOLERATED = frozenset(
    {
        "chunk_indices",
        "cu_seqlens_cpu",
        "head_first",
        "transpose_state_layout",
    }
)

# The results of chunk_gated_delta_rule_bwd: dq, dk, dv, db, dg, dh0 and, with the gate inside, dA_log, ddt_bias
_Tensor: TypeAlias = torch.Tensor
_Gradients: TypeAlias = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor | None]
_GradientsOfGate: TypeAlias = tuple[
    _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor | None, _Tensor, _Tensor | None
]


def _refuse(keywords: dict[str, object]) -> None:
    for name, value in keywords.items():
        if name not in _TOLERATED:
            raise TypeError(f"chunk_gated_delta_rule() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise TypeError(
                f"chunk_gated_delta_rule() got {name} of type {type(value).__name__}, which it does not support; "
                "expected None or False"
            )


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    state_dtype: torch.dtype | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cp_context: cp.CPContext | None = None,
    **ignored: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated Delta Rule over whole sequences (prefill, training); see the module for the formula and the paper.

    Tensors may have any strides. q, k, v have one dtype: bfloat16 or float16, on the CPU also float32 and float64.
    Arithmetic and states are in float32 (float64 for float64 inputs); g, beta and initial_state of another floating
    dtype are converted to that. With the activations of gate and beta inside, g and beta are what these are made from,
    in any floating dtype, and are read as they are. Value head h uses query/key head h // (H_v / H_k). Under
    torch.autocast q, k and v are cast to its dtype first, unless they are float64; all else is not.

    o and final_state can be differentiated, once, with respect to q, k, v, g, beta, initial_state, A_log and dt_bias;
    each gradient has the dtype of its tensor, and those of A_log and dt_bias are added up in float32, in the same order
    every time. Besides these inputs and cu_seqlens, what is kept for the backward is, per token and value head, 64
    elements of the dtype of q (A) and one of float32, or float64 (g), see chunk_gated_delta_rule_fwd. Calls that need
    no gradients make and keep neither.

    Args:
        q, k: queries and keys, [B, T, H_k, K]. K is a multiple of 8 up to 128 on the GPU, any on the CPU.
        v: values, [B, T, H_v, V], H_v a multiple of H_k. V is a multiple of 8 up to 512 on the GPU, any on the CPU.
        g: log of the decay of each token, natural logarithm, [B, T, H_v]; at most 0 for a state that does not grow,
            -inf for a token that forgets all before it. With use_gate_in_kernel what it is made from, any number.
        beta: step size of each token, [B, T, H_v]; in [0, 1], or up to 2 for negative eigenvalues. With
            use_beta_sigmoid_in_kernel what it is made from, any number.
        scale: factor on the output; K ** -0.5 by default.
        initial_state: state before the first token of each sequence, [N, H_v, K, V], or [N, H_v, V, K] with
            state_v_first; zero by default. N is B, or the number of sequences in cu_seqlens.
        output_final_state: return the state after the last token of each sequence too.
        use_qk_l2norm_in_kernel: replace each q_t and k_t by x * rsqrt(sum(x ** 2) + 1e-6), computed in float32. On the
            GPU the forward takes the second factor into those of the gates, in float32; the backward rounds the product
            to the dtype of q.
        cu_seqlens: offsets of sequences packed along T, [N + 1], int32 or int64, on the device of q, from 0, not
            decreasing, at most T; B must be 1. A sequence may be empty: its final state is its initial state. Tokens
            from the last offset on belong to no sequence; their output is zero. On the GPU the offsets are never read
            by the host, so bad ones are not reported but confined to the tensors (FLASH_QLA_CHECK=1 in the
            environment reports them, and synchronizes); on the CPU they are always checked.
        head_first: only False; the head dimension is the third.
        state_v_first: states are [N, H_v, V, K], in and out.
        auto_cp: on the GPU, let either pass split long sequences into segments that run side by side when there are
            too few sequences and heads to fill it. Where gates have decayed a state, or in the backward the gradient of
            one, to less than 2^-24 of its norm within a segment, what is left of it is dropped; with auto_cp=False
            nothing is. The CPU ignores it.
        state_dtype: dtype of final_state, bfloat16, float16, float32 or float64; by default that of the arithmetic,
            float32 (float64 for float64 inputs). The state is computed in that and rounded once, at the end. A gradient
            of final_state then arrives in state_dtype.
        use_gate_in_kernel: the log decay is -exp(A_log) * softplus(g + dt_bias), computed in float32 (float64 for
            float64 inputs); softplus(x) is x above 20, as PyTorch's.
        A_log: log of each head's rate of decay, natural logarithm, [H_v], any floating dtype; with use_gate_in_kernel
            only, and then required. exp(A_log) may overflow: the product counts. -inf never decays, inf always forgets.
        dt_bias: added to g, [H_v], any floating dtype; with use_gate_in_kernel only; none by default.
        use_beta_sigmoid_in_kernel: the step size is sigmoid(beta), computed likewise.
        allow_neg_eigval: the step size is 2 * sigmoid(beta), so that the state's transition may have negative
            eigenvalues; with use_beta_sigmoid_in_kernel only.
        cp_context: the tokens are this rank's part of sequences that are spread over a process group, see
            flash_qla.cp.build_cp_context, whose result it is, or that of FLA's function of this name. All ranks of the
            group make the call, and its backward, which runs if an input requires gradients and the loss depends on a
            result. B is 1 and T as the context says; cu_seqlens is the context's, and
            the argument is not looked at; N is the number of the rank's own sequences. An initial state is that of a
            sequence where the rank has its first token, and not looked at elsewhere; a final state is that behind the
            rank's own tokens, so where it has the sequence's last token that of the sequence. Gradients of A_log and
            dt_bias are those of the rank's tokens.
        **ignored: keywords that other implementations know, such as chunk_indices; None or False only.

    Returns:
        o: [B, T, H_v, V], in the dtype of q, contiguous.
        final_state: of the shape of initial_state, contiguous, in state_dtype; None unless output_final_state.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape; A_log is missing with use_gate_in_kernel; A_log,
            dt_bias or allow_neg_eigval come without what they belong to; contents of cu_seqlens are wrong (where they
            are checked). The message names the argument, what was expected and what came.
        ValueError: the tokens are not those of cp_context.
        TypeError: a keyword in **ignored is unknown, or it or head_first asks for something that is not supported.
        NotImplementedError: when gradients made with create_graph=True are differentiated again, in forward-mode
            differentiation and, with cp_context, under the transforms of torch.func.
    """
    check_offsets("chunk_gated_delta_rule", cu_seqlens)
    check_state_dtype("chunk_gated_delta_rule", state_dtype)
    if ignored or head_first is not False:
        _refuse({"head_first": head_first, **ignored})
    args = (
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        state_v_first,
        auto_cp,
        state_dtype,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    if cp_context is None:
        o, final_state = torch.ops.flash_qla.chunk_gated_delta_rule(*args)
    else:
        o, final_state = cp.run(cp_context, *args)
    return o, final_state if output_final_state else None


def chunk_gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_dtype: torch.dtype | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The forward pass with its intermediate results, by chunks of C = 64 tokens of each sequence.

    The arguments are those of chunk_gated_delta_rule, and so is autocast. o and final_state can be differentiated
    likewise; the results g, A and h do not require gradients.

    Args:
        output_h: return the state at the start of each chunk too.

    Returns:
        g: [B, T, H_v], float32 (float64 for float64 inputs): sum of g, after the activation if it is inside, from the
            chunk's first token to this one. Where e^g is 0 in that arithmetic the CPU has -inf, and sums begin anew
            behind it; the GPU takes a g below -1024 as -1024.
        A: [B, T, H_v, 64], dtype of q: in row i of a chunk, row i of (I + stril(diag(beta) K K^T)) ** -1, where stril
            is the part below the diagonal and K the chunk's keys, after the l2norm if there is one. No gates are in
            it. In a chunk of fewer than 64 tokens the columns beyond them are zero. Below the unit diagonal entries
            stay within beta in size for |k_t| <= 1 and beta <= 2; longer keys may make them large, and float16
            overflow.
        h: states at the start of each chunk, dtype of q, [B, ceil(T / 64), H_v, K, V] or, with state_v_first,
            [..., V, K]; None unless output_h. With cu_seqlens it is [1, (T + 63 * N) // 64, H_v, K, V]: the chunks of
            the first sequence, then those of the second, and so on, then zeros; the first dimension after 1 is an
            upper bound that depends on shapes only. In memory V always comes before K: without state_v_first this
            is a transposed view.
        final_state: as chunk_gated_delta_rule.

        Tokens from the last offset of cu_seqlens on have zeros in g, A and o.

    Raises:
        RuntimeError, NotImplementedError: as chunk_gated_delta_rule.
    """
    check_offsets("chunk_gated_delta_rule_fwd", cu_seqlens)
    check_state_dtype("chunk_gated_delta_rule_fwd", state_dtype)
    g_cumsum, A, o, h, final_state = torch.ops.flash_qla.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        output_h,
        auto_cp,
        state_v_first,
        use_qk_l2norm_in_kernel,
        state_dtype,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    return g_cumsum, A, o, h if output_h else None, final_state if output_final_state else None


@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: Literal[False] = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
) -> _Gradients: ...
@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: Literal[True],
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
) -> _GradientsOfGate: ...
@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
) -> _Gradients | _GradientsOfGate: ...
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
) -> _Gradients | _GradientsOfGate:
    """The backward pass of chunk_gated_delta_rule_fwd. Autograd calls it; so may an implementation of one's own.

    Token by token from the last, with S_t = a_t S_{t-1} + k_t w_t^T, a_t = exp(g_t), w_t = beta_t e_t, e_t = v_t - a_t
    S_{t-1}^T k_t, and dS, at first dht, the gradient that reaches S_t from the tokens after t:

        dS   <- dS + scale q_t do_t^T               dq_t = scale S_t do_t
        dw   =  dS^T k_t                            dv_t = beta_t dw          db_t = dw . e_t
        dS'  =  a_t (dS - k_t dv_t^T)               dk_t = dS w_t - a_t S_{t-1} dv_t
        dg_t =  <dS', S_{t-1}>                      dS  <- dS'

    which is the chain rule applied to the formula of the module; the dS that remains is dh0. The GPU computes the same
    by chunks, whose matrices and states it computes again. A is checked but read by neither the GPU nor the CPU.

    Args:
        q, k, v, beta, scale, initial_state, cu_seqlens, state_v_first, auto_cp, use_qk_l2norm_in_kernel: those of the
            forward call.
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval: likewise.
        g: [B, T, H_v], the first result of chunk_gated_delta_rule_fwd: not g but its sum within each chunk.
        A: [B, T, H_v, 64], dtype of q, its second result.
        do: gradient of o, [B, T, H_v, V], any floating dtype; converted to the dtype of q. It may be expanded.
        dht: gradient of the final state, of the shape of initial_state, any floating dtype; zero by default.
        g_raw: with use_gate_in_kernel, and only then, the g of the forward call, [B, T, H_v].

    Returns:
        dq, dk: [B, T, H_k, K], dtype of q, each summed over the value heads that share the query/key head. With
            use_qk_l2norm_in_kernel they are with respect to q and k before the normalization.
        dv: [B, T, H_v, V], dtype of q.
        db, dg: gradients of beta and of g itself, not of its sum; [B, T, H_v], float32 (float64 for float64 inputs).
            With the sigmoid inside, db is with respect to the beta that came, in its dtype; with the gate inside, dg is
            with respect to g_raw, in its dtype.
        dh0: gradient of initial_state, in its shape, float32 (float64 for float64 inputs); None without it. Of an
            empty sequence it is dht.
        dA_log, ddt_bias: with use_gate_in_kernel only, which makes eight results of six: gradients of A_log and of
            dt_bias, [H_v], float32 (float64 for float64 inputs), summed over all tokens in the same order every time;
            ddt_bias is None without dt_bias.

        All are contiguous, do not require gradients, and are zero at tokens from the last offset of cu_seqlens on.

    Raises:
        RuntimeError: as chunk_gated_delta_rule.
    """
    check_offsets("chunk_gated_delta_rule_bwd", cu_seqlens)
    dq, dk, dv, db, dg, dh0, dA_log, ddt_bias = torch.ops.flash_qla.chunk_gated_delta_rule_bwd(
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        dht,
        scale,
        initial_state,
        cu_seqlens,
        state_v_first,
        auto_cp,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        g_raw,
    )
    gradients = (dq, dk, dv, db, dg, None if initial_state is None else dh0)
    if not use_gate_in_kernel:
        return gradients
    return *gradients, dA_log, None if dt_bias is None else ddt_bias
