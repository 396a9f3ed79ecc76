"""What the gated norm's two passes share."""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.core.common import dims, element_type, extern, memory_type


class NormInputs(Bundle):
    """o and z [batch, tokens, heads, V] with any strides of the first three dimensions, weight [V] of the Dtype
    weight_dtype, and numbers: dtype, the Dtype of o and z; ctas, the grid; lanes, the threads that share a row."""

    def __init__(self, dtype):
        batch, tokens, heads, V = self.shape = dims("batch", "tokens", "heads", "V")
        super().__init__(
            **strided("o", self.shape, dtype),
            **strided("z", self.shape, dtype),
            weight=T.Tensor([V], "float32"),
            dtype=T.int32,
            weight_dtype=T.int32,
            batch=batch,
            tokens=tokens,
            heads=heads,
            V=V,
            ctas=dims("ctas")[0],
            lanes=T.int32,
            eps=T.float32,
            is_sigmoid=T.int32,
            norm_before_gate=T.int32,
        )

    def record(self):
        """NormInputs of gated_rms_norm.cuh."""
        pointers = [T.access_ptr(x[(0,) * len(x.shape)], "r") for x in (self.o, self.z, self.weight)]
        return extern("NormInputs", *pointers, strides(self.o), strides(self.z), self.dtype, self.weight_dtype)

    def rows(self):
        """NormRows of norm_rows.cuh."""
        sizes = (self.batch * self.tokens * self.heads, self.tokens, self.heads, self.ctas)
        return extern("NormRows", *(T.Cast("uint32", x) for x in sizes), T.Cast("int32", self.V), self.lanes)

    def norm(self):
        """GatedNorm of norm_rows.cuh."""
        return extern("GatedNorm", self.eps, self.is_sigmoid, self.norm_before_gate)


def strided(name, shape, dtype):
    """The fields of a tensor [batch, tokens, heads, V] with any strides of the first three."""
    strides = [T.dynamic(f"{name}_{of}", "int64") for of in ("batch", "token", "head")]
    return {name: T.StridedTensor(shape, (*strides, 1), memory_type(dtype))} | {x.name: x for x in strides}


def strides(x):
    """NormStrides of norm_rows.cuh."""
    return extern("NormStrides", *x.strides[:3])


def template(function, dtype, channels, vectors, rows):
    """A function of the headers for a pass with so many rows per thread in flight."""
    return f"{function}<{element_type(dtype)}, {channels}, {str(vectors).lower()}, {rows}>"
