"""The text of a loop's bounds: which blocks a program visits, and which of them need no mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.blocks import BlockAnalysis, Range, Schedule
from codegen.emit import Emitter
from codegen.expr import Expr


@dataclass(frozen=True, kw_only=True)
class BoundsText:
    """Statements that compute the bounds, and the names (or literals) a loop header uses.

    Without `masked` only a cut last block is partial. `begins_partial`: the mask cuts blocks before the full ones;
    `two_sided`: behind them too. Without `has_full` every block is partial.
    """

    statements: Sequence[str]
    begin: str
    end: str
    full_begin: str
    full_end: str
    has_full: bool
    masked: bool
    begins_partial: bool
    two_sided: bool


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Names along the loop: its variable prefix, block size, length, and what turns a position into a row."""

    name: str
    block: str
    length: str
    shift: str


def key_bounds(analysis: BlockAnalysis, emitter: Emitter) -> BoundsText:
    """Bounds of the keys for `BLOCK_M` query rows that start at `start_m`."""
    block = ["q_first = start_m + q_shift", "q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift"]
    axis = _Axis(name="kv", block="BLOCK_N", length="kv_len", shift="")
    return _bounds(analysis.keys, emitter, axis, block, analysis.schedule)


def query_bounds(analysis: BlockAnalysis, emitter: Emitter) -> BoundsText:
    """Bounds of the query rows for `BLOCK_N` keys that start at `start_n`. Rows are positions less the query offset."""
    block = ["kv_first = start_n", "kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1"]
    axis = _Axis(name="row", block="BLOCK_M", length="q_len", shift=" - q_shift")
    return _bounds(analysis.queries, emitter, axis, block, analysis.schedule)


def _bounds(r: Range, emitter: Emitter, axis: _Axis, block: list[str], schedule: Schedule) -> BoundsText:
    begin, full_begin, full_end = f"{axis.name}_begin", "full_begin", "full_end"
    end = f"{axis.name}_end" if r.end or r.conditions else axis.length
    texts = _Texts(emitter, axis)
    lines: list[str] = []
    if r.first:
        first = texts.extreme("tl.maximum", r.first, "0")
        lines.append(f"{begin} = {first} // {axis.block} * {axis.block}")
    if end != axis.length:
        lines.append(f"{end} = {texts.extreme('tl.minimum', r.end, axis.length)}")
    lines += [f"{end} = tl.where({text} >= 0, {end}, 0)" for text in texts.each(r.conditions)]
    if r.has_full:
        lines += _full_lines(r, texts, axis, begin if r.first else "0", end)
    used = " ".join(lines)
    prelude = [line for line in block if line.split(" = ")[0] in used]
    return BoundsText(
        statements=[*prelude, *lines],
        begin=begin if r.first else "0",
        end=end,
        full_begin=full_begin if r.first else "0",
        full_end=full_end,
        has_full=r.has_full,
        masked=schedule is not Schedule.DENSE,
        begins_partial=r.has_full and bool(r.first),
        two_sided=r.has_full and bool(r.first) and bool(r.full_end or r.full_conditions),
    )


def _full_lines(r: Range, texts: _Texts, axis: _Axis, begin: str, end: str) -> list[str]:
    lines = [f"# Blocks {'from full_begin to' if r.first else 'before'} full_end need no mask."]
    if r.first:
        first = texts.extreme("tl.maximum", r.full_first, begin)
        lines.append(f"full_begin = tl.cdiv({first}, {axis.block}) * {axis.block}")
        last = f"tl.cdiv(tl.maximum({end}, {begin}), {axis.block}) * {axis.block}"
        lines.append(f"full_begin = tl.minimum(full_begin, {last})")
    bound = texts.extreme("tl.minimum", r.full_end, axis.length)
    least = "full_begin" if r.first else "0"
    lines.append(f"full_end = {bound} // {axis.block} * {axis.block}")
    lines += [f"full_end = tl.where({text} >= 0, full_end, 0)" for text in texts.each(r.full_conditions)]
    if r.first or r.full_end:
        lines.append(f"full_end = tl.maximum(full_end, {least})")
    return lines


class _Texts:
    def __init__(self, emitter: Emitter, axis: _Axis) -> None:
        self.emitter = emitter
        self.axis = axis

    def each(self, exprs: Sequence[Expr]) -> list[str]:
        return self.emitter.uniform(exprs)

    def extreme(self, function: str, exprs: Sequence[Expr], last: str) -> str:
        """The tightest of several bounds, each turned from a position into a row."""
        text = last
        for bound in reversed(self.emitter.uniform(exprs)):
            text = f"{function}({bound}{self.axis.shift}, {text})"
        return text
