"""A chunk's step of the recurrence, by the warpgroups that carry the state; the formula is chunk_forward's. Two macros,
so that between them a kernel can release what has been used."""

import tilelang.language as T

from kernels_tl.common import (
    extern,
)
from kernels_tl.layout import (
    ForwardGate,
)

Full = T.GemmWarpPolicy.FullRow


@T.macro
def begin_step(
    element,
    early,
    K,
    Q,
    L,
    value_tile,
    gates,
    s,
    S,
    S_16,
    V_new,
    V_new_16,
    O,
    minuend,
    pairs,
    decays,
    queries,
    offset,
    column,
):
    """Leaves gamma_C S^T in S and S^T Q^T in O, V_new^T in flight in V_new, and factors of columns in decays and queries.

    value_tile points to the chunk's tile of V_new, gates[s] is its table; `early` of eight quadruples of factors are
    loaded before the first product (load_minuend); minuend, pairs, decays and queries are a thread's registers for what
    is loaded ahead."""
    extern(
        f"load_minuend<{early}>",
        minuend.data,
        pairs.data,
        value_tile,
        T.access_ptr(gates[s, ForwardGate.BETA, 0], "r"),
        offset,
        column,
    )
    total = T.alloc_var(
        "float32", init=extern("load_factor", T.access_ptr(gates[s, ForwardGate.TOTAL, 0], "r"), returns="float32")
    )
    T.wgmma_gemm(S_16, K, V_new, transpose_B=True, policy=Full, clear_accum=True)
    T.wgmma_gemm(S_16, Q, O, transpose_B=True, policy=Full, clear_accum=True)
    T.wait_wgmma(1)
    extern(
        f"subtract_from_minuend<{element}, {early}>",
        V_new.data,
        minuend.data,
        pairs.data,
        T.access_ptr(gates[s, ForwardGate.BETA, 0], "r"),
        column,
    )
    T.copy(V_new, V_new_16)
    T.wgmma_gemm(V_new_16, L, V_new, policy=Full)
    for i, j in T.Parallel(*S.shape):
        S[i, j] *= total
    extern("load_column_factors", decays.data, T.access_ptr(gates[s, ForwardGate.DECAY, 0], "r"), column)
    extern("load_column_factors", queries.data, T.access_ptr(gates[s, ForwardGate.QUERY, 0], "r"), column)


@T.macro
def end_step(element, K, P, S, S_16, V_new, V_new_16, decayed, O, decays, queries):
    """Behind the wait for V: leaves the next state in S and S_16, and O^T in O."""
    extern(f"round_scaled_columns<{element}>", decayed.data, V_new.data, decays.data)
    T.wgmma_gemm(decayed, K, S, policy=Full)
    extern("scale_columns", O.data, queries.data)
    T.copy(V_new, V_new_16)
    T.wgmma_gemm(V_new_16, P, O, policy=Full)
    T.wait_wgmma(1)
    T.copy(S, S_16)
    T.wait_wgmma(0)
