"""S = M S on columns of S: the step that segment_scan and compose_maps share.

    M S = (M_0 + M_1) (S_0 + S_1)        M_0, S_0: rounded to 16 bits; M_1, S_1: the rests in 16 bits

The sum is in fp32. S_0 and S_1 are adjacent, as one right factor, because each product reads M from shared memory,
which takes longer than the products of few columns.

M of a wide state does not fit shared memory. It arrives in blocks, one after the other: rows of M^T, or its columns
with `reverse`. Each block is multiplied with the block of S that has the same rows.

In fp16 S may exceed the range. Then the parts are those of S times a power of two, and the sum is multiplied by its
inverse (map_scales.cuh).
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.config import is_wide
from kernels_tl.core.common import accumulator, extern
from kernels_tl.core.cta import barriers, fetch, fragments, kilobytes_of, named, shared
from kernels_tl.core.pipeline import stage_of
from kernels_tl.layout import NamedBarrier

ROWS = 64  # rows of S of a warpgroup: the M of its WGMMA
MAP_STAGES = 2  # stages of M, or of its blocks
BOX = 32  # floats, 128 bytes: the width of the swizzle
Full = T.GemmWarpPolicy.FullRow
SCALES = """
#include "maps/map_scales.cuh"
"""


def has_scales(dtype):
    return dtype == "float16"


def prelude_of_scales(dtype):
    return SCALES if has_scales(dtype) else ""


def consumers(K):
    """Threads of the consumers: a warpgroup for each ROWS rows."""
    return 128 * (K // ROWS)


def map_step(dtype, K, reverse, tile):
    """The resources of a step of a CTA with this Tile, and its macros. A step computes M S, or M^T S with `reverse`."""
    BLOCK_ROWS = ROWS if is_wide(K) else K
    BLOCKS = K // BLOCK_ROWS
    BUFFERS = 1 if is_wide(K) else 2  # copies of S
    stages, COLUMNS = tile.stages, tile.tile
    tiles_of_step = {
        "M": ([MAP_STAGES, 2, *((K, BLOCK_ROWS) if reverse else (BLOCK_ROWS, K))], dtype),
        "S": ([BUFFERS, *([BLOCKS] if is_wide(K) else []), BLOCK_ROWS, 2 * COLUMNS], dtype),  # S_0 and S_1
        "Z": ([stages, K // BOX, COLUMNS, BOX], "float32"),
    }

    WARPS, REGISTERS = consumers(K) // 32, COLUMNS // 2  # registers of S a thread
    # Of each warp: in each of two products whether S needs a scale there, and for a scale the largest number.
    tiles_of_scales = {"large": ([2, WARPS], "int32"), "largest": ([WARPS], "float32")} if has_scales(dtype) else {}

    def stage_of_block(product, block, m):
        """The stage of a block. m is product % MAP_STAGES."""
        return stage_of(product * BLOCKS + block, MAP_STAGES) if is_wide(K) else stage_of(product, MAP_STAGES, m)

    def block_of(S, product, block):
        """Both parts of S, or of a block of it."""
        return S[0, block, :, :] if is_wide(K) else S[product % 2, :, :]

    def box_of(M, slot, hv, part, block):
        """A part of M, or a block of it."""
        rows = slice(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS) if is_wide(K) else slice(None)
        return M[slot, hv, part, :, rows] if reverse else M[slot, hv, part, rows, :]

    def make_tiles(kilobytes, **more):
        kilobytes += kilobytes_of(tiles_of_scales)
        return shared(kilobytes, **tiles_of_step, **more, **tiles_of_scales, swizzle=("Z",))

    def make_barriers(**more):
        return barriers(
            **more,
            map_loaded=[32] * MAP_STAGES,  # producer warp to consumers: M
            map_released=[consumers(K)] * MAP_STAGES,  # consumers to producer warp
        )

    def make_registers():
        r = fragments(
            S=([K, COLUMNS], "float32"),
            S_16=([K, COLUMNS], dtype),
            rest=([K, COLUMNS], dtype),
            products=([K, 2 * COLUMNS], "float32"),  # M S_0 and M S_1
        )
        T.annotate_layout({r.S: accumulator((K, COLUMNS))})
        if has_scales(dtype):
            vars(r).update(vars(named(inverse=T.alloc_local([1], "float32"))))  # of the parts' scale
        return r

    @T.macro
    def store_part(part, tiles, product, number):
        if is_wide(K):
            for i, j in T.Parallel(K, COLUMNS):
                tiles.S[0, i // BLOCK_ROWS, i % BLOCK_ROWS, number * COLUMNS + j] = part[i, j]
        else:
            T.copy(part, tiles.S[product % 2, :, number * COLUMNS : (number + 1) * COLUMNS])

    @T.macro
    def store_parts(r, tiles, product):
        T.copy(r.S, r.S_16)
        for i, j in T.Parallel(K, COLUMNS):
            r.rest[i, j] = r.S[i, j] - T.Cast("float32", r.S_16[i, j])
        if is_wide(K):  # all warpgroups have read the last S
            T.sync_threads(NamedBarrier.SCAN_ROUNDED, consumers(K))
        store_part(r.S_16, tiles, product, 0)
        store_part(r.rest, tiles, product, 1)

    @T.macro
    def complete_parts():
        T.fence_proxy_async()
        T.sync_threads(NamedBarrier.SCAN_ROUNDED, consumers(K))

    @T.macro
    def round_in_parts(r, tiles, product):
        """S to shared memory, as a rounded part and the rest."""
        store_parts(r, tiles, product)
        if has_scales(dtype):
            extern(f"tell_large<{REGISTERS}>", r.S.data, T.access_ptr(tiles.large[product % 2, 0], "w"))
        complete_parts()
        if has_scales(dtype):
            r.inverse[0] = 1.0
            if extern(f"any_large<{WARPS}>", T.access_ptr(tiles.large[product % 2, 0], "r"), returns="bool"):
                scale = f"scale_state<{REGISTERS}, {WARPS}, {NamedBarrier.SCAN_ROUNDED}>"
                r.inverse[0] = extern(scale, r.S.data, T.access_ptr(tiles.largest, "rw"), returns="float32")
                store_parts(r, tiles, product)
                complete_parts()

    @T.macro
    def start_products(r, tiles, ready, m, product):
        """products = M (S_0, S_1), in flight, with the parts that round_in_parts has written."""
        for block in T.unroll(BLOCKS):
            stage = stage_of_block(product, block, m)
            stage.wait_for(ready.map_loaded)
            if block > 0:
                T.wait_wgmma(0)
                stage_of_block(product, block - 1, m).arrive(ready.map_released)
            for part in (0, 1):
                T.wgmma_gemm(
                    tiles.M[stage.index, part, :, :],
                    block_of(tiles.S, product, block),
                    r.products,
                    transpose_A=not reverse,
                    policy=Full,
                    clear_accum=(block == 0) & (part == 0),
                )

    @T.macro
    def add_products(r, ready, m, product):
        """S += M S_0 + M S_1."""
        T.wait_wgmma(0)
        stage_of_block(product, BLOCKS - 1, m).arrive(ready.map_released)
        if has_scales(dtype):
            extern(f"add_scaled_halves<{COLUMNS}>", r.S.data, r.products.data, r.inverse[0])
        else:
            extern(f"add_halves<{COLUMNS}>", r.S.data, r.products.data)

    @T.macro
    def load_map(maps, slot, hv, tiles, ready, m, product):
        for block in T.unroll(BLOCKS):
            stage = stage_of_block(product, block, m)
            stage.wait_until_free(ready.map_released)
            for part in T.unroll(2):
                fetch(
                    box_of(maps, slot, hv, part, block),
                    tiles.M[stage.index, part, :, :],
                    ready.map_loaded[stage.index],
                )
            stage.arrive(ready.map_loaded)

    return SimpleNamespace(
        stages=stages,
        make_tiles=make_tiles,
        make_barriers=make_barriers,
        make_registers=make_registers,
        round_in_parts=round_in_parts,
        start_products=start_products,
        add_products=add_products,
        load_map=load_map,
    )
