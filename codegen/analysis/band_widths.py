"""How many keys each query row attends to under a band mask, whose bounds lie at fixed distances from the row."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from codegen.analysis.affine import linear
from codegen.analysis.mask_ranges import ONE, sum_of
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Op, Var, int_var

Width = Mapping[Expr, int]
"""A number of keys as a sum: a factor for each of the call's scalars, and one for `ONE`, the constant."""


def band_width(analysis: BlockAnalysis, scalars: Collection[str]) -> Width | None:
    """The number of keys in each row's main range, if it is equal for all rows; None if that is not known.

    For `causal and window(size)` it is `size`. Keys of a second range, such as sink tokens, are not counted. A width
    that depends on more than the variant's `scalars`, such as one for each head, is not known.
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
    is_known = all(term == ONE or (isinstance(term, Var) and term.name in scalars) for term in width)
    return width if is_known else None


def _distance(bound: Expr | None, combines: str, position: str) -> Expr | None:
    """The distance of a key bound from its row: `rest` of the operand `position + rest`; None if there is none."""
    if bound is None:
        return None
    operands = bound.args if isinstance(bound, Op) and bound.op == combines else (bound,)
    forms = [linear(expr.substitute(operand, {position: int_var("q_idx")})) for operand in operands]
    return next((form.rest for form in forms if form is not None and form.q == 1), None)
