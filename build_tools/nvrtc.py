"""CUDA C++ -> PTX by NVRTC, PTX -> cubin by ptxas."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from build_tools import tilelang_patches as patches
from build_tools.toolchain import Toolkit, package_root

PREAMBLE = patches.HOST_HEADERS / "preamble.h"
PRECOMPILED_HEAP = 512 << 20  # bytes that the precompiled preamble may take; it takes 247 MiB

# Options that are the same on all machines; include paths are added to them.
OPTIONS = [
    "-std=c++20",
    "-default-device",  # functions without an annotation are the device's
    f"--diag-suppress={','.join(map(str, patches.SUPPRESSED_WARNINGS))}",
    f"--pre-include={PREAMBLE.name}",
]

# Ends the precompiled preamble. #line 1 keeps the line numbers of the source after it.
HEADERS_END = "#pragma nv_hdrstop\n#line 1\n"

# The declaration of a variable in PTX: its name, and perhaps its size and value
VARIABLE = re.compile(
    r"^(?:\.visible |\.weak )?\.(?:global|const) [^;=]*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;\n", re.MULTILINE
)


class CompileError(Exception):
    """The message is the compiler's output."""


class Compiler:
    """Compiles sources that have the same folders of headers."""

    def __init__(self, toolkit: Toolkit, include: list[Path]):
        tilelang = package_root("tilelang")
        folders = [PREAMBLE.parent, *include, tilelang / "src", tilelang / "3rdparty/cutlass/include", *toolkit.include]
        self.options = [*OPTIONS, *(f"-I{folder}" for folder in folders)]
        self.precompiled: dict[str, Path] = {}  # the preamble by architecture
        self.ptxas = toolkit.ptxas
        self.library = ctypes.CDLL(str(toolkit.nvrtc))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def precompile(self, files: dict[str, Path]) -> None:
        """Precompiles the preamble for each architecture into its file, for all sources that this process and its forks
        compile.

        Precompiled headers need the same addresses in all processes. If these are taken, sources are compiled without
        precompiled headers, to the same code.
        """
        self.library.nvrtcSetPCHHeapSize(ctypes.c_size_t(PRECOMPILED_HEAP * len(files)))
        for architecture, file in files.items():
            program = self._create(HEADERS_END, "preamble.cu")
            self._compile(program, architecture, f"--create-pch={file}")
            if self.library.nvrtcGetPCHCreateStatus(program) == 0:
                self.precompiled[architecture] = file

    def compile(self, source: Path, cubins: Mapping[str, str]) -> dict[str, str]:
        """Writes PTX and cubins to files named after the source and the architecture. `cubins` has the architecture of
        a cubin and that of its PTX. Returns what the compilers printed for each cubin."""
        output = {}
        ptx = {virtual: self._to_ptx(source, virtual) for virtual in dict.fromkeys(cubins.values())}
        for architecture, virtual in cubins.items():
            file, warnings = ptx[virtual]
            cubin = source.with_suffix(f".{architecture}.cubin")
            command = [self.ptxas, f"-arch={architecture}", "-v", file, "-o", cubin]
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if result.returncode != 0:
                raise CompileError(result.stdout)
            output[architecture] = warnings + result.stdout
        return output

    def _to_ptx(self, source: Path, architecture: str) -> tuple[Path, str]:
        """The file of the PTX, and NVRTC's warnings."""
        program = self._create(HEADERS_END + source.read_text(), source.name)
        precompiled = self.precompiled.get(architecture)
        status = self._compile(program, architecture, *([f"--use-pch={precompiled}"] if precompiled else []))
        warnings = self._read(program, "ProgramLog").rstrip(b"\0").decode()
        self._check(status, warnings)
        ptx = source.with_suffix(f".{architecture}.ptx")
        ptx.write_text(without_unused_variables(self._read(program, "PTX").rstrip(b"\0").decode()))
        return ptx, warnings

    def _create(self, text: str, name: str) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        status = self.library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        self._check(status)
        return program

    def _compile(self, program: ctypes.c_void_p, architecture: str, *extra: str) -> int:
        options = [*self.options, f"-arch={architecture}", *extra]
        c_options = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        return self.library.nvrtcCompileProgram(program, len(options), c_options)

    def _read(self, program: ctypes.c_void_p, output: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self.library[f"nvrtcGet{output}Size"](program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(self.library[f"nvrtcGet{output}"](program, data))
        return data.raw

    def _check(self, status: int, output: str = "") -> None:
        if status != 0:
            raise CompileError(output.strip() or f"error: {self.library.nvrtcGetErrorString(status).decode()}")


def without_unused_variables(ptx: str) -> str:
    """The PTX without variables that nothing mentions.

    -default-device makes each `static constexpr` of a header a variable of the device: some 700 of CUTLASS and of the
    standard library in every kernel. ptxas would keep them, as two fifths of the cubin.
    """
    mentions = Counter(re.findall(r"[\w$]+", ptx))
    return VARIABLE.sub(lambda match: match[0] if mentions[match[1]] > 1 else "", ptx)
