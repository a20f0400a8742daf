"""What the syntax of a FlexAttention file says about names, before anything of it is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def rebound_in(node: ast.AST) -> frozenset[str]:
    """Names of a module's or a function's scope whose value the order of its own statements does not tell, because a
    function assigns them after `global` or `nonlocal`.

    >>> sorted(rebound_in(ast.parse("size = 8\\ndef grow():\\n    global size, seen\\n    size += 1")))
    ['size']
    """
    found: set[str] = set()
    is_module = isinstance(node, ast.Module)
    for function in ast.walk(node):
        if isinstance(function, _FUNCTIONS) and function is not node:
            declared = _declared(function, ast.Global if is_module else ast.Nonlocal)
            found |= declared & set(_stored(function))
    if not is_module:
        found |= _declared(node, ast.Global) | _declared(node, ast.Nonlocal)
    return frozenset(found)


def _declared(function: ast.AST, statement: type[ast.Global | ast.Nonlocal]) -> set[str]:
    return {name for node in _own(function) if isinstance(node, statement) for name in node.names}


def _stored(function: ast.AST) -> Iterator[str]:
    for node in _own(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, _FUNCTIONS | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without what is inside of the functions and classes that it defines."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own(node)
