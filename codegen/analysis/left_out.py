"""Scores of minus infinity become part of the mask.

`where(condition, score, -inf)` masks a pair. As part of the mask it lets blocks be skipped and fully masked rows give
zeros, and no infinity meets another in a sum or a derivative.

>>> from codegen.ir.expr import float_var, int_var
>>> causal = expr.compare("ge", int_var("q_idx"), int_var("kv_idx"))
>>> found = split_left_out(expr.where(causal, float_var("score"), const(-math.inf)))
>>> found.keep == causal, found.score
(True, Var(type=<Type.FLOAT: 'float'>, name='score'))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Const, Expr, Op, const
from codegen.util.errors import ExprError

_REMEDY = "write where(condition, score, -inf), or put the condition into the mask"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A score: `score` where `keep` holds, minus infinity elsewhere."""

    score: Expr
    keep: Expr = TRUE


def split_left_out(score: Expr) -> Kept:
    """Split a score into finite values and the pairs it keeps.

    An infinity may stand in an arm of `where`, in a sum, or in a product with a literal. Raises `ExprError` for an
    infinity elsewhere, for a positive one, and for one that a condition on the score itself selects.
    """
    found = _split(score) if _has_infinity(score) else Kept(score=score)
    if expr.SCORE in expr.names(found.keep):
        raise ExprError("a condition on 'score' cannot choose -inf; choose a number such as -1e30", 1)
    if _has_infinity(found.score):
        raise ExprError(f"inf can only be what a score leaves a pair out by; {_REMEDY}", 1)
    return found


def _split(e: Expr) -> Kept:
    if isinstance(e, Const) and abs(e.value) == math.inf:
        if e.value > 0:
            raise ExprError(f"a score cannot be +inf: its softmax is no number; {_REMEDY}", 1)
        return Kept(score=const(0.0), keep=FALSE)
    if not isinstance(e, Op) or not _has_infinity(e):
        return Kept(score=e)
    if e.op == "where":
        test, (a, b) = e.args[0], (_split(arm) for arm in e.args[1:])
        keep = expr.logical_or(expr.logical_and(test, a.keep), expr.logical_and(expr.logical_not(test), b.keep))
        if FALSE in (a.keep, b.keep):
            # The other arm is -inf, so its pairs are masked whatever this arm holds.
            return Kept(score=b.score if a.keep == FALSE else a.score, keep=keep)
        return Kept(score=expr.where(test, a.score, b.score), keep=keep)
    if e.op == "add":
        a, b = map(_split, e.args)
        return Kept(score=expr.add(a.score, b.score), keep=expr.logical_and(a.keep, b.keep))
    if e.op == "sub":
        a, b = _split(e.args[0]), _split(_negative(e.args[1]))
        return Kept(score=expr.add(a.score, b.score), keep=expr.logical_and(a.keep, b.keep))
    if e.op == "neg":
        return _split(_negative(e.args[0]))
    if e.op == "mul" and isinstance(e.args[0], Const):
        factor = e.args[0].value
        part = _split(e.args[1] if factor > 0 else _negative(e.args[1]))
        return Kept(score=expr.mul(const(abs(factor)), part.score), keep=part.keep)
    return Kept(score=e)


def _negative(e: Expr) -> Expr:
    """Negate a number, pushing the sign to its infinities."""
    if isinstance(e, Op) and e.op == "where" and _has_infinity(e):
        return expr.where(e.args[0], *map(_negative, e.args[1:]))
    if isinstance(e, Op) and e.op in ("add", "sub") and _has_infinity(e):
        return expr.make(e.op, *map(_negative, e.args))
    return expr.neg(e)


def _has_infinity(e: Expr) -> bool:
    """True if a value may be an infinite literal; an infinity inside a condition does not count."""
    if isinstance(e, Op) and e.op == "where":
        return any(map(_has_infinity, e.args[1:]))
    if isinstance(e, Op) and e.type is expr.Type.BOOL:
        return False
    return any(map(_has_infinity, expr.children(e))) or (isinstance(e, Const) and abs(e.value) == math.inf)
