"""`show --ranks`: which of several GPUs computes which blocks of a call, and the planner's prediction for each GPU.

The planner is that of a generated package. The package need not have the variant: the variant's work is built from the
source that rendering would print for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from codegen.analysis.call_modes import POSITIONAL
from codegen.compile.packages import find_package
from codegen.inspect.block_status import Grid, Status, proven
from codegen.inspect.call import Call
from codegen.inspect.show import facts, mask_of
from codegen.ir.evaluate import Array
from codegen.plan.variant import plan
from codegen.plan.work import work_source
from codegen.spec.model import Variant
from codegen.util.errors import CodegenError
from codegen.util.text import aligned

FINE = 512
"""Most blocks along either side of the table from which the picture and the needed keys are computed."""

MOST_COLUMNS = 64
MOST_LINES = 64
"""Size of a picture on the terminal."""

LISTED_RUNS = 4
"""Most runs of rows of a rank that are written out."""

SEVERAL, EMPTY = "*", "."


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a call is to be split over GPUs.

    `ranks`: their number, or the number of nodes and of ranks in each. `heads`: numbers of query and of key heads.
    """

    ranks: int | tuple[int, int]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    strategy: str = "auto"


def report(out: Path, variant: Variant, calls: Sequence[Call], segments: Sequence[int], split: Split) -> str:
    """The text of `show --ranks`.

    Args:
        out: the package whose planner is asked. calls: the call, or each sequence of a packed one that is not empty.
        segments: the lengths of the sequences of a packed call.

    Raises:
        CodegenError: the planner refuses the call, or there is no package.
    """
    layout, machine = planned(out, variant, calls, segments, split)
    table = Visits.of(variant, calls)
    by_heads = layout.strategy == "heads"
    lines = [
        ": ".join(filter(None, (variant.name, " ".join(variant.doc.split())))),
        "",
        *facts(variant, calls[0]),
        "",
        f"{layout.seq} queries (down) by {layout.seq} keys (across); each number is the "
        f"{'node' if layout.nodes else 'rank'} that computes there",
        "",
        *_picture(layout.nodes or layout, table, by_heads=by_heads),
        "",
        *_table(layout, table, by_heads=by_heads),
        "",
        layout.report(),
        f"assumed: {machine.forward / 1e12:g} TFLOP/s forward and {machine.backward / 1e12:g} backward of visited "
        f"blocks, {machine.link / 1e9:g} GB/s between GPUs; one batch row of {split.heads[0]} query and "
        f"{split.heads[1]} key heads of {split.head_dim}",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- the planner


def planned(
    out: Path, variant: Variant, calls: Sequence[Call], segments: Sequence[int], split: Split
) -> tuple[Any, Any]:
    """The layout of a call that the planner of the package in `out` makes, and the machine that it assumes."""
    core = f"{find_package(out).name}._runtime.core"
    plans, requests, work, costs = (
        importlib.import_module(f"{core}.parallel.{name}") for name in ("shard_plans", "plan_requests", "work", "costs")
    )
    checks = importlib.import_module(f"{core}.checks")
    machine = costs.Machine()
    is_packed = bool(segments)
    try:
        asked = requests.checked_request(
            variant_work(work.VariantWork, variant),
            split.ranks,
            seq=sum(segments) if is_packed else calls[0].q_len,
            heads=split.heads,
            head_dim=split.head_dim,
            cu_seqlens=[0, *accumulate(segments)] if is_packed else None,
            strategy=split.strategy,
            machine=machine,
            own=_own(variant, calls, is_packed=is_packed),
        )
        layout = plans.make_layout(asked)
    except checks.ArgumentError as error:
        raise CodegenError(str(error)) from None
    return layout, machine


def variant_work(make: Callable[..., Any], variant: Variant) -> Any:
    """The work of a variant, made from the source that its `work.py` would have; `make`: a package's `VariantWork`."""
    source = work_source(plan(variant))

    def ranges(at: Any) -> list[tuple[Any, Any]]:
        return [(_value(first, at), _value(end, at)) for first, end in bounds]

    def values(at: Any) -> list[tuple[Any, bool]]:
        return [(_value(code, at), of_queries) for code, of_queries in extremes]

    def may_visit(at: Any) -> Any:
        return _value(decision, at)

    bounds = [(_code(first), _code(end)) for first, end in source.ranges]
    extremes = [(_code(text), of_queries) for text, of_queries in source.values]
    decision = _code(source.may_visit or "True")
    return make(
        op=variant.name,
        tensors=source.tensors,
        untrained=source.untrained,
        scalars=source.scalars,
        ranges=ranges if bounds else None,
        values=values if extremes else None,
        may_visit=may_visit if source.may_visit else None,
        needs=source.needs,
        keywords=source.keywords,
        dropout=source.dropout,
        by_heads=source.by_heads,
        by_batch=source.by_batch,
        by_row=source.by_row,
        by_length=source.by_length,
        by_queries=source.by_queries,
        sized_by_keys=source.sized_by_keys,
        shift_invariant=source.shift_invariant,
        looks_back=source.looks_back,
    )


def _code(text: str) -> CodeType:
    return compile(text, "<work>", "eval")


def _value(code: CodeType, at: Any) -> Any:
    return eval(code, {"np": np, "at": at})


def _own(variant: Variant, calls: Sequence[Call], *, is_packed: bool) -> dict[str, Any]:
    """The scalars and tensors of a call, by the keywords of the op."""
    found: dict[str, Any] = dict(calls[0].scalars)
    for name, spec in variant.tensors.items():
        found[name] = _joined(spec.dims, [(call.b, call.tensors[name]) for call in calls]) if is_packed else None
        if found[name] is None:
            found[name] = calls[0].tensors[name]
    return {variant.keywords.get(name, name): x for name, x in found.items()}


def _joined(dims: Sequence[str | int], parts: Sequence[tuple[int, Array]]) -> Array | None:
    """A tensor of a packed call from those of its sequences; None unless it has exactly one axis of tokens."""
    if sum(dim in POSITIONAL for dim in dims) != 1:
        return None
    kept = [dim for dim in dims if dim != "b"]
    axis = next(i for i, dim in enumerate(kept) if dim in POSITIONAL)
    own = [x.take(b, dims.index("b")) if "b" in dims else x for b, x in parts]
    joined: Array = np.concatenate(own, axis)
    return joined


# ----------------------------------------------------------------------------------------------------------- the blocks


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The blocks that kernels visit by block analysis: bool `[rows, keys]`; and the first row and key of each block."""

    visited: Array
    rows: Array
    keys: Array

    @classmethod
    def of(cls, variant: Variant, calls: Sequence[Call]) -> Visits:
        """The blocks of a call; those between two sequences of a packed call are empty."""
        total = sum(call.q_len for call in calls)
        block = 1
        while total > block * FINE:
            block *= 2
        grids = [Grid(call=call, block_m=block, block_n=block) for call in calls]
        statuses = [proven(mask_of(variant), grid) != Status.EMPTY for grid in grids]
        starts = list(accumulate((call.q_len for call in calls), initial=0))
        whole = np.zeros(np.sum([each.shape for each in statuses], axis=0), bool)
        row = column = 0
        for each in statuses:
            whole[row : row + each.shape[0], column : column + each.shape[1]] = each
            row, column = row + each.shape[0], column + each.shape[1]
        return cls(
            visited=whole,
            rows=np.concatenate([start + grid.q_starts for start, grid in zip(starts, grids, strict=False)]),
            keys=np.concatenate([start + grid.kv_starts for start, grid in zip(starts, grids, strict=False)]),
        )

    def cells(self, height: int, width: int) -> Array:
        """Whether a block is visited in each cell of `height` rows by `width` keys."""
        lines, columns = self.rows // height, self.keys // width
        found = np.zeros((int(lines[-1]) + 1, int(columns[-1]) + 1), bool)
        row, column = np.nonzero(self.visited)
        found[lines[row], columns[column]] = True
        return found

    def keys_of(self, runs: Sequence[tuple[int, int]], seq: int) -> float:
        """The share of all keys that at least one row of `runs` visits."""
        ends = np.append(self.rows[1:], seq)
        mine = np.zeros(len(self.rows), bool)
        for begin, length in runs:
            mine |= (self.rows < begin + length) & (ends > begin)
        sizes = np.diff(np.append(self.keys, seq))
        return float(sizes[self.visited[mine].any(axis=0)].sum()) / seq


# ----------------------------------------------------------------------------------------------------------- the report


def _picture(layout: Any, table: Visits, *, by_heads: bool) -> list[str]:
    """The lines of the picture, each for several rows; each visited cell shows the rank that has these rows."""
    height = _power(layout.seq, MOST_LINES // 2)
    if not by_heads and any(begin % height for own in layout.chunks for begin, _ in own):
        height = _power(layout.seq, MOST_LINES)
    size = len(str(layout.ranks - 1)) + 1
    cells = table.cells(height, _power(layout.seq, MOST_COLUMNS // size))
    owners = np.full(layout.seq, -1)
    for rank in range(layout.ranks):
        for begin, length in layout.runs(rank):
            owners[begin : begin + length] = rank
    lines, is_shared = [], by_heads
    for number, line in enumerate(cells):
        own = np.unique(owners[number * height : (number + 1) * height])
        is_shared |= len(own) > 1
        symbol = SEVERAL if by_heads or len(own) > 1 else str(own[0])
        lines.append("".join(f"{symbol if visited else EMPTY:>{size}}" for visited in line).rstrip())
    what = "every rank, for its own heads" if by_heads else "rows of several ranks"
    legend = f"{EMPTY} no rank" + (f"  {SEVERAL} {what}" if is_shared else "")
    return [*lines, "", f"{legend}  ({height} queries a line)"]


def _power(seq: int, cells: int) -> int:
    """The smallest power of two for which `cells` cells of that size hold `seq` rows."""
    size = 1
    while size * cells < seq:
        size *= 2
    return size


def _table(layout: Any, table: Visits, *, by_heads: bool) -> list[str]:
    """A line for each rank: its rows or heads, its work, and its predicted times."""
    mean = sum(layout.loads) / layout.ranks
    rows: list[Mapping[str, str]] = []
    for rank in range(layout.ranks):
        node = rank // layout.inner
        runs, cost = (layout.nodes or layout).runs(node), layout.cost_of(rank)
        needed = 1.0 if by_heads else table.keys_of(runs, layout.seq)
        rows.append(
            {
                "rank": str(rank),
                "has": ", ".join(_has(layout, rank, runs, by_heads=by_heads)),
                "blocks": f"{layout.loads[rank]:.{0 if mean >= 100 else 2}f}",
                "of mean": f"{100 * layout.loads[rank] / mean:.1f}%" if mean else "-",
                "keys needed": f"{100 * needed:.0f}%",
                "received": f"{layout.bytes_moved / 1e6:.1f} MB",
                "kernels": f"{1e3 * cost.compute:.3f} ms",
                "exchange": f"{1e3 * cost.exchange:.3f} ms",
                "total": f"{1e3 * cost.total:.3f} ms",
            }
        )
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)])


def _runs(runs: Sequence[tuple[int, int]]) -> str:
    """The rows of a rank as text: the first and last row of each run."""
    texts = [f"{begin}-{begin + length - 1}" for begin, length in runs[:LISTED_RUNS]]
    more = len(runs) - len(texts)
    return "rows " + ", ".join(texts) + (f" and {more} runs more" if more else "") if runs else "padding"


def _has(layout: Any, rank: int, runs: Sequence[tuple[int, int]], *, by_heads: bool) -> list[str]:
    """The part that a rank computes: rows, some heads of all rows, or some heads of the rows of its node."""
    sharing = layout.ranks if by_heads else layout.inner
    heads = [_heads(layout.heads[0] // sharing, rank % sharing)] if sharing > 1 or by_heads else []
    return [*heads, *([] if by_heads else [_runs(runs)])]


def _heads(count: int, rank: int) -> str:
    first = rank * count
    return f"heads {first}-{first + count - 1}" if count > 1 else f"head {first}"
