"""Names in kernel files, by Triton's rules: a loop's body has its own names, a branch defines names of both sides."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence

_MADE = re.compile(r"(term|\w+_(val|q|kv|qk|pos))(_\d+)?")
"""Names that `codegen.plan.code.lower` makes for parts of a variant's expressions."""


def scope_problems(source: str) -> list[str]:
    """Reads of a name before its definition, loops that overwrite an expression from outside, and unused imports."""
    tree = ast.parse(source)
    known = {*dir(builtins), *_module_names(tree)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [problem for function in functions for problem in _Function(known).problems(function)]
    return found + [f"{name} is imported and not used" for name in sorted(_imported(tree) - _names(tree, ast.Load))]


def _module_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (name for target in node.targets for name in _names(target, ast.Store))


def _imported(tree: ast.Module) -> set[str]:
    """The names that a file imports from its own package."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _read_and_stored(node: ast.AST) -> tuple[set[str], set[str]]:
    """The names that are read, except those that a comprehension inside defines, and the names that are stored."""
    read: set[str] = set()
    stored: set[str] = set()
    inner: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            (read if isinstance(each.ctx, ast.Load) else stored).add(each.id)
        elif isinstance(each, ast.comprehension):
            inner |= _names(each.target, ast.Store)
    return read - inner, stored


class _Function:
    """One function, statement by statement."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.found: list[str] = []

    def problems(self, function: ast.FunctionDef) -> list[str]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.name = function.name
        self._block(function.body, {argument.arg for argument in arguments}, set())
        return self.found

    def _block(self, statements: Sequence[ast.stmt], defined: set[str], outside: set[str]) -> None:
        """Check statements and add their names to `defined`. `outside`: names defined before the enclosing loops."""
        for statement in statements:
            if isinstance(statement, ast.For | ast.While):
                head = statement.iter if isinstance(statement, ast.For) else statement.test
                self._read(head, defined)
                own = _names(statement.target, ast.Store) if isinstance(statement, ast.For) else set()
                self._block(statement.body, defined | own, set(defined))
            elif isinstance(statement, ast.If):
                self._read(statement.test, defined)
                sides = [set(defined), set(defined)]
                for side, body in zip(sides, (statement.body, statement.orelse), strict=True):
                    self._block(body, side, outside)
                # A condition on compile-time constants is decided at compile time, and only one side is compiled.
                compiled_in = all(name.isupper() for name in _names(statement.test, ast.Load))
                defined |= sides[0] | sides[1] if compiled_in else sides[0] & sides[1]
            else:
                self._simple(statement, defined, outside)

    def _simple(self, statement: ast.stmt, defined: set[str], outside: set[str]) -> None:
        read, stored = _read_and_stored(statement)
        if isinstance(statement, ast.AugAssign):
            self._note(statement, stored - defined)
            stored = set()
        self._note(statement, read - defined - self.known)
        for name in sorted(stored & outside):
            if _MADE.fullmatch(name):
                self.found.append(f"{self.name}:{statement.lineno}: {name} of outside the loop is overwritten")
        defined |= stored

    def _read(self, node: ast.AST, defined: set[str]) -> None:
        self._note(node, _read_and_stored(node)[0] - defined - self.known)

    def _note(self, node: ast.AST, names: set[str]) -> None:
        line = getattr(node, "lineno", 0)
        self.found += [f"{self.name}:{line}: {name} is not defined" for name in sorted(names)]
