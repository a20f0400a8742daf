"""Bounds of a logit, and the reference that makes the running maximum of a softmax unnecessary.

A softmax subtracts a reference from each row's logits, so that weights and their sums fit their types. Usually that is
the row's largest logit, which a kernel finds block by block. If a logit is bounded whatever q and k are, as by
`cap * tanh(score / cap)`, one number serves all rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from codegen.ir.expr import LAST_SHIFT, Const, Expr, Op, Var

RUNNING_EXPONENT = 8
"""A weight relative to a running maximum is at most 2**8: the maximum rises only for a logit more than 8 above it."""

LEAST_EXPONENT = -100
"""A weight relative to a fixed reference is at least 2**-100."""

LARGEST_EXPONENT = 48
"""A weight relative to a fixed reference is at most 2**48."""


@dataclass(frozen=True)
class Range:
    """The least and the greatest value of a number, unless it is NaN."""

    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


ANY = Range(-math.inf, math.inf)


def fixed_reference(logit: Expr) -> float | None:
    """The reference of all rows for bfloat16 weights, in base 2; None if the rows need running maxima.

    `logit` is the score times log2(e), in terms of `qk`. With low <= logit <= high, weights are between
    2**(low - reference) and 2**(high - reference). The reference is high - 8 if the least weight then is at least
    2**-100, else low + 100. Three things follow:

    - No weight is rounded to 0, for the least normal bfloat16 and float32 is 2**-126. So a row that attends to a key
      has a sum of at least 2**-100, and a sum of 0 means that it attends to none.
    - No sum of weights overflows: 2**31 keys have at most 2**(48 + 31).
    - Sums of weighted values overflow only if the largest |v| is 2**(128 - e) / keys or more, where
      e = high - reference. In the first case e = 8, as with running maxima, so they overflow where those do. In the
      second it is at most 48: for 2**20 keys that takes values of 2**60. A product of the least weight is normal for
      |v| >= 2**-26, and below that has an absolute error of at most 2**(-126 + 100) of the row's sum.

    float16 has no such reference: its largest number is below 2**16, its least normal one is 2**-14.

    >>> from codegen.ir.expr import const, float_var, function, mul
    >>> capped = function("tanh", mul(const(0.05), float_var("qk")))
    >>> fixed_reference(mul(const(28.0), capped)), fixed_reference(mul(const(72.0), capped))
    (20.0, 28.0)
    >>> fixed_reference(float_var("qk"))
    """
    found = bounds(logit)
    if not found.is_bounded:
        return None
    reference = min(found.high - RUNNING_EXPONENT, found.low - LEAST_EXPONENT)
    return reference if found.high - reference <= LARGEST_EXPONENT else None


def bounds(e: Expr, variables: Mapping[str, Range] = MappingProxyType({})) -> Range:
    """The range of an expression for all values of its tensors, and of its variables within the ranges `variables`.

    A variable that is not among these may have any value. For a logit none is given, not even that of a scalar, because
    a traced call does not check the limits of scalars.
    """
    known: dict[Expr, Range] = {}  # a derivative uses many of its nodes more than once

    def found(node: Expr) -> Range:
        if isinstance(node, Var):
            return variables.get(node.name, ANY)
        if node not in known:
            known[node] = _bounds(node, [found(arg) for arg in node.args] if isinstance(node, Op) else [])
        return known[node]

    return found(e)


def _bounds(e: Expr, args: Sequence[Range]) -> Range:
    """The range of an expression whose operands have the ranges `args`."""
    if isinstance(e, Const):
        return Range(float(e.value), float(e.value))
    if not isinstance(e, Op):
        return ANY
    match e.op:
        case "add":
            return _within(args[0].low + args[1].low, args[0].high + args[1].high)
        case "sub":
            return _within(args[0].low - args[1].high, args[0].high - args[1].low)
        case "neg":
            return Range(-args[0].high, -args[0].low)
        case "mul":
            return _product(*args)
        case "floordiv" if args[1].low == args[1].high > 0:
            return _within(args[0].low // args[1].low, args[0].high // args[1].low)
        case "mod" if args[1].low > 0:
            return Range(0, min(args[1].high - 1, args[0].high if args[0].low >= 0 else math.inf))
        case "shl" | "shr":
            return _shifted(e.op, *args)
        case "bitand" if max(args[0].low, args[1].low) >= 0:
            return Range(0, min(arg.high for arg in args if arg.low >= 0))
        case "min":
            return Range(min(args[0].low, args[1].low), min(args[0].high, args[1].high))
        case "max":
            return Range(max(args[0].low, args[1].low), max(args[0].high, args[1].high))
        case "clamp":
            value, low, high = args
            return Range(min(max(value.low, low.low), high.low), min(max(value.high, low.high), high.high))
        case "abs":
            least = 0.0 if args[0].low <= 0.0 <= args[0].high else min(abs(args[0].low), abs(args[0].high))
            return Range(least, max(abs(args[0].low), abs(args[0].high)))
        case "where":
            return Range(min(args[1].low, args[2].low), max(args[1].high, args[2].high))
        case "tanh":
            return Range(math.tanh(args[0].low), math.tanh(args[0].high))
        case "sigmoid":
            return Range(0.0, 1.0)
        case "relu":
            return Range(max(args[0].low, 0.0), max(args[0].high, 0.0))
        case "float":
            return args[0]
    return ANY


def _shifted(op: str, x: Range, by: Range) -> Range:
    """The range of an integer shifted by a number of bits; `ANY` if bits of it may be lost on the left."""
    if not (x.is_bounded and by.low >= 0 and by.high <= LAST_SHIFT):
        return ANY
    factors = [2 ** int(by.low), 2 ** int(by.high)]
    ends = [end * factor if op == "shl" else end // factor for end in (x.low, x.high) for factor in factors]
    return Range(min(ends), max(ends)) if max(map(abs, ends)) < 2**31 else ANY


def _product(x: Range, y: Range) -> Range:
    """The range of a product; `ANY` if a factor has no bound, because 0 times infinity is NaN."""
    if not (x.is_bounded and y.is_bounded):
        return ANY
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return Range(min(ends), max(ends))


def _within(low: float, high: float) -> Range:
    return Range(-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
