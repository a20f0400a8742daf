"""The distances beyond which the elements that a score reads no longer change.

Such limits exist because indices are clamped to their tensors, and because distance buckets end. All pairs beyond a
limit read one element: kernels then read it once for a block, and its gradient is one sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.analysis.affine import MOST_POSITION, linear
from codegen.analysis.distances import LAG, added_by_distance, by_lag, kept_lags
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Level, Load, Op, Type, int_var
from codegen.spec.model import Variant

SLACK = 1e-5
"""Relative and absolute error that is allowed for the float32 operations of a kernel."""


@dataclass(frozen=True, kw_only=True)
class SizeLimit:
    """The distance at which `factor * distance + rest` leaves an axis of a tensor at its far end."""

    tensor: str
    axis: int
    factor: int
    rest: int


Limit = int | SizeLimit
"""A distance: known, or found from a tensor's size."""


@dataclass(frozen=True, kw_only=True)
class FarLags:
    """All distances up to the smallest of `first` read the same elements, and so do all from the largest of `last` on.

    If a side has no limits, the elements may change everywhere on that side.
    """

    first: tuple[Limit, ...] = ()
    last: tuple[Limit, ...] = ()

    @property
    def known(self) -> bool:
        """True if there is a limit on either side."""
        return bool(self.first or self.last)


def distance_loads(variant: Variant) -> list[Load]:
    """The reads of a score that differ between pairs, if all of them depend only on the distance; else none."""
    if variant.score is None or added_by_distance(variant) is None:
        return []
    return [load for load in expr.loads(variant.score) if expr.level(load) is Level.TILE]


def far_lags(variant: Variant) -> FarLags:
    """The limits of all reads by distance, without those beyond which the mask keeps no pair."""
    found, kept = _far_lags(variant), kept_lags(variant.mask)
    none_before = kept.least is not None and all(isinstance(x, int) and x <= kept.least for x in found.first)
    none_behind = kept.most is not None and all(isinstance(x, int) and x >= kept.most for x in found.last)
    return FarLags(first=() if none_before else found.first, last=() if none_behind else found.last)


def _far_lags(variant: Variant) -> FarLags:
    firsts: list[tuple[Limit, ...]] = []
    lasts: list[tuple[Limit, ...]] = []
    for load in distance_loads(variant):
        by_distance = by_lag(load)
        assert by_distance is not None
        for axis, index in enumerate(by_distance.indices):
            if LAG.name in expr.names(index):
                first, last = _limits(load.tensor, axis, index)
                firsts.append(first)
                lasts.append(last)
    return FarLags(first=_all(firsts), last=_all(lasts))


def _all(limits: Iterable[tuple[Limit, ...]]) -> tuple[Limit, ...]:
    """The limits of several reads together, integers as well as `SizeLimit`; empty if one read has no limit."""
    found = list(limits)
    return tuple(dict.fromkeys(limit for own in found for limit in own)) if all(found) else ()


def _limits(tensor: str, axis: int, index: Expr) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    # Every index is clamped at 0, whatever the tensor.
    clamped = expr.maximum(index, expr.const(0))
    first, last = _last_of_constant(clamped, 1), _last_of_constant(clamped, -1)
    firsts: tuple[Limit, ...] = () if first is None else (first,)
    lasts: tuple[Limit, ...] = () if last is None else (-last,)
    form = lag_line(index)
    if form is not None:
        size = SizeLimit(tensor=tensor, axis=axis, factor=form.factor, rest=form.rest)
        firsts, lasts = (firsts, lasts or (size,)) if form.factor > 0 else (firsts or (size,), lasts)
    return firsts, lasts


@dataclass(frozen=True, kw_only=True)
class LagLine:
    """An index `factor * distance + rest`."""

    factor: int
    rest: int


