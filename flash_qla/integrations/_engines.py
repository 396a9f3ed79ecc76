"""What the integrations of inference engines have in common."""

import importlib
import inspect
from collections.abc import Callable

import torch

import flash_qla


class Replacement:
    """Functions in the place of an engine's own, in the modules whose layers look them up there.

    Args:
        release: of the engine that they were written for, for the messages.
        functions: {module: {name there: function}}; the modules are imported when the functions are first used.
    """

    def __init__(self, release: str, functions: dict[str, dict[str, Callable]]):
        self._release = release
        self._functions = functions
        self._originals = {}

    def use(self) -> None:
        """Put all functions in place, or none.

        Raises:
            ImportError: the engine cannot be imported.
            RuntimeError: it has not such a function, or its arguments are others.
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
        while self._originals:
            (module, name), theirs = self._originals.popitem()
            setattr(module, name, theirs)


def _parameters(function: Callable) -> list[tuple]:
    """Of each argument its name, kind and default; annotations may differ."""
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]


def require(function: str, **arguments: tuple[object, object]) -> None:
    """Refuse what flash_qla does not do.

    Args:
        function: its name, for the message.
        arguments: by name, what came and the one value that is supported; instead of that, torch.Tensor for any tensor.

    Raises:
        NotImplementedError: it names the argument.
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
    """The function of this name for an engine's module: the engines' differ in what nobody's slot is."""

    def fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        initial_state: torch.Tensor,
        out: torch.Tensor,
        ssm_state_indices: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's decoding, one token of each sequence.

        Args:
            mixed_qkv, a, b, A_log, dt_bias, scale, use_qk_l2norm_in_kernel: as those of
                flash_qla.decode_gated_delta_rule_packed, of one token: [B, 2 H_k K + H_v V], [B, H_v] and so on.
            initial_state: the pool, [slots, H_v, V, K], written in place.
            out: where o goes, [B, 1, H_v, V]; zero for nobody.
            ssm_state_indices: the slot of each sequence, [B], int32 or int64.

        Returns:
            out and initial_state.
        """
        o = flash_qla.decode_gated_delta_rule_packed(
            mixed_qkv,
            a,
            b,
            A_log,
            dt_bias,
            initial_state,
            ssm_state_indices,
            scale=scale,
            null_index=null_index,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        return out.copy_(o), initial_state

    function = fused_recurrent_gated_delta_rule_packed_decode
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def number_of_sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
