"""Kernel code as a tree: what a statement computes, before a dialect of `dialects` prints it.

The nodes are those of the language that Triton and Gluon share: names, literals, operators, calls of functions of the
language (`Builtin`) and of helpers that a kernel file defines (`Call`), casts, and vectors broadcast to a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

# Binding strength of Python's operators, loosest first.
CHOICE, COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(10)

STRENGTH = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), COMPARE),
    "|": OR,
    "^": XOR,
    "&": AND,
    **dict.fromkeys(("<<", ">>"), SHIFT),
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("*", "/", "//"), PRODUCT),
}
"""Infix operator -> its binding strength."""


@dataclass(frozen=True)
class Code:
    """Base of all nodes. Equal trees are equal."""

    @property
    def children(self) -> tuple[Code, ...]:
        """The direct subtrees, in the order in which they are printed."""
        return tuple(child for field in fields(self) for child in _subtrees(getattr(self, field.name)))

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables and arguments that the code reads."""
        return frozenset().union(*(child.names for child in self.children))

    @property
    def strength(self) -> int:
        """How tightly the outermost operator binds."""
        return ATOM

    def walk(self) -> Iterator[Code]:
        """Every node, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def _subtrees(value: object) -> Iterator[Code]:
    if isinstance(value, Code):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _subtrees(item)


@dataclass(frozen=True)
class Name(Code):
    """A local variable, an argument or a constant of the kernel."""

    name: str

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True)
class Literal(Code):
    """A number or a boolean."""

    value: int | float | bool

    @property
    def strength(self) -> int:
        return ATOM if self.value >= 0 else UNARY


@dataclass(frozen=True)
class Infix(Code):
    """`left symbol right`; the printer puts parentheses around an operand that binds looser."""

    symbol: str
    left: Code
    right: Code

    @property
    def strength(self) -> int:
        return STRENGTH[self.symbol]


@dataclass(frozen=True)
class Prefix(Code):
    """`-operand` or `~operand`."""

    symbol: str
    operand: Code

    @property
    def strength(self) -> int:
        return UNARY


@dataclass(frozen=True)
class Call(Code):
    """A call of a helper that the kernel file defines."""

    function: str
    args: tuple[Code, ...]
    keywords: tuple[tuple[str, Code], ...] = ()


@dataclass(frozen=True)
class Builtin(Call):
    """A call of a function of the language: `tl.maximum` or `gl.maximum`."""


@dataclass(frozen=True)
class DType(Code):
    """An element type of the language: `tl.int32` or `gl.int32`."""

    name: str


@dataclass(frozen=True)
class Cast(Code):
    """A value converted to an element type: `value.to(tl.int32)`."""

    value: Code
    dtype: str


@dataclass(frozen=True)
class Broadcast(Code):
    """A vector as a tile in which it varies along `axis`: `vector[:, None]` or `vector[None, :]`."""

    vector: Code
    axis: int


@dataclass(frozen=True)
class Arange(Code):
    """The vector 0, 1, ..., `size` - 1 of a compile-time `size`; `layout` is the name of its layout in Gluon."""

    size: str
    layout: str = "KEY"

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset((self.size,))


@dataclass(frozen=True)
class Choice(Code):
    """`value if condition else otherwise`, decided when the kernel is compiled."""

    value: Code
    condition: Code
    otherwise: Code

    @property
    def strength(self) -> int:
        return CHOICE


@dataclass(frozen=True)
class Group(Code):
    """The same value in parentheses."""

    inner: Code


# ---------------------------------------------------------------------------------------------------------- building

ZERO = Literal(0)


def builtin(function: str, *args: Code, **keywords: Code) -> Builtin:
    """A call of a function of the language."""
    return Builtin(function, args, tuple(keywords.items()))


def call(function: str, *args: Code) -> Call:
    """A call of a helper."""
    return Call(function, args)


def grouped(code: Code, strength: int) -> Code:
    """The code in parentheses if it binds looser than `strength`."""
    return code if code.strength >= strength else Group(code)


def total(terms: Iterable[Code]) -> Code:
    """The sum of one or more terms, from left to right."""
    first, *rest = terms
    for term in rest:
        first = Infix("+", first, term)
    return first


def product(*factors: Code) -> Code:
    """The product of one or more factors, from left to right."""
    first, *rest = factors
    for factor in rest:
        first = Infix("*", first, factor)
    return first


def added(first: Code, terms: Code) -> Code:
    """`first + terms`, summed from left to right if `terms` is a sum itself.

    >>> added(Name("a"), Infix("-", Name("b"), Name("c"))) == Infix("-", Infix("+", Name("a"), Name("b")), Name("c"))
    True
    """
    if isinstance(terms, Infix) and terms.strength == SUM:
        return Infix(terms.symbol, added(first, terms.left), terms.right)
    return Infix("+", first, terms)


def rebuilt(code: Code, replaced: Callable[[Code], Code | None]) -> Code:
    """A copy in which each node for which `replaced` returns code is replaced by this code."""
    found = replaced(code)
    if found is not None:
        return found

    def copied(value: object) -> object:
        if isinstance(value, Code):
            return rebuilt(value, replaced)
        return tuple(map(copied, value)) if isinstance(value, tuple) else value

    changed = {field.name: copied(getattr(code, field.name)) for field in fields(code)}
    return replace(code, **changed) if changed else code


def renamed(code: Code, names: Mapping[str, str]) -> Code:
    """The code with other names for some variables.

    >>> renamed(Infix("+", Name("a"), Name("b")), {"a": "c"})
    Infix(symbol='+', left=Name(name='c'), right=Name(name='b'))
    """
    return rebuilt(code, lambda c: Name(names[c.name]) if isinstance(c, Name) and c.name in names else None)


def is_zero(code: Code | None) -> bool:
    """True for the literal 0."""
    return code == ZERO


def reads_memory(code: Code) -> bool:
    """True if the code loads single elements or vectors. Reads of whole tiles of pairs (`load_pairs`) do not count."""
    return any(isinstance(node, Builtin) and node.function == "load" for node in code.walk())


def called(code: Code) -> frozenset[str]:
    """The functions that the code calls, helpers and those of the language."""
    return frozenset(node.function for node in code.walk() if isinstance(node, Call))


def literal_text(value: float) -> str:
    """A number or boolean as source."""
    return f'float("{value}")' if abs(value) == math.inf else repr(value)
