"""The text of a loop's bounds: which blocks a program visits, and which of them need no mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.analysis.call_modes import Mode
from codegen.analysis.schedule import BlockAnalysis, Range, Schedule, Union
from codegen.ir import expr
from codegen.ir.expr import Expr, const, int_var
from codegen.plan.lower import Emitter


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A gap that a loop over several ranges steps over: from the row `at` it goes on `by` further."""

    at: str
    by: str


@dataclass(frozen=True, kw_only=True)
class BoundsText:
    """Statements that compute the bounds, and the names (or literals) a loop header uses.

    Without `masked` only a cut last block is partial. `begins_partial`: the mask cuts blocks before the full ones;
    `two_sided`: behind them too. Without `has_full` every block is partial. Of two ranges, the loops over partial and
    over full blocks take the `jumps` and `full_jumps`. `lists`: the blocks are read from lists.
    """

    statements: Sequence[str] = ()
    begin: str = "0"
    end: str = ""
    full_begin: str = "0"
    full_end: str = ""
    has_full: bool = True
    masked: bool = True
    begins_partial: bool = False
    two_sided: bool = False
    jumps: Sequence[Jump] = ()
    full_jumps: Sequence[Jump] = ()
    lists: bool = False


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Names along the loop: its variable prefix, block size and length."""

    name: str
    block: str
    length: str


def key_bounds(analysis: BlockAnalysis, emitter: Emitter) -> BoundsText:
    """Bounds of the keys for `BLOCK_M` query rows that start at `start_m`."""
    block = ["q_first = start_m + q_shift", "q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift"]
    return _bounds(analysis, analysis.keys, emitter, _Axis(name="kv", block="BLOCK_N", length="kv_len"), block)


def query_bounds(analysis: BlockAnalysis, emitter: Emitter) -> BoundsText:
    """Bounds of the query rows for `BLOCK_N` keys that start at `start_n`."""
    block = ["kv_first = start_n", "kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1"]
    return _bounds(analysis, analysis.queries, emitter, _Axis(name="row", block="BLOCK_M", length="q_len"), block)


def _bounds(analysis: BlockAnalysis, union: Union, emitter: Emitter, axis: _Axis, block: list[str]) -> BoundsText:
    if analysis.schedule is Schedule.RANGES:
        return _ranged(analysis, emitter, axis)
    if analysis.schedule is Schedule.LISTS:
        return _listed(analysis, emitter, axis)
    text = _one_range(union.main, emitter, axis, analysis.schedule)
    if union.other is not None:
        text = _two_ranges(union, text, emitter, axis)
    used = " ".join(text.statements)
    prelude = [line for line in block if line.split(" = ")[0] in used]
    return replace(text, statements=[*prelude, *text.statements])


def _ranged(analysis: BlockAnalysis, emitter: Emitter, axis: _Axis) -> BoundsText:
    """A block's four numbers, counted in blocks: where the visited ones and the full ones among them begin and end."""
    begin, end, block = f"{axis.name}_begin", f"{axis.name}_end", axis.block
    return BoundsText(
        statements=[
            "# Of the blocks this one visits, those from full_begin to full_end need no mask.",
            f"block_range = {_table_row(analysis, emitter, axis, 'ranges')}",
            f"{begin}, full_begin = tl.load(block_range) * {block}, tl.load(block_range + 1) * {block}",
            f"full_end, {end} = tl.load(block_range + 2) * {block}, tl.load(block_range + 3) * {block}",
        ],
        begin=begin,
        end=end,
        full_begin="full_begin",
        full_end="full_end",
        begins_partial=True,
        two_sided=True,
    )


def _table_row(analysis: BlockAnalysis, emitter: Emitter, axis: _Axis, table: str) -> str:
    """The pointer to a program's four numbers in a table `[B, H, blocks, 4]`, or `[H, entries, 4]` of packed ones."""
    own = "start_m // BLOCK_M" if axis.name == "kv" else "start_n // BLOCK_N"
    head = f" + h * stride_{table}_h" if analysis.tables_per_head else ""
    if emitter.mode is Mode.PACKED:
        return f"{table}_ptr{head} + (first_entry + {own}) * 4"
    return f"{table}_ptr + b * stride_{table}_b{head} + {own} * 4"


