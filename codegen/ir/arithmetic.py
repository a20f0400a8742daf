"""Smart constructors of arithmetic: conversions, sums, products, quotients, choices, and operations on bits.

Each constructor unifies the types of its operands, folds literals, and returns a normal form: integer literals stand
at the end of a sum, and a product is `uniform factor * tile`, so that the softmax scale and the log2(e) of `exp2`
become one multiplication.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from codegen.ir.nodes import Const, Expr, Op, Var, const, is_const, level
from codegen.ir.types import POSITION_NAMES, Level, Type

MOST_EXACT = 2**24
"""Integers up to this, either way, are exact in float32."""


def to_float(e: Expr) -> Expr:
    """Convert to float. The conversion moves down to the leaves of sums: `float(kv_idx) - float(q_idx)` converts two
    vectors where `float(kv_idx - q_idx)` would convert a tile. Exact for positions below 2**24.

    A sum of two operands that may be larger is converted as a whole: `time[q_idx] - time[kv_idx]` is a few seconds
    where each time in float32 is off by minutes.
    """
    if e.type is Type.FLOAT:
        return e
    if isinstance(e, Const):
        return const(float(e.value))
    if isinstance(e, Op) and e.op in ("add", "sub") and large_operands(e) > 1:
        return Op(Type.FLOAT, "float", (e,))
    if isinstance(e, Op) and e.op in OF_FLOATS_TOO:
        return OF_FLOATS_TOO[e.op](*(to_float(a) for a in e.args))
    if isinstance(e, Op) and e.op == "where":
        return where(e.args[0], to_float(e.args[1]), to_float(e.args[2]))
    return Op(Type.FLOAT, "float", (e,))


def large_operands(e: Expr) -> int:
    """How many operands of an integer sum may lie beyond `MOST_EXACT`, provided that positions do not."""
    if isinstance(e, Op) and e.op in ("add", "sub", "neg", "abs"):
        return sum(map(large_operands, e.args))
    if isinstance(e, Op) and e.op in ("min", "max"):
        return max(map(large_operands, e.args))
    return int(not is_exact(e))


def is_exact(e: Expr) -> bool:
    """True if an integer is known to lie within `MOST_EXACT`, provided that positions do."""
    if isinstance(e, Const):
        return abs(e.value) <= MOST_EXACT
    if isinstance(e, Var):
        return e.name in POSITION_NAMES
    if isinstance(e, Op) and e.op == "floordiv":
        return isinstance(e.args[1], Const) and is_exact(e.args[0])
    return isinstance(e, Op) and e.op == "mod" and is_exact(e.args[1])


def unify(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Both operands as floats, unless they have one type already."""
    if a.type is b.type:
        return a, b
    return to_float(a), to_float(b)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`a` where the condition holds, else `b`."""
    if isinstance(condition, Const):
        return a if condition.value else b
    if a.type is not Type.BOOL:
        a, b = unify(a, b)
    return a if a == b else Op(a.type, "where", (condition, a, b))


# ----------------------------------------------------------------------------------------------- sums and products


def summands(e: Expr) -> list[Expr]:
    """The operands of a sum, with nested ones; any other expression is its own only operand."""
    if isinstance(e, Op) and e.op in ("add", "sub", "neg"):
        return [part for a in e.args for part in summands(a)]
    return [e]


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
    """`-a`."""
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
    """`a + b`."""
    a, b = unify(a, b)
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
    """`a - b`."""
    a, b = unify(a, b)
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
    """Product with uniform factors first and joined: `mul(2.0, mul(scale, qk))` is `(scale * 2.0) * qk`."""
    a, b = unify(a, b)
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
    """`factor * e` for a uniform factor, distributed over sums so that it joins their coefficients."""
    if isinstance(e, Op) and e.op in ("add", "sub"):
        return OF_FLOATS_TOO[e.op](*(scaled(factor, a) for a in e.args))
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
    """The smaller of two numbers."""
    a, b = unify(a, b)
    return _folded("min", a, b) if isinstance(a, Const) and isinstance(b, Const) else Op(a.type, "min", (a, b))


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger of two numbers."""
    a, b = unify(a, b)
    return _folded("max", a, b) if isinstance(a, Const) and isinstance(b, Const) else Op(a.type, "max", (a, b))


def absolute(a: Expr) -> Expr:
    """`|a|`."""
    return const(abs(a.value)) if isinstance(a, Const) else Op(a.type, "abs", (a,))


OF_FLOATS_TOO: dict[str, Callable[..., Expr]] = {
    "add": add,
    "sub": sub,
    "neg": neg,
    "abs": absolute,
    "min": minimum,
    "max": maximum,
}
"""Operations that give the same value before and after their integer operands are converted to float."""


# ------------------------------------------------------------------------------------------------------------- bits


_BITS: dict[str, Callable[[int, int], int]] = {
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}

LAST_SHIFT = 30
"""Largest shift distance. A larger one would leave nothing but the sign of a 32-bit integer."""


def _bit_operation(op: str, a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const):
        return const(_BITS[op](int(a.value), int(b.value)))
    return Op(Type.INT, op, (a, b))


def bit_and(a: Expr, b: Expr) -> Expr:
    """`a & b` of integers in two's complement."""
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0) or is_const(y, -1):
            return x
    return _bit_operation("bitand", a, b)


def bit_or(a: Expr, b: Expr) -> Expr:
    """`a | b` of integers in two's complement."""
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0) or is_const(y, -1):
            return y
    return _bit_operation("bitor", a, b)


def bit_xor(a: Expr, b: Expr) -> Expr:
    """`a ^ b` of integers in two's complement."""
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
    """`a << by`. A literal distance makes it a product; any other distance is clamped to 0 .. `LAST_SHIFT`."""
    if isinstance(by, Const):
        return mul(const(1 << int(by.value)), a)
    return _bit_operation("shl", a, _shift_distance(by))


def shift_right(a: Expr, by: Expr) -> Expr:
    """`a >> by`: division by a power of two, rounded down. A distance that is no literal is clamped as in
    `shift_left`."""
    if is_const(by, 0):
        return a
    return _bit_operation("shr", a, by if isinstance(by, Const) else _shift_distance(by))


def _shift_distance(by: Expr) -> Expr:
    """`by` within 0 and `LAST_SHIFT`; a shift that is built again from its operands has such a distance already."""
    match by:
        case Op(op="min", args=(Op(op="max", args=(_, Const(value=0))), Const(value=last))) if last == LAST_SHIFT:
            return by
    return minimum(maximum(by, const(0)), const(LAST_SHIFT))


def as_product(e: Expr) -> Expr:
    """A right shift, or a mask that clears low bits, rewritten with `//` and `*`; any other expression as it is.

    >>> from codegen.ir.nodes import int_var
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
