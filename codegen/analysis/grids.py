"""Grids: tensors with one element for each run of queries and each run of keys, whose values decide blocks.

Few elements of `chosen[b, h, q_idx // 64, kv_idx // 64]` lie in a block. The kernel that decides the block reads them
all, and computes their smallest and largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codegen.analysis.affine import linear
from codegen.analysis.call_modes import Mode
from codegen.analysis.indexing import TOKENS, WIDE_INDICES
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Level, Load, Op, TensorSpec, Var, level

RunLength = Const | Var
"""How many positions share an element of a grid: a literal or a scalar."""

SHORTEST_RUN = 16
"""The shortest run that a literal may state. If runs are shorter, too many elements lie in a block to read them all."""


@dataclass(frozen=True, kw_only=True)
class GridSide:
    """The axis of a grid along queries, or along keys, and the first and last index of a block on it."""

    axis: int
    first: Expr
    last: Expr


@dataclass(frozen=True, kw_only=True)
class GridRead:
    """A read of a grid, and the names of its smallest and largest element in a block. Booleans count as 0 and 1; a NaN
    in the block makes both NaN."""

    load: Load
    queries: GridSide
    keys: GridSide
    minimum: Var
    maximum: Var

    @property
    def ends(self) -> tuple[Expr, ...]:
        """The first and last indices of a block, along queries and along keys."""
        return self.queries.first, self.queries.last, self.keys.first, self.keys.last


def grid_axes(e: Load) -> tuple[int, int] | None:
    """The axes along queries and along keys of a read of a grid; None for any other read.

    >>> from codegen.ir.expr import TensorSpec, Type
    >>> from codegen.ir.parse import Scope, parse
    >>> scope = Scope(tensors={"seen": TensorSpec(name="seen", dims=("b", "rows", "cols"), dtype="bool")})
    >>> for indices in ("b, q_idx // 64, kv_idx // 32", "b, kv_idx // 32, q_idx // 64", "b, q_idx, kv_idx"):
    ...     print(grid_axes(parse(f"seen[{indices}]", scope, Type.BOOL)))
    (1, 2)
    (2, 1)
    None
    """
    levels = [level(index) for index in e.indices]
    if sorted(x for x in levels if x is not Level.UNIFORM) != [Level.QUERY, Level.KEY]:
        return None
    axes = levels.index(Level.QUERY), levels.index(Level.KEY)
    return axes if all(_of_runs(e.indices[axis]) for axis in axes) else None


def run_lengths(e: Load) -> tuple[RunLength, RunLength] | None:
    """How many queries, and how many keys, share an element of a grid; None for a read of another kind.

    The index must grow or fall by one from run to run.

    >>> from codegen.ir.expr import TensorSpec, Type
    >>> from codegen.ir.parse import Scope, parse
    >>> scope = Scope(tensors={"seen": TensorSpec(name="seen", dims=("rows", "cols"), dtype="bool")})
    >>> for indices in ("q_idx // 64, (kv_idx + 3) >> 5", "q_idx // 64, 2 * kv_idx // 64"):
    ...     lengths = run_lengths(parse(f"seen[{indices}]", scope, Type.BOOL))
    ...     print(lengths and [length.value for length in lengths])
    [64, 32]
    None
    """
    axes = grid_axes(e)
    if axes is None:
        return None
    queries, keys = (_run_length(e.indices[axis]) for axis in axes)
    return None if queries is None or keys is None else (queries, keys)


def shared_runs(load: Load, tensors: Mapping[str, TensorSpec], mode: Mode) -> tuple[RunLength, ...]:
    """How many consecutive queries, and keys, share an element; empty for a read of another kind. In a segmented call
    positions need not follow each other."""
    of_tokens = set(TOKENS) & set(tensors[load.tensor].dims)
    return () if mode is Mode.SEGMENTED or of_tokens else run_lengths(load) or ()


def block_runs(mask: Expr) -> tuple[RunLength, ...]:
    """The lengths of the blocks that a mask chooses by a tensor, each once; empty for other masks.

    Besides runs, positions may appear in comparisons, which cut few blocks.

    >>> from codegen.ir.expr import TensorSpec, Type
    >>> from codegen.ir.parse import Scope, parse
    >>> scope = Scope(tensors={"best": TensorSpec(name="best", dims=("blocks", 4), dtype="int32")})
    >>> for mask in ("q_idx >= kv_idx and kv_idx // 32 in best[q_idx // 64]", "kv_idx // 32 in best[q_idx]"):
    ...     print([length.value for length in block_runs(parse(mask, scope, Type.BOOL))])
    [32, 64]
    []
    """
    found: dict[RunLength, None] = {}
    by_tensor = any(level(load) is not Level.UNIFORM for load in expr.loads(mask))
    return tuple(found) if by_tensor and _tells_runs_apart(mask, found) else ()


def _tells_runs_apart(e: Expr, found: dict[RunLength, None]) -> bool:
    """True if positions appear only in runs, whose lengths are added to `found`, and in comparisons of sums."""
    length = _run_length(e)
    if length is not None:
        found[length] = None
        return True
    if isinstance(e, Op) and e.op in expr.COMPARISONS and all(map(linear, e.args)):
        return True
    if isinstance(e, Load | Op):
        return all(_tells_runs_apart(part, found) for part in (e.indices if isinstance(e, Load) else e.args))
    return level(e) is Level.UNIFORM


def _run_length(index: Expr) -> RunLength | None:
    if not isinstance(index, Op) or index.op not in ("floordiv", "shr"):
        return None
    position, by = index.args
    form = linear(position)
    if form is None or abs(form.q) + abs(form.kv) != 1:
        return None
    if isinstance(by, Const):
        return expr.const(1 << int(by.value)) if index.op == "shr" else by
    if not isinstance(by, Var) or by.name in WIDE_INDICES or index.op == "shr":
        return None
    return by


def _of_runs(index: Expr) -> bool:
    """True if an index is the same for a run of positions."""
    return not expr.loads(index) and any(map(_is_run, expr.walk(index)))


def _is_run(e: Expr) -> bool:
    if not isinstance(e, Op) or e.op not in ("floordiv", "shr") or level(e) is Level.UNIFORM:
        return False
    by = e.args[1]
    if not isinstance(by, Const):
        return level(by) is Level.UNIFORM
    return (1 << int(by.value) if e.op == "shr" else int(by.value)) >= SHORTEST_RUN
