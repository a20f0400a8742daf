"""The typed expression IR: one immutable tree behind every mask, score, derivative, block bound and reference.

Nodes are compared by structure, so equal subexpressions are found by hashing. Build nodes with the functions of this
module (`add`, `mul`, `where`, ...): they check types, fold constants and keep products in the form
`uniform factor * tile`, which is what lets `exp2`'s log2(e) and the softmax scale melt into one multiplication.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property


class Type(StrEnum):
    """What an expression evaluates to."""

    INT = "integer"
    FLOAT = "float"
    BOOL = "boolean"


class ScalarType(StrEnum):
    """Declared type of a run-time scalar."""

    INT = "int"
    FLOAT = "float"


INDEX_NAMES = ("b", "h", "hkv", "q_idx", "kv_idx")
"""Integer names every expression may read: batch row, query head, key head, query position, key position."""

LENGTH_NAMES = ("q_len", "kv_len")
"""Integer names of a call's lengths: how many query rows and keys it has, a packed call for each sequence."""

SCORE = "score"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A variant's own tensor. A dim is one of `INDEX_NAMES` (its size is the call's), a free name, an integer, or the
    text of an expression that is `computed`.

    `example` gives typical contents, an expression over `axes`: what tests, demo and benchmarks fill the tensor with.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str = "float32"
    grad: bool = False
    example: Expr | None = None
    computed: tuple[tuple[str, Expr], ...] = ()

    @property
    def element(self) -> Type:
        """What an element is to an expression."""
        if self.dtype == "bool":
            return Type.BOOL
        return Type.INT if self.dtype.startswith("int") else Type.FLOAT

    @property
    def axes(self) -> tuple[str, ...]:
        """The integers an example may read: an index name where one axis has it, and `i0`, `i1`, ... for every axis."""
        named = (dim for dim in self.dims if dim in INDEX_NAMES and self.dims.count(dim) == 1)
        return (*map(str, named), *(f"i{axis}" for axis in range(len(self.dims))))


@dataclass(frozen=True)
class Expr:
    """Base of all nodes. What they have in common may be shared: a tree is as small as its different nodes."""

    type: Type

    @cached_property
    def size(self) -> int:
        """The number of operations and operands, written out: a shared node counts wherever it occurs."""
        return 1 + sum(child.size for child in children(self))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the variables that are read."""
        return frozenset().union(*(child.names for child in children(self)))

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    @property
    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def _same(self, other: object) -> bool:
        """Equality that ends at the first node that both share."""
        if self is other:
            return True
        return isinstance(other, type(self)) and self._hash == other._hash and self._fields == other._fields


@dataclass(frozen=True)
class Const(Expr):
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


NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


# ---------------------------------------------------------------------------------------------------------- reading


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions of a node."""
    if isinstance(e, Op):
        return e.args
    if isinstance(e, Load):
        return e.indices
    return ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every different node of the tree, parents first."""
    seen: set[Expr] = set()
    left = [e]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += reversed(children(node))


def names(e: Expr) -> frozenset[str]:
    """Names of the variables an expression reads, those in the indices of its tensors included."""
    return e.names


def loads(*exprs: Expr) -> tuple[Load, ...]:
    """Every distinct tensor element read, in order of appearance."""
    found = {node: None for e in exprs for node in walk(e) if isinstance(node, Load)}
    return tuple(found)


def rebuild(e: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """A copy in which each node that `replace` answers for is exchanged; parents are built anew, so they fold again."""
    done: dict[Expr, Expr] = {}

    def built(node: Expr) -> Expr:
        if node not in done:
            replaced = replace(node)
            if replaced is not None:
                done[node] = replaced
            elif isinstance(node, Op):
                done[node] = make(node.op, *map(built, node.args))
            elif isinstance(node, Load):
                done[node] = Load(node.type, node.tensor, tuple(map(built, node.indices)))
            else:
                return node
        return done[node]

    return built(e)


def substitute(e: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace variables by expressions."""
    return rebuild(e, lambda node: values.get(node.name) if isinstance(node, Var) else None)


class Level(IntEnum):
    """Where in a kernel a value can be computed, cheapest first."""

    UNIFORM = 0  # one number per program
    QUERY = 1  # one number per query row
    KEY = 2  # one number per key
    TILE = 3  # one number per (query, key) pair


