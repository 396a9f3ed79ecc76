"""Autograd of the ops.

chunk_gated_delta_rule and chunk_gated_delta_rule_fwd have one formula, the op chunk_gated_delta_rule_bwd;
chunk_gated_delta_rule_packed, causal_conv1d, gated_rms_norm and gated_delta_net have the ops of their names with _bwd.
Autograd saves the inputs and nothing else, but for o of gated_delta_net. The other ops have no derivatives: the results
of the backward's ops do not require gradients, nor do those of begin and finish, from which flash_qla/cp/passes.py
builds a function that has gradients.
"""

import operator

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_qla.ops import schemas

_library = torch.library.Library("flash_qla", "FRAGMENT")  # the registrations live as long as this object


def _items(*indices):
    """operator.itemgetter, whose result is a tuple for one index too."""
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda items: tuple(items[i] for i in indices)


class _Formula:
    """A backward: its op, and which arguments of a forward it takes.

    forward            the forward's name, for messages
    tensors, options   names of the arguments that it shares with the forward; autograd keeps the tensors
    saved_results      names of the forward's results that it takes; autograd keeps these too
    differentiated     names of those that have gradients, in the order of the results
    results            the forward's results that have gradients, and the names of these; a call may have only the
                       first one
    arguments_of       its arguments, from (*tensors, *saved_results, *options, *gradients of `results`, None)
    """

    def __init__(self, op, forward, differentiated, results):
        self.op, self.forward, self.differentiated, self.results = op, forward._opname, differentiated, results
        names = [x.name for x in op._schema.arguments]
        if "g_raw" in names:  # the g of the forward; this op's own g is another's result, and None here
            names[names.index("g")], names[names.index("g_raw")] = None, "g"
        shared = [x for x in forward._schema.arguments if x.name in names]
        self.tensors = [x.name for x in shared if "Tensor" in str(x.type)]
        self.options = [x.name for x in shared if x.name not in self.tensors]
        self.saved_results = [x.name for x in forward._schema.returns if x.name in names]
        inputs = (*self.tensors, *self.saved_results, *self.options, *results.values())
        self.arguments_of = operator.itemgetter(*(inputs.index(x) if x in inputs else len(inputs) for x in names))


_GATES_AND_STATE = ("beta", "g", "initial_state", "A_log", "dt_bias")
_RESULTS = {"o": "do", "final_state": "dht"}
_BACKWARD = _Formula(schemas.backward, schemas.forward, ("q", "k", "v", *_GATES_AND_STATE), _RESULTS)
_BACKWARD_PACKED = _Formula(schemas.backward_packed, schemas.forward_packed, ("mixed_qkv", *_GATES_AND_STATE), _RESULTS)
_BACKWARD_NORM = _Formula(schemas.norm_backward, schemas.norm, ("o", "z", "weight"), {"y": "dy"})
_BACKWARD_CONVOLUTION = _Formula(
    schemas.convolution_backward,
    schemas.convolution,
    ("x", "weight", "bias", "initial_state"),
    {"y": "dy", "final_state": "dht"},
)
_BACKWARD_REGION = _Formula(
    schemas.region_backward,
    schemas.region,
    (
        *("mixed", "z", "a", "b", "conv_weight", "conv_bias", "norm_weight"),
        *("A_log", "dt_bias", "initial_state", "initial_window"),
    ),
    {"y": "dy", "final_state": "dht", "final_window": "dwindow"},
)


class _Function(torch.autograd.function._SingleLevelFunction):
    """torch.autograd.Function at one level of torch.func's transforms.

    The dispatcher calls autograd once at each level. The apply of torch.autograd.Function would go through all levels
    by itself.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


def _apply(function, *args):
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


class _Derivable(_Function):
    """Hands on the results that have gradients, as functions of the tensors that have gradients.

    Autograd looks for these tensors among the arguments. It converts each gradient to the dtype of its tensor.
    """

    @staticmethod
    def forward(ctx, formula, results, tensors, options, *differentiated):
        ctx.save_for_backward(*tensors)
        ctx.formula, ctx.options, ctx.shape = formula, options, results[0].shape
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, *gradients):
        if all(x is None for x in gradients):
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        first, *others = gradients
        first = tensors[0].new_zeros(ctx.shape) if first is None else first
        others += [None] * (len(ctx.formula.results) - len(gradients) + 1)
        results = call(ctx.formula.op, *ctx.formula.arguments_of((*tensors, *ctx.options, first, *others)))
        needed = zip(results, ctx.needs_input_grad[4:], strict=True)
        return (None, None, None, None, *[x if is_needed else None for x, is_needed in needed])

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            f"flash_qla: {ctx.formula.forward} has no forward-mode derivative (torch.func.jvp, jacfwd and hessian, "
            "torch.autograd.forward_ad), only gradients (torch.autograd.grad, torch.func.grad, vjp, jacrev)."
        )


def _register_derivative(op, formula):
    """Has the op note its derivative if gradients are requested or forward-mode AD is on.

    Every call on tensors that are not inference tensors passes here, so the code is as short as PyTorch's own fallback
    for ops without a formula. torch.library.register_autograd costs calls without gradients twice as much.
    """
    redispatch = op._handle.redispatch_boxed  # op.redispatch without its wrapper
    is_grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
    after_autograd, below_autograd = torch._C._after_autograd_keyset, torch._C._AutoDispatchBelowAutograd
    names, defaults = zip(*((x.name, x.default_value) for x in op._schema.arguments), strict=True)
    tensors_of, options_of, differentiated_of = (
        _items(*map(names.index, x)) for x in (formula.tensors, formula.options, formula.differentiated)
    )
    output_final_state = names.index("output_final_state") if "output_final_state" in names else None
    differentiable, saved = (
        [i for i, x in enumerate(op._schema.returns) if x.name in results]
        for results in (formula.results, formula.saved_results)
    )
    is_tuple = len(op._schema.returns) > 1

    def kernel(keyset, *args):
        keyset &= after_autograd
        if not (is_grad_enabled() and any_requires_grad(*args)) and forward_ad._current_level < 0:
            return redispatch(keyset, *args)
        with below_autograd():
            results = redispatch(keyset, *args)
        args += defaults[len(args) :]  # the dispatcher leaves out trailing arguments that have their defaults
        results = list(results) if is_tuple else [results]
        indices = differentiable if output_final_state is None or args[output_final_state] else differentiable[:1]
        tensors = (*tensors_of(args), *(results[i] for i in saved))
        detached = tuple(results[i] for i in indices)
        outputs = _apply(_Derivable, formula, detached, tensors, options_of(args), *differentiated_of(args))
        for i, output in zip(indices, outputs, strict=True):
            results[i] = output
        return tuple(results) if is_tuple else results[0]

    _library.impl(op, kernel, "Autograd", with_keyset=True)


def call(op, *args):
    """op(*args). It skips autograd's part of the op, which is in Python, if no gradients are requested.

    Compilers, modes, transforms of torch.func and forward-mode AD see the usual call. Inference mode skips that part by
    itself.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
    ):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


