"""Quotients of integers by literals, which are products with rounded reciprocals, where a rounding would show: under
`int`, `floor` and `ceil`, and in comparisons."""

from __future__ import annotations

import math

from codegen.ir.arithmetic import (
    OF_FLOATS_TOO,
    floordiv,
    is_exact,
    large_operands,
    mul,
    neg,
    summands,
    to_float,
    where,
)
from codegen.ir.nodes import Const, Expr, Op, const, walk
from codegen.ir.types import Type


def to_integer(e: Expr) -> Expr:
    """The integer part (rounded toward zero) of a number that fits 32 bits."""
    if e.type is Type.INT:
        return e
    if isinstance(e, Const):
        return const(int(e.value))
    if isinstance(e, Op) and e.op == "float":
        return e.args[0]
    quotient = whole_quotient(e)
    if quotient is None:
        return Op(Type.INT, "int", (e,))
    a, n = quotient
    return where(Op(Type.BOOL, "ge", (a, const(0))), floordiv(a, n), neg(floordiv(neg(a), n)))


def whole_quotient(e: Expr) -> tuple[Expr, Const] | None:
    """`(a, n)` if `e` is an integer `a` divided by a literal `n` from 2 on, else None.

    In float32 41 times the reciprocal of 41 is less than 1: roundings of such a quotient divide the integer instead.
    """
    if not (isinstance(e, Op) and e.op == "mul" and isinstance(e.args[0], Const) and e.args[0].value):
        return None
    factor, a = float(e.args[0].value), _integer_of(e.args[1])
    n = round(1.0 / abs(factor))
    if a is None or not 2 <= n < 2**31 or 1.0 / n != abs(factor):
        return None
    # Of a sum that was converted as a whole it is known that it fits 32 bits, of other sums it is not.
    is_whole = isinstance(e.args[1], Op) and e.args[1].op == "float"
    if large_operands(a) > 1 and not is_whole:
        return None
    return (a if factor > 0 else neg(a)), const(n)


def without_quotients(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Two floats that compare as `a` and `b` do, both times the literals by which they divide integers: see
    `whole_quotient`."""
    for part in (*summands(a), *summands(b)):
        quotient = whole_quotient(part)
        if quotient is not None:
            n = int(quotient[1].value)
            multiples = _multiple(a, n), _multiple(b, n)
            # Beside a literal as large as that, the rounding of a quotient shows no more than any other rounding.
            return (a, b) if any(map(_exceeds_float32, multiples)) else without_quotients(*multiples)
    return a, b


def _exceeds_float32(e: Expr) -> bool:
    """True if an expression holds a finite literal that is no finite float32."""
    values = (node.value for node in walk(e) if isinstance(node, Const) and node.type is Type.FLOAT)
    return any(2.0**128 <= abs(value) < math.inf for value in values)


def _multiple(e: Expr, n: int) -> Expr:
    """`n * e`, where a quotient by `n` is its dividend, without a rounding."""
    if isinstance(e, Op) and e.op in ("add", "sub", "neg"):
        return OF_FLOATS_TOO[e.op](*(_multiple(a, n) for a in e.args))
    if isinstance(e, Const) and abs(e.value) == math.inf:
        return e
    if isinstance(e, Const):
        # 49 times the double that is closest to 3 / 49 is not 3, and block analysis would miss pairs that kernels keep.
        whole = round(n * e.value)
        return const(float(whole) if abs(n * e.value - whole) <= abs(whole) * 2.0**-40 else n * e.value)
    quotient = whole_quotient(e)
    return mul(const(float(n)), e) if quotient is None or quotient[1] != const(n) else to_float(quotient[0])


def _integer_of(e: Expr) -> Expr | None:
    """The integer expression of which `to_float` made `e`, else None. Literals beyond `MOST_EXACT` stay floats: a sum
    with one might leave 32 bits."""
    if isinstance(e, Const):
        return const(int(e.value)) if float(e.value).is_integer() and is_exact(e) else None
    if isinstance(e, Op) and e.op == "float":
        return e.args[0]
    if isinstance(e, Op) and e.op in OF_FLOATS_TOO:
        parts = [_integer_of(a) for a in e.args]
        known = [part for part in parts if part is not None]
        return OF_FLOATS_TOO[e.op](*known) if len(known) == len(parts) else None
    return None
