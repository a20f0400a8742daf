"""Expressions that depend on positions only through their distance, `q_idx - kv_idx`.

Gradients of tensors that a score reads by distance are sums over the diagonals of the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.analysis.affine import forms, linear, terms
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Load, Op, Type, Var, const, int_var
from codegen.spec.model import Variant

LAG = int_var("lag")
"""q_idx - kv_idx: one number per diagonal."""

POSITIONS = frozenset(("q_idx", "kv_idx"))
ROWS = frozenset(("q_row", "cols"))
"""The names that replace `POSITIONS` in a segmented call, where a tensor is indexed by row."""


def in_lags(e: Expr) -> Expr | None:
    """The expression in terms of `LAG`; None if it depends on positions other than through their difference."""
    rewritten = expr.rebuild(e, _lag_form)
    return None if expr.names(rewritten) & (POSITIONS | ROWS) else rewritten


def by_lag(load: Load) -> Load | None:
    """A read of a tensor in terms of `LAG`; None as for `in_lags`."""
    rewritten = in_lags(load)
    assert rewritten is None or isinstance(rewritten, Load)
    return rewritten


def _lag_form(e: Expr) -> Expr | None:
    """`2 * q_idx - 2 * kv_idx + rest` as `2 * lag + rest`; a comparison of two integers by their difference."""
    if isinstance(e, Op) and e.op in expr.COMPARISONS and e.args[0].type is Type.INT:
        difference = _lag_form(expr.sub(*e.args))
        return None if difference is None else expr.compare(e.op, difference, const(0))
    if e.type is Type.BOOL or not expr.names(e) >= POSITIONS:
        return None
    if e.type is Type.FLOAT:
        whole = _as_integer(e)
        found = None if whole is None else _lag_form(whole)
        return None if found is None else expr.to_float(found)
    form = linear(e)
    if form is None or form.q != -form.kv:
        return None
    return expr.add(expr.mul(const(form.q), LAG), form.rest)


def _as_integer(e: Expr) -> Expr | None:
    """The integer sum whose terms a float sum casts, as in `float(q_idx) - float(kv_idx)`; None for any other."""
    if not isinstance(e, Op):
        return None
    if e.op == "float":
        return e.args[0]
    parts = [_as_integer(a) for a in e.args]
    if e.op not in ("add", "sub") or parts[0] is None or parts[1] is None:
        return None
    return expr.add(parts[0], parts[1]) if e.op == "add" else expr.sub(parts[0], parts[1])


def adds_to_score(e: Expr) -> bool:
    """True if a score is the scaled product plus something that does not read it.

    >>> from codegen.ir.expr import float_var, rounded
    >>> score, bias = float_var("score"), float_var("bias")
    >>> adds_to_score(expr.sub(score, bias)), adds_to_score(expr.add(score, rounded("floor", score)))
    (True, False)
    """
    if isinstance(e, Op) and e.op in ("add", "sub"):
        readers = [part for part in e.args if expr.SCORE in expr.names(part)]
        return len(readers) == 1 and (e.op == "add" or readers[0] is e.args[0]) and adds_to_score(readers[0])
    if isinstance(e, Op) and e.op == "where":
        return expr.SCORE not in expr.names(e.args[0]) and all(adds_to_score(arm) for arm in e.args[1:])
    return isinstance(e, Var) and e.name == expr.SCORE


def added_by_distance(variant: Variant) -> Expr | None:
    """The term that the score adds to the scaled product, if term and mask depend on positions only by distance.

    None for every other variant. With such a term, all blocks along a block diagonal add the same tile and keep the
    same pairs.
    """
    if variant.score is None or variant.decay or variant.dropout:
        return None
    if not adds_to_score(variant.score):
        return None
    added = expr.substitute(variant.score, {expr.SCORE: const(0.0)})
    masked = variant.mask if variant.mask is not None else expr.TRUE
    return added if in_lags(added) is not None and in_lags(masked) is not None else None


@dataclass(frozen=True, kw_only=True)
class Lags:
    """The distances from `least` to `most`; None on a side without a limit that is known before the call."""

    least: int | None = None
    most: int | None = None


def kept_lags(mask: Expr | None) -> Lags:
    """Distances outside of which a mask keeps no pair.

    >>> from codegen.ir.language import Scope
    >>> from codegen.ir.parse import parse
    >>> kept_lags(parse("q_idx >= kv_idx and q_idx - kv_idx < 128", Scope(), Type.BOOL))
    Lags(least=0, most=127)
    """
    conjunctions = terms(mask) if mask is not None else None
    if conjunctions is None or len(conjunctions) != 1:
        return Lags()
    least, most = [], []
    for form in (form for atom in conjunctions[0] for form in forms(atom)):
        steps = (form.q, form.kv)
        if any(step.period != 1 or not expr.is_const(step.shift, 0) for step in steps) or not isinstance(
            form.rest, Const
        ):
            continue
        if (form.q.factor, form.kv.factor) == (1, -1):
            least.append(-int(form.rest.value))
        if (form.q.factor, form.kv.factor) == (-1, 1):
            most.append(int(form.rest.value))
    return Lags(least=max(least, default=None), most=min(most, default=None))
