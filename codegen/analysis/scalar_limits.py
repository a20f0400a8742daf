"""Which integers a call's scalars may be, so that no sum of them leaves 32 bits, and none divides by 0.

A comparison computes its two sides, and the bounds of its blocks compute the difference of the sides. A scalar alone
may have up to `affine.MOST_POSITION` either way: with a position added, that fits. Several scalars in one sum share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from codegen.analysis.affine import MOST_POSITION
from codegen.analysis.score_bounds import Range, bounds
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Op, ScalarType, Type, Var
from codegen.spec.model import ScalarSpec


def narrowed(scalars: Mapping[str, ScalarSpec], roots: Collection[Expr]) -> dict[str, int]:
    """The most that a scalar may be either way, for each of those that expressions add to another scalar.

    >>> a, b = expr.int_var("a"), expr.int_var("b")
    >>> apart = expr.compare("lt", expr.sub(expr.int_var("q_idx"), expr.int_var("kv_idx")), expr.sub(a, b))
    >>> found = narrowed({name: ScalarSpec(name=name, type=ScalarType.INT) for name in ("a", "b", "c")}, [apart])
    >>> sorted(found), found["a"] == 2**29
    (['a', 'b'], True)
    """
    shares = _shares(frozenset(name for name, scalar in scalars.items() if scalar.type is ScalarType.INT), roots)
    return {name: MOST_POSITION // share for name, share in shares.items()}


def divisors(roots: Collection[Expr]) -> frozenset[str]:
    """The names by which expressions divide integers, or take remainders, alone or as a factor of a product.

    >>> q_idx, n, step = map(expr.int_var, ("q_idx", "n", "step"))
    >>> sorted(divisors([expr.floordiv(q_idx, n), expr.mod(q_idx, expr.mul(expr.const(2), step))]))
    ['n', 'step']
    """
    return frozenset(each.name for each in _divisors(roots) if isinstance(each, Var))


def vanishing(scalars: Mapping[str, ScalarSpec], roots: Collection[Expr]) -> list[Expr]:
    """The divisors of integers that are computed from scalars, indices and lengths, and may be 0 within their ranges.

    A divisor that is itself a scalar is left out, because each call checks that it is not 0. Elements of tensors may
    have any value: divisors that read one are left out, too.

    >>> n = expr.int_var("n")
    >>> by_fewer = [expr.floordiv(expr.int_var("q_idx"), expr.sub(n, expr.const(3)))]
    >>> specs = [ScalarSpec(name="n", type=ScalarType.INT, minimum=least) for least in (1, 4)]
    >>> [len(vanishing({"n": spec}, by_fewer)) for spec in specs]
    [1, 0]
    """
    ranges = {name: _range(scalar) for name, scalar in scalars.items()} | _RANGES

    def may_be_zero(e: Expr) -> bool:
        found = bounds(e, ranges)
        return found.low <= 0 <= found.high

    return [
        each
        for each in _divisors(roots)
        if not (isinstance(each, Var) and each.name in scalars)
        and not expr.loads(each)
        and expr.names(each) <= ranges.keys()
        and may_be_zero(each)
    ]


_RANGES = {name: Range(0, MOST_POSITION) for name in expr.INDEX_NAMES} | {
    name: Range(1, MOST_POSITION) for name in expr.LENGTH_NAMES
}
"""Of each index and length the values in a call that has a pair."""


def _range(scalar: ScalarSpec) -> Range:
    low, high = scalar.minimum, scalar.maximum
    return Range(-MOST_POSITION if low is None else low, MOST_POSITION if high is None else high)


def _divisors(roots: Collection[Expr]) -> list[Expr]:
    """What expressions divide integers by, without constants. Of a product its factors: it is 0 if one of them is."""
    nodes = (node for root in roots for node in expr.walk(root))
    waiting = [node.args[1] for node in nodes if isinstance(node, Op) and node.op in ("floordiv", "mod")]
    found: dict[Expr, None] = {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, Op) and each.op in ("mul", "neg", "abs"):
            waiting += each.args
        elif not isinstance(each, Const) and each.type is Type.INT:
            found[each] = None
    return list(found)


def within(scalar: ScalarSpec, most: int) -> ScalarSpec:
    """A scalar whose range ends at `most` either way."""
    low, high = scalar.minimum, scalar.maximum
    return replace(
        scalar, minimum=-most if low is None else max(low, -most), maximum=most if high is None else min(high, most)
    )


def _shares(names: frozenset[str], roots: Iterable[Expr]) -> dict[str, int]:
    """The most scalars that a sum with each scalar has, where that is more than one; a factor counts as that many."""
    counter = _Counter(names)
    shares: dict[str, int] = {}
    for root in roots:
        for node in expr.walk(root):
            if not isinstance(node, Op):
                continue
            if node.op in expr.COMPARISONS and node.args[0].type is Type.INT:
                count = sum(map(counter.count, node.args))
            else:
                count = counter.count(node)
            for name in expr.names(node) & counter.names if count > 1 else ():
                shares[name] = max(shares.get(name, 1), count)
    return shares


class _Counter:
    """Counts the scalars that an integer adds up: it is at most that many times the largest scalar, plus positions."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._known: dict[Expr, int] = {}

    def count(self, e: Expr) -> int:
        if e not in self._known:
            self._known[e] = self._count(expr.as_product(e))
        return self._known[e]

    def _count(self, e: Expr) -> int:
        if e.type is not Type.INT or not expr.names(e) & self.names:
            return 0
        if isinstance(e, Var):
            return 1
        if not isinstance(e, Op) or e.op == "int":  # an element of a tensor, or what was a float
            return 0
        if e.op == "mul":
            return self._product(*e.args)
        if e.op in ("floordiv", "shl", "shr"):
            return self.count(e.args[0])
        if e.op == "mod":
            return self.count(e.args[1])
        if e.op in ("min", "max", "where"):
            return max(map(self.count, e.args))
        return sum(map(self.count, e.args))

    def _product(self, a: Expr, b: Expr) -> int:
        """A product with a literal, or one of scalars, which fits 32 bits by itself and counts as one of them."""
        if not isinstance(a, Const):
            return max(self.count(a), self.count(b))
        factor, divisor = abs(int(a.value)), 1
        if isinstance(b, Op) and b.op == "floordiv" and isinstance(b.args[1], Const):
            divisor = abs(int(b.args[1].value))
        return -(-factor * self.count(b) // divisor)
