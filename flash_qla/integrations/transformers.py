"""Run the Gated DeltaNet layers of a Hugging Face transformers model through flash_qla.

    from flash_qla.integrations.transformers import restore, use_flash_qla

    use_flash_qla(model)            # from here on, prefill, training and decoding run in flash_qla
    restore(model)                  # as it was

    with use_flash_qla(model):      # the same for one block
        model(input_ids)

Works for every model built on transformers' GatedDeltaNet layers (Qwen3-Next, Qwen3.5 and its MoE
variants, OLMo-Hybrid, ...). Only the layers of the given model change, so other models in the process
keep what they use. Training and a prefill run flash_qla.gated_delta_net, from transformers 5.15 on:
convolution, gates, delta rule and norm as one op. Where a part of the layer is another one (a hook,
an adapter, a norm with another formula), and for several tokens after a cache's, the parts run one by one:
flash_qla.chunk_gated_delta_rule, flash_qla.causal_conv1d, unless something else has replaced the function in
the model's module, and flash_qla.gated_rms_norm, if it computes the same as the layer's and nothing else has
replaced its forward. A line of the log "transformers.flash_qla" says which, and why. Decoding one token at a time, with
a dynamic or a static cache, runs flash_qla.decode_gated_delta_net on the cache's windows and states where the layer is
one op, and flash_qla.decode_gated_delta_rule elsewhere, or chunk_gated_delta_rule where a gradient is requested.
Gradients and gradient checkpointing work as with the model's own functions.

Packed sequences need cu_seq_lens_q. position_ids that restart are not enough, because transformers does
not pass them on to these layers: each sequence would start from the state of the one before. An int as
max_length_q is flash_qla's max_seqlen.

The model must be in bf16 or fp16 on a GPU, or run under torch.autocast. The dimension of its linear key
heads must be a multiple of 8 up to 256, that of its linear value heads a multiple of 8 up to 512.

A layer reaches its chunk and recurrent functions by one of two paths, depending on the transformers
release:

  4.57 to 5.14   the instance attributes `chunk_gated_delta_rule` and `recurrent_gated_delta_rule`, which
                 are replaced;
  from 5.15      `forward` calls the functions `torch_chunk_gated_delta_rule`,
                 `torch_recurrent_gated_delta_rule` and `causal_conv1d_fn` of its module (which themselves
                 pick other packages or plain torch). The layer becomes an instance of a subclass whose
                 `forward` is the same byte code with these names changed, so the module's own functions
                 stay untouched. A class,
                 because a method on the instance would run that instance's weights in every copy of
                 it: replicas of nn.DataParallel, copy.copy.

Copies of a switched layer are switched: replicas, copies, what pickle loads (which imports flash_qla).
"""

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable

import torch

import flash_qla
from flash_qla._layout import MOST_VALUE_DIM
from flash_qla.integrations import _transformers_layer, fla
from flash_qla.integrations._gpus import REASON, keeps_theirs
from flash_qla.ops.checks import IGNORED

# A layer has the first of each, and perhaps the second.
_ATTRIBUTES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_CONVOLUTION = "causal_conv1d_fn"
_ATTRIBUTE, _FUNCTION = _ATTRIBUTES[0], _FUNCTIONS[0]

# The releases whose models were run: see docs/support.md.
TESTED_RELEASES = "5.17.0, 5.23.0 and 5.24.0"

# Where a layer's forward may be kept: accelerate's hooks move it to `_old_forward`.
_FORWARDS = ("_old_forward", "forward")

# Attribute of a layer some of whose attributes were replaced: [(name, what it held, what it holds), ...].
_RECORD = "_flash_qla_replaced"

# Attribute of a class whose forward calls flash_qla: the class that it was made from.
_ORIGINAL = "_flash_qla_original"
# And whether its calls may run as one op.
_REGION = "_flash_qla_region"


