"""The releases of vLLM and SGLang that the integrations replace functions of, and the plugins that switch them on.

The engines are stand-ins with the signatures of signatures.json; what the functions compute is in test_vllm.py and
test_sglang.py.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import RECORDED, sources_of

from flash_qla.integrations import _engines

ROOT = Path(__file__).resolve().parent.parent


def test_earlier():
    """Positional and keyword arguments reach the parameters of the same names."""

    def newest(a, b=1, c=2, d=3):
        return a, b, c, d

    older = _engines.earlier(newest, "b", "d")
    assert str(inspect.signature(older)) == "(a, c=2)"
    assert older(5) == (5, 1, 2, 3) and older(5, 6) == older(5, c=6) == older(a=5, c=6) == (5, 1, 6, 3)
    for arguments, names in (((1, 2, 3), {}), ((1,), {"a": 2}), ((), {}), ((1,), {"e": 2})):
        with pytest.raises((TypeError, ValueError)):
            older(*arguments, **names)


# An engine loads each plugin of its group, and runs it.
LOADING = """
import importlib, importlib.metadata, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
def load_plugins():
    for x in importlib.metadata.entry_points(group=GROUP):
        if x.name == "flash_qla":
            x.load()()
"""
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
SWITCHES = {"vllm": "FLASH_QLA_VLLM", "sglang": "FLASH_QLA_SGLANG"}
RUN = {"vllm": "0.33.0", "sglang": "0.5.17"}  # releases that have generated text
every_engine = pytest.mark.parametrize("engine", GROUPS)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Path:
    """A folder with the entry points that a wheel of this checkout has, and the module that they name."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for module in ("flash_qla_environment.py", "flash_qla_plugins.py"):
        (folder / module).symlink_to(ROOT / module)
    return folder


def install(folder: Path, sources: dict[str, str]) -> None:
    for module, source in sources.items():
        file = folder / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)


def install_release(folder: Path, engine: str, release: str) -> None:
    """The metadata of an installed engine."""
    dist_info = folder / f"{engine}-{release}.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {release}\n")


def run_engine(engine: str, code: str, *folders: Path, **environment: str) -> str:
    """The output of a process of the engine."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", f"GROUP = {GROUPS[engine]!r}\n{LOADING}\n{code}"],
        cwd=folders[0],
        env={**os.environ, "PYTHONPATH": path, "FLASH_QLA_QUIET": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


RELEASES = [(engine, i) for engine in GROUPS for i in range(len(RECORDED[engine]))]


@pytest.mark.parametrize(("engine", "release"), RELEASES, ids=str)
def test_switched_on(engine, release, metadata, tmp_path):
    """Plugins run before the layers' modules are imported, or after some are. Each module gets ours, and a line."""
    sources = sources_of(engine, RECORDED[engine][release]["signatures"])
    install(tmp_path, sources)
    install_release(tmp_path, engine, RUN[engine])
    code = f"""
modules = {list(sources)!r}
importlib.import_module(modules[-1])
load_plugins()
assert [x in sys.modules for x in modules[:-1]] == [False] * (len(modules) - 1)
load_plugins()  # an engine may do so
for path in modules:
    module = importlib.import_module(path)
    for name, function in list(vars(module).items()):
        if callable(function):
            print("FOUND", path, name, function.__module__)
"""
    output = run_engine(engine, code, metadata, tmp_path, **{SWITCHES[engine]: "1"})
    actual = [line.split()[1:] for line in output.splitlines() if line.startswith("FOUND")]
    names = [(path, line.split("(")[0][4:]) for path, source in sources.items() for line in source.splitlines()]
    assert sorted(actual) == sorted([path, name, f"flash_qla.integrations.{engine}"] for path, name in names)
    for path in sources:
        assert f"INFO {engine}.flash_qla: {SWITCHES[engine]}=1: flash_qla replaces " in output
        assert f" of {path}\n" in output
    assert "WARNING" not in output


@every_engine
@pytest.mark.parametrize("value", (None, "", "0", "off", "False", "banana"))
def test_switched_off(engine, value, metadata, tmp_path):
    """Nothing of flash_qla, nor torch, is imported, and no import is watched. A word that nobody knows is named."""
    sources = sources_of(engine, RECORDED[engine][-1]["signatures"])
    install(tmp_path, sources)
    code = f"""
before = list(sys.meta_path)
load_plugins()
assert sys.meta_path == before
assert not {{"flash_qla", "torch"}} & set(sys.modules)
for path in {list(sources)!r}:
    module = importlib.import_module(path)
    for name, function in vars(module).items():
        assert not callable(function) or function.__module__ == path
"""
    output = run_engine(engine, code, metadata, tmp_path, **({} if value is None else {SWITCHES[engine]: value}))
    line = f"WARNING {engine}.flash_qla: {SWITCHES[engine]}=banana has no effect: expected one of 1, true, yes, on, 0, "
    assert output.startswith(line) and output.count("\n") == 1 if value == "banana" else output == ""


