"""DTensor: how the ops run on tensors that are sharded over a device mesh.

Heads, and the rows of a batch, do not depend on each other. So on each dimension of the mesh a call may be sharded over
heads or over the batch, and exchanges nothing:

    tensor                                              batch        heads
    q, k, v, g, beta, A, do, o, ... [B, T, H, ...]      Shard(0)     Shard(2)
    mixed_qkv, mixed, and gradients [B, T, channels]    Shard(0)     -
    initial_state, final_state, dht, dh0 [N, H_v, ...]  Shard(0)     Shard(1)
    A_log, dt_bias [H_v]                                Replicate    Shard(0)
    dA_log, ddt_bias [H_v]                              Partial      Shard(0)
    x, y, dx, dy [B, T, D] of the convolution           Shard(0)     Shard(2)
    weight [D, W], bias [D]; dweight and dbias          as A_log; as dA_log
    cu_seqlens and tables of indices                    -            Replicate

If the tensors of a call are placed differently, DTensor redistributes some of them, as for PyTorch's own ops. Other
placements are errors, because a gather of tokens is not what a caller wants.

The channels of the convolution count as heads, its windows as states.

Value head h uses query/key head h // (H_v / H_k). So the number of shards of heads divides H_k, and a shard has whole
groups. The ops on a pool are not sharded over the batch, because all sequences share the pool. Their tensors have to be
placed as they are used, because DTensor redistributes a tensor into a copy, which the op would write.

Rows of gated_rms_norm do not depend on each other, so o and z may be sharded over any dimension before the channels.
weight is replicated, and dweight is Partial.
"""

import itertools
import math

import torch

from flash_qla.ops import schemas
from flash_qla.ops.later import when_imported

# Tensor -> (its dimension of the batch, that of the heads); None: it has no such dimension
_TOKENS, _STATES, _PARAMETERS, _TABLE = (0, 2), (0, 1), (None, 0), (None, None)
_DIMENSIONS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "A", "do", "g_raw", "a", "b"), _TOKENS),
    **dict.fromkeys(("o", "out", "g_cumsum", "h", "dq", "dk", "dv", "db", "dg"), _TOKENS),
    **dict.fromkeys(("initial_state", "dht", "final_state", "dh0"), _STATES),
    **dict.fromkeys(("A_log", "dt_bias", "dA_log", "ddt_bias"), _PARAMETERS),
    **dict.fromkeys(("x", "y", "dx", "dy"), _TOKENS),
    **dict.fromkeys(("weight", "bias", "dweight", "dbias"), _PARAMETERS),
    **dict.fromkeys(("z", "dz", "da"), _TOKENS),
    **dict.fromkeys(("initial_window", "final_window", "dwindow", "dwindow0"), _STATES),
    **dict.fromkeys(("conv_weight", "conv_bias", "norm_weight"), _PARAMETERS),
    **dict.fromkeys(("dconv_weight", "dconv_bias", "dnorm_weight"), _PARAMETERS),
    **dict.fromkeys(("state_pool", "checkpoints", "d_cache", "k_cache", "g_cache"), (None, 1)),
    **dict.fromkeys(("window_pool", "window_checkpoints"), (None, 1)),
    **dict.fromkeys(("intermediate_states", "intermediate_windows"), (None, 2)),
    **dict.fromkeys(("cu_seqlens", "state_indices", "has_initial_state", "checkpoint_indices"), _TABLE),
    **dict.fromkeys(("write_pos", "force_flush"), _TABLE),
    **dict.fromkeys(
        ("initial_state_indices", "num_accepted_tokens", "write_indices", "intermediate_indices", "parents"), _TABLE
    ),
    **dict.fromkeys(
        ("mixed_qkv", "dmixed_qkv", "mixed", "dmixed"), (0, None)
    ),  # q, k and v follow each other in its channels
}
_BATCH, _HEADS = 0, 1  # indices into these pairs
# Result -> the argument without which it is an empty tensor
_NEEDS = {
    "final_state": "output_final_state",
    "h": "output_h",
    "dh0": "initial_state",
    "dA_log": "A_log",
    "ddt_bias": "dt_bias",
    "dbias": "bias",
    "final_window": "output_final_state",
    "dwindow0": "initial_window",
    "dconv_bias": "conv_bias",
}


