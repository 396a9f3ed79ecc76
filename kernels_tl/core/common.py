"""Small helpers that all kernels share. docs/glossary.md explains the names; numbers that CUDA and C++ need too are in
layout.py.

Sizes that only change grids, strides and descriptors are dynamic: Sizes of bundles.py, and those of `dims`. A kernel is
compiled for K and V. Keys with fewer channels, and the last tile of a value, are padded with zeros on the chip: TMA
fills them in and leaves them out. Tensors that only kernels read are padded in memory: `value_rows` is V times the
number of tiles.
"""

import math
from typing import NamedTuple

import tilelang
import tilelang.language as T

from kernels_tl.layout import BLOCK, CHUNK, TRIANGLE

C = CHUNK

# Index arithmetic is in bounds by construction (the plan clamps), so the compiler's own bounds checks are not
# needed; warp specialisation is written out, never inferred.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_warp_specialized": True,
}
# Options for kernels that also write out all synchronisation, fences too, and never reuse a shared buffer's memory (see
# build_tools/tilelang_patches.py).
EXPLICIT_PASS_CONFIGS = PASS_CONFIGS | {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


def dims(*names):
    """Dynamic (run-time) sizes by name."""
    return tuple(T.dynamic(name) for name in names)


def swizzled(buffer):
    """The TMA/WGMMA swizzle as an explicit layout, for tiles that no gemm reads. Tiles of a gemm have it already."""
    return tilelang.layout.make_swizzled_layout(buffer)


def accumulator(shape):
    """The layout of an accumulator of WGMMA, for a matrix that no gemm reads or writes: 64 rows per warpgroup."""
    return tilelang.layout.Fragment(
        shape, lambda i, j: (32 * (i // 16) + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2)
    )


def element_type(dtype):
    """The name of a dtype in CUDA C++."""
    names = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
    return names[dtype] if dtype in names else f"flash_qla::device::{dtype.capitalize()}"


def memory_type(dtype):
    """A dtype of TileLang. The dtypes float8 and bits16 leave the format of their bits to run time."""
    return {"float8": "uint8", "bits16": "uint16"}.get(dtype, dtype)


def block_row(chunk_slots, H_v, j, dtype):
    """Block row j of the forward's two matrices of each chunk and value head, a strided part of [chunk_slots, H_v, 2,
    TRIANGLE]."""
    width = C - BLOCK * j
    strides = (H_v * 2 * TRIANGLE, 2 * TRIANGLE, TRIANGLE, width, 1)
    return T.StridedTensor([chunk_slots, H_v, 2, BLOCK, width], strides, dtype)


def block_rows(tiles, stage, buffers, slot, hv, matrix, edge):
    """(target, source) of the four block rows of one matrix: rows of a tile of C x C, and a part of their buffer.
    Blocks before a row's diagonal block are out of bounds, so TMA reads nothing there and fills in zeros. `edge` is a
    variable that holds 0, because a negative constant would count from the end."""
    return [
        (
            tiles[stage, BLOCK * j : BLOCK * (j + 1), :],
            buffers[j][slot, hv, matrix, :, edge - BLOCK * j : edge - BLOCK * j + C],
        )
        for j in range(C // BLOCK)
    ]


# CUtensorMapSwizzle, CUtensorMapDataType, CUtensorMapL2promotion
SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = range(4)
TMA_DTYPES = {"float16": 6, "bfloat16": 9}
L2_PROMOTION_128B = 2


def strides_of(buffer):
    """The strides of a tensor's dimensions, in elements."""
    return list(buffer.strides) or [math.prod(buffer.shape[i + 1 :], start=1) for i in range(len(buffer.shape))]


def descriptor(buffer, box, swizzle):
    """A TMA descriptor of a tensor of 16-bit elements, for a CUDA function. `box` has the extents of a box in the
    innermost dimensions; the extents in the others are 1."""
    rank = len(buffer.shape)
    box = [1] * (rank - len(box)) + list(box)
    return T.create_tma_descriptor(
        TMA_DTYPES[str(buffer.dtype)],
        rank,
        buffer.data,
        *reversed(buffer.shape),
        *(2 * stride for stride in reversed(strides_of(buffer))),
        *reversed(box),
        *[1] * rank,
        0,  # no interleaving
        swizzle,
        L2_PROMOTION_128B,
        0,  # out of bounds: zeros
    )


def extern(name, *args, returns="handle"):
    """A call of a CUDA function of a header in kernels_tl."""
    return T.call_extern(returns, f"flash_qla::device::{name}", *args)


# A kernel that calls pdl_sync may start before its predecessor has ended. EARLY of its module names the
# parameters that it touches before pdl_sync, and why that is safe for each:
#
#   the name of a kernel   that kernel's last launch before this one has ended by then
#   CALLER                 all that ran before the call has ended: the caller's tensors are there, new memory is free
#   HINT                   the values that are read change no result
#
# `where` names an integer parameter: the kernel touches the parameter early only if its argument is not 0. The emulator
# checks each launch by this declaration and, with --races, each access (emulator/include/launches.h).
CALLER, HINT = "caller", "hint"


class Early(NamedTuple):
    kernels: tuple[str, ...]
    where: str | None = None  # an integer parameter; None: always


def after(*kernels, where=None):
    return Early(kernels, where)


def load_early(number):
    """An entry of chunk_plan's tables, read before pdl_sync or after it: see core/warp.cuh."""
    return extern("load_early", T.access_ptr(number, "r"), returns="int32")
