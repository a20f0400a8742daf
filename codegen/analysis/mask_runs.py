"""The part of a mask that keeps one contiguous run of keys per row (or of rows per key): two numbers describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from codegen.analysis import affine
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, Op, Type, const, level

_FIRST, _BEYOND = const(-affine.MOST_POSITION), const(affine.MOST_POSITION + 1)
"""The smallest possible position, and a position beyond the largest."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A mask as the conjunction `first <= position < end and (position < gap_first or gap_end <= position) and own and
    rest`.

    `first` and `end` are None if the mask sets no such limit; `gap_first` and `gap_end` are None if there is no gap.
    They and `own` read only the other position; `rest` is everything else.
    """

    first: Expr | None = None
    end: Expr | None = None
    gap_first: Expr | None = None
    gap_end: Expr | None = None
    own: Expr = expr.TRUE
    rest: Expr = expr.TRUE

    @property
    def found(self) -> bool:
        return self.first is not None or self.end is not None

    @property
    def all(self) -> list[Expr]:
        """The expressions that read only the other position."""
        limits = (self.first, self.end, self.gap_first, self.gap_end)
        return [*(e for e in limits if e is not None), self.own]


def split_limits(mask: Expr, along: str) -> Limits:
    """Split a mask into limits on the position `along` (`kv_idx` or `q_idx`) and the rest.

    A comparison of a step function of that position with anything that does not read it is a limit. A disjunction is a
    limit if all its terms limit the position on the same side, or do not read it. A disjunction of limits on both sides
    is a gap. The first gap counts if the mask also has a limit that is no gap; further gaps belong to the rest.
    """
    other = Level.QUERY if along == "kv_idx" else Level.KEY
    firsts: list[Expr] = []
    ends: list[Expr] = []
    gaps: list[tuple[_Run, Expr]] = []
    own: list[Expr] = []
    rest: list[Expr] = []
    for part in expr.conjuncts(mask):
        run = _run(part, along, other)
        if run is not None and run.is_gap:
            gaps.append((run, part))
        elif run is not None:
            firsts += [] if run.first is None else [run.first]
            ends += [] if run.end is None else [run.end]
        else:
            (own if level(part) is other else rest).append(part)
    if not firsts and not ends:
        return Limits(rest=mask)
    rest += [part for _, part in gaps[1:]]
    return Limits(
        first=reduce(expr.maximum, firsts) if firsts else None,
        end=reduce(expr.minimum, ends) if ends else None,
        gap_first=gaps[0][0].end if gaps else None,
        gap_end=gaps[0][0].first if gaps else None,
        own=expr.logical_and(*own),
        rest=expr.logical_and(*rest),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """First position of a run, and the position after its last; None where it is open. `is_gap`: positions ahead of
    `end` and those from `first` on are kept."""

    first: Expr | None
    end: Expr | None
    is_gap: bool = False


def _run(part: Expr, along: str, other: Level) -> _Run | None:
    """The run of positions that a condition keeps, or that it leaves out; None if it keeps something else."""
    placeholders: dict[Expr, affine.Given] = {}

    def replaced(node: Expr) -> Expr | None:
        """Replace a number that reads only the other position by a placeholder."""
        if isinstance(node, Load) and level(node) is not other:
            return node
        if node.type is Type.INT and level(node) is other:
            return placeholders.setdefault(node, affine.given(node, len(placeholders)))
        return None

    terms = affine.terms(expr.rebuild(part, replaced)) or ()
    always = [expr.logical_and(*term) for term in terms if not any(_reads(atom, along) for atom in term)]
    runs = [_run_of_term(term, along) for term in terms if any(_reads(atom, along) for atom in term)]
    known = [run for run in runs if run is not None]
    if not known or len(known) < len(runs):
        return None
    joined = _joined(known, expr.logical_or(*always))
    values = {placeholder.name: node for node, placeholder in placeholders.items()}
    if joined is None:
        return None
    first, end = (None if e is None else _with(e, values) for e in (joined.first, joined.end))
    return _Run(first=first, end=end, is_gap=joined.is_gap)


def _reads(atom: Expr, along: str) -> bool:
    return along in expr.names(atom)


def _joined(runs: Sequence[_Run], always: Expr) -> _Run | None:
    """The union of the runs, or all positions if `always` holds; None if the union is neither one run nor a gap."""
    firsts, ends = (
        [run.first for run in runs if run.first is not None],
        [run.end for run in runs if run.end is not None],
    )
    if len(runs) == 1 and (always == expr.FALSE or len(firsts) + len(ends) == 1):
        first, end = runs[0].first, runs[0].end
    elif len(firsts) + len(ends) == len(runs):
        first, end = (reduce(expr.minimum, firsts) if firsts else None), (reduce(expr.maximum, ends) if ends else None)
    else:
        return None
    is_gap = bool(firsts and ends) and len(runs) > 1
    if end is not None:
        end = expr.where(always, _BEYOND, end)
    elif first is not None:
        first = expr.where(always, _FIRST, first)
    return _Run(first=first, end=end, is_gap=is_gap)


def _run_of_term(term: Sequence[Expr], along: str) -> _Run | None:
    firsts, ends = [], []
    for atom in term:
        forms = affine.forms(atom)
        if not forms:
            return None
        for form in forms:
            step, beside = (form.kv, form.q) if along == "kv_idx" else (form.q, form.kv)
            if beside.factor != 0 or step.factor == 0:
                return None
            if step.factor > 0:
                firsts.append(affine.within_bits(step.least(_negative(form.rest))))
            else:
                ends.append(affine.within_bits(expr.add(step.most(form.rest), const(1))))
    first, end = reduce(expr.maximum, firsts) if firsts else None, reduce(expr.minimum, ends) if ends else None
    return _Run(first=first, end=end)


def _negative(e: Expr) -> Expr:
    """Negate a sum term by term, so that `-(1 - x)` becomes `x - 1`."""
    if isinstance(e, Op) and e.op == "add":
        return expr.sub(_negative(e.args[0]), e.args[1])
    if isinstance(e, Op) and e.op == "sub":
        return expr.sub(e.args[1], e.args[0])
    return expr.neg(e)


def _with(e: Expr, values: dict[str, Expr]) -> Expr:
    return expr.substitute(e, values)
