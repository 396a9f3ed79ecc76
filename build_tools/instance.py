"""What kernels_tl/instances.py is made of. Imports nothing heavy, so listing instances is instant."""

from __future__ import annotations

from dataclasses import dataclass, field

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Instance:
    """One compiled variant of a kernel: of kernels_tl/<folder>/<kernel>.py, for which `module` is "<folder>.<kernel>",
    the function <kernel>(**params).

    All instances of a kernel carry the same parameter names, with values of the same type (str, int
    or bool); the C++ accessor selects by them. A kernel that needs more registers than it has
    states how many bytes of spills (stores + loads) are acceptable.
    """

    module: str
    params: dict[str, str | int | bool] = field(default_factory=dict)
    spill_budget: int = 0

    @property
    def kernel(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def name(self) -> str:
        """E.g. chunk_forward_bf16_K128_value_tile64; a valid C identifier and file name."""
        return "_".join([self.kernel, *(_word(key, value) for key, value in self.params.items())])


def _word(key: str, value: str | int | bool) -> str:
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    if isinstance(value, int):
        return f"{key}{value}"
    return SHORT_DTYPES.get(value, value)