def _strategies_of(op):
    """The function that register_sharding takes for the op."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    call_type = schemas.call_of(op)
    results = [x.name for x in op._schema.returns]
    tokens = "x" if "x" in call_type._fields else "q"  # the tensor whose heads or channels are divided
    is_written = any(x.alias_info is not None and x.alias_info.is_write for x in op._schema.arguments)

    def placement_of(name, axis):
        dim = None if axis is None else _DIMENSIONS[name][axis]
        return Replicate() if dim is None else Shard(dim)

    def result_placement(call, name, axis):
        needed = getattr(call, _NEEDS[name]) if name in _NEEDS else True
        if needed is None or needed is False or (name == "o" and getattr(call, "out", None) is not None):
            return Replicate()  # an empty tensor
        if axis == _BATCH and _DIMENSIONS[name] is _PARAMETERS:
            return Partial()  # a sum over tokens
        return placement_of(name, axis)

    def refuse(name, spec, allowed, why=""):
        placements = list(spec.placements)
        raise ValueError(
            f"flash_qla::{op._opname}: {name} is a DTensor placed {placements}, expected {' or '.join(allowed)}{why}"
        )

    def check(specs, choices):
        """Raises if a tensor is sharded otherwise; returns on which dimensions of the mesh heads are."""
        mesh_dims = set()
        for name, spec in specs.items():
            dims = {axis: _DIMENSIONS[name][axis] for axis in choices if axis is not None}
            allowed = {axis: Shard(dim) for axis, dim in dims.items() if dim is not None}
            for i, placement in enumerate(spec.placements):
                if placement == allowed.get(_HEADS):
                    mesh_dims.add(i)
                elif placement != allowed.get(_BATCH) and not isinstance(placement, (Replicate, Partial)):
                    words = {_BATCH: "over the batch", _HEADS: "over heads"}
                    refuse(name, spec, ["Replicate()", *(f"{x!r} {words[axis]}" for axis, x in allowed.items())])
        return mesh_dims

    def check_heads(specs, mesh_dims):
        mesh, H_k = specs[tokens].mesh, specs[tokens].shape[2]
        shards = math.prod(mesh.size(i) for i in mesh_dims)
        if H_k % shards:
            raise ValueError(
                f"flash_qla::{op._opname}: {tokens} has {H_k} {'heads' if tokens == 'q' else 'channels'}, expected a "
                f"multiple of {shards}, the number of shards"
            )
        if mesh_dims and H_k % mesh.size():  # a partial sum could become a shard of heads on all dimensions
            for name, spec in specs.items():
                for i, placement in enumerate(spec.placements):
                    if isinstance(placement, Partial) and i not in mesh_dims:
                        refuse(name, spec, ["Replicate()"], f" on dimension {i} of the mesh")

    def check_unmoved(specs, mesh_dims):
        for name, spec in specs.items():
            for i, placement in enumerate(spec.placements):
                expected = placement_of(name, _HEADS if i in mesh_dims else None)
                if placement != expected:
                    why = f" on dimension {i} of the mesh, like the other arguments: the op writes in place"
                    refuse(name, spec, [repr(expected)], why)

    def strategies(*args, **kwargs):
        call = call_type(*args, **kwargs)
        specs = {name: x for name, x in call._asdict().items() if hasattr(x, "placements")}
        choices = [None]
        if not is_written and call.cu_seqlens is None:
            choices.append(_BATCH)
        if not {"mixed_qkv", "mixed"} & specs.keys():
            choices.append(_HEADS)
        mesh_dims = check(specs, choices)
        if is_written:
            check_unmoved(specs, mesh_dims)
        if _HEADS in choices:
            check_heads(specs, mesh_dims)
            if not mesh_dims and specs[tokens].shape[2] % specs[tokens].mesh.size():
                choices.remove(_HEADS)
        names = [*call_type._fields[: len(args)], *kwargs]
        return [
            (
                [result_placement(call, name, axis) for name in results],
                [placement_of(name, axis) if name in specs else None for name in names],
            )
            for axis in choices
        ]

    return strategies


def _norm_strategies_of(op):
    """The same for the norm and its backward."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = [x.name for x in op._schema.arguments]
    results = [x.name for x in op._schema.returns]

    def strategies(*args, **kwargs):
        arguments = dict(zip(names, args, strict=False)) | kwargs

        def placement_of(name, placement):
            if name == "dweight":
                return placement if placement == Replicate() else Partial()
            return Replicate() if name == "weight" else placement

        def argument_placement(name, placement):
            return placement_of(name, placement) if hasattr(arguments[name], "placements") else None

        return [
            (
                [placement_of(name, placement) for name in results],
                [argument_placement(name, placement) for name in arguments],
            )
            for placement in (Replicate(), *map(Shard, range(len(arguments["o"].shape) - 1)))
        ]

    return strategies


def _register_all(tensor):
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    register, registered = propagator.register_op_strategy, propagator.op_strategy_funcs
    # DTensor keeps a strategy for the next calls of the same kind, and register_sharding lets it compare tensors alone.
    # The flags and what is None decide about the results, so it has to compare all arguments from k on.
    info = RuntimeSchemaInfo(static_argnum=1, needs_pytree=True)
    ops = (
        *(schemas.forward, schemas.forward_low_level, schemas.backward),
        *(schemas.forward_packed, schemas.backward_packed),
        *(schemas.prefill, schemas.decode, schemas.decode_packed, schemas.decode_buffered),
        *(schemas.convolution, schemas.convolution_backward, schemas.convolution_prefill),
        *(schemas.norm, schemas.norm_backward),
        *(schemas.region, schemas.region_backward, schemas.region_prefill, schemas.region_decode),
    )
    try:
        for op in ops:
            is_norm = op in (schemas.norm, schemas.norm_backward)
            register_sharding(op)(_norm_strategies_of(op) if is_norm else _strategies_of(op))
            register(op, registered[op], info)
    except Exception:
        # A strategy without `info` would serve calls with other flags, too.
        for op, registry in itertools.product(ops, vars(propagator).values()):
            if isinstance(registry, dict):
                registry.pop(op, None)
        raise


_WARNING = f"flash_qla takes no DTensors under PyTorch {torch.__version__}"
when_imported("torch.distributed.tensor", _register_all, _WARNING)
