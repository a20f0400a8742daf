"""Prints a variant's formulas and arguments, and a picture of the blocks that its mask skips in a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import numpy as np

from codegen.analysis.schedule import analyse
from codegen.inspect.block_status import Grid, Status, block_diagonal, counted, measured, proven
from codegen.inspect.call import Call, assumed_values
from codegen.ir.evaluate import Array
from codegen.ir.expr import SCORE, TRUE, Expr, loads
from codegen.ir.printers import FormulaPrinter
from codegen.spec.model import Variant, describe_tensor

MOST_PAIRS = 2**28
"""Most pairs whose mask is evaluated one by one, in some seconds. With more pairs only block analysis is used."""

MOST_COLUMNS = 64
"""Width of a picture on the terminal."""

LEAST_BLOCK = 64
"""The smallest default block, except for packed calls: blocks of the kernels have 64 or 128."""

CELL = 2
"""Columns of a block on the terminal, about as wide as a line is high."""

BLOCK_SYMBOLS = {Status.EMPTY: ".", Status.PARTIAL: "▒", Status.FULL: "█"}
ASCII_SYMBOLS = {Status.EMPTY: ".", Status.PARTIAL: "+", Status.FULL: "#"}

_GAP = "    "


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The blocks of one call, as found by evaluating the mask and as proven by block analysis.

    A packed call has `segments`, the lengths of its sequences, and a grid for each that is not empty; `found` and
    `proven` cover the whole call, and blocks between two sequences are empty. `kept` counts the pairs that the mask
    keeps; it and `found` are None if there are too many pairs.
    """

    variant: Variant
    grids: Sequence[Grid]
    segments: Sequence[int]
    kept: int | None
    found: Array | None
    proven: Array

    @property
    def q_len(self) -> int:
        """Total query rows of all sequences."""
        return sum(grid.call.q_len for grid in self.grids)

    @property
    def kv_len(self) -> int:
        return sum(grid.call.kv_len for grid in self.grids)

    @property
    def pairs(self) -> int:
        """Total pairs of a query and a key of the same sequence."""
        return sum(grid.call.q_len * grid.call.kv_len for grid in self.grids)

    @property
    def views(self) -> dict[str, Array]:
        """Source -> statuses, the more exact source first."""
        found = {} if self.found is None else {"evaluated": self.found}
        return found | {"by block analysis": self.proven}

    @property
    def panels(self) -> dict[str, Array]:
        """The views worth drawing: only one if block analysis finds the same as evaluating the mask."""
        first = dict(list(self.views.items())[:1])
        return first if all(np.array_equal(view, self.proven) for view in self.views.values()) else self.views


def formula(e: Expr | None) -> str:
    """An expression with its named parts written out; `-` for None."""
    return "-" if e is None else FormulaPrinter().text(e)


def mask_of(variant: Variant) -> Expr:
    """The variant's mask; `true` if it has none."""
    return TRUE if variant.mask is None else variant.mask


