"""Functions that stand in for those of other packages have their parameters: names, order, kinds and defaults.

The signatures of the releases that flash_qla was written for are in signatures.json. A release that is installed is
compared as well, so that a new one is noticed. Everything is read from sources, and nothing is imported.
"""

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
    "vllm": {
        "chunk_gated_delta_rule": "integrations/vllm.py",
        "fi_chunk_gated_delta_rule": "integrations/vllm.py",
        "fused_sigmoid_gating_delta_rule_update": "integrations/vllm.py",
        "fused_recurrent_gated_delta_rule_packed_decode": "integrations/_engines.py",
    },
    "megatron-core": {
        "torch_chunk_gated_delta_rule": "integrations/megatron.py",
    },
    "sglang": {
        "chunk_gated_delta_rule": "integrations/sglang.py",
        "fused_recurrent_linear_replayssm_decode": "integrations/sglang.py",
        "fused_sigmoid_gating_delta_rule_update": "integrations/sglang.py",
        "fused_recurrent_gated_delta_rule_packed_decode": "integrations/_engines.py",
    },
}
# Where flash_qla's own parameters follow those of the published package
EXTENDED = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
# Fields of the published context that hold its tables of segments
TABLES = ("intra_cp_cu_seqlens", "seq_map_r2c", "seq_map_c2r", "ht_mask", "ht_mask_bwd")

FUNCTIONS = [(package, name) for package, functions in OURS.items() for name in functions]
every_function = pytest.mark.parametrize(("package", "name"), FUNCTIONS)


def differences(package: str, name: str, release: dict) -> str | None:
    """What is different here, in words; None if nothing is."""
    came = signatures.parameters_of((PACKAGE / OURS[package][name]).read_text(), name)
    (text,) = [functions[name] for functions in release["files"].values() if name in functions]
    of_release = f"{package} {release['release']}"
    if text is None:
        return f"{of_release} has no {name}"
    expected = [x for x in text.split(", ") if x.split("=")[0] not in TABLES]
    if package == "flash-qla" and name in EXTENDED:
        more = came[len(expected) :]
        came = came[: len(expected)]
        if not all("=" in x or x.startswith("*") for x in more):
            return f"{name} requires more than that of {of_release}: {more}"
    return None if came == expected else f"{name} has {came}, expected {expected}, those of {of_release}"


@every_function
def test_recorded_release(package, name):
    assert differences(package, name, RECORDED[package]) is None


@every_function
def test_installed_release(package, name):
    release = signatures.of_installed(package)
    if release is None:
        pytest.skip(f"{package} is not installed")
    assert differences(package, name, release) is None


def test_the_record_has_every_function():
    found = {
        (package, name) for package, x in RECORDED.items() for functions in x["files"].values() for name in functions
    }
    assert found == set(FUNCTIONS)


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
    (text,) = [functions[name] for functions in RECORDED[package]["files"].values() if name in functions]
    parameters = CHANGES[change](text.split(", "))
    if parameters == text.split(", "):
        pytest.skip(f"{name} has no default of None")
    release = {"release": "next", "files": {"file": {name: ", ".join(parameters)}}}
    noticed = differences(package, name, release)
    if change == "one less" and package == "flash-qla" and name != "build_cp_context":
        assert noticed is None  # flash_qla may have more, and the last field is one of TABLES
    else:
        assert noticed is not None


@every_function
def test_a_function_that_is_gone_is_noticed(package, name):
    assert differences(package, name, {"release": "next", "files": {"file": {name: None}}}) is not None


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
