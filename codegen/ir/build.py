"""Smart constructors of functions, comparisons and logic; `make` builds any operation by its name.

`rebuild` and `substitute` copy a tree with some nodes replaced: parents are built anew and fold again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from codegen.ir.arithmetic import (
    absolute,
    add,
    bit_and,
    bit_or,
    bit_xor,
    div,
    floordiv,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    shift_left,
    shift_right,
    sub,
    to_float,
    unify,
    where,
)
from codegen.ir.nodes import FALSE, TRUE, Const, Expr, Load, Op, Var, const
from codegen.ir.quotients import to_integer, whole_quotient, without_quotients
from codegen.ir.types import Type

# -------------------------------------------------------------------------------------------------------- functions

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

MAX_EXPONENT = 32
"""Largest literal exponent: a whole power is written out as products."""


def rounded(name: str, a: Expr) -> Expr:
    """floor, ceil or round of a float, as a float; `round` rounds a half to the even number. An integer is returned
    unchanged.

    Raises OverflowError for a literal that is infinite.
    """
    if a.type is Type.INT or (isinstance(a, Op) and (a.op in ROUNDINGS or a.op == "float")):
        return a
    quotient = whole_quotient(a)
    if quotient is not None and name != "round":
        x, n = quotient
        return to_float(floordiv(x, n) if name == "floor" else neg(floordiv(neg(x), n)))
    return const(float(_ROUNDED[name](a.value))) if isinstance(a, Const) else Op(Type.FLOAT, name, (a,))


def function(name: str, a: Expr) -> Expr:
    """A function of `FLOAT_FUNCTIONS`.

    Raises ValueError or OverflowError where a literal has no value, as in `log(0)`.
    """
    a = to_float(a)
    return const(_FUNCTIONS[name](a.value)) if isinstance(a, Const) else Op(Type.FLOAT, name, (a,))


def power(a: Expr, exponent: float) -> Expr:
    """`a ** exponent` for a literal exponent.

    Whole powers become products, which hold for a negative base too. A power of a variable with another exponent has a
    node of its own, because the derivative of `written_power` is NaN where the base is 0.
    """
    if exponent == 0:
        return const(1.0 if a.type is Type.FLOAT else 1)
    if exponent == 1:
        return a
    if float(exponent).is_integer():
        if exponent < 0:
            return div(const(1.0), power(to_float(a), -exponent))
        half = power(a, math.floor(exponent) // 2)
        return mul(mul(half, half), a) if exponent % 2 else mul(half, half)
    if isinstance(a, Const) or abs(exponent) == 0.5:
        return written_power(a, exponent)
    return Op(Type.FLOAT, "pow", (to_float(a), const(float(exponent))))


def written_power(a: Expr, exponent: float) -> Expr:
    """A power whose exponent is no whole number, by a square root if its double is one, else by `exp` and `log`."""
    if not float(exponent * 2).is_integer():
        return function("exp", mul(const(float(exponent)), function("log", a)))
    if exponent < 0:
        return div(const(1.0), written_power(a, -exponent))
    return mul(power(to_float(a), math.floor(exponent)), function("sqrt", a))


def without_powers(e: Expr) -> Expr:
    """An expression that is not differentiated any more, in which `written_power` has taken the place of powers."""

    def replaced(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.op != "pow":
            return None
        base, exponent = node.args
        assert isinstance(exponent, Const)
        return written_power(without_powers(base), exponent.value)

    return rebuild(e, replaced)


def clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    """`x` limited to `low` .. `high`; `high` where `high < low`.

    A clamp of floats has a node of its own, because its derivative at the ends differs from that of `max` and `min`.
    """
    args = (x, low, high)
    if any(a.type is Type.FLOAT for a in args) and not all(isinstance(a, Const) for a in args):
        return Op(Type.FLOAT, "clamp", tuple(to_float(a) for a in args))
    return minimum(maximum(x, low), high)


def relu(x: Expr) -> Expr:
    """`max(x, 0)`. A relu of a float has a node of its own, for the reason given at `clamp`."""
    if x.type is Type.FLOAT and not isinstance(x, Const):
        return Op(Type.FLOAT, "relu", (x,))
    return maximum(x, const(0))


def without_kinks(e: Expr) -> Expr:
    """`clamp` and `relu` written as `min` and `max`, and powers by `written_power`, for an expression that is never
    differentiated."""

    def replaced(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.op not in ("clamp", "relu"):
            return None
        x, *bounds = (without_kinks(a) for a in node.args)
        return minimum(maximum(x, bounds[0]), bounds[1]) if bounds else maximum(x, const(0))

    return without_powers(rebuild(e, replaced))


# -------------------------------------------------------------------------------------------- comparisons and logic


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
COMPARISONS = frozenset(_COMPARE)

NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
"""Comparison -> the comparison that holds where it does not, for operands that are never NaN."""


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """`lt le gt ge eq ne`. Integers are compared as integers; booleans only by `eq` and `ne`."""
    a, b = unify(a, b)
    if a.type is Type.FLOAT:
        a, b = without_quotients(a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        return const(_COMPARE[op](a.value, b.value))
    if a.type is Type.BOOL:
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Const):
                return y if x.value == (op == "eq") else logical_not(y)
    return Op(Type.BOOL, op, (a, b))


def logical_not(a: Expr) -> Expr:
    """Negation, pushed down to the comparisons of integers. A comparison of floats keeps its `not`: with a NaN neither
    `x < y` nor `x >= y` holds."""
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


# ------------------------------------------------------------------------------------------------ building by name


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
    "pow": lambda a, exponent: power(a, exponent.value),
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
    """Build a node from the name of its operation."""
    if op in COMPARISONS:
        return compare(op, *args)
    if op in FLOAT_FUNCTIONS:
        return function(op, *args)
    if op in ROUNDINGS:
        return rounded(op, *args)
    return _MAKE[op](*args)


def rebuild(e: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """A copy of a tree in which each node is exchanged for `replace(node)`, unless that is None."""
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
