"""The Gated Delta Rule over whole sequences, for training and prefill.

The functions are thin. The ops torch.ops.flash_qla.* check the arguments and do the work; TorchScript, torch.export and
AOTInductor use them directly. The functions have as many parameters as the published implementations that they replace.
"""

from typing import Literal, TypeAlias, overload

import torch

from flash_qla.cp import CPContext, passes, published
from flash_qla.ops import autograd
from flash_qla.ops.checks import check_ignored, explain, longest_sequence

# Results of chunk_gated_delta_rule_bwd: dq, dk, dv, db, dg, dh0 and, with use_gate_in_kernel, dA_log, ddt_bias
_Tensor: TypeAlias = torch.Tensor
_Gradients: TypeAlias = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor | None]
_GradientsOfGate: TypeAlias = tuple[
    _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor | None, _Tensor, _Tensor | None
]


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
    enable_fwd_cp_cache: bool = True,
    cp_context: CPContext | published.FlashQLACPContext | None = None,
    force_intra_cp: bool = False,
    *,
    state_dtype: torch.dtype | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    max_seqlen: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The Gated Delta Rule over whole sequences.

        q = k = torch.randn(2, 1000, 4, 128, dtype=torch.bfloat16, device="cuda")
        v = torch.randn(2, 1000, 16, 128, dtype=torch.bfloat16, device="cuda")
        g, beta = -torch.rand(2, 1000, 16, device="cuda"), torch.rand(2, 1000, 16, device="cuda")
        o, state = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)

    Each sequence and value head has a state S [K, V]. With log decay g_t <= 0 and step size beta_t:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    Source: Songlin Yang, Jan Kautz, Ali Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
    arXiv:2412.06464.

    Tensors may have any strides. The GPU reads q, k and v in place if their last stride is 1, the start and the other
    strides are multiples of 16 bytes, and the batch's stride is T tokens, as for slices of one projection; it copies
    other layouts first. q, k and v share one dtype: bfloat16 or float16, on the CPU also float32 and float64.
    Arithmetic and states are in float32 (float64 for float64 inputs); g, beta and initial_state of another floating
    dtype are converted to that. With activations inside, g and beta are pre-activation, in any floating dtype, not
    converted. Value head h uses query/key head h // (H_v / H_k). torch.autocast casts q, k and v to its dtype,
    unless they are float64, and nothing else.

    o and final_state can be differentiated, once, with respect to q, k, v, g, beta, initial_state, A_log and dt_bias.
    Each gradient has the dtype of its tensor. Gradients of A_log and dt_bias are summed in float32, always in the same
    order. Autograd saves the inputs for the backward, and nothing else.

    Parameters
    ----------
    q : Tensor
        Queries, [B, T, H_k, K]. K is a multiple of 8 up to 256 on the GPU, any on the CPU.
    k : Tensor
        Keys, as q.
    v : Tensor
        Values, [B, T, H_v, V], H_v a multiple of H_k. V is a multiple of 8 up to 512 on the GPU, any on the CPU.
    g : Tensor
        Log decay of each token, natural logarithm, [B, T, H_v]. A state does not grow if g is at most 0; -inf forgets
        everything before the token. With use_gate_in_kernel: the input of the gate, any number.
    beta : Tensor
        Step size of each token, [B, T, H_v]; in [0, 1], or up to 2 for negative eigenvalues. With
        use_beta_sigmoid_in_kernel: the input of the sigmoid, any number.
    use_qk_l2norm_in_kernel : bool, default False
        Replace each q_t and k_t by x * rsqrt(sum(x ** 2) + 1e-6), computed in float32. On the GPU the factors of the
        gates are multiplied by the rsqrt, in float32. In float16 and for K above 128 the backward rounds the normalized
        q_t and k_t to the dtype of q instead.

    States
    ------
    initial_state : Tensor, optional
        State before the first token of each sequence, [N, H_v, K, V], or [N, H_v, V, K] with state_v_first; zero by
        default. N is B, or the number of sequences in cu_seqlens.
    output_final_state : bool, default False
        Return the state after the last token of each sequence too.
    state_v_first : bool, default False
        States are [N, H_v, V, K], as arguments and as results.
    state_dtype : torch.dtype, optional
        Dtype of final_state, bfloat16, float16, float32 or float64; by default that of the arithmetic. The state is
        rounded to it once, at the end. A gradient of final_state then arrives in state_dtype.

    Packed sequences
    ----------------
    cu_seqlens : Tensor, optional
        Offsets of sequences packed along T, [N + 1], int32 or int64, on the device of q, from 0, not decreasing, at
        most T; B must be 1. A sequence may be empty: its final state is its initial state. Tokens from the last offset
        on belong to no sequence, and their output is zero. The CPU always checks the offsets. On the GPU the host never
        reads them: wrong offsets raise nothing, but no kernel leaves the tensors. FLASH_QLA_CHECK=1 in the environment
        reports them there too, and synchronizes.
    max_seqlen : int, optional
        Tokens of the longest sequence in cu_seqlens, if the host knows it. The GPU's kernels are then chosen for this
        length, in the backward too. Otherwise they are chosen for likely lengths, which costs time if a few sequences
        are much longer than others, or if all are equally long. A wrong number costs only time, so leave it out when a
        CUDA graph will see other lengths. Ignored without cu_seqlens and with cp_context.

    Activations inside
    ------------------
    use_gate_in_kernel : bool, default False
        The log decay is -exp(A_log) * softplus(g + dt_bias), computed in float32 (float64 for float64 inputs).
        softplus(x) is x above 20, as PyTorch's.
    A_log : Tensor, optional
        Log of each head's rate of decay, natural logarithm, [H_v], any floating dtype; required with
        use_gate_in_kernel, and None without. exp(A_log) may overflow if its product with the softplus does not. -inf
        never decays, inf always forgets.
    dt_bias : Tensor, optional
        Added to g, [H_v], any floating dtype; zero by default, and None without use_gate_in_kernel.
    use_beta_sigmoid_in_kernel : bool, default False
        The step size is sigmoid(beta), computed in float32 (float64 for float64 inputs).
    allow_neg_eigval : bool, default False
        The step size is 2 * sigmoid(beta), so that the state's transition may have negative eigenvalues; only with
        use_beta_sigmoid_in_kernel.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output; K ** -0.5 by default.
    auto_cp : bool, default True
        On the GPU, let each pass divide long sequences into splits that run in parallel, if there are too few sequences
        and heads to fill the GPU. Where the gates decay a state, or in the backward the gradient of a state, to less
        than 2^-24 of its norm within a split, the remainder is dropped; with auto_cp=False it never is. The CPU ignores
        this argument.
    cp_context : CPContext | FlashQLACPContext, optional
        The tokens are this rank's part of sequences that are spread over a process group: the result of
        flash_qla.cp.build_cp_context, or of the function of this name of FLA or of the published FlashQLA. All ranks of
        the group make the call, and its backward, which runs if an input requires gradients and the loss depends on a
        result. B is 1 and T the number of the rank's tokens. The context has the offsets, and cu_seqlens is ignored; N
        is the number of the rank's own sequences. An initial state counts on the rank that has the sequence's first
        token, and is ignored elsewhere. A final state is the state after the rank's own tokens: on the rank with the
        sequence's last token, that of the sequence. Gradients of A_log and dt_bias are those of the rank's tokens.

    Other packages
    --------------
    head_first : bool, default False
        Only False; the head dimension is the third.
    enable_fwd_cp_cache : bool, default True
        Without effect. The published FlashQLA keeps maps of splits for its backward; this package computes them again.
    force_intra_cp : bool, default False
        Only False, unless auto_cp is False or cp_context is given, where it has no effect.
    **others : object
        Keywords of other implementations. cu_seqlens_cpu: cu_seqlens on the CPU, which give max_seqlen unless a
        compiler traces the call. Without effect: chunk_indices, chunk_size of 64, transpose_state_layout of False.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], in the dtype of q, contiguous.
    final_state : Tensor or None
        Of the shape of initial_state, contiguous, in state_dtype; None unless output_final_state.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype or shape; A_log is missing with use_gate_in_kernel; A_log, dt_bias or
        allow_neg_eigval is given without its activation; max_seqlen is negative; or offsets are wrong and checked. The
        message names the argument, what was expected and what came.
    ValueError
        The tokens are not those of cp_context.
    TypeError
        A keyword in **others is unknown; it or head_first has another value; a list, an array or a NestedTensor came
        where a tensor is expected; or state_dtype is no dtype.
    NotImplementedError
        force_intra_cp is True; gradients made with create_graph=True are differentiated again; forward-mode
        differentiation; or, with cp_context, a transform of torch.func.
    """
    if others or head_first is not False:
        check_ignored(chunk_gated_delta_rule, {"head_first": head_first, **others})
        if max_seqlen is None:
            max_seqlen = longest_sequence(others.get("cu_seqlens_cpu"))
    if force_intra_cp and auto_cp and cp_context is None:
        published.refuse_forced("chunk_gated_delta_rule")
    if cp_context is not None:
        cp_context, cu_seqlens, auto_cp = published.ranks_of(cp_context, cu_seqlens, auto_cp)
        max_seqlen = None if cp_context is not None else max_seqlen
    args = (
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, state_v_first,
        auto_cp,
    )  # fmt: skip
    options = (
        state_dtype, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, max_seqlen,
    )  # fmt: skip
    try:
        if cp_context is not None:
            o, final_state = passes.chunk_gated_delta_rule(cp_context, *args, *options)
        else:
            has_activations = use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval
            if not has_activations and state_dtype is A_log is dt_bias is max_seqlen is None:
                options = ()  # the dispatcher fills in defaults in less time than it reads arguments
            o, final_state = autograd.call(torch.ops.flash_qla.chunk_gated_delta_rule, *args, *options)
    except Exception:
        explain(chunk_gated_delta_rule, locals())
        raise
    return o, final_state if output_final_state else None


def chunk_gated_delta_rule_packed(
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    state_dtype: torch.dtype | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_gated_delta_rule with q, k and v in one tensor, as a convolution returns them.

        o, state = chunk_gated_delta_rule_packed(mixed_qkv, g, beta, num_k_heads=16, head_k_dim=128)

    The results can be differentiated like those of chunk_gated_delta_rule. The backward writes one gradient of the
    shape of mixed_qkv, where autograd would otherwise put those of three slices together.

    Parameters
    ----------
    mixed_qkv : Tensor
        [B, T, 2 H_k K + H_v V], any strides: the heads of q, then of k, then of v of each token. H_v is the number of
        heads of g, and V follows.
    g, beta : Tensor
        Log decay and step size, [B, T, H_v], as in chunk_gated_delta_rule.
    num_k_heads : int
        Number of key heads, H_k.
    head_k_dim : int
        Channels of a key head, K.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in chunk_gated_delta_rule.
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, as in chunk_gated_delta_rule.
    output_final_state, use_qk_l2norm_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in chunk_gated_delta_rule.
    state_v_first : bool, default False
        As in chunk_gated_delta_rule.
    auto_cp : bool, default True
        As in chunk_gated_delta_rule.
    state_dtype : torch.dtype, optional
        As in chunk_gated_delta_rule.
    use_gate_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    A_log, dt_bias : Tensor, optional
        [H_v], as in chunk_gated_delta_rule.
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool, default False
        As in chunk_gated_delta_rule.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], as in chunk_gated_delta_rule.
    final_state : Tensor or None
        As in chunk_gated_delta_rule.

    Raises
    ------
    RuntimeError
        As chunk_gated_delta_rule; or the channels of mixed_qkv are not 2 H_k K + H_v V.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected; or state_dtype is no dtype.
    NotImplementedError
        Gradients made with create_graph=True are differentiated again; or forward-mode differentiation.
    """
    try:
        o, final_state = autograd.call(
            torch.ops.flash_qla.chunk_gated_delta_rule_packed,
            mixed_qkv, g, beta, num_k_heads, head_k_dim, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, cu_seqlens, state_v_first, auto_cp, state_dtype, use_gate_in_kernel, A_log,
            dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, max_seqlen,
        )  # fmt: skip
    except Exception:
        explain(chunk_gated_delta_rule_packed, locals())
        raise
    return o, final_state if output_final_state else None


