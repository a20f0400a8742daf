"""The bounds of a kernel's loop: which blocks a program visits, and which of them need no mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from codegen.analysis.call_modes import Mode
from codegen.analysis.ranges import Range, Union
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Type, const, int_var
from codegen.plan.code.lower import Lowering
from codegen.plan.code.statements import Assign, Comment, Statement, assign, uses
from codegen.plan.code.tree import ATOM, ZERO, Cast, Code, Group, Infix, Literal, Name, builtin, is_zero, product, total


@dataclass(frozen=True, kw_only=True)
class Jump:
    """A gap that a loop over several ranges steps over: at the row or key `at` the loop skips `by` rows or keys."""

    at: Code
    by: Code


@dataclass(frozen=True, kw_only=True)
class LoopBounds:
    """Statements that compute the bounds, and the code that a loop header uses.

    If not `masked`, only a cut last block is partial. `begins_partial`: the mask cuts blocks before the full ones;
    `two_sided`: after them too. If not `has_full`, every block is partial. If there are two ranges, the loops over
    partial and over full blocks take the `jumps` and `full_jumps`. `lists`: the blocks are read from lists.
    """

    statements: Sequence[Statement] = ()
    begin: Code = ZERO
    end: Code
    full_begin: Code = ZERO
    full_end: Code
    has_full: bool = True
    masked: bool = True
    begins_partial: bool = False
    two_sided: bool = False
    jumps: Sequence[Jump] = ()
    full_jumps: Sequence[Jump] = ()
    lists: bool = False

    @property
    def begins_at_zero(self) -> bool:
        """True if the first visited block is block 0."""
        return is_zero(self.begin)

    @property
    def full_from_zero(self) -> bool:
        """True if the full blocks begin at block 0."""
        return is_zero(self.full_begin)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Names along the loop: the prefix of its bounds, its block size and length."""

    prefix: str
    block: Name
    length: Name

    def name(self, bound: str) -> Name:
        return Name(f"{self.prefix}_{bound}")

    def rounded_down(self, code: Code) -> Code:
        """The start of the block that holds a row or key."""
        return product(Infix("//", code, self.block), self.block)

    def rounded_up(self, code: Code) -> Code:
        return product(builtin("cdiv", code, self.block), self.block)


_KEYS = _Axis(prefix="kv", block=Name("BLOCK_N"), length=Name("kv_len"))
_ROWS = _Axis(prefix="row", block=Name("BLOCK_M"), length=Name("q_len"))


def _last(start: str, block: str, length: str) -> Code:
    """The last row or key of a block."""
    end = Infix("+", Name(start), Name(block))
    return Infix("-", builtin("minimum", end, Name(length)), Literal(1))


def key_bounds(analysis: BlockAnalysis, lowering: Lowering) -> LoopBounds:
    """Bounds of the keys for `BLOCK_M` query rows that start at `start_m`."""
    return _bounds(analysis, analysis.keys, lowering, _KEYS, _query_ends())


def _query_ends() -> list[Assign]:
    """The positions of the first and the last row of a block of query rows."""
    shift = Name("q_shift")
    return [
        assign("q_first", Infix("+", Name("start_m"), shift)),
        assign("q_last", Infix("+", _last("start_m", "BLOCK_M", "q_len"), shift)),
    ]


def split_bounds(union: Union, lowering: Lowering) -> LoopBounds:
    """Bounds of the keys for the queries from position `q_first` to `q_last`; each block may need the mask."""
    main = replace(union.main, full_first=None, full_end=None, has_full=False)
    bounds = _one_range(main, lowering, _KEYS, Schedule.CLOSED_FORM)
    if union.other is None:
        return bounds
    other = replace(union.other, full_first=None, full_end=None, has_full=False)
    return _two_ranges(replace(union, main=main, other=other), bounds, lowering, _KEYS)


def full_bounds(union: Union, lowering: Lowering) -> LoopBounds | None:
    """The bounds of `split_bounds`, and of the full blocks inside; None if there are no full blocks, or two ranges."""
    if union.other is not None or not union.main.has_full:
        return None
    return _one_range(union.main, lowering, _KEYS, Schedule.CLOSED_FORM)


