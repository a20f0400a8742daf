"""The part of a mask that keeps one contiguous run of keys per row (or of rows per key): two numbers describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from codegen.analysis import affine
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, Op, Type, const, int_var, level


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A mask as the conjunction `first <= position < end and own and rest`.

    `first` and `end` are None if the mask sets no such limit. `first`, `end` and `own` read only the other position;
    `rest` is everything else.
    """

    first: Expr | None = None
    end: Expr | None = None
    own: Expr = expr.TRUE
    rest: Expr = expr.TRUE

    @property
    def found(self) -> bool:
        return self.first is not None or self.end is not None

    @property
    def all(self) -> list[Expr]:
        """The expressions that read only the other position."""
        return [*(e for e in (self.first, self.end) if e is not None), self.own]


def split_limits(mask: Expr, along: str) -> Limits:
    """Split a mask into limits on the position `along` (`kv_idx` or `q_idx`) and the rest.

    A comparison of a step function of that position with anything that does not read it is a limit. A disjunction is a
    limit if all its terms limit the position on the same side.
    """
    other = Level.QUERY if along == "kv_idx" else Level.KEY
    firsts: list[Expr] = []
    ends: list[Expr] = []
    own: list[Expr] = []
    rest: list[Expr] = []
    for part in expr.conjuncts(mask):
        run = _run(part, along, other)
        if run is not None:
            firsts += [first for first in run[:1] if first is not None]
            ends += [end for end in run[1:] if end is not None]
        else:
            (own if level(part) is other else rest).append(part)
    if not firsts and not ends:
        return Limits(rest=mask)
    return Limits(
        first=reduce(expr.maximum, firsts) if firsts else None,
        end=reduce(expr.minimum, ends) if ends else None,
        own=expr.logical_and(*own),
        rest=expr.logical_and(*rest),
    )


_Run = tuple[Expr | None, Expr | None]
"""First position of a run, and the position after its last; None where it is open."""


def _run(part: Expr, along: str, other: Level) -> _Run | None:
    """The run of positions that a condition keeps; None if it keeps something else."""
    names: dict[Expr, str] = {}

    def given(node: Expr) -> Expr | None:
        """Replace a number that reads only the other position by a placeholder name."""
        if isinstance(node, Load) and level(node) is not other:
            return node
        if node.type is Type.INT and level(node) is other:
            kind = affine.POSITION if affine.of_positions(node) else "given "
            return int_var(names.setdefault(node, f"{kind}{len(names)}"))
        return None

    terms = affine.terms(expr.rebuild(part, given))
    runs = [_run_of_term(term, along) for term in terms or ()]
    known = [run for run in runs if run is not None]
    if not known or len(known) < len(runs):
        return None
    firsts, ends = [first for first, _ in known], [end for _, end in known]
    values = {name: node for node, name in names.items()}
    if len(known) == 1:
        return _with(firsts[0], values), _with(ends[0], values)
    if not any(firsts):
        return None, _with(reduce(expr.maximum, [end for end in ends if end is not None]), values)
    if not any(ends):
        return _with(reduce(expr.minimum, [first for first in firsts if first is not None]), values), None
    return None


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
                firsts.append(step.least(_negative(form.rest)))
            else:
                ends.append(expr.add(step.most(form.rest), const(1)))
    first = reduce(expr.maximum, firsts) if firsts else None
    return first, reduce(expr.minimum, ends) if ends else None


def _negative(e: Expr) -> Expr:
    """Negate a sum term by term, so that `-(1 - x)` becomes `x - 1`."""
    if isinstance(e, Op) and e.op == "add":
        return expr.sub(_negative(e.args[0]), e.args[1])
    if isinstance(e, Op) and e.op == "sub":
        return expr.sub(e.args[1], e.args[0])
    return expr.neg(e)


def _with(e: Expr | None, values: dict[str, Expr]) -> Expr | None:
    return None if e is None else expr.substitute(e, values)
