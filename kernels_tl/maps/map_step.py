"""S = M S on columns of S: the step that segment_scan and compose_maps share.

    M S = M_0 S_0 + M_0 S_1 + M_1 S_0        M_0, S_0: rounded to 16 bits; M_1, S_1: the rests in 16 bits

The sum is in fp32. M_1 S_1 is smaller than the error that both parts leave, so it is not computed.
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.config import SEGMENT_SCAN
from kernels_tl.core.cta import fetch
from kernels_tl.core.pipeline import stage_of
from kernels_tl.layout import NamedBarrier

ROWS = 64  # rows of S of a warpgroup: the M of its WGMMA
COLUMNS = SEGMENT_SCAN.tile  # columns of S of a CTA
MAP_STAGES, STAGES = 2, SEGMENT_SCAN.stages  # stages of M; stages of Z
BOX = 32  # floats, 128 bytes: the width of the swizzle
Full = T.GemmWarpPolicy.FullRow


def consumers(K):
    """Threads of the consumers: a warpgroup for each ROWS rows."""
    return 128 * (K // ROWS)


def map_step(dtype, K, reverse):
    """The macros of a step, which computes M S, or M^T S with `reverse`."""

    @T.macro
    def round_in_parts(S, S_16, rest, tiles, turn):
        """S to shared memory, as a rounded part and the rest."""
        T.copy(S, S_16)
        for i, j in T.Parallel(K, COLUMNS):
            rest[i, j] = S[i, j] - T.Cast("float32", S_16[i, j])
        T.copy(S_16, tiles.S[turn % 2, 0, :, :])
        T.copy(rest, tiles.S[turn % 2, 1, :, :])
        T.fence_proxy_async()
        T.sync_threads(NamedBarrier.SCAN_ROUNDED, consumers(K))

    @T.macro
    def add_product(S, tiles, ready, m, turn):
        """S += M (S_0 + S_1), with the parts that round_in_parts has written."""
        stage = stage_of(turn, MAP_STAGES, m)
        stage.wait_for(ready.map_loaded)
        for a, b in ((0, 0), (0, 1), (1, 0)):
            T.wgmma_gemm(tiles.M[m, a, :, :], tiles.S[turn % 2, b, :, :], S, transpose_A=not reverse, policy=Full)
        T.wait_wgmma(0)
        stage.arrive(ready.map_released)

    @T.macro
    def load_map(maps, slot, hv, tiles, ready, m, turn):
        stage = stage_of(turn, MAP_STAGES, m)
        stage.wait_until_free(ready.map_released)
        for part in T.unroll(2):
            fetch(maps[slot, hv, part, :, :], tiles.M[m, part, :, :], ready.map_loaded[m])
        stage.arrive(ready.map_loaded)

    return SimpleNamespace(round_in_parts=round_in_parts, add_product=add_product, load_map=load_map)
