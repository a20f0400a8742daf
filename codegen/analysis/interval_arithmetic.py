"""Interval arithmetic whose bounds are expressions over the first and last positions of a block.

>>> from codegen.ir.expr import int_var
>>> from codegen.ir.printers import FormulaPrinter
>>> x = Interval(int_var("low"), int_var("high"))
>>> [FormulaPrinter().text(bound) for bound in x.scaled(-2).bounds]
['-2 * high', '-2 * low']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codegen.analysis.affine import MOST_INTEGER, MOST_POSITION, reach
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, const

Bound = Expr | None
"""An end of an interval; None if nothing is known of it."""


@dataclass(frozen=True)
class Truth:
    """What is known of a boolean over a block: `may` is false only if it holds nowhere, `must` is true only if it holds
    everywhere."""

    may: Expr
    must: Expr

    def negated(self) -> Truth:
        """What is known of the boolean's negation."""
        return Truth(expr.logical_not(self.must), expr.logical_not(self.may))


@dataclass(frozen=True)
class Interval:
    """Bounds of a number over a block."""

    low: Bound
    high: Bound

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Both ends, or the only one if they are equal."""
        return (self.low,) if self.low == self.high else (self.low, self.high)

    def map(self, increasing: Callable[[Expr], Expr]) -> Interval:
        """The image under a function that never decreases."""
        return Interval(_mapped(increasing, self.low), _mapped(increasing, self.high))

    def map_reversed(self, decreasing: Callable[[Expr], Expr]) -> Interval:
        """The image under a function that never increases."""
        return Interval(_mapped(decreasing, self.high), _mapped(decreasing, self.low))

    def __neg__(self) -> Interval:
        return self.map_reversed(expr.neg)

    def __add__(self, other: Interval) -> Interval:
        return Interval(from_both(expr.add, self.low, other.low), from_both(expr.add, self.high, other.high))

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def scaled(self, factor: int) -> Interval:
        """The product with an integer."""
        image = self.map if factor >= 0 else self.map_reversed
        return image(lambda e: expr.mul(const(factor), e))


UNKNOWN = Interval(None, None)
UNDECIDED = Truth(TRUE, FALSE)


def exactly(e: Expr) -> Interval:
    """The interval of a value that is the same in the whole block."""
    return Interval(e, e)


def hull(ends: list[Bound]) -> Interval:
    """The smallest interval that contains all ends."""
    known = [e for e in ends if e is not None]
    if len(known) < len(ends):
        return UNKNOWN
    low = high = known[0]
    for e in known[1:]:
        low, high = expr.minimum(low, e), expr.maximum(high, e)
    return Interval(low, high)


def unless(op: str, a: Bound, b: Bound) -> Expr:
    """False where the comparison of two bounds holds, else true: a NaN, from inf - inf, proves nothing."""
    return TRUE if a is None or b is None else expr.logical_not(expr.compare(op, a, b))


def provided(op: str, a: Bound, b: Bound) -> Expr:
    """True where the comparison of two bounds holds, false also where a bound is unknown."""
    return FALSE if a is None or b is None else expr.compare(op, a, b)


def from_both(f: Callable[[Expr, Expr], Expr], a: Bound, b: Bound) -> Bound:
    """A bound that is known only if both others are."""
    return None if a is None or b is None else f(a, b)


def from_either(f: Callable[[Expr, Expr], Expr], a: Bound, b: Bound) -> Bound:
    """A bound that is known if one of the others is."""
    return f(a, b) if a is not None and b is not None else (b if a is None else a)


def bitwise_and(x: Interval, y: Interval) -> Interval:
    """`x & y`. It is at most the larger operand and at most each operand that is not negative. It is negative only if
    both are, and then the bits it lacks are at most the bits that the two lack together."""
    if x.low is None or y.low is None or x.high is None or y.high is None:
        return UNKNOWN
    zero = const(0)
    x_counts, y_counts = expr.compare("ge", x.low, zero), expr.compare("ge", y.low, zero)
    least = _least_of_and(expr.minimum(x.low, zero), expr.minimum(y.low, zero))
    low = expr.where(expr.logical_or(x_counts, y_counts), zero, expr.minimum(least, zero))
    if_counts = expr.where(y_counts, expr.minimum(x.high, y.high), x.high)
    return Interval(low, expr.where(x_counts, if_counts, expr.where(y_counts, y.high, expr.maximum(x.high, y.high))))


def _least_of_and(a: Expr, b: Expr) -> Expr:
    """`a + b + 1` for two numbers of at most 0; the least 32-bit integer if the sum might not fit 32 bits."""
    if all((most := reach(e)) is not None and most <= MOST_POSITION for e in (a, b)):
        return expr.add(expr.add(a, b), const(1))
    far = const(-MOST_POSITION)
    fits = expr.logical_and(expr.compare("ge", a, far), expr.compare("ge", b, far))
    summed = expr.add(expr.add(expr.maximum(a, far), expr.maximum(b, far)), const(1))
    return expr.where(fits, summed, const(-MOST_INTEGER - 1))


def bitwise_or(x: Interval, y: Interval) -> Interval:
    """`x | y`, which is `~(~x & ~y)`."""
    return _complement(bitwise_and(_complement(x), _complement(y)))


def bitwise_xor(x: Interval, y: Interval) -> Interval:
    """`x ^ y`, which is `~(x ^ ~y)`."""
    low = _most_of_xor(x, _complement(y))
    return Interval(_mapped(expr.bit_not, low), _most_of_xor(x, y))


def _most_of_xor(x: Interval, y: Interval) -> Bound:
    """An upper end of `x ^ y`, which is `(x | y) - (x & y)`, within 32 bits."""
    either, both = bitwise_or(x, y).high, bitwise_and(x, y).low
    if either is None or both is None:
        return None
    either = expr.maximum(either, const(0))
    return expr.sub(either, expr.maximum(both, expr.sub(either, const(MOST_INTEGER))))


def _complement(x: Interval) -> Interval:
    return x.map_reversed(expr.bit_not)


def _mapped(f: Callable[[Expr], Expr], bound: Bound) -> Bound:
    return None if bound is None else f(bound)
