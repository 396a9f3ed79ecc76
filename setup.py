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

BUILD = ROOT / "build/cmake"
PACKAGE = BUILD / "flash_qla"  # what the package holds beside its sources


class CMakeBuild(build_ext):
    """Builds in build/cmake, kept in the tree, and copies from there into the package."""

    def build_extension(self, extension: Extension) -> None:
        try:
            toolchain.check_tilelang()
            toolchain.find_toolkit()
        except toolchain.BuildError as error:
            sys.exit(f"error: {error}")

        program = Path(cmake.CMAKE_BIN_DIR, "cmake")
        environment = f"{ROOT}\n{sys.executable}\n{program}\n"
        marker = BUILD / "environment.txt"
        # A CMake cache is full of paths into the environment that made it; pip makes a new one for every build.
        if not (marker.is_file() and marker.read_text() == environment):
            shutil.rmtree(BUILD, ignore_errors=True)
        configure = [
            program,
            *("-G", "Ninja", "-S", ROOT, "-B", BUILD),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        self._run(configure)
        marker.write_text(environment)
        self._run([program, "--build", BUILD, "--parallel", str(toolchain.max_jobs())])

        shutil.copytree(PACKAGE, Path(self.build_lib, "flash_qla"), dirs_exist_ok=True)

    def copy_extensions_to_source(self) -> None:
        shutil.copytree(PACKAGE, ROOT / "flash_qla", dirs_exist_ok=True)

    @staticmethod
    def _run(command: list) -> None:
        status = subprocess.run([str(part) for part in command]).returncode
        if status != 0:
            sys.exit(f"error: the build failed, see above ({Path(command[0]).name} exited with status {status})")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, _ = super().get_tag()
        return python, abi, glibc.platform_tag(PACKAGE.glob("*.so"))


# setuptools packs whatever lies there, files that have since been deleted from the sources included.
for stale in ROOT.glob("build/lib*"):
    shutil.rmtree(stale)

setup(
    ext_modules=[Extension("flash_qla._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
