r"""Formulas as MathML, which browsers draw without a script: `$...$` and `$$...$$` in Markdown are LaTeX."""

from __future__ import annotations

import html
import importlib.util
import re

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
r"""A formula as the extension `pymdownx.arithmatex` writes it: `\(` begins an inline formula, `\[` a formula block."""


def has_converter() -> bool:
    """Whether the package that converts is installed; without it pages show the LaTeX."""
    return importlib.util.find_spec("latex2mathml") is not None


def with_mathml(page: str) -> str:
    """HTML with its formulas as MathML."""
    if "arithmatex" not in page or not has_converter():
        return page
    from latex2mathml.converter import convert

    def converted(match: re.Match[str]) -> str:
        display = "inline" if match[2] == "(" else "block"
        formula = convert(html.unescape(match[3]), display=display)
        return f'<{match[1]} class="formula">{formula}</{match[1]}>'

    return _FORMULA.sub(converted, page)
