"""The caller's states: where one is, and in which layout."""

import tilelang.language as T

from kernels_tl.common import extern


class States:
    """States of N sequences, [N, H_v, K, V] or [N, H_v, V, K], as one run of numbers: `strides` are the element strides
    of v and of k in one, so that the layout is a run-time number."""

    def __init__(self, numbers, H_v, K, V, strides):
        self.numbers, self.H_v, self.K, self.V = numbers, H_v, K, V
        self.stride_v, self.stride_k = strides

    @property
    def is_v_first(self):
        return self.stride_k == 1

    def state_at(self, n, hv, v=0):
        """The index of the state of sequence n and head hv, from value row v on."""
        return (T.Cast("int64", n) * self.H_v + hv) * (self.K * self.V) + v * self.stride_v

    def pointer(self, access, n, hv, v=0):
        return T.access_ptr(self.numbers[self.state_at(n, hv, v)], access)

    def read(self, fragment, n, hv):
        """All rows of S^T."""
        name = f"read_state<{self.K}, {self.V}>"
        return extern(name, fragment.data, self.pointer("r", n, hv), self.is_v_first)

    def write(self, fragment, n, hv, v=0):
        """The warpgroups' rows of S^T, from value row v on."""
        return extern(f"write_state<{self.K}, {self.V}>", fragment.data, self.pointer("w", n, hv, v), self.is_v_first)
