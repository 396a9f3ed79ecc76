"""All changes of TileLang's behaviour and all workarounds for it. They are why TileLang's version is pinned.

Each patch says:

    Change    the difference to TileLang
    Why       the reason
    Upstream  where TileLang's own tracker has it
    Until     how to see that the patch is no longer needed

build_tools/lower.py and build_tools/nvrtc.py apply the patches by name. TestPatches of tests/test_build.py lowers
kernels without each of them: a test that fails there says that a patch may go.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from unittest import mock

from build_tools.bundle import Bundle, Member

# Options of TileLang's PassContext that a kernel's PASS_CONFIGS may set
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": """
        Change: no bounds checks around accesses to global memory.
        Why: the plan clamps indices, but TileLang cannot prove them in bounds, so it checks almost every access.
        Upstream: tile-ai/tilelang#1397 (open).
        Until: a kernel lowers to the same code without the option.
        """,
    "tl.disable_warp_specialized": """
        Change: TileLang does not split a kernel into producers and consumers by itself.
        Why: the kernels write their roles out, with barriers and registers for each.
        Upstream: none filed that we know of; the option is meant for this.
        Until: TileLang promises to leave such kernels alone; TileLang 0.1.15 does so without the option too.
        """,
    "tl.disable_thread_storage_sync": """
        Change: TileLang adds no __syncthreads or named barriers of its own.
        Why: the roles synchronize by mbarriers, which TileLang's analysis does not follow, so it adds barriers.
        Upstream: none filed that we know of; the option is meant for this.
        Until: a kernel lowers to the same code without the option.
        """,
    "tl.disable_shared_memory_reuse": """
        Change: each shared buffer has memory of its own.
        Why: without TileLang's barriers, buffers that share memory would race.
        Upstream: tile-ai/tilelang#2416 (open) asks that the option above imply this one.
        Until: the option above implies it.
        """,
}

# Warnings of NVRTC that are switched off, by number
SUPPRESSED_WARNINGS = {
    177: """
        Change: no warning of a variable that is declared and never used.
        Why: TileLang declares all of a kernel's variables at its start, some of which it does not use.
        Upstream: none filed that we know of.
        Until: a clean build without the number prints no such warning.
        """,
    20012: """
        Change: no warning of an annotation on a defaulted function, which CUDA ignores.
        Why: TileLang's templates and CUTLASS annotate defaulted constructors.
        Upstream: none filed that we know of.
        Until: a clean build without the number prints no such warning.
        """,
    1105: """
        Change: no warning where a header has the directive #warning.
        Why: TileLang's templates include headers of CUDA by which a header says that it is internal.
        Upstream: none filed that we know of.
        Until: a clean build without the number prints no such warning.
        """,
}

HOST_HEADERS = Path(__file__).resolve().parent / "rtc_include"
"""
Change: the host's headers that TileLang's templates include are empty here; preamble.h replaces them for device code.
Why: NVRTC has no headers of the host.
Upstream: TileLang's own shim for NVRTC lacks names that its templates use (tile-ai/tilelang#3259).
Until: kernels compile without this folder.
"""


@contextlib.contextmanager
def _without_pass(namespace, name: str):
    with mock.patch.object(namespace, name, lambda: lambda mod: mod):
        yield


@contextlib.contextmanager
def bundles_as_parameters():
    """
    Change: a parameter of a PrimFunc that is a Bundle becomes its fields. Gives the members of each, by field.
    Why: TileLang takes such an object for a constant. Without bundles kernels have up to 50 parameters.
    Upstream: none filed that we know of.
    Until: TileLang's prim_func takes parameters that are records of tensors.
    """
    from tilelang.language.eager.builder import Builder

    paths: dict[str, list[Member]] = {}
    add = Builder.prim_func_arg

    def add_all(builder, name, value):
        if not isinstance(value, Bundle):
            return add(builder, name, value)
        fields = value.declare(name, lambda field, annotation: add(builder, field, annotation))
        if duplicates := paths.keys() & fields:
            raise ValueError(f"{', '.join(sorted(duplicates))} are fields of two bundles of a kernel")
        paths.update(fields)
        return value

    with mock.patch.object(Builder, "prim_func_arg", add_all):
        yield paths


def no_negative_indices():
    """
    Change: the pass LegalizeNegativeIndex, which rewrites indices that count from the end, does not run.
    Why: no kernel has such an index. For some kernels the pass takes as long as all others to find that out.
    Upstream: tile-ai/tilelang#1465 (open), compile time since Z3 proves the signs of indices.
    Until: with the pass, `python -m build_tools.kernels --sources` takes as long as without it.
    """
    import tilelang

    return _without_pass(tilelang.transform, "LegalizeNegativeIndex")


def no_inferred_fences(module):
    """
    Change: the pass InjectFenceProxy does not run for a kernel that writes out its synchronisation.
    Why: the pass puts fence.proxy.async where the generic proxy may have written shared memory. Each fence waits for
        all outstanding accesses of the thread. These kernels have a fence where one is needed, and nowhere else.
    Upstream: tile-ai/tilelang#1849 (closed), which removed the fences before loads by TMA.
    Until: such a kernel lowers to the same code with the pass.
    """
    import tilelang.cuda.transform

    if "tl.disable_thread_storage_sync" not in pass_configs(module):
        return contextlib.nullcontext()
    return _without_pass(tilelang.cuda.transform, "InjectFenceProxy")


def pass_configs(module) -> dict:
    """PASS_CONFIGS of a kernel's module; each option is documented above."""
    configs = getattr(module, "PASS_CONFIGS", {})
    if unknown := configs.keys() - PASS_CONFIGS.keys():
        raise ValueError(f"PASS_CONFIGS has {', '.join(sorted(unknown))}, which build_tools/tilelang_patches.py lacks")
    return configs


