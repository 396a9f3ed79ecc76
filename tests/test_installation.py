"""The installed library and the module beside it: types, the sentences about GPUs and drivers, and which Hopper
instructions the kernels really use. (What the registry holds is in test_build.py.)"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from subprocesses import run_python

import flash_qla
from flash_qla import _C, __main__ as command

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(flash_qla.__file__).with_name("libflash_qla.so")
FLOOR = dict(re.findall(r'(kDriverFloor\w*) = "?(\d+)"?;', (ROOT / "csrc/gpu/runtime/driver_floor.h").read_text()))
NEEDS_DRIVER = f"need NVIDIA driver {FLOOR['kDriverFloorName']} or newer"


def test_the_stub_is_the_module():
    """Arguments and types are those that pybind11 says, as the first line of a docstring."""
    stub = ast.parse(LIBRARY.with_name("_C.pyi").read_text()).body
    functions = {node.name: node for node in stub if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in stub if isinstance(node, ast.ClassDef)}
    options = {name: node for name, node in classes.items() if name.startswith("_")}  # keyword arguments
    classes = {name: node for name, node in classes.items() if name not in options}
    assert functions.keys() | classes.keys() == {name for name in vars(_C) if not name.startswith("_")}

    def declaration(function):
        signature = function.__doc__.splitlines()[0].replace("flash_qla._C.", "")
        return ast.parse(f"def {signature}: ...").body[0]

    def fields_of(name):
        inherited = [field for base in options[name].bases if base.id in options for field in fields_of(base.id)]
        return inherited + [(field.target.id, ast.unparse(field.annotation)) for field in options[name].body]

    def types_of(function):
        arguments = function.args
        named = [(arg.arg, ast.unparse(arg.annotation)) for arg in (*arguments.args, *arguments.kwonlyargs)]
        rest = fields_of(arguments.kwarg.annotation.slice.id) if arguments.kwarg else []
        return named + rest, ast.unparse(function.returns)

    for name, function in functions.items():
        assert types_of(function) == types_of(declaration(getattr(_C, name)))
    for name, node in classes.items():
        text, record = ast.unparse(node), getattr(_C, name)
        bases = [base.__name__ for base in record.__bases__ if base.__name__ in classes]
        types = {
            field: getattr(record, field).fget.__doc__.partition(" -> ")[2]
            for field in record.__match_args__
            if field in vars(record)
        }
        fields = [f"    {field}: Final[{type.strip()}]" for field, type in types.items()]
        names = ast.unparse(ast.parse(f"__match_args__ = {record.__match_args__}")) if types else "..."
        constructor = []
        if record.__init__.__doc__.startswith("__init__("):
            text_of_init = ast.unparse(declaration(record.__init__)).replace(f"self: {name}", "self")
            constructor = ["", *(f"    {line}" for line in text_of_init.splitlines())]
        head = f"class {name}({', '.join(bases)}):" if bases else f"class {name}:"
        assert text == "\n".join([head, *fields, f"    {names}", *constructor])
    assert LIBRARY.with_name("py.typed").exists()


def test_records_print_and_compare_their_fields():
    shape = {"B": 1, "T": 512, "N": 1, "H_k": 2, "H_v": 8}
    dispatch = _C.forward_dispatch(**shape)
    assert dispatch == _C.forward_dispatch(**shape) != _C.forward_dispatch(**shape | {"T": 1024})
    assert dispatch != _C.build_info()
    assert eval(repr(dispatch), {"ForwardDispatch": dict}) == {
        name: getattr(dispatch, name) for name in dispatch.__match_args__
    }
    with pytest.raises(AttributeError):
        dispatch.value_tile = 64


def test_arguments_have_types():
    signature = r"H_v: int, \*, sm_count: int = 132, sm_mhz: int = 1980, memory_gb_s: int = 3352, auto_cp: bool = True"
    for arguments in ((1.0, 512, 1, 2, 8), (1, 512, 1, 2, "8"), (1, 512, 1, 2, 8, 132), (1, 512)):
        with pytest.raises(TypeError, match=signature):
            _C.forward_dispatch(*arguments)
    with pytest.raises(TypeError, match="auto_cp: bool = True"):
        _C.forward_dispatch(1, 512, 1, 2, 8, auto_cp=1)


def test_the_module_asks_the_library_that_has_the_ops():
    """The process has one copy, or an override would not reach them."""
    maps = run_python("import flash_qla._C; print(open('/proc/self/maps').read())")
    assert {line.split()[-1] for line in maps.splitlines() if line.endswith(LIBRARY.name)} == {str(LIBRARY)}


def test_obstacles_are_sentences():
    oldest = int(FLOOR["kDriverFloor"])
    assert all(_C.obstacle(driver, 9, 0) == "" for driver in (oldest, 12080, 13000, 14020))
    assert f"{NEEDS_DRIVER}, but no driver was found" in _C.obstacle(0, 9, 0)
    assert f"{NEEDS_DRIVER}, but the driver supports CUDA up to 11.8" in _C.obstacle(11080, 9, 0)
    assert NEEDS_DRIVER in _C.obstacle(oldest - 10, 9, 0)
    for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)):
        assert _C.obstacle(oldest, major, minor) == ""
    for major, minor in ((6, 1), (7, 5)):
        words = rf"need .* 8\.0 or newer .*, but this one has {major}\.{minor}$"
        assert re.search(words, _C.obstacle(oldest, major, minor))


def test_a_refusal_says_what_to_do():
    """Of an older driver than the toolkit's, and of one that is new enough."""
    assert "supports CUDA up to 12.2: install NVIDIA driver 575 (CUDA 12.9) or a newer one" in _C.refusal(12020)
    assert all("install the package again" in _C.refusal(driver) for driver in (12090, 13000))


