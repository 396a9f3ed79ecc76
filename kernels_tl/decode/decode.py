"""The recurrence over one or a few tokens of each sequence, on states in a pool: with gamma = exp(g),

    g, beta  = a and b or, by `activations`, their activations
    change   = beta (v - gamma S k)
    o        = scale (gamma S q + change (k^T q))
    S'       = gamma S + change k^T

Sums are in fp32. S [V, K] is written to each requested slot. q and k are normalised if the l2norm is inside.

    q, k           [tokens, H_k, key_dim]           a, b         [tokens, H_v], dtypes by `activations`
    v, o           [tokens, H_v, value_dim]         A_log        [H_v] if a is pre-activation; dt_bias, if any
    state_pool     [slots, H_v, value_dim, key_dim] kept_states  [rows, steps, H_v, value_dim, key_dim], if any
    offsets        [N + 1]                          tables of indices: int32, int64 or absent
    state_indices  [N, columns]                     without state_indices a sequence's slot is its number
    accepted       [N]
    write_indices  [N, columns]
    state_rows     [N]
    parents        [N, columns]

csrc/gpu/decode.cpp launches [tiles of value rows, H_v, parts of sequences] CTAs. On the paths `blocks` and
`tensor_cores` a tile has `groups` groups of value rows, DECODE_TILE rows at most. Each of the last sequences may have
several parts, so that several CTAs share a tile and the SMs end at the same time. On the other paths a tile is one
group.

A state is read once from memory, whatever the number of tokens. A warp copies 512 neighbouring bytes of it at a time.
There are five paths, each a kernel. States of 8 bits have only one_token and rows. K > 128 has only one_token, rows and
key_first, on states of 8 bits only rows; these kernels take tokens and states in bf16 and in fp16 (`bits16` in
instances.py). The paths:

- one_token: each sequence has one token. A warp takes eight value rows, or four with K > 128. A lane moves 16 bytes of
  each of its rows directly between memory and registers (decode/decode_rows.cuh). Warps share nothing, so many fit an
  SM.
- rows: tokens are processed one by one, whichever states are kept. All value rows share q, k and gates, so
  a CTA prepares each token once, in shared memory (decode/decode_tokens.cuh). In a tree of tokens the states of
  ancestors are computed again from the initial state, which is still in shared memory.
- blocks, on fp32 states, if only the last state is kept: up to four tokens are processed together
  (decode/decode_blocks.cuh). All products use the state before the block, so the tokens' sums do not wait for each
  other. Products of keys with keys and queries, computed once for a CTA, add the changes of the other tokens. The next
  value rows are copied meanwhile.
- tensor_cores, with tokens and states in bf16: two to eight tokens together, whichever states are kept
  (decode/decode_mma.cuh). A warp's left factor is 16 value rows of the initial state, its right factor is all keys and
  queries. Each extra state costs one MMA: changes (two 16-bit parts) times keys.
- key_first, on states [.., key_dim, value_dim]: as rows, also for one token (decode/decode_key_first.cuh). Value rows
  are adjacent in memory, so a CTA moves its 32 rows together, through shared memory: 128 neighbouring bytes of a
  key in fp32. The registers, and so the sums, are the same as in rows on fp32 states.

Every path but key_first takes a sequence of one token as one_token does, and a sequence of more than eight tokens as
rows does. The order of all sums does not depend on the batch.

The states of the first sequences are prefetched into L2 while the preceding grid still runs.
"""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.bundles import IndexTable
from kernels_tl.config import DECODE_THREADS, decode_path
from kernels_tl.core.common import HINT, PASS_CONFIGS as PASS_CONFIGS, after, dims, element_type, extern, memory_type
from kernels_tl.core.cta import BYTES

# inputs of prefetch_state
EARLY = {name: after(HINT) for name in ("state_indices_entries", "accepted_entries", "state_pool")}
PRELUDE = """
#include "decode/decode.cuh"
"""


class DecodeInputs(Bundle):
    """The tokens, [tokens, heads, channels] in the caller's strides, and their gates and betas, activated or not
    by `activations`, an Activation, which also holds their dtypes. `tokens` is the first dimension."""

    def __init__(self, tokens, dtype):
        H_k, key_dim, H_v, value_dim = dims("H_k", "key_dim", "H_v", "value_dim")
        names = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "a_token", "b_token")
        strides = {name: T.dynamic(name, "int64") for name in names}

        def of_heads(name, heads, channels):
            return T.StridedTensor(
                [tokens, heads, channels], (strides[f"{name}_token"], strides[f"{name}_head"], 1), dtype
            )

        dtype = memory_type(dtype)
        super().__init__(
            q=of_heads("q", H_k, key_dim),
            k=of_heads("k", H_k, key_dim),
            v=of_heads("v", H_v, value_dim),
            a=T.StridedTensor([tokens, H_v], (strides["a_token"], 1), "float32"),
            b=T.StridedTensor([tokens, H_v], (strides["b_token"], 1), "float32"),
            A_log=T.Tensor([H_v], "float32"),
            dt_bias=T.Tensor([H_v], "float32"),
            activations=T.int32,
            group=T.int32,  # H_v / H_k
            scale=T.float32,
            normalize=T.int32,
            H_k=H_k,
            key_dim=key_dim,
            H_v=H_v,
            value_dim=value_dim,
            **strides,
        )

    def of_head(self, hv, dtype=0):
        """The DecodeTokens of value head hv: its rows of q, k and v, and its gates. `dtype`: the Dtype of bits16."""
        hk = T.truncdiv(hv, self.group)
        return extern(
            "DecodeTokens",
            T.access_ptr(self.q[0, hk, 0], "r"),
            T.access_ptr(self.k[0, hk, 0], "r"),
            T.access_ptr(self.v[0, hv, 0], "r"),
            T.access_ptr(self.a[0, 0], "r"),
            T.access_ptr(self.b[0, 0], "r"),
            *(self.q_token, self.k_token, self.v_token, self.a_token, self.b_token),
            hv,
            T.access_ptr(self.A_log[0], "r"),
            T.access_ptr(self.dt_bias[0], "r"),
            self.activations,
            self.scale,
            self.normalize != 0,
            dtype,
        )


