"""The state before each segment: the maps of segment_maps, applied one after the other along each sequence.

    S after segment s = M_s S before s + Z_s

    states  [segment_slots, H_v, value_rows, K] fp32, V-first   slot s + 1 has Z_s^T, and gets the state before s + 1
    maps    [segment_slots, H_v, 2, K, K] 16-bit                M_s^T as a rounded part and the rest
    skips   [segment_slots, H_v] int32                          1 where M_s is negligible: Z_s is the state already

`reverse` is the instance for gradients, from the last segment to the first:

    dS' after segment s - 1 = M_s^T dS' after s + dZ_s

`states` then has dZ_s^T in slot s - 1, and gets dS'^T after segment s - 1 there. `initial_state` is the gradient of
the final state, and `skips` are the reverse skips. Comments below say S and Z for dS' and dZ too.

pass.cpp launches [N * H_v * value_dim / 32] CTAs: a CTA takes one sequence and 32 columns of one head's S. Roles: two
consumer warpgroups with 64 rows each, a warp that loads Z and M, and a warp that stores S.

- M and S are two 16-bit parts each (maps/map_step.py), because one part would have no more digits than the 16-bit S
  that the outputs take.
- M is the left factor, and S goes through shared memory between products, so that a CTA may have few columns.
- Z arrives in shared memory by TMA. The new S takes its place and leaves by TMA. Loads and stores of 32 bytes by each
  thread would take as long as the rest.
- With `beside`, the scan of gradients runs beside the scan of states, which is launched just before. That scan waits
  for the kernels ahead of it before it lets this one start, so the inputs are there. Otherwise the kernel waits itself.
- If a sequence's first state is FROM_SCAN (plan/chunk_plan.py), the scan copies it to its segment's slot.
- A head that needs no maps (segment_memory) has no scan, but perhaps that copy.
"""

import tilelang.language as T

from kernels_tl.bundles import Maps, Memory, Plan, Sizes, States
from kernels_tl.config import SEGMENT_SCAN
from kernels_tl.core.common import CALLER, EXPLICIT_PASS_CONFIGS, after, extern, load_early
from kernels_tl.core.cta import fetch
from kernels_tl.core.pipeline import is_loader, stage_of
from kernels_tl.layout import FROM_SCAN, NO_STATE, SegmentColumn, SegmentFlag, SequenceColumn
from kernels_tl.maps.map_step import BOX, COLUMNS, MAP_STAGES, map_step

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {name: after("chunk_plan") for name in ("sequences", "segments")}
EARLY |= {"needs_maps": after("segment_memory")}
EARLY |= {name: after("backward_maps", where="beside") for name in ("maps", "skips", "states")}
EARLY |= {"initial_state": after(CALLER, where="beside")}
PRELUDE = """
#include "core/state_tiles.cuh"
"""

# Producers: a loader and a storer.
SKIP, END = 1, 2  # flags in `about` of a segment: M is negligible; the next segment is the last, and has no map


