"""Code shared by the integrations that replace functions of other packages."""

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Collection
from types import ModuleType

import torch

import flash_qla
from flash_qla.integrations._gpus import REASON, keeps_theirs
from flash_qla.ops.later import when_imported

_MISSING = object()  # a module has no such name
_OURS = "_flash_qla"  # attribute of a function that may call the engine's own: flash_qla's


class Replacement:
    """Functions that replace an engine's own in the modules whose layers call them. Tensors on some GPUs still go to
    the engine's own functions (_gpus.py).

    Args:
        releases: the engine and the releases that the functions were written for; messages name them.
        functions: {module: {name there: function}}. If a name's signature has changed, a tuple of functions, one for
            each signature, the newest first. The engine gets the function that has its own function's signature. None
            as the last element: earlier releases do not have the name, and stay as they are.
        unchecked: the same, for functions that the engine takes from another package, which may have any release or not
            be installed. Signatures are not compared, but the name must be there.
        absent: {module: {name there: value}}, for names that are None or False because the package of their functions
            is not installed. use() leaves other values as they are.
        methods: {module: {"Class.method": function of the engine's own method that returns ours}}. If a release has not
            all of a module's methods, with the arguments of ours, it keeps its own, and a line of its log says so. A
            module without functions is not imported: its methods are replaced when the engine imports it.
        package: the engine's name on PyPI.
        run: releases of it that have run on these functions. A line of the engine's log names any other release.
    """

    def __init__(
        self,
        releases: str,
        functions: dict[str, dict[str, Callable | tuple[Callable | None, ...]]],
        unchecked: dict[str, dict[str, Callable]] | None = None,
        absent: dict[str, dict[str, object]] | None = None,
        methods: dict[str, dict[str, Callable]] | None = None,
        package: str | None = None,
        run: Collection[str] = (),
    ):
        self._releases = releases
        self.functions = {
            path: {name: x if isinstance(x, tuple) else (x,) for name, x in names.items()}
            for path, names in functions.items()
        }
        self._unchecked = unchecked or {}
        self._absent = absent or {}
        self._methods = methods or {}
        self._package, self.run = package, run
        self._originals = {}
        self._logged = set()
        self._is_in_use = self._is_waiting = False

    def use(self) -> None:
        """Import the modules, and put everything in place, or nothing.

        Raises:
            ImportError: the engine cannot be imported.
            RuntimeError: the engine lacks one of the names, or its function has other arguments.
        """
        paths = dict.fromkeys((*self.functions, *self._unchecked, *self._absent))
        choices = [self._choose(importlib.import_module(path)) for path in paths]
        for chosen in choices:
            self._install(chosen)
        self._is_in_use = True
        late_modules = [path for path in self._methods if path not in paths]
        self._when_imported(late_modules, lambda module: self._install(self._choose(module)))

    def use_when_imported(self, report: Callable[[str, Exception | None], None]) -> None:
        """Put the functions of a module in place as soon as the engine has imported it.

        Args:
            report: called for each module, with the names of its functions, and with the error that use() would raise,
                or None. After an error the module keeps its own functions.
        """

        def use(module: ModuleType) -> None:
            error, path = None, module.__name__
            try:
                chosen = self._choose(module)
                self._install(chosen)
            except Exception as e:
                error = e
            if path in self.functions:
                report(f"{', '.join(self.functions[path])} of {path}", error)
            elif error or chosen:
                report(f"{', '.join(self._methods[path])} of {path}", error)

        self._is_in_use = True
        self._when_imported([*dict.fromkeys((*self.functions, *self._methods))], use)

    def _when_imported(self, paths: list[str], function: Callable[[ModuleType], None]) -> None:
        """Call function(module) for each of these modules as soon as it is imported, unless restore() was called."""

        def use(module: ModuleType) -> None:
            if self._is_in_use:
                function(module)

        for path in paths:
            if path in sys.modules or not self._is_waiting:
                when_imported(path, use, f"{path} does not call flash_qla")
        self._is_waiting = True

    def _choose(self, module: ModuleType) -> list[tuple]:
        """(module, name, the engine's value, our value) for each name that does not have our value yet."""
        path, chosen = module.__name__, []
        for name, functions in self.functions.get(path, {}).items():
            theirs = getattr(module, name, _MISSING)
            if getattr(theirs, _OURS, theirs) in functions or (theirs is _MISSING and None in functions):
                continue
            ours = [x for x in functions if x and callable(theirs) and _parameters(x) == _parameters(theirs)]
            if not ours:
                raise self._mismatch(f"{path}.{name}", theirs, functions[0])
            chosen.append((module, name, theirs, ours[0]))
        for group in (self._unchecked, self._absent):
            for name, ours in group.get(path, {}).items():
                theirs = getattr(module, name, _MISSING)
                if theirs is _MISSING:
                    raise self._mismatch(f"{path}.{name}", theirs, ours)
                if getattr(theirs, _OURS, theirs) is not ours and not (group is self._absent and theirs):
                    chosen.append((module, name, theirs, ours))
        return chosen + self._choose_methods(module)

    def _choose_methods(self, module: ModuleType) -> list[tuple]:
        """The same for methods, with their class in place of the module."""
        chosen = []
        for name, make in self._methods.get(module.__name__, {}).items():
            class_name, _, method = name.partition(".")
            owner = getattr(module, class_name, None)
            if (owner, method) in self._originals:
                continue
            theirs = vars(owner).get(method) if isinstance(owner, type) else None
            ours = make(theirs) if callable(theirs) else None
            if ours is None or _parameters(ours, follow_wrapped=False) != _parameters(theirs):
                log = logging.getLogger(f"{self._package}.flash_qla")
                difference = f"has arguments {inspect.signature(theirs)}" if callable(theirs) else "is not there"
                log.info("%s keeps its own layer: %s.%s %s", self._package, module.__name__, name, difference)
                return []
            chosen.append((owner, method, theirs, ours))
        return chosen

    def _install(self, chosen: list[tuple]) -> None:
        if chosen and not self._originals:
            self._warn_of_untested_release()
        for module, name, theirs, ours in chosen:
            self._originals[module, name] = theirs
            is_function = callable(theirs) and not isinstance(module, type)  # a method looks at the GPU itself
            setattr(module, name, self._dispatch_by_gpu(name, ours, theirs) if is_function else ours)

    def _dispatch_by_gpu(self, name: str, ours: Callable, theirs: Callable) -> Callable:
        """`ours`, but `theirs` for tensors on GPUs that keep theirs."""

        @functools.wraps(ours)
        def function(*args, **kwargs):
            tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
            if tensor is None or not keeps_theirs(tensor.device):
                return ours(*args, **kwargs)
            self._log_once(name, REASON)
            return theirs(*args, **kwargs)

        setattr(function, _OURS, ours)
        return function

    def _warn_of_untested_release(self) -> None:
        if self._package is None:
            return
        try:
            release = importlib.metadata.version(self._package)
        except importlib.metadata.PackageNotFoundError:
            release = "of an unknown release"
        if release.partition("+")[0] not in self.run:
            logging.getLogger(f"{self._package}.flash_qla").warning(
                "flash_qla has not been run in %s %s, only in %s; their functions have the same arguments",
                *(self._package, release, ", ".join(self.run)),
            )

    def call_theirs(self, name: str, reason: str, *args: object, **kwargs: object) -> object:
        """Call the engine's own function, in whose place ours is; once for each reason, a line of the log says why.

        Raises:
            NotImplementedError: the function is not in use.
        """
        theirs = next((x for (_, replaced), x in self._originals.items() if replaced == name), None)
        if theirs is None:
            raise NotImplementedError(f"{name}: {reason}")
        self._log_once(name, reason)
        return theirs(*args, **kwargs)

    def _log_once(self, name: str, reason: str) -> None:
        if (name, reason) not in self._logged:
            self._logged.add((name, reason))
            package = self._package or self._releases.partition(" ")[0]
            logging.getLogger(f"{package}.flash_qla").info("%s runs its own %s: %s", package, name, reason)

    def _mismatch(self, name: str, theirs: object, ours: object) -> RuntimeError:
        got = inspect.signature(theirs) if callable(theirs) else "nothing"
        expected = inspect.signature(ours) if callable(ours) else "a value"
        return RuntimeError(
            f"{name} is {got}, expected {expected}; flash_qla's function was written for {self._releases}"
        )

    def restore(self) -> None:
        """Give the modules their own functions again."""
        self._is_in_use = False
        while self._originals:
            (module, name), theirs = self._originals.popitem()
            setattr(module, name, theirs)


