"""The state before each segment: the maps of segment_maps, applied one after the other along each sequence.

    S after segment s = M_s S before s + Z_s

    states  [segment_slots, H_v, value_rows, K] fp32, V-first   slot s + 1 has Z_s^T, and gets the state before s + 1
    maps    [segment_slots, H_v, 2, K, K] 16-bit                M_s^T as a rounded part and the rest
    skips   [segment_slots, H_v] int32                          1 where M_s is negligible: Z_s is the state already

`reverse` is the instance for gradients, from the last segment to the first:

    dS' after segment s - 1 = M_s^T dS' after s + dZ_s

`states` then has dZ_s^T in slot s - 1, and gets dS'^T after segment s - 1 there. `initial_state` is the gradient of
the final state, and `skips` are the reverse skips. Comments below write S and Z for dS' and dZ too.

Timeline (core/pipeline.py), 64 rows of S per warpgroup, for segments 0, 1, ... with K = 128:

    producer warp  Z 0, M 0, Z 1, M 1, Z 2|     |M 2  |     |Z 3, M 3|     |Z 4, M 4|
    warpgroups                            |M S 0|+ Z 0|M S 1|+ Z 1   |M S 2|+ Z 2   |
    epilogue warp                         |     |     |S 0  |        |S 1  |        |

    Z: stored>, >loaded                         M: map_released>, >map_loaded
    M S: loaded>, map_loaded>, >map_released    + Z, in Z's tile: >staged          S: staged>, >stored

A work tile is one sequence and `columns` columns of one head's S: 32, or 16 when all CTAs fit in one wave. pass.cpp
launches at most one CTA per SM. A CTA takes every ctas-th work tile, and skips sequences that are not split
(maps/scans.cuh).

- M and S are two 16-bit parts each (maps/map_step.py), because one part would be no more accurate than the 16-bit S
  from which O is computed.
- M is the left factor, and S goes through shared memory between products, so that a CTA may have few columns.
- Z arrives in shared memory by TMA, and the new S leaves from there. Loads and stores of 32 bytes per thread would
  take as long as the rest.
- With `concurrent`, the scan of gradients overlaps the scan of states, which is launched just before. That scan
  waits for its predecessors before it triggers this one, so the inputs are there. Otherwise this kernel waits itself.
- If a sequence's first state is FROM_SCAN (plan/chunk_plan.py), the scan copies it to its segment's slot.
- A head that needs no maps (segment_memory) has no scan, but perhaps that copy.
"""

import tilelang.language as T

from kernels_tl.bundles import Maps, Memory, Plan, Sizes, States
from kernels_tl.config import SEGMENT_SCAN
from kernels_tl.core.common import CALLER, EXPLICIT_PASS_CONFIGS, after, extern, load_early
from kernels_tl.core.cta import Variables, fetch, z_slot
from kernels_tl.core.pipeline import is_producer_warp, stage_of
from kernels_tl.layout import FROM_SCAN, NO_STATE, SegmentColumn, SegmentFlag, SequenceColumn
from kernels_tl.maps.map_step import BOX, MAP_STAGES, map_step, prelude_of_scales

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {name: after("chunk_plan") for name in ("sequences", "segments")}
EARLY |= {"needs_maps": after("segment_memory")}
EARLY |= {name: after("backward_maps", where="concurrent") for name in ("maps", "skips", "states")}
EARLY |= {"initial_state": after(CALLER, where="concurrent")}
PRELUDE = """
#include "core/state_tiles.cuh"
#include "maps/scans.cuh"
"""

SKIP, END = 1, 2  # flags in `about` of a segment: M is negligible; the next segment is the last, and has no map


