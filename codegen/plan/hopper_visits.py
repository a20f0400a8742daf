"""The blocks that a program of a Hopper kernel visits, as two loops whose lengths are known ahead.

The warps of a program walk over the same blocks side by side, so each computes the lengths, and where a block starts, for
itself.
"""

from __future__ import annotations

from codegen.plan.gluon_source import gluon
from codegen.plan.loop_bounds import BoundsText


def counts(bounds: BoundsText, block: str, *, always: bool = False) -> list[str]:
    """Statements that compute `num_partial` and `num_full`: how many blocks are visited with the mask, and without.

    `block` is the name of the block size. `always`: `num_full` is defined even where no block is full.
    """
    lines = [gluon(line) for line in bounds.statements]
    if bounds.lists:
        lengths = f"{bounds.end} - {bounds.begin}, {bounds.full_end} - {bounds.full_begin}"
        return [*lines, f"num_partial, num_full = {lengths}"]
    lines += [f"gap_{i} = {jump.by}" for i, jump in enumerate(bounds.jumps, 1)]
    end = gluon(bounds.end)
    if bounds.jumps:
        gaps = "".join(f" - gap_{i}" for i, _ in enumerate(bounds.jumps, 1))
        lines += [f"last = {end}{gaps}", _rounded_up(f"last - {bounds.begin}", block)]
    elif bounds.two_sided or bounds.begins_partial:
        lines += [f"gap = {bounds.full_end} - {bounds.full_begin}"]
        lines += [_rounded_up(f"{end} - gap - {bounds.begin}", block)]
    else:
        lines += [_rounded_up(f"{end} - {bounds.full_end if bounds.has_full else bounds.begin}", block)]
    return lines + _full_count(bounds, block, always=always)


def _rounded_up(length: str, block: str) -> str:
    return f"num_partial = gl.maximum(gl.cdiv({length}, {block}), 0)"


def _full_count(bounds: BoundsText, block: str, *, always: bool) -> list[str]:
    lines = [f"full_gap_{i} = {jump.by}" for i, jump in enumerate(bounds.full_jumps, 1)]
    if bounds.full_jumps:
        gaps = "".join(f" - full_gap_{i}" for i, _ in enumerate(bounds.full_jumps, 1))
        lines.append(f"last_full = {bounds.full_end}{gaps}")
        return [*lines, f"num_full = gl.cdiv(last_full - {bounds.full_begin}, {block})"]
    if bounds.has_full:
        length = bounds.full_end if bounds.full_begin == "0" else f"({bounds.full_end} - {bounds.full_begin})"
        return [*lines, f"num_full = {length} // {block}"]
    return [*lines, "num_full = 0"] if always else lines


def partial_start(bounds: BoundsText, start: str, block: str, i: str) -> list[str]:
    """Statements that set `start` to where the i-th block with the mask starts."""
    if bounds.lists:
        return _listed(bounds.begin, bounds.end, start, block, i)
    if bounds.jumps:
        lines = [_step(bounds.begin, start, block, i)]
        jumps = enumerate(bounds.jumps, 1)
        return lines + [f"{start} += gl.where({start} >= {jump.at}, gap_{n}, 0)" for n, jump in jumps]
    if bounds.two_sided or bounds.begins_partial:
        skip = f"{start} = gl.where({start} < {bounds.full_begin}, {start}, {start} + gap)"
        return [_step(bounds.begin, start, block, i), skip]
    return [_step(bounds.full_end if bounds.has_full else bounds.begin, start, block, i)]


def full_start(bounds: BoundsText, start: str, block: str, i: str) -> list[str]:
    """Statements that set `start` to where the i-th block without the mask starts."""
    if bounds.lists:
        lines = _listed(bounds.full_begin, bounds.full_end, start, block, i)
    elif bounds.full_begin == "0":
        lines = [f"{start} = {f'{i} * {block}' if i != '0' else '0'}"]
    else:
        lines = [_step(bounds.full_begin, start, block, i)]
    jumps = enumerate(bounds.full_jumps, 1)
    return lines + [f"{start} += gl.where({start} >= {jump.at}, full_gap_{n}, 0)" for n, jump in jumps]


def _step(begin: str, start: str, block: str, i: str) -> str:
    return f"{start} = {begin}" + (f" + {i} * {block}" if i != "0" else "")


def _listed(begin: str, end: str, start: str, block: str, i: str) -> list[str]:
    """The i-th entry of a list; beyond its end, where no block is visited, 0."""
    entry = f"list_entry = {begin}" + (f" + {i}" if i != "0" else "")
    load = f"gl.load(block_list_ptr + list_entry, mask=list_entry < {end}, other=0).to(gl.int32)"
    return [entry, f"{start} = {load} * {block}"]
