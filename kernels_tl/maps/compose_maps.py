"""The maps of whole sequences, composed of the maps of their segments (segment_maps, backward_maps). Ranks exchange
them under context parallelism.

    M = M_n ... M_1                          of a sequence with segments 1 to n
    Z = M_n (... (M_1 S + Z_1) ...) + Z_n    S: the initial state, if there is one, else 0

    composed  [mapped, H_v, value_dim + key_dim, key_dim] fp32   rows of Z^T, then of M^T, of at most two sequences:
                                                                mapped_0 and mapped_1
    offsets   [segment_slots, H_v, value_rows, K] fp32           Z_s^T of segment s in slot s
    maps      [segment_slots, H_v, 2, K, K] 16-bit               M_s^T as a rounded part and the rest
    skips     [segment_slots, H_v] int32                         1 where M_s is negligible: earlier states are ignored

`reverse` is the instance for gradients, from the last segment to the first: M_s^T takes the place of M_s, dZ_s^T that
of Z_s^T, and `composed` has rows of dZ^T, then rows of M. A sequence without tokens has Z = S and M = I.

pass.cpp launches [mapped * H_v * (value_dim / 32 + key_dim / 32)] CTAs: a CTA processes one sequence, 32 rows of the
map of one head.

Rows of S^T do not depend on each other. So rows of M^T are computed like rows of S^T that start from I, with Z_s = 0.
The roles and the arithmetic are those of segment_scan, without an epilogue warp: the consumers store the result.
"""

import tilelang.language as T

from kernels_tl.bundles import Maps, Plan, Sizes, States
from kernels_tl.config import COMPOSE_MAPS
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, after, dims, extern, load_early
from kernels_tl.core.cta import fetch
from kernels_tl.core.pipeline import stage_of
from kernels_tl.layout import SegmentColumn, SegmentFlag, SequenceColumn
from kernels_tl.maps.map_step import BOX, MAP_STAGES, map_step, prelude_of_scales

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {name: after("chunk_plan") for name in ("sequences", "segments")}
PRELUDE = """
#include "core/state_tiles.cuh"
"""


