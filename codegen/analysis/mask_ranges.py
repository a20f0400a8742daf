"""The parts of a mask that keep the pairs whose distance lies in a range: one unsigned comparison decides each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.analysis import affine
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Level, Op, Type, const, int_var, level
from codegen.spec.model import ScalarSpec

_MOST_SCALARS = 2
"""A count that sums more scalars than this, each up to `affine.MOST_POSITION`, may not fit 32 bits."""

ONE = const(1)
"""The term of a sum that stands for its constant."""
_POSITIONS = {int_var("q_idx"), int_var("kv_idx")}


@dataclass(frozen=True, kw_only=True)
class DistanceRange:
    """`0 <= distance < count`: `distance` is a number per query minus a number per key, `count` is uniform and not
    negative. Modulo 2**32 a negative distance is larger than every count."""

    distance: Expr
    count: Expr


@dataclass(frozen=True, kw_only=True)
class RangedMask:
    """A mask as the conjunction of `ranges` and `rest`."""

    ranges: tuple[DistanceRange, ...] = ()
    rest: Expr = expr.TRUE

    @property
    def band(self) -> int | None:
        """Keys per row of the narrowest fixed-width band with all kept pairs: 128 for `causal and window(128)`."""
        widths = [int(count.value) for count in self._counts if isinstance(count, Const)]
        return min(widths, default=None)

    @property
    def band_scalars(self) -> Mapping[Expr, int] | None:
        """The width of a band that depends on the call's scalars, as a sum: a factor for each scalar and for `ONE`."""
        return next((sum_of(count, 1) for count in self._counts if not isinstance(count, Const)), None)

    @property
    def _counts(self) -> list[Expr]:
        """Widths of bands: the counts of ranges whose distance reads the two positions themselves."""
        return [part.count for part in self.ranges if _reads(part.distance) == _POSITIONS]


def split_ranges(mask: Expr | None, scalars: Mapping[str, ScalarSpec]) -> RangedMask:
    """Split a mask into ranges of distances and the rest.

    Two comparisons that bound the same distance from both sides are a range, as in `causal and window(size)`. So is a
    comparison of an absolute value: `abs(q_idx - kv_idx) <= 6`. Distances read only positions, and the minima of the
    scalars prove that `count` is at least 0 in every call.
    """
    ranges: list[DistanceRange] = []
    open_bounds: dict[Expr, _Sum] = {}
    rest = list(expr.conjuncts(expr.TRUE if mask is None else mask))
    for part in tuple(rest):
        bounds = [_at_least_zero(atom) for atom in expr.conjuncts(affine.spread(part))]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < len(bounds):
            continue
        if len(known) == 1:
            partner, found = _closing(known[0], open_bounds, scalars)
            if found is None:
                open_bounds[part] = known[0]
            else:
                del open_bounds[partner]
                rest.remove(partner)
        else:
            found = _range(known, scalars) if len(known) == 2 else None
        if found is not None:
            ranges.append(found)
            rest.remove(part)
    return RangedMask(ranges=tuple(ranges), rest=expr.logical_and(*rest) if ranges else mask or expr.TRUE)


def _closing(
    bound: _Sum, open_bounds: Mapping[Expr, _Sum], scalars: Mapping[str, ScalarSpec]
) -> tuple[Expr, DistanceRange | None]:
    """The comparison that bounds the same distance from the other side, and the range that both keep."""
    for part, other in open_bounds.items():
        found = _range([bound, other], scalars)
        if found is not None:
            return part, found
    return expr.TRUE, None


_Sum = Mapping[Expr, int]
"""A sum of integers: a factor for each term, where the factor of `ONE` is the constant."""


def _at_least_zero(atom: Expr) -> _Sum | None:
    """The sum that is 0 or more exactly if a comparison of integers holds; None for any other condition."""
    if not (isinstance(atom, Op) and atom.op in ("lt", "le", "gt", "ge") and atom.args[0].type is Type.INT):
        return None
    low, high = atom.args if atom.op in ("lt", "le") else reversed(atom.args)
    total = sum_of(high, 1)
    total.update(sum_of(low, -1))
    total[ONE] -= atom.op in ("lt", "gt")
    return total


def sum_of(e: Expr, factor: int) -> Counter[Expr]:
    """An integer expression times a factor, as a sum: a factor for each term, and the constant as that of `ONE`."""
    if isinstance(e, Const):
        return Counter({ONE: factor * int(e.value)})
    if isinstance(e, Op) and e.op in ("add", "sub"):
        total = sum_of(e.args[0], factor)
        total.update(sum_of(e.args[1], factor if e.op == "add" else -factor))
        return total
    if isinstance(e, Op) and e.op == "neg":
        return sum_of(e.args[0], -factor)
    if isinstance(e, Op) and e.op == "mul" and isinstance(e.args[0], Const):
        return sum_of(e.args[1], factor * int(e.args[0].value))
    return Counter({e: factor})


def _reads(distance: Expr) -> set[Expr]:
    """The terms of a distance that are not uniform."""
    return {term for term in sum_of(distance, 1) if level(term) is not Level.UNIFORM}


def _range(bounds: Sequence[_Sum], scalars: Mapping[str, ScalarSpec]) -> DistanceRange | None:
    """The range in which both sums are 0 or more; None if they do not bound the same distance from both sides."""
    for bound, other in (bounds, reversed(bounds)):
        distance = _distance(bound)
        if distance is None:
            continue
        total = Counter(bound)
        total.update(other)
        total[ONE] += 1
        count = {term: factor for term, factor in total.items() if factor != 0}
        if _is_count(count, scalars):
            return DistanceRange(distance=distance, count=_code(count))
    return None


def _distance(terms: _Sum) -> Expr | None:
    """A sum as a number per query minus a number per key. The uniform terms are added once per query."""
    rows = {term: factor for term, factor in terms.items() if level(term) is Level.QUERY and factor != 0}
    keys = {term: factor for term, factor in terms.items() if level(term) is Level.KEY and factor != 0}
    others = {term: factor for term, factor in terms.items() if level(term) is Level.UNIFORM and factor != 0}
    if len(rows) + len(keys) + len(others) < sum(factor != 0 for factor in terms.values()):
        return None
    if list(rows.values()) != [1] or list(keys.values()) != [-1] or not all(map(affine.of_positions, (*rows, *keys))):
        return None
    # Not `expr.sub`: it would add literals to the difference, which costs one addition per pair.
    return Op(Type.INT, "sub", (_code(rows | others), *keys))


def _is_count(terms: _Sum, scalars: Mapping[str, ScalarSpec]) -> bool:
    """True if a sum is the same for all pairs, at least 0 and fits 32 bits."""
    least = terms.get(ONE, 0)
    named = {term: factor for term, factor in terms.items() if term != ONE}
    for term, factor in named.items():
        spec = scalars.get(term.name) if isinstance(term, expr.Var) else None
        if spec is None or spec.minimum is None or factor < 0:
            return False
        least += factor * int(spec.minimum)
    return 0 <= least <= affine.MOST_POSITION and sum(named.values()) <= _MOST_SCALARS


def _code(terms: _Sum) -> Expr:
    """The expression of a sum, its literal last."""
    total: Expr = const(0)
    for term, factor in terms.items():
        if term != ONE:
            total = expr.add(total, expr.mul(const(factor), term))
    return expr.add(total, const(terms.get(ONE, 0)))
