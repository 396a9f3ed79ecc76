"""A chunk's step of the recurrence in reverse, by the warpgroups that carry the gradient of the state. dS' is the
gradient of the state after the chunk, dS of the state before it:

    dV_new^T = dO^T P + (dS'^T K^T) diag(gamma_C / gamma)
    U^T      = dV_new^T + dV_new^T L
    dS^T     = gamma_C dS'^T + (dO^T diag(scale gamma)) Q - (U^T diag(beta gamma)) K

dS^T is computed as gamma_1 times the same sum with gamma / gamma_1 in the place of gamma: 16 bits hold gamma / gamma_1
however small gamma is. The transposed form keeps every intermediate in registers: each is the A operand of the next
WGMMA. chunk_backward has its own code for the step (backward_state.py), because its warpgroups have fewer registers.
There dS' comes from shared memory, and the order of the same products and roundings differs.
"""

import tilelang.language as T

from kernels_tl.config import is_wide
from kernels_tl.core.common import C, element_type, extern
from kernels_tl.core.cta import fragments, named
from kernels_tl.layout import BackwardGate, NormalizedGate
from kernels_tl.states.wide_state import multiply_state

Full = T.GemmWarpPolicy.FullRow


class GateTable:
    """The table of a chunk's gates: BackwardGate's rows or, with the l2norm inside, NormalizedGate's. It is
    `tiles.gates`, with a stage for each chunk in flight."""

    def __init__(self, normalize):
        self.normalize = normalize
        self.rows = NormalizedGate if normalize else BackwardGate
        self.QUERY_FADE = NormalizedGate.QUERY_FADE if normalize else BackwardGate.FADE
        self.KEY_FADE = NormalizedGate.KEY_FADE if normalize else BackwardGate.FADE

    def number(self, tiles, s, row, i):
        return extern("load_factor", T.access_ptr(tiles.gates[s, row, i], "r"), returns="float32")

    def gamma(self, tiles, s, i):
        """gamma_i, the same in all threads."""
        if self.normalize:
            return extern("exp2_fast", self.number(tiles, s, NormalizedGate.LOG, i), returns="float32")
        return self.number(tiles, s, BackwardGate.GAMMA, i)

    def fade(self, tiles, s):
        """gamma_C / gamma_1, the same in all threads."""
        if self.normalize:
            log = NormalizedGate.LOG
            decay = self.number(tiles, s, log, C - 1) - self.number(tiles, s, log, 0)
            return extern("exp2_fast", decay, returns="float32")
        return self.number(tiles, s, BackwardGate.FADE, C - 1)


def registers(rows, K, dtype, normalize=False):
    """The registers of the warpgroups that carry `rows` rows of dS^T."""
    r = fragments(
        dS=([rows, K], "float32"),  # dS'^T, dS^T
        **({} if is_wide(K) else {"dS_16": ([rows, K], dtype), "dSK": ([rows, C], "float32")}),  # dSK: dS'^T K^T
        U=([rows, C], "float32"),  # dO^T P, dV_new^T, U^T in turn
        U_16=([rows, C], dtype),  # dV_new^T
        # dO^T diag(scale gamma / gamma_1) in two parts: rounded to one, it would be the largest error of dS
        faded_dO=([rows, C], dtype),
        faded_dO_rest=([rows, C], dtype),
        faded_U=([rows, C], dtype),  # -U^T diag(beta gamma / gamma_1)
    )
    # gamma_C / gamma and -beta gamma / gamma_1, loaded before the WGMMAs
    ahead = named(decays=T.alloc_local([16], "float32"), fades=T.alloc_local([16], "float32"))
    if is_wide(K):
        vars(r).update(vars(named(dSK=T.alloc_local([32], "float32"))))  # only CUDA functions use it
    vars(r).update(vars(ahead))
    r.element, r.K, r.table = element_type(dtype), K, GateTable(normalize)
    return r


def gate_row(tiles, s, row):
    return T.access_ptr(tiles.gates[s, row, 0], "r")


def gate_rows(tiles, s, *rows):
    return [gate_row(tiles, s, row) for row in rows]


def beta_and_fade(r, tiles, s):
    return gate_rows(tiles, s, r.table.rows.BETA, r.table.KEY_FADE)


def round_faded_dO(r, tiles, s, dO, scale, offset, column):
    """faded_dO + faded_dO_rest = dO^T diag(scale gamma / gamma_1): dO is the first element of the warpgroup's tile."""
    return extern(
        f"round_scaled_tile<{element_type(str(r.faded_dO.dtype))}>",
        r.faded_dO.data,
        r.faded_dO_rest.data,
        T.access_ptr(dO, "r"),
        gate_row(tiles, s, r.table.QUERY_FADE),
        scale,
        offset,
        column,
    )


