"""The hash of a kernel's code, by which tuned files identify the kernel that was measured.

This module imports nothing of the generator, so that a test can run it with other versions of Python.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

HASH_LENGTH = 16
"""Hexadecimal digits of every hash in a generated package."""

# Python 3.12 cut f-strings into several tokens, 3.14 its t-strings.
_OPENING, _CLOSING = ("FSTRING_START", "TSTRING_START"), ("FSTRING_END", "TSTRING_END")


@cache
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


def kernel_hash(path: str, kernels: Iterable[str], sources: Mapping[str, str]) -> str:
    """A hash of kernels of the file at `path`, and of all code of their package that they use.

    `sources` has the package's files, by path. The hash covers the kernels' own definitions and all definitions that
    these use, in their file or imported from others. It does not depend on other kernels or helpers beside them, nor on
    the name of the file that the kernels are in.

    >>> helpers = "SIZE = 2\\ndef used():\\n    return SIZE\\ndef other():\\n    pass\\n"
    >>> package = {"v/k.py": "from ..shared import used\\ndef fwd(): used()\\ndef bwd(): pass\\n", "shared.py": helpers}
    >>> before = kernel_hash("v/k.py", ["fwd"], package)
    >>> before == kernel_hash("v/k.py", ["fwd"], package | {"shared.py": helpers.replace("pass", "return 1")})
    True
    >>> before == kernel_hash("v/k.py", ["fwd"], package | {"shared.py": helpers.replace("2", "3")})
    False
    """
    used = {("" if file == path else file, code_hash(text)) for file, text in _used_code(path, kernels, sources)}
    return hashlib.sha256(" ".join(word for pair in sorted(used) for word in pair).encode()).hexdigest()[:HASH_LENGTH]


class _Import(NamedTuple):
    """An import by `from`: the number of dots before the module's name, that name, and the imported name."""

    level: int
    module: str
    name: str


@dataclass(frozen=True)
class _Statement:
    """A statement at the top level of a module. `text` is empty if it imports from its package."""

    text: str
    binds: frozenset[str]
    uses: frozenset[str]
    imports: tuple[_Import, ...]


def _used_code(path: str, kernels: Iterable[str], sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """File and source of each definition that kernels use, directly or through other definitions; their own too."""
    waiting = [(path, kernel) for kernel in kernels]
    if missing := {kernel for _, kernel in waiting} - _bound_names(sources[path]):
        raise ValueError(f"{path}: expected a definition of {', '.join(sorted(missing))}")
    seen: set[tuple[str, _Statement]] = set()
    while waiting:
        file, name = waiting.pop()
        if not file:
            continue
        statements = _statements(sources[file])
        bound = _bound_names(sources[file])
        # A module that is imported as a whole may be used as a whole.
        for statement in [each for each in statements if name in each.binds] if name in bound else statements:
            if (file, statement) in seen:
                continue
            seen.add((file, statement))
            if statement.text:
                yield file, statement.text
            waiting += [_target(file, imported, sources) for imported in statement.imports]
            waiting += [(file, used) for used in statement.uses & bound]


def _target(path: str, imported: _Import, sources: Mapping[str, str]) -> tuple[str, str]:
    """The file that an import in a file reads, and the name it takes from there; empty outside the package."""
    return next((each for each in _candidates(path, imported) if each[0] in sources), ("", ""))


@cache
def _candidates(path: str, imported: _Import) -> tuple[tuple[str, str], ...]:
    """The files that an import in a file may read from, each with the name it takes from there."""
    parents = PurePosixPath(path).parents
    if imported.level > len(parents):
        return ()
    folder = parents[imported.level - 1].joinpath(*imported.module.split("."))
    return tuple(
        (candidate, name)
        for module, name in ((folder / imported.name, "*"), (folder, imported.name))
        for candidate in (f"{module}.py", str(module / "__init__.py"))
    )


@cache
def _statements(source: str) -> tuple[_Statement, ...]:
    """The statements of a module. An import gives one for each name, because a definition may need only some."""
    lines = source.splitlines(keepends=True)
    return tuple(each for node in ast.parse(source).body for each in _split(node, lines))


@cache
def _bound_names(source: str) -> frozenset[str]:
    return frozenset[str]().union(*(each.binds for each in _statements(source)))


def _split(node: ast.stmt, lines: Sequence[str]) -> Iterator[_Statement]:
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            single = ast.ImportFrom(module=node.module, names=[alias], level=node.level)
            yield _statement(single, "" if node.level else ast.unparse(single))
        return
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(each.lineno for each in decorators)])
    yield _statement(node, "".join(lines[first - 1 : node.end_lineno]))


def _statement(node: ast.stmt, text: str) -> _Statement:
    return _Statement(
        text=text, binds=frozenset(_bound(node)), uses=frozenset(_loaded(node)), imports=tuple(_imports([node]))
    )


def _loaded(node: ast.stmt) -> Iterator[str]:
    """The names that a statement reads. `ast.walk` takes twice as long, and kernels have a million nodes."""
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Name):
            if isinstance(each.ctx, ast.Load):
                yield each.id
            continue
        for name in each._fields:
            child = getattr(each, name)
            if isinstance(child, list):
                waiting += [item for item in child if isinstance(item, ast.AST)]
            elif isinstance(child, ast.AST):
                waiting.append(child)


def _imports(body: Iterable[ast.AST]) -> Iterator[_Import]:
    """The imports from their package in statements and in the statements inside them. Expressions import nothing and
    are not walked, because kernels are full of them."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield from (_Import(node.level, node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            for block in ("body", "orelse", "handlers", "finalbody", "cases"):
                yield from _imports(getattr(node, block, ()))


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds in its module; those of all branches of an `if` or `try`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in each.names)


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
