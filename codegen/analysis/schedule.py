"""Block analysis: which blocks of keys a block of queries must visit under a mask, and the reverse.

If every atom of a mask is a step function of the positions (`affine.forms`), the visited keys have closed-form bounds:
one range, or two disjoint ones, without a table or a set-up kernel. For any other mask a set-up kernel writes a table
from interval arithmetic (`intervals`): ranges of blocks if the visited blocks normally form one run, else lists. A
block that cannot be decided is partial, which costs time and never exactness. README.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from codegen.analysis.affine import Form, forms, summands, terms, weakest, within_bits
from codegen.analysis.intervals import Decision, decide
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, Level, Op, Var, const, int_var


class Schedule(StrEnum):
    """How a kernel finds the blocks it visits, cheapest first."""

    DENSE = "dense"  # no mask
    CLOSED_FORM = "closed_form"  # bounds computed from the block index
    RANGES = "ranges"  # one run of visited blocks and a run of full blocks inside it, from a set-up kernel
    LISTS = "lists"  # compressed lists of partial and full blocks, from a set-up kernel


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


@dataclass(frozen=True, kw_only=True)
class Union:
    """The visited ranges along one axis: `main`, and the part of `other` that lies `before` or `behind` it."""

    main: Range
    other: Range | None = None
    before: bool = False
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockAnalysis:
    """What the kernels need to know about a mask.

    `keys` and `queries` are the bounds along each axis for one block of the other; a schedule with a table leaves them
    open. `decision` classifies a block. `tables_per_head`: every query head needs its own table.
    """

    schedule: Schedule
    keys: Union = Union(main=Range())
    queries: Union = Union(main=Range())
    decision: Decision | None = None
    tables_per_head: bool = False


def analyse(mask: Expr | None) -> BlockAnalysis:
    """The schedule of a mask, and its block bounds along both axes.

    >>> causal = analyse(expr.compare("ge", int_var("q_idx"), int_var("kv_idx")))
    >>> str(causal.schedule), causal.keys.main.first
    ('closed_form', None)
    """
    if mask is None or mask == TRUE:
        return BlockAnalysis(schedule=Schedule.DENSE)
    decision = decide(mask)
    found = terms(mask)
    if _nothing_kept(decision, found):
        return BlockAnalysis(schedule=Schedule.CLOSED_FORM, keys=_NOTHING, queries=_NOTHING, decision=decision)
    if found is not None and all(map(_closed, (atom for term in found for atom in term))):
        keys, queries = _union(found, keys=True), _union(found, keys=False)
        if keys is not None and queries is not None:
            return BlockAnalysis(schedule=Schedule.CLOSED_FORM, keys=keys, queries=queries, decision=decision)
    schedule = Schedule.RANGES if found is not None and _normally_one_run(found) else Schedule.LISTS
    per_head = bool(expr.names(mask) & {"h", "hkv"})
    return BlockAnalysis(schedule=schedule, decision=decision, tables_per_head=per_head)


_NOTHING = Union(main=Range(end=const(0), has_full=False))


def keeps_nothing(mask: Expr) -> bool:
    """True if a mask provably keeps no pair in any call.

    >>> from codegen.ir.parse import Scope, parse
    >>> keeps_nothing(parse("33 < kv_idx and kv_idx < 3", Scope(), expr.Type.BOOL))
    True
    """
    return mask == FALSE or _nothing_kept(decide(mask), terms(mask))


def bounds_of_keys(mask: Expr, usable: Callable[[Expr], bool]) -> Union:
    """Ranges of keys outside of which a mask keeps none, if it has no exact ones; no block in them counts as full.

    They follow from the atoms that have closed-form bounds and are `usable`; the others may keep any key. More than two
    ranges become one, from the first key to the last.
    """
    found = terms(mask)
    if found is None:
        return Union(main=Range(has_full=False))
    known = weakest(tuple(atom for atom in term if _closed(atom) and usable(atom)) for term in found)
    ranges = _union(known, keys=True) or Union(main=_hull(known))
    main, other = (None if r is None else replace(r, **_NO_FULL) for r in (ranges.main, ranges.other))
    assert main is not None
    return replace(ranges, main=main, other=other)


_NO_FULL: dict[str, Any] = {"full_first": None, "full_end": None, "has_full": False}


def _nothing_kept(decision: Decision, found: Sequence[tuple[Expr, ...]] | None) -> bool:
    return decision.may == FALSE or (found is not None and not found)


def _closed(atom: Expr) -> bool:
    """True if closed-form bounds lose nothing to an atom: it has such bounds, or it can decide no block."""
    return expr.level(atom) is Level.UNIFORM or bool(forms(atom)) or _undecidable(atom)


def _undecidable(atom: Expr) -> bool:
    decision = decide(atom)
    return decision.may == TRUE and decision.must == FALSE


# ------------------------------------------------------------------------------------------------- ranges from a table


def _normally_one_run(found: Sequence[tuple[Expr, ...]]) -> bool:
    """True if a block normally visits one run of blocks, given what tensors usually hold.

    That holds for a closed-form range combined with comparisons of a query's value and a key's value that both follow
    their positions. A condition on a key or a query alone may leave holes; beside an equality of groups it is taken for
    padding.
    """
    rests = {frozenset(atom for atom in term if not _closed(atom)) for term in found}
    if len(rests) != 1:
        return False
    closed = [tuple(filter(_closed, term)) for term in found]
    for keys in (True, False):
        union = _union(closed, keys=keys)
        if union is None or union.other is not None:
            return False
    rest = rests.pop()
    grouped = any(map(_groups, rest))
    return all(_groups(atom) or _limits(atom) or (grouped and _is_padding(atom)) for atom in rest)


def _groups(atom: Expr) -> bool:
    """`doc[q_idx] == doc[kv_idx]`, `q_idx // size == kv_idx // size`: equal values, both from tensors or neither.

    A tensor's value that equals a position (`parent[q_idx] == kv_idx`) may point anywhere and does not count.
    """
    sides = _separated(atom, ("eq",))
    return sides is not None and len({_from_tensor(side) for side in sides}) == 1


def _limits(atom: Expr) -> bool:
    """`kv_idx < limit[q_idx]`, `time[kv_idx] <= time[q_idx]`: a query's value and a key's value are ordered.

    `q_idx < until[kv_idx]` does not count: keys with a large `until` leave holes between them.
    """
    sides = _separated(atom, ("lt", "le", "gt", "ge"))
    return sides is not None and _from_tensor(sides[0]) >= _from_tensor(sides[1])


def _from_tensor(values: Sequence[Expr]) -> bool:
    return any(expr.loads(*values))


def _is_padding(atom: Expr) -> bool:
    """`doc[kv_idx] != -1`: a value of the key or the query differs from a uniform value, or is ordered against it."""
    if not (isinstance(atom, Op) and atom.op in ("ne", "lt", "le", "gt", "ge")):
        return False
    return min(map(expr.level, atom.args)) is Level.UNIFORM and any(map(_monotone, atom.args))


def _separated(atom: Expr, operations: Sequence[str]) -> tuple[list[Expr], list[Expr]] | None:
    """The query's and the key's summands of a comparison of monotone values; None for any other atom."""
    if not (isinstance(atom, Op) and atom.op in operations):
        return None
    parts = [part for side in atom.args for part in summands(side)]
    if not all(expr.level(x) is Level.UNIFORM or _monotone(x) for x in parts):
        return None
    queries, keys = ([x for x in parts if expr.level(x) is level] for level in (Level.QUERY, Level.KEY))
    return (queries, keys) if queries and keys else None


def _monotone(e: Expr) -> bool:
    """True if a value of a query or a key is monotone in its position, provided that its tensors' elements are."""
    if expr.level(e) not in (Level.QUERY, Level.KEY):
        return False
    if isinstance(e, Var):
        return True
    varying = [x for x in expr.children(e) if expr.level(x) is not Level.UNIFORM]
    if isinstance(e, Op) and e.op not in ("add", "sub", "neg", "mul", "floordiv", "min", "max", "float"):
        return False
    return len(varying) == 1 and _monotone(varying[0])


# --------------------------------------------------------------------------------------------------- ranges of one axis


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


def _union(found: Sequence[tuple[Expr, ...]], *, keys: bool) -> Union | None:
    """The visited blocks along the keys (or queries); None if they form more than two ranges."""
    axis = _Axis.of(keys)
    pieces = [axis.piece(term) for term in found]
    pieces = _merged(pieces, axis.length)
    if not pieces:
        return _NOTHING
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


def _hull(found: Sequence[tuple[Expr, ...]]) -> Range:
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
