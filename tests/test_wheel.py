"""The packages that users get: an sdist of this checkout, a wheel built from that, and the wheel installed beside torch
alone."""

import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.search(r'"(.*)"', (ROOT / "flash_qla/_version.py").read_text()).group(1)
NAME = f"flash_qla_aot-{VERSION}"
KERNELS = ROOT / "build/kernels"
PYTHON = "cp{}{}".format(*sys.version_info)
MODULE = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
OUTSIDE = Path(tempfile.gettempdir())  # in the checkout, `import flash_qla` would find the sources

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("setuptools", "cmake", "ninja", "pybind11", "tilelang", "auditwheel"))),
        reason="needs what the build needs (in the `test` extra)",
    ),
    pytest.mark.skipif(
        not (KERNELS / "launchers.cpp").exists(),
        reason="no kernels have been compiled in this checkout, and compiling them takes minutes",
    ),
]


def run(*command, cwd: Path = OUTSIDE) -> str:
    """The output of the command."""
    command = [str(part) for part in command]
    environment = {**os.environ, "PYTHONPATH": "", "FLASH_QLA_QUIET": "1"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # An egg-info of its own: setuptools packs what an earlier one lists, whatever MANIFEST.in says by now.
    run(sys.executable, "setup.py", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, cwd=ROOT)
    return folder / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the sdist, and from kernels that this checkout has compiled, which are found by what is in them."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
    sources = folder / NAME
    shutil.copytree(KERNELS, sources / "build/kernels")
    # Files that an editor or a merge leaves
    for name in ("ops.py.orig", "ops.py~", "_C.cpython-310-x86_64-linux-gnu.so", "libflash_qla.so.bak"):
        (sources / "flash_qla" / name).write_text("a leftover")
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, sources)
    (built,) = folder.glob("*.whl")
    return built


def test_the_sdist_is_the_checkout(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so its files are unknown")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    with tarfile.open(sdist) as archive:
        packed = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"} | {name for name in packed if name.startswith("flash_qla_aot.egg-info/")}
    assert packed - generated == {name for name in listed if (ROOT / name).exists()}


def test_a_wheel_is_for_its_python(wheel):
    tag = f"{PYTHON}-{PYTHON}-manylinux_2_28_x86_64"
    assert wheel.name == f"{NAME}-{tag}.whl"
    with zipfile.ZipFile(wheel) as archive:
        fields = email.message_from_bytes(archive.read(f"{NAME}.dist-info/WHEEL"))
    assert fields.get_all("Tag") == [tag]
    assert fields["Root-Is-Purelib"] == "false"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "flash_qla").rglob("*.py")}
    modules |= {"flash_qla_environment.py", "flash_qla_plugins.py"}
    built = {f"flash_qla/{name}" for name in ("libflash_qla.so", MODULE, "_layout.py")}
    types = {str(path.relative_to(ROOT)) for path in (ROOT / "flash_qla").rglob("*.pyi")} | {"flash_qla/py.typed"}
    names = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    about = {f"{NAME}.dist-info/{name}" for name in names}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == modules | built | types | about
        license_text = archive.read(f"{NAME}.dist-info/licenses/LICENSE")
        binaries = {name: archive.read(name) for name in built if name.endswith(".so")}
    assert license_text == (ROOT / "LICENSE").read_bytes()
    for folder in (ROOT, wheel.parent, Path.home(), Path(sys.prefix)):
        for name, content in binaries.items():
            assert f"{folder}/".encode() not in content, f"{name} names a folder of the machine that built it"


def test_binaries_share_no_cpp(wheel, tmp_path):
    """They have a libstdc++ of their own: they offer no part of it to the process and take none from torch's libraries.
    The one function that they take throws errors, and its arguments are C's."""
    throws = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"  # c10::detail::torchCheckFail
    exports = {"libflash_qla.so": (r"flash_qla_\w+", [throws]), MODULE: ("PyInit__C", [])}
    for name, (pattern, of_torch) in exports.items():
        with zipfile.ZipFile(wheel) as archive:
            path = archive.extract(f"flash_qla/{name}", tmp_path)
        exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", path).splitlines()]
        undefined = [line.split()[-1] for line in run("nm", "-D", "--undefined-only", path).splitlines()]
        assert exported and all(re.fullmatch(pattern, symbol) for symbol in exported), exported
        assert [symbol for symbol in undefined if symbol.startswith("_Z")] == of_torch


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        fields = email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
    assert (fields["Name"], fields["Version"]) == ("flash-qla-aot", VERSION)
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "MIT" and fields["License-File"] == "LICENSE"
    assert [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line] == ["torch>=2.10"]
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()


def test_the_tag_is_true(wheel):
    """The binaries need no more of a machine than the tag says. torch's libraries come with torch."""
    report = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    newest = re.fullmatch(r"manylinux_2_(\d+)_x86_64", report["sym_tag"])
    assert newest and int(newest.group(1)) <= 28, report["sym_tag"]
    assert set(report["external_libs"]) == {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
    needed = {version.split("_")[0] for versions in report["versioned_symbols"].values() for version in versions}
    assert needed == {"GLIBC", "GCC"}
    assert not report["unsupported_isa"]


def closure(name: str, distributions: dict) -> dict:
    """Distribution by name: this one, and what it requires."""
    if name not in distributions:
        distributions[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distributions[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, distributions)
    return distributions


def test_in_an_environment_with_torch_alone(wheel, tmp_path):
    """torch and what it requires are links to this environment's."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    for distribution in closure("torch", {}).values():
        for top in {path.parts[0] for path in distribution.files if path.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(distribution.locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel)
    code = """
import importlib.util, sys, torch, flash_qla
assert flash_qla.__file__.startswith(sys.prefix), flash_qla.__file__
for name in ("tilelang", "pytest", "transformers", "cmake"):
    assert importlib.util.find_spec(name) is None, name
x = torch.randn(1, 70, 2, 16, requires_grad=True)
o, state = flash_qla.chunk_gated_delta_rule(x, x, x, -x[..., 0].square(), x[..., 1], output_final_state=True)
(o.sum() + state.sum()).backward()
assert x.grad.isfinite().all() and x.grad.any()
print("ran")
"""
    assert run(python, "-c", code).splitlines()[-1] == "ran"
    assert str(packages) in run(python, "-m", "flash_qla")
    code = """
import importlib.metadata
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (plugin,) = importlib.metadata.entry_points(group=group)
    plugin.load()()
    print(plugin.name)
"""
    assert run(python, "-c", code).split() == ["flash_qla"] * 2
