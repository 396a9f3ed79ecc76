"""A token of each sequence through the region of a layer, in one launch: convolution, delta rule and gated norm.

    x       = silu(bias + sum over w of weight[w] rows[w])    rows: the last three of the window, and the token's
    q, k, v = x, rounded to the dtype of tokens
    o       = the step of decode.py on S [V, K], with the l2norm inside
    y       = o * rstd * norm_weight * act(z),   rstd = 1 / sqrt(mean(o^2) + eps), o rounded

Windows and states are updated in their slots. The sums are in the order of causal_conv1d, of the path one_token of
decode and of gated_rms_norm.

    q, k           rows of K channels of each token and key head, anywhere in memory; likewise
    v, z           rows of group * V channels, group = H_v / H_k
    a, b           [N, H_k, group], any strides of the first two
    windows        [slots, H_k (2 K + group V), columns], any strides; three or four columns
    state_pool     [slots, H_v, V, K]
    y              [N, H_v, V]

The grid is [CTAs of a key head, H_k, N], and the CTAs of a key head are a cluster. A CTA has some of the head's
group * V value rows, `rows` or fewer, some of them at a time; a warp has eight of these. What value rows
share is done by every CTA: the convolution of q and k. CTAs meet for two things:

    windows of q and k    all CTAs read them; behind the cluster's barrier each writes its part of the channels
    the sum of o^2        each CTA sends its o to the shared memory of the CTAs that have rows of the same head, whose
                          barrier counts the bytes; an earlier pass of the cluster's barrier shows that it is there.
                          The only CTA of a cluster writes its o, and waits for its threads

    CTA | arrive | loads of S in flight; convolution, gates, norm's factors | wait, arrive | step, S', sends o |
        | waits for o, y | wait | windows of q and k |

A sequence without a slot has y = 0.
"""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.bundles import Slots
from kernels_tl.config import DECODE_THREADS
from kernels_tl.convolution.arguments import address, pointer
from kernels_tl.core.common import HINT, PASS_CONFIGS as PASS_CONFIGS, after, element_type, extern, memory_type
from kernels_tl.core.cta import BYTES
from kernels_tl.decode.region_tile import ONE_TOKEN
from kernels_tl.layout import REGION_ROWS, REGION_VALUES

CLUSTER = True
# inputs of prefetch_state
EARLY = {name: after(HINT) for name in ("state_indices_entries", "state_pool")}
PRELUDE = """
#include "decode/decode_region.cuh"
"""
TAPS = 4  # of the convolution


class RegionRows(Bundle):
    """Rows of tokens and key heads, with any strides, in elements."""

    repeats = True

    def __init__(self, dtype):
        super().__init__(data=address(memory_type(dtype)), token=T.int64, head=T.int64)

    def record(self):
        return extern("RegionRows", pointer(self.data), self.token, self.head)


class RegionWindows(Bundle):
    """Windows [slots, D, columns] of any strides."""

    def __init__(self, dtype):
        window_pool = address(memory_type(dtype))
        super().__init__(window_pool=window_pool, slot=T.int64, channel=T.int32, column=T.int32, columns=T.int32)

    def record(self):
        return extern(
            "RegionWindows", pointer(self.window_pool, "rw"), self.slot, self.channel, self.column, self.columns
        )


class RegionInputs(Bundle):
    """The tokens, their gates, and the parameters of convolution, gate and norm."""

    def __init__(self, dtype):
        super().__init__(
            q=RegionRows(dtype),
            k=RegionRows(dtype),
            v=RegionRows(dtype),
            z=RegionRows(dtype),
            a=RegionRows("float32"),
            b=RegionRows("float32"),
            A_log=address(),
            dt_bias=address(),
            activations=T.int32,
            scale=T.float32,
            conv_weight=address(),
            conv_bias=address(),
            norm_weight=address(),
            norm_weight_dtype=T.int32,
            norm_lanes=T.int32,
            eps=T.float32,
            is_sigmoid=T.int32,
        )

    def tokens(self):
        gates = [x for row in (self.a, self.b) for x in (row.token, row.head)]
        return extern(
            "RegionTokens",
            *(row.record() for row in (self.q, self.k, self.v, self.z)),
            *(pointer(row.data) for row in (self.a, self.b)),
            *gates,
            pointer(self.A_log),
            pointer(self.dt_bias),
            self.activations,
            self.scale,
        )

    def filter(self):
        return extern("RegionFilter", pointer(self.conv_weight), pointer(self.conv_bias))

    def norm(self):
        gate = extern("GatedNorm", self.eps, self.is_sigmoid, 1)
        return extern("RegionNorm", pointer(self.norm_weight), self.norm_weight_dtype, self.norm_lanes, gate)


class RegionGrid(Bundle):
    """The sizes of a layer, and how the CTAs of a cluster share a key head's value rows."""

    def __init__(self):
        super().__init__(
            N=T.int32,
            H_k=T.int32,
            group=T.int32,
            key_dim=T.int32,
            value_dim=T.int32,
            inverse_value_dim=T.float32,
            ctas=T.int32,  # of a cluster
            rows=T.int32,  # value rows of a CTA
            inverse_rows=T.float32,
            early=T.int32,  # the first sequences, whose CTAs prefetch before the preceding grid has ended
        )

    def sizes(self):
        return extern("RegionSizes", self.H_k, self.group, self.key_dim, self.value_dim, self.inverse_value_dim)

    def share(self, n, hk, rank):
        return extern("RegionShare", n, hk, rank, self.ctas, self.rows, self.inverse_rows)


def decode_region(dtype, K, state_dtype):
    element, state_element = element_type(dtype), element_type(state_dtype)
    constants = f"{element}, {state_element}, {K}, {REGION_VALUES}, {REGION_ROWS}"
    # RegionShared
    shared_bytes = ONE_TOKEN.wave_rows * K * BYTES[state_dtype]
    shared_bytes += 4 * REGION_VALUES + 2 * (2 * K + REGION_ROWS) + 4 * REGION_ROWS + 2 * (2 * K * TAPS) + 16

    def first_slots(slots):
        return extern("FirstSlots", slots.state_indices.vector(), extern("no_table"), slots.null_index, slots.slots)

    @T.prim_func
    def main(
        inputs: RegionInputs(dtype),
        windows: RegionWindows(dtype),
        slots: Slots(),
        state_pool: T.Tensor([1], memory_type(state_dtype)),
        slot_stride: T.int64,
        state_dtype_code: T.int32,
        y: T.Tensor([1], memory_type(dtype)),
        grid: RegionGrid(),
    ):
        with T.Kernel(grid.ctas, grid.H_k, grid.N, threads=DECODE_THREADS, prelude=PRELUDE) as (rank, hk, n):
            T.annotate_min_blocks_per_sm(ONE_TOKEN.ctas)
            shared = T.alloc_shared([shared_bytes], "uint8")
            if n < grid.early:
                extern(
                    f"prefetch_region_state<{state_element}>",
                    first_slots(slots),
                    pointer(state_pool),
                    slot_stride,
                    grid.sizes(),
                    grid.share(n, hk, rank),
                )
            T.pdl_sync()
            T.pdl_trigger()
            extern(
                f"decode_region<{constants}>",
                first_slots(slots),
                inputs.tokens(),
                windows.record(),
                inputs.filter(),
                inputs.norm(),
                grid.sizes(),
                grid.share(n, hk, rank),
                pointer(state_pool, "rw"),
                slot_stride,
                state_dtype_code,
                pointer(y, "w"),
                T.access_ptr(shared[0], "rw"),
            )

    return main
