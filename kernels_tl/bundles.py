"""Bundles of kernel arguments (build_tools/bundle.py): fields, shapes and strides, each declared once.

`kernels.h` has a C++ struct of each bundle, which the host fills. Sizes that a call decides are run-time numbers: head
counts, lengths, strides. What the compiler must know (dtype, K, value tile) is a parameter of the kernel's function.
A tensor whose dtype is a run-time number is declared as fp32.
"""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.core.common import C, block_row, dims, extern, load_early
from kernels_tl.core.state_view import StateView
from kernels_tl.layout import ChunkColumn, ForwardGate, SegmentColumn, SequenceColumn, TableKind


class Sizes(Bundle):
    """The sizes of a call.

    tokens          rows of q, k, v: B * T          H_k, H_v       query/key and value heads
    group           H_v / H_k                       N              sequences
    key_dim         channels of a key, at most K    value_dim      of a value
    value_rows      value_dim, in whole wide tiles  state_size     elements of all states
    chunk_slots     at least the number of chunks   segment_slots  at least that of segments (csrc/gpu/plan.h)
    """

    def __init__(self):
        tokens, H_k, H_v, key_dim, value_dim = dims("tokens", "H_k", "H_v", "key_dim", "value_dim")
        value_rows, N, state_size = dims("value_rows", "N", "state_size")
        chunk_slots, segment_slots = dims("chunk_slots", "segment_slots")
        super().__init__(
            tokens=tokens,
            H_k=H_k,
            H_v=H_v,
            group=T.int32,
            key_dim=key_dim,
            value_dim=value_dim,
            value_rows=value_rows,
            N=N,
            state_size=state_size,
            chunk_slots=chunk_slots,
            segment_slots=segment_slots,
        )


class Tokens(Bundle):
    """Queries, keys and values. q_row and q_head are the strides of q's tokens and heads, in elements; likewise for k
    and v, which may be slices of the same tensor. In the backward, q and k are the rows after the l2norm if the kernel
    l2norm has run."""

    def __init__(self, sizes, dtype):
        keys, values = (sizes.tokens, sizes.H_k, sizes.key_dim), (sizes.tokens, sizes.H_v, sizes.value_dim)
        super().__init__(**rows("q", keys, dtype), **rows("k", keys, dtype), **rows("v", values, dtype))


class CopiedTokens(Bundle):
    """Queries, keys and values with any strides, and the contiguous memory that gets them. A tensor that is not copied
    has no heads."""

    def __init__(self):
        B, length = dims("B", "length")
        fields = {}
        for name in ("q", "k", "v"):
            sizes = dims(f"{name}_heads", f"{name}_channels")
            strides = [T.dynamic(f"{name}_{of}", "int64") for of in ("batch", "row", "head", "channel")]
            fields[name] = T.StridedTensor((B, length, *sizes), strides, "uint16")
            fields[f"{name}_copy"] = T.Tensor([B * length, *sizes], "uint16")
            fields |= {x.name: x for x in (*sizes, *strides)}
        super().__init__(**fields, B=B, length=length)


class OutputGradient(Bundle):
    """do, the gradient of o, with strides as those of Tokens."""

    def __init__(self, sizes, dtype):
        super().__init__(**rows("grad_o", (sizes.tokens, sizes.H_v, sizes.value_dim), dtype))


def rows(name, shape, dtype):
    """The fields of a tensor [tokens, heads, channels] with any strides of tokens and heads."""
    row, head = dims(f"{name}_row", f"{name}_head")
    return {name: T.StridedTensor(shape, (row, head, 1), dtype), f"{name}_row": row, f"{name}_head": head}


class Gates(Bundle):
    """Gates and betas as the caller passes them. `activations`, an Activation, encodes dtypes and transforms."""

    def __init__(self, sizes):
        super().__init__(
            g=T.Tensor([sizes.tokens, sizes.H_v], "float32"),
            beta=T.Tensor([sizes.tokens, sizes.H_v], "float32"),
            A_log=T.Tensor([sizes.H_v], "float32"),
            dt_bias=T.Tensor([sizes.H_v], "float32"),
            activations=T.int32,
        )


