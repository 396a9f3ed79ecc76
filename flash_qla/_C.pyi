# The module of csrc/python/bindings.cpp, which has the docstrings.
from typing import Final, TypedDict

from typing_extensions import Unpack

class Kernel:
    name: Final[str]
    kernel: Final[str]
    params: Final[dict[str, str | int | bool]]
    architecture: Final[str]
    threads: Final[int]
    registers: Final[int]
    static_shared_bytes: Final[int]
    dynamic_shared_bytes: Final[int]
    spill_bytes: Final[int]
    stack_bytes: Final[int]
    __match_args__ = (
        "name",
        "kernel",
        "params",
        "architecture",
        "threads",
        "registers",
        "static_shared_bytes",
        "dynamic_shared_bytes",
        "spill_bytes",
        "stack_bytes",
    )

class BuildInfo:
    version: Final[str]
    tilelang: Final[str]
    cuda: Final[str]
    torch_target: Final[str]
    __match_args__ = ("version", "tilelang", "cuda", "torch_target")

class Gpu:
    name: Final[str]
    major: Final[int]
    minor: Final[int]
    sm_count: Final[int]
    sm_mhz: Final[int]
    memory_gb_s: Final[int]
    __match_args__ = ("name", "major", "minor", "sm_count", "sm_mhz", "memory_gb_s")

class Dispatch:
    segment_chunks: Final[int]
    cut_above: Final[int]
    segments: Final[int]
    heads_per_cta: Final[int]
    planned: Final[bool]
    workspace_bytes: Final[int]
    predicted_us: Final[float]
    __match_args__ = (
        "segment_chunks",
        "cut_above",
        "segments",
        "heads_per_cta",
        "planned",
        "workspace_bytes",
        "predicted_us",
    )

class ForwardDispatch(Dispatch):
    fused: Final[bool]
    value_tile: Final[int]
    long_tile: Final[int]
    ctas: Final[int]
    __match_args__ = (
        "segment_chunks",
        "cut_above",
        "segments",
        "heads_per_cta",
        "planned",
        "workspace_bytes",
        "predicted_us",
        "fused",
        "value_tile",
        "long_tile",
        "ctas",
    )

class BackwardDispatch(Dispatch): ...

class _Options(TypedDict, total=False):
    sm_count: int
    sm_mhz: int
    memory_gb_s: int
    auto_cp: bool
    varlen: bool
    max_seqlen: int
    use_qk_l2norm: bool
    K: int
    V: int
    fp16: bool
    over_ranks: bool
    portable: bool

class _ForwardOptions(_Options, total=False):
    low_level: bool
    output_h: bool
    batch_invariant: bool
    checkpoint_every: int
    resumable: bool
    float8: bool

class _BackwardOptions(_Options, total=False):
    activations: bool

class Override:
    value_tile: Final[int]
    segment_chunks: Final[int]
    fused: Final[int]
    cut_above: Final[int]
    long_tile: Final[int]
    __match_args__ = ("value_tile", "segment_chunks", "fused", "cut_above", "long_tile")
    def __init__(
        self, *, value_tile: int = 0, segment_chunks: int = -1, fused: int = -1, cut_above: int = 0, long_tile: int = 0
    ) -> None: ...

def kernels() -> list[Kernel]: ...
def build_info() -> BuildInfo: ...
def runs_on(architecture: str, major: int, minor: int) -> bool: ...
def driver_cuda_version() -> int: ...
def gpus() -> list[Gpu]: ...
def cards() -> dict[str, dict[str, int]]: ...
def obstacle(driver_cuda_version: int, major: int, minor: int) -> str: ...
def refusal(driver_cuda_version: int) -> str: ...
def forward_dispatch(
    B: int, T: int, N: int, H_k: int, H_v: int, **options: Unpack[_ForwardOptions]
) -> ForwardDispatch: ...
def backward_dispatch(
    B: int, T: int, N: int, H_k: int, H_v: int, **options: Unpack[_BackwardOptions]
) -> BackwardDispatch: ...
def exchange_overrides(
    forward: Override | None, backward: Override | None, portable: bool | None
) -> tuple[Override, Override, bool]: ...