def earlier(function: Callable, *lacks: str) -> Callable:
    """`function` with the signature of earlier releases of the engine, which lacks these optional parameters."""
    signature = inspect.signature(function)
    names = [x for x in signature.parameters if x not in lacks]

    @functools.wraps(function)
    def earlier_function(*args, **kwargs):
        return function(**dict(zip(names[: len(args)], args, strict=True)), **kwargs)

    earlier_function.__signature__ = signature.replace(parameters=[signature.parameters[x] for x in names])
    return earlier_function


def _parameters(function: Callable, follow_wrapped: bool = True) -> list[tuple]:
    """Name, kind and default of each argument; annotations may differ."""
    signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    return [(x.name, x.kind, x.default) for x in signature.parameters.values()]


def require(function: str, **arguments: tuple[object, object]) -> None:
    """Refuse arguments that flash_qla does not support.

    Args:
        function: name of the function, for the message.
        arguments: name -> (the value, the one supported value); torch.Tensor supports any tensor.

    Raises:
        NotImplementedError: an argument has another value; the message names it.
    """
    for name, (got, supported) in arguments.items():
        if isinstance(got, torch.Tensor):
            if supported is torch.Tensor:
                continue
            got = "a tensor"
        elif supported is torch.Tensor:
            supported = "a tensor"
        if got != supported:
            raise NotImplementedError(f"{function}: {name} is {got}, flash_qla supports only {supported}")


