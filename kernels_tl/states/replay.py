"""The shared code of replay_states and replay_gradients. A chunk's state, S or dS', and its values, V_new or U, go from
each consumer warpgroup through shared memory to a warp that stores them.
"""

from typing import NamedTuple

import tilelang.language as T

from kernels_tl.config import WARPGROUP, WGMMA_ROWS as ROWS
from kernels_tl.core.common import C, extern
from kernels_tl.core.cta import store_rows
from kernels_tl.core.pipeline import Stage, epilogue_warp
from kernels_tl.layout import WIDE_TILE, Dtype

V = WIDE_TILE  # value rows per CTA
WARPGROUPS = V // ROWS
CONSUMERS = WARPGROUPS * WARPGROUP


class Outgoing(NamedTuple):
    """A matrix of each chunk on its way to global memory."""

    tile: object  # shared memory, a part for each consumer warpgroup
    staged: object  # barriers, a consumer warpgroup to its epilogue warp: the part has the chunk's matrix
    stored: object  # back: the part has been stored


def read_scanned(fragment, scanned, work):
    """Reads rows of S^T from the states that segment_scan has written."""
    K = scanned.shape[-1]
    state = T.access_ptr(scanned[work.slot, work.hv, work.v0, 0], "r")
    return extern(f"read_state<{K}>", fragment.data, state, Dtype.FLOAT32, True, K, V, K)


@T.macro
def stage_values(values, fragment, element, warpgroup, step, offset):
    stage = Stage(warpgroup, step % 2)
    stage.wait_until_free(values.stored)
    extern(f"stage_transposed<{element}>", fragment.data, T.access_ptr(values.tile[warpgroup, 0, 0], "w"), offset)
    stage.arrive(values.staged)


@T.macro
def store(state, values, states, rows, work, segment, reverse):
    """The epilogue warps, one for each consumer warpgroup: the state to `states` by chunks, the values to `rows` by
    tokens. `reverse`: the last chunk first."""
    w = T.alloc_var("int32", init=epilogue_warp(CONSUMERS))
    for step in T.serial(T.if_then_else(w < WARPGROUPS, segment.chunks, 0)):
        c = segment.chunks - 1 - step if reverse else step
        row, slot = segment.row_and_slot(c)
        hv = T.alloc_var("int32", init=extern("kept", work.hv, returns="int32"))  # addresses are computed in the loop
        v0 = T.alloc_var("int32", init=work.v0 + w * ROWS)
        stage = Stage(w, step % 2)
        stage.wait_for(state.staged)
        T.fence_proxy_async()
        for box in T.unroll(state.tile.shape[1]):
            T.tma_copy(
                state.tile[w, box, :, :],
                states[slot, hv, v0 : v0 + ROWS, box * C : box * C + C],
                leader_scope_threads=32,
            )
        T.tma_store_wait(0)
        stage.arrive(state.stored)
        stage.wait_for(values.staged)
        store_rows(values.tile, w, rows, row, hv, v0, segment.length - c * C)
        stage.arrive(values.stored)