def _listed(analysis: BlockAnalysis, emitter: Emitter, axis: _Axis) -> BoundsText:
    """A block's four numbers: its list holds partial blocks from the left and full ones from the right."""
    return BoundsText(
        statements=[
            "# The list of this block: partial blocks from the left, full ones from the right.",
            f"span = {_table_row(analysis, emitter, axis, 'spans')}",
            "list_begin, partial_end = tl.load(span), tl.load(span + 1)",
            "full_begin, list_end = tl.load(span + 2), tl.load(span + 3)",
        ],
        begin="list_begin",
        end="partial_end",
        full_begin="full_begin",
        full_end="list_end",
        lists=True,
    )


def _one_range(r: Range, emitter: Emitter, axis: _Axis, schedule: Schedule) -> BoundsText:
    """One range, by what of it is given.

    | `first` | `full_first` | blocks before the full ones |
    |---|---|---|
    | None | None | none: visited and full blocks begin at 0 |
    | None | given | partial ones from 0 on |
    | given | either | partial ones from `first` on |

    `end` and `full_end` are the length where they are None, and never beyond it (`Range`).
    """
    begin, end = f"{axis.name}_begin", f"{axis.name}_end" if r.end is not None else axis.length
    lines: list[str] = []
    if r.first is not None:
        lines.append(f"{begin} = {_text(emitter, r.first, axis)} // {axis.block} * {axis.block}")
    else:
        begin = "0"
    if r.end is not None:
        lines.append(f"{end} = {_text(emitter, r.end, axis)}")
    if r.has_full:
        lines += _full_lines(r, emitter, axis, begin, end)
    begins_partial = r.has_full and r.has_partial_start
    return BoundsText(
        statements=lines,
        begin=begin,
        end=end,
        full_begin="full_begin" if r.has_partial_start else "0",
        full_end="full_end",
        has_full=r.has_full,
        masked=schedule is not Schedule.DENSE,
        begins_partial=begins_partial,
        two_sided=begins_partial and (r.end is not None or r.full_end is not None),
    )


def _full_lines(r: Range, emitter: Emitter, axis: _Axis, begin: str, end: str) -> list[str]:
    cut = r.has_partial_start
    lines = [f"# Blocks {'from full_begin to' if cut else 'before'} full_end need no mask."]
    if cut:
        first = expr.maximum(r.full_first or const(0), const(0) if begin == "0" else int_var(begin))
        lines.append(f"full_begin = tl.cdiv({_text(emitter, first, axis)}, {axis.block}) * {axis.block}")
        last = f"tl.cdiv(tl.maximum({end}, {begin}), {axis.block}) * {axis.block}"
        lines.append(f"full_begin = tl.minimum(full_begin, {last})")
    bound = end if r.full_end is None else _text(emitter, r.full_end, axis)
    lines.append(f"full_end = {_factor(bound)} // {axis.block} * {axis.block}")
    if cut or bound != axis.length:
        lines.append(f"full_end = tl.maximum(full_end, {'full_begin' if cut else '0'})")
    return lines


def _factor(text: str) -> str:
    return text if text.isidentifier() or text.endswith(")") else f"({text})"


def _text(emitter: Emitter, e: Expr, axis: _Axis) -> str:
    """A bound in 32 bits, as coordinates of TMA copies have: one that reads a 64-bit tensor is clamped to the axis."""
    text = emitter.own_shape([e])[0]
    if all(emitter.tensors[load.tensor].dtype != "int64" for load in expr.loads(e)):
        return text
    return f"tl.minimum(tl.maximum({text}, 0), {axis.length}).to(tl.int32)"


