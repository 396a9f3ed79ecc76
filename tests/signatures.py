"""Signatures of the functions of other packages that flash_qla stands in for, and how the layers of engines call them.

Both are read from sources, without imports.

    pip download --no-deps --dest wheels flash-qla fla-core vllm sglang megatron-core    # each release one by one
    python tests/signatures.py wheels/*.whl             # writes what it finds to tests/signatures.json

A package without wheels keeps its records. tests/test_signatures.py compares flash_qla's functions with this file, and
with the releases that are installed. test_vllm.py and test_sglang.py run the recorded calls.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

RECORD = Path(__file__).with_name("signatures.json")

# Package on PyPI -> function or class -> its file, the newest release's first
FUNCTIONS = {
    "flash-qla": {
        "chunk_gated_delta_rule": ("flash_qla/ops/gated_delta_rule/chunk/__init__.py",),
        "chunk_gated_delta_rule_fwd": ("flash_qla/ops/gated_delta_rule/chunk/__init__.py",),
        "chunk_gated_delta_rule_bwd": ("flash_qla/ops/gated_delta_rule/chunk/__init__.py",),
        "build_cp_context": ("flash_qla/ops/gated_delta_rule/chunk/cp/context.py",),
        "FlashQLACPContext": ("flash_qla/ops/gated_delta_rule/chunk/cp/context.py",),
    },
    "fla-core": {
        "chunk_gated_delta_rule": ("fla/ops/gated_delta_rule/chunk.py",),
        "fused_recurrent_gated_delta_rule": ("fla/ops/gated_delta_rule/fused_recurrent.py",),
        "build_cp_context": ("fla/ops/cp/context.py",),
    },
    "vllm": {
        "chunk_gated_delta_rule": (
            "vllm/third_party/flash_linear_attention/ops/chunk.py",
            "vllm/model_executor/layers/fla/ops/chunk.py",
        ),
        "fi_chunk_gated_delta_rule": ("vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",),
        "fused_recurrent_gated_delta_rule_packed_decode": (
            "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
            "vllm/model_executor/layers/fla/ops/fused_recurrent.py",
        ),
        "fused_recurrent_gated_delta_rule": (
            "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
            "vllm/model_executor/layers/fla/ops/fused_recurrent.py",
        ),
        "fused_sigmoid_gating_delta_rule_update": (
            "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
            "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
        ),
        "causal_conv1d_fn": ("vllm/model_executor/layers/mamba/ops/causal_conv1d.py",),
        "fused_post_conv_prep": (
            "vllm/third_party/flash_linear_attention/ops/fused_gdn_prefill_post_conv.py",
            "vllm/model_executor/layers/fla/ops/fused_gdn_prefill_post_conv.py",
        ),
    },
    "megatron-core": {
        "torch_chunk_gated_delta_rule": ("megatron/core/ssm/gated_delta_net/common.py",),
    },
    "sglang": {
        "chunk_gated_delta_rule": (
            "sglang/kernels/ops/attention/fla/chunk.py",
            "sglang/srt/layers/attention/fla/chunk.py",
        ),
        "fused_recurrent_gated_delta_rule_packed_decode": (
            "sglang/kernels/ops/attention/fla/fused_recurrent.py",
            "sglang/srt/layers/attention/fla/fused_recurrent.py",
        ),
        "fused_recurrent_linear_replayssm_decode": (
            "sglang/kernels/ops/attention/linear/fused_recurrent_linear_replayssm.py",
            "sglang/kernels/ops/attention/fla/fused_recurrent_linear_replayssm.py",
            "sglang/srt/layers/attention/fla/fused_recurrent_linear_replayssm.py",
        ),
        "fused_sigmoid_gating_delta_rule_update": (
            "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
            "sglang/kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py",
            "sglang/srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py",
        ),
        "causal_conv1d_fn": ("sglang/srt/layers/attention/mamba/causal_conv1d.py",),
        "fused_qkv_split_gdn_prefill": (
            "sglang/kernels/ops/attention/triton_gdn_fused_proj.py",
            "sglang/jit_kernel/triton/gdn_fused_proj.py",
        ),
    },
}
# Package on PyPI -> the modules in which layers call these functions -> the names there
LAYERS = {
    "vllm": {
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": (
            "fla_chunk_gated_delta_rule",
            "fi_chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode",
            "fused_sigmoid_gating_delta_rule_update",
            "causal_conv1d_fn",
            "fused_post_conv_prep",
        ),
        "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "causal_conv1d_fn",
        ),
    },
    "sglang": {
        "sglang/srt/layers/attention/linear/kernels/gdn_triton.py": (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode",
            "fused_recurrent_gdn_replayssm_decode",
            "fused_sigmoid_gating_delta_rule_update",
        ),
        "sglang/srt/layers/attention/linear/gdn_backend.py": (
            "fused_qkv_split_gdn_prefill",
            "causal_conv1d_fn",
        ),
    },
}
# Names of numbers that are defaults
CONSTANTS = {"PAD_SLOT_ID": -1, "NULL_BLOCK_ID": 0}


def parameters_of(source: str, name: str) -> list[str] | None:
    """The parameters of a function, or the fields of a dataclass, without annotations; None without such a name.

    Such as ["q", "scale=None", "*", "layout='contiguous'", "**kwargs"]. If there are overloads, the last one counts.
    """
    parameters = None
    for node in ast.parse(source).body:
        nested = [node, *(ast.walk(node) if isinstance(node, ast.FunctionDef) else ())]
        for x in nested:
            if isinstance(x, ast.FunctionDef) and x.name == name:
                parameters = _of_function(x.args)
        if isinstance(node, ast.ClassDef) and node.name == name:
            parameters = [_text(x.target.id, x.value) for x in node.body if isinstance(x, ast.AnnAssign)]
    return parameters


def _text(name: str, default: ast.expr | None) -> str:
    if default is None:
        return name
    text = ast.unparse(default)
    return f"{name}={CONSTANTS.get(text, text)}"


def _of_function(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = [_text(x.arg, default) for x, default in zip(positional, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        parameters.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    parameters += [
        _text(x.arg, default) for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(f"**{arguments.kwarg.arg}")
    return parameters


def parameters_of_function(function: Callable) -> list[str]:
    """The same of a function."""
    parameters = inspect.signature(function).parameters.values()
    names = [f"**{x.name}" if x.kind is x.VAR_KEYWORD else x.name for x in parameters]
    return [y if x.default is x.empty else f"{y}={x.default!r}" for x, y in zip(parameters, names, strict=True)]


def calls_of(source: str, name: str) -> list[str] | None:
    """The calls of a function in a module, each text once; None if the module neither defines nor imports the name."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {x.asname or x.name for node in nodes if isinstance(node, ast.ImportFrom) for x in node.names}
    if name not in imported | {x.name for x in nodes if isinstance(x, ast.FunctionDef)}:
        return None
    calls = [x for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == name]
    return list(dict.fromkeys(map(ast.unparse, sorted(calls, key=lambda x: x.lineno))))