_register_derivative(schemas.forward, _BACKWARD)
_register_derivative(schemas.forward_low_level, _BACKWARD)
_register_derivative(schemas.forward_packed, _BACKWARD_PACKED)
_register_derivative(schemas.convolution, _BACKWARD_CONVOLUTION)
_register_derivative(schemas.norm, _BACKWARD_NORM)
_register_derivative(schemas.region, _BACKWARD_REGION)


_CreationMeta = torch._C._autograd.CreationMeta

# Ops without derivatives behave as PyTorch's own: their results depend on the inputs that require gradients, and the
# backward raises. Forward-mode AD raises too, because it would treat the results as constants.


class _Underivable(_Function):
    """Hands on the results of an op, as a function of the tensors that require gradients; its backward raises."""

    @staticmethod
    def forward(ctx, op, results, *differentiated):
        ctx.op = op
        return results

    @staticmethod
    def backward(ctx, *grads):
        suffix = " (double backward)" if ctx.op._opname.endswith("_bwd") else ""
        raise NotImplementedError(f"derivative for flash_qla::{ctx.op._opname} is not implemented{suffix}")


class _Written(_Underivable):
    """The same for a tensor that the op has written."""

    @staticmethod
    def forward(ctx, op, written, *differentiated):
        ctx.op = op
        ctx.mark_dirty(written)
        return written


def _written_by(op):
    """A function of the op's arguments that returns the tensors that the op writes."""
    arguments = op._schema.arguments
    indices = [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
    return lambda args: [args[i] for i in indices if i < len(args) and args[i] is not None]


def _check_history(op, written):
    """Raises before the op writes the tensor if autograd could not note afterwards that it has."""
    if any(y is not None and y.is_leaf and y.requires_grad for y in (written, written._base)):
        reason = "a leaf Variable that requires grad is being used in an in-place operation."
    elif written.is_inference():
        reason = "an inference tensor is being written outside of inference mode. Clone it first, or use no_grad()."
    elif written._is_view() and torch._C._autograd._get_creation_meta(written) != _CreationMeta.DEFAULT:
        reason = (
            "a view is being written that autograd does not follow, because it is one of several that a function "
            "returned (unbind, split, chunk), or was made in no_grad mode, inference mode or a custom function. Index "
            "or slice the tensor in grad mode instead, or use no_grad()."
        )
    else:
        return
    raise RuntimeError(f"flash_qla::{op._opname}: {reason}")


def _increment_versions(tensors):
    """Lets autograd see that saved tensors have changed. Inference tensors have no version."""
    for x in tensors:
        if not x.is_inference():
            torch._C._increment_version([x])


def _register_without_derivative(op):
    redispatch = op._handle.redispatch_boxed
    written_by = _written_by(op)

    def with_gradients(keyset, args):
        written = written_by(args)
        for x in written:
            _check_history(op, x)
        differentiated = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch._C._AutoDispatchBelowAutograd():
            results = redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        for x in written:
            _apply(_Written, op, x, *differentiated)  # increments the version too
        return results if results is None else _apply(_Underivable, op, results, *differentiated)

    def autograd(keyset, *args):
        if forward_ad._current_level >= 0:
            for x in args:
                if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise NotImplementedError(f"flash_qla: {op._opname} has no forward-mode derivative.")
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return with_gradients(keyset, args)
        return in_place(keyset, *args)

    def in_place(keyset, *args):
        results = redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        _increment_versions(written_by(args))
        return results

    _library.impl(op, autograd, "Autograd", with_keyset=True)
    if any(x.alias_info is not None and x.alias_info.is_write for x in op._schema.arguments):
        _library.impl(op, in_place, "ADInplaceOrView", with_keyset=True)  # inference mode skips autograd


for _op in (
    *(schemas.backward, schemas.backward_packed),
    *(schemas.convolution_backward, schemas.norm_backward, schemas.region_backward),
    *(schemas.forward_begin, schemas.forward_finish),
    *(schemas.backward_begin, schemas.backward_replay, schemas.backward_finish),
    *(schemas.prefill, schemas.decode, schemas.decode_packed, schemas.decode_buffered),
    *(schemas.convolution_prefill, schemas.region_prefill, schemas.region_decode),
):
    _register_without_derivative(_op)
