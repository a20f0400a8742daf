"""Pieces of Markdown that several generators write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold any text on one line.

    >>> print(table(["a", "b"], [["1", "x | y"]]))
    | a | b |
    |---|---|
    | 1 | x \\\\| y |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(_row(line) for line in lines)


def _row(cells: Sequence[str]) -> str:
    if all(cell == "---" for cell in cells):
        return "|" + "---|" * len(cells)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def code(text: object) -> str:
    """Text as inline code, also where it holds backquotes.

    >>> code("x"), code("a `b`")
    ('`x`', '`` a `b` ``')
    """
    words = str(text)
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def fence(text: str, language: str = "", title: str = "") -> str:
    """A fenced block."""
    head = f'{language} title="{title}"' if title else language
    return f"```{head}\n{text.rstrip()}\n```"


def page(title: str, *parts: str) -> str:
    """A page of parts, with an empty line between them."""
    return "\n\n".join([f"# {title}", *(part.strip("\n") for part in parts if part)]) + "\n"
