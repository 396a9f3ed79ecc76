"""Drives CMake: no CMake backend keeps its build folder and copies the library beside the sources.

CONTRIBUTING.md compares the backends. pyproject.toml has the project's metadata; CMakeLists.txt has the build.
"""

import shutil
import subprocess
import sys
from pathlib import Path

try:
    import cmake
    import ninja
    import pybind11  # noqa: F401
except ImportError as error:
    sys.exit(
        f"error: {error}; without build isolation, what pyproject.toml's build-system requires has to be installed"
    )
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build lacks it

from build_tools import glibc, toolchain  # noqa: E402

BUILD = ROOT / "build/cmake"
PACKAGE = BUILD / "flash_qla"  # the built files of the package


class CMakeBuild(build_ext):
    """Builds in build/cmake, which stays in the tree, and copies the built files into the package."""

    def build_extension(self, extension: Extension) -> None:
        try:
            toolchain.check_path(ROOT)
            toolchain.check_tilelang()
            toolchain.find_toolkit()
            compiler, jobs = toolchain.find_compiler(), toolchain.max_jobs()
        except toolchain.BuildError as error:
            sys.exit(f"error: {error}")
        print(f"kernels by NVRTC {toolchain.CUDA_VERSION} from PyPI, C++ by {compiler}", flush=True)

        program = Path(cmake.CMAKE_BIN_DIR, "cmake")
        environment = f"{ROOT}\n{sys.executable}\n{program}\n{compiler}\n"
        marker = BUILD / "environment.txt"
        # A CMake cache has paths into its environment, and pip creates a new environment for every build.
        if not (marker.is_file() and marker.read_text() == environment):
            shutil.rmtree(BUILD, ignore_errors=True)
        configure = [
            program,
            *("-G", "Ninja", "-S", ROOT, "-B", BUILD),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_CXX_COMPILER={compiler}",
        ]
        self._run(configure)
        marker.write_text(environment)
        self._run([program, "--build", BUILD, "--parallel", str(jobs)])

        self._copy_package(Path(self.build_lib, "flash_qla"))

    def copy_extensions_to_source(self) -> None:
        self._copy_package(ROOT / "flash_qla")

    @staticmethod
    def _copy_package(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in PACKAGE.iterdir():
            (folder / file.name).unlink(missing_ok=True)  # a process that has loaded the old library keeps it
            shutil.copy2(file, folder)

    @staticmethod
    def _run(command: list) -> None:
        status = subprocess.run([str(part) for part in command]).returncode
        if status != 0:
            failure = f"the build failed, see above ({Path(command[0]).name} exited with status {status})"
            sys.exit(f"error: {failure}{toolchain.full_disk(BUILD.parent)}")


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        libraries = list(PACKAGE.glob("*.so"))  # empty in a fresh tree: an editable wheel is named before it is built
        return python, abi, glibc.platform_tag(libraries) if libraries else platform


try:
    toolchain.lock(ROOT / "build")
except toolchain.BuildError as error:
    sys.exit(f"error: {error}")

# setuptools would pack old files of these folders too, even if the sources have deleted them.
for stale in ROOT.glob("build/lib*"):
    shutil.rmtree(stale)

setup(
    ext_modules=[Extension("flash_qla._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
