"""The ranges along one axis that a block of the other axis visits, from the terms of a mask whose atoms are steps.

A term is a conjunction of atoms. Each inequality of a term (`affine.forms`) bounds the range at one end, in the most
permissive row or key of the block. Ranges of several terms are merged where they share an end; two may remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from codegen.analysis.affine import Form, forms, within_bits
from codegen.analysis.intervals import decide
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, const, int_var


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range that a block of one axis visits along the other: `[first, end)`, without mask `[full_first, full_end)`.

    A bound that is None is the start or end of the axis. Bounds along the queries count rows, not positions. `first` is
    at least 0; `end` and `full_end` are at most the length. If `first` lies beyond the length, or `end` below 0,
    nothing is visited. The unmasked range is always visited.
    """

    first: Expr | None = None
    end: Expr | None = None
    full_first: Expr | None = None
    full_end: Expr | None = None
    has_full: bool = True

    @property
    def has_partial_start(self) -> bool:
        """True if the mask may cut blocks before the first full one."""
        return self.first is not None or self.full_first is not None

    def without_full(self) -> Range:
        """The range with the mask in all blocks."""
        return replace(self, full_first=None, full_end=None, has_full=False)


@dataclass(frozen=True, kw_only=True)
class Union:
    """The visited ranges along one axis: `main`, and the part of `other` that lies `before` or `behind` it."""

    main: Range
    other: Range | None = None
    before: bool = False
    behind: bool = False


NOTHING = Union(main=Range(end=const(0), has_full=False))
"""What a mask that keeps no pair visits."""

EVERYTHING = Union(main=Range())
"""What is visited without a mask."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The range of one term. `starts` and `ends` are its inequalities, None once different ones were merged.

    Nothing is visited unless `condition` holds; every visited block needs the mask unless `full_condition` holds.
    """

    first: Expr
    end: Expr
    full_first: Expr
    full_end: Expr
    condition: Expr
    full_condition: Expr
    starts: frozenset[Form] | None
    ends: frozenset[Form] | None


def union_of(found: Sequence[tuple[Expr, ...]], *, keys: bool) -> Union | None:
    """The visited blocks along the keys (or queries); None if they form more than two ranges."""
    axis = _Axis.of(keys)
    pieces = [axis.piece(term) for term in found]
    pieces = _merged(pieces, axis.length)
    if not pieces:
        return NOTHING
    if len(pieces) == 1:
        return Union(main=axis.range(pieces[0]))
    if len(pieces) > 2:
        return None
    options: list[tuple[int, int, _Piece, _Piece, bool, bool]] = []
    for main, other in (pieces, pieces[::-1]):
        comparable = main.condition == TRUE or main.condition == other.condition
        before = not (comparable and _within(main.starts, other.starts))
        behind = not (comparable and _within(main.ends, other.ends))
        options.append((before + behind, len(options), main, other, before, behind))
    _, _, main, other, before, behind = min(options, key=lambda option: option[:2])
    return Union(main=axis.range(main), other=axis.range(other), before=before, behind=behind)


