"""`python -m flash_qla`: the versions, and last whether this machine's GPUs can run the kernels."""

import argparse
import os
import platform
import re
import sys
from pathlib import Path

import torch

import flash_qla

if flash_qla.__file__ is None or not hasattr(flash_qla, "prefill_gated_delta_rule"):
    sys.exit(
        f"{Path(__file__).parent}/__init__.py is {'missing' if flash_qla.__file__ is None else 'of another package'}: "
        "the published FlashQLA (flash-qla on PyPI) has been installed over this package. "
        "`pip uninstall flash-qla flash-qla-aot`, then install this package again."
    )
import flash_qla_environment

try:
    from flash_qla import _C
except ImportError as error:
    sys.exit(str(error))

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def is_ptx(kernel: _C.Kernel) -> bool:
    return kernel.architecture.startswith("compute_")


def print_kernels() -> None:
    header = (
        "kernel instance",
        "parameters",
        "architecture",
        "threads",
        "registers",
        "spills (B)",
        "stack (B)",
        "shared (KB)",
    )
    rows = [
        (
            kernel.name,
            " ".join(f"{name}={value}" for name, value in kernel.params.items()),
            kernel.architecture,
            str(kernel.threads),
            *(
                ["", "", "", ""]  # the driver compiles it
                if is_ptx(kernel)
                else [
                    str(kernel.registers),
                    str(kernel.spill_bytes),
                    str(kernel.stack_bytes),
                    f"{(kernel.static_shared_bytes + kernel.dynamic_shared_bytes) / 1024:.1f}",
                ]
            ),
        )
        for kernel in _C.kernels()
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        labels = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        figures = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join(labels + figures).rstrip())


def print_driver(version: int) -> None:
    number = re.search(r"\d+\.\d+(\.\d+)?", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    name = number.group() if number else "of unknown number"
    print(f"driver   {name}, supports CUDA {version // 1000}.{version % 1000 // 10}")


def obstacle(gpu: _C.Gpu, driver: int) -> str:
    """The reason why the kernels do not run on this GPU; empty if they do."""
    reason = _C.obstacle(driver, gpu.major, gpu.minor)
    if not reason and torch.version.cuda is None:
        reason = f"PyTorch {torch.__version__} is a CPU build"
    return reason


def kernels_of(gpu: _C.Gpu) -> str:
    """The architectures of the kernels that this GPU gets, and those that it has no code of."""
    kernels = _C.kernels()
    runnable = [kernel for kernel in kernels if _C.runs_on(kernel.architecture, gpu.major, gpu.minor)]
    compiled = sorted({kernel.architecture for kernel in runnable if not is_ptx(kernel)})
    missing = {kernel.kernel for kernel in kernels} - {kernel.kernel for kernel in runnable}
    text = "the kernels run, by code for " + ", ".join(compiled)
    if not compiled:
        text = "the kernels run, by PTX that the driver compiles when a kernel is first launched, and then caches"
    return text + (f", except {', '.join(sorted(missing))}" if missing else "")


def print_gpus() -> None:
    driver = _C.driver_cuda_version()
    if driver == 0:
        print("GPU      no NVIDIA driver found; CPU tensors run on the C++ CPU implementation")
        return
    print_driver(driver)
    gpus = _C.gpus()
    if not gpus:
        reason = _C.obstacle(driver, 9, 0) or "none found"
        print(f"GPU      {reason}; CPU tensors run on the C++ CPU implementation")
    for index, gpu in enumerate(gpus):
        reason = obstacle(gpu, driver)
        verdict = f"the kernels do not run: {reason}" if reason else kernels_of(gpu)
        print(f"GPU {index}    {gpu.name}, {gpu.sm_count} SMs: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m flash_qla", description=__doc__.partition("`: ")[2])
    parser.add_argument("--kernels", action="store_true", help="list every compiled kernel too")
    parser.add_argument("--library", action="store_true", help="print the path of libflash_qla.so, and nothing else")
    args = parser.parse_args()

    package = Path(flash_qla.__file__).parent
    if args.library:
        print(package / "libflash_qla.so")
        return
    if args.kernels:
        print_kernels()
        print()
    print(f"package  flash_qla {flash_qla.__version__} in {package}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    print(f"runs in  PyTorch {torch.__version__} ({cuda}), Python {platform.python_version()}")
    info, kernels = _C.build_info(), {x.name for x in _C.kernels()}
    print(
        f"built    version {info.version}, {len(kernels)} kernels by TileLang {info.tilelang} and CUDA {info.cuda}"
        f", C++ for the stable ABI of PyTorch {info.torch_target} and newer"
    )
    for line in flash_qla_environment.describe():
        print(f"variable {line}")
    print_gpus()


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