def seen_keys(r: Range, lowering: Lowering) -> list[Assign]:
    """Statements that find the keys `[first_seen, end_seen)`, which some of the `BLOCK_M` query rows from `start_m` on
    see. The range is not rounded to blocks. `end_seen` is 0 if no key is seen."""
    first, end = Name("first_seen"), Name("end_seen")
    found = [
        assign(first.name, ZERO if r.first is None else _bound(lowering, r.first, _KEYS)),
        assign(end.name, _KEYS.length if r.end is None else _bound(lowering, r.end, _KEYS)),
    ]
    if r.first is not None:
        found.append(assign(end.name, builtin("where", Infix("<", first, end), end, ZERO)))
    read = uses(found)
    return [*(statement for statement in _query_ends() if statement.target in read), *found]


def query_bounds(analysis: BlockAnalysis, lowering: Lowering) -> LoopBounds:
    """Bounds of the query rows for `BLOCK_N` keys that start at `start_n`."""
    block = [assign("kv_first", Name("start_n")), assign("kv_last", _last("start_n", "BLOCK_N", "kv_len"))]
    return _bounds(analysis, analysis.queries, lowering, _ROWS, block)


def _bounds(
    analysis: BlockAnalysis, union: Union, lowering: Lowering, axis: _Axis, block: Sequence[Assign]
) -> LoopBounds:
    if analysis.schedule is Schedule.RANGES:
        return _ranged(analysis, lowering, axis)
    if analysis.schedule is Schedule.LISTS:
        return _listed(analysis, lowering, axis)
    bounds = _one_range(union.main, lowering, axis, analysis.schedule)
    if union.other is not None:
        bounds = _two_ranges(union, bounds, lowering, axis)
    read = uses(bounds.statements)
    prelude = [statement for statement in block if statement.target in read]
    return replace(bounds, statements=[*prelude, *bounds.statements])


def _loaded(targets: tuple[str, str], table: str, first: int, factor: Name | None = None) -> Assign:
    """The statement that loads two of a program's four numbers, those at `first` and `first + 1`."""
    places = [Infix("+", Name(table), Literal(i)) if i else Name(table) for i in (first, first + 1)]
    values = [builtin("load", place) for place in places]
    scaled = tuple(value if factor is None else product(value, factor) for value in values)
    return Assign(targets=targets, values=scaled, level=Level.UNIFORM, type=Type.INT)


def _ranged(analysis: BlockAnalysis, lowering: Lowering, axis: _Axis) -> LoopBounds:
    """Bounds from a block's four numbers: begin and end of the visited and of the full blocks, counted in blocks."""
    begin, end = axis.name("begin"), axis.name("end")
    return LoopBounds(
        statements=[
            Comment("Of the blocks this one visits, those from full_begin to full_end need no mask."),
            assign("block_range", _table_row(analysis, lowering, axis, "ranges")),
            _loaded((begin.name, "full_begin"), "block_range", 0, axis.block),
            _loaded(("full_end", end.name), "block_range", 2, axis.block),
        ],
        begin=begin,
        end=end,
        full_begin=Name("full_begin"),
        full_end=Name("full_end"),
        begins_partial=True,
        two_sided=True,
    )


def _table_row(analysis: BlockAnalysis, lowering: Lowering, axis: _Axis, table: str) -> Code:
    """The pointer to a program's four numbers in a table `[B, H, blocks, 4]`, packed `[H, entries, 4]`."""
    start, block = ("start_m", "BLOCK_M") if axis is _KEYS else ("start_n", "BLOCK_N")
    own: Code = Infix("//", Name(start), Name(block))
    head = [product(Name("h"), Name(f"stride_{table}_h"))] if analysis.tables_per_head else []
    batch = [product(Name("b"), Name(f"stride_{table}_b"))]
    if lowering.mode is Mode.PACKED:
        own, batch = total([Name("first_entry"), own]), []
    return total([Name(f"{table}_ptr"), *batch, *head, product(own, Literal(4))])


def _listed(analysis: BlockAnalysis, lowering: Lowering, axis: _Axis) -> LoopBounds:
    """Bounds from a block's four numbers: its list holds partial blocks from the left and full ones from the right."""
    return LoopBounds(
        statements=[
            Comment("The list of this block: partial blocks from the left, full ones from the right."),
            assign("span", _table_row(analysis, lowering, axis, "spans")),
            _loaded(("list_begin", "partial_end"), "span", 0),
            _loaded(("full_begin", "list_end"), "span", 2),
        ],
        begin=Name("list_begin"),
        end=Name("partial_end"),
        full_begin=Name("full_begin"),
        full_end=Name("list_end"),
        lists=True,
    )


