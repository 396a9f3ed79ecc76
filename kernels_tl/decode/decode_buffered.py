"""One token of each sequence, with deferred state writes. A state S_0 in the pool lacks the last steps of its slot,
whose changes d_i, keys k_i and log decays g_i are in a replay buffer. c_i is the product of exp(g) over the token and
all steps after step i; c_0 is the product over the token and all steps.

    g, beta  = the activations of a and b
    change   = beta (v - c_0 S_0 k - sum of c_i d_i (k_i^T k))
    o        = scale (c_0 S_0 q + sum of c_i d_i (k_i^T q) + change (k^T q))

If the replay buffer has room, change, k and g become its next step, and S_0 stays. If it has no room, or if the caller
forces a flush, the state is written, and the replay buffer is empty afterwards:

    S_0'     = c_0 S_0 + sum of c_i d_i k_i^T + change k^T

Sums are in fp32. A replay buffer has keys before the l2norm, so 16-bit keys are exact. d_i includes the factor of its
key's l2norm.

    q, k           [N, H_k, key_dim]                    a, b        [N, H_v], dtypes by `activations`
    v, o           [N, H_v, value_dim]                  A_log       [H_v]; dt_bias [H_v], if any
    state_pool     [slots, H_v, value_dim, key_dim]
    d_cache        [slots, H_v, length, value_dim]      k_cache     [slots, H_k, length, key_dim]
    g_cache        [slots, H_v, length]
    state_indices, write_pos, force_flush [N]           int32, int64 or absent

d_cache and k_cache are in the dtype of q, or in fp32. csrc/gpu/decode.cpp launches [tiles of value rows, H_v, N] CTAs.

- A CTA has `parts` parts of the value rows. One warp of a part copies the part's changes and computes its outputs.
- One bulk copy brings a CTA's rows of S_0 to shared memory; other bulk copies bring the token and the replay buffer's
  keys.
- All value rows need some numbers, which the warps compute once for the CTA (decode/decode_factors.cuh). One warp
  computes the gates, one the products k^T k, k^T q and q^T q. Two warps multiply the replay buffer's keys with k and q
  on tensor cores: a left factor is 16 keys, the right factor has k and q as columns.
- If S_0 has the dtype of the tokens, its rows are left factors, too (decode/decode_buffered_mma.cuh). A part has 16
  rows. A CTA has four parts or, in small calls, two. Then the warps of the gates and of the first keys have no rows, so
  no row waits for these factors and then for its own products. The l2norm is applied to the products, so the factors of
  the mmas are exact. To write the state, the CTA multiplies changes and keys in TF32. Keys are exact there; a change
  has two terms.
- Other states are multiplied in fp32 (decode/decode_buffered.cuh): four parts of eight rows.
- The lanes that share a row share the replay buffer's steps. Each lane adds its steps to its own part of the sums S_0 k
  and S_0 q, so the sums over the steps need no reduction of their own.

The states of the first sequences are prefetched into L2 while the preceding grid still runs.
"""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.bundles import IndexTable
from kernels_tl.config import DECODE_BUFFERED
from kernels_tl.core.common import HINT, PASS_CONFIGS as PASS_CONFIGS, after, dims, element_type, extern
from kernels_tl.decode.decode import DecodeInputs
from kernels_tl.layout import DECODE_WARPS

# inputs of prefetch_state and prefetch_backlog
EARLY = {name: after(HINT) for name in ("state_indices_entries", "write_pos_entries", "state_pool")}
EARLY |= {name: after(HINT) for name in ("d_cache", "k_cache", "g_cache")}
PRELUDE = """
#include "decode/decode_buffered.cuh"
"""


