"""The caller's states: their addresses and their layout."""

import tilelang.language as T

from kernels_tl.core.common import extern
from kernels_tl.layout import FROM_SCAN, Dtype


class StateView:
    """States [slots, H_v, key_dim, value_dim] or [slots, H_v, value_dim, key_dim] from the pointer `elements` on.

    `strides` are the element strides of v and of k within a state, so the layout is a run-time number. The slots of a
    pool are `slot_stride` elements apart; None: they follow one another. `dtype` is a Dtype, of 8 bits only if
    `float8`. States of 8 or 16 bits have V first."""

    def __init__(self, elements, H_v, key_dim, value_dim, strides, slot_stride=None, dtype=Dtype.FLOAT32, float8=False):
        self.elements, self.dtype, self.float8 = elements, dtype, str(float8).lower()
        self.key_dim, self.value_dim = T.Cast("int32", key_dim), T.Cast("int32", value_dim)
        self.stride_v, self.stride_k = strides
        self.H_v, self.slot_stride = H_v, slot_stride

    @property
    def is_v_first(self):
        return self.stride_k == 1

    @property
    def row_stride(self):
        return self.stride_v + self.stride_k - 1

    def pointer(self, slot, hv, v=0):
        """A pointer to value row v of the state of a slot and head."""
        head = self.key_dim * self.value_dim
        if self.slot_stride is None:  # the slots follow one another
            state = (T.Cast("int64", slot) * self.H_v + hv) * head
        else:
            state = T.Cast("int64", slot) * self.slot_stride + T.Cast("int64", hv) * head
        return extern(f"number_at<{self.float8}>", self.elements, self.dtype, state + v * self.stride_v)

    def read_columns(self, fragment, slot, hv, v):
        """Reads the warpgroups' columns of S, from value row v on; zeros for columns that the state lacks."""
        extent = (self.stride_v, self.stride_k, self.key_dim, self.value_dim - v)
        function = f"read_state_columns<{fragment.shape[1]}, {self.float8}>"
        return extern(function, fragment.data, self.pointer(slot, hv, v), self.dtype, *extent)

    def _of_fragment(self, name, fragment, slot, hv, v):
        """Calls a function of core/state_tiles.cuh on the warpgroups' rows of S^T, from value row v on. `extent` tells
        how many value rows and channels the state has."""
        state, K = self.pointer(slot, hv, v), fragment.shape[1]
        extent = (self.row_stride, self.value_dim - v, self.key_dim)
        return extern(f"{name}<{K}, {self.float8}>", fragment.data, state, self.dtype, self.is_v_first, *extent)

    def read(self, fragment, slot, hv, v=0):
        return self._of_fragment("read_state", fragment, slot, hv, v)

    def write(self, fragment, slot, hv, v=0):
        return self._of_fragment("write_state", fragment, slot, hv, v)


# The states that a kernel writes after a chunk, in this order.
CHECKPOINT, FINAL = 0, 1


def chosen(first, a, b):
    """States a if `first`, else b. They may differ in address, slot stride and dtype only."""
    elements = extern("chosen", first, a.elements, b.elements)
    slot_stride, dtype = (T.Select(first, getattr(a, x), getattr(b, x)) for x in ("slot_stride", "dtype"))
    strides = (a.stride_v, a.stride_k)
    return StateView(elements, a.H_v, a.key_dim, a.value_dim, strides, slot_stride, dtype, a.float8 == "true")


class FirstState:
    """The first state of a work tile: in the caller's slot `slot` of `initial` or, FROM_SCAN, in the scan's
    tensor `scanned`, which is V-first, in fp32, with K channels per row."""

    def __init__(self, slot, initial, scanned):
        self.slot, self.initial, self.scanned = slot, initial, scanned
        self.is_scanned = slot == FROM_SCAN
        self.is_v_first = T.Select(self.is_scanned, 1, initial.stride_k) == 1
        self.dtype = T.Select(self.is_scanned, Dtype.FLOAT32, initial.dtype)

    def pointer(self, segment, hv, v0):
        """A pointer to value row v0 of the state before a segment."""
        scanned = T.access_ptr(self.scanned[segment, hv, v0, 0], "r")
        return extern("chosen", self.is_scanned, scanned, self.initial.pointer(self.slot, hv, v0))

    @property
    def row_stride(self):
        return T.Select(self.is_scanned, self.scanned.shape[-1], self.initial.row_stride)

    def read(self, fragment, segment, hv, v0):
        K, initial = fragment.shape[1], self.initial
        extent = (self.row_stride, initial.value_dim - v0, initial.key_dim)
        function = f"read_state<{K}, {initial.float8}>"
        state = self.pointer(segment, hv, v0)
        return extern(function, fragment.data, state, self.dtype, self.is_v_first, *extent)


def is_checkpoint(tokens, length, until, every):
    """Whether a checkpoint may follow the segment's first `tokens` tokens."""
    return (tokens <= length) & (tokens >= until) & (T.truncmod(tokens - until, T.max(every, 1)) == 0)