def _one_range(r: Range, lowering: Lowering, axis: _Axis, schedule: Schedule) -> LoopBounds:
    """The bounds of one range, by which of its limits are given.

    | `first` | `full_first` | blocks before the full ones |
    |---|---|---|
    | None | None | none: visited and full blocks begin at 0 |
    | None | given | partial ones from 0 on |
    | given | either | partial ones from `first` on |

    `end` and `full_end` are the length if they are None, and never beyond it (`Range`).
    """
    begin: Code = ZERO if r.first is None else axis.name("begin")
    end = axis.length if r.end is None else axis.name("end")
    statements: list[Statement] = []
    if r.first is not None:
        statements.append(assign(axis.name("begin").name, axis.rounded_down(_bound(lowering, r.first, axis))))
    if r.end is not None:
        statements.append(assign(end.name, _bound(lowering, r.end, axis)))
    if r.has_full:
        statements += _full_statements(r, lowering, axis, begin, end)
    begins_partial = r.has_full and r.has_partial_start
    return LoopBounds(
        statements=statements,
        begin=begin,
        end=end,
        full_begin=Name("full_begin") if r.has_partial_start else ZERO,
        full_end=Name("full_end"),
        has_full=r.has_full,
        masked=schedule is not Schedule.DENSE,
        begins_partial=begins_partial,
        two_sided=begins_partial and (r.end is not None or r.full_end is not None),
    )


def _full_statements(r: Range, lowering: Lowering, axis: _Axis, begin: Code, end: Name) -> list[Statement]:
    cut = r.has_partial_start
    found: list[Statement] = [Comment(f"Blocks {'from full_begin to' if cut else 'before'} full_end need no mask.")]
    full_begin, full_end = Name("full_begin"), Name("full_end")
    if cut:
        lowest = int_var(begin.name) if isinstance(begin, Name) else const(0)
        first = expr.maximum(r.full_first or const(0), lowest)
        found.append(assign("full_begin", axis.rounded_up(_bound(lowering, first, axis))))
        last = axis.rounded_up(builtin("maximum", end, begin))
        found.append(assign("full_begin", builtin("minimum", full_begin, last)))
    bound: Code = end if r.full_end is None else _bound(lowering, r.full_end, axis)
    found.append(assign("full_end", axis.rounded_down(_factor(bound))))
    if cut or bound != axis.length:
        found.append(assign("full_end", builtin("maximum", full_end, full_begin if cut else ZERO)))
    return found


def _factor(code: Code) -> Code:
    """A bound that is divided stands in parentheses, unless it is a name or a call."""
    return Group(code) if isinstance(code, Literal) or code.strength < ATOM else code


def _bound(lowering: Lowering, e: Expr, axis: _Axis) -> Code:
    """A bound in 32 bits, like coordinates of TMA copies: a bound from a 64-bit tensor is clamped to the axis."""
    (code,) = lowering.own_shape([e])
    if all(lowering.tensors[load.tensor].dtype != "int64" for load in expr.loads(e)):
        return code
    return Cast(builtin("minimum", builtin("maximum", code, ZERO), axis.length), "int32")


