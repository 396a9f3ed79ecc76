"""README and docs/: their Python runs, their figures are those of the results, their links lead somewhere."""

import importlib
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from subprocesses import run_forks

import flash_qla
from flash_qla import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
report = importlib.import_module("report")
sys.path.append(str(ROOT / "docs"))
mathml = importlib.import_module("formula").mathml

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "benchmarks/notes").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_of(page: Path) -> str:
    """A page's blocks of Python one after the other, on the lines where they stand."""
    text = page.read_text()
    code = ""
    for block in BLOCK.finditer(text):
        if block[1] is None:
            code += "\n" * (text.count("\n", 0, block.start(2)) - code.count("\n")) + block[2]
    return code


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in (README, *PAGES) if python_of(page)], ids=relative)
def test_python_runs(page, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    exec(compile(python_of(page), page, "exec"), {"__name__": page.stem})


@pytest.mark.long
def test_samples_pass_the_checks():
    """With FLASH_QLA_CHECK=1: their keys are normalized, and their results finite."""
    samples = [code for code in map(python_of, (README, *PAGES)) if code]
    run_forks(samples, FLASH_QLA_CHECK="1", FLASH_QLA_QUIET="1", CUDA_VISIBLE_DEVICES="")


def test_tables_are_those_of_the_results():
    data = report.load(report.RESULTS)
    for page in report.pages():
        assert report.filled(page.read_text(), data) == page.read_text(), f"{page}: run benchmarks/report.py"


@pytest.mark.parametrize(
    ("page", "beginning", "tables", "count"),
    (
        ("docs/engines.md", "**Expect**", ("gain", "decode_steps"), 6),
        ("docs/speed.md", "Megatron-core was not measured", ("means",), 1),
        ("README.md", "In a model [you gain", ("gain",), 1),
    ),
)
def test_sentences_have_figures_of_the_results(page, beginning, tables, count):
    """What a page says to expect stands in the tables."""
    (paragraph,) = re.findall(rf"{re.escape(beginning)}.*?\n\n", (ROOT / page).read_text(), re.DOTALL)
    data = report.load(report.RESULTS)
    figures = re.findall(r"\d\.\d\d", paragraph)
    assert len(figures) == count
    assert set(figures) <= set(re.findall(r"\d\.\d\d", "".join(report.TABLES[name](data) for name in tables)))


def test_the_figure_is_that_of_the_results():
    assert report.overview(report.load(report.RESULTS)) == report.FIGURE.read_text(), "run benchmarks/report.py"


def text_of(element) -> str:
    return "".join(element.itertext())


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_no_line_is_lost(page):
    """MyST takes a line that begins with % for a comment, and leaves it out of the HTML."""
    assert not re.search(r"^\s*%", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_formulas_are_whole(page):
    """Every letter and digit of a page's formulas is in what is typeset."""
    for formula in re.findall(r"^```\{formula\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        typeset = text_of(xml.etree.ElementTree.fromstring(mathml(formula)))
        names = formula.replace("beta", "β").replace("gamma", "γ").replace("sum_", "")
        assert re.findall(r"[^\W_]", typeset) == re.findall(r"[^\W_]", names), page.name


def anchors_of(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a page, and MyST too."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), f"{target}#{anchor}"


def test_the_reference_has_every_function():
    """In tables, below which the site has the docstrings."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert {*flash_qla.__all__} - {"__version__"} <= set(re.findall(r"`([\w.]+)`", " ".join(rows)))


def test_the_oldest_driver_is_that_of_the_library():
    floor = re.search(r"need NVIDIA driver (\d+) or newer", _C.obstacle(0, 9, 0))[1]
    for name in ("README.md", "CONTRIBUTING.md", "docs/support.md", "docs/wheels.md"):
        versions = re.findall(r"\bdrivers?(?: from)? (\d+)(?= or newer| on\b)", (ROOT / name).read_text())
        assert versions and set(versions) == {floor}, name
