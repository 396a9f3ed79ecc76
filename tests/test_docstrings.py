"""Docstrings of the functions in docs/api.md: an entry for every argument, in the shape that docs/conf.py renders."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import flash_qla

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECTIONS = {"Parameters", "Other Parameters", "Attributes", "Returns", "Raises"}
TABLE = re.compile(r"^\| function of `([\w.]+)` .*\n((?:\|.*\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \w+)*) : (.+)\n((?:    .*\n)*)", re.MULTILINE)


def names_of_the_reference() -> list[str]:
    """Full names, except those of the module _C: bindings.cpp has its docstrings."""
    tables = TABLE.findall((DOCS / "api.md").read_text())
    rows = [(module, row) for module, table in tables for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)]
    names = [f"{module}.{name}" for module, row in rows for name in re.findall(r"`([\w.]+)`", row)]
    return [name for name in names if "._C." not in name]


def groups_of_the_site() -> set[str]:
    """GROUPS of conf.py, which cannot be imported without Sphinx."""
    (value,) = re.findall(r"^GROUPS = (\(.*?^\))$", (DOCS / "conf.py").read_text(), re.MULTILINE | re.DOTALL)
    return set(ast.literal_eval(value))


NAMES = names_of_the_reference()
every_name = pytest.mark.parametrize("name", NAMES)


def documented(name: str):
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


def entries_of(name: str) -> dict[str, tuple[str, str]]:
    """Argument -> type and text of its entry."""
    before_results = inspect.getdoc(documented(name)).partition("\nReturns\n---")[0] + "\n"
    entries = {}
    for arguments, *entry in ENTRY.findall(before_results):
        for argument in arguments.strip("*").split(", "):
            assert argument not in entries, f"{name} describes {argument} twice"
            entries[argument] = tuple(entry)
    return entries


def test_the_reference_has_names():
    assert {f"flash_qla.{x}" for x in flash_qla.__all__} - {"flash_qla.__version__"} <= set(NAMES)


@every_name
def test_every_argument_has_an_entry(name):
    if inspect.isclass(documented(name)):
        pytest.skip("a class")
    entries, parameters = entries_of(name), inspect.signature(documented(name)).parameters
    assert set(parameters) == set(entries)
    for argument, (type_, text) in entries.items():
        default = parameters[argument].default
        if type_.endswith(", optional"):
            assert default is None, argument
        elif stated := re.search(r", default (.+)$", type_):
            assert ast.literal_eval(stated[1]) == default, argument
        else:
            assert default in (inspect.Parameter.empty, ()), argument
        for other in re.findall(r"\b[Aa]s in ((?:\w+\.)*\w*_\w+)", text):  # says it itself
            path = other if other.startswith("flash_qla.") else f"flash_qla.{other}"
            assert argument == "kwargs" or not re.search(r"\b[Aa]s in \w+_", entries_of(path)[argument][1]), (
                argument,
                other,
            )


@every_name
def test_shape(name):
    """Headings that the site knows, results with a type, no description that begins like an item of a list ("K.")."""
    text = inspect.getdoc(documented(name))
    headings = re.findall(r"^(.+)\n-{3,}$", text, re.MULTILINE)
    assert set(headings) <= SECTIONS | groups_of_the_site()
    assert len(set(headings)) == len(headings)
    assert not re.search(r"^(Args|Attributes|Returns|Raises|Yields):$", text, re.MULTILINE)
    assert not re.search(r"^    (\w|\d+|[ivxIVX]+)\.( |$)", text.partition("Parameters\n---")[2], re.MULTILINE)
    results = re.findall(r"^Returns\n-+\n((?:.+\n?)*)", text, re.MULTILINE)
    assert all(" : " in line for line in "".join(results).splitlines() if not line.startswith(" "))


def test_every_group_is_used():
    headings = {
        x for name in NAMES for x in re.findall(r"^(.+)\n-{3,}$", inspect.getdoc(documented(name)), re.MULTILINE)
    }
    assert groups_of_the_site() <= headings


@every_name
def test_rendered(name, monkeypatch):
    """By the functions of Sphinx that build the site: no rule of a heading, and no list that nobody wrote, is left."""
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="Sphinx is not installed")
    from docutils import core, nodes
    from docutils.parsers.rst import roles

    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "conf", raising=False)
    conf = importlib.import_module("conf")
    monkeypatch.setattr(roles, "_roles", {**roles._roles, "py:func": roles.GenericRole("py:func", nodes.literal)})
    lines = inspect.getdoc(documented(name)).splitlines()
    conf.plain_docstring(None, "function", name, None, None, lines)
    settings = {x: getattr(conf, x) for x in vars(conf) if x.startswith("napoleon_")}
    text = str(napoleon.NumpyDocstring("\n".join(lines), napoleon.Config(**settings)))
    tree = core.publish_doctree(text, settings_overrides={"report_level": 5})
    assert "---" not in tree.astext() and "`" not in tree.astext()
    assert not list(tree.findall(nodes.enumerated_list)) and not list(tree.findall(nodes.problematic))