# ----------------------------------------------------------------------------------------------------------- two ranges


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The bounds of one of several ranges; `stop` is the end of its last block."""

    begin: str
    end: str
    full_begin: str
    full_end: str
    stop: str


def _two_ranges(union: Union, main: BoundsText, emitter: Emitter, axis: _Axis) -> BoundsText:
    """The main range, and what the other adds before and behind it: ascending, each block in one of them."""
    lines = list(main.statements)
    names = _Names(
        begin=f"{axis.name}_begin",
        end=f"{axis.name}_end",
        full_begin="full_begin" if main.has_full else f"{axis.name}_begin",
        full_end="full_end" if main.has_full else f"{axis.name}_begin",
        stop=f"{axis.name}_stop",
    )
    if main.begin == "0":
        lines.insert(0, f"{names.begin} = 0")
    if main.end == axis.length:
        lines.insert(0, f"{names.end} = {axis.length}")
    if main.has_full and main.full_begin == "0":
        lines.append("full_begin = 0")
    if union.behind:
        lines.append(f"{names.stop} = tl.cdiv(tl.maximum({names.end}, {names.begin}), {axis.block}) * {axis.block}")
    assert union.other is not None
    ranges = [names]
    if union.before:
        lines.append("# What the mask's other range adds before these.")
        found, more = _clipped(union.other, "2", emitter, axis, "0", names.begin)
        lines += more
        ranges.insert(0, found)
    if union.behind:
        lines.append(f"# What the mask's other range adds behind {'them' if union.before else 'these'}.")
        found, more = _clipped(union.other, "3", emitter, axis, names.stop, axis.length)
        lines += more
        ranges.append(found)
    jumps: list[tuple[str, str]] = []
    full_jumps: list[tuple[str, str]] = []
    for i, r in enumerate(ranges):
        if r.full_begin != r.begin:
            jumps.append((r.full_begin, r.full_end))
        if i + 1 < len(ranges):
            jumps.append((r.stop, ranges[i + 1].begin))
            full_jumps.append((r.full_end, ranges[i + 1].full_begin))
    has_full = main.has_full or union.other.has_full
    return BoundsText(
        statements=lines,
        begin=ranges[0].begin,
        end=ranges[-1].end if ranges[-1] is not names else f"tl.maximum({names.end}, {names.begin})",
        full_begin=ranges[0].full_begin,
        full_end=ranges[-1].full_end,
        has_full=has_full,
        jumps=[Jump(at=at, by=f"{to} - {at}") for at, to in jumps],
        full_jumps=[Jump(at=at, by=f"{to} - {at}") for at, to in full_jumps] if has_full else (),
    )


def _clipped(r: Range, number: str, emitter: Emitter, axis: _Axis, low: str, high: str) -> tuple[_Names, list[str]]:
    """A range between two others' edges, `low` and `high`; empty where it does not reach beyond them.

    `high` may lie behind the axis, as where a range begins that is empty in this call: the length cuts it, too.
    """
    size = axis.block
    names = _Names(
        begin=f"{axis.name}_begin_{number}",
        end=f"{axis.name}_end_{number}",
        full_begin=f"full_begin_{number}" if r.has_full else f"{axis.name}_begin_{number}",
        full_end=f"full_end_{number}" if r.has_full else f"{axis.name}_begin_{number}",
        stop=f"{axis.name}_stop_{number}",
    )
    first = _text(emitter, r.first, axis) if r.first is not None else "0"
    aligned = f"{_factor(first)} // {size} * {size}" if first != "0" else "0"
    begin = aligned if low == "0" else low if aligned == "0" else f"tl.maximum({aligned}, {low})"
    inside = high if high == axis.length else f"tl.minimum({high}, {axis.length})"
    end = inside if r.end is None else f"tl.minimum({_text(emitter, r.end, axis)}, {high})"
    lines = [f"{names.begin} = {begin}", f"{names.end} = tl.maximum({end}, {names.begin})"]
    if low == "0" or (r.has_full and r.full_first is not None):  # of the last range, only its full blocks ask for it
        lines.append(f"{names.stop} = tl.cdiv({names.end}, {size}) * {size}")
    if r.has_full:
        full_first = names.begin
        if r.full_first is not None:
            full_first = (
                f"tl.cdiv({_text(emitter, expr.maximum(r.full_first, int_var(names.begin)), axis)}, {size}) * {size}"
            )
            full_first = f"tl.minimum({full_first}, {names.stop})"
        full_end = names.end if r.full_end is None else f"tl.minimum({_text(emitter, r.full_end, axis)}, {high})"
        lines.append(f"{names.full_begin} = {full_first}")
        lines.append(f"{names.full_end} = tl.maximum({_factor(full_end)} // {size} * {size}, {names.full_begin})")
    return names, lines
