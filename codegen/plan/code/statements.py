"""Typed statements of a kernel, and what liveness analysis says about a sequence of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from codegen.ir.expr import Level, Type
from codegen.plan.code import tree
from codegen.plan.code.tree import Arange, Code, Infix


@dataclass(frozen=True, kw_only=True)
class Assign:
    """`targets = values`, evaluated once per program, per row, per key or per pair, as `level` says.

    `of_tokens`: the value is what a segmented call passes for each token, its position or its segment id.
    """

    targets: tuple[str, ...]
    values: tuple[Code, ...]
    level: Level
    type: Type | None = None
    of_tokens: bool = False

    @property
    def target(self) -> str:
        """The only name that it defines."""
        (name,) = self.targets
        return name

    @property
    def value(self) -> Code:
        """Its only value."""
        (value,) = self.values
        return value

    @property
    def defines(self) -> frozenset[str]:
        return frozenset(self.targets)

    @property
    def uses(self) -> frozenset[str]:
        return frozenset().union(*(value.names for value in self.values))

    @property
    def reads_memory(self) -> bool:
        """True if it loads single elements or vectors from memory."""
        return any(map(tree.reads_memory, self.values))


@dataclass(frozen=True)
class Comment:
    """A line of comment between statements."""

    text: str
    defines: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    reads_memory: bool = False
    of_tokens: bool = False


Statement = Assign | Comment

S = TypeVar("S", Assign, Statement)


def assign(target: str, value: Code, *, level: Level = Level.UNIFORM) -> Assign:
    """A statement that defines one integer."""
    return Assign(targets=(target,), values=(value,), level=level, type=Type.INT)


Part = Code | Statement | None
"""A part of a body, of which `uses` gives the names that it reads; None reads nothing."""


def uses(*parts: Part | Iterable[Part]) -> frozenset[str]:
    """The names that code and statements read, including names that another of these parts defines."""
    found: set[str] = set()
    for part in parts:
        if isinstance(part, Code):
            found |= part.names
        elif isinstance(part, Assign | Comment):
            found |= part.uses
        elif part is not None:
            found |= uses(*part)
    return frozenset(found)


def calls(*parts: Part | Iterable[Part]) -> frozenset[str]:
    """The functions that code and statements call, such as `sigmoid`."""
    found: set[str] = set()
    for part in parts:
        if isinstance(part, Code):
            found |= tree.called(part)
        elif isinstance(part, Assign):
            found |= calls(*part.values)
        elif part is not None and not isinstance(part, Comment):
            found |= calls(*part)
    return frozenset(found)


def defines(statements: Iterable[Statement]) -> list[str]:
    """The names that statements define, in order."""
    return [name for statement in statements if isinstance(statement, Assign) for name in statement.targets]


def free(statements: Iterable[Statement]) -> frozenset[str]:
    """The names that statements read before they define them: what a body takes from outside.

    >>> lines = [assign("a", tree.Name("x")), assign("b", tree.Name("a"))]
    >>> sorted(free(lines))
    ['x']
    """
    found: set[str] = set()
    defined: set[str] = set()
    for statement in statements:
        found |= statement.uses - defined
        defined |= statement.defines
    return frozenset(found)


def needed(statements: Sequence[S], names: Set[str]) -> list[S]:
    """The statements that define some names, and those that define the names from which these are computed.

    >>> lines = [assign("a", tree.Literal(1)), assign("b", tree.Literal(2)), assign("c", tree.Name("a"))]
    >>> [line.target for line in needed(lines, {"c"})]
    ['a', 'c']
    """
    wanted, found = set(names), []
    for statement in reversed(statements):
        if wanted & statement.defines:
            wanted |= statement.uses
            found.append(statement)
    return found[::-1]


def vectors(statements: Iterable[Assign]) -> list[Assign]:
    """The statements that compute numbers and vectors, of rows or of keys: they need no product and no tile."""
    return [statement for statement in statements if statement.level is not Level.TILE]


def tiles(statements: Iterable[Assign]) -> list[Assign]:
    """The statements that compute a value for each pair."""
    return [statement for statement in statements if statement.level is Level.TILE]


def of_tokens(statements: Iterable[Assign]) -> list[Assign]:
    """The statements that read what a segmented call passes for each token: positions and segment ids."""
    return [statement for statement in statements if statement.of_tokens]


def without(statements: Iterable[S], names: Iterable[str]) -> list[S]:
    """The statements that define none of some names."""
    left_out = frozenset(names)
    return [statement for statement in statements if not statement.defines & left_out]


def renamed(statement: Assign, names: Mapping[str, str]) -> Assign:
    """The same statement with other names, in its targets and in what it reads."""
    targets = tuple(names.get(name, name) for name in statement.targets)
    return replace(statement, targets=targets, values=tuple(tree.renamed(value, names) for value in statement.values))


def rewritten(statement: Assign, change: Callable[[Code], Code]) -> Assign:
    """The same statement with other values."""
    return replace(statement, values=tuple(map(change, statement.values)))


def with_key_vector(value: Code, vector: Code) -> Code:
    """The code with another vector in place of the keys of a whole block; a sum it is part of stays one sum.

    >>> keys = Infix("+", tree.Name("start_n"), Arange("BLOCK_N"))
    >>> with_key_vector(keys, Arange("BLOCK_N", "OWN_KEY")).right.layout
    'OWN_KEY'
    """

    def replaced(node: Code) -> Code | None:
        if isinstance(node, Arange):
            return vector
        if isinstance(node, Infix) and node.symbol == "+" and isinstance(node.right, Arange):
            return tree.added(with_key_vector(node.left, vector), vector)
        return None

    return tree.rebuilt(value, replaced)
