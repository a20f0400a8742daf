"""Text for generated files, wrapped to the line length and escaped; pairs of numbers, and tables for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

LINE_LENGTH = 120
"""Line length of every generated file. The formatter wraps code at it; comments and docstrings are wrapped here."""


def pair(first: int, second: int) -> str:
    """Two numbers as `--heads` and `--head-dims` take them: one number if both are the same.

    >>> pair(32, 8), pair(64, 64)
    ('32/8', '64')
    """
    return f"{first}" if first == second else f"{first}/{second}"


def comment(text: str) -> str:
    """`text` as comment lines, those after the first indented.

    >>> comment("variant: full: {}")
    '# variant: full: {}'
    """
    return _filled(text, "# ", "#     ", LINE_LENGTH)


def docstring(text: str, indent: int = 0, hanging: int | None = None) -> str:
    r"""`text` as lines of a docstring, the first one included in `indent`; `hanging` is the indent of the others.

    A backslash, and quotes that would end the docstring, are escaped. The lines leave room for the quotes around them.

    >>> print(docstring('ends with a "quote"', indent=4))
        ends with a "quote\"
    """
    safe = re.sub(r'"(?="|$)', r"\"", " ".join(text.replace("\\", r"\\").split()))
    return _filled(safe, " " * indent, " " * (indent if hanging is None else hanging), LINE_LENGTH - 6)


def literal(text: str) -> str:
    """`text` as a Python string literal, or as several in a row if it is long.

    >>> literal("q_idx >= kv_idx")
    "'q_idx >= kv_idx'"
    """
    parts = textwrap.wrap(text, LINE_LENGTH - 30, drop_whitespace=False, break_long_words=False)
    return " ".join(map(repr, parts)) if len(parts) > 1 else repr(text)


def legend_row(symbol: str, text: str, width: int) -> str:
    """A line of a docstring: a symbol, padded to `width`, and its meaning."""
    first = f"    {symbol:<{width}}  "
    return _filled(text, first, " " * len(first), LINE_LENGTH)


def _filled(text: str, first: str, others: str, width: int) -> str:
    return textwrap.fill(
        text,
        width=width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, columns aligned.

    >>> aligned([("pass", "tile"), ("dkdv", "64")])
    ['pass  tile', 'dkdv  64']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
