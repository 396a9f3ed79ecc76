"""The sums of the columns of a matrix, in an order that depends on its shape alone:

    sums [columns]  =  sum over rows of terms [rows, columns]        fp32

gpu/norm.cpp launches it after gated_rms_norm_backward, whose CTAs have a row each. A CTA has 32 columns.
"""

import tilelang.language as T

from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims, extern

PRELUDE = """
#include "norm/sum_rows.cuh"
"""
WARPS, COLUMNS = 32, 32


def sum_rows():
    rows, columns = dims("rows", "columns")

    @T.prim_func
    def main(terms: T.Tensor([rows, columns], "float32"), sums: T.Tensor([columns], "float32")):
        with T.Kernel(T.ceildiv(columns, COLUMNS), threads=WARPS * 32, prelude=PRELUDE) as cta:
            of_warps = T.alloc_shared([WARPS, COLUMNS], "float32")
            T.pdl_sync()
            extern(
                f"sum_rows<{WARPS}>",
                T.access_ptr(terms[0, 0], "r"),
                T.access_ptr(sums[0], "w"),
                T.access_ptr(of_warps, "rw"),
                T.Cast("int32", rows),
                T.Cast("int32", columns),
                cta,
            )

    return main
