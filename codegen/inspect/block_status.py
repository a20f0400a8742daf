"""Which blocks of a call are empty, partial or full: counted pair by pair, and as block analysis proves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from codegen.analysis.grids import GridRead
from codegen.analysis.intervals import Extreme, decide
from codegen.inspect.call import Call
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr, Load, Type, int_var


class Status(IntEnum):
    """Whether the mask keeps none, some or all pairs of a block."""

    EMPTY = 0  # no pair: the kernels need not visit it
    PARTIAL = 1
    FULL = 2  # every pair: visited without evaluating the mask


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a call is cut into blocks of `block_m` queries by `block_n` keys; the last ones may be shorter."""

    call: Call
    block_m: int
    block_n: int

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks along the queries and along the keys."""
        return -(-self.call.q_len // self.block_m), -(-self.call.kv_len // self.block_n)

    @property
    def q_starts(self) -> Array:
        """The first row of each block of queries."""
        return np.arange(0, self.call.q_len, self.block_m)

    @property
    def kv_starts(self) -> Array:
        return np.arange(0, self.call.kv_len, self.block_n)


def pairs(mask: Expr, call: Call, first: int = 0, end: int | None = None) -> Array:
    """The mask at every pair of the query rows `[first, end)`: bool, `[rows, kv_len]`."""
    rows = np.arange(first, call.q_len if end is None else min(end, call.q_len))
    values = {**call.uniform, "q_idx": rows[:, None] + call.q_offset, "kv_idx": np.arange(call.kv_len)}
    return np.broadcast_to(evaluate(mask, values, call.tensors), (len(rows), call.kv_len))


def counted(mask: Expr, grid: Grid) -> Array:
    """How many pairs of each block the mask keeps: int, `grid.shape`. One block of queries is in memory at a time."""
    rows = (pairs(mask, grid.call, int(first), int(first) + grid.block_m) for first in grid.q_starts)
    return np.stack([np.add.reduceat(kept.sum(axis=0), grid.kv_starts) for kept in rows])


def measured(counts: Array, grid: Grid) -> Array:
    """The status of each block, from the number of kept pairs."""
    rows = np.diff(grid.q_starts, append=grid.call.q_len)
    keys = np.diff(grid.kv_starts, append=grid.call.kv_len)
    return _statuses(counts > 0, counts == rows[:, None] * keys)


def proven(mask: Expr, grid: Grid) -> Array:
    """The status of each block by block analysis, which may report an empty or full block as partial."""
    return _statuses(*decided(mask, grid))


def decided(mask: Expr, grid: Grid) -> tuple[Array, Array]:
    """For each block by block analysis: whether some pair may be kept, and whether every pair must be kept."""
    decision, call = decide(mask), grid.call
    values: dict[str, Array | int | float] = {
        **call.uniform,
        "q_first": grid.q_starts[:, None] + call.q_offset,
        "q_last": np.minimum(grid.q_starts + grid.block_m, call.q_len)[:, None] - 1 + call.q_offset,
        "kv_first": grid.kv_starts,
        "kv_last": np.minimum(grid.kv_starts + grid.block_n, call.kv_len) - 1,
    }
    for extreme in decision.reads:
        least, greatest = extremes(extreme, grid)
        values[extreme.minimum.name], values[extreme.maximum.name] = least, greatest
    for read in decision.grids:
        values[read.minimum.name], values[read.maximum.name] = grid_extremes(read, values, call.tensors)
    may, must = (evaluate(e, values, call.tensors) for e in (decision.may, decision.must))
    return np.broadcast_to(may, grid.shape), np.broadcast_to(must, grid.shape)


def extremes(extreme: Extreme, grid: Grid) -> tuple[Array, Array]:
    """The smallest and the largest value over each block; -inf and inf for a block that holds a NaN."""
    call = grid.call
    positions = {"q_idx": np.arange(call.q_len) + call.q_offset, "kv_idx": np.arange(call.kv_len)}
    length, starts = (call.q_len, grid.q_starts) if extreme.of_queries else (call.kv_len, grid.kv_starts)
    found = np.broadcast_to(evaluate(extreme.value, {**call.uniform, **positions}, call.tensors), length)
    low = high = found
    if extreme.value.type is Type.FLOAT:
        low, high = (np.where(np.isnan(found), bound, found) for bound in (-np.inf, np.inf))
    least, greatest = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    return (least[:, None], greatest[:, None]) if extreme.of_queries else (least, greatest)


def grid_extremes(
    read: GridRead, values: Mapping[str, Array | int | float], tensors: Mapping[str, Array]
) -> tuple[Array, Array]:
    """The smallest and the largest element of a grid in each block; `values`: the blocks' first and last positions."""
    q_first, q_last, kv_first, kv_last = (np.asarray(evaluate(end, values, tensors)) for end in read.ends)
    indices = list(read.load.indices)
    indices[read.queries.axis], indices[read.keys.axis] = map(int_var, ("q_run", "kv_run"))
    element = Load(read.load.type, read.load.tensor, tuple(indices))
    found = [
        evaluate(
            element,
            {**values, "q_run": np.minimum(q_first + i, q_last), "kv_run": np.minimum(kv_first + j, kv_last)},
            tensors,
        )
        for i in range(int((q_last - q_first).max()) + 1)
        for j in range(int((kv_last - kv_first).max()) + 1)
    ]
    return np.minimum.reduce(found), np.maximum.reduce(found)


def block_diagonal(parts: Sequence[Array]) -> Array:
    """The blocks or pairs of a packed call from those of its sequences; between two sequences all are `EMPTY`, 0."""
    if len(parts) == 1:
        return parts[0]
    whole = np.zeros(np.sum([part.shape for part in parts], axis=0), np.int8)
    row = column = 0
    for part in parts:
        rows, columns = part.shape
        whole[row : row + rows, column : column + columns] = part
        row, column = row + rows, column + columns
    return whole


def _statuses(may: Array, must: Array) -> Array:
    return np.where(may, np.where(must, Status.FULL, Status.PARTIAL), Status.EMPTY)