def _within(bounds: frozenset[Form] | None, others: frozenset[Form] | None) -> bool:
    """True if the second range lies inside the first: it has all of the first's bounds, perhaps more."""
    return bounds is not None and others is not None and bounds <= others


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """The axis that a loop walks along, and the first and last element of the block on the other axis."""

    keys: bool
    low: Expr
    high: Expr
    length: Expr

    @staticmethod
    def of(keys: bool) -> _Axis:
        block, length = ("q", "kv_len") if keys else ("kv", "q_len")
        return _Axis(keys=keys, low=int_var(f"{block}_first"), high=int_var(f"{block}_last"), length=int_var(length))

    def piece(self, term: Iterable[Expr]) -> _Piece:
        """The range of a term. The block's most permissive element decides what is visited, the least what is full."""
        first, end, full_first, full_end, conditions, full_conditions = (list[Expr]() for _ in range(6))
        starts, ends = [], []
        for atom in term:
            found = [form if self.keys else form.flipped() for form in forms(atom)]
            if not found or any(form.kv.factor == 0 for form in found):
                known = decide(atom)
                conditions.append(known.may)
                full_conditions.append(known.must)
                continue
            for form in found:
                best, worst = (self.high, self.low) if form.q.factor >= 0 else (self.low, self.high)
                if form.kv.factor > 0:
                    first.append(self._first(form, best))
                    full_first.append(self._first(form, worst))
                    starts.append(form)
                else:
                    end.append(self._end(form, best))
                    full_end.append(self._end(form, worst))
                    ends.append(form)
        return _Piece(
            first=_extreme(first, largest=True, other=const(0)),
            end=_extreme(end, largest=False, other=self.length),
            full_first=_extreme(full_first, largest=True),
            full_end=_extreme(full_end, largest=False, other=self.length),
            condition=expr.logical_and(*conditions),
            full_condition=expr.logical_and(*full_conditions),
            starts=frozenset(starts),
            ends=frozenset(ends),
        )

    def _first(self, form: Form, x: Expr) -> Expr:
        """The first element for which an inequality holds beside the element at `x` of the other axis."""
        return within_bits(self._row(form.kv.least(expr.neg(_at(form, x)))))

    def _end(self, form: Form, x: Expr) -> Expr:
        """The element after the last one for which an inequality holds, as for `_first`."""
        return within_bits(self._row(expr.add(form.kv.most(_at(form, x)), const(1))))

    def _row(self, position: Expr) -> Expr:
        return position if self.keys else expr.sub(position, int_var("q_shift"))

    def range(self, piece: _Piece) -> Range:
        end = expr.where(piece.condition, piece.end, const(0))
        has_full = piece.full_condition != FALSE
        full_end = expr.where(piece.full_condition, piece.full_end, const(0)) if has_full else None
        return Range(
            first=None if expr.is_const(piece.first, 0) else piece.first,
            end=None if end == self.length else end,
            full_first=None if expr.is_const(piece.full_first, 0) or not has_full else piece.full_first,
            full_end=None if full_end == self.length else full_end,
            has_full=has_full,
        )


def _at(form: Form, x: Expr) -> Expr:
    """The part of the inequality that does not depend on the looped axis."""
    return expr.add(form.q.at(x), form.rest)


def _extreme(bounds: Sequence[Expr], *, largest: bool, other: Expr | None = None) -> Expr:
    """The tightest of the bounds and `other`; 0 if there is none. Bounds that differ by a literal become one."""
    pick = expr.maximum if largest else expr.minimum
    kept: list[Expr] = []
    for bound in dict.fromkeys(bounds):
        for i, known in enumerate(kept):
            difference = expr.sub(bound, known)
            if isinstance(difference, expr.Const):
                kept[i] = bound if (difference.value > 0) == largest else known
                break
        else:
            kept.append(bound)
    result = other
    for bound in reversed(kept):
        result = bound if result is None else pick(bound, result)
    return const(0) if result is None else result


def hull_of(found: Sequence[tuple[Expr, ...]]) -> Range:
    """One range of keys, from the first that some term keeps to the last."""
    axis = _Axis.of(keys=True)
    pieces = [axis.piece(term) for term in found]
    firsts = [expr.where(piece.condition, piece.first, axis.length) for piece in pieces]
    ends = [expr.where(piece.condition, piece.end, const(0)) for piece in pieces]
    first, end = _extreme(firsts, largest=False), _extreme(ends, largest=True)
    return Range(first=None if expr.is_const(first, 0) else first, end=None if end == axis.length else end)


def _merged(pieces: Sequence[_Piece], length: Expr) -> list[_Piece]:
    """Merge pieces with the same end (or start): `[a, e)` and `[b, e)` become `[min(a, b), e)`."""
    left = list(pieces)
    for i, a in enumerate(left):
        for j, b in enumerate(left[i + 1 :], i + 1):
            joined = _joined(a, b, length)
            if joined is not None:
                return _merged([*left[:i], joined, *left[i + 1 : j], *left[j + 1 :]], length)
    return left


def _joined(a: _Piece, b: _Piece, length: Expr) -> _Piece | None:
    def where_any(bound: str, condition: str, none: Expr, *, largest: bool) -> Expr:
        values = [expr.where(getattr(x, condition), getattr(x, bound), none) for x in (a, b)]
        return (expr.maximum if largest else expr.minimum)(*values)

    some_full = TRUE if {a.full_condition, b.full_condition} != {FALSE} else FALSE
    unconditional = replace(a, condition=TRUE, full_condition=some_full)
    if a.ends is not None and a.ends == b.ends:
        return replace(
            unconditional,
            first=where_any("first", "condition", length, largest=False),
            full_first=where_any("full_first", "full_condition", length, largest=False),
            starts=None,
        )
    if a.starts is not None and a.starts == b.starts:
        return replace(
            unconditional,
            end=where_any("end", "condition", const(0), largest=True),
            full_end=where_any("full_end", "full_condition", const(0), largest=True),
            ends=None,
        )
    return None
