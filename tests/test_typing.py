"""Type checkers find in the installed package what its users write. (test_installation.py compares _C.pyi with its
module.)"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_qla

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flash_qla.__file__).parent
PROGRAM = Path(__file__).with_name("typed_program.py")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py"))


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or any(path.with_suffix(suffix).exists() for suffix in (".py", ".pyi"))


def documented_names() -> list[str]:
    """Those of the package, with dots, that the documents and the examples import or mention."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    imported = re.findall(r"^from (flash_qla[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    names = {f"{module}.{name}" for module, names in imported for name in names.split(", ")}
    return sorted(names | set(re.findall(r"\bflash_qla(?:\.\w+)+", text)))


def documented_program() -> str:
    """It imports the modules and takes the other names from them."""
    modules = set()
    for name in documented_names():
        while not is_module(name):
            name = name.rpartition(".")[0]
        modules.add(name)
    return "\n".join([*(f"import {name}" for name in sorted(modules)), *documented_names(), ""])


@pytest.fixture
def programs(tmp_path) -> list[Path]:
    """Programs beside a link to the package, because type checkers do not find an editable install."""
    (tmp_path / "flash_qla").symlink_to(PACKAGE)
    (tmp_path / "typed_program.py").write_text(PROGRAM.read_text())
    (tmp_path / "documented.py").write_text(documented_program())
    return [tmp_path / "typed_program.py", tmp_path / "documented.py"]


def check(*command: str | Path, folder: Path) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_overloads_are_the_function():
    """But for the argument that they are about, and for how it can be given."""
    tree = ast.parse((PACKAGE / "gated_delta_rule.py").read_text())
    *overloads, function = (x.args for x in tree.body if getattr(x, "name", None) == "chunk_gated_delta_rule_bwd")
    expected = [ast.unparse(x) for x in function.args if x.arg != "use_gate_in_kernel"]
    assert len(overloads) == 3
    for overload in overloads:
        actual = [ast.unparse(x) for x in (*overload.args, *overload.kwonlyargs) if x.arg != "use_gate_in_kernel"]
        assert actual == expected


def test_the_program_imports():
    import typed_program

    assert typed_program.published_bwd is flash_qla.chunk_gated_delta_rule_bwd


@pytest.mark.long
def test_mypy(programs):
    """Errors in the package itself are not a user's; an `ignore` without an error is one."""
    options = ("--strict", "--follow-imports=silent", "--cache-dir=/dev/null")
    check("mypy", *options, *programs, folder=programs[0].parent)


@pytest.mark.long
def test_pyright(programs):
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": True, "include": ["*.py"]}
    settings |= {"reportUnusedExpression": False, "reportPrivateUsage": False}
    (programs[0].parent / "pyrightconfig.json").write_text(json.dumps(settings))
    check("pyright", "--pythonpath", sys.executable, folder=programs[0].parent)
