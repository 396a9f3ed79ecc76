"""A chunk's step of the recurrence, by the warpgroups that carry the state:

    residual^T = (V^T - (S^T K^T) diag(gamma)) diag(beta)
    V_new^T    = residual^T + residual^T L^T                        L = A * D - I
    O^T        = (S^T Q^T) diag(scale gamma) + V_new^T P^T          P = scale tril(Q K^T) * D
    S^T        = gamma_C S^T + (V_new^T diag(gamma_C / gamma)) K

The transposed form keeps every intermediate in registers: each is the A operand of the next WGMMA. With the l2norm the
factors of the columns also hold 1 / |k| and 1 / |q|, so K and Q are not normalised.

The step is two macros, begin_step and end_step, because a kernel releases its tiles between them. Without an output
there are no products for O. Only one product at a time then hides loads and conversions, so the order of instructions
differs, and the kernel's own work, `meanwhile`, runs during the first and the last product.

In fp16, and with an output, large rows of S^T are scaled during the steps, and with them the same rows of V^T, V_new^T
and O^T (row_scales.cuh): begin_scales before the first step, scale_values before each one, end_scales before S is used
for anything else.

With `exact`, a second product adds the part of V_new^T diag(gamma_C / gamma) that rounding to 16 bits loses. Otherwise
this rounding would be the largest error of S'.
"""

import tilelang.language as T

from kernels_tl.config import is_wide
from kernels_tl.core.common import C, element_type, extern
from kernels_tl.core.cta import fragments, named
from kernels_tl.layout import ForwardGate
from kernels_tl.states.wide_state import multiply_state

Full = T.GemmWarpPolicy.FullRow
ALL_EARLY = 8  # quadruples of the residual's factors
SCALES = """
#include "states/row_scales.cuh"
"""


def nothing():
    pass


def has_scales(dtype, output=True):
    return output and dtype == "float16"


def prelude_of_scales(dtype):
    return SCALES if has_scales(dtype) else ""