def chunk_gated_delta_rule_intermediates(
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
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The forward pass with its intermediate results, for each chunk of C = 64 tokens of a sequence.

        g_cumsum, A, o, h, state = chunk_gated_delta_rule_intermediates(q, k, v, g, beta, output_h=True)

    This is the op chunk_gated_delta_rule_fwd. The function of that name (flash_qla.published) has the published
    FlashQLA's arguments and a sixth result.

    Autocast and the gradients of o and final_state are those of chunk_gated_delta_rule. The results g, A and h do not
    require gradients. g, A and o are zero for tokens from the last offset of cu_seqlens on.

    Parameters
    ----------
    q, k : Tensor
        Queries and keys, [B, T, H_k, K], as in chunk_gated_delta_rule.
    v : Tensor
        Values, [B, T, H_v, V], as in chunk_gated_delta_rule.
    g, beta : Tensor
        Log decay and step size, [B, T, H_v], as in chunk_gated_delta_rule.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in chunk_gated_delta_rule.
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, as in chunk_gated_delta_rule.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in chunk_gated_delta_rule.
    output_final_state : bool, default True
        As in chunk_gated_delta_rule, but by default True.
    output_h : bool, default False
        Return the state at the start of each chunk too.
    auto_cp : bool, default True
        As in chunk_gated_delta_rule.
    state_v_first, use_qk_l2norm_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    state_dtype : torch.dtype, optional
        As in chunk_gated_delta_rule.
    use_gate_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    A_log, dt_bias : Tensor, optional
        [H_v], as in chunk_gated_delta_rule.
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool, default False
        As in chunk_gated_delta_rule.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Returns
    -------
    g : Tensor
        [B, T, H_v], float32 (float64 for float64 inputs): the sum of the log decay, natural logarithm, from the chunk's
        first token to this one. Where e^g is 0 in that arithmetic the CPU has -inf, and the sum begins anew after that
        token; the GPU takes a g below -1024 as -1024.
    A : Tensor
        [B, T, H_v, 64], dtype of q: row i of a chunk is row i of (I + stril(diag(beta) K K^T)) ** -1, where stril is
        the part below the diagonal and K the chunk's keys, after the l2norm if there is one. A has no gates. A chunk of
        fewer than 64 tokens has zeros in the other columns. For |k_t| <= 1 and beta <= 2 no entry below the diagonal is
        larger than beta. Longer keys may make entries large, and float16 may overflow.
    o : Tensor
        [B, T, H_v, V], as in chunk_gated_delta_rule.
    h : Tensor or None
        State at the start of each chunk, dtype of q, [B, ceil(T / 64), H_v, K, V] or, with state_v_first, [..., V, K];
        None unless output_h. With cu_seqlens it is [1, (T + 63 * N) // 64, H_v, K, V]: the chunks of the first
        sequence, those of the second and so on, then zeros. The number of chunks is an upper bound that depends on
        shapes only. V comes before K in memory: without state_v_first h is a transposed view.
    final_state : Tensor or None
        As in chunk_gated_delta_rule.

    Raises
    ------
    RuntimeError, TypeError, NotImplementedError
        As chunk_gated_delta_rule.
    """
    try:
        g_cumsum, A, o, h, final_state = autograd.call(
            torch.ops.flash_qla.chunk_gated_delta_rule_fwd,
            q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, output_h, auto_cp, state_v_first,
            use_qk_l2norm_in_kernel, state_dtype, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, max_seqlen,
        )  # fmt: skip
    except Exception:
        explain(chunk_gated_delta_rule_intermediates, locals())
        raise
    return g_cumsum, A, o, h if output_h else None, final_state if output_final_state else None


@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: published.CPCache | None = None,
    cp_context: CPContext | published.FlashQLACPContext | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: Literal[False] = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> _Gradients: ...
@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: published.CPCache | None = None,
    cp_context: CPContext | published.FlashQLACPContext | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: Literal[True],
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> _GradientsOfGate: ...
@overload
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: published.CPCache | None = None,
    cp_context: CPContext | published.FlashQLACPContext | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> _Gradients | _GradientsOfGate: ...
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: published.CPCache | None = None,
    cp_context: CPContext | published.FlashQLACPContext | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    g_raw: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> _Gradients | _GradientsOfGate:
    """The backward pass of chunk_gated_delta_rule and chunk_gated_delta_rule_fwd, which autograd calls.

        o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        dq, dk, dv, db, dg, _ = chunk_gated_delta_rule_bwd(q, k, v, None, beta, None, do, g_raw=g)

    The forward is S_t = a_t S_{t-1} + k_t w_t^T with a_t = exp(g_t), e_t = v_t - a_t S_{t-1}^T k_t, w_t = beta_t e_t.
    dS is the gradient that reaches S_t from the tokens after t; it begins as dht. From the last token to the first:

        dS   <- dS + scale q_t do_t^T               dq_t = scale S_t do_t
        dw   =  dS^T k_t                            dv_t = beta_t dw          db_t = dw . e_t
        dS'  =  a_t (dS - k_t dv_t^T)               dk_t = dS w_t - a_t S_{t-1} dv_t
        dg_t =  <dS', S_{t-1}>                      dS  <- dS'

    The last dS is dh0. This is the chain rule on the formula. The GPU works on chunks, and computes their
    matrices and states again.

    Arguments that the forward has too are those of its call. All results are contiguous, require no gradients, and are
    zero at tokens from the last offset of cu_seqlens on.

    Parameters
    ----------
    q, k : Tensor
        Those of the forward call, [B, T, H_k, K].
    v : Tensor
        That of the forward call, [B, T, H_v, V].
    g : Tensor or None
        [B, T, H_v], the first result of chunk_gated_delta_rule_fwd: the sum of the log decay within each chunk. None if
        g_raw is given: the sums are then computed again, at no cost.
    beta : Tensor
        That of the forward call, [B, T, H_v].
    A : Tensor or None
        [B, T, H_v, 64], dtype of q, the second result of chunk_gated_delta_rule_fwd, or None. It is checked, but not
        read.
    do : Tensor
        Gradient of o, [B, T, H_v, V], any floating dtype; converted to the dtype of q. It may be expanded.
    dht : Tensor, optional
        Gradient of the final state, of the shape of initial_state, any floating dtype; zero by default.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in chunk_gated_delta_rule.
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, as in chunk_gated_delta_rule.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in chunk_gated_delta_rule.
    state_v_first : bool, default False
        As in chunk_gated_delta_rule.
    auto_cp : bool, default True
        As in chunk_gated_delta_rule.
    cp_cache : CPCache, optional
        The last result of the forward call; required with a cp_context of ranks, and None without.
    cp_context : CPContext | FlashQLACPContext, optional
        As in chunk_gated_delta_rule.
    use_qk_l2norm_in_kernel, use_gate_in_kernel : bool, default False
        As in chunk_gated_delta_rule.
    A_log, dt_bias : Tensor, optional
        [H_v], as in chunk_gated_delta_rule.
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool, default False
        As in chunk_gated_delta_rule.
    g_raw : Tensor, optional
        The g of the forward call, [B, T, H_v], any floating dtype; required with use_gate_in_kernel or without g, and
        otherwise None.
    max_seqlen : int, optional
        As in chunk_gated_delta_rule.

    Returns
    -------
    dq, dk : Tensor
        [B, T, H_k, K], dtype of q, summed over the value heads that share a query/key head. With
        use_qk_l2norm_in_kernel they are gradients of q and k before the normalization.
    dv : Tensor
        [B, T, H_v, V], dtype of q.
    db, dg : Tensor
        [B, T, H_v], float32 (float64 for float64 inputs), gradients of the step size and of the log decay of each
        token. With use_beta_sigmoid_in_kernel db is the gradient of beta, in its dtype; with use_gate_in_kernel dg is
        that of g_raw, in its dtype.
    dh0 : Tensor or None
        Gradient of initial_state, in its shape, float32 (float64 for float64 inputs); None without initial_state. An
        empty sequence has dht.
    dA_log, ddt_bias : Tensor or None
        Only with use_gate_in_kernel, so that the results are six or eight. Gradients of A_log and dt_bias, [H_v],
        float32 (float64 for float64 inputs), summed over all tokens, always in the same order; ddt_bias is None without
        dt_bias.

    Raises
    ------
    RuntimeError
        As chunk_gated_delta_rule; or g_raw is missing where it is required, or given where it is not.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected; or cp_cache is not that of the forward call.
    """
    cp_context, cu_seqlens, auto_cp = published.ranks_of(cp_context, cu_seqlens, auto_cp)
    published.check_cache(cp_cache, cp_context)
    args = (
        q, k, v, g, beta, A, do, dht, scale, initial_state, cu_seqlens, state_v_first, auto_cp,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        g_raw, max_seqlen if cp_context is None else None,
    )  # fmt: skip
    try:
        if cp_context is None:
            *gradients, dh0, dA_log, ddt_bias = autograd.call(torch.ops.flash_qla.chunk_gated_delta_rule_bwd, *args)
        else:
            *gradients, dh0, dA_log, ddt_bias = passes.chunk_gated_delta_rule_bwd(cp_context, cp_cache, *args)
    except Exception:
        explain(chunk_gated_delta_rule_bwd, locals())
        raise
    gradients = (*gradients, None if initial_state is None else dh0)
    if not use_gate_in_kernel:
        return gradients
    return *gradients, dA_log, None if dt_bias is None else ddt_bias