# ----------------------------------------------------------------------------------------------------------- two ranges


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The bounds of one of several ranges; `stop` is the end of its last block."""

    begin: Name
    end: Name
    full_begin: Name
    full_end: Name
    stop: Name


@dataclass
class _Joined:
    """The statements of two ranges, as they are gathered, and the bounds of the parts in ascending order."""

    statements: list[Statement]
    ranges: list[_Names] = field(default_factory=list)


def _two_ranges(union: Union, main: LoopBounds, lowering: Lowering, axis: _Axis) -> LoopBounds:
    """The main range, and the parts of the other range before and after it: ascending and disjoint."""
    assert union.other is not None
    begin, end, stop = axis.name("begin"), axis.name("end"), axis.name("stop")
    names = _Names(
        begin=begin,
        end=end,
        full_begin=Name("full_begin") if main.has_full else begin,
        full_end=Name("full_end") if main.has_full else begin,
        stop=stop,
    )
    joined = _Joined(statements=list(main.statements), ranges=[names])
    if main.begins_at_zero:
        joined.statements.insert(0, assign(begin.name, ZERO))
    if main.end == axis.length:
        joined.statements.insert(0, assign(end.name, axis.length))
    if main.has_full and main.full_from_zero:
        joined.statements.append(assign("full_begin", ZERO))
    if union.behind:
        joined.statements.append(assign(stop.name, axis.rounded_up(builtin("maximum", end, begin))))
    if union.before:
        joined.statements.append(Comment("What the mask's other range adds before these."))
        joined.ranges.insert(0, _clipped(joined, union.other, "2", lowering, axis, ZERO, begin))
    if union.behind:
        joined.statements.append(Comment(f"What the mask's other range adds behind {_which(union)}."))
        joined.ranges.append(_clipped(joined, union.other, "3", lowering, axis, stop, axis.length))
    has_full = main.has_full or union.other.has_full
    ranges, last = joined.ranges, joined.ranges[-1]
    return LoopBounds(
        statements=joined.statements,
        begin=ranges[0].begin,
        end=last.end if last is not names else builtin("maximum", end, begin),
        full_begin=ranges[0].full_begin,
        full_end=last.full_end,
        has_full=has_full,
        jumps=_jumps(ranges),
        full_jumps=_full_jumps(ranges) if has_full else (),
    )


def _which(union: Union) -> str:
    return "them" if union.before else "these"


def _jump(at: Name, to: Name) -> Jump:
    return Jump(at=at, by=Infix("-", to, at))


def _jumps(ranges: Sequence[_Names]) -> list[Jump]:
    """The gaps between partial blocks: the full blocks of each range, and what lies between two ranges."""
    found = []
    for i, r in enumerate(ranges):
        if r.full_begin != r.begin:
            found.append(_jump(r.full_begin, r.full_end))
        if i + 1 < len(ranges):
            found.append(_jump(r.stop, ranges[i + 1].begin))
    return found


def _full_jumps(ranges: Sequence[_Names]) -> list[Jump]:
    """The gaps between the full blocks of one range and those of the next."""
    return [_jump(r.full_end, following.full_begin) for r, following in pairwise(ranges)]


def _clipped(joined: _Joined, r: Range, number: str, lowering: Lowering, axis: _Axis, low: Code, high: Name) -> _Names:
    """A range cut to what lies between two edges, `low` and `high`; empty if nothing of it does.

    `high` may lie beyond the axis, if it is the start of a range that is empty in this call. So the length cuts the
    range, too.
    """
    begin, end, stop = (Name(f"{axis.prefix}_{bound}_{number}") for bound in ("begin", "end", "stop"))
    names = _Names(
        begin=begin,
        end=end,
        full_begin=Name(f"full_begin_{number}") if r.has_full else begin,
        full_end=Name(f"full_end_{number}") if r.has_full else begin,
        stop=stop,
    )
    first = ZERO if r.first is None else _bound(lowering, r.first, axis)
    start = first if is_zero(first) else axis.rounded_down(_factor(first))
    if not is_zero(low):
        start = low if is_zero(start) else builtin("maximum", start, low)
    inside = high if high == axis.length else builtin("minimum", high, axis.length)
    limit = inside if r.end is None else builtin("minimum", _bound(lowering, r.end, axis), high)
    found: list[Statement] = [assign(begin.name, start), assign(end.name, builtin("maximum", limit, begin))]
    if is_zero(low) or (r.has_full and r.full_first is not None):  # in the last range, only full blocks read it
        found.append(assign(stop.name, axis.rounded_up(end)))
    if r.has_full:
        full_first: Code = begin
        if r.full_first is not None:
            least = _bound(lowering, expr.maximum(r.full_first, int_var(begin.name)), axis)
            full_first = builtin("minimum", axis.rounded_up(least), stop)
        full_end = end if r.full_end is None else builtin("minimum", _bound(lowering, r.full_end, axis), high)
        rounded = axis.rounded_down(_factor(full_end))
        found.append(assign(names.full_begin.name, full_first))
        found.append(assign(names.full_end.name, builtin("maximum", rounded, names.full_begin)))
    joined.statements += found
    return names