TILE_NAMES = frozenset((SCORE, "qk"))
QUERY_NAMES = frozenset(("q_idx", "q_row", "rows"))
KEY_NAMES = frozenset(("kv_idx", "cols"))
"""Positions, and where tokens lie: rows and columns of the score matrix, `q_row` being a row and the query offset."""


def level(e: Expr) -> Level:
    """The cheapest place for a value; `b`, `h` and scalars are uniform within a program."""
    read = names(e)
    of_query, of_key = bool(read & QUERY_NAMES), bool(read & KEY_NAMES)
    if read & TILE_NAMES or (of_query and of_key):
        return Level.TILE
    if of_query:
        return Level.QUERY
    return Level.KEY if of_key else Level.UNIFORM


def reads_head(e: Expr) -> bool:
    """Whether a value changes between the query heads that share one key head."""
    return "h" in names(e)


# --------------------------------------------------------------------------------------------------------- building


def const(value: int | float | bool) -> Const:
    """A literal; its Python type decides the IR type."""
    if isinstance(value, bool):
        return Const(Type.BOOL, value)
    return Const(Type.INT if isinstance(value, int) else Type.FLOAT, value)


def int_var(name: str) -> Var:
    return Var(Type.INT, name)


def float_var(name: str) -> Var:
    return Var(Type.FLOAT, name)


TRUE, FALSE = const(True), const(False)


def is_const(e: Expr, value: float | None = None) -> bool:
    """Whether `e` is a literal number (equal to `value`, if given)."""
    return isinstance(e, Const) and e.type is not Type.BOOL and (value is None or e.value == value)


def to_float(e: Expr) -> Expr:
    """Convert to float. The conversion moves down to the leaves of sums: `float(kv_idx) - float(q_idx)` converts two
    vectors where `float(kv_idx - q_idx)` would convert a tile. Exact for positions below 2**24."""
    if e.type is Type.FLOAT:
        return e
    if isinstance(e, Const):
        return const(float(e.value))
    if isinstance(e, Op) and e.op in ("add", "sub", "neg", "abs", "min", "max"):
        return make(e.op, *(to_float(a) for a in e.args))
    if isinstance(e, Op) and e.op == "where":
        return where(e.args[0], to_float(e.args[1]), to_float(e.args[2]))
    return Op(Type.FLOAT, "float", (e,))


def to_integer(e: Expr) -> Expr:
    """The integer part, toward zero, of a number that 32 bits hold."""
    if e.type is Type.INT:
        return e
    if isinstance(e, Const):
        return const(int(e.value))
    if isinstance(e, Op) and e.op == "float":
        return e.args[0]
    return Op(Type.INT, "int", (e,))


