"""Functions that stand in for those of other packages have their parameters: names, order, kinds and defaults.

The signatures of the releases that flash_qla was written for are in signatures.json. A release that is installed is
compared as well, so that a new one is noticed. Other packages are read from their sources, and not imported.
"""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import signatures

PACKAGE = Path(importlib.util.find_spec("flash_qla").origin).parent
RECORDED = json.loads(signatures.RECORD.read_text())

# Package on PyPI -> function there -> our file
OURS = {
    "flash-qla": {
        "chunk_gated_delta_rule": "gated_delta_rule.py",
        "chunk_gated_delta_rule_fwd": "published.py",
        "chunk_gated_delta_rule_bwd": "gated_delta_rule.py",
        "build_cp_context": "cp/published.py",
        "FlashQLACPContext": "cp/published.py",
    },
    "fla-core": {
        "chunk_gated_delta_rule": "integrations/fla.py",
        "fused_recurrent_gated_delta_rule": "integrations/fla.py",
        "build_cp_context": "integrations/fla.py",
    },
    "megatron-core": {
        "torch_chunk_gated_delta_rule": "integrations/megatron.py",
    },
}
ENGINES = ("vllm", "sglang")  # their functions have one of several signatures
# Where flash_qla's own parameters follow those of the published package
EXTENDED = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
# Fields of the published context that hold its tables of segments
TABLES = ("intra_cp_cu_seqlens", "seq_map_r2c", "seq_map_c2r", "ht_mask", "ht_mask_bwd")

FUNCTIONS = [(package, name) for package, functions in signatures.FUNCTIONS.items() for name in functions]
every_function = pytest.mark.parametrize(("package", "name"), FUNCTIONS)


def replacing(engine: str, name: str) -> list[list[str] | None]:
    """Parameters of our functions that replace an engine's function, the newest release's first. None: not all releases
    have the function."""
    table = importlib.import_module(f"flash_qla.integrations.{engine}")._replacement.functions
    functions = next(x for of in table.values() for x in of.values() if x[0].__name__ == name)
    return [f and signatures.parameters_of_function(f) for f in functions]


def differences(package: str, name: str, release: dict) -> str | None:
    """What is different here, in words; None if nothing is."""
    text = release["signatures"][name]
    of_release = f"{package} {', '.join(release['releases'])}"
    if text is None:
        return None if package in ENGINES and None in replacing(package, name) else f"{of_release} has no {name}"
    expected = [x for x in text.split(", ") if x.split("=")[0] not in TABLES]
    if package in ENGINES:
        actual = replacing(package, name)
        return None if expected in actual else f"{name} has one of {actual}, expected {expected}, those of {of_release}"
    actual = signatures.parameters_of((PACKAGE / OURS[package][name]).read_text(), name)
    if package == "flash-qla" and name in EXTENDED:
        more = actual[len(expected) :]
        actual = actual[: len(expected)]
        if not all("=" in x or x.startswith("*") for x in more):
            return f"{name} requires more than that of {of_release}: {more}"
    return None if actual == expected else f"{name} has {actual}, expected {expected}, those of {of_release}"


@every_function
def test_recorded_releases(package, name):
    for release in RECORDED[package]:
        assert differences(package, name, release) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_no_signature_without_a_release(engine):
    """Each of our functions has the signature of a recorded release, the first one that of the newest."""
    for name in signatures.FUNCTIONS[engine]:
        texts = [release["signatures"][name] for release in RECORDED[engine]]
        recorded = [text and text.split(", ") for text in texts]
        ours = replacing(engine, name)
        assert ours[0] == recorded[-1] and all(x in recorded for x in ours)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layers_call_them(engine):
    """In each recorded release, in the modules and by the names that the integration replaces."""
    table = importlib.import_module(f"flash_qla.integrations.{engine}")._replacement.functions
    for release in RECORDED[engine]:
        remaining = {x: y for x, y in release["signatures"].items() if x not in signatures.FUNCTIONS[engine]}
        for path, names in table.items():
            of_module = remaining.pop(f"{path.replace('.', '/')}.py")
            assert list(of_module) == list(names)
            assert all(of_module[x] or (of_module[x] is None and None in y) for x, y in names.items())
        assert not remaining


@every_function
def test_installed_release(package, name):
    release = signatures.of_installed(package)
    if release is None:
        pytest.skip(f"{package} is not installed")
    assert differences(package, name, release) is None


def test_the_record_has_every_function():
    for package, releases in RECORDED.items():
        for release in releases:
            expected = [*signatures.FUNCTIONS[package], *signatures.LAYERS.get(package, ())]
            assert list(release["signatures"]) == expected and release["releases"]
    assert list(RECORDED) == list(signatures.FUNCTIONS)


CHANGES = {
    "another name": lambda x: [*x[:-1], f"another_{x[-1]}"],
    "one more": lambda x: [*x, "new=None"],
    "one less": lambda x: x[:-1],
    "another order": lambda x: [x[1], x[0], *x[2:]],
    "another default": lambda x: [y.replace("=None", "=17") for y in x],
    "by keyword": lambda x: [*x[:3], "*", *x[3:]],
}


@pytest.mark.parametrize("change", CHANGES)
@every_function
def test_a_new_release_is_noticed(package, name, change):
    recorded = [release["signatures"][name] for release in RECORDED[package]]
    text = ", ".join(CHANGES[change](recorded[-1].split(", ")))
    if text in recorded:
        pytest.skip(f"{name} has no default of None, or an earlier release had this signature")
    noticed = differences(package, name, {"releases": ["next"], "signatures": {name: text}})
    if change == "one less" and package == "flash-qla" and name != "build_cp_context":
        assert noticed is None  # flash_qla may have more, and the last field is one of TABLES
    else:
        assert noticed is not None


def test_parameters_of():
    source = """
def f(a, b=1, *args, c, d=x.y, **kwargs): ...
def g():
    def f(*, a): ...
class C:
    a: int
    b: str = ""
    def h(self): ...
"""
    assert signatures.parameters_of(source.replace("def g", "def h"), "C") == ["a", "b=''"]
    assert signatures.parameters_of(source.split("def g")[0], "f") == ["a", "b=1", "*args", "c", "d=x.y", "**kwargs"]
    assert signatures.parameters_of(source, "f") == ["*", "a"]
    assert signatures.parameters_of(source, "h") is None


def test_calls_of():
    source = """
from kernels import f, unused, g as h
def layer(x):
    h(x, y=[z for z in x])
    return f(q=x) + self.f(x) + f(q=x)
def k(): return f(q=x[1:], **options)
"""
    assert signatures.calls_of(source, "f") == ["f(q=x)", "f(q=x[1:], **options)"]
    assert signatures.calls_of(source, "h") == ["h(x, y=[z for z in x])"]
    assert signatures.calls_of(source, "unused") == signatures.calls_of(source, "k") == []
    assert signatures.calls_of(source, "g") is None
