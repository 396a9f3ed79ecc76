"""Lowers a kernel: TileLang -> CUDA source and the facts that its launcher needs. No GPU is needed.

The result is plain data: C++ expressions over the fields of the kernel's argument struct. Code generation then needs
neither TileLang nor TVM.

Everything is read from TileLang's IR. build_tools/tilelang_patches.py has all changes of TileLang.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from build_tools import tilelang_patches as patches
from build_tools.bundle import Member
from build_tools.instance import Instance

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "int8": "int8_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
}
# Functions that use a TMA descriptor without writing its tensor; any other function may write it.
READS_OF_DESCRIPTORS = ("tl.tma_load", "tl.prefetch_tma_descriptor")


class LoweringError(Exception):
    """TileLang lowers the kernel, but no launcher can express it."""


@dataclass
class Field:
    """A member of the kernel's argument struct or of a bundle in it. Integers and dimensions are int64_t."""

    name: str  # of the PrimFunc's parameter
    c_type: str
    within: Sequence[Member] = ()  # the bundles that have the field, the outermost first, and the field

    @property
    def members(self) -> list[tuple[str, str]]:
        """Name and type of the member of the argument struct, then of the member inside it, down to the field."""
        *bundles, (name, _) = self.within or [(self.name, "")]
        return [*bundles, (name, self.c_type)]

    @property
    def path(self) -> str:
        return ".".join(name for name, _ in self.members)


@dataclass
class KernelArgument:
    """A parameter of the device function; `expression` is None for a TMA descriptor."""

    name: str
    c_type: str
    expression: str | None = None


@dataclass
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled, innermost dimension first, strides in bytes."""

    name: str
    tensor: str
    dtype: int
    sizes: list[str]
    strides: list[str]
    box: list[str]
    element_strides: list[str]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass
class Lowered:
    source: str
    symbol: str
    fields: list[Field]
    arguments: list[KernelArgument]
    tensor_maps: list[TensorMap]
    grid: list[str]
    block: list[int]
    shared_bytes: int
    waits_for_predecessor: bool  # calls T.pdl_sync: safe to launch before its predecessor ends
    is_cluster: bool  # CLUSTER of the kernel's module: the CTAs along x are a cluster
    early: dict  # EARLY of the kernel's module, see kernels_tl/core/common.py; empty unless it waits


def lower(package: str, instance: Instance) -> Lowered:
    import tilelang
    from tilelang import tvm

    module = importlib.import_module(f"{package}.{instance.module}")
    with patches.bundles_as_parameters() as bundles:
        prim_func = getattr(module, instance.kernel)(**instance.params)
    target = tvm.target.Target({"kind": "cuda", "arch": list(instance.cubins)[-1]})
    with (
        tvm.transform.PassContext(opt_level=3, config=patches.pass_configs(module)),
        target,
        patches.no_negative_indices(),
        patches.no_inferred_fences(module),
    ):
        artifact = tilelang.lower(prim_func, target=target)

    device_functions = list(artifact.device_mod.functions.items())
    if len(device_functions) != 1:
        names = ", ".join(var.name_hint for var, _ in device_functions)
        raise LoweringError(f"one T.Kernel per function is supported, found {names}")
    symbol, device_function = device_functions[0][0].name_hint, device_functions[0][1]
    (host_function,) = artifact.host_mod.functions.values()
    attributes = device_function.attrs
    if attributes.get("use_cooperative_groups", False):
        raise LoweringError("grid-wide synchronisation (cooperative launch) is not supported")
    if attributes.get("cluster_dims", None) is not None:
        raise LoweringError(
            "a cluster of constant size is not supported: CLUSTER of the module makes one of the grid's x"
        )
    if duplicates := patches.doubled_shared_buffers(device_function):
        raise LoweringError(
            f"two shared buffers are called {duplicates[0]}; a variable that is bound to a buffer renames it, one that"
            " is bound to a region of it does not"
        )

    # The packed call passes the device function's parameters, then the launch extents.
    names = _distinct(parameter.name for parameter in device_function.params)
    arguments = dict(zip(names, _packed_call(host_function.body, symbol), strict=False))
    # Descriptors are told apart as objects: two of the same tensor carry the same name.
    descriptors = host_function.attrs.get("tma_descriptor_args", {})
    tensor_maps = [_tensor_map(name, descriptors[value]) for name, value in arguments.items() if value in descriptors]
    extents = attributes["thread_extent"]

    waits = "has_cuda_pdl_sync" in attributes
    early = getattr(module, "EARLY", {}) if waits else {}
    parameters = [param.name for param in prim_func.params] + [x.data.name for x in prim_func.buffer_map.values()]
    for name, access in early.items():
        for parameter in (name, *([access.where] if access.where else [])):
            if parameter not in parameters:
                raise LoweringError(f"EARLY names {parameter}, which is no parameter")

    return Lowered(
        source=patches.uniform_warpgroups(artifact.kernel_source),
        symbol=symbol,
        fields=_fields(prim_func, bundles, _written_tensors(device_function, names, tensor_maps)),
        arguments=[_kernel_argument(name, value, value in descriptors) for name, value in arguments.items()],
        tensor_maps=tensor_maps,
        grid=[_cpp(extents.get(f"blockIdx.{axis}", 1)) for axis in "xyz"],
        block=[_constant(extents.get(f"threadIdx.{axis}", 1), "block size") for axis in "xyz"],
        shared_bytes=int(attributes.get("dyn_shared_memory_buf", 0)),
        waits_for_predecessor=waits,
        is_cluster=getattr(module, "CLUSTER", False),
        early=early,
    )


def _distinct(names: Iterable[str]) -> list[str]:
    """The names; repeated ones get the suffixes _1, _2, ..."""
    distinct: list[str] = []
    for name in names:
        candidates = (name, *(f"{name}_{i}" for i in range(1, len(distinct) + 1)))
        distinct.append(next(candidate for candidate in candidates if candidate not in distinct))
    return distinct


def _packed_call(body, symbol: str) -> list:
    from tilelang import tvm

    calls = []

    def visit(node):
        is_call = isinstance(node, tvm.tirx.Call) and node.op.name == "tirx.tvm_call_packed"
        if is_call and getattr(node.args[0], "value", None) == symbol:
            calls.append(list(node.args[1:]))

    tvm.tirx.stmt_functor.post_order_visit(body, visit)
    if len(calls) != 1:
        raise LoweringError(f"{symbol} is launched {len(calls)} times, expected once")
    return calls[0]


def _fields(prim_func, bundles: dict, written: set[str]) -> list[Field]:
    """The PrimFunc's parameters in order, then the dynamic dimensions in order of appearance."""
    from tilelang import tvm

    fields, dimensions = [], {}
    for param in prim_func.params:
        if param not in prim_func.buffer_map:
            fields.append(Field(param.name, _field_type(param)))
            dimensions[param.name] = param
            continue
        buffer = prim_func.buffer_map[param]
        name = buffer.data.name
        fields.append(Field(name, "void*" if name in written else "const void*"))
        for extent in [*buffer.shape, *buffer.strides]:
            if not isinstance(extent, tvm.tirx.Var):
                continue
            if not dimensions.setdefault(extent.name, extent).same_as(extent):
                raise LoweringError(f"two different dimensions are called {extent.name}")
    names = [field.name for field in fields]
    for field in fields:
        field.within = bundles.get(field.name, ())
    return fields + [Field(name, "int64_t") for name in dimensions if name not in names]


