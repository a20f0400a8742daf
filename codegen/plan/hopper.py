"""What the templates of Hopper's kernels, written in Gluon, need beside the plans of the portable ones."""

from __future__ import annotations

from dataclasses import replace

from codegen.analysis.affine import linear
from codegen.analysis.call_modes import Mode
from codegen.analysis.schedule import Schedule
from codegen.ir import expr
from codegen.ir.expr import Const, Level, Load, Op
from codegen.plan.variant import VariantPlan, sums_by_keys
from codegen.spec.model import TileConfig, Variant

FORWARD = "hopper_fwd"
"""File stem of the forward, and its name among the hashes of kernels."""

BACKWARD, WIDE_BACKWARD, DELTA = "hopper_bwd", "hopper_bwd_wide", "hopper_delta"
"""The same of the backward, of that for more than 128 columns, and of what runs before and after it."""

FORWARD_TILES = {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)}
"""Columns of a tile, those of q and k or of v, whichever are more -> block_m, block_n, num_warps and num_stages of the
forward: 64 rows for each of two warpgroups, and what keys and stages fit shared memory beside them."""

LONG_FORWARD_TILE, LONG_FROM, ALIKE_FROM = (192, 128, 12, 2), 8192, 2048
"""The same at 64 columns, and from how many keys on: of dense calls of a variant whose score is the product scaled and
whose rows visit one long run of keys; from fewer on where all rows visit the same keys. Three warpgroups hide each
other's exponentials, but their rows together meet more blocks that the mask cuts, and they have no registers for a
score that is more."""

BACKWARD_TILES = {64: (128, 128, 8, 2), 128: (64, 128, 8, 2), 256: (64, 64, 8, 2)}
"""The same of the backward, whose two warpgroups share the keys. Where a score is more than the product scaled, or some
are dropped, block_m is at most SCORED_ROWS, for that takes the registers of half of the queries."""
SCORED_ROWS = 64

WIDE_BAND = 1024
"""Keys that a row sees in a band from which on the backward is the faster one: of windows of 128 it is not."""

ARCH, FAMILY = "sm_90", "hopper"


def forward_tile(head_dim: int) -> TileConfig:
    """The default tile of the forward."""
    return _tile(FORWARD_TILES[_columns(head_dim)])


def long_forward_tile(planned: VariantPlan, head_dim: int) -> TileConfig | None:
    """The tile of the forward from LONG_FROM keys on, where it is another one."""
    is_long = planned.mode is Mode.DENSE and scores_are_products(planned) and visits_long_runs(planned)
    return _tile(LONG_FORWARD_TILE) if is_long and _columns(head_dim) == min(FORWARD_TILES) else None


def backward_tile(planned: VariantPlan, head_dim: int) -> TileConfig:
    """The tile of the backward."""
    tile = _tile(BACKWARD_TILES[_columns(head_dim)])
    return tile if scores_are_products(planned) else replace(tile, block_m=min(tile.block_m, SCORED_ROWS))


def _tile(numbers: tuple[int, int, int, int]) -> TileConfig:
    block_m, block_n, num_warps, num_stages = numbers
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def serves_head_dim(head_dim: int) -> bool:
    """Whether a head_dim fills enough of a tile's columns: as `hopper_tile` of the package decides."""
    return 4 * head_dim >= 3 * _columns(head_dim)


def _columns(head_dim: int) -> int:
    return min(columns for columns in FORWARD_TILES if columns >= head_dim)


def visits_long_runs(planned: VariantPlan) -> bool:
    """Whether the rows of a variant visit one run of keys, from the first on, as those of a causal mask do.

    A program of Hopper's works on one block of rows at a time, and hides the start and end of a short run less well
    than the portable ones do behind each other.
    """
    bounds = planned.fwd.bounds
    return bounds is not None and bounds.begins_at_zero and not bounds.jumps and not bounds.lists


def rows_are_alike(planned: VariantPlan) -> bool:
    """Whether all rows of a variant visit the same keys, and so no blocks that a mask cuts."""
    bounds = planned.fwd.bounds
    return bounds is not None and not bounds.masked


def visits_runs(planned: VariantPlan) -> bool:
    """Whether the rows of a variant visit runs of keys, and no blocks of a list, most of which a mask cuts."""
    bounds = planned.fwd.bounds
    return bounds is not None and not bounds.lists


def visits_bands(planned: VariantPlan) -> bool:
    """Whether the rows of a variant visit ranges of keys from a table, or keys up to a distance that is not known to be
    less than WIDE_BAND.
    """
    if planned.analysis.schedule is Schedule.RANGES:
        return True
    first = planned.analysis.keys.main.first
    if first is None:
        return False
    operands = first.args if isinstance(first, Op) and first.op == "max" else (first,)
    forms = [linear(expr.substitute(operand, {"q_first": expr.int_var("q_idx")})) for operand in operands]
    bands = [form.rest for form in forms if form is not None and form.q == 1]
    return bool(bands) and not any(isinstance(rest, Const) and 1 - rest.value < WIDE_BAND for rest in bands)


def scores_are_products(planned: VariantPlan) -> bool:
    """Whether nothing is found for a pair but its scaled product: no other score, and no random number."""
    return planned.fwd.linear and not planned.variant.dropout


def scores_cheaply(variant: Variant) -> bool:
    """Whether a score costs a few instructions: it calls no function, reads nothing for each key or pair, and no random
    number decides about it."""
    nodes = expr.walk(variant.score) if variant.score is not None else ()
    dear = (
        (isinstance(node, Op) and node.op in expr.FLOAT_FUNCTIONS)
        or (isinstance(node, Load) and expr.level(node) > Level.QUERY)
        for node in nodes
    )
    return not variant.decay and not variant.dropout and not any(dear)


def fuses_backward(planned: VariantPlan) -> bool:
    """Whether one kernel can compute dq, dk and dv, with all that the variant gathers besides."""
    return sums_by_keys(planned.terms)