class IndexTable(Bundle):
    """A table of the caller, [rows, columns] of int32 or int64 as its TableKind says; NONE: there is no table. Rows are
    `stride` entries apart."""

    repeats = True

    def __init__(self):
        entries = T.Tensor([1], "int32")  # an address: only Table reads entries, by kind
        super().__init__(entries=entries, kind=T.int32, stride=T.int64, columns=T.int32)

    @property
    def exists(self):
        return self.kind != TableKind.NONE

    def record(self):
        """The Table of core/slots.cuh."""
        return self._record(self.stride, self.columns)

    def contiguous(self):
        """The same for a table that the host makes contiguous. It takes fewer registers."""
        return self._record(self.columns, self.columns)

    def vector(self):
        """The same for one that the host makes contiguous, with one column."""
        return self._record(1, 1)

    def _record(self, stride, columns):
        return extern("Table", T.access_ptr(self.entries[0], "r"), self.kind, stride, columns)


class Sequences(Bundle):
    """The tokens of sequences: cu_seqlens or, without it, `uniform_length` tokens each."""

    def __init__(self):
        super().__init__(offsets=IndexTable(), uniform_length=T.int32)

    def record(self, sizes):
        """The Sequences of plan/plan.cuh, whose functions find rows of the plan's tables before chunk_plan has ended,
        or without it."""
        counts = (T.Cast("int32", sizes.N), T.Cast("int32", sizes.tokens), self.uniform_length)
        return extern("Sequences", self.offsets.record(), *counts)


class Slots(Bundle):
    """The slot of each sequence's state: an entry of a table [N] or, without a table, the sequence's number. An index
    up to `null_index`, or not below `slots`, is no slot."""

    def __init__(self):
        super().__init__(state_indices=IndexTable(), null_index=T.int64, slots=T.int64)

    def record(self, indices=None):
        """The Slots of core/slots.cuh, of this table or of another one for the same states."""
        return extern("Slots", (indices or self.state_indices).record(), self.null_index, self.slots)


class Plan(Bundle):
    """chunk_plan's tables. `checkpoints`: the slot of the state after each chunk, or NO_STATE. `is_long`: whether the
    batch is long, see Cuts. `drawn`: work tiles that CTAs have drawn (states/work_queue.cuh)."""

    def __init__(self, sizes):
        super().__init__(
            sequences=T.Tensor([sizes.N, SequenceColumn.COUNT], "int32"),
            chunks=T.Tensor([sizes.chunk_slots, ChunkColumn.COUNT], "int32"),
            segments=T.Tensor([sizes.segment_slots, SegmentColumn.COUNT], "int32"),
            checkpoints=T.Tensor([sizes.chunk_slots], "int32"),
            is_long=T.Tensor([1], "int32"),
            drawn=T.Tensor([1], "int32"),
        )


class Cuts(Bundle):
    """How sequences are cut into segments.

    A batch is long if one of its sequences has more than `cut_above` chunks; all are, if that is 0 or there are no
    cu_seqlens. Its segments have `segment_chunks` chunks. In other batches, and with segment_chunks = 0, a segment is a
    whole sequence. `map_segments` is a second table of segments, in which the
    sequences mapped_0 and mapped_1 do not have the SegmentFlag `dropped`.
    """

    def __init__(self):
        (map_slots,) = dims("map_slots")
        super().__init__(
            map_segments=T.Tensor([map_slots, SegmentColumn.COUNT], "int32"),
            map_slots=map_slots,
            segment_chunks=T.int32,
            cut_above=T.int32,
            mapped_0=T.int32,
            mapped_1=T.int32,
            dropped=T.int32,
        )


class StatePresence(Bundle):
    """Which states exist. `has_state` has one bool for each sequence, with a stride; kernels read it if first_states is
    FLAGGED. `first_indices` has the slots of first states. Without that table, first states have the slots of last
    states."""

    def __init__(self, sizes):
        super().__init__(
            on_pool=T.int32,
            first_states=T.int32,
            has_state=T.Tensor([sizes.N], "int32"),
            has_state_stride=T.int64,
            first_indices=IndexTable(),
            has_final=T.int32,
        )

    def record(self, slots):
        """The Presence of plan/plan.cuh."""
        return extern(
            "Presence",
            self.on_pool != 0,
            self.first_states,
            T.access_ptr(self.has_state[0], "r"),
            self.has_state_stride,
            slots.record(self.first_indices),
            self.has_final != 0,
        )