@T.macro
def begin_dS(r, tiles, s, z, dO, offset, column, scale):
    """dS has dS'^T, and gets all of dS^T / gamma_1 but its term with U, in flight. z is the stage of Q."""
    round_faded_dO(r, tiles, s, dO, scale, offset, column)
    fade = T.alloc_var("float32", init=r.table.fade(tiles, s))
    for i, j in T.Parallel(*r.dS.shape):
        r.dS[i, j] *= fade
    T.wgmma_gemm(r.faded_dO, tiles.Q[z, :, :], r.dS, policy=Full)
    T.wgmma_gemm(r.faded_dO_rest, tiles.Q[z, :, :], r.dS, policy=Full)


@T.macro
def begin_step(r, tiles, s, dO, offset, column, scale):
    """Takes dS'^T in dS. Leaves dS'^T K^T in dSK and dO^T P in U. dS gets all of dS^T / gamma_1 but its term with U, in
    flight.

    s is the stage of the chunk's tiles. The tiles L and P are the transposed matrices; gates is a GateTable. dO is the
    first element of the warpgroup's tile of dO. offset and column are the thread's place in a tile and in a fragment
    (core/tiles.cuh)."""
    T.copy(r.dS, r.dS_16)
    T.wgmma_gemm(r.dS_16, tiles.K[s, :, :], r.dSK, transpose_B=True, policy=Full, clear_accum=True)
    T.wgmma_gemm(
        tiles.dO[s, :, :], tiles.P[s, :, :], r.U, transpose_A=True, transpose_B=True, policy=Full, clear_accum=True
    )
    begin_dS(r, tiles, s, s, dO, offset, column, scale)
    extern("load_column_factors", r.decays.data, gate_row(tiles, s, r.table.rows.DECAY), column)
    T.wait_wgmma(2)


@T.macro
def end_step(r, tiles, s, column):
    """Leaves dS^T in dS and U^T in U."""
    extern("add_scaled_columns", r.U.data, r.dSK.data, r.decays.data)
    T.copy(r.U, r.U_16)
    T.wgmma_gemm(r.U_16, tiles.L[s, :, :], r.U, transpose_B=True, policy=Full)
    extern("load_column_products", r.fades.data, *beta_and_fade(r, tiles, s), column)
    T.wait_wgmma(0)
    extern(f"round_scaled_columns<{r.element}>", r.faded_U.data, r.U.data, r.fades.data)
    T.wgmma_gemm(r.faded_U, tiles.K[s, :, :], r.dS, policy=Full)
    gamma = T.alloc_var("float32", init=r.table.gamma(tiles, s, 0))
    T.wait_wgmma(0)
    for i, j in T.Parallel(*r.dS.shape):
        r.dS[i, j] *= gamma


def nothing():
    pass


@T.macro
def wide_step(r, tiles, s, z, dO, offset, column, scale, staged=None, released=nothing, use_U=nothing):
    """The whole step on a wide state, in the order that takes the fewest registers. dS has dS'^T, then dS^T.

    s is the stage of K and the gates, z the stage of the other tiles. `staged`, if any, gets dS'^T in 16 bits: see
    states/wide_state.py. The step calls use_U when U has U^T, and `released` when it has read the tiles of stage z.
    """
    multiply_state(r.element, r.K, r.dS, T.access_ptr(tiles.K[s, 0, 0], "r"), r.dSK, staged=staged)
    T.wgmma_gemm(
        tiles.dO[z, :, :], tiles.P[z, :, :], r.U, transpose_A=True, transpose_B=True, policy=Full, clear_accum=True
    )
    extern("load_column_factors", r.decays.data, gate_row(tiles, s, r.table.rows.DECAY), column)
    T.wait_wgmma(0)
    extern("add_scaled_columns", r.U.data, r.dSK.data, r.decays.data)
    T.copy(r.U, r.U_16)
    T.wgmma_gemm(r.U_16, tiles.L[z, :, :], r.U, transpose_B=True, policy=Full)
    begin_dS(r, tiles, s, z, dO, offset, column, scale)
    extern("load_column_products", r.fades.data, *beta_and_fade(r, tiles, s), column)
    T.wait_wgmma(2)
    extern(f"round_scaled_columns<{r.element}>", r.faded_U.data, r.U.data, r.fades.data)
    T.wgmma_gemm(r.faded_U, tiles.K[s, :, :], r.dS, policy=Full)
    use_U()
    gamma = T.alloc_var("float32", init=r.table.gamma(tiles, s, 0))
    T.wait_wgmma(1)
    released()
    T.wait_wgmma(0)
    for i, j in T.Parallel(*r.dS.shape):
        r.dS[i, j] *= gamma
