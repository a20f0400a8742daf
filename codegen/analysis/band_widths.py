"""How many keys a row of a band sees: from the first to the last, where both lie at a distance from the row."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.analysis.affine import linear
from codegen.analysis.mask_ranges import ONE, sum_of
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Op, Var, int_var

Width = Mapping[Expr, int]
"""A number of keys as a sum: factors of the call's scalars, and of `ONE`."""


def band_width(analysis: BlockAnalysis) -> Width | None:
    """The keys of the main range of a row, where a mask keeps so many of each; None where that is not known.

    Of `causal and window(size)` these are `size` keys. Those of a second range, such as sinks, are not among them.
    """
    if analysis.schedule is not Schedule.CLOSED_FORM:
        return None
    main = analysis.keys.main
    first, end = _distance(main.first, "max", "q_first"), _distance(main.end, "min", "q_last")
    if first is None or end is None:
        return None
    total = sum_of(end, 1)
    total.update(sum_of(first, -1))
    width = {term: factor for term, factor in total.items() if factor != 0}
    is_known = all(isinstance(term, Var) or term == ONE for term in width)
    return width if is_known else None


def _distance(bound: Expr | None, combines: str, position: str) -> Expr | None:
    """How far from its row a bound of the keys lies: that which is the position of the row and a number."""
    if bound is None:
        return None
    operands = bound.args if isinstance(bound, Op) and bound.op == combines else (bound,)
    forms = [linear(expr.substitute(operand, {position: int_var("q_idx")})) for operand in operands]
    return next((form.rest for form in forms if form is not None and form.q == 1), None)
