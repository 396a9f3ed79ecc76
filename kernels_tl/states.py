"""The caller's states: where one is, and in which layout."""

import tilelang.language as T

from kernels_tl.common import extern


class States:
    """States of N sequences, [N, H_v, key_dim, value_dim] or [N, H_v, value_dim, key_dim], as one run of numbers:
    `strides` are the element strides of v and of k in one, so that the layout is a run-time number."""

    def __init__(self, numbers, H_v, key_dim, value_dim, strides):
        self.numbers, self.H_v = numbers, H_v
        self.key_dim, self.value_dim = T.Cast("int32", key_dim), T.Cast("int32", value_dim)
        self.stride_v, self.stride_k = strides

    @property
    def is_v_first(self):
        return self.stride_k == 1

    def state_at(self, n, hv, v=0):
        """The index of the state of sequence n and head hv, from value row v on."""
        return (T.Cast("int64", n) * self.H_v + hv) * (self.key_dim * self.value_dim) + v * self.stride_v

    def pointer(self, access, n, hv, v=0):
        return T.access_ptr(self.numbers[self.state_at(n, hv, v)], access)

    def _of_fragment(self, name, access, fragment, n, hv, v):
        """The warpgroups' rows of S^T, from value row v on; those that the state has, and so of its channels."""
        extent = (self.stride_v + self.stride_k - 1, self.value_dim - v, self.key_dim)
        K = fragment.shape[1]
        return extern(f"{name}<{K}>", fragment.data, self.pointer(access, n, hv, v), self.is_v_first, *extent)

    def read(self, fragment, n, hv, v=0):
        return self._of_fragment("read_state", "r", fragment, n, hv, v)

    def write(self, fragment, n, hv, v=0):
        return self._of_fragment("write_state", "w", fragment, n, hv, v)
