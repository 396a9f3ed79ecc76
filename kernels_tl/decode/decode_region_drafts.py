"""Up to eight tokens of each sequence, such as drafts, through the region of a layer, in one launch: as decode_region
for one token, with the tables of decode.

Beside the arguments of decode_region:

    q, k, v, z     rows of tokens, [tokens, H_k, ..], each at a multiple of 16 bytes; a, b likewise without that
    conv_weight    null: q, k and v have been through the convolution, and there are no windows
    windows        [slots, H_k (2 K + group V), columns]. A sequence's window is in slot state_indices[n][0]. The window
                   after the last token replaces it if update_state. Without `accepted` it is the last three or four
                   rows. With it a sequence starts from columns accepted[n] - 1 to accepted[n] + 1, and writes, from
                   column 0 on, the last two of these rows and its tokens: then each number of accepted tokens names
                   three columns that end with the last of these
    kept_windows   [rows, steps, H_k (2 K + group V), 3], if any: the window after each token
    kept_states    [rows, steps, H_v, V, K], if any
    y              [tokens, H_v, V]

Other tables and the trees of tokens are those of decode. Tokens of a sequence beyond the eighth have y = 0.

The grid, the cluster and its meetings are those of decode_region. A CTA has `rows` value rows or fewer, at most those
of region_tile.py's DRAFTS:

    CTA | arrive | tokens and S in flight; windows | convolution of all tokens | factors of q and k | wait, arrive |
        | step of each token, S', sends o | windows of v, kept windows | waits for o, y | wait | windows of q and k |

The sums are in the order of causal_conv1d, of the path `rows` of decode and of gated_rms_norm. A tree's states of
ancestors are computed again from the initial state, which is still in shared memory.
"""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.config import WARP
from kernels_tl.convolution.arguments import address, pointer
from kernels_tl.core.common import HINT, PASS_CONFIGS as PASS_CONFIGS, after, element_type, extern, memory_type
from kernels_tl.core.cta import BYTES
from kernels_tl.decode import region_tile
from kernels_tl.decode.decode import DecodeTables
from kernels_tl.decode.decode_region import TAPS, RegionGrid, RegionInputs, RegionWindows
from kernels_tl.layout import DECODE_TOKENS

CLUSTER = True
# inputs of prefetch_region_state
EARLY = {name: after(HINT) for name in ("state_indices_entries", "accepted_entries", "state_pool")}
PRELUDE = """
#include "decode/decode_region_drafts.cuh"
"""


class KeptWindows(Bundle):
    """Windows after tokens, [rows, steps, D, 3] of any strides; no rows: none are kept."""

    def __init__(self, dtype):
        windows = address(memory_type(dtype))
        strides = {"window_row": T.int64, "window_step": T.int64, "window_channel": T.int32, "window_column": T.int32}
        super().__init__(kept_windows=windows, **strides, window_rows=T.int32, window_steps=T.int32)

    def record(self, windows):
        """The DraftWindows of these and the pool's."""
        strides = (self.window_row, self.window_step, self.window_channel, self.window_column)
        kept = pointer(self.kept_windows, "w")
        return extern("DraftWindows", windows.record(), kept, *strides, self.window_rows, self.window_steps)


def decode_region_drafts(dtype, K, state_dtype):
    element, state_element = element_type(dtype), element_type(state_dtype)
    tile = region_tile.DRAFTS
    # DraftShared
    rows = 2 * K + tile.rows
    shared_bytes = tile.wave_rows * K * BYTES[state_dtype]
    shared_bytes += DECODE_TOKENS * (4 * tile.values + 2 * (2 * rows + tile.rows) + 16 + 4 * 3 + 4 * (TAPS - 1))
    shared_bytes += 2 * rows * TAPS + 4 * tile.rows + 16
    constants = f"{element}, {state_element}, {K}, {tile.warps}, {tile.values}, {tile.rows}, {shared_bytes}"

    @T.prim_func
    def main(
        inputs: RegionInputs(dtype),
        windows: RegionWindows(dtype),
        kept: KeptWindows(dtype),
        indices: DecodeTables(),
        slots: T.int64,
        state_pool: T.Tensor([1], memory_type(state_dtype)),
        kept_states: T.Tensor([1], memory_type(state_dtype)),
        slot_stride: T.int64,
        row_stride: T.int64,
        step_stride: T.int64,
        state_rows: T.int32,
        state_steps: T.int32,
        state_dtype_code: T.int32,
        y: T.Tensor([1], memory_type(dtype)),
        tokens: T.int32,
        length: T.int32,  # tokens of a sequence, without offsets
        update_state: T.int32,
        grid: RegionGrid(),
    ):
        with T.Kernel(grid.ctas, grid.H_k, grid.N, threads=WARP * tile.warps, prelude=PRELUDE) as (rank, hk, n):
            T.annotate_min_blocks_per_sm(tile.ctas)
            shared = T.alloc_shared([shared_bytes], "uint8")
            if n < grid.early:
                extern(
                    f"prefetch_region_state<{state_element}>",
                    indices.first_slots(slots),
                    pointer(state_pool),
                    slot_stride,
                    grid.sizes(),
                    grid.share(n, hk, rank),
                )
            T.pdl_sync()
            T.pdl_trigger()
            extern(
                f"decode_region_drafts<{constants}>",
                indices.plan(slots, tokens, length, update_state),
                inputs.tokens(),
                kept.record(windows),
                inputs.filter(),
                inputs.norm(),
                grid.sizes(),
                grid.share(n, hk, rank),
                extern(
                    "DecodeStates",
                    pointer(state_pool, "rw"),
                    pointer(kept_states, "w"),
                    slot_stride,
                    row_stride,
                    step_stride,
                    state_rows,
                    state_steps,
                    state_dtype_code,
                ),
                pointer(y, "w"),
                grid.N,
                T.access_ptr(shared[0], "rw"),
            )

    return main
