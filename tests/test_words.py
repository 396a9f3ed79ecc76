"""Comments and docstrings name their subject first. Words that a reader has to translate are counted, and kept few."""

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels_tl", "csrc", "flash_qla", "build_tools")
GENERATED = ("flash_qla/_layout.py",)  # a copy of kernels_tl/layout.py
MOST = 40  # places in all four folders

PREPOSITION = (
    "about|above|after|among|as|at|before|behind|below|beneath|beside|besides|between|beyond|by|during|for|from|in|into|"
    "like|of|on|onto|over|per|than|through|to|toward|towards|under|until|upon|with|within|without"
)
# How a comment, or a paragraph of one, may not begin. "For example" and "in-place" are no prepositions.
OPENINGS = {
    "opens with a preposition": re.compile(rf"(?!for example\b)({PREPOSITION})\b(?!-)", re.IGNORECASE),
    "opens with What": re.compile(r"what\b", re.IGNORECASE),
    "opens with Likewise": re.compile(r"likewise\b", re.IGNORECASE),
}
# Words to avoid in comments, texts and names.
WORDS = {
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "nobody": re.compile(r"\bnobody\b", re.IGNORECASE),
    "there are none": re.compile(r"\bthere (is|are|was|were) none\b", re.IGNORECASE),
}
CPP_TOKEN = re.compile(r'R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|(?P<comment>//[^\n]*)', re.DOTALL)


def python_comments(source: str) -> Iterator[tuple[int, int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield *token.start, token.string.lstrip("#").strip()


def cpp_comments(source: str) -> Iterator[tuple[int, int, str]]:
    for found in CPP_TOKEN.finditer(source):
        if found["comment"]:
            column = found.start() - source.rfind("\n", 0, found.start()) - 1
            yield source.count("\n", 0, found.start()) + 1, column, found["comment"].lstrip("/").strip()


def paragraphs_of_comments(comments: Iterator[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Line and text where a run of comment lines begins, or a paragraph in it. A run keeps to one column."""
    next_line, previous_column, within = 0, 0, False
    for line, column, text in comments:
        continues = line == next_line and column == previous_column and within
        if text and not continues:
            yield line, text
        next_line, previous_column, within = line + 1, column, bool(text)


def paragraphs_of_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text where each paragraph begins. Paragraphs that are set off are formulas and examples of code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = node.value.value.split("\n")
            for i, text in enumerate(lines):
                set_off = i > 0 and text[node.col_offset : node.col_offset + 1].isspace()
                if text.strip() and not set_off and (i == 0 or not lines[i - 1].strip()):
                    yield node.lineno + i, text.strip()


def found_in(name: str, source: str) -> Iterator[tuple[str, str]]:
    """(pattern, "file:line: text") of each place."""
    is_python = name.endswith((".py", ".pyi"))
    openings = list(paragraphs_of_comments((python_comments if is_python else cpp_comments)(source)))
    if is_python:
        openings += paragraphs_of_docstrings(source)
    for line, text in sorted(openings):
        for pattern, opening in OPENINGS.items():
            if opening.match(text):
                yield pattern, f"{name}:{line}: {text}"
    for line, text in enumerate(source.split("\n"), 1):
        for pattern, word in WORDS.items():
            for _ in word.findall(text):
                yield pattern, f"{name}:{line}: {text.strip()}"


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_generated = str(path.relative_to(ROOT)) in GENERATED
            if path.suffix in (".py", ".pyi", ".cpp", ".h", ".cuh") and not is_generated:
                yield path


def test_comments_open_with_their_subject():
    places, by_folder = collections.defaultdict(list), collections.Counter(dict.fromkeys(FOLDERS, 0))
    for path in sources():
        name = str(path.relative_to(ROOT))
        for pattern, place in found_in(name, path.read_text()):
            places[pattern].append(place)
            by_folder[path.relative_to(ROOT).parts[0]] += 1
    count = by_folder.total()
    report = [f"{count} places, expected at most {MOST}: {dict(by_folder)}"]
    for pattern, found in places.items():
        report += [f"{pattern}: {len(found)}", *(f"  {place}" for place in found)]
    print(report[0])
    assert count <= MOST, "\n".join(report)


def test_the_count_finds_what_it_is_for():
    python = '''"""Of a module.

What follows.

For example, this is a subject's sentence.

    from a import b
"""
x = 1  # behind the last
# A comment about nobody
# of two lines
y = "there are none"  # in-place
#
# Likewise a paragraph.
'''
    assert collections.Counter(pattern for pattern, _ in found_in("a.py", python)) == {
        "opens with a preposition": 2,
        "opens with What": 1,
        "opens with Likewise": 1,
        "behind": 1,
        "nobody": 1,
        "there are none": 1,
    }
    cpp = """int x;  // With a member
        // of two lines
// In a run
// of lines
const char* url = "http://for.example";
"""
    assert [place for _, place in found_in("a.h", cpp)] == ["a.h:1: With a member", "a.h:3: In a run"]


def test_every_folder_is_read():
    read = collections.Counter(path.relative_to(ROOT).parts[0] for path in sources())
    assert all(read[folder] >= 10 for folder in FOLDERS)
