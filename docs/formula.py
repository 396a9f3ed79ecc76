"""Formulas of the pages, typeset as MathML: no JavaScript and no LaTeX.

A page writes a formula as text, which is also what a reader of the file sees:

    S_t = e^{g_t} S_{t-1} + beta_t k_t w_t^T    path/of/the/kernel.py

Lines are aligned at their first " = ". A line without one continues the line above. Two spaces or more begin a remark,
which is set as code. `_` is a subscript, `^` a superscript, `{}` a group. Greek letters have their names.
"""

import html
import re

GREEK = {"beta": "β", "gamma": "γ"}
OPERATORS = {"-": "−", "*": "∗", "<=": "≤", "sum": "∑"}
CLOSING = {"(": ")", "[": "]", "{": "}"}
TOKEN = re.compile(r"[A-Za-z]+|[\d.]*\d|<=|\S")


def mathml(text: str) -> str:
    """The element <math> of some lines."""
    rows = []
    for line in text.rstrip().split("\n"):
        line = re.sub(r" += +", " = ", line.strip(), count=1)
        formula, _, remark = re.fullmatch(r"(.*?\S)(  +(\S.*))?", line).groups()
        left, equals, right = formula.partition(" = ")
        cells = [_row(left), _row(f"= {right}")] if equals else ["", _row(formula)]
        if remark is not None:
            cells.append(f"<mtext><code>{html.escape(remark)}</code></mtext>")
        rows.append("<mtr>" + "".join(f"<mtd>{cell}</mtd>" for cell in cells) + "</mtr>")
    return f'<math display="block"><mtable class="formula">{"".join(rows)}</mtable></math>'


def _row(text: str) -> str:
    tokens = TOKEN.findall(text)
    found = ""
    while tokens:
        found += _term(tokens)
    return f"<mrow>{found}</mrow>"


def _term(tokens: list[str]) -> str:
    """A symbol or a bracket with its subscript, prime and superscript; takes them off the tokens."""
    prefix = ""
    if re.fullmatch(r"d([A-Z]|g|o|dt|beta)", tokens[0]):  # a gradient
        prefix, tokens[0] = "<mi>d</mi>", tokens[0][1:]
    base, below, above = _symbol(tokens), "", ""
    while tokens and tokens[0] in ("_", "^", "'"):
        mark = tokens.pop(0)
        if mark == "'":
            above += "<mo>′</mo>"
            continue
        script = _symbol(tokens)
        if script == "<mo>−</mo>":  # as in A^-1
            script += _symbol(tokens)
        if mark == "_":
            below += script
        else:
            above += script
    if below and above:
        base = f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
    elif below:
        base = f"<msub>{base}<mrow>{below}</mrow></msub>"
    elif above:
        base = f"<msup>{base}<mrow>{above}</mrow></msup>"
    return prefix + base


def _symbol(tokens: list[str]) -> str:
    token = tokens.pop(0)
    if token in CLOSING:
        inner = ""
        while tokens[0] != CLOSING[token]:
            inner += _term(tokens)
        closing = tokens.pop(0)
        brackets = ("", "") if token == "{" else (f"<mo>{token}</mo>", f"<mo>{closing}</mo>")
        return f"<mrow>{brackets[0]}{inner}{brackets[1]}</mrow>"
    if token in OPERATORS or not token[0].isalnum():
        return f"<mo>{html.escape(OPERATORS.get(token, token))}</mo>"
    kind = "mn" if token[0].isdigit() else "mi"
    is_word = kind == "mi" and len(token) > 1 and token not in GREEK
    space = '<mspace width="0.2em"/>' if is_word and tokens and tokens[0].isalpha() else ""
    return f"<{kind}>{GREEK.get(token, token)}</{kind}>{space}"
