"""Pieces of Markdown that several generators write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold any text. Bars are escaped by a backslash except in inline code, which would show it.

    >>> print(table(["a", "b"], [["1", "x | `y | z`"]]).replace(chr(92), "!"))
    | a | b |
    |---|---|
    | 1 | x !| `y | z` |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(_row(line) for line in lines)


def _row(cells: Sequence[str]) -> str:
    if all(cell in ("---", "---:") for cell in cells):
        return "|" + "|".join(cells) + "|"
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    parts = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def code(text: object) -> str:
    """Text as inline code, also if it contains backquotes.

    >>> code("x"), code("a `b`")
    ('`x`', '`` a `b` ``')
    """
    words = str(text)
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def figures(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of narrow columns; columns that hold only numbers are aligned to the right and are not broken."""
    rows = list(rows)
    rule = ["---:" if all(_is_number(row[i]) for row in rows) else "---" for i in range(len(heads))]
    lines = [heads, rule, *rows]
    text = "\n".join(_row(line) for line in lines)
    return f'<div class="figures" markdown>\n\n{text}\n\n</div>'


def _is_number(cell: str) -> bool:
    return re.match(r"\**\d|-$", cell) is not None


def fence(text: str, language: str = "", title: str = "") -> str:
    """A fenced block."""
    head = f'{language} title="{title}"' if title else language
    return f"```{head}\n{text.rstrip()}\n```"


def page(title: str, *parts: str) -> str:
    """A page of parts, with an empty line between them."""
    return "\n\n".join([f"# {title}", *(part.strip("\n") for part in parts if part)]) + "\n"
