"""The hash of a kernel's code, by which tuned files know the kernel they measured."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence

HASH_LENGTH = 16
"""Hexadecimal digits of every hash in a generated package."""

# Python 3.12 cut f-strings into several tokens, 3.14 its t-strings.
_OPENING, _CLOSING = ("FSTRING_START", "TSTRING_START"), ("FSTRING_END", "TSTRING_END")


def kernel_hash(source: str, device_sources: Mapping[str, str]) -> str:
    """A hash of what a kernel does: of its module, and of the modules of the device library that it imports.

    `device_sources`: module of `_runtime.device` -> source. A kernel that imports none of them has its `code_hash`.

    >>> library = {"tl": "from .math import f", "math": "f = 1", "gl": "g = 1"}
    >>> kernel = "from .._runtime.device.tl import f"
    >>> kernel_hash(kernel, library) == kernel_hash(kernel, library | {"gl": "g = 2"})
    True
    >>> kernel_hash(kernel, library) == kernel_hash(kernel, library | {"math": "f = 2"})
    False
    """
    modules: set[str] = set()
    wanted = _device_imports(source, "_runtime.device.")
    while wanted:
        modules |= wanted
        inner = (_device_imports(device_sources[module], "") for module in wanted)
        wanted = frozenset().union(*inner) - modules
    if not modules:
        return code_hash(source)
    words = [code_hash(source), *(f"{module} {code_hash(device_sources[module])}" for module in sorted(modules))]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:HASH_LENGTH]


def _device_imports(source: str, prefix: str) -> frozenset[str]:
    """The modules that a file imports from relative to its package, under a prefix that is left out."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level)
    names = (node.module or "" for node in nodes)
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def code_hash(source: str) -> str:
    """A hash of what a module does: of its tokens, without comments and docstrings. Every Python gives the same hash.

    >>> code_hash("x = 1  # one\\n") == code_hash("x = 1\\n"), code_hash("x = 1\\n") == code_hash("x = 2\\n")
    (True, False)
    """
    words: list[str] = []
    starts_line = True
    for kind, text in _tokens(source):
        if kind in ("COMMENT", "NL") or (kind == "STRING" and starts_line):
            continue
        words.append(kind if text.isspace() or not text else text)
        starts_line = kind in ("NEWLINE", "INDENT", "DEDENT")
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:HASH_LENGTH]


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each token; an f-string is one STRING, as Python 3.11 tokenises it."""
    lines = io.StringIO(source).readlines()
    depth, start = 0, (1, 0)
    for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
        kind = tokenize.tok_name[token.type]
        if kind in _OPENING:
            start = start if depth else token.start
            depth += 1
        elif kind in _CLOSING:
            depth -= 1
            if not depth:
                yield "STRING", _text_between(lines, start, token.end)
        elif not depth:
            yield kind, token.string


def _text_between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The source from one position to another, each a line (from 1) and a column (from 0)."""
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    return "".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]])