def compose_maps(dtype, K, reverse):
    sizes = Sizes()
    H_v, key_dim, value_dim = sizes.H_v, sizes.key_dim, sizes.value_dim
    mapped, map_rows, key_channels = dims("mapped", "map_rows", "key_channels")
    tile = COMPOSE_MAPS[K]
    CONSUMERS, COLUMNS = tile.consumers, tile.tile
    of_map = map_step(dtype, K, reverse, tile)
    STAGES = of_map.stages

    def make_barriers():
        return of_map.make_barriers(
            loaded=[32] * STAGES,  # producer warp to consumers: Z and skip
            released=[CONSUMERS] * STAGES,  # consumers to producer warp
        )

    @T.macro
    def begin(S, initial, n, hv, v0, k0, is_M, has_initial_state):
        for i, j in T.Parallel(K, COLUMNS):
            S[i, j] = T.Select((is_M != 0) & (i == k0 + j), 1.0, 0.0)
        if (is_M == 0) & (has_initial_state != 0):
            initial.read_columns(S, n, hv, v0)

    @T.macro
    def compute(tiles, ready, parts, n, hv, v0, k0, is_M, initial, has_initial_state, composed, which):
        """The consumers: S from segment to segment, then the last S to global memory."""
        skip = T.alloc_var("int32", init=0)
        maps_used = T.alloc_var("int32", init=0)
        r = of_map.make_registers()
        begin(r.S, initial, n, hv, v0, k0, is_M, has_initial_state)
        for step in T.serial(parts):
            u = T.alloc_var("int32", init=step % STAGES)
            stage = stage_of(step, STAGES, u)
            stage.wait_for(ready.loaded)
            skip = tiles.skip[u]
            if skip == 0:
                of_map.round_in_parts(r, tiles, maps_used)
            if is_M == 0:
                extern(f"read_columns<{COLUMNS}>", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "r"))
            else:
                T.clear(r.S)
            stage.arrive(ready.released)
            if skip == 0:  # ptxas would serialize products that are in flight across the branch on is_M
                m = maps_used % MAP_STAGES
                of_map.start_products(r, tiles, ready, m, maps_used)
                of_map.add_products(r, ready, m, maps_used)
                maps_used = maps_used + 1
        row = T.alloc_var("int32", init=T.Select(is_M == 0, v0, initial.value_dim + k0))
        rows = T.alloc_var("int32", init=T.Select(is_M == 0, initial.value_dim - v0, initial.key_dim - k0))
        to = T.access_ptr(composed[which, hv, row, 0], "w")
        extern(f"write_as_rows<{COLUMNS}>", r.S.data, to, T.Cast("int32", key_channels), initial.key_dim, rows)

    @T.macro
    def load(tiles, ready, parts, first_slot, hv, v0, is_M, maps, offsets):
        """The producer warp: skip, Z and M of each segment."""
        maps_used = T.alloc_var("int32", init=0)
        slot = T.alloc_var("int32", init=first_slot)
        skip = T.alloc_var("int32", init=0)
        next_skip = T.alloc_var("int32", init=0)
        if parts > 0:
            next_skip = maps.skips[slot, hv]
        for step in T.serial(parts):
            u = T.alloc_var("int32", init=step % STAGES)
            skip = next_skip
            next_slot = T.alloc_var("int32", init=T.Select(step + 1 < parts, slot + (-1 if reverse else 1), slot))
            next_skip = maps.skips[next_slot, hv]  # ahead, because latencies of the table would add up
            stage = stage_of(step, STAGES, u)
            stage.wait_until_free(ready.released)
            if T.get_thread_binding() == CONSUMERS:
                tiles.skip[u] = skip
            if is_M == 0:
                for box in T.unroll(K // BOX):
                    fetch(
                        offsets[slot, hv, v0 : v0 + COLUMNS, box * BOX : box * BOX + BOX],
                        tiles.Z[u, box, :, :],
                        ready.loaded[u],
                    )
            stage.arrive(ready.loaded)
            if skip == 0:
                m = maps_used % MAP_STAGES
                of_map.load_map(maps.maps, slot, hv, tiles, ready, m, maps_used)
                maps_used = maps_used + 1
            slot = next_slot

    @T.prim_func
    def main(
        sizes: sizes,
        plan: Plan(sizes),
        maps: Maps(sizes, dtype, K),
        offsets: T.Tensor([sizes.segment_slots, H_v, sizes.value_rows, K], "float32"),  # Z^T in the segments' own slots
        states: States(sizes),
        has_initial_state: T.int32,
        composed: T.Tensor([mapped, H_v, map_rows, key_channels], "float32"),
        mapped_0: T.int32,
        mapped_1: T.int32,
    ):
        with T.Kernel(
            mapped * H_v * (T.ceildiv(value_dim, COLUMNS) + T.ceildiv(key_dim, COLUMNS)),
            threads=tile.threads,
            prelude=PRELUDE + prelude_of_scales(dtype),
        ) as cta:
            tiles = of_map.make_tiles(tile.shared, skip=([STAGES], "int32"))
            ready = make_barriers()
            of_Z = T.alloc_var("int32", init=T.truncdiv(value_dim + (COLUMNS - 1), COLUMNS))
            of_both = T.alloc_var("int32", init=of_Z + T.truncdiv(key_dim + (COLUMNS - 1), COLUMNS))
            head = T.alloc_var("int32", init=T.truncdiv(cta, of_both))
            part = T.alloc_var("int32", init=cta - head * of_both)
            is_M = T.alloc_var("int32", init=T.Select(part >= of_Z, 1, 0))
            v0 = T.alloc_var("int32", init=T.Select(is_M != 0, 0, part * COLUMNS))
            k0 = T.alloc_var("int32", init=T.Select(is_M != 0, (part - of_Z) * COLUMNS, 0))
            r = T.alloc_var("int32", init=T.truncdiv(head, T.Cast("int32", H_v)))
            hv = T.alloc_var("int32", init=head - r * T.Cast("int32", H_v))
            n = T.alloc_var("int32", init=T.Select(r == 0, mapped_0, mapped_1))
            slot = T.alloc_var("int32", init=load_early(plan.sequences[n, SequenceColumn.SEGMENT]))
            length = T.alloc_var("int32", init=load_early(plan.sequences[n, SequenceColumn.LENGTH]))
            # All segments but the last are as long as the first, which gives their number.
            flags = T.alloc_var("int32", init=load_early(plan.segments[slot, SegmentColumn.FLAGS]))
            size = T.alloc_var("int32", init=load_early(plan.segments[slot, SegmentColumn.LENGTH]))
            parts = T.alloc_var("int32", init=T.Select(length > 0, 1, 0))
            if flags == SegmentFlag.FIRST:
                parts = T.truncdiv(length + size - 1, size)
            if reverse:  # noqa: SIM102  decided here, the other on the device
                if parts > 0:
                    slot = slot + parts - 1
            T.pdl_sync()
            T.pdl_trigger()
            if T.get_thread_binding() < CONSUMERS:
                initial = states.initial_in_a_run()
                compute(tiles, ready, parts, n, hv, v0, k0, is_M, initial, has_initial_state, composed, r)
            else:
                load(tiles, ready, parts, slot, hv, v0, is_M, maps, offsets)

    return main
