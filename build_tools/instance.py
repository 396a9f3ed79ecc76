"""Instance, an entry of kernels_tl/instances.py. This module imports nothing heavy: instances are listed at once."""

from __future__ import annotations

from dataclasses import dataclass, field

# Architectures that an instance is compiled for; a GPU takes the first that it runs. Cubins of sm_80 run on compute
# capability 8.x, of sm_90 on 9.x, of sm_100 on 10.x, of sm_120 on 12.x, and of sm_90a on 9.0 alone. PTX of compute_80
# runs on every GPU from 8.0 on: the driver compiles it for GPUs that no cubin is for.
HOPPER = ("sm_90a",)  # WGMMA, setmaxnreg
EVERY = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_80")
# Kernels that Hopper has others for. There the PTX runs, in tests, which have no other GPU.
PORTABLE = ("sm_80", "sm_100", "sm_120", "compute_80")
SINCE_HOPPER = ("sm_90", "sm_100", "sm_120", "compute_90")  # bulk copies that complete at a barrier
# NVRTC compiles for these. Later architectures take the newest of this PTX: no kernel uses what they have more.
PTX_OF = {"sm_80": "compute_80", "sm_90": "compute_90", "sm_90a": "compute_90a"}

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8": "fp8"}


@dataclass(frozen=True)
class Instance:
    """One compiled variant of a kernel.

    All instances of a kernel have the same parameter names, with values of the same type. The C++ function of the
    kernel selects an instance by them.

    Attributes:
        module: "<folder>.<kernel>" for kernels_tl/<folder>/<kernel>.py, which has the function <kernel>(**params).
        params: arguments of that function, str, int or bool.
        architectures: HOPPER, EVERY, PORTABLE or SINCE_HOPPER.
        spill_budget: bytes of spilled registers (stores + loads) that the build accepts on Hopper, where the kernels
            are measured, or else on Ampere.
        facts: what the host asks of the instance, int or bool: facts_of(params) in C++. All instances of a kernel have
            the same names.
    """

    module: str
    params: dict[str, str | int | bool] = field(default_factory=dict)
    architectures: tuple[str, ...] = HOPPER
    spill_budget: int = 0
    facts: dict[str, int | bool] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def cubins(self) -> dict[str, str]:
        """Each architecture with a cubin, and that of the PTX it is made of."""
        cubins, newest = {}, ""
        for architecture in self.architectures:
            if architecture.startswith("sm_"):
                cubins[architecture] = newest = PTX_OF.get(architecture, newest)
        return cubins

    @property
    def measured(self) -> str:
        """The architecture whose spills the budget is for."""
        return next(arch for arch in ("sm_90a", "sm_90", "sm_80") if arch in self.architectures)

    @property
    def name(self) -> str:
        """A valid C identifier and file name, such as chunk_forward_bf16_K128_value_tile64."""
        return "_".join([self.kernel, *(_word(key, value) for key, value in self.params.items())])


def _word(key: str, value: str | int | bool) -> str:
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    if isinstance(value, int):
        return f"{key}{value}"
    return SHORT_DTYPES.get(value, value)
