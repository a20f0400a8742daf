"""What a score adds to all keys of a row alike: an online softmax needs that once a row, not once a pair."""

from __future__ import annotations

from codegen import expr
from codegen.expr import Expr, Level, Op, Type, const, int_var, level

NOTHING = const(0.0)

_KEY, _START = int_var("kv_idx"), int_var("start_n")


def split_rows(e: Expr) -> tuple[Expr, Expr]:
    """`e` as a sum: what differs between the keys of a row, and what they share, NOTHING if that is no vector of rows.

    Positions of keys count from the start of their block, `start_n`, which goes to the rows: so the parts of a distance
    are as small as it and the block are, and little is rounded away however long the sequence is.
    """
    pairs, rows = _split(e)
    return (pairs, rows) if level(rows) is Level.QUERY else (e, NOTHING)


def _split(e: Expr) -> tuple[Expr, Expr]:
    if level(e) is Level.QUERY:
        return NOTHING, e
    if e == expr.to_float(_KEY):
        return Op(Type.FLOAT, "float", (expr.sub(_KEY, _START),)), expr.to_float(_START)
    if isinstance(e, Op) and e.op in ("add", "sub", "neg"):
        pairs, rows = zip(*map(_split, e.args), strict=True)
        return expr.make(e.op, *pairs), expr.make(e.op, *rows)
    if isinstance(e, Op) and e.op == "mul" and level(e.args[0]) is Level.UNIFORM:
        factor, (pair, row) = e.args[0], _split(e.args[1])
        return expr.mul(factor, pair), expr.mul(factor, row)
    return e, NOTHING