WARPGROUP = 128  # threads


def uniform_warpgroups(source: str) -> str:
    """
    Change: in the descriptors of WGMMA's operands, the index of the warpgroup comes from a shuffle.
    Why: TileLang computes it from threadIdx.x in each descriptor. The compiler does not see that the index is the same
        in a warp, so it computes descriptors in vector registers and moves each to a uniform one.
    Upstream: none filed that we know of.
    Until: no line with wgmma_ss in TileLang's source has the index.
    """
    index = f"((int)threadIdx.x) >> {WARPGROUP.bit_length() - 1}"
    lines = source.split("\n")
    products = [i for i, line in enumerate(lines) if "tl::wgmma_ss<" in line and index in line]
    if not products:
        return source
    for i in products:
        lines[i] = lines[i].replace(index, "warpgroup_of_cta")
    source = "\n".join(lines)
    body = source.index("{", source.index("__launch_bounds__")) + 1
    shuffle = f"__shfl_sync(~0u, threadIdx.x >> {WARPGROUP.bit_length() - 1}, 0)"
    return f"{source[:body]}\n  const int warpgroup_of_cta = {shuffle};{source[body:]}"


def doubled_shared_buffers(device_function) -> list[str]:
    """
    Change: names that several shared buffers of a kernel have; lower.py refuses such a kernel.
    Why: TileLang lays buffers out by name, and those of one name by address, which changes from build to build.
    Upstream: tile-ai/tilelang#1570 (merged) sorts by name; tile-ai/tilelang#3108 (closed) found more such orders.
    Until: MergeSharedMemoryAllocations places buffers in an order that does not depend on their names.
    """
    from tilelang import tvm

    names = Counter()

    def visit(node):
        if isinstance(node, tvm.tirx.Bind) and _is_call(node.value, "tirx.handle_add_byte_offset"):
            names[node.var.name] += 1

    tvm.tirx.stmt_functor.post_order_visit(device_function.body, visit)
    return sorted(name for name, count in names.items() if count > 1)


def _is_call(node, name: str) -> bool:
    from tilelang import tvm

    return isinstance(node, tvm.tirx.Call) and getattr(node.op, "name", None) == name