def packed_decode(module: str, null_index: int) -> Callable:
    """The engine's fused_recurrent_gated_delta_rule_packed_decode, as a function of `module`.

    The engines have different null slots: a sequence whose slot is at most null_index has no state.
    """

    def fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False
    ):
        """The engine's decoding of one token of each sequence.

        Args:
            mixed_qkv, a, b, A_log, dt_bias, scale, use_qk_l2norm_in_kernel: as those of
                flash_qla.decode_gated_delta_rule_packed, for one token: [B, 2 H_k K + H_v V], [B, H_v] and so on.
            initial_state: the pool, [slots, H_v, V, K], written in place.
            out: memory for o, [B, 1, H_v, V]; zero for a sequence without a slot.
            ssm_state_indices: slot of each sequence, [B], int32 or int64.

        Returns:
            out and initial_state.
        """
        flash_qla.decode_gated_delta_rule_packed(
            mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, scale, null_index,
            use_qk_l2norm_in_kernel, out=out,
        )  # fmt: skip
        return out, initial_state

    function = fused_recurrent_gated_delta_rule_packed_decode
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def not_convolved(x, weight, bias, conv_states, query_start_loc, cache_indices, activation) -> str | None:
    """Why prefill_convolution does not take a call of an engine's causal_conv1d_fn, or None."""
    tensors = {"conv_states": conv_states, "query_start_loc": query_start_loc, "cache_indices": cache_indices}
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing:
        return f"{missing[0]} is None"
    width, columns = weight.shape[-1], conv_states.shape[-1]
    if x.dim() != 2 or cache_indices.dim() != 1:
        return f"x has {x.dim()} dimensions and cache_indices {cache_indices.dim()}, expected 2 and 1"
    if not 2 <= width <= 4 or columns != width - 1:  # with drafts windows have more columns
        return f"windows have {columns} columns for {width} taps, expected one less than 2 to 4 taps"
    if activation not in ("silu", "swish", None):
        return f"activation is {activation!r}"
    is_supported = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    other_dtypes = {y.dtype for y in (weight, bias, conv_states) if y is not None} - {x.dtype, torch.float32}
    if is_supported and not other_dtypes:
        return None
    return f"x has {x.dtype}, the others {', '.join(map(str, other_dtypes))}"


def prefill_convolution(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, null_index
):
    """flash_qla.prefill_causal_conv1d on an engine's tensors, channels before tokens: x and the result [D, T]."""
    N = query_start_loc.shape[0] - 1
    y = flash_qla.prefill_causal_conv1d(
        x.T[None], weight, bias, conv_states, cache_indices[:N], activation=activation, cu_seqlens=query_start_loc,
        has_initial_state=None if has_initial_state is None else has_initial_state[:N], null_index=null_index,
    )  # fmt: skip
    return y[0].T


def heads_of(mixed_qkv: torch.Tensor, H_k: int, K: int, V: int) -> tuple[torch.Tensor, ...]:
    """q, k and v [.., heads, channels], as views of [.., 2 H_k K + H_v V]."""
    q, k, v = mixed_qkv.split([H_k * K, H_k * K, mixed_qkv.shape[-1] - 2 * H_k * K], -1)
    return q.unflatten(-1, (H_k, K)), k.unflatten(-1, (H_k, K)), v.unflatten(-1, (-1, V))


def number_of_sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """N, from shapes alone."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def gates_of(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The gates [B, T, H_v] of the tokens of v, from [rows, H_v] or [B, T, H_v].

    There may be more rows than tokens, because an engine may pass those of all tokens of a step with some tokens alone.
    Like the engine's kernels, take the first ones.
    """
    B, T = v.shape[:2]
    return x.flatten(0, -2)[: B * T].unflatten(0, (B, -1))