def _written_tensors(device_function, names: list[str], tensor_maps: list[TensorMap]) -> set[str]:
    """Tensors that the kernel may write, through their pointers or through TMA descriptors."""
    from tilelang import tvm

    tensors = {tma.name: tma.tensor for tma in tensor_maps}
    parameters = list(zip(names, device_function.params, strict=True))
    read_only = {int(i) for i in device_function.attrs.get("tl.readonly_param_indices", ())}
    written = {name for i, (name, _) in enumerate(parameters) if i not in read_only and name not in tensors}

    def visit(node):
        if isinstance(node, tvm.tirx.Call) and getattr(node.op, "name", None) not in READS_OF_DESCRIPTORS:
            for argument in node.args:
                written.update(tensors[name] for name, var in parameters if name in tensors and var.same_as(argument))

    tvm.tirx.stmt_functor.post_order_visit(device_function.body, visit)
    return written


def _kernel_argument(name: str, value, is_descriptor: bool) -> KernelArgument:
    if is_descriptor:
        return KernelArgument(name, "CUtensorMap")
    if str(value.dtype) == "handle":
        return KernelArgument(name, "const void*", f"args.{value.name}")
    return KernelArgument(name, _c_type(value), _cpp(value))


def _tensor_map(name: str, args) -> TensorMap:
    function, _, dtype, rank, tensor, *geometry = args
    if function.value != "__tvm_tensormap_create_tiled":
        raise LoweringError(f"TMA descriptor {name} is not tiled ({function.value})")
    rank = _constant(rank, "rank")
    sizes, strides, box, element_strides = (geometry[i * rank : (i + 1) * rank] for i in range(4))
    interleave, swizzle, l2_promotion, oob_fill = (_constant(v, name) for v in geometry[4 * rank :])
    return TensorMap(
        name=name,
        tensor=tensor.name,
        dtype=_constant(dtype, "dtype"),
        sizes=[_cpp(v) for v in sizes],
        strides=[_cpp(v) for v in strides],
        box=[_cpp(v) for v in box],
        element_strides=[_cpp(v) for v in element_strides],
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        oob_fill=oob_fill,
    )


def _field_type(var) -> str:
    c_type = _c_type(var)
    return "int64_t" if c_type in ("int32_t", "int64_t") else c_type


def _c_type(value) -> str:
    if str(value.dtype) not in C_TYPES:
        raise LoweringError(f"scalar argument {value} has dtype {value.dtype}, which has no C type")
    return C_TYPES[str(value.dtype)]


def _constant(value, label: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise LoweringError(f"{label} must be a constant, got {value}") from None


def _cpp(expression) -> str:
    """A C++ expression over the argument struct, in 64 bits throughout.

    TileLang's own host code multiplies dimensions in 32 bits. Dimensions are not negative, so C++'s truncating division
    equals TIR's floor division.
    """
    from tilelang import tvm

    tir = tvm.tirx
    operators = {
        tir.Add: "+",
        tir.Sub: "-",
        tir.Mul: "*",
        tir.FloorDiv: "/",
        tir.Div: "/",
        tir.FloorMod: "%",
        tir.Mod: "%",
    }
    functions = {tir.Min: "std::min", tir.Max: "std::max"}
    node = type(expression)
    if node is int:
        return str(expression)
    if node in (tir.IntImm, tir.FloatImm):
        return str(expression.value)
    if node is tir.Var:
        return f"args.{expression.name}"
    if node is tir.Cast:
        return _cpp(expression.value)
    if node in operators:
        return f"({_cpp(expression.a)} {operators[node]} {_cpp(expression.b)})"
    if node in functions:
        return f"{functions[node]}<int64_t>({_cpp(expression.a)}, {_cpp(expression.b)})"
    raise LoweringError(f"launch expression has no C++ form: {expression}")
