"""The nodes of an expression tree, and functions that read a tree.

Nodes are immutable and compare by structure, so equal subexpressions are found by hashing. Build operations with the
functions of `codegen.ir.build`, which check types and fold constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from codegen.ir.types import KEY_NAMES, QUERY_NAMES, TILE_NAMES, Level, Type


@dataclass(frozen=True)
class Expr:
    """Base of all nodes. Equal subtrees may be one shared object, so walks visit each distinct node once."""

    type: Type

    @cached_property
    def size(self) -> int:
        """Number of operations and operands of the expression as written out: a shared node counts at each use."""
        return 1 + sum(child.size for child in children(self))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the variables that the expression reads."""
        return frozenset().union(*(child.names for child in children(self)))

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    @property
    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def _same(self, other: object) -> bool:
        """Structural equality. Stops descending at nodes that both trees share."""
        if self is other:
            return True
        return isinstance(other, type(self)) and self._hash == other._hash and self._fields == other._fields


@dataclass(frozen=True)
class Const(Expr):
    """A literal."""

    value: int | float | bool


@dataclass(frozen=True)
class Var(Expr):
    """`score`, an index name, a run-time scalar, or a name that a template defines."""

    name: str

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True)
class Load(Expr):
    """`tensor[indices]`; one integer expression per dim of the tensor."""

    tensor: str
    indices: tuple[Expr, ...]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self._same(other)


@dataclass(frozen=True)
class Op(Expr):
    """An operation of the language; `op` is a key of the printers' tables."""

    op: str
    args: tuple[Expr, ...]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self._same(other)


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions of a node."""
    if isinstance(e, Op):
        return e.args
    if isinstance(e, Load):
        return e.indices
    return ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every distinct node of the tree, parents first."""
    seen: set[Expr] = set()
    left = [e]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += reversed(children(node))


def names(*exprs: Expr) -> frozenset[str]:
    """Names of the variables that expressions read, also in the indices of their tensors."""
    return exprs[0].names if len(exprs) == 1 else frozenset().union(*(e.names for e in exprs))


def loads(*exprs: Expr) -> tuple[Load, ...]:
    """Every distinct tensor element read, in order of appearance."""
    found = {node: None for e in exprs for node in walk(e) if isinstance(node, Load)}
    return tuple(found)


def level(e: Expr) -> Level:
    """The cheapest level at which a kernel can compute a value; `b`, `h` and scalars are uniform in a program."""
    read = names(e)
    of_query, of_key = bool(read & QUERY_NAMES), bool(read & KEY_NAMES)
    if read & TILE_NAMES or (of_query and of_key):
        return Level.TILE
    if of_query:
        return Level.QUERY
    return Level.KEY if of_key else Level.UNIFORM


def reads_head(e: Expr) -> bool:
    """True if a value differs between the query heads that share one key head."""
    return "h" in names(e)


def const(value: int | float | bool) -> Const:
    """A literal; its Python type decides the type of the node."""
    if isinstance(value, bool):
        return Const(Type.BOOL, value)
    return Const(Type.INT if isinstance(value, int) else Type.FLOAT, value)


def int_var(name: str) -> Var:
    """An integer variable."""
    return Var(Type.INT, name)


def float_var(name: str) -> Var:
    """A float variable."""
    return Var(Type.FLOAT, name)


TRUE, FALSE = const(True), const(False)


def is_const(e: Expr, value: float | None = None) -> bool:
    """True if `e` is a literal number (equal to `value`, if given)."""
    return isinstance(e, Const) and e.type is not Type.BOOL and (value is None or e.value == value)


def conjuncts(e: Expr) -> tuple[Expr, ...]:
    """The operands of a conjunction; any other boolean is its own only conjunct."""
    return e.args if isinstance(e, Op) and e.op == "and" else (e,)
