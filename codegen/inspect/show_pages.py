"""Prints which pages of a cache the last queries of a sequence read, and how the keys are split into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from codegen.arch.paged import PagedPass
from codegen.inspect.block_status import Grid, Status, counted, measured
from codegen.inspect.call import Call
from codegen.inspect.decode import TileSplits, ceil_div, split, splitting, text_of
from codegen.inspect.show import MOST_COLUMNS, can_print, facts, mask_of
from codegen.ir.evaluate import Array, evaluate
from codegen.plan.paged.kernels import is_legal, paged_plan
from codegen.spec.model import Spec, Variant
from codegen.util.errors import CodegenError
from codegen.util.text import aligned

GROUP, KV_HEADS = 4, 8
"""Heads of the call that is shown: key heads as in `explain` by default, and query heads for each."""

ARCH, HEAD_DIM = "sm_90", 128
"""The chip and the head_dim whose default tile the call runs with."""

MOST_PARTS = 8
"""Most parts of a sequence that are listed. If there are more, the first ones and the last are listed."""

UNREAD, DROPPED, PARTIAL, FULL = range(4)
_SYMBOLS, _ASCII = ".░▒█", ".-+#"
_MEANINGS = ("never read", "read, nothing kept", "some pairs kept", "all pairs kept")
_KEPT = {Status.EMPTY: DROPPED, Status.PARTIAL: PARTIAL, Status.FULL: FULL}


def report(spec: Spec, variant: Variant, call: Call, page_size: int, *, encoding: str) -> str:
    """The text of `show --pages` for the last `call.q_len` queries of a sequence of `call.kv_len` keys.

    Raises `CodegenError` for a variant without kernels on paged caches.
    """
    if not is_legal(variant):
        raise CodegenError(f"--pages: '{variant.name}' has no kernels on paged caches: it has dropout")
    arch = variant.archs.get(ARCH) or spec.archs[ARCH]
    decode, prompts = (arch.paged_tiles(each, 2)[HEAD_DIM] for each in PagedPass)
    how = splitting(decode, prompts, q_len=call.q_len, group=GROUP, kv_heads=KV_HEADS)
    tiles = split(variant, how, q_len=call.q_len, kv_len=call.kv_len, scalars=call.scalars, tensors=call.tensors)
    planned = paged_plan(variant)
    if planned is not None and planned.scans_mask:
        tiles = [looked(variant, call, tile, how.block_n) for tile in tiles]
    states = page_states(variant, call, page_size, [r for tile in tiles for r in tile.read])
    symbols = _SYMBOLS if can_print(_SYMBOLS, encoding) else _ASCII
    factor = ceil_div(len(states), MOST_COLUMNS)
    stands_for = f"  (each for {factor} pages)" if factor > 1 else ""
    queries = f"1 query at position {call.q_offset}"
    if call.q_len > 1:
        queries = f"{call.q_len} queries at positions {call.q_offset} to {call.q_offset + call.q_len - 1}"
    lines = [
        ": ".join(filter(None, (variant.name, " ".join(variant.doc.split())))),
        "",
        *facts(variant, call),
        "",
        f"{queries}, {call.kv_len} keys in {len(states)} pages of {page_size}, b = {call.b}, h = {call.h}",
        "",
        "".join(symbols[state] for state in coarse_states(states, factor)),
        "",
        "  ".join(f"{symbol} {meaning}" for symbol, meaning in zip(symbols, _MEANINGS, strict=True)) + stands_for,
        "",
        *aligned([("queries", "part", "keys", "pages"), *_parts(tiles, page_size)]),
        "",
        f"pages read   {int((states != UNREAD).sum())} of {len(states)}",
        f"tile         {how.block_m}x{how.block_n}, the default of {ARCH} at head_dim {HEAD_DIM}; {GROUP} query heads "
        f"for each of {KV_HEADS} key heads, {how.processors} multiprocessors",
    ]
    return "\n".join(lines).encode(encoding, "replace").decode(encoding)


def looked(variant: Variant, call: Call, tile: TileSplits, block_n: int) -> TileSplits:
    """A tile whose splits search the first and the last key that some row may see, and read the keys between them."""
    rows = np.arange(tile.q_first, tile.q_last + 1)[:, None]
    read = []
    for part in tile.parts:
        for r in part.ranges:
            values = call.uniform | {"q_idx": rows, "kv_idx": np.arange(r.start, r.stop)}
            kept = np.broadcast_to(evaluate(mask_of(variant), values, call.tensors), (len(rows), len(r))).any(0)
            seen = np.flatnonzero(kept)
            if len(seen):
                read.append(range(r.start + int(seen[0]) // block_n * block_n, r.start + int(seen[-1]) + 1))
    return replace(tile, read=read)


def page_states(variant: Variant, call: Call, page_size: int, read: Sequence[range]) -> Array:
    """The state of each page: not read, or how many of its pairs the mask keeps."""
    grid = Grid(call=call, block_m=call.q_len, block_n=page_size)
    kept = measured(counted(mask_of(variant), grid), grid)[0]
    states = np.full(len(kept), UNREAD)
    for r in read:
        pages = slice(r.start // page_size, ceil_div(r.stop, page_size))
        states[pages] = [_KEPT[Status(status)] for status in kept[pages]]
    return states


def coarse_states(states: Array, factor: int) -> list[int]:
    """One state for each group of `factor` pages: their common state, else partial if pairs of any page are kept."""
    found = []
    for first in range(0, len(states), factor):
        group = states[first : first + factor]
        mixed = PARTIAL if (group >= PARTIAL).any() else DROPPED
        found.append(int(group[0]) if (group == group[0]).all() else mixed)
    return found


def _parts(tiles: Sequence[TileSplits], page_size: int) -> list[tuple[str, str, str, str]]:
    rows = []
    for tile in tiles:
        queries = text_of([range(tile.q_first, tile.q_last + 1)])
        of_tile = []
        for number, part in enumerate(tile.parts):
            read = _common(part.ranges, tile.read)
            pages = [range(r.start // page_size, (r.stop - 1) // page_size + 1) for r in read]
            of_tile.append((queries, str(number), text_of(read), text_of(pages)))
        left_out = len(of_tile) > MOST_PARTS
        rows += [*of_tile[: MOST_PARTS - 1], (queries, "...", "", ""), of_tile[-1]] if left_out else of_tile
    return rows


def _common(one: Sequence[range], other: Sequence[range]) -> list[range]:
    """The intersections of both lists of ranges, in order."""
    found = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in one for b in other)
    return [r for r in found if r]