@pytest.mark.parametrize(
    ("engine", "release", "is_named"),
    [
        ("vllm", "0.33.0", False),
        ("vllm", "0.33.0+cu129", False),
        ("vllm", "0.27.1", True),
        ("vllm", None, True),
        ("sglang", "0.5.17", False),
        ("sglang", "0.5.23", True),
    ],
)
def test_a_release_that_nobody_has_run_is_named(engine, release, is_named, metadata, tmp_path):
    """In one line, with the switch and in a program of its own. `on` switches on, too."""
    sources = sources_of(engine, RECORDED[engine][-1]["signatures"])
    install(tmp_path, sources)
    if release is not None:
        install_release(tmp_path, engine, release)
    load = f"load_plugins()\nfor path in {list(sources)!r}: importlib.import_module(path)"
    use = f"from flash_qla.integrations.{engine} import use_flash_qla as use\nuse()\nuse()"
    for code, environment in ((load, {SWITCHES[engine]: " On"}), (use, {})):
        output = run_engine(engine, code, metadata, tmp_path, **environment)
        lines = [line for line in output.splitlines() if "has not been run in" in line]
        name = f"{engine} {'of an unknown release' if release is None else release}, only in {RUN[engine]};"
        assert len(lines) == is_named and all(name in line for line in lines)
        assert all(line.startswith(f"WARNING {engine}.flash_qla: ") for line in lines)


QWEN, OLMO = (f"vllm.model_executor.layers.mamba.gdn.{name}_gdn_linear_attn" for name in ("qwen", "olmo"))


@pytest.mark.parametrize(
    ("release", "switch", "kernel", "what", "expected"),
    [
        ("VLLM_GDN_DECODE_KERNEL", "1", None, "fits", "triton"),
        ("VLLM_GDN_DECODE_KERNEL", "yes", None, "fits", "triton"),
        ("VLLM_GDN_DECODE_KERNEL", "1", "cuda", "fits", "cuda"),
        ("VLLM_GDN_DECODE_KERNEL", "0", None, "fits", "None"),
        ("VLLM_GDN_DECODE_KERNEL", "1", None, "has another function", "None"),
        ("VLLM_GDN_DECODE_KERNEL", "1", None, "has no library", "None"),
        ("VLLM_OTHER", "1", None, "fits", "None"),  # a release before 0.28.0
    ],
)
def test_drafts_of_vllm(release, switch, kernel, what, expected, metadata, tmp_path):
    """vLLM's own kernel for drafts is off if flash_qla takes them, unless the environment asks for it."""
    sources = sources_of("vllm", RECORDED["vllm"][-1]["signatures"])
    if what == "has another function":
        sources[QWEN] = sources[QWEN].replace("A_log, a, b,", "A_log, a, b, new,")
    if what == "has no library":
        sources["flash_qla.__init__"] = "raise ImportError('libflash_qla.so: wrong ELF class')"
    install(tmp_path, sources | {"vllm.envs": f"environment_variables = {{{release!r}: None}}"})
    code = f"""
import os, vllm.envs
load_plugins()
for path in {[QWEN, OLMO]!r}:
    importlib.import_module(path)
print("KERNEL", os.environ.get("VLLM_GDN_DECODE_KERNEL"))
"""
    environment = {"FLASH_QLA_VLLM": switch} | ({} if kernel is None else {"VLLM_GDN_DECODE_KERNEL": kernel})
    output = run_engine("vllm", code, tmp_path, metadata, **environment)
    assert output.splitlines()[-1] == f"KERNEL {expected}"


@every_engine
def test_another_release(engine, metadata, tmp_path):
    """The module with an unknown signature keeps its own functions, and the log says which one."""
    sources = sources_of(engine, RECORDED[engine][-1]["signatures"])
    path = next(iter(sources))
    sources[path] = sources[path].replace("(q, k, v, g, beta,", "(q, k, v, g, beta, new,")
    install(tmp_path, sources)
    code = f"""
load_plugins()
module = importlib.import_module({path!r})
assert all(x.__module__ == {path!r} for name, x in vars(module).items() if "delta_rule" in name)
"""
    output = run_engine(engine, code, metadata, tmp_path, **{SWITCHES[engine]: "1"})
    assert f"WARNING {engine}.flash_qla: {SWITCHES[engine]}=1 has no effect on" in output
    assert "chunk_gated_delta_rule is (q, k, v, g, beta, new, " in output and "was written for" in output


@every_engine
def test_a_library_that_does_not_load(engine, metadata, tmp_path):
    """The engine runs on, and its log has the reason."""
    install(tmp_path, {"flash_qla.__init__": "raise ImportError('libflash_qla.so: wrong ELF class')"})
    code = "load_plugins()"
    output = run_engine(engine, code, tmp_path, metadata, **{SWITCHES[engine]: "1"})
    expected = f"{SWITCHES[engine]}=1 has no effect: ImportError: libflash_qla.so: wrong ELF class"
    assert f"WARNING {engine}.flash_qla: {expected}" in output


@every_engine
def test_an_engine_that_is_not_there(engine, metadata):
    """A search for a module that does not exist, or that is not imported, changes nothing."""
    code = f"""
import importlib.util
load_plugins()
assert importlib.util.find_spec("torch.nn.modules.linear") is not None
try:
    importlib.util.find_spec({f"{engine}.layers"!r})
except ModuleNotFoundError:
    print("absent")
"""
    assert run_engine(engine, code, metadata, **{SWITCHES[engine]: "1"}) == "absent\n"
