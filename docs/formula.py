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
GRADIENT = re.compile(r"d([A-Z]|g|o|dt|beta)")


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
    return f"<mrow>{_terms(TOKEN.findall(text))}</mrow>"


def _is_word(token: str) -> bool:
    return len(token) > 1 and token.isalpha() and token not in GREEK and not GRADIENT.fullmatch(token)


def _terms(tokens: list[str], end: str | None = None) -> str:
    """The terms before the token `end`; takes them off the tokens. A word has space beside other names."""
    terms, previous = "", ""
    while tokens and tokens[0] != end:
        token = tokens[0]
        is_beside_word = _is_word(token) and (previous.isalpha() or previous == "(")
        if is_beside_word or (_is_word(previous) and token.isalpha()):
            terms += '<mspace width="0.2em"/>'
        terms += _term(tokens)
        previous = token
    return terms


def _term(tokens: list[str]) -> str:
    """A symbol or a bracket with its subscript, prime and superscript; takes them off the tokens."""
    prefix = ""
    if GRADIENT.fullmatch(tokens[0]):
        prefix, tokens[0] = "<mi>d</mi>", tokens[0][1:]
    base, below, above = _symbol(tokens), "", ""
    while tokens and tokens[0] in ("_", "^", "'"):
        mark = tokens.pop(0)
        if mark == "'":
            base = f'<mrow>{base}<mo lspace="0" rspace="0">′</mo></mrow>'
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
        closing = CLOSING[token]
        inner = _terms(tokens, closing)
        tokens.pop(0)
        return f"<mrow>{inner}</mrow>" if token == "{" else f"<mrow><mo>{token}</mo>{inner}<mo>{closing}</mo></mrow>"
    if token == "|":
        return '<mo stretchy="false" lspace="0" rspace="0">|</mo>'
    if token in OPERATORS or not token[0].isalnum():
        return f"<mo>{html.escape(OPERATORS.get(token, token))}</mo>"
    kind = "mn" if token[0].isdigit() else "mi"
    return f"<{kind}>{GREEK.get(token, token)}</{kind}>"