def output_of(folder: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "flash_qla", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True).stdout.splitlines()


def test_command_ends_with_every_gpu(tmp_path):
    """Its last lines say whether the kernels run."""
    output = output_of(tmp_path)
    lines = [line for line in output if re.match(r"GPU( \d+)? ", line)]
    assert output[-len(lines) :] == lines and len(output) < 20
    if _C.gpus():
        assert len(lines) == len(_C.gpus())
        assert all("the kernels run" in line or "the kernels do not run: " in line for line in lines)
    else:
        assert len(lines) == 1 and "CPU tensors run on the C++ CPU implementation" in lines[0]


def test_command_lists_the_kernels_if_asked(tmp_path):
    output = output_of(tmp_path, "--kernels")
    short = output_of(tmp_path)
    assert output[-len(short) :] == short
    assert [line.split()[0] for line in output[1 : -len(short) - 1]] == [kernel.name for kernel in _C.kernels()]


def test_command_prints_the_path_of_the_library(tmp_path):
    assert output_of(tmp_path, "--library") == [str(LIBRARY)]


T4 = SimpleNamespace(name="NVIDIA T4", major=7, minor=5, sm_count=40)
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, sm_count=132)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, sm_count=108)
B200 = SimpleNamespace(name="NVIDIA B200", major=10, minor=0, sm_count=148)
THOR = SimpleNamespace(name="NVIDIA Thor", major=11, minor=0, sm_count=20)