class DecodeBacklog(Bundle):
    """The replay buffers of all slots, and the tables of the steps that a call uses. The flags fp32_changes and
    fp32_keys tell whether d_cache and k_cache are in fp32."""

    def __init__(self, N, slots, inputs, length, strides):
        H_k, key_dim, H_v, value_dim = inputs.H_k, inputs.key_dim, inputs.H_v, inputs.value_dim
        super().__init__(
            d_cache=T.StridedTensor(
                [slots, H_v, length, value_dim], (strides["d_slot"], length * value_dim, value_dim, 1), "float32"
            ),
            k_cache=T.StridedTensor(
                [slots, H_k, length, key_dim], (strides["k_slot"], length * key_dim, key_dim, 1), "float32"
            ),
            g_cache=T.StridedTensor([slots, H_v, length], (strides["g_slot"], length, 1), "float32"),
            state_indices=IndexTable(),
            write_pos=IndexTable(),
            force_flush=IndexTable(),
            null_index=T.int64,
            fp32_changes=T.int32,
            fp32_keys=T.int32,
        )

    def first_slots(self, slots):
        tables = (self.state_indices.vector(), extern("no_table"))
        return extern("FirstSlots", *tables, self.null_index, T.Cast("int64", slots))

    def of_head(self, strides, hv, group, length):
        return extern(
            "DecodeBacklog",
            T.access_ptr(self.d_cache[0, 0, 0, 0], "rw"),
            T.access_ptr(self.k_cache[0, 0, 0, 0], "rw"),
            T.access_ptr(self.g_cache[0, hv, 0], "rw"),
            *(strides[name] for name in ("d_slot", "k_slot", "g_slot")),
            self.write_pos.vector(),
            self.force_flush.vector(),
            T.Cast("int32", length),
            T.truncdiv(hv, group),
            T.truncmod(hv, group) == 0,
            self.fp32_changes != 0,
            self.fp32_keys != 0,
        )


def decode_buffered(dtype, K, state_dtype):
    N, slots, length = dims("N", "slots", "length")
    inputs = DecodeInputs(N, dtype)
    H_v, key_dim, value_dim = inputs.H_v, inputs.key_dim, inputs.value_dim
    strides = {name: T.dynamic(name, "int64") for name in ("slot_stride", "d_slot", "k_slot", "g_slot")}
    element, state_element = element_type(dtype), element_type(state_dtype)
    cta = DECODE_BUFFERED[state_dtype == dtype]
    PART_ROWS = cta.tile // DECODE_WARPS

    @T.prim_func
    def main(
        inputs: inputs,
        state_pool: T.StridedTensor(
            [slots, H_v, value_dim, key_dim],
            (strides["slot_stride"], value_dim * key_dim, key_dim, 1),
            state_dtype,
        ),
        backlog: DecodeBacklog(N, slots, inputs, length, strides),
        o: T.Tensor([N, H_v, value_dim], dtype),
        parts: T.int32,  # parts of PART_ROWS value rows of a CTA
        early: T.int32,  # the first sequences, whose CTAs prefetch before the preceding grid has ended
    ):
        with T.Kernel(T.ceildiv(value_dim, parts * PART_ROWS), H_v, N, threads=cta.threads, prelude=PRELUDE) as (
            tile,
            hv,
            n,
        ):
            T.annotate_min_blocks_per_sm(cta.ctas)
            loaded, keys_loaded = T.alloc_barrier([2]), T.alloc_barrier([1])
            if n < early:
                extern(
                    f"prefetch_state<{state_element}>",
                    backlog.first_slots(slots),
                    T.access_ptr(state_pool[0, hv, 0, 0], "r"),
                    strides["slot_stride"],
                    extern("DecodeShare", n, tile * parts * PART_ROWS, parts * PART_ROWS),
                    T.Cast("int32", key_dim),
                    T.Cast("int32", value_dim),
                )
                if tile == 0:
                    extern(
                        f"prefetch_backlog<{element}>",
                        backlog.first_slots(slots),
                        backlog.of_head(strides, hv, inputs.group, length),
                        hv,
                        n,
                        T.Cast("int32", key_dim),
                        T.Cast("int32", value_dim),
                    )
            T.pdl_sync()
            T.pdl_trigger()

            extern(
                f"decode_buffered<{element}, {state_element}, {K}>",
                loaded[0],
                keys_loaded[0],
                backlog.first_slots(slots),
                inputs.of_head(hv),
                backlog.of_head(strides, hv, inputs.group, length),
                extern(
                    "LaggingOutputs",
                    T.access_ptr(state_pool[0, hv, 0, 0], "rw"),
                    strides["slot_stride"],
                    T.access_ptr(o[0, hv, 0], "w"),
                    T.Cast("int64", H_v) * value_dim,
                ),
                n,
                tile * parts * PART_ROWS,
                parts,
                T.Cast("int32", key_dim),
                T.Cast("int32", value_dim),
            )

    return main
