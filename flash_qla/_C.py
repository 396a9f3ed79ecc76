"""The compiled kernels of flash_qla, how they were built, and whether they run here. The ops do not need it.

It asks libflash_qla.so, see csrc/bindings.cpp, through ctypes: a compiled module would be for one version of Python.
"""

import ctypes
import json
import operator

from flash_qla.ops import _LIBRARY

_library = ctypes.CDLL(str(_LIBRARY))


def _ask(question: str, *arguments: int):
    function = getattr(_library, f"flash_qla_{question}")
    function.restype = ctypes.c_char_p
    answer = json.loads(function(*(ctypes.c_int64(operator.index(x)) for x in arguments)))
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["result"]


def kernels() -> list[dict]:
    """One dict per kernel instance: name, kernel, params, threads, registers, static_shared_bytes,
    dynamic_shared_bytes, spill_bytes, stack_bytes, as in csrc/registry.h."""
    return _ask("kernels")


def build_info() -> dict:
    """Versions: of the package (version), tilelang, nvcc, the GPU architecture (arch), and the oldest PyTorch whose
    stable ABI has what the library uses (torch_target)."""
    return _ask("build_info")


def driver_cuda_version() -> int:
    """CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver."""
    return _ask("driver_cuda_version")


def gpus() -> list[dict]:
    """One dict per GPU: name, compute capability (major, minor), sm_count."""
    return _ask("gpus")


def obstacle(driver_cuda_version: int, major: int, minor: int) -> str:
    """Why the kernels do not run under such a driver on a GPU of such a compute capability, as a sentence; empty if
    they do."""
    return _ask("obstacle", driver_cuda_version, major, minor)


def forward_dispatch(
    B: int,
    T: int,
    N: int,
    H_k: int,
    H_v: int,
    sm_count: int = 132,
    auto_cp: bool = True,
    varlen: bool = True,
    low_level: bool = False,
    use_qk_l2norm: bool = False,
    output_h: bool = False,
    fp16: bool = False,
) -> dict:
    """What a forward call of these shapes launches on a GPU with that many SMs: value_tile, segment_chunks (0: no
    context parallelism), cut_above (where no sequence has more chunks than that, the device cuts none) and whole_tile
    (the value tile that it then takes), fused (1 where one kernel does it all), segments and ctas (upper bounds when
    varlen), heads_per_cta (of chunk_matrices), workspace_bytes, predicted_us. N is the number of sequences; low_level
    asks for chunk_gated_delta_rule_fwd, which returns A, too; use_qk_l2norm for the l2norm inside; output_h and fp16
    say that it is to return h and what dtype q has: the one kernel makes no h, and A in bf16 only. Raises ValueError
    for a shape that no call has."""
    flags = (auto_cp, varlen, low_level, use_qk_l2norm, output_h, fp16)
    return _ask("forward_dispatch", B, T, N, H_k, H_v, sm_count, *flags)


def override_forward_dispatch(
    value_tile: int = 0, segment_chunks: int = -1, fused: int = -1, cut_above: int = 0, whole_tile: int = 0
) -> None:
    """For tests and experts: what forward_dispatch decides from now on in this process. The defaults leave it to the
    cost model; segment_chunks = 0 switches context parallelism off; fused = 0 or 1 leaves out or takes the fused kernel
    wherever it can serve a call; cut_above goes with a number of segment_chunks, and 0 cuts whatever is longer than
    one; whole_tile goes with cut_above, and 0 is the same as value_tile. Raises ValueError for a mode that there is
    not."""
    _ask("override_forward_dispatch", value_tile, segment_chunks, fused, cut_above, whole_tile)
