"""The low-level forward with the arguments and results of the published FlashQLA (flash-qla 0.1.3 on PyPI).

Its other functions have the same results as those of flash_qla.gated_delta_rule, which take its arguments too.
"""

import torch

from flash_qla.cp import CPContext, passes
from flash_qla.cp.published import CPCache, FlashQLACPContext, ranks_of
from flash_qla.gated_delta_rule import chunk_gated_delta_rule_intermediates
from flash_qla.ops.checks import explain


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
    enable_fwd_cp_cache: bool = False,
    cp_context: CPContext | FlashQLACPContext | None = None,
    is_train: bool | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    state_dtype: torch.dtype | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, CPCache | None]:
    """The published FlashQLA's low-level forward: chunk_gated_delta_rule_intermediates with a sixth result.

        g_cumsum, A, o, h, state, cp_cache = chunk_gated_delta_rule_fwd(q, k, v, g, beta)
        dq, dk, dv, db, dg, _ = chunk_gated_delta_rule_bwd(q, k, v, g_cumsum, beta, A, do, cp_cache=cp_cache)

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
        Return the state at the start of each chunk of 64 tokens too.
    auto_cp : bool, default True
        As in chunk_gated_delta_rule.
    state_v_first : bool, default False
        As in chunk_gated_delta_rule.
    cp_context : CPContext | FlashQLACPContext, optional
        As that of chunk_gated_delta_rule. With ranks o and final_state do not require gradients; all ranks make the
        call, and its backward by chunk_gated_delta_rule_bwd.
    use_qk_l2norm_in_kernel : bool, default False
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

    Other packages
    --------------
    enable_fwd_cp_cache : bool, default False
        Without effect. The published package keeps maps of segments for its backward.
    is_train : bool, optional
        Without effect. The published package decides from it how to split sequences.

    Returns
    -------
    g, A, o, h, final_state : Tensor
        As in chunk_gated_delta_rule_intermediates; h and final_state may be None.
    cp_cache : CPCache or None
        None, or with ranks the states that the earlier ranks leave, for chunk_gated_delta_rule_bwd.

    Raises
    ------
    RuntimeError, TypeError, NotImplementedError, ValueError
        As chunk_gated_delta_rule.
    """
    cp_context, cu_seqlens, auto_cp = ranks_of(cp_context, cu_seqlens, auto_cp)
    args = (
        q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, output_h, auto_cp, state_v_first,
        use_qk_l2norm_in_kernel, state_dtype, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, max_seqlen if cp_context is None else None,
    )  # fmt: skip
    try:
        if cp_context is None:
            return *chunk_gated_delta_rule_intermediates(*args), None
        *results, h, final_state, states = passes.chunk_gated_delta_rule_fwd(cp_context, *args)
    except Exception:
        explain(chunk_gated_delta_rule_fwd, locals())
        raise
    return *results, h if output_h else None, final_state if output_final_state else None, CPCache(g, states)
