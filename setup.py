"""Drives CMake. The project's metadata is in pyproject.toml, the build itself in CMakeLists.txt."""

import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # not there in an isolated build

from build_tools import glibc, toolchain  # noqa: E402

BUILT = ROOT / "build/cmake/flash_qla/libflash_qla.so"


class CMakeBuild(build_ext):
    """Builds in build/cmake, kept in the tree, and copies the library into the package."""

    def get_ext_filename(self, fullname: str) -> str:
        """No version of Python in the name: it is no Python module."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, extension: Extension) -> None:
        try:
            toolchain.check_tilelang()
            toolchain.find_toolkit()
        except toolchain.BuildError as error:
            sys.exit(f"error: {error}")

        build = ROOT / "build/cmake"
        program = Path(cmake.CMAKE_BIN_DIR, "cmake")
        environment = f"{ROOT}\n{sys.executable}\n{program}\n"
        marker = build / "environment.txt"
        # A CMake cache is full of paths into the environment that made it; pip makes a new one for every build.
        same = marker.is_file() and marker.read_text() == environment
        configure = [
            program,
            *([] if same else ["--fresh"]),
            *("-G", "Ninja", "-S", ROOT, "-B", build),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        self._run(configure)
        marker.write_text(environment)
        self._run([program, "--build", build, "--parallel", str(toolchain.max_jobs())])

        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(BUILT, library)

    @staticmethod
    def _run(command: list) -> None:
        status = subprocess.run([str(part) for part in command]).returncode
        if status != 0:
            sys.exit(f"error: the build failed, see above ({Path(command[0]).name} exited with status {status})")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """One wheel for every version of Python; the library holds no Python."""
        return "py3", "none", glibc.platform_tag(BUILT)


# setuptools packs whatever lies there, files that have since been deleted from the sources included.
for stale in ROOT.glob("build/lib*"):
    shutil.rmtree(stale)

setup(
    ext_modules=[Extension("flash_qla.libflash_qla", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
