"""The documentation's site: `sphinx-build -W --keep-going docs build/docs`, with the package installed."""

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

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = ["fla"]  # of flash_qla.integrations.fla
napoleon_custom_sections = [("Results", "params_style")]


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: what reStructuredText would take for markup is not, indented lines behind a blank one
    are formulas or code, and results that have names are listed like arguments."""
    literal = blank = section = False
    found = []
    for line in lines:
        indented = line.startswith(" ")
        if line and not indented:
            literal, section = False, re.fullmatch(r"(Args|Returns|Raises):", line) is not None
        elif indented and blank and not literal and not section:
            found += ["::", ""]
            literal = True
        found.append(line if literal else re.sub(r"([\\*`|_])", r"\\\1", line))
        blank = not line
    text = "\n".join(found)
    lines[:] = re.sub(r"^Returns:(?=\n +[\w, \\]+: )", "Results:", text, flags=re.MULTILINE).split("\n")


class OpSchemas(Directive):
    """Lists every op of torch.ops.flash_qla: a heading, and its schema with one argument a line."""

    def run(self):
        found = []
        for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda schema: schema.name):
            if schema.name.startswith("flash_qla::"):
                name = schema.name.removeprefix("flash_qla::")
                arguments, results = re.fullmatch(r"[\w:.]+\((.*)\) -> (.*)", str(schema)).groups()
                arguments = [f"    {x}," for x in re.split(r", (?![^(\[]*[)\]])", arguments)]
                lines = [f"{name}(", *arguments, f") -> {results}"]
                text = "\n".join(lines)
                section = nodes.section(ids=[name.replace("_", "-")])
                section += [nodes.title(text=name), nodes.literal_block(text, text, language="text")]
                found.append(section)
        return found


class Formula(Directive):
    """Typesets the block {formula}: see formula.py."""

    has_content = True

    def run(self):
        return [nodes.raw("", f'<div class="formula">{mathml(chr(10).join(self.content))}</div>', format="html")]


def setup(app):
    app.add_directive("formula", Formula)
    app.add_directive("op-schemas", OpSchemas)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)  # napoleon's is 500
