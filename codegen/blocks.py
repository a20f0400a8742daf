"""Block analysis: from a mask, the blocks of keys a block of queries must visit, and the other way round.

A mask is read as a conjunction. Each affine comparison in it, written `a * q_idx + c * kv_idx + rest >= 0`, bounds the
visited keys in closed form, without a table or a setup kernel. What is not affine bounds nothing and makes every
visited block partial: conservative, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from codegen import expr
from codegen.expr import Expr, Op, Type, const, int_var


class Schedule(StrEnum):
    """How a kernel finds the blocks to visit, cheapest first."""

    DENSE = "dense"  # no mask
    CLOSED_FORM = "closed_form"  # bounds computed from the block index


@dataclass(frozen=True, kw_only=True)
class Affine:
    """`q * q_idx + kv * kv_idx + rest >= 0`, with literal coefficients and a remainder uniform over a block."""

    q: int
    kv: int
    rest: Expr

    def at(self, q_idx: Expr) -> Expr:
        """`q * q_idx + rest`, the part that the keys must balance."""
        return expr.add(expr.mul(const(self.q), q_idx), self.rest)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds along one axis for one block of the other: visited is `[first, end)`, unmasked `[full_first, full_end)`.

    Each bound is the tightest of its list; an empty list means the sequence's own start or end. `conditions` are
    integers that must not be negative for anything to be visited (for all of it to be unmasked: `full_conditions`).
    """

    first: tuple[Expr, ...] = ()
    end: tuple[Expr, ...] = ()
    full_first: tuple[Expr, ...] = ()
    full_end: tuple[Expr, ...] = ()
    conditions: tuple[Expr, ...] = ()
    full_conditions: tuple[Expr, ...] = ()
    has_full: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockAnalysis:
    """What the kernels need to know about a mask: key bounds per block of queries, query bounds per block of keys."""

    schedule: Schedule
    keys: Range
    queries: Range


def conjuncts(mask: Expr) -> tuple[Expr, ...]:
    """The parts that must all hold."""
    return mask.args if isinstance(mask, Op) and mask.op == "and" else (mask,)


def _linear(e: Expr) -> tuple[int, int, Expr] | None:
    """(q coefficient, kv coefficient, rest) of an integer expression, or None if it is not affine in the two."""
    read = expr.names(e)
    if not read & {"q_idx", "kv_idx"}:
        return 0, 0, e
    if e == int_var("q_idx"):
        return 1, 0, const(0)
    if e == int_var("kv_idx"):
        return 0, 1, const(0)
    if not isinstance(e, Op):
        return None
    parts = [_linear(a) for a in e.args]
    if e.op == "neg" and parts[0] is not None:
        q, kv, rest = parts[0]
        return -q, -kv, expr.neg(rest)
    if e.op in ("add", "sub") and parts[0] is not None and parts[1] is not None:
        (q0, kv0, rest0), (q1, kv1, rest1) = parts[0], parts[1]
        sign = 1 if e.op == "add" else -1
        return q0 + sign * q1, kv0 + sign * kv1, expr.make(e.op, rest0, rest1)
    if e.op == "mul":
        for factor, part in ((e.args[0], parts[1]), (e.args[1], parts[0])):
            if isinstance(factor, expr.Const) and part is not None:
                c = int(factor.value)
                return c * part[0], c * part[1], expr.mul(factor, part[2])
    return None


def affine(atom: Expr) -> tuple[Affine, ...]:
    """The inequalities equivalent to a comparison of integers; empty if it is not affine."""
    if not (isinstance(atom, Op) and atom.op in ("lt", "le", "gt", "ge", "eq") and atom.args[0].type is Type.INT):
        return ()
    form = _linear(expr.sub(*atom.args))
    if form is None or expr.SCORE in expr.names(atom):
        return ()
    q, kv, rest = form
    at_least = Affine(q=q, kv=kv, rest=rest)
    at_most = Affine(q=-q, kv=-kv, rest=expr.neg(rest))
    strict = const(1)
    return {
        "ge": (at_least,),
        "le": (at_most,),
        "gt": (Affine(q=q, kv=kv, rest=expr.sub(rest, strict)),),
        "lt": (Affine(q=-q, kv=-kv, rest=expr.sub(expr.neg(rest), strict)),),
        "eq": (at_least, at_most),
    }[atom.op]


def analyse(mask: Expr | None) -> BlockAnalysis:
    """Block bounds of a mask, along both axes."""
    if mask is None:
        return BlockAnalysis(schedule=Schedule.DENSE, keys=Range(), queries=Range())
    forms: list[Affine] = []
    complete = True
    for atom in conjuncts(mask):
        found = affine(atom)
        complete = complete and bool(found)
        forms.extend(found)
    flipped = [Affine(q=f.kv, kv=f.q, rest=f.rest) for f in forms]
    return BlockAnalysis(
        schedule=Schedule.CLOSED_FORM,
        keys=_range(forms, "q", complete),
        queries=_range(flipped, "kv", complete),
    )


def _range(forms: Iterable[Affine], block: str, complete: bool) -> Range:
    """Bounds along the keys for the block of queries `[q_first, q_last]` (or, flipped, the other way round).

    The best element of the block decides what may be visited, the worst what is unmasked.
    """
    low, high = int_var(f"{block}_first"), int_var(f"{block}_last")
    first, end, full_first, full_end, conditions, full_conditions = (list[Expr]() for _ in range(6))
    for form in forms:
        best, worst = (high, low) if form.q >= 0 else (low, high)
        if form.kv > 0:  # kv >= -(q part) / c, rounded up
            first.append(_ceil_div(expr.neg(form.at(best)), form.kv))
            full_first.append(_ceil_div(expr.neg(form.at(worst)), form.kv))
        elif form.kv < 0:  # kv <= (q part) / -c, rounded down; `end` is one past it
            end.append(expr.add(expr.floordiv(form.at(best), const(-form.kv)), const(1)))
            full_end.append(expr.add(expr.floordiv(form.at(worst), const(-form.kv)), const(1)))
        else:
            conditions.append(form.at(best))
            full_conditions.append(form.at(worst))
    return Range(
        first=_unique(first),
        end=_unique(end),
        full_first=_unique(full_first),
        full_end=_unique(full_end),
        conditions=_unique(conditions),
        full_conditions=_unique(full_conditions),
        has_full=complete,
    )


def _ceil_div(e: Expr, divisor: int) -> Expr:
    return expr.neg(expr.floordiv(expr.neg(e), const(divisor))) if divisor > 1 else e


def _unique(exprs: list[Expr]) -> tuple[Expr, ...]:
    return tuple(dict.fromkeys(exprs))