def tile_of_scales(dtype, rows):
    """The tile `scales`, if any, of a CTA that carries `rows` rows of S^T: a word for two rows."""
    return {"scales": ([rows // 2], "int32")} if has_scales(dtype) else {}


def registers(rows, K, dtype, early, output=True, exact=False):
    """Registers of the warpgroups that carry `rows` rows of S^T. `early` of the residual's eight quadruples of factors
    are loaded before the first product (core/tiles.cuh: load_minuend), and with ALL_EARLY the decays before the product
    with L. More of them may spill; in fp16 one fewer is loaded, so never ALL_EARLY."""
    r = fragments(
        S=([rows, K], "float32"),  # S^T
        **({} if is_wide(K) else {"S_16": ([rows, K], dtype)}),
        V_new=([rows, C], "float32"),  # S^T K^T, residual^T, V_new^T in turn
        V_new_16=([rows, C], dtype),
        decayed=([rows, C], dtype),  # V_new^T diag(gamma_C / gamma)
        **({"decayed_rest": ([rows, C], dtype)} if exact else {}),  # the rest after rounding
        **({"O": ([rows, C], "float32")} if output else {}),  # O^T
    )
    # Loaded before the WGMMAs whose results they change: the tile of V, its pairs of factors, gamma_C / gamma; for O
    # scale gamma.
    ahead = named(
        minuend=T.alloc_local([16], "uint32"),
        pairs=T.alloc_local([32], "float32"),
        decays=T.alloc_local([16], "float32"),
        **({"queries": T.alloc_local([16], "float32")} if output else {}),
    )
    vars(r).update(vars(ahead))
    r.has_scales = has_scales(dtype, output)
    if r.has_scales:
        vars(r).update(vars(named(scaled=T.alloc_local([1], "int32"))))  # whether a row of the warp has a scale
        early = max(early - 1, 0)  # or chunk_forward spills
    r.element, r.early, r.output, r.exact = element_type(dtype), early, output, exact
    r.K, r.is_wide = K, is_wide(K)
    return r


def scales_of(tiles):
    return T.access_ptr(tiles.scales[0], "rw")


def copy_of(r):
    """S_16's address, if there is one."""
    return T.reinterpret("handle", T.uint64(0)) if r.is_wide else r.S_16.data


def has_large(r):
    """Whether the warp's part of S has a number that may have to be scaled."""
    name, state = (f"has_large<{r.K // 2}, false>", r.S) if r.is_wide else (f"has_large<{r.K // 4}, true>", r.S_16)
    return extern(name, state.data, returns="bool")


@T.macro
def begin_scales(r, tiles):
    """Before the steps: scales S and, with K <= 128, its copy S_16."""
    if r.has_scales:
        r.scaled[0] = extern(f"begin_scales<{r.K}>", r.S.data, copy_of(r), scales_of(tiles), returns="int32")


@T.macro
def end_scales(r, tiles):
    """After the steps: removes the scales of S. S_16 stays scaled."""
    if r.has_scales:
        extern(f"end_scales<{r.K}>", r.S.data, scales_of(tiles))


@T.macro
def scale_values(r, tiles, V, offset):
    """Before a step: scales the warpgroup's tile of V."""
    if r.has_scales:
        extern("scale_values", T.access_ptr(V, "rw"), offset, scales_of(tiles), r.scaled[0])


@T.macro
def fetch_residual_factors(r, tiles, s, V, offset, column):
    """Loads the warpgroup's tile of V and the residual's factors to registers, ahead of their product."""
    extern(
        f"load_minuend<{r.early}>",
        r.minuend.data,
        r.pairs.data,
        T.access_ptr(V, "r"),
        T.access_ptr(tiles.gates[s, ForwardGate.BETA, 0], "r"),
        offset,
        column,
    )


@T.macro
def fetch_factors(factors, tiles, s, row, column):
    extern("load_column_factors", factors.data, T.access_ptr(tiles.gates[s, row, 0], "r"), column)


@T.macro
def begin_step(r, tiles, s, V, offset, column, has_V=True, meanwhile=nothing, staged=None):
    """Leaves gamma_C S^T in S, S^T Q^T in O, V_new^T in flight in V_new, factors of columns in decays and queries.

    s is the stage of the chunk's tiles, V the first element of the warpgroup's tile of V. offset and column are the
    thread's place in a tile and in a fragment (core/tiles.cuh). V counts as zero unless has_V. `staged`, only for a
    wide state: a tile that gets S^T in 16 bits, and the thread's place in it."""
    if r.output:
        if not r.is_wide:
            fetch_residual_factors(r, tiles, s, V, offset, column)
        total = T.alloc_var(
            "float32",
            init=extern("load_factor", T.access_ptr(tiles.gates[s, ForwardGate.TOTAL, 0], "r"), returns="float32"),
        )
    elif not r.is_wide:  # faster here: gamma_C is read at its use
        T.copy(r.S, r.S_16)
    if r.is_wide:
        queries = (T.access_ptr(tiles.Q[s, 0, 0, 0], "r"), r.O.data) if r.output else ()
        multiply_state(r.element, r.K, r.S, T.access_ptr(tiles.K[s, 0, 0], "r"), r.V_new, *queries, staged=staged)
        fetch_residual_factors(r, tiles, s, V, offset, column)
    else:
        T.wgmma_gemm(r.S_16, tiles.K[s, :, :], r.V_new, transpose_B=True, policy=Full, clear_accum=True)
    if r.output:
        if not r.is_wide:
            T.wgmma_gemm(r.S_16, tiles.Q[s, :, :], r.O, transpose_B=True, policy=Full, clear_accum=True)
        T.wait_wgmma(1)
    else:
        if not r.is_wide:
            fetch_residual_factors(r, tiles, s, V, offset, column)
        meanwhile()
        T.wait_wgmma(0)
    extern(
        f"subtract_from_minuend<{r.element}, {r.early}>",
        r.V_new.data,
        r.minuend.data,
        r.pairs.data,
        T.access_ptr(tiles.gates[s, ForwardGate.BETA, 0], "r"),
        column,
        *(() if has_V is True else (has_V,)),
    )
    T.copy(r.V_new, r.V_new_16)
    if r.early == ALL_EARLY:
        fetch_factors(r.decays, tiles, s, ForwardGate.DECAY, column)
    T.wgmma_gemm(r.V_new_16, tiles.L[s, :, :], r.V_new, policy=Full)
    for i, j in T.Parallel(*r.S.shape):
        r.S[i, j] *= total if r.output else tiles.gates[s, ForwardGate.TOTAL, 0]
    if not r.is_wide:
        if r.early != ALL_EARLY:
            fetch_factors(r.decays, tiles, s, ForwardGate.DECAY, column)
        if r.output:
            fetch_factors(r.queries, tiles, s, ForwardGate.QUERY, column)


@T.macro
def end_step(r, tiles, s, column=None, meanwhile=nothing):
    """Leaves the next state in S; with an output also in S_16, if there is one, and O^T in O. The caller has waited for
    V_new."""
    if r.is_wide:  # no registers are free before
        fetch_factors(r.decays, tiles, s, ForwardGate.DECAY, column)
    extern(f"round_scaled_columns<{r.element}>", r.decayed.data, r.V_new.data, r.decays.data)
    T.wgmma_gemm(r.decayed, tiles.K[s, :, :], r.S, policy=Full)
    if r.exact:
        extern(f"round_scaled_columns<{r.element}>", r.decayed_rest.data, r.V_new.data, r.decays.data, r.decayed.data)
        T.wgmma_gemm(r.decayed_rest, tiles.K[s, :, :], r.S, policy=Full)
    if r.output:
        if r.is_wide:
            fetch_factors(r.queries, tiles, s, ForwardGate.QUERY, column)
        extern("scale_columns", r.O.data, r.queries.data)
        T.copy(r.V_new, r.V_new_16)
        T.wgmma_gemm(r.V_new_16, tiles.P[s, :, :], r.O, policy=Full)
        T.wait_wgmma(1)
        if not r.is_wide:
            T.copy(r.S, r.S_16)
        if r.has_scales:
            large = T.alloc_var("bool", init=has_large(r))
    else:
        meanwhile()
    T.wait_wgmma(0)
    if r.has_scales:
        r.scaled[0] = extern(
            f"scale_rows<{r.K}>", r.S.data, copy_of(r), scales_of(tiles), r.scaled[0], large, r.O.data, returns="int32"
        )