class CheckpointTable(Bundle):
    """The slots of checkpoints: entries of a table [N, columns] or, without a table, the checkpoints' numbers in the
    order of the sequences. A number not below `checkpoint_states` is no slot."""

    def __init__(self):
        super().__init__(checkpoint_indices=IndexTable(), checkpoint_states=T.int64)

    def record(self):
        return self.checkpoint_indices.record(), self.checkpoint_states


class Matrices(Bundle):
    """The chunks' gates, whose rows are the table `gate` of layout.py, and the block rows of L and P of each chunk."""

    def __init__(self, sizes, dtype, gate=ForwardGate):
        super().__init__(
            gates=T.Tensor([sizes.chunk_slots, sizes.H_v, gate.COUNT, C], "float32"),
            **{f"matrices_{j}": block_row(sizes.chunk_slots, sizes.H_v, j, dtype) for j in range(4)},
        )

    @property
    def rows(self):
        return self.matrices_0, self.matrices_1, self.matrices_2, self.matrices_3


class Chunks(Bundle):
    """The chunks of a call: their tokens, the plan's tables, and the results of chunk_matrices."""

    def __init__(self, sizes, dtype, gate=ForwardGate):
        super().__init__(
            sizes=sizes,
            tokens=Tokens(sizes, dtype),
            plan=Plan(sizes),
            matrices=Matrices(sizes, dtype, gate),
        )


class States(Bundle):
    """The caller's states. state_stride_v and state_stride_k are the strides of value rows and key channels within a
    state, in elements. Slots are `slot_stride` elements apart. `state_dtype` is a Dtype; `float8`: it may have 8 bits.
    """

    def __init__(self, sizes, float8=False):
        super().__init__(
            initial_state=T.Tensor([sizes.state_size], "float32"),
            final_state=T.Tensor([sizes.state_size], "float32"),
            state_stride_v=T.int32,
            state_stride_k=T.int32,
            slot_stride=T.int64,
            state_dtype=T.int32,
        )
        self._sizes, self._float8 = sizes, float8

    def view(self, elements, *where):
        """A StateView of `elements` in this layout. `where` is slot_stride and Dtype; without it: one run in fp32."""
        strides = (self.state_stride_v, self.state_stride_k)
        dims = (self._sizes.H_v, self._sizes.key_dim, self._sizes.value_dim)
        return StateView(elements, *dims, strides, *where, float8=self._float8)

    def initial(self):
        return self.view(T.access_ptr(self.initial_state[0], "r"), self.slot_stride, self.state_dtype)

    def final(self):
        return self.view(T.access_ptr(self.final_state[0], "w"), self.slot_stride, self.state_dtype)

    def initial_in_a_run(self):
        """The op's own states: one run, in fp32."""
        return self.view(T.access_ptr(self.initial_state[0], "r"))


class Checkpoints(Bundle):
    """The states after every `checkpoint_every` tokens of a sequence, V-first. 0 tokens: no checkpoints."""

    def __init__(self, sizes):
        super().__init__(
            kept_states=T.Tensor([sizes.state_size], "float32"),
            kept_slot_stride=T.int64,
            kept_dtype=T.int32,
            checkpoint_every=T.int32,
        )

    def view(self, states):
        return states.view(T.access_ptr(self.kept_states[0], "w"), self.kept_slot_stride, self.kept_dtype)


class Maps(Bundle):
    """The affine maps of the segments, S -> M S + Z.

    states   Z^T of segment s in slot s + 1; after segment_scan the state before segment s + 1
    maps     M^T in two 16-bit parts: M^T rounded, and the rest; of the portable kernels M^T in fp32
    skips    1 where M is negligible, and not computed

    In reverse `states` are gradients: dZ^T of segment s in slot s - 1; after segment_scan dS'^T after segment s - 1.
    """

    def __init__(self, sizes, dtype, K):
        super().__init__(
            states=T.Tensor([sizes.segment_slots, sizes.H_v, sizes.value_rows, K], "float32"),
            maps=T.Tensor([sizes.segment_slots, sizes.H_v, *([] if dtype == "float32" else [2]), K, K], dtype),
            skips=T.Tensor([sizes.segment_slots, sizes.H_v], "int32"),
        )


