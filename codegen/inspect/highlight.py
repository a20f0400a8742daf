"""Python source as HTML with its tokens marked by class: for pages that load no library."""

from __future__ import annotations

import builtins
import io
import keyword
import tokenize
from collections.abc import Iterator
from html import escape

_BUILTINS = frozenset(dir(builtins))

_CLASSES = {tokenize.COMMENT: "c", tokenize.STRING: "s", tokenize.NUMBER: "n"}
"""Kind of a token -> class of its element: comment, string, number; `k` is a keyword, `b` a built-in name."""


def python_html(text: str) -> str:
    """The source with `<span class=...>` around tokens; text that is no Python is only escaped."""
    try:
        return "".join(_pieces(text))
    except (tokenize.TokenError, SyntaxError):
        return escape(text)


def _pieces(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    row, column = 1, 0
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # An attribute is no built-in name.
        kind = "" if before == "." else _class_of(token)
        before = token.string
        if not kind:
            continue
        yield escape(_between(lines, (row, column), token.start))
        yield f'<span class="{kind}">{escape(token.string)}</span>'
        row, column = token.end
    yield escape(_between(lines, (row, column), (len(lines) + 1, 0)))


def _class_of(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return "k" if keyword.iskeyword(token.string) else "b" if token.string in _BUILTINS else ""
    return _CLASSES.get(token.type, "")


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right] if first <= len(lines) else ""
    whole = lines[first : last - 1]
    tail = lines[last - 1][:right] if last <= len(lines) else ""
    return (lines[first - 1][left:] if first <= len(lines) else "") + "".join(whole) + tail