class Scans:
    """The work tiles of a CTA: every ctas-th one, without those of sequences that are not split."""

    def __init__(self, cta, ctas, sizes, plan, memory, reverse, columns):
        self.ctas, self.plan, self.memory, self.reverse, self.columns = ctas, plan, memory, reverse, columns
        self.H_v = T.Cast("int32", sizes.H_v)
        parts = T.truncdiv(sizes.value_dim + (columns - 1), columns)
        self.totals = Variables(parts=T.Cast("int32", parts), work_tiles=T.Cast("int32", sizes.N * sizes.H_v * parts))
        self.totals.and_also(first=self.next_from(cta))

    @property
    def first(self):
        return self.totals.first

    @property
    def work_tiles(self):
        return self.totals.work_tiles

    def next_from(self, work):
        """The first of the CTA's work tiles from `work` on whose sequence is split, or `work_tiles`."""
        sequences = T.access_ptr(self.plan.sequences[0, 0], "r")
        segments = T.access_ptr(self.plan.segments[0, 0], "r")
        of_sequence = self.totals.parts * self.H_v
        return extern("next_scan", sequences, segments, work, self.ctas, self.work_tiles, of_sequence, returns="int32")

    @T.inline
    def at(self, number):
        """A work tile: value head, first column, slots of its first segment and of its first state, whether it copies
        that state to the segment's slot, and how `about` begins: END if it only copies, or has nothing to do."""
        part = T.alloc_var("int32", init=T.truncdiv(number, self.totals.parts))
        n = T.alloc_var("int32", init=T.truncdiv(part, self.H_v))
        scan = Variables(hv=part - n * self.H_v, v0=(number - part * self.totals.parts) * self.columns)
        slot = T.alloc_var("int32", init=load_early(self.plan.sequences[n, SequenceColumn.SEGMENT]))
        column = SequenceColumn.FINAL if self.reverse else SequenceColumn.INITIAL
        state_slot = T.alloc_var("int32", init=load_early(self.plan.sequences[n, column]))
        copies = T.alloc_var("int32", init=0)
        begin = T.alloc_var("int32", init=0)
        if self.reverse:  # all segments but the last are as long as the first
            length = load_early(self.plan.sequences[n, SequenceColumn.LENGTH])
            slot += T.truncdiv(length - 1, load_early(self.plan.segments[slot, SegmentColumn.LENGTH]))
        else:
            first_state = load_early(self.plan.segments[slot, SegmentColumn.INITIAL])
            copies = T.Select(first_state == FROM_SCAN, 1, 0)
            if self.memory.lacks_maps(n, scan.hv):
                begin = END
        return scan.and_also(slot=slot, state_slot=state_slot, copies=copies, begin=begin)