def _unify(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    if a.type is b.type:
        return a, b
    return to_float(a), to_float(b)


def _folded(op: str, a: Const, b: Const) -> Const:
    table: dict[str, Callable[[float, float], float]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "floordiv": lambda x, y: x // y,
        "mod": lambda x, y: x % y,
        "min": min,
        "max": max,
    }
    return const(table[op](a.value, b.value))


def neg(a: Expr) -> Expr:
    if isinstance(a, Const):
        return const(-a.value)
    if isinstance(a, Op) and a.op == "neg":
        return a.args[0]
    if isinstance(a, Op) and a.op == "sub":
        return sub(a.args[1], a.args[0])
    if isinstance(a, Op) and a.op == "mul" and isinstance(a.args[0], Const):
        return mul(neg(a.args[0]), a.args[1])
    return Op(a.type, "neg", (a,))


def split_literal(e: Expr) -> tuple[Expr, int]:
    """Split an integer into (rest, literal): `x + 3` is `(x, 3)`. Floats are left alone: their sums round."""
    if isinstance(e, Const):
        return const(0), int(e.value)
    if isinstance(e, Op) and e.op in ("add", "sub") and isinstance(e.args[1], Const):
        literal = int(e.args[1].value)
        return e.args[0], literal if e.op == "add" else -literal
    return e, 0


def add(a: Expr, b: Expr) -> Expr:
    a, b = _unify(a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded("add", a, b)
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    if a.type is Type.INT:
        return _integer_sum(a, b, 1)
    if isinstance(b, Op) and b.op == "neg":
        return sub(a, b.args[0])
    if isinstance(a, Op) and a.op == "neg":
        return sub(b, a.args[0])
    return Op(a.type, "add", (a, b))


def sub(a: Expr, b: Expr) -> Expr:
    a, b = _unify(a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded("sub", a, b)
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return neg(b)
    if a.type is Type.INT:
        return _integer_sum(a, b, -1)
    if isinstance(b, Op) and b.op == "neg":
        return add(a, b.args[0])
    return Op(a.type, "sub", (a, b))


def _integer_sum(a: Expr, b: Expr, sign: int) -> Expr:
    """`a + sign * b` with the literals of both gathered at the end: `q - (size - 1)` is `q - size + 1`."""
    (a, left), (b, right) = split_literal(a), split_literal(b)
    literal = left + sign * right
    if is_const(a, 0):
        rest = b if sign > 0 else neg(b)
    elif is_const(b, 0):
        rest = a
    elif isinstance(b, Op) and b.op == "neg":
        rest = Op(Type.INT, "sub" if sign > 0 else "add", (a, b.args[0]))
    elif isinstance(a, Op) and a.op == "neg" and sign > 0:
        rest = Op(Type.INT, "sub", (b, a.args[0]))
    else:
        rest = Op(Type.INT, "add" if sign > 0 else "sub", (a, b))
    if literal == 0:
        return rest
    return Op(Type.INT, "add" if literal > 0 else "sub", (rest, const(abs(literal))))


def mul(a: Expr, b: Expr) -> Expr:
    """Product, uniform factors first and joined: `mul(2.0, mul(scale, qk))` is `(scale * 2.0) * qk`."""
    a, b = _unify(a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded("mul", a, b)
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0):
            return const(0.0 if a.type is Type.FLOAT else 0)
        if is_const(x, 1):
            return y
        if is_const(x, -1):
            return neg(y)
    if level(b) is Level.UNIFORM and (level(a) is not Level.UNIFORM or isinstance(b, Const)):
        a, b = b, a
    if isinstance(b, Op) and b.op == "neg":
        return mul(neg(a), b.args[0]) if isinstance(a, Const) else neg(mul(a, b.args[0]))
    if level(a) is Level.UNIFORM and isinstance(b, Op) and b.op == "mul" and level(b.args[0]) is Level.UNIFORM:
        return mul(mul(a, b.args[0]), b.args[1])
    if isinstance(b, Op) and b.op == "mul" and level(b.args[0]) is Level.UNIFORM and level(a) is not Level.UNIFORM:
        return mul(b.args[0], mul(a, b.args[1]))
    return Op(a.type, "mul", (a, b))


def scaled(factor: Expr, e: Expr) -> Expr:
    """`factor * e` for a uniform factor, distributed over sums so that it lands on coefficients."""
    if isinstance(e, Op) and e.op in ("add", "sub"):
        return make(e.op, *(scaled(factor, a) for a in e.args))
    if isinstance(e, Op) and e.op == "neg":
        return neg(scaled(factor, e.args[0]))
    return mul(factor, e)


def div(a: Expr, b: Expr) -> Expr:
    """True division; by a literal it becomes a multiplication."""
    a, b = to_float(a), to_float(b)
    if isinstance(b, Const):
        if isinstance(a, Const):
            return _folded("div", a, b)
        return mul(const(1.0 / b.value), a)
    if is_const(a, 0):
        return a
    return Op(Type.FLOAT, "div", (a, b))


def floordiv(a: Expr, b: Expr) -> Expr:
    """Integer division rounding toward minus infinity, as in Python."""
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded("floordiv", a, b)
    return a if is_const(b, 1) else Op(Type.INT, "floordiv", (a, b))


def mod(a: Expr, b: Expr) -> Expr:
    """Remainder with the sign of the divisor, as in Python."""
    if isinstance(a, Const) and isinstance(b, Const):
        return _folded("mod", a, b)
    return Op(Type.INT, "mod", (a, b))


def minimum(a: Expr, b: Expr) -> Expr:
    a, b = _unify(a, b)
    return _folded("min", a, b) if isinstance(a, Const) and isinstance(b, Const) else Op(a.type, "min", (a, b))


def maximum(a: Expr, b: Expr) -> Expr:
    a, b = _unify(a, b)
    return _folded("max", a, b) if isinstance(a, Const) and isinstance(b, Const) else Op(a.type, "max", (a, b))


def absolute(a: Expr) -> Expr:
    return const(abs(a.value)) if isinstance(a, Const) else Op(a.type, "abs", (a,))


def clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    """`x` from `low` to `high`, and `high` where that is less than `low`.

    Of floats a node of its own, for its derivative at the ends is not that of `max` and `min`.
    """
    args = (x, low, high)
    if any(a.type is Type.FLOAT for a in args) and not all(isinstance(a, Const) for a in args):
        return Op(Type.FLOAT, "clamp", tuple(to_float(a) for a in args))
    return minimum(maximum(x, low), high)


def relu(x: Expr) -> Expr:
    """`max(x, 0)`: of a float a node of its own, as for `clamp`."""
    if x.type is Type.FLOAT and not isinstance(x, Const):
        return Op(Type.FLOAT, "relu", (x,))
    return maximum(x, const(0))


def without_kinks(e: Expr) -> Expr:
    """`clamp` and `relu` as `min` and `max`, for an expression that nothing differentiates."""

    def replaced(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.op not in ("clamp", "relu"):
            return None
        x, *bounds = (without_kinks(a) for a in node.args)
        return minimum(maximum(x, bounds[0]), bounds[1]) if bounds else maximum(x, const(0))

    return rebuild(e, replaced)


MAX_EXPONENT = 32
"""Largest literal exponent: a whole power is written out as products."""


def power(a: Expr, exponent: float) -> Expr:
    """`a ** exponent` for a literal exponent; whole powers become products, which hold for a negative base too."""
    if exponent == 0:
        return const(1.0 if a.type is Type.FLOAT else 1)
    if exponent == 1:
        return a
    if float(exponent * 2).is_integer():
        if exponent < 0:
            return div(const(1.0), power(to_float(a), -exponent))
        whole = math.floor(exponent)
        if whole != exponent:
            return mul(power(to_float(a), whole), function("sqrt", a))
        half = power(a, whole // 2)
        return mul(mul(half, half), a) if whole % 2 else mul(half, half)
    return function("exp", mul(const(float(exponent)), function("log", a)))


_BITS: dict[str, Callable[[int, int], int]] = {
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}

LAST_SHIFT = 30
"""Largest shift, beyond which an integer of 32 bits keeps no more than its sign."""


def _bit_operation(op: str, a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const):
        return const(_BITS[op](int(a.value), int(b.value)))
    return Op(Type.INT, op, (a, b))


def bit_and(a: Expr, b: Expr) -> Expr:
    """The bits that two integers share, in two's complement."""
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0) or is_const(y, -1):
            return x
    return _bit_operation("bitand", a, b)


def bit_or(a: Expr, b: Expr) -> Expr:
    """The bits that one of two integers has, in two's complement."""
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0) or is_const(y, -1):
            return y
    return _bit_operation("bitor", a, b)


def bit_xor(a: Expr, b: Expr) -> Expr:
    """The bits in which two integers differ, in two's complement."""
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0):
            return y
        if is_const(x, -1):
            return bit_not(y)
    return _bit_operation("bitxor", a, b)


def bit_not(a: Expr) -> Expr:
    """`~a` of an integer, which is `-1 - a`."""
    return sub(const(-1), a)


def shift_left(a: Expr, by: Expr) -> Expr:
    """`a << by`; a shift that is no literal is clamped from 0 to `LAST_SHIFT`. By a literal it is a product."""
    if isinstance(by, Const):
        return mul(const(1 << int(by.value)), a)
    return _bit_operation("shl", a, minimum(maximum(by, const(0)), const(LAST_SHIFT)))


def shift_right(a: Expr, by: Expr) -> Expr:
    """`a >> by`, division by a power of two that rounds down; a shift that is no literal is clamped likewise."""
    if is_const(by, 0):
        return a
    by = by if isinstance(by, Const) else minimum(maximum(by, const(0)), const(LAST_SHIFT))
    return _bit_operation("shr", a, by)


def as_product(e: Expr) -> Expr:
    """A shift to the right, or the mask that clears low bits, by literals, as what it is of quotients; `e` if neither.

    >>> as_product(bit_and(int_var("kv_idx"), const(-64))) == mul(const(64), floordiv(int_var("kv_idx"), const(64)))
    True
    """
    if isinstance(e, Op) and e.op in ("shr", "bitand"):
        for x, y in (e.args, e.args[::-1])[: 1 if e.op == "shr" else 2]:
            if e.op == "shr" and isinstance(y, Const):
                return floordiv(x, const(1 << int(y.value)))
            if isinstance(y, Const) and -(1 << LAST_SHIFT) <= y.value < 0 and -int(y.value) & (-int(y.value) - 1) == 0:
                return mul(neg(y), floordiv(x, neg(y)))
    return e


_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": math.exp2,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "sigmoid": lambda x: 0.5 + 0.5 * math.tanh(0.5 * x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "erf": math.erf,
}
FLOAT_FUNCTIONS = frozenset(_FUNCTIONS)

_ROUNDED: dict[str, Callable[[float], int]] = {"floor": math.floor, "ceil": math.ceil, "round": round}
ROUNDINGS = frozenset(_ROUNDED)


def rounded(name: str, a: Expr) -> Expr:
    """floor, ceil or round of a float, which stays one; `round` takes a half to the even number. An integer is itself.

    Raises OverflowError for a literal that is infinite.
    """
    if a.type is Type.INT or (isinstance(a, Op) and (a.op in ROUNDINGS or a.op == "float")):
        return a
    return const(float(_ROUNDED[name](a.value))) if isinstance(a, Const) else Op(Type.FLOAT, name, (a,))


def function(name: str, a: Expr) -> Expr:
    """A function of `FLOAT_FUNCTIONS`, of a float.

    Raises ValueError or OverflowError where that of a literal is no number, such as `log(0)`.
    """
    a = to_float(a)
    return const(_FUNCTIONS[name](a.value)) if isinstance(a, Const) else Op(Type.FLOAT, name, (a,))


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
COMPARISONS = frozenset(_COMPARE)


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """`lt le gt ge eq ne`; integers are compared as integers, booleans by `eq` and `ne` alone."""
    a, b = _unify(a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        return const(_COMPARE[op](a.value, b.value))
    if a.type is Type.BOOL:
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Const):
                return y if x.value == (op == "eq") else logical_not(y)
    return Op(Type.BOOL, op, (a, b))


def logical_not(a: Expr) -> Expr:
    """Negation, pushed down to the comparisons. NaN is never kept either way: `not (x < y)` is `x >= y`."""
    if isinstance(a, Const):
        return const(not a.value)
    if isinstance(a, Op) and a.op == "not":
        return a.args[0]
    if isinstance(a, Op) and a.op in ("and", "or"):
        return (logical_or if a.op == "and" else logical_and)(*(logical_not(x) for x in a.args))
    if isinstance(a, Op) and a.op in COMPARISONS and a.args[0].type is not Type.FLOAT:
        return Op(Type.BOOL, NEGATED[a.op], a.args)
    return Op(Type.BOOL, "not", (a,))


def _logical(op: str, absorbing: Const, args: tuple[Expr, ...]) -> Expr:
    flat: dict[Expr, None] = {}
    for a in args:
        for part in a.args if isinstance(a, Op) and a.op == op else (a,):
            if part == absorbing:
                return absorbing
            if not isinstance(part, Const):
                flat[part] = None
    if not flat:
        return const(not absorbing.value)
    return next(iter(flat)) if len(flat) == 1 else Op(Type.BOOL, op, tuple(flat))


def logical_and(*args: Expr) -> Expr:
    """Conjunction of any number of booleans, flattened, without repeats."""
    return _logical("and", FALSE, args)


def logical_or(*args: Expr) -> Expr:
    """Disjunction of any number of booleans, flattened, without repeats."""
    return _logical("or", TRUE, args)


def conjuncts(e: Expr) -> tuple[Expr, ...]:
    """What a boolean is the conjunction of: itself, where it is none."""
    return e.args if isinstance(e, Op) and e.op == "and" else (e,)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`a` where the condition holds, else `b`."""
    if isinstance(condition, Const):
        return a if condition.value else b
    if a.type is not Type.BOOL:
        a, b = _unify(a, b)
    return a if a == b else Op(a.type, "where", (condition, a, b))


_MAKE: dict[str, Callable[..., Expr]] = {
    "neg": neg,
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    "floordiv": floordiv,
    "mod": mod,
    "min": minimum,
    "max": maximum,
    "abs": absolute,
    "clamp": clamp,
    "relu": relu,
    "float": to_float,
    "int": to_integer,
    "bitand": bit_and,
    "bitor": bit_or,
    "bitxor": bit_xor,
    "shl": shift_left,
    "shr": shift_right,
    "not": logical_not,
    "and": logical_and,
    "or": logical_or,
    "where": where,
}


def make(op: str, *args: Expr) -> Expr:
    """Build a node by the name of its operation."""
    if op in COMPARISONS:
        return compare(op, *args)
    if op in FLOAT_FUNCTIONS:
        return function(op, *args)
    if op in ROUNDINGS:
        return rounded(op, *args)
    return _MAKE[op](*args)
