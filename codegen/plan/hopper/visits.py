"""The blocks that a program of a Hopper kernel visits, as two loops whose lengths are known ahead.

The warps of a program walk over the same blocks side by side, so each computes for itself how many there are and where
each one starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen.ir.expr import Level, Type
from codegen.plan.code.loop_bounds import Jump, LoopBounds
from codegen.plan.code.statements import Assign, Statement, assign
from codegen.plan.code.tree import ZERO, Builtin, Cast, Code, Infix, Name, builtin, is_zero, product

NTH = Name("nth")
"""The counter of a loop over blocks."""


def visit_counts(bounds: LoopBounds, block: str, *, always: bool = False) -> list[Statement]:
    """Statements that compute `num_partial` and `num_full`: how many blocks are visited with the mask, and without.

    `block` is the name of the block size. `always`: `num_full` is defined even if no block is full.
    """
    found, size = list(bounds.statements), Name(block)
    if bounds.lists:
        lengths = (_difference(bounds.end, bounds.begin), _difference(bounds.full_end, bounds.full_begin))
        both = Assign(targets=("num_partial", "num_full"), values=lengths, level=Level.UNIFORM, type=Type.INT)
        return [*found, both]
    found += [assign(f"gap_{i}", jump.by) for i, jump in enumerate(bounds.jumps, 1)]
    if bounds.jumps:
        found.append(assign("last", _without_gaps(bounds.end, "gap", len(bounds.jumps))))
        length = _difference(Name("last"), bounds.begin)
    elif bounds.two_sided or bounds.begins_partial:
        found.append(assign("gap", _difference(bounds.full_end, bounds.full_begin)))
        length = _difference(_difference(bounds.end, Name("gap")), bounds.begin)
    else:
        length = _difference(bounds.end, bounds.full_end if bounds.has_full else bounds.begin)
    found.append(assign("num_partial", builtin("maximum", builtin("cdiv", length, size), ZERO)))
    return found + _full_count(bounds, size, always=always)


def _full_count(bounds: LoopBounds, size: Code, *, always: bool) -> list[Statement]:
    found: list[Statement] = [assign(f"full_gap_{i}", jump.by) for i, jump in enumerate(bounds.full_jumps, 1)]
    if bounds.full_jumps:
        found.append(assign("last_full", _without_gaps(bounds.full_end, "full_gap", len(bounds.full_jumps))))
        length = _difference(Name("last_full"), bounds.full_begin)
        return [*found, assign("num_full", builtin("cdiv", length, size))]
    if bounds.has_full:
        length = bounds.full_end if bounds.full_from_zero else _difference(bounds.full_end, bounds.full_begin)
        return [assign("num_full", Infix("//", length, size))]
    return [assign("num_full", ZERO)] if always else []


def partial_start(bounds: LoopBounds, start: str, block: str, i: Code = NTH) -> list[Assign]:
    """Statements that set `start` to where the i-th block with the mask starts."""
    if bounds.lists:
        return _listed(bounds.begin, bounds.end, start, block, i)
    if bounds.jumps:
        return [_step(bounds.begin, start, block, i), *_skips(bounds.jumps, start, "gap")]
    if bounds.two_sided or bounds.begins_partial:
        here = Name(start)
        behind = Infix("+", here, Name("gap"))
        skip = assign(start, builtin("where", Infix("<", here, bounds.full_begin), here, behind))
        return [_step(bounds.begin, start, block, i), skip]
    return [_step(bounds.full_end if bounds.has_full else bounds.begin, start, block, i)]


def full_start(bounds: LoopBounds, start: str, block: str, i: Code = NTH) -> list[Assign]:
    """Statements that set `start` to where the i-th block without the mask starts."""
    if bounds.lists:
        found = _listed(bounds.full_begin, bounds.full_end, start, block, i)
    elif bounds.full_from_zero:
        found = [assign(start, ZERO if is_zero(i) else product(i, Name(block)))]
    else:
        found = [_step(bounds.full_begin, start, block, i)]
    return [*found, *_skips(bounds.full_jumps, start, "full_gap")]


def _difference(a: Code, b: Code) -> Code:
    return Infix("-", a, b)


def _without_gaps(end: Code, gap: str, count: int) -> Code:
    for i in range(1, count + 1):
        end = _difference(end, Name(f"{gap}_{i}"))
    return end


def _step(begin: Code, start: str, block: str, i: Code) -> Assign:
    return assign(start, begin if is_zero(i) else Infix("+", begin, product(i, Name(block))))


def _skips(jumps: Sequence[Jump], start: str, gap: str) -> list[Assign]:
    """Statements that step over the gaps ahead of a block."""
    found, here = [], Name(start)
    for i, jump in enumerate(jumps, 1):
        by = builtin("where", Infix(">=", here, jump.at), Name(f"{gap}_{i}"), ZERO)
        found.append(assign(start, Infix("+", here, by)))
    return found


def _listed(begin: Code, end: Code, start: str, block: str, i: Code) -> list[Assign]:
    """The i-th entry of a list; block 0 behind the end of the list, which is read if the list is empty."""
    entry = Name("list_entry")
    pointer = Infix("+", Name("block_list_ptr"), entry)
    load = Builtin("load", (pointer,), (("mask", Infix("<", entry, end)), ("other", ZERO)))
    place = begin if is_zero(i) else Infix("+", begin, i)
    return [assign("list_entry", place), assign(start, product(Cast(load, "int32"), Name(block)))]