class Memory(Bundle):
    """How far back the segments' first states remember, the tables of segment_memory.

    memory      chunks before a segment from which its first state is computed, from zero; or FROM_MAPS
    needs_maps  1 for a head of a sequence with a segment FROM_MAPS: all its segments get maps
    has_memory  whether the tables are there: the kernels of maps then leave out the heads that need none
    """

    def __init__(self, sizes):
        super().__init__(
            memory=T.Tensor([sizes.segment_slots, sizes.H_v], "int32"),
            needs_maps=T.Tensor([sizes.N, sizes.H_v], "int32"),
            has_memory=T.int32,
        )

    def lacks_maps(self, n, hv):
        """Whether a head of a sequence needs no maps. Read after segment_memory has ended, perhaps before pdl_sync."""
        return T.if_then_else(self.has_memory != 0, load_early(self.needs_maps[n, hv]), 1) == 0


class Outputs(Bundle):
    """o, and A and g_cumsum if they are requested. The backward has none of them."""

    def __init__(self, sizes, dtype):
        super().__init__(
            o=T.Tensor([sizes.tokens, sizes.H_v, sizes.value_dim], dtype),
            A=T.Tensor([sizes.tokens, sizes.H_v, C], dtype),
            g_cumsum=T.Tensor([sizes.tokens, sizes.H_v], "float32"),
            has_A=T.int32,
            has_g_cumsum=T.int32,
        )


class BackwardTables(Bundle):
    """Tables that chunk_matrices writes for the backward: the gates, and zeros in `semaphores`
    (gradients/semaphores.cuh) and `counters` (gate_gradients)."""

    def __init__(self, sizes, gate):
        (head_blocks,) = dims("head_blocks")
        super().__init__(
            backward_gates=T.Tensor([sizes.chunk_slots, sizes.H_v, gate.COUNT, C], "float32"),
            semaphores=T.Tensor([sizes.chunk_slots, sizes.H_k], "int32"),
            counters=T.Tensor([head_blocks], "int32"),
            has_backward_gates=T.int32,
        )


class Replay(Bundle):
    """The results of replay_states: h, S before each chunk, and V_new by tokens. Except between begin and finish,
    chunk_backward has V_new in the memory of dv, and replaces it chunk by chunk."""

    def __init__(self, sizes, dtype, K):
        super().__init__(
            h=T.Tensor([sizes.chunk_slots, sizes.H_v, sizes.value_rows, K], dtype),
            **rows("v_new", (sizes.tokens, sizes.H_v, sizes.value_dim), dtype),
        )


class ReverseReplay(Bundle):
    """The results of replay_gradients: dh, dS' after each chunk, and U by tokens."""

    def __init__(self, sizes, dtype, K):
        super().__init__(
            dh=T.Tensor([sizes.chunk_slots, sizes.H_v, sizes.value_rows, K], dtype),
            u=T.Tensor([sizes.tokens, sizes.H_v, sizes.value_dim], dtype),
        )


class Gradients(Bundle):
    """The gradients of tokens, with strides as those of Tokens, of gates and of betas. `tiles`: db and dg have one part
    per tile of value rows."""

    def __init__(self, sizes, dtype, tiles=()):
        keys, values = (sizes.tokens, sizes.H_k, sizes.key_dim), (sizes.tokens, sizes.H_v, sizes.value_dim)
        super().__init__(
            **rows("dq", keys, dtype),
            **rows("dk", keys, dtype),
            **rows("dv", values, dtype),
            db=T.Tensor([*tiles, sizes.tokens, sizes.H_v], "float32"),
            dg=T.Tensor([*tiles, sizes.tokens, sizes.H_v], "float32"),
        )


class StateGradients(Bundle):
    """dht, the gradients of the final states, and dh0, the gradients of the initial states, in the caller's layout."""

    def __init__(self, sizes):
        super().__init__(
            dht=T.Tensor([sizes.state_size], "float32"),
            dh0=T.Tensor([sizes.state_size], "float32"),
            state_stride_v=T.int32,
            state_stride_k=T.int32,
        )
        self._sizes = sizes

    def view(self, elements):
        strides = (self.state_stride_v, self.state_stride_k)
        return StateView(elements, self._sizes.H_v, self._sizes.key_dim, self._sizes.value_dim, strides)