def lag_line(index: Expr) -> LagLine | None:
    """The index of a read by distance as a `LagLine`; None if it has another form."""
    # `linear` knows the name `q_idx`, but not `LAG`.
    form = linear(expr.substitute(index, {LAG.name: int_var("q_idx")}))
    if form is None or not isinstance(form.rest, Const) or form.q == 0:
        return None
    return LagLine(factor=form.q, rest=int(form.rest.value))


def _last_of_constant(e: Expr, sign: int) -> int | None:
    """The last number n for which `e` is proven to be the same for all distances d with `sign * d` up to n."""
    low, high = -MOST_POSITION, MOST_POSITION
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _is_constant(e, -MOST_POSITION, middle, sign) else (low, middle - 1)
    return None if abs(low) == MOST_POSITION else low


def _is_constant(e: Expr, low: int, high: int, sign: int) -> bool:
    """Whether `e` is proven to be one number for all distances d with `sign * d` from `low` to `high`."""
    found = _range(e, (low, high) if sign > 0 else (-high, -low))
    return found is not None and found[0] == found[1]


Range = tuple[float, float]

_INCREASING: dict[str, Callable[[float], float]] = {
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "int": int,
    "float": float,
    "floor": math.floor,
    "ceil": math.ceil,
}
_COMPARED = {"lt": operator.lt, "le": operator.le}
_FLIPPED = {"gt": "lt", "ge": "le"}


def _range(e: Expr, lags: Range) -> Range | None:
    """Bounds of `e` over a range of distances; None if there are none. Results of float32 get room for rounding."""
    if e == LAG:
        return lags
    if isinstance(e, Const):
        return (e.value, e.value)
    if not isinstance(e, Op):
        return None
    if e.op == "where":
        return _choice(e, lags)
    parts = [_range(a, lags) for a in e.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    try:
        found = _image(e.op, known)
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    return _with_room(found) if found is not None and e.type is Type.FLOAT and e.op != "float" else found


def _image(op: str, parts: list[Range]) -> Range | None:
    if op in _INCREASING:
        return (_INCREASING[op](parts[0][0]), _INCREASING[op](parts[0][1]))
    if op == "neg":
        return (-parts[0][1], -parts[0][0])
    if op == "abs":
        low, high = parts[0]
        return (max(low, -high, 0), max(-low, high))
    if op in ("min", "max"):
        chosen = min if op == "min" else max
        return (chosen(part[0] for part in parts), chosen(part[1] for part in parts))
    if op == "add":
        return (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
    if op == "sub":
        return (parts[0][0] - parts[1][1], parts[0][1] - parts[1][0])
    if op == "clamp":
        return _image("min", [_image("max", parts[:2]) or parts[0], parts[2]])
    divides = {"div": operator.truediv, "floordiv": operator.floordiv}
    if op == "mul" or (op in divides and parts[1][0] == parts[1][1]):
        ends = [divides.get(op, operator.mul)(a, b) for a in parts[0] for b in parts[1]]
        return (min(ends), max(ends))
    return None


def _with_room(found: Range) -> Range:
    low, high = found
    return (low - SLACK * (1 + abs(low)), high + SLACK * (1 + abs(high)))


def _choice(e: Op, lags: Range) -> Range | None:
    test, chosen, other = e.args
    decided = _decided(test, lags)
    if decided is not None:
        return _range(chosen if decided else other, lags)
    a, b = _range(chosen, lags), _range(other, lags)
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _decided(test: Expr, lags: Range) -> bool | None:
    """Whether a comparison holds for all distances of a range or for none; None if neither is proven."""
    if not isinstance(test, Op) or test.op not in {*_COMPARED, *_FLIPPED}:
        return None
    a, b = test.args if test.op in _COMPARED else test.args[::-1]
    x, y = _range(a, lags), _range(b, lags)
    if x is None or y is None:
        return None
    holds = _COMPARED[_FLIPPED.get(test.op, test.op)]
    if holds(x[1], y[0]):
        return True
    return None if holds(x[0], y[1]) else False
