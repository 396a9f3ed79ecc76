"""Work that waits for an import (flash_qla/ops/later.py): it is done once, whatever looked for the module before, and
an import never fails because of it."""

import importlib
import importlib.util
import pkgutil
import runpy
import sys
import threading
import zipfile

import pytest
from subprocesses import run_forks

from flash_qla.integrations._engines import Replacement
from flash_qla.ops.later import _FINDER, _callbacks, when_imported

SOURCE = "value = 1\ndef function(q): return 'theirs'\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package with the modules first and second, from files."""
    name = tmp_path.name
    folder = tmp_path / name
    folder.mkdir()
    for module in ("__init__", "first", "second"):
        (folder / f"{module}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [x for x in sys.modules if x.partition(".")[0] == name]:
        del sys.modules[module]
    for module in [x for x in _callbacks if x.partition(".")[0] == name]:
        del _callbacks[module]


@pytest.fixture
def reported(package):
    """The modules that a function which waits for the package's first one was called with."""
    modules = []
    when_imported(f"{package}.first", modules.append, "nothing")
    return modules


def test_now_or_later(package):
    modules = []
    for _ in range(2):
        when_imported(f"{package}.first", modules.append, "nothing")
    assert not modules
    module = importlib.import_module(f"{package}.first")
    assert modules == [module, module]
    when_imported(f"{package}.first", modules.append, "nothing")
    assert modules == [module] * 3
    importlib.reload(module)
    assert len(modules) == 3


def path_of(name: str) -> list[str]:
    return sys.modules[name.rpartition(".")[0]].__path__


SEARCHES = {
    "find_spec": importlib.util.find_spec,
    "find_spec of all": lambda name: [x.find_spec(name, path_of(name)) for x in sys.meta_path],
    "runpy": lambda name: runpy.run_module(name, run_name="__main__"),
    "pkgutil": lambda name: list(pkgutil.walk_packages(path_of(name))),
    "source": lambda name: importlib.util.find_spec(name).loader.get_source(name),
    "executed apart": lambda name: execute(importlib.util.find_spec(name)),
}


def execute(spec):
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == 1 and module.__name__ not in sys.modules


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_changes_nothing(search, package, reported):
    """Also one that executes the module in another namespace."""
    importlib.import_module(package)
    for _ in range(2):
        SEARCHES[search](f"{package}.first")
    assert not reported
    module = importlib.import_module(f"{package}.first")
    assert reported == [module]
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_an_import_that_fails_first(package, reported, tmp_path):
    path = tmp_path / package / "first.py"
    path.write_text("raise ImportError('not yet')")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(f"{package}.first")
    assert not reported
    path.write_text(SOURCE + "# other\n")
    assert reported == [importlib.import_module(f"{package}.first")]


def test_a_module_that_replaces_itself(package, reported, tmp_path):
    (tmp_path / package / "first.py").write_text("import sys; sys.modules[__name__] = sys")
    importlib.import_module(f"{package}.first")
    assert reported == [sys]


class Asking:
    """Another package's finder, which asks all finders as ours does."""

    def find_spec(self, name, path=None, target=None):
        others = [x for x in sys.meta_path if x is not self]
        return next(filter(None, (x.find_spec(name, path, target) for x in others)), None)


@pytest.mark.parametrize("position", (0, 1))
def test_beside_another_finder(position, package, reported, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sys.meta_path.insert(position, Asking())
    assert reported == [importlib.import_module(f"{package}.first")]


class Failing:
    """Another package's finder, which fails once."""

    def __init__(self):
        self.errors = [OSError("no such disk")]

    def find_spec(self, name, path=None, target=None):
        if self.errors:
            raise self.errors.pop()


def test_after_a_search_that_failed(package, reported, monkeypatch):
    importlib.import_module(package)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sys.meta_path.insert(sys.meta_path.index(_FINDER) + 1, Failing())
    with pytest.raises(OSError, match="no such disk"):
        importlib.import_module(f"{package}.first")
    assert reported == [importlib.import_module(f"{package}.first")]


def test_threads(package, reported):
    threads = [threading.Thread(target=importlib.import_module, args=(f"{package}.first",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reported) == 1


def test_an_error_becomes_a_warning(package):
    """The import does not fail, and what else waits is done."""
    modules = []
    when_imported(f"{package}.first", lambda module: module.no_such_name, "flash_qla does without")
    when_imported(f"{package}.first", modules.append, "nothing")
    with pytest.warns(RuntimeWarning, match="flash_qla does without: AttributeError: .*no_such_name"):
        module = importlib.import_module(f"{package}.first")
    assert modules == [module]
    with pytest.warns(RuntimeWarning, match="flash_qla does without: KeyError"):
        when_imported(f"{package}.first", lambda module: {}["key"], "flash_qla does without")


def test_modules_that_share_a_loader(tmp_path, monkeypatch):
    """Those of a zip archive, through an engine's replacement."""
    path, name = tmp_path / "engine.zip", f"zipped_{tmp_path.name}"
    with zipfile.ZipFile(path, "w") as archive:
        for module in ("__init__", "first", "second"):
            archive.writestr(f"{name}/{module}.py", SOURCE)
    monkeypatch.syspath_prepend(path)

    def ours(q):
        return "ours"

    reports = []
    paths = [f"{name}.{x}" for x in ("first", "second")]
    Replacement("1.0", {x: {"function": ours} for x in paths}).use_when_imported(lambda *x: reports.append(x))
    for x in paths:
        assert importlib.import_module(x).function(0) == "ours"
    assert reports == [(f"function of {x}", None) for x in paths]
    assert importlib.import_module(name).function(0) == "theirs"


# PyTorch's modules, each in a process of its own

DTENSOR = """
import importlib.util, runpy, warnings
from flash_qla.ops import schemas
warnings.simplefilter("error")
assert importlib.util.find_spec("torch.distributed.tensor") is not None
assert importlib.util.find_spec("torch.utils.flop_counter") is not None
runpy.run_module("torch.utils.flop_counter")
import torch.distributed.tensor, torch.utils.flop_counter
propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
for op in (schemas.forward, schemas.decode_buffered):
    assert op in propagator.op_strategy_funcs and propagator.op_to_schema_info[op].static_argnum == 1
    assert op.overloadpacket in torch.utils.flop_counter.flop_registry
"""

CHANGED = """
import warnings
from flash_qla.ops import later, schemas

def change(tensor):
    {change}

later._callbacks["torch.distributed.tensor"].insert(0, (change, "the test"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch.distributed.tensor
(message,) = [str(x.message) for x in caught if issubclass(x.category, RuntimeWarning)]
assert message.startswith(f"flash_qla takes no DTensors under PyTorch {{torch.__version__}}: {error}"), message
registries = vars(torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator).values()
assert not any(op.namespace == "flash_qla" for x in registries if isinstance(x, dict) for op in x)
"""
CHANGES = (
    ("tensor._op_schema.RuntimeSchemaInfo = lambda static_argnum: None", "TypeError"),
    ("del tensor._op_schema.RuntimeSchemaInfo", "ImportError"),
    ("tensor.DTensor._op_dispatcher.sharding_propagator.register_op_strategy = None", "TypeError"),
    (
        """propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    original = propagator.register_op_strategy
    def register(op, strategy, info):
        if info.static_argnum == 1:
            raise ValueError("all arguments")
        original(op, strategy, info)
    propagator.register_op_strategy = register""",
        "ValueError: all arguments",
    ),
)


def test_pytorchs_modules():
    """After a search, and of another release: nothing fails, and no op has a strategy that compares tensors alone."""
    programs = [CHANGED.format(change=change, error=error) for change, error in CHANGES]
    run_forks([DTENSOR, *programs], FLASH_QLA_QUIET="1")