def signatures(package: str, read: Callable[[str], str | None]) -> dict:
    """{function: "parameter, parameter, ..."} of a release, and {module of layers: {name: [call, ...]}}.

    None replaces a text if the release has no such file or function.

    Args:
        read: returns the source of a file, or None.
    """
    texts = {}
    for name, files in FUNCTIONS[package].items():
        source = next(filter(None, map(read, files)), None)
        parameters = None if source is None else parameters_of(source, name)
        texts[name] = None if parameters is None else ", ".join(parameters)
    for path, names in LAYERS.get(package, {}).items():
        source = read(path) or ""
        texts[path] = {name: calls_of(source, name) for name in names}
    return texts


def of_wheel(wheel: Path) -> tuple[str, str, dict]:
    """The package's name, its release, and its signatures."""
    name, version = re.match(r"(\w+)-([^-]+)-", wheel.name).groups()
    package = name.replace("_", "-")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        return package, version, signatures(package, lambda x: archive.read(x).decode() if x in files else None)


def of_installed(package: str) -> dict | None:
    """The installed release, as in the record; None if the package is not installed."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None

    def read(path: str) -> str | None:
        file = Path(distribution.locate_file(path))
        return file.read_text() if file.is_file() else None

    return {"releases": [distribution.version], "signatures": signatures(package, read)}


def main(wheels: list[str]) -> None:
    """Records {package: [{releases, signatures}, ...]}: consecutive releases with the same signatures together."""
    releases = sorted(map(of_wheel, map(Path, wheels)), key=lambda x: Version(x[1]))
    recorded = json.loads(RECORD.read_text()) | {package: [] for package, _, _ in releases}
    for package, version, texts in releases:
        groups = recorded[package]
        if not groups or groups[-1]["signatures"] != texts:
            groups.append({"releases": [], "signatures": texts})
        groups[-1]["releases"].append(version)
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
