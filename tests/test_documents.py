"""README and docs/: their Python runs, their figures are those of the results, their links lead somewhere."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from flash_qla import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
forward = importlib.import_module("forward")

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "benchmarks/notes").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: .+ -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def test_readme_is_short_and_begins_with_an_example():
    assert len(README.read_bytes()) <= 9_000
    lines = README.read_text().splitlines()
    start = lines.index("```python")
    assert lines.index("```", start) < 25


@pytest.mark.parametrize("page", [README, *PAGES], ids=relative)
def test_pages_begin_with_their_heading(page):
    text = page.read_text()
    assert text.startswith(("# ", "```{include} ../")), relative(page)


@pytest.mark.parametrize("page", [README, *PAGES], ids=relative)
def test_pages_have_no_commit_hashes(page):
    words = re.findall(r"\b[0-9a-f]{7,40}\b", page.read_text())
    assert not [word for word in words if re.search("[0-9]", word) and re.search("[a-f]", word)]


def figures(row: "forward.Row") -> list[str]:
    """As the tables give them."""
    return [
        f"{row.ms:.3f}",
        f"{row.floor:.0%}",
        *(f"{row.ratios[peer]:.2f}" if peer in row.ratios else "-" for peer in forward.PEERS),
    ]


def speed_table(page: Path) -> dict[str, list[str]]:
    """The cells of the first table of speed, by heads and sequences."""
    _, _, after = page.read_text().partition("| q/k x v heads | sequences |")
    rows = after.partition("---|\n")[2]
    assert rows
    table = {}
    for line in rows.splitlines():
        if not line.startswith("|"):
            break
        heads, sequences, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[f"{heads} {sequences}"] = cells
    return table


def test_figures_are_those_of_the_results():
    cells = forward.load([ROOT / "benchmarks/results/forward_h200.json"])
    low_level, op = ({row.name: row for row in forward.rows_of(cells, "bench", x)} for x in ("default", "op"))
    for name, found in speed_table(README).items():
        assert found == figures(op[name]), name
    for name, found in speed_table(ROOT / "docs/speed.md").items():
        ms, *others = figures(low_level[name])
        assert found == [ms, f"{op[name].ms:.3f}", *others, f"{op[name].ratios['flashinfer']:.2f}"], name

    text = README.read_text()
    for peer, label in forward.PEERS.items():
        mean = forward.geometric_mean(row.ratios[peer] for row in op.values() if peer in row.ratios)
        assert f"{mean:.2f}x {label}" in text


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_oldest_driver_is_that_of_the_library():
    floor = re.search(r"need NVIDIA driver (\d+) or newer", _C.obstacle(0, 9, 0))[1]
    for name in ("README.md", "CONTRIBUTING.md", "docs/support.md", "docs/wheels.md"):
        said = re.findall(r"\bdrivers?(?: from)? (\d+)(?= or newer| on\b)", (ROOT / name).read_text())
        assert said and set(said) == {floor}, name


def test_notes_are_all_in_the_index():
    index = (ROOT / "benchmarks/notes/README.md").read_text()
    for page in (ROOT / "benchmarks/notes").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_the_prose_linter_has_one_version():
    version = re.search(r"pymarkdownlnt==([\d.]+)", (ROOT / ".ci/run").read_text())[1]
    assert f"pymarkdown\n    rev: v{version}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
