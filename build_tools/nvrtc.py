"""CUDA C++ -> the code of a GPU (a cubin), by NVRTC."""

from __future__ import annotations

import ctypes
from pathlib import Path

from build_tools.toolchain import ARCH, Toolkit, package_root

PREAMBLE = Path(__file__).resolve().parent / "rtc_include/preamble.h"

# The fixed options; the include paths differ between machines and come on top.
OPTIONS = [
    "-std=c++20",
    f"-arch={ARCH}",
    "-default-device",  # functions without an annotation are the device's
    "--ptxas-options=-v",
    # TileLang declares variables that it does not always use, and annotates defaulted functions; CUDA's headers for the
    # device include what they warn of.
    "--diag-suppress=177,20012,1105",
]


class CompileError(Exception):
    """The message is what the compiler said."""


def compile_source(toolkit: Toolkit, source: Path, include: list[Path]) -> tuple[bytes, str]:
    """The cubin, and what the compiler said."""
    tilelang = package_root("tilelang")
    folders = [PREAMBLE.parent, *include, tilelang / "src", tilelang / "3rdparty/cutlass/include", *toolkit.include]
    options = [*OPTIONS, f"--pre-include={PREAMBLE.name}", *(f"-I{folder}" for folder in folders)]

    nvrtc = ctypes.CDLL(str(toolkit.nvrtc))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int, said: str = "") -> None:
        if status != 0:
            raise CompileError(said.strip() or f"error: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        check(nvrtc[f"nvrtcGet{what}"](program, data))
        return data.raw

    text, name = source.read_bytes(), source.name.encode()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    given = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), given)
    said = read("ProgramLog").rstrip(b"\0").decode()
    check(status, said)
    return read("CUBIN"), said
