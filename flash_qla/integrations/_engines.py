"""Shared by the integrations whose functions replace those of other packages."""

import importlib
import inspect
from collections.abc import Callable

import torch

import flash_qla

_NOTHING = object()  # a module has no such name


class Replacement:
    """Functions that replace an engine's own in the modules whose layers call them.

    Args:
        release: the engine and the release that the functions were written for; messages name it.
        functions: {module: {name there: function}}. use() imports the modules.
        unchecked: the same, for functions that the engine takes from another package, of any release or not installed.
            Only the name must be there.
        absent: {module: {name there: value}}, for names that are None or False because the package of their functions
            is not installed. use() leaves other values as they are.
    """

    def __init__(
        self,
        release: str,
        functions: dict[str, dict[str, Callable]],
        unchecked: dict[str, dict[str, Callable]] | None = None,
        absent: dict[str, dict[str, object]] | None = None,
    ):
        self._release = release
        self._functions = functions
        self._unchecked = unchecked or {}
        self._absent = absent or {}
        self._originals = {}

    def use(self) -> None:
        """Put everything in place, or nothing.

        Raises:
            ImportError: the engine cannot be imported.
            RuntimeError: the engine lacks one of the names, or the arguments of a function are others.
        """
        found = {}
        for group in (self._functions, self._unchecked, self._absent):
            for path, values in group.items():
                module = importlib.import_module(path)
                for name, ours in values.items():
                    theirs = getattr(module, name, _NOTHING)
                    if theirs is _NOTHING or (group is self._functions and not _have_same_parameters(theirs, ours)):
                        raise self._unknown(f"{path}.{name}", theirs, ours)
                    if theirs is not ours and not (group is self._absent and theirs):
                        found[module, name] = theirs, ours
        for (module, name), (theirs, ours) in found.items():
            self._originals[module, name] = theirs
            setattr(module, name, ours)

    def _unknown(self, name: str, theirs: object, ours: object) -> RuntimeError:
        came = inspect.signature(theirs) if callable(theirs) else "nothing"
        expected = inspect.signature(ours) if callable(ours) else "a value"
        return RuntimeError(
            f"{name} is {came}, expected {expected}; flash_qla's function was written for {self._release}"
        )

    def restore(self) -> None:
        """Give the modules their own functions again."""
        while self._originals:
            (module, name), theirs = self._originals.popitem()
            setattr(module, name, theirs)


def _parameters(function: Callable) -> list[tuple]:
    """Name, kind and default of each argument; annotations may differ."""
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]


def _have_same_parameters(theirs: Callable | None, ours: Callable) -> bool:
    return theirs is not None and _parameters(theirs) == _parameters(ours)


def require(function: str, **arguments: tuple[object, object]) -> None:
    """Refuse arguments that flash_qla does not support.

    Args:
        function: name of the function, for the message.
        arguments: name -> (what came, the one supported value); torch.Tensor supports any tensor.

    Raises:
        NotImplementedError: an argument has another value; the message names it.
    """
    for name, (came, supported) in arguments.items():
        if isinstance(came, torch.Tensor):
            if supported is torch.Tensor:
                continue
            came = "a tensor"
        elif supported is torch.Tensor:
            supported = "a tensor"
        if came != supported:
            raise NotImplementedError(f"{function}: {name} is {came}, flash_qla supports only {supported}")


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


def number_of_sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """N, from shapes alone."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
