"""Signatures of the functions of other packages that flash_qla stands in for, read from their sources without imports.

    pip download --no-deps --dest wheels flash-qla fla-core vllm sglang megatron-core
    python tests/signatures.py wheels/*.whl             # writes tests/signatures.json

tests/test_signatures.py compares flash_qla's functions with this file, and with the releases that are installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")

# Package on PyPI -> file -> the functions, with their classes
FUNCTIONS = {
    "flash-qla": {
        "flash_qla/ops/gated_delta_rule/chunk/__init__.py": (
            "chunk_gated_delta_rule",
            "chunk_gated_delta_rule_fwd",
            "chunk_gated_delta_rule_bwd",
        ),
        "flash_qla/ops/gated_delta_rule/chunk/cp/context.py": ("build_cp_context", "FlashQLACPContext"),
    },
    "fla-core": {
        "fla/ops/gated_delta_rule/chunk.py": ("chunk_gated_delta_rule",),
        "fla/ops/gated_delta_rule/fused_recurrent.py": ("fused_recurrent_gated_delta_rule",),
        "fla/ops/cp/context.py": ("build_cp_context",),
    },
    "vllm": {
        "vllm/third_party/flash_linear_attention/ops/chunk.py": ("chunk_gated_delta_rule",),
        "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py": (
            "fused_recurrent_gated_delta_rule_packed_decode",
        ),
        "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py": (
            "fused_sigmoid_gating_delta_rule_update",
        ),
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": ("fi_chunk_gated_delta_rule",),
    },
    "megatron-core": {
        "megatron/core/ssm/gated_delta_net/common.py": ("torch_chunk_gated_delta_rule",),
    },
    "sglang": {
        "sglang/kernels/ops/attention/fla/chunk.py": ("chunk_gated_delta_rule",),
        "sglang/kernels/ops/attention/fla/fused_recurrent.py": ("fused_recurrent_gated_delta_rule_packed_decode",),
        "sglang/kernels/ops/attention/linear/fused_recurrent_linear_replayssm.py": (
            "fused_recurrent_linear_replayssm_decode",
        ),
        "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py": (
            "fused_sigmoid_gating_delta_rule_update",
        ),
    },
}


def parameters_of(source: str, name: str) -> list[str] | None:
    """The parameters of a function, or the fields of a dataclass, without annotations; None without such a name.

    Such as ["q", "scale=None", "*", "layout='contiguous'", "**kwargs"]. If there are overloads, the last one counts.
    """
    found = None
    for node in ast.parse(source).body:
        nested = [node, *(ast.walk(node) if isinstance(node, ast.FunctionDef) else ())]
        for x in nested:
            if isinstance(x, ast.FunctionDef) and x.name == name:
                found = _of_function(x.args)
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = [_text(x.target.id, x.value) for x in node.body if isinstance(x, ast.AnnAssign)]
    return found


def _text(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _of_function(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [_text(x.arg, default) for x, default in zip(positional, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    found += [_text(x.arg, default) for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def signatures(package: str, read: Callable[[str], str | None]) -> dict:
    """{file: {function: "parameter, parameter, ..."}} of a release; None: it has no such file or function.

    Args:
        read: returns the source of a file, or None.
    """
    found = {}
    for path, names in FUNCTIONS[package].items():
        source = read(path)
        parameters = {name: None if source is None else parameters_of(source, name) for name in names}
        found[path] = {name: None if x is None else ", ".join(x) for name, x in parameters.items()}
    return found


def of_wheel(wheel: Path) -> tuple[str, dict]:
    """The package's name, and its release with its signatures."""
    name, version = re.match(r"(\w+)-([^-]+)-", wheel.name).groups()
    package = name.replace("_", "-")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        found = signatures(package, lambda path: archive.read(path).decode() if path in files else None)
    return package, {"release": version, "files": found}


def of_installed(package: str) -> dict | None:
    """The signatures of the installed release; None if the package is not installed."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None

    def read(path: str) -> str | None:
        file = Path(distribution.locate_file(path))
        return file.read_text() if file.is_file() else None

    return {"release": distribution.version, "files": signatures(package, read)}


def main(wheels: list[str]) -> None:
    recorded = dict(of_wheel(Path(wheel)) for wheel in wheels)
    assert recorded.keys() == FUNCTIONS.keys(), f"got wheels of {sorted(recorded)}, expected {sorted(FUNCTIONS)}"
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