class DecodeTables(Bundle):
    """The tables of indices."""

    def __init__(self):
        super().__init__(
            offsets=IndexTable(),
            state_indices=IndexTable(),
            accepted=IndexTable(),
            write_indices=IndexTable(),
            state_rows=IndexTable(),
            parents=IndexTable(),
            null_index=T.int64,
        )

    def first_slots(self, slots):
        tables = (self.state_indices.contiguous(), self.accepted.contiguous())
        return extern("FirstSlots", *tables, self.null_index, T.Cast("int64", slots))

    def plan(self, slots, tokens, length, update_state):
        return extern(
            "DecodePlan",
            self.first_slots(slots),
            self.offsets.vector(),
            self.write_indices.contiguous(),
            self.state_rows.vector(),
            self.parents.contiguous(),
            T.Cast("int32", tokens),
            length,
            update_state != 0,
        )


class DecodeShares(Bundle):
    """The division of value rows into CTAs (csrc/gpu/decode.cpp, decode_share of decode/decode_plan.cuh)."""

    def __init__(self):
        super().__init__(
            groups=T.int32,  # groups of value rows of a tile
            whole=T.int32,  # number of the first sequences, which have one CTA for each tile
            parts=T.int32,  # whole + two for each other sequence: each CTA takes half of its tiles
            early=T.int32,  # the first parts, whose CTAs prefetch before the preceding grid has ended
        )


def format_argument(dtype, number):
    """The run-time Dtype of numbers whose format `dtype` leaves open; else 0, so that no launch argument is read."""
    return 0 if memory_type(dtype) == dtype else number


def decode(dtype, K, state_dtype, path):
    tokens, slots, rows, steps = dims("tokens", "slots", "rows", "steps")
    inputs = DecodeInputs(tokens, dtype)
    H_v, key_dim, value_dim = inputs.H_v, inputs.key_dim, inputs.value_dim
    strides = {name: T.dynamic(name, "int64") for name in ("slot_stride", "row_stride", "step_stride")}
    entry = decode_path(K, path, BYTES[state_dtype])
    GROUP = entry.group
    TILE_BYTES = entry.groups_in_shared * GROUP * K * BYTES[state_dtype]  # a tile of states in shared memory

    element, state_element = element_type(dtype), element_type(state_dtype)
    share = f"decode_share<{GROUP}>"
    enumerator = "k" + path.title().replace("_", "")
    function = f"decode<{element}, {state_element}, {K}, flash_qla::device::DecodePath::{enumerator}, {GROUP}>"

    state_strides = (value_dim * key_dim, key_dim, 1)
    state_memory = memory_type(state_dtype)

    @T.prim_func
    def main(
        inputs: inputs,
        state_pool: T.StridedTensor(
            [slots, H_v, value_dim, key_dim], (strides["slot_stride"], *state_strides), state_memory
        ),
        kept_states: T.StridedTensor(
            [rows, steps, H_v, value_dim, key_dim],
            (strides["row_stride"], strides["step_stride"], *state_strides),
            state_memory,
        ),
        o: T.Tensor([tokens, H_v, value_dim], memory_type(dtype)),
        indices: DecodeTables(),
        length: T.int32,  # tokens of a sequence, without offsets
        update_state: T.int32,
        N: T.int32,  # sequences
        shares: DecodeShares(),
        format_of_tokens: T.int32,  # Dtypes, for instances that take several
        format_of_pool: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(value_dim, GROUP * shares.groups),
            H_v,
            shares.parts,
            threads=DECODE_THREADS,
            prelude=PRELUDE,
        ) as (tile, hv, sequence_part):
            T.annotate_min_blocks_per_sm(entry.ctas)
            if TILE_BYTES:
                tiles = T.alloc_shared([TILE_BYTES], "uint8")
            if sequence_part < shares.early:
                extern(
                    f"{'prefetch_key_first_state' if path == 'key_first' else 'prefetch_state'}<{state_element}>",
                    indices.first_slots(slots),
                    T.access_ptr(state_pool[0, hv, 0, 0], "r"),
                    strides["slot_stride"],
                    extern(share, tile, sequence_part, shares.groups, shares.whole),
                    T.Cast("int32", key_dim),
                    T.Cast("int32", value_dim),
                )
            T.pdl_sync()
            T.pdl_trigger()

            extern(
                function,
                indices.plan(slots, tokens, length, update_state),
                inputs.of_head(hv, format_argument(dtype, format_of_tokens)),
                extern(
                    "DecodeStates",
                    T.access_ptr(state_pool[0, hv, 0, 0], "rw"),
                    T.access_ptr(kept_states[0, 0, hv, 0, 0], "w"),
                    strides["slot_stride"],
                    strides["row_stride"],
                    strides["step_stride"],
                    T.Cast("int32", rows),
                    T.Cast("int32", steps),
                    format_argument(state_dtype, format_of_pool),
                ),
                T.access_ptr(o[0, hv, 0], "w"),
                T.access_ptr(tiles[0], "rw") if TILE_BYTES else T.reinterpret("handle", T.uint64(0)),
                T.Cast("int64", H_v) * value_dim,
                extern(share, tile, sequence_part, shares.groups, shares.whole),
                T.Cast("int32", key_dim),
                T.Cast("int32", value_dim),
                N,
            )

    return main