def segment_scan(dtype, K, reverse, columns):
    sizes = Sizes()
    segment_slots = sizes.segment_slots
    tile = SEGMENT_SCAN[K][columns]
    CONSUMERS = tile.consumers
    of_map = map_step(dtype, K, reverse, tile)
    STAGES = of_map.stages
    WAY = -1 if reverse else 1  # step from a segment to the next one

    def on_the_way(slot, segments):
        """The slot `segments` segments further on, clamped to the table: after the last segment any slot will do."""
        return T.max(slot - segments, 0) if reverse else T.min(slot + segments, segment_slots - 1)

    def read(number):
        """An entry of a table. With `concurrent` the reverse reads it before its predecessor has ended, so from L2."""
        return load_early(number) if reverse else number

    def is_end(flags):
        """Whether a segment with these flags is the scan's last."""
        return flags % SegmentFlag.LAST != 0 if reverse else flags >= SegmentFlag.LAST

    def make_barriers():
        return of_map.make_barriers(
            loaded=[32] * STAGES,  # producer warp to the others: Z and about
            staged=[CONSUMERS] * STAGES,  # consumers to epilogue warp: S in the place of Z
            stored=[32] * STAGES,  # epilogue warp to producer warp: the stage is free
        )

    def part_of(states, slot, hv, v0, box):
        """A box of the state in a slot."""
        return states[slot, hv, v0 : v0 + columns, box * BOX : box * BOX + BOX]

    @T.macro
    def await_maps(concurrent):
        if concurrent == 0:
            T.pdl_sync()
        T.pdl_trigger()

    @T.macro
    def compute(tiles, ready, scans, initial, states, concurrent):
        """The consumers: S from segment to segment, scan after scan."""
        work = T.alloc_var("int32", init=scans.first)
        step = T.alloc_var("int32", init=0)
        maps_used = T.alloc_var("int32", init=0)
        r = of_map.make_registers()
        while work < scans.work_tiles:
            scan = scans.at(work)
            about = T.alloc_var("int32", init=scan.begin)
            await_maps(concurrent)
            T.clear(r.S)
            if ((about < END) | (scan.copies != 0)) & (scan.state_slot != NO_STATE):
                initial.read_columns(r.S, scan.state_slot, scan.hv, scan.v0)
                if scan.copies != 0:
                    for i, j in T.Parallel(K, columns):
                        states[scan.slot, scan.hv, scan.v0 + j, i] = r.S[i, j]
            while about < END:
                u = step % STAGES
                stage = stage_of(step, STAGES, u)
                stage.wait_for(ready.loaded)
                about = tiles.about[u]
                if about % END == SKIP:
                    extern(f"read_columns<{columns}>", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "r"))
                else:
                    m = maps_used % MAP_STAGES
                    of_map.round_in_parts(r, tiles, maps_used)
                    of_map.start_products(r, tiles, ready, m, maps_used)
                    extern(f"read_columns<{columns}>", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "r"))
                    of_map.add_products(r, ready, m, maps_used)
                    extern(f"write_columns<{columns}>", r.S.data, T.access_ptr(tiles.Z[u, 0, 0, 0], "w"))
                    T.fence_proxy_async()
                    maps_used = maps_used + 1
                stage.arrive(ready.staged)
                step = step + 1
            work = scans.next_from(work + scans.ctas)

    @T.macro
    def load(tiles, ready, scans, segments, maps, concurrent):
        """The producer warp: about, Z and M of each segment. It reads the tables a segment ahead: their latencies would
        add up."""
        work = T.alloc_var("int32", init=scans.first)
        step = T.alloc_var("int32", init=0)
        maps_used = T.alloc_var("int32", init=0)
        while work < scans.work_tiles:
            scan = scans.at(work)
            await_maps(concurrent)
            about = T.alloc_var("int32", init=scan.begin)
            slot = T.alloc_var("int32", init=scan.slot)
            skip = T.alloc_var("int32", init=read(maps.skips[slot, scan.hv]))
            flags = T.alloc_var("int32", init=read(segments[on_the_way(slot, 1), SegmentColumn.FLAGS]))
            next_skip = T.alloc_var("int32", init=0)
            next_flags = T.alloc_var("int32", init=0)
            while about < END:
                u = step % STAGES
                next_skip = read(maps.skips[on_the_way(slot, 1), scan.hv])
                next_flags = read(segments[on_the_way(slot, 2), SegmentColumn.FLAGS])
                about = T.Select(skip == 0, 0, SKIP) + T.Select(is_end(flags), END, 0)
                stage = stage_of(step, STAGES, u)
                stage.wait_until_free(ready.stored)
                if T.get_thread_binding() == CONSUMERS:
                    tiles.about[u] = about
                for box in T.unroll(K // BOX):
                    box_of_S = part_of(maps.states, z_slot(slot, reverse), scan.hv, scan.v0, box)
                    fetch(box_of_S, tiles.Z[u, box, :, :], ready.loaded[u])
                stage.arrive(ready.loaded)
                if skip == 0:
                    m = maps_used % MAP_STAGES
                    of_map.load_map(maps.maps, slot, scan.hv, tiles, ready, m, maps_used)
                    maps_used = maps_used + 1
                step = step + 1
                slot = slot + WAY
                skip = next_skip
                flags = next_flags
            work = scans.next_from(work + scans.ctas)

    @T.macro
    def store(tiles, ready, scans, states, concurrent):
        """The epilogue warp: S after each segment. If M is negligible, S = Z is in its slot already."""
        work = T.alloc_var("int32", init=scans.first)
        step = T.alloc_var("int32", init=0)
        while work < scans.work_tiles:
            scan = scans.at(work)
            await_maps(concurrent)
            about = T.alloc_var("int32", init=scan.begin)
            slot = T.alloc_var("int32", init=scan.slot)
            while about < END:
                u = step % STAGES
                stage = stage_of(step, STAGES, u)
                stage.wait_for(ready.staged)
                about = tiles.about[u]
                if about % END != SKIP:
                    for box in T.unroll(K // BOX):
                        box_of_S = part_of(states, z_slot(slot, reverse), scan.hv, scan.v0, box)
                        T.tma_copy(tiles.Z[u, box, :, :], box_of_S, leader_scope_threads=32)
                    T.tma_store_wait(0)
                stage.arrive(ready.stored)
                step = step + 1
                slot = slot + WAY
            work = scans.next_from(work + scans.ctas)

    @T.prim_func
    def main(
        sizes: sizes,
        plan: Plan(sizes),
        maps: Maps(sizes, dtype, K),
        states: States(sizes, float8=not reverse),
        memory: Memory(sizes),
        ctas: T.int32,
        concurrent: T.int32,  # only with reverse
    ):
        with T.Kernel(ctas, threads=tile.threads, prelude=PRELUDE + prelude_of_scales(dtype)) as cta:
            tiles = of_map.make_tiles(tile.shared, about=([STAGES], "int32"))
            ready = make_barriers()
            scans = Scans(cta, ctas, sizes, plan, memory, reverse, columns)
            if scans.first == scans.work_tiles:
                if cta == 0:  # the next kernel reads early what the kernels before this one have written
                    T.pdl_sync()
                extern("leave")
            if T.get_thread_binding() < CONSUMERS:
                compute(tiles, ready, scans, states.initial(), maps.states, concurrent)
            else:
                if is_producer_warp(CONSUMERS):
                    load(tiles, ready, scans, plan.segments, maps, concurrent)
                else:
                    store(tiles, ready, scans, maps.states, concurrent)
                    if reverse:
                        T.pdl_sync()  # because the next kernel relies on the end of this one's predecessor

    return main
