"""The documentation's site: `sphinx-build -W --keep-going docs build/docs`, with the package installed."""

import importlib
import re
import sys
from pathlib import Path

import torch
from docutils import nodes
from docutils.parsers.rst import Directive

import flash_qla
import flash_qla._C  # here, or autodoc would take its .pyi, which has no docstrings

sys.path.insert(0, str(Path(__file__).parent))
from formula import mathml

project = "flash_qla"
version = release = flash_qla.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_title = f"flash_qla {release}"
html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Groups of arguments
GROUPS = (
    "States",
    "Packed sequences",
    "Weights",
    "Pools",
    "Activations inside",
    "Kept states",
    "Drafts",
    "Other packages",
)
napoleon_use_param = False  # arguments that share an entry remain one entry
napoleon_use_ivar = True
napoleon_custom_sections = [(name, "params_style") for name in ("Other Parameters", *GROUPS)]

SECTION = re.compile(rf"Parameters|Other Parameters|Attributes|Returns|Raises|{'|'.join(GROUPS)}|-+")
# Code, functions, and characters that reStructuredText would take for markup
MARKUP = re.compile(
    rf"`(?P<code>[^`]+)`|(?<![\w.])(?P<path>flash_qla\.)?(?P<name>{'|'.join(flash_qla.__all__)})(?!\w|\.\w)|[\\*`|_]"
)
LIST = re.compile(r"^- ([^:]+): ((?:.|\n  )+)", re.MULTILINE)
LINK = re.compile(r"\]\((\w+)\.md\)")
WHOLE_FILE = re.compile(r"\[[^\]]+\]\(([^)]+)\)\n")
API = re.compile(r"^\| function of `([\w.]+)` .*\n((?:\|.*\n)+)\n<!-- api -->$", re.MULTILINE)


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: what reStructuredText would take for markup is not, except code in backticks; names of
    functions are links; and indented lines behind a blank one are formulas or code."""

    def marked_up(x: re.Match) -> str:
        if x["code"]:
            return f"``{x['code']}``"
        is_ours = x["path"] or name.count(".") == 1  # in other modules a bare name may be another package's
        if x["name"] and is_ours and name != f"flash_qla.{x['name']}":
            return f":py:func:`{x[0]} <flash_qla.{x['name']}>`"
        return re.sub(r"([\\*`|_])", r"\\\1", x[0])

    literal = blank = section = False
    markup = []
    for line in lines:
        indented = line.startswith(" ")
        if line and not indented:
            literal, section = False, section or SECTION.fullmatch(line) is not None
        elif indented and blank and not literal and not section:
            markup += ["::", ""]
            literal = True
        markup.append(line if literal else MARKUP.sub(marked_up, line))
        blank = not line
    lines[:] = markup


def readable_source(app, page, source):
    """What a page says as plain Markdown, for readers of the file, and Sphinx needs as directives: the front page's
    lists of links are the site's tree, a page that is one link is the file, and the functions of api.md's tables are
    described below the table."""
    if whole_file := WHOLE_FILE.fullmatch(source[0]):
        source[0] = f"```{{include}} {whole_file[1]}\n:relative-docs: docs/\n```\n"
    if page == "index":
        for caption, links in LIST.findall(source[0]):
            source[0] += "\n".join(
                ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *LINK.findall(links), "```", ""]
            )
    if page == "api":
        source[0] = API.sub(lambda x: linked(x[1], x[0]) + described(x[1], x[2]), source[0])
        source[0] = source[0].replace("<!-- api ops -->", "```{op-schemas}\n```")


def linked(module: str, table: str) -> str:
    """The table, with links to the entries of the names in the first column of its rows."""
    head, rule, rows = table.split("\n", 2)
    rows = re.sub(
        r"^\|[^|]*", lambda x: re.sub(r"`([\w.]+)`", rf"{{py:obj}}`\1 <{module}.\1>`", x[0]), rows, flags=re.MULTILINE
    )
    return "\n".join([head, rule, rows])


def described(module: str, table: str) -> str:
    """Directives for the names in the first column of a table."""
    lines = ["", "", "```{eval-rst}"]
    for name in re.findall(r"`([\w.]+)`", "\n".join(row.split("|")[1] for row in table.splitlines())):
        path, _, member = f"{module}.{name}".rpartition(".")
        is_class = isinstance(getattr(importlib.import_module(path), member), type)
        lines += [
            f".. auto{'class' if is_class else 'function'}:: {path}.{member}",
            "   :members:" if is_class else "",
            "",
        ]
    return "\n".join([*lines, "```"])


class OpSchemas(Directive):
    """Lists every op of torch.ops.flash_qla: a heading, and its schema with one argument a line."""

    def run(self):
        sections = []
        for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda schema: schema.name):
            if schema.name.startswith("flash_qla::"):
                name = schema.name.removeprefix("flash_qla::")
                arguments, results = re.fullmatch(r"[\w:.]+\((.*)\) -> (.*)", str(schema)).groups()
                arguments = [f"    {x}," for x in re.split(r", (?![^(\[]*[)\]])", arguments)]
                lines = [f"{name}(", *arguments, f") -> {results}"]
                text = "\n".join(lines)
                section = nodes.section(ids=[name.replace("_", "-")])
                section += [nodes.title(text=name), nodes.literal_block(text, text, language="text")]
                sections.append(section)
        return sections


class Formula(Directive):
    """Typesets the block {formula}: see formula.py."""

    has_content = True

    def run(self):
        return [nodes.raw("", f'<div class="formula">{mathml(chr(10).join(self.content))}</div>', format="html")]


def setup(app):
    app.add_directive("formula", Formula)
    app.add_directive("op-schemas", OpSchemas)
    app.connect("source-read", readable_source)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)  # napoleon's is 500