def segment_scan(dtype, K, reverse):
    sizes = Sizes()
    H_v, N, segment_slots, value_dim = sizes.H_v, sizes.N, sizes.segment_slots, sizes.value_dim
    tile = SEGMENT_SCAN[K]
    CONSUMERS = tile.consumers
    of_map = map_step(dtype, K, reverse)
    STAGES = of_map.stages
    WAY = -1 if reverse else 1  # step from a segment to the next one

    def on_the_way(slot, segments):
        """The slot `segments` segments further on, clamped to the table: after the last segment any slot will do."""
        return T.max(slot - segments, 0) if reverse else T.min(slot + segments, segment_slots - 1)

    def read(number):
        """An entry of a table. With `beside` the reverse reads it before the kernel ahead has ended, so from L2."""
        return load_early(number) if reverse else number

    def is_end(flags):
        """Whether a segment with these flags is the scan's last."""
        return flags % SegmentFlag.LAST != 0 if reverse else flags >= SegmentFlag.LAST

    def make_barriers():
        return of_map.make_barriers(
            loaded=[32] * STAGES,  # loader to the others: Z and about
            made=[CONSUMERS] * STAGES,  # consumers to storer: S in the place of Z
            stored=[32] * STAGES,  # storer to loader: the stage is free
        )

    def part_of(states, slot, hv, v0, box):
        """A box of the state in a slot."""
        return states[slot, hv, v0 : v0 + COLUMNS, box * BOX : box * BOX + BOX]

    @T.macro
    def compute(tiles, ready, slot, hv, v0, initial, is_scanned, states, first_slot, begin):
        """The consumers: S from segment to segment."""
        about = T.alloc_var("int32", init=begin)
        step = T.alloc_var("int32", init=0)
        maps_used = T.alloc_var("int32", init=0)
        r = of_map.make_registers()
        T.clear(r.S)
        if slot != NO_STATE:
            initial.read_columns(r.S, slot, hv, v0)
            if is_scanned:
                for i, j in T.Parallel(K, COLUMNS):
                    states[first_slot, hv, v0 + j, i] = r.S[i, j]
        while about < END:
            u = step % STAGES
            stage = stage_of(step, STAGES, u)
            stage.wait_for(ready.loaded)
            about = tiles.about[u]
            if about % END != SKIP:
                of_map.round_in_parts(r, tiles, maps_used)
            extern("read_columns", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "r"))
            if about % END != SKIP:
                m = maps_used % MAP_STAGES
                of_map.add_product(r.S, tiles, ready, m, maps_used)
                extern("write_columns", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "w"))
                T.fence_proxy_async()
                maps_used = maps_used + 1
            stage.arrive(ready.made)
            step = step + 1

    @T.macro
    def load(tiles, ready, first_slot, hv, v0, segments, maps, begin):
        """The loader: about, Z and M of each segment. It reads the tables a segment ahead: their latencies would add
        up."""
        about = T.alloc_var("int32", init=begin)
        step = T.alloc_var("int32", init=0)
        maps_used = T.alloc_var("int32", init=0)
        slot = T.alloc_var("int32", init=first_slot)
        skip = T.alloc_var("int32", init=read(maps.skips[slot, hv]))
        flags = T.alloc_var("int32", init=read(segments[on_the_way(slot, 1), SegmentColumn.FLAGS]))
        next_skip = T.alloc_var("int32", init=0)
        next_flags = T.alloc_var("int32", init=0)
        while about < END:
            u = step % STAGES
            next_skip = read(maps.skips[on_the_way(slot, 1), hv])
            next_flags = read(segments[on_the_way(slot, 2), SegmentColumn.FLAGS])
            about = T.Select(skip == 0, 0, SKIP) + T.Select(is_end(flags), END, 0)
            stage = stage_of(step, STAGES, u)
            stage.wait_until_free(ready.stored)
            if T.get_thread_binding() == CONSUMERS:
                tiles.about[u] = about
            for box in T.unroll(K // BOX):
                fetch(part_of(maps.states, slot + WAY, hv, v0, box), tiles.Z[u, box, :, :], ready.loaded[u])
            stage.arrive(ready.loaded)
            if skip == 0:
                m = maps_used % MAP_STAGES
                of_map.load_map(maps.maps, slot, hv, tiles, ready, m, maps_used)
                maps_used = maps_used + 1
            step = step + 1
            slot = slot + WAY
            skip = next_skip
            flags = next_flags

    @T.macro
    def store(tiles, ready, first_slot, hv, v0, states, begin):
        """The storer: S after each segment. If M is negligible, S = Z is in its slot already."""
        about = T.alloc_var("int32", init=begin)
        slot = T.alloc_var("int32", init=first_slot)
        step = T.alloc_var("int32", init=0)
        while about < END:
            u = step % STAGES
            stage = stage_of(step, STAGES, u)
            stage.wait_for(ready.made)
            about = tiles.about[u]
            if about % END != SKIP:
                for box in T.unroll(K // BOX):
                    place = part_of(states, slot + WAY, hv, v0, box)
                    T.tma_copy(tiles.Z[u, box, :, :], place, leader_scope_threads=32)
                T.tma_store_wait(0)
            stage.arrive(ready.stored)
            step = step + 1
            slot = slot + WAY

    @T.prim_func
    def main(
        sizes: sizes,
        plan: Plan(sizes),
        maps: Maps(sizes, dtype, K),
        states: States(sizes, float8=not reverse),
        memory: Memory(sizes),
        beside: T.int32,  # only with reverse
    ):
        with T.Kernel(N * H_v * T.ceildiv(value_dim, COLUMNS), threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = of_map.make_tiles(tile.shared, about=([STAGES], "int32"))
            ready = make_barriers()
            parts = T.alloc_var("int32", init=T.truncdiv(value_dim + (COLUMNS - 1), COLUMNS))
            part = T.alloc_var("int32", init=T.truncdiv(cta, parts))
            v0 = T.alloc_var("int32", init=(cta - part * parts) * COLUMNS)
            n = T.alloc_var("int32", init=T.truncdiv(part, T.Cast("int32", H_v)))
            hv = T.alloc_var("int32", init=part - n * T.Cast("int32", H_v))
            first_slot = T.alloc_var("int32", init=load_early(plan.sequences[n, SequenceColumn.SEGMENT]))
            first = T.alloc_var("int32", init=load_early(plan.segments[first_slot, SegmentColumn.FLAGS]))
            given = SequenceColumn.FINAL if reverse else SequenceColumn.INITIAL
            state_slot = T.alloc_var("int32", init=load_early(plan.sequences[n, given]))
            first_state = T.alloc_var("int32", init=load_early(plan.segments[first_slot, SegmentColumn.INITIAL]))
            if reverse:  # noqa: SIM102  decided here, the other on the device
                if first == SegmentFlag.FIRST:  # all segments but the last are as long as this one
                    length = load_early(plan.sequences[n, SequenceColumn.LENGTH])
                    segment_length = load_early(plan.segments[first_slot, SegmentColumn.LENGTH])
                    first_slot += T.truncdiv(length - 1, segment_length)
            begin = T.alloc_var("int32", init=0)
            if not reverse:  # noqa: SIM102  decided here, the other on the device
                if memory.lacks_maps(n, hv):
                    begin = END
            # A sequence of one segment needs no scan, and a head without maps only the copy of its first state.
            if (first != SegmentFlag.FIRST) | ((begin == END) & (first_state != FROM_SCAN)):
                if cta == 0:  # the next kernel reads early what the kernels before this one have written
                    T.pdl_sync()
                extern("leave")
            if beside == 0:
                T.pdl_sync()
            T.pdl_trigger()
            if T.get_thread_binding() < CONSUMERS:
                is_scanned = False if reverse else first_state == FROM_SCAN
                compute(tiles, ready, state_slot, hv, v0, states.initial(), is_scanned, maps.states, first_slot, begin)
            else:
                if is_loader(CONSUMERS):
                    load(tiles, ready, first_slot, hv, v0, plan.segments, maps, begin)
                else:
                    store(tiles, ready, first_slot, hv, v0, maps.states, begin)
                    if reverse:
                        T.pdl_sync()  # because the next kernel relies on the end of the kernel ahead of this one

    return main