def default_block(calls: Sequence[Call], *, packed: bool) -> int:
    """The smallest power of two as block size with which a picture can show every block, or that holds every sequence.

    It is at least 64. For a packed call it may be 1, because its sequences are often short.
    """
    block = 1 if packed else LEAST_BLOCK
    lengths = [max(call.q_len, call.kv_len) for call in calls]
    while sum(-(-length // block) for length in lengths) > MOST_COLUMNS // CELL and block < max(lengths):
        block *= 2
    return block


def picture(variant: Variant, grids: Sequence[Grid], segments: Sequence[int] = ()) -> Picture:
    """Count the pairs that the mask keeps, and ask block analysis about the same blocks.

    There is one grid, or in a packed call one for each sequence that is not empty; `segments`: their lengths.
    """
    mask = mask_of(variant)
    few = sum(grid.call.q_len * grid.call.kv_len for grid in grids) <= MOST_PAIRS
    counts = [counted(mask, grid) for grid in grids] if few else None
    return Picture(
        variant=variant,
        grids=grids,
        segments=segments,
        kept=None if counts is None else sum(int(count.sum()) for count in counts),
        found=None if counts is None else block_diagonal([*map(measured, counts, grids)]),
        proven=block_diagonal([proven(mask, grid) for grid in grids]),
    )


def report(p: Picture, *, columns: int, encoding: str) -> str:
    """The text of `show` for a terminal with `columns` columns. ASCII is used if `encoding` lacks the block symbols."""
    symbols = BLOCK_SYMBOLS if can_print("".join(BLOCK_SYMBOLS.values()), encoding) else ASCII_SYMBOLS
    lines = [
        ": ".join(filter(None, (p.variant.name, " ".join(p.variant.doc.split())))),
        "",
        *facts(p.variant, p.grids[0].call),
        "",
        *_caption(p),
        "",
        *_panels(p, symbols, columns),
        "",
        *_numbers(p),
    ]
    return "\n".join(lines).encode(encoding, "replace").decode(encoding)


def can_print(text: str, encoding: str) -> bool:
    """Whether an encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- the spec


def facts(variant: Variant, call: Call) -> list[str]:
    """The properties of a variant, with one line or more for each."""
    extras = {
        "decay": "decay: log-decay g [B, S, Hq]; its running sum at q_idx less that at kv_idx is added to the score",
        "sink": "sink: a logit per head, sink [Hq], in the denominator only",
    }
    facts = {
        "mask": [formula(variant.mask)],
        "score": [SCORE if variant.score is None else formula(variant.score)],
        "tensors": [describe_tensor(tensor) for tensor in variant.tensors.values()],
        "scalars": [f"{s.name}: {s.type.value} = {call.scalars[s.name]}" for s in variant.scalars.values()],
        "extras": [text for name, text in extras.items() if getattr(variant, name)],
        "schedule": [analyse(variant.mask).schedule.value],
    }
    lines = []
    for name, values in facts.items():
        lines += [f"{label:<8}  {value}" for label, value in zip_longest([name], values or ["-"], fillvalue="")]
    return lines


def _caption(p: Picture) -> list[str]:
    """The caption of the picture."""
    call, block_m, block_n = p.grids[0].call, p.grids[0].block_m, p.grids[0].block_n
    offset = f", from position {call.q_offset} on" if call.q_offset else ""
    head = f"h = {call.h}" + (f", hkv = {call.hkv}" if call.hkv != call.h else "")
    blocks = f"blocks of {block_m} by {block_n}"
    what = f"{p.q_len} queries (down{offset}) by {p.kv_len} keys (across)"
    if not p.segments:
        return [f"{what}, {blocks}, b = {call.b}, {head}", *_assumptions(p.variant, call)]
    blocks = "pair by pair" if block_m == block_n == 1 else f"{blocks} from each sequence's start"
    return [
        f"{what}, {blocks}, {head}",
        f"sequences of {', '.join(map(str, p.segments))}; b is their number, on the margins; positions restart in each",
        *_assumptions(p.variant, call),
    ]


def _assumptions(variant: Variant, call: Call) -> list[str]:
    """The values of tensors that decide the mask and that neither a file nor the spec gives."""
    read = {load.tensor for load in loads(mask_of(variant))} - set(call.given)
    return [
        f"{name} is {assumed_values(spec)}, because it has no example; --tensor {name}=FILE.npy gives its values"
        for name, spec in variant.tensors.items()
        if name in read and spec.example is None
    ]


# ---------------------------------------------------------------------------------------------------------- the picture


def coarsened(statuses: Array, factor: int) -> Array:
    """Merge `factor` by `factor` blocks into one status, which is partial if they differ."""
    starts = [np.arange(0, size, factor) for size in statuses.shape]

    def extreme(pick: np.ufunc) -> Array:
        rows: Array = pick.reduceat(statuses, starts[0], axis=0)
        found: Array = pick.reduceat(rows, starts[1], axis=1)
        return found

    least, most = extreme(np.minimum), extreme(np.maximum)
    return np.where(least == most, least, Status.PARTIAL)


def _panels(p: Picture, symbols: dict[Status, str], columns: int) -> list[str]:
    """The blocks as evaluated, beside them the blocks by block analysis if these differ, and the legend."""
    margin = len(f"{p.grids[-1].call.b} ") if p.segments else 0
    most = max(1, min(columns - margin, MOST_COLUMNS) // CELL)
    factor = -(-max(p.proven.shape) // most)
    panels = [
        ["".join(symbols[Status(s)] * CELL for s in row) for row in coarsened(view, factor)]
        for view in p.panels.values()
    ]
    if p.segments:
        panels = [_numbered(panel, p.grids, factor, margin) for panel in panels]
    if len(panels) == 2:
        panels = [[f"{title}:", *panel] for title, panel in zip(p.panels, panels, strict=True)]
    across = max(map(len, panels[0]))
    if len(panels) == 2 and across + len(_GAP) + max(map(len, panels[1])) <= columns:
        panels = [[f"{left:<{across}}{_GAP}{right}" for left, right in zip(*panels, strict=True)]]
    legend = "  ".join(f"{symbols[status]} {status.name.lower()}" for status in Status)
    stands_for = f"  (each for {factor} by {factor} blocks)" if factor > 1 else ""
    return [*(line for panel in panels for line in [*panel, ""]), legend + stands_for]


def _numbered(panel: list[str], grids: Sequence[Grid], factor: int, margin: int) -> list[str]:
    """A panel of a packed call, with the number of each sequence at its first block, above and beside the picture.

    If two numbers would touch or share a row, only the first is printed.
    """
    row_starts, column_starts = (accumulate((grid.shape[axis] for grid in grids), initial=0) for axis in (0, 1))
    beside: dict[int, int] = {}
    above = ""
    for grid, row, column in zip(grids, row_starts, column_starts, strict=False):
        beside.setdefault(row // factor, grid.call.b)
        at = column // factor * CELL
        if not above or at > len(above):
            above = f"{above:<{at}}{grid.call.b}"
    lines = [f"{beside.get(row, ''):<{margin}}{line}" for row, line in enumerate(panel)]
    return [" " * margin + above, *lines]


# ---------------------------------------------------------------------------------------------------------- the numbers


def _numbers(p: Picture) -> list[str]:
    lines = [f"{'':<17}{''.join(f'{status.name.lower():>10}' for status in Status)}"]
    for title, view in p.views.items():
        shares = [_percent(int((view == status).sum()), view.size) for status in Status]
        lines.append(f"{title:<17}{''.join(f'{share:>10}' for share in shares)}")
    total = p.q_len * p.kv_len
    kept = f"not counted, there are {total}" if p.kept is None else _percent(p.kept, total)
    skipped = _percent(int((p.proven == Status.EMPTY).sum()), p.proven.size)
    if p.segments:
        within = (
            f"{p.pairs} within a sequence"
            if p.kept is None
            else f"{_percent(p.kept, p.pairs)} of those within a sequence"
        )
        kept = f"{kept}, {within}"
        skipped = f"{skipped}, blocks between sequences included; each sequence is analysed alone"
    return [*lines, "", f"pairs kept        {kept}", f"work skipped      {skipped}"]


def _percent(part: int, whole: int) -> str:
    """A percentage that never rounds a small share to 0 or a nearly full one to 100."""
    share = 100.0 * part / whole
    if 0 < share < 0.05:
        return "< 0.1%"
    if 99.95 <= share < 100:
        return "> 99.9%"
    return f"{share:.1f}%"