def _keywords_of(function: Callable) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.items()
    return frozenset(name for name, parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


# Keywords that the operators read, if only to refuse their value.
_KEYWORDS = IGNORED.keys() | _keywords_of(flash_qla.chunk_gated_delta_rule)
_PACKED_KEYWORDS = _keywords_of(flash_qla.chunk_gated_delta_rule_packed)
_RECURRENT_KEYWORDS = _keywords_of(fla.fused_recurrent_gated_delta_rule)


def chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
    """flash_qla.chunk_gated_delta_rule under the argument names that transformers uses.

    The layers hand on every keyword that the model was called with (position_ids, max_length_k, ...).
    max_length_q gives max_seqlen. This function drops the keywords that the operator does not know, as
    transformers itself does for FLA.
    """
    if kwargs.get("seq_idx") is not None and kwargs.get("cu_seqlens") is None:
        raise ValueError(
            "the model was given packed sequences as seq_idx without cu_seq_lens_q; flash_qla needs "
            "cu_seq_lens_q (the cumulative sequence lengths) to keep them apart"
        )
    max_length = kwargs.get("max_length_q")
    options = {"max_seqlen": max_length} if isinstance(max_length, int) else {}
    options |= {name: value for name, value in kwargs.items() if name in _KEYWORDS}
    values_first = _values_first(options)
    mixed_qkv = _mixed_qkv_of(query, key, value) if options.keys() <= _PACKED_KEYWORDS else None
    if mixed_qkv is None:
        o, state = flash_qla.chunk_gated_delta_rule(query, key, value, g, beta, **options | values_first)
    else:
        o, state = flash_qla.chunk_gated_delta_rule_packed(
            mixed_qkv, g, beta, *query.shape[2:], **options | values_first
        )
    return o, state.mT if values_first and state is not None else state


def _values_first(options: dict) -> dict:
    """Arguments by which states have their values first in memory, as decode_gated_delta_net takes them, unless the
    initial state has its keys first. The layer sees [N, H_v, K, V]; a cache keeps strides."""
    initial = options.get("initial_state")
    if initial is None:
        return {"state_v_first": True} if options.get("output_final_state") else {}
    is_v_first = initial.dim() == 4 and initial.mT.is_contiguous()
    return {"state_v_first": True, "initial_state": initial.mT} if is_v_first else {}


def _mixed_qkv_of(query, key, value) -> torch.Tensor | None:
    """The tensor [B, T, 2 H_k K + H_v V] that a layer has split, if its gradient is requested: then there is one
    gradient, instead of three that autograd has to concatenate. None without such a tensor, or under a compiler."""
    if not torch.is_grad_enabled() or not query.requires_grad or torch.compiler.is_compiling():
        return None
    parts, base = (query, key, value), query._base
    if base is None or base.dim() != 3 or any(x.dim() != 4 or x._base is not base for x in parts):
        return None
    sizes = [x.shape[2] * x.shape[3] for x in parts]
    for mixed_qkv in (base, base.transpose(1, 2)):  # a convolution has the channels before the tokens
        if mixed_qkv.shape == (*query.shape[:2], sum(sizes)):
            slices = [part.unflatten(2, x.shape[2:]) for part, x in zip(mixed_qkv.split(sizes, 2), parts, strict=True)]
            if all(_is_same_view(x, y) for x, y in zip(parts, slices, strict=True)):
                return mixed_qkv
    return None


def _is_same_view(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def recurrent_gated_delta_rule(query, key, value, g, beta, **kwargs):
    """flash_qla.decode_gated_delta_rule under the argument names that transformers uses; the initial state
    stays as it is.

    It has no derivative, which the model's own function has. So chunk_gated_delta_rule runs where a gradient
    is requested.
    """
    tensors = (query, key, value, g, beta, kwargs.get("initial_state"))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return chunk_gated_delta_rule(query, key, value, g, beta, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name in _RECURRENT_KEYWORDS}
    values_first = _values_first(kwargs)
    o, state = fla.fused_recurrent_gated_delta_rule(query, key, value, g, beta=beta, **kwargs | values_first)
    return o, state.mT if values_first and state is not None else state


def causal_conv1d(original, hidden_states, weight, bias=None, activation=None, **kwargs):
    """flash_qla.causal_conv1d under the argument names that transformers uses. A layer with another activation or
    width runs `original`, the function of its module.

    Parameters
    ----------
    hidden_states : Tensor
        [B, D, T].
    weight : Tensor
        [D, W].
    **kwargs : object
        The keywords that the model was called with.
    """
    dtype = hidden_states.dtype
    if activation not in ("silu", "swish", None) or not 2 <= weight.shape[-1] <= 4:
        return original(hidden_states, weight, bias, activation=activation, **kwargs)
    x = hidden_states.transpose(1, 2)
    autocast_dtype = _transformers_layer.autocast_dtype(x)
    if autocast_dtype not in (None, weight.dtype):  # the op casts x alone
        weight, bias = weight.float(), None if bias is None else bias.float()
    elif weight.dtype != torch.float32:
        x = x.to(weight.dtype)
    cu_seqlens, per_token = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx", kwargs.get("position_ids"))
    if cu_seqlens is not None and per_token is not None and per_token.shape[-1] != x.shape[1]:
        raise ValueError("packed sequences continue a cache, which has one row for all: pass use_cache=False")
    y, _ = flash_qla.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    return y.to(dtype).transpose(1, 2)


# Name in a layer or in its module -> the function that takes its place
_REPLACEMENTS = (chunk_gated_delta_rule, recurrent_gated_delta_rule)
_BY_ATTRIBUTE = dict(zip(_ATTRIBUTES, _REPLACEMENTS, strict=True))
_BY_FUNCTION = dict(zip(_FUNCTIONS, _REPLACEMENTS, strict=True))
_RENAMED = {name: f"flash_qla_{function.__name__}" for name, function in _BY_FUNCTION.items()}


class Switched:
    """The layers that one `use_flash_qla` call has switched; leaving the `with` block restores them."""

    def __init__(self, layers: dict[str, torch.nn.Module]):
        self.layers = layers

    def restore(self) -> None:
        for name, layer in self.layers.items():
            _restore_layer(name, layer)

    def __enter__(self) -> "Switched":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self):
        return f"Switched({', '.join(self.layers) or 'no layer'})"


def use_flash_qla(model: torch.nn.Module) -> Switched:
    """Switch all Gated DeltaNet layers of `model` to flash_qla's functions.

    On a GPU that is not Hopper's the layers keep theirs, and a line of the log says so, unless FLASH_QLA_ANY_GPU=1. For
    a model on the CPU the current GPU decides, to which it may be moved.

    Parameters
    ----------
    model : torch.nn.Module
        A loaded transformers model, or any module that contains one (a torch.compile'd model included; it recompiles).
        Layers that are switched already stay as they are.

    Returns
    -------
    switched : Switched
        The newly switched layers, usable as a context manager that restores them at its end.

    Raises
    ------
    ValueError
        The model has no Gated DeltaNet layer.
    RuntimeError
        This transformers release resolves the chunk function in a manner unknown to flash_qla. Nothing has been changed
        then.
    """
    plan = {}
    unknown = []
    switched_before = False
    for name, layer in model.named_modules():
        if _is_switched(layer):
            switched_before = True
            continue
        switch = _switch_of(layer)
        if switch is not None:
            plan[name] = (layer, switch)
        elif "GatedDelta" in type(layer).__name__ and "Norm" not in type(layer).__name__:
            unknown.append((name, layer))

    if unknown:
        name, layer = unknown[0]
        raise RuntimeError(
            f"flash_qla cannot hook the layer {name!r} ({type(layer).__module__}.{type(layer).__name__}, "
            f"transformers {_transformers_version()}): looked for an instance attribute {_ATTRIBUTE!r} "
            f"(transformers 4.57 to 5.14) and for a forward that calls {_FUNCTION!r} (from 5.15), found neither. "
            f"Releases that were tested: {TESTED_RELEASES}"
        )
    if not plan and not switched_before:
        raise ValueError(
            f"{type(model).__name__} has no Gated DeltaNet layer: looked for modules with the attribute "
            f"{_ATTRIBUTE!r} and for modules whose forward calls {_FUNCTION!r} "
            f"(transformers {_transformers_version()})"
        )
    if plan and keeps_theirs(_device_of(model)):
        logging.getLogger("transformers.flash_qla").warning("the model keeps its own functions: %s", REASON)
        plan = {}
    for layer, switch in plan.values():
        switch()
        for norm in filter(_is_gated_rms_norm, layer.children()):
            norm.__class__ = _switched_class(type(norm), False)
    return Switched({name: layer for name, (layer, _) in plan.items()})


def _device_of(model: torch.nn.Module) -> torch.device:
    """The GPU that the model is on or, from the CPU, may be moved to."""
    on_gpu = (x.device for x in model.parameters() if x.is_cuda)
    return next(on_gpu, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def restore(model: torch.nn.Module) -> None:
    """Give all layers of `model` that `use_flash_qla` has switched what they had before.

    Parameters
    ----------
    model : torch.nn.Module
        As in flash_qla.integrations.transformers.use_flash_qla.
    """
    for name, layer in model.named_modules():
        _restore_layer(name, layer)


def _is_norm(original: type) -> bool:
    return original.__name__.endswith("RMSNormGated")


def _is_gated_rms_norm(module: torch.nn.Module) -> bool:
    """Whether the module can be switched: on a few numbers its class computes what flash_qla.gated_rms_norm does."""
    weight, activation = getattr(module, "weight", None), getattr(module, "activation", None)
    is_plain = _is_norm(type(module)) and not _is_switched(module) and not any(x in vars(module) for x in _FORWARDS)
    if not is_plain or weight is None or weight.dim() != 1 or activation not in ("silu", "sigmoid"):
        return False
    on_cpu = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    o, z, weight = (torch.randn(shape, **on_cpu) for shape in ((2, *weight.shape), (2, *weight.shape), weight.shape))
    try:
        expected = torch.func.functional_call(module, {"weight": weight}, (o, z))
        actual = flash_qla.gated_rms_norm(o, z, weight, eps=module.variance_epsilon, activation=activation)
    except Exception:  # of any kind: the module has other arguments, or needs a GPU
        return False
    return expected.shape == actual.shape and torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)


def _forward_of_norm(self, hidden_states, gate=None):
    is_known = (
        hidden_states.dtype in (torch.bfloat16, torch.float16, torch.float32) and len(self.weight) <= MOST_VALUE_DIM
    )
    if not is_known or gate is None or gate.dtype != hidden_states.dtype:
        return getattr(type(self), _ORIGINAL).forward(self, hidden_states, gate)
    return flash_qla.gated_rms_norm(
        hidden_states, gate, self.weight, eps=self.variance_epsilon, activation=self.activation
    )


def _is_switched(layer: torch.nn.Module) -> bool:
    return _RECORD in layer.__dict__ or hasattr(type(layer), _ORIGINAL)


def _switch_of(layer: torch.nn.Module) -> Callable[[], None] | None:
    """A function that switches the layer; None if none is known."""
    if callable(layer.__dict__.get(_ATTRIBUTE)):
        new = {name: function for name, function in _BY_ATTRIBUTE.items() if callable(layer.__dict__.get(name))}
        return functools.partial(_replace, layer, new)
    for attribute in _FORWARDS:
        forward = layer.__dict__.get(attribute)
        if inspect.ismethod(forward) and inspect.isfunction(forward.__func__):
            renamed = _with_flash_qla(forward.__func__)
            return renamed and functools.partial(_replace, layer, {attribute: types.MethodType(renamed, layer)})
    if "forward" in layer.__dict__ or _is_norm(type(layer)):
        return None
    switched = _switched_class(type(layer), False)
    if switched and _transformers_layer.agrees(layer, switched.forward):
        switched = _switched_class(type(layer), True)
    return switched and functools.partial(setattr, layer, "__class__", switched)


def _replace(layer: torch.nn.Module, new: dict[str, Callable]) -> None:
    layer.__dict__[_RECORD] = [(name, layer.__dict__[name], function) for name, function in new.items()]
    for name, function in new.items():
        setattr(layer, name, function)


def _restore_layer(name: str, layer: torch.nn.Module) -> None:
    if _RECORD in layer.__dict__:
        holders = {}
        for attribute, original, new in layer.__dict__[_RECORD]:
            # accelerate's hooks may have come or gone since, and then the forward has moved.
            candidates = _FORWARDS if attribute in _FORWARDS else (attribute,)
            holder = next((c for c in candidates if layer.__dict__.get(c) == new), None)
            if holder is None:
                raise RuntimeError(
                    f"cannot restore the layer {name!r}: its {attribute!r} has been replaced by something else "
                    "since use_flash_qla; undo that first"
                )
            holders[holder] = original
        for holder, original in holders.items():
            setattr(layer, holder, original)
        del layer.__dict__[_RECORD]
    elif hasattr(type(layer), _ORIGINAL):
        original = vars(type(layer)).get(_ORIGINAL)
        if original is None:
            raise RuntimeError(
                f"cannot restore the layer {name!r}: its class has been replaced by {type(layer).__name__}, which is "
                "made from flash_qla's, since use_flash_qla; undo that first"
            )
        ours = type(layer).forward
        layer.__class__ = original
        for attribute in _FORWARDS:  # accelerate's hooks keep the method that they found
            if getattr(layer.__dict__.get(attribute), "__func__", None) is ours:
                setattr(layer, attribute, types.MethodType(original.forward, layer))
        if getattr(layer.__dict__.get("forward"), "__func__", None) is original.forward:
            del layer.__dict__["forward"]
    for child_name, norm in layer.named_children():
        if _is_switched(norm):
            _restore_layer(f"{name}.{child_name}", norm)


@functools.cache
def _switched_class(original: type, with_region: bool, /) -> type | None:  # a keyword would be another key of the cache
    """A subclass whose forward calls flash_qla, which passes for the class itself; None where its forward does not call
    _FUNCTION, and it is no norm. All layers of a class share it, and so torch.compile one compilation. with_region:
    calls may run as one op."""
    forward = _forward_of_norm if _is_norm(original) else _with_flash_qla(original.forward)
    if forward is None:
        return None
    if with_region:
        forward = _transformers_layer.with_region(forward, _is_switched, _KEYWORDS)
    attributes = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes |= {_ORIGINAL: original, _REGION: with_region, "forward": forward, "__reduce_ex__": _reduce}
    return type(original)(original.__name__, (original,), attributes)


def _reduce(layer: torch.nn.Module, protocol: int) -> tuple:
    """Lets pickle and copy find the subclass, which has the name of its original."""
    # A class that others have made from the subclass, as FSDP does, is found as they have it.
    switched = next(x for x in type(layer).__mro__ if _ORIGINAL in vars(x))
    make, arguments, *state = super(switched, layer).__reduce_ex__(protocol)
    if type(layer) is not switched:
        return make, arguments, *state
    return _new, (vars(switched)[_ORIGINAL], vars(switched)[_REGION]), *state


def _new(original: type, with_region: bool) -> torch.nn.Module:
    switched = _switched_class(original, with_region)
    return switched.__new__(switched)


@functools.cache
def _with_flash_qla(function: types.FunctionType, decorators: tuple = ()) -> types.FunctionType | None:
    """A copy of `function` that calls flash_qla where `function`, or one that it decorates, calls _FUNCTION.

    None where neither does. The copy keeps the module's globals, in which torch.compile looks names up;
    they gain the names of _RENAMED, and that of the convolution, and lose nothing.

    Parameters
    ----------
    function : FunctionType
        A forward, or a function in the closure of the last of `decorators`.
    decorators : tuple
        The functions between, none of which is entered again.
    """
    code, closure = function.__code__, function.__closure__
    if _FUNCTION in code.co_names:
        functions, renamed = function.__globals__, dict(_RENAMED)
        functions.update({_RENAMED[name]: replacement for name, replacement in _BY_FUNCTION.items()})
        convolution = functions.get(_CONVOLUTION) if _CONVOLUTION in code.co_names else None
        if getattr(convolution, "__module__", None) == function.__module__:  # nothing has taken its place
            renamed[_CONVOLUTION] = "flash_qla_causal_conv1d"
            functions[renamed[_CONVOLUTION]] = functools.partial(causal_conv1d, convolution)
        code = code.replace(co_names=tuple(renamed.get(name, name) for name in code.co_names))
    else:
        decorators += (function,)
        closure = tuple(_cell_with_flash_qla(cell, decorators) for cell in closure or ())
        if closure == (function.__closure__ or ()):
            return None
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def _cell_with_flash_qla(cell: types.CellType, decorators: tuple) -> types.CellType:
    """A cell with the copy of the function in `cell`, or `cell` itself where there is nothing to change."""
    try:
        inner = cell.cell_contents
    except ValueError:  # an empty cell
        return cell
    if not inspect.isfunction(inner) or inner in decorators:
        return cell
    copy = _with_flash_qla(inner, decorators)
    return cell if copy is None else types.CellType(copy)


def _transformers_version() -> str:
    return getattr(sys.modules.get("transformers"), "__version__", "not imported")
