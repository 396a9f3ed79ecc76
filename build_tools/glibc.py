"""Links libraries against glibc 2.28 on any machine, without a container.

A linker binds a function to its newest version: pthread_create of glibc 2.36 is GLIBC_2.34, and a library that uses it
does not load under 2.28, although 2.28 has a pthread_create too. So the linker gets stubs before the real libraries, in
which each function has its version of glibc 2.28. The stubs are not shipped: the real libraries answer at run time,
because glibc never drops an old version. The wheel's platform tag is read from the linked libraries.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

OLDEST = (2, 28)  # PyTorch's own wheels need it too
# The processor in a wheel's tag, by its name in an ELF file
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}

# Libraries whose functions glibc 2.34 moved into libc.so.6
MOVED = {"libpthread.so.0": ("pthread_", "sem_"), "libdl.so.2": ("dl",), "librt.so.1": ("shm_",)}


def parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def functions(compiler: str, library: str) -> dict[str, tuple[str, bool]]:
    """Function -> its version in glibc 2.28, and whether the library has a newer one."""
    path = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    command = ["nm", "-D", "--with-symbol-versions", path.stdout.strip()]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = defaultdict(list)
    for name, version in re.findall(r" [TWi] (\w+)@@?GLIBC_([\d.]+)$", symbols, re.MULTILINE):
        versions[name].append(parse(version))
    stub_versions = {}
    for name, available in sorted(versions.items()):
        old = [version for version in available if version <= OLDEST]
        if old:
            stub_versions[name] = ".".join(map(str, max(old))), max(available) > OLDEST
    return stub_versions


def write_stub(compiler: str, stub: Path, versions: dict[str, str]) -> None:
    names = defaultdict(list)
    for name, version in versions.items():
        names[version].append(name)
    assembly = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in versions)
    script = "".join(f"GLIBC_{version} {{ {'; '.join(names[version])}; }};\n" for version in names)
    source, map_file = stub.with_suffix(".s"), stub.with_suffix(".map")
    if stub.exists() and source.read_text() == assembly and map_file.read_text() == script:
        return  # a new file would link everything again
    source.write_text(assembly)
    map_file.write_text(script)
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{stub.name}", f"-Wl,--version-script={map_file}"]
    new = stub.with_suffix(".new")
    subprocess.run([compiler, *flags, source, "-o", new], check=True)
    new.replace(stub)


def write_stubs(compiler: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)

    # libm.so.6 needs all its functions, because the linker takes only one library of this name.
    stubs = {"libm.so.6": {name: version for name, (version, _) in functions(compiler, "libm.so.6").items()}}
    libc = functions(compiler, "libc.so.6")
    for library, prefixes in MOVED.items():
        stubs[library] = {
            name: version for name, (version, changed) in libc.items() if changed and name.startswith(prefixes)
        }
    stubs = {folder / library: versions for library, versions in stubs.items() if versions}
    for stub, versions in stubs.items():
        write_stub(compiler, stub, versions)
    return list(stubs)


def platform_tag(libraries: Iterable[Path]) -> str:
    """manylinux_2_28_x86_64 or manylinux_2_28_aarch64, or the tag of a newer glibc if the libraries need one, wherever
    they were linked."""
    command = ["readelf", "-h", "-V", "-W", *libraries]
    headers = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = max(map(parse, re.findall(r"\bName: GLIBC_([\d.]+)", headers)))
    (machine,) = {MACHINES[name] for name in re.findall(r"^ +Machine: +(.*)$", headers, re.MULTILINE)}
    return "manylinux_{}_{}_{}".format(*max(needed[:2], OLDEST), machine)


if __name__ == "__main__":
    # CMakeLists.txt gives compiler and folder, and reads the stubs as a CMake list.
    print(*write_stubs(sys.argv[1], Path(sys.argv[2])), sep=";")