# A machine -> what the command says of its driver and its GPUs. A driver that is too old lists no GPUs.
MACHINES = {
    "no driver": (0, [], ["GPU      no NVIDIA driver found; CPU tensors run on the C++ CPU implementation"]),
    "a driver without a GPU": (
        13000,
        [],
        ["driver   580.1, supports CUDA 13.0", "GPU      none found; CPU tensors run"],
    ),
    "an old driver": (
        11080,
        [],
        [
            "driver   580.1, supports CUDA 11.8\n",
            "GPU      the kernels were compiled with CUDA",
            f"{NEEDS_DRIVER}, but the driver supports",
        ],
    ),
    "a newer driver": (
        14020,
        [H200],
        [
            "driver   580.1, supports CUDA 14.2",
            "GPU 0    NVIDIA H200, 132 SMs: the kernels run, by code for sm_90, sm_90a\n",
        ],
    ),
    "an older and a newer GPU": (
        13000,
        [T4, A100, H200, B200, THOR],
        [
            "GPU 0    NVIDIA T4, 40 SMs: the kernels do not run: the kernels need a GPU of compute capability 8.0 or ",
            "but this one has 7.5\n",
            "GPU 1    NVIDIA A100, 108 SMs: the kernels run, by code for sm_80, except ",
            ", decode_buffered, ",
            "GPU 2    NVIDIA H200, 132 SMs: the kernels run, by code for sm_90, sm_90a\n",
            "GPU 3    NVIDIA B200, 148 SMs: the kernels run, by code for sm_100, except ",
            "GPU 4    NVIDIA Thor, 20 SMs: the kernels run, by PTX that the driver compiles when a kernel is first ",
        ],
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_command_on_other_machines(machine, monkeypatch, capsys, tmp_path):
    driver, gpus, lines = MACHINES[machine]
    driver_file = tmp_path / "version"
    driver_file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Wed Nov 5\n")
    monkeypatch.setattr(command, "DRIVER_FILE", driver_file)
    monkeypatch.setattr(command.torch.version, "cuda", "13.0")
    monkeypatch.setattr(_C, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(_C, "gpus", lambda: gpus)
    command.print_gpus()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == bool(driver) + max(1, len(gpus)), printed
    assert all(line in printed for line in lines), printed


def test_a_cpu_build_of_torch_is_said(monkeypatch):
    monkeypatch.setattr(command.torch.version, "cuda", None)
    assert re.fullmatch(r"PyTorch .* is a CPU build", command.obstacle(H200, 13000))


def test_a_library_that_does_not_load(tmp_path):
    """Simulates a PyTorch that is too old, which lacks symbols of the stable ABI."""
    package = tmp_path / "flash_qla"
    shutil.copytree(LIBRARY.parent, package, ignore=lambda *_: [LIBRARY.name])
    (package / LIBRARY.name).write_text("no library")
    result = subprocess.run([sys.executable, "-c", "import flash_qla"], cwd=tmp_path, capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and str(package) in last
    assert re.search(r"needs PyTorch 2\.10 or newer.*; this is PyTorch \d+\.\d+", last)


@pytest.fixture
def copied(tmp_path) -> Path:
    """The package, imported from here where this is the working directory."""
    return Path(shutil.copytree(LIBRARY.parent, tmp_path / "flash_qla"))


def last_line(package: Path, *arguments: str) -> str:
    """Python's output before it fails."""
    result = subprocess.run([sys.executable, *arguments], cwd=package.parent, capture_output=True, text=True)
    assert result.returncode == 1
    return result.stderr.splitlines()[-1]


def test_the_published_package_beneath(copied):
    (copied / "ops/utils").mkdir()
    (copied / "ops/utils/__init__.py").touch()
    for arguments in (("-c", "import flash_qla"), ("-m", "flash_qla")):
        assert re.search(
            r"flash-qla on PyPI.* mixed.* `pip uninstall flash-qla flash-qla-aot`", last_line(copied, *arguments)
        )


@pytest.mark.parametrize(("init", "what"), ((None, "missing"), ("__version__ = '0.1.3'", "of another package")))
def test_the_published_package_above(copied, init, what):
    """Installed over this one, and then perhaps removed again, with the files that both have."""
    (copied / "__init__.py").unlink()
    if init is not None:
        (copied / "__init__.py").write_text(init)
    # Nothing else of the name may be found, or a folder without __init__.py would not count.
    code = f"import runpy, sys, torch; sys.path = [{str(copied.parent)!r}]"
    line = last_line(copied, "-c", code + "; runpy.run_module('flash_qla', run_name='__main__')")
    assert re.search(rf"__init__.py is {what}.*`pip uninstall flash-qla flash-qla-aot`", line)


def test_the_path_of_the_published_package():
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd

    assert chunk_gated_delta_rule is flash_qla.chunk_gated_delta_rule
    assert chunk_gated_delta_rule_bwd is flash_qla.chunk_gated_delta_rule_bwd


WITH_TMA = (
    "chunk_matrices",
    "chunk_forward",
    "segment_maps",
    "segment_scan",
    "compose_maps",
    "backward_maps",
    "replay_states",
)


@pytest.fixture(scope="module")
def sass() -> dict[str, str]:
    """The instructions of each kernel."""
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is not on PATH (it comes with the CUDA toolkit)")
    text = subprocess.run([cuobjdump, "--dump-sass", LIBRARY], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*Function : |\Z)", text, re.S))


def test_kernels_use_tma_and_wgmma(sass):
    for kernel in WITH_TMA:
        for dtype in ("bf16", "fp16"):
            bodies = [body for name, body in sass.items() if f"{kernel}_{dtype}" in name]
            assert bodies, list(sass)
            assert all("HGMMA" in body and "UTMALDG" in body for body in bodies), kernel


def test_kernels_launched_early_wait_before_they_read(sass):
    """Programmatic dependent launch: nothing may be read before the wait (ACQBULK) for the kernel before, but the
    plan's tables from L2 (load_early), nor the next kernel let go (PREEXIT) before that. The scan in reverse runs
    beside the one before it and waits at its end."""
    waiting = {name: body for name, body in sass.items() if "ACQBULK" in body}
    for kernel in WITH_TMA:
        assert any(kernel in name for name in waiting), kernel
    for name, body in waiting.items():
        if re.search(r"segment_scan\w+(?<!no)_reverse", name):
            continue
        before = body[: body.index("ACQBULK")].replace("LDG.E.STRONG.GPU", "")
        assert not re.search(r"\b(LDG|LD\.E|STG|ST\.E|UTMALDG|UBLKCP|PREEXIT)\b", before), name


def test_reader_that_leaves_early():
    """`python -m flash_qla | head -1`, or | true, ends quietly."""
    for reader in ("head -1", "true"):
        command = f"set -o pipefail; {sys.executable} -m flash_qla | {reader}"
        result = subprocess.run(["bash", "-c", command], cwd="/", capture_output=True, text=True)
        assert result.returncode == 0 and not result.stderr, result
