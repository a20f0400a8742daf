"""Splits a logit into terms per pair, row, key and block, so that a kernel computes each as seldom as it can."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.analysis.indexing import DECAY
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, Op, Type, const, int_var, level

NOTHING = const(0.0)

_ROW, _KEY = int_var("q_idx"), int_var("kv_idx")
_PLACE = int_var("cols")
_ROW_START, _START = int_var("row_start"), int_var("start_n")
"""Positions of the first row and of the first key of a block."""


def split_rows(e: Expr, *, in_order: bool = True) -> tuple[Expr, Expr]:
    """Split `e` into a term per pair and a term per row; the row term is NOTHING if it would not be a vector of rows.

    Key positions are counted from the start of their block, `start_n`, which moves to the row term. Both terms of a
    distance then stay small, and float32 rounds little away even in a long sequence. This needs positions that are
    `in_order`. Other positions may be far from the block's start and still close to each other: their distances are
    not split.
    """
    pairs, rows = _split(e, in_order)
    apart = not in_order and _takes_distances_apart(rows, pairs)
    return (pairs, rows) if level(rows) is Level.QUERY and not apart else (e, NOTHING)


def _takes_distances_apart(rows: Expr, keys: Expr) -> bool:
    return _ROW.name in expr.names(rows) and _KEY.name in expr.names(keys)


def _split(e: Expr, in_order: bool) -> tuple[Expr, Expr]:
    if level(e) is Level.QUERY:
        return NOTHING, e
    if in_order and e == expr.to_float(_KEY):
        return _as_float(expr.sub(_KEY, _START)), expr.to_float(_START)
    if isinstance(e, Op) and e.op in ("add", "sub", "neg"):
        pairs, rows = zip(*(_split(arg, in_order) for arg in e.args), strict=True)
        return expr.make(e.op, *pairs), expr.make(e.op, *rows)
    if isinstance(e, Op) and e.op == "mul" and level(e.args[0]) is Level.UNIFORM:
        factor, (pair, row) = e.args[0], _split(e.args[1], in_order)
        return expr.mul(factor, pair), expr.mul(factor, row)
    return e, NOTHING


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A logit as `products * scaled product + keys + rows + block`: terms per pair, per key, per row and per block.

    Positions are counted from the start of their block, and a key's log-decay relative to that of the block's first
    key. If a sum is split `from_rows`, there is no term per block, and positions and log-decays of keys are counted
    from the key at the place of the block's first row. All terms stay small for near keys even in a long sequence, so
    that float32 rounds little away.
    """

    products: int = 0
    keys: Expr = NOTHING
    rows: Expr = NOTHING
    block: Expr = NOTHING


def split_sides(logit: Expr, product: Expr, *, in_order: bool = True, from_rows: bool = False) -> Sides | None:
    """The logit as such a sum with exactly one product; None if it is not one. `in_order` as for `split_rows`."""
    sides = _sides(logit, product, in_order, from_rows)
    if sides is None or sides.products != 1 or (not in_order and _takes_distances_apart(sides.rows, sides.keys)):
        return None
    return sides


def _sides(e: Expr, product: Expr, in_order: bool, from_rows: bool) -> Sides | None:
    if e == product:
        return Sides(products=1)
    own = level(e)
    if own is Level.UNIFORM:
        return Sides(rows=e) if from_rows else Sides(block=e)
    if in_order and e == expr.to_float(_ROW) and not from_rows:
        return Sides(rows=_as_float(expr.sub(_ROW, _ROW_START)), block=_as_float(_ROW_START))
    start = _ROW_START if from_rows else _START
    if in_order and e == expr.to_float(_KEY):
        return _counted(_as_float(expr.sub(_KEY, start)), _as_float(start), from_rows)
    if isinstance(e, Load) and e.tensor == DECAY.name and own is Level.KEY:
        first = expr.substitute(e, dict.fromkeys((_KEY.name, _PLACE.name), start))
        return _counted(expr.sub(e, first), first, from_rows)
    if isinstance(e, Op) and e.op in ("add", "sub", "neg"):
        parts = [_sides(arg, product, in_order, from_rows) for arg in e.args]
        return _summed(e.op, [part for part in parts if part is not None]) if None not in parts else None
    if isinstance(e, Op) and e.op == "mul" and level(e.args[0]) is Level.UNIFORM:
        factor, part = e.args[0], _sides(e.args[1], product, in_order, from_rows)
        if part is None or part.products:
            return None
        return Sides(
            keys=expr.mul(factor, part.keys), rows=expr.mul(factor, part.rows), block=expr.mul(factor, part.block)
        )
    if own is Level.KEY:
        return Sides(keys=e)
    return Sides(rows=e) if own is Level.QUERY else None


def _counted(keys: Expr, start: Expr, from_rows: bool) -> Sides:
    """A term of keys, counted from that of one key, `start`."""
    return Sides(keys=keys, rows=start) if from_rows else Sides(keys=keys, block=start)


def _summed(op: str, parts: list[Sides]) -> Sides:
    counts = [const(part.products) for part in parts]
    products = expr.make(op, *counts)
    assert isinstance(products, expr.Const)
    return Sides(
        products=int(products.value),
        keys=expr.make(op, *(part.keys for part in parts)),
        rows=expr.make(op, *(part.rows for part in parts)),
        block=expr.make(op, *(part.block for part in parts)),
    )


def _as_float(e: Expr) -> Expr:
    """Convert a sum as a whole; `expr.to_float` would convert its parts."""
    return Op(Type.FLOAT, "float", (e,))
