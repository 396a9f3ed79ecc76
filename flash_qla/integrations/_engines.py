"""Shared by the integrations of inference engines."""

import importlib
import inspect
from collections.abc import Callable

import torch

import flash_qla


class Replacement:
    """Functions that replace an engine's own in the modules whose layers call them.

    Args:
        release: the engine and the release that the functions were written for; messages name it.
        functions: {module: {name there: function}}. use() imports the modules.
    """

    def __init__(self, release: str, functions: dict[str, dict[str, Callable]]):
        self._release = release
        self._functions = functions
        self._originals = {}

    def use(self) -> None:
        """Put all functions in place, or none.

        Raises:
            ImportError: the engine cannot be imported.
            RuntimeError: the engine lacks one of the functions, or its arguments are others.
        """
        found = {}
        for path, functions in self._functions.items():
            module = importlib.import_module(path)
            for name, ours in functions.items():
                theirs = getattr(module, name, None)
                if theirs is ours:
                    continue
                if theirs is None or _parameters(theirs) != _parameters(ours):
                    came = "nothing" if theirs is None else inspect.signature(theirs)
                    raise RuntimeError(
                        f"{path}.{name} is {came}, expected {inspect.signature(ours)}; flash_qla's function was "
                        f"written for {self._release}"
                    )
                found[module, name] = theirs, ours
        for (module, name), (theirs, ours) in found.items():
            self._originals[module, name] = theirs
            setattr(module, name, ours)

    def restore(self) -> None:
        """Give the modules their own functions again."""
        while self._originals:
            (module, name), theirs = self._originals.popitem()
            setattr(module, name, theirs)


def _parameters(function: Callable) -> list[tuple]:
    """Name, kind and default of each argument; annotations may differ."""
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]


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
