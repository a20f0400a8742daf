"""The expressions that a kernel evaluates for each pair: the logit, the derivatives of the score, and the terms of a
logit that rows or keys share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import GradientTerm, decay_load, gradient_terms
from codegen.analysis.score_split import NOTHING, split_rows, split_sides
from codegen.ir import expr
from codegen.ir.derive import derivative
from codegen.ir.expr import Expr, const, float_var
from codegen.spec.model import Variant

LOG2E = const(1.4426950408889634)

_QK, _SCALE = float_var("qk"), float_var("scale")

PRODUCT = expr.mul(expr.mul(LOG2E, _SCALE), _QK)
"""The logit of a score that is the scaled product."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The expressions a kernel evaluates per tile, in terms of `qk` and `scale`.

    `row_term`, `key_term` and `block_term` are the parts of the logit that all keys of a row, all rows of a key, and
    all pairs of a block share, if a kernel adds them separately.
    """

    logit: Expr  # times log2(e)
    dscore: Expr | None  # d score expression / d score; None if it is 1
    linear: bool
    terms: tuple[GradientTerm, ...]
    row_term: Expr = NOTHING
    key_term: Expr = NOTHING
    block_term: Expr = NOTHING

    def split_by_rows(self, *, in_order: bool) -> Logits:
        """The logits with `row_term` split off. `in_order`: positions are the numbers of rows and keys, not given."""
        logit, row_term = split_rows(self.logit, in_order=in_order)
        return replace(self, logit=logit, row_term=row_term)

    def split_by_sides(self, *, in_order: bool) -> Logits:
        """The logits with all three terms split off, if all that then remains of a logit is the scaled product."""
        sides = split_sides(self.logit, PRODUCT, in_order=in_order)
        if sides is None:
            return self
        return replace(
            self, logit=PRODUCT, linear=True, row_term=sides.rows, key_term=sides.keys, block_term=sides.block
        )


def logits(variant: Variant, mode: Mode) -> Logits:
    """Put the raw product in place of `score`, and fold scale and log2(e) into the coefficients.

    Powers are written out once derivatives are known, because kernels have no function for them.
    """
    score = float_var(expr.SCORE)
    value = {expr.SCORE: expr.mul(_SCALE, _QK)}
    modified = variant.score if variant.score is not None else score
    logit = expr.scaled(LOG2E, expr.without_powers(expr.substitute(modified, value)))
    linear = logit == PRODUCT and not variant.decay
    if variant.decay:
        difference = expr.sub(decay_load("q", mode), decay_load("kv", mode))
        logit = expr.add(logit, difference)
    dscore = expr.without_powers(expr.substitute(derivative(modified, score), value))
    terms = tuple(
        replace(t, local=expr.without_powers(expr.substitute(t.local, value))) for t in gradient_terms(variant, mode)
    )
    return Logits(logit=logit, dscore=None if expr.is_const(dscore, 1) else dscore, linear=linear, terms=terms)
