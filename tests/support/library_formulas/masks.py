"""Masks of positions alone or beside a tensor: causal and its relatives, windows and patterns."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.library_formulas.draws import chance, ints
from tests.support.library_formulas.formula import BATCH, HEADS, KV_HEADS, POSITIONS, Grid, Result, capped, variant

# --------------------------------------------------------------------------------------------- causal and its relatives


@variant(q_offset=9)
def inverse_causal(g: Grid) -> Result:
    return ~(g.j < g.i), g.s


@variant(offset=23)
def causal_offset(g: Grid) -> Result:
    return g.j - g.i <= g.own["offset"], g.s


@variant(offset=ints(31, -8))
def causal_offset_batch(g: Grid) -> Result:
    return g.j - g.i <= g.rows("offset"), g.s


def _prefix_lm(g: Grid, lengths: list[int]) -> Tensor:
    """Per batch row, `tril` with its first columns set."""
    rows = []
    for length in lengths:
        keep = g.j <= g.i
        keep[:, :length] = True
        rows.append(keep)
    return torch.stack(rows)[:, None]


@variant(length=ints(37, 5))
def prefix_lm_batch(g: Grid) -> Result:
    return _prefix_lm(g, g.own["length"].tolist()), g.s


@variant(start=ints(0, 13), stop=ints(30, 41))
def bidirectional_span(g: Grid) -> Result:
    rows = []
    for start, stop in zip(g.own["start"].tolist(), g.own["stop"].tolist(), strict=True):
        keep = g.j <= g.i
        keep[start:stop, start:stop] = True
        rows.append(keep)
    return torch.stack(rows)[:, None], g.s


@variant()
def alternating_directions(g: Grid) -> Result:
    return torch.stack([g.j <= g.i, g.j >= g.i])[:, None], g.s


@variant(order=lambda: torch.stack([torch.randperm(POSITIONS), torch.randperm(POSITIONS)]).int())
def permutation_lm(g: Grid) -> Result:
    def seen(order: list[int], i: int, j: int) -> bool:
        factorisation = sorted(range(POSITIONS), key=order.__getitem__)
        return j in factorisation[: factorisation.index(i) + 1]

    return g.each_by_row("order", seen), g.s


@variant(q_offset=25)
def gemma2_global(g: Grid) -> Result:
    return g.j <= g.i, capped(g.s, 50)


# ------------------------------------------------------------------------------------------------- windows and patterns


@variant(size=9)
def symmetric_window(g: Grid) -> Result:
    return (g.i - g.j).abs() <= g.own["size"], g.s


@variant(size=17, dilation=3)
def dilated_window(g: Grid) -> Result:
    reach = range(-g.own["size"], g.own["size"] + 1)
    return g.each(lambda i, j: j - i in reach and (j - i) % g.own["dilation"] == 0), g.s


@variant(size=6, important=chance(0.1, BATCH, POSITIONS))
def longformer(g: Grid) -> Result:
    near = (g.i - g.j).abs() <= g.own["size"]
    return near | g.of_queries("important") | g.of_keys("important"), g.s


@variant(size=8, chosen=chance(0.2, 6, 9))
def bigbird(g: Grid) -> Result:
    size, chosen = g.own["size"], g.own["chosen"].tolist()

    def holds(i: int, j: int) -> bool:
        m, n = i // size, j // size
        return abs(m - n) <= 1 or m == 0 or n == 0 or bool(chosen[m][n])

    return g.each(holds), g.s


@variant(size=8, chosen=chance(0.4, BATCH, HEADS, 6, 9))
def block_sparse(g: Grid) -> Result:
    size = g.own["size"]
    elements = g.own["chosen"].repeat_interleave(size, 2).repeat_interleave(size, 3)
    return elements[:, :, : g.s.shape[2], : g.s.shape[3]], g.s


@variant(size=16, chosen=lambda: torch.randint(-1, 6, (BATCH, KV_HEADS, 6, 4), dtype=torch.int32), q_offset=9)
def selected_blocks(g: Grid) -> Result:
    lists = g.own["chosen"].repeat_interleave(HEADS // KV_HEADS, 1)[:, :, g.i.flatten() // 16]
    named = torch.stack([(lists == j // 16).any(-1) for j in g.j.tolist()], -1)
    return named & (g.j <= g.i), g.s


@variant(stride=8, q_offset=25)
def sparse_strided(g: Grid) -> Result:
    stride = g.own["stride"]
    return g.each(lambda i, j: j <= i and (i - j < stride or j in range(i, -1, -stride))), g.s


@variant(stride=8, summary=2, q_offset=25)
def sparse_fixed(g: Grid) -> Result:
    stride, summary = g.own["stride"], g.own["summary"]
    return g.each(
        lambda i, j: j <= i and (j // stride == i // stride or j % stride in range(stride - summary, stride))
    ), g.s


@variant(size=30, dilation=3)
def longnet(g: Grid) -> Result:
    size, dilation = g.own["size"], g.own["dilation"]

    def head(h: int) -> Tensor:
        tokens = {segment + n for segment in range(0, POSITIONS, size) for n in range(h % dilation, size, dilation)}
        return g.each(lambda i, j: j <= i and i // size == j // size and {i, j} <= tokens)

    return torch.stack([head(h) for h in range(HEADS)]), g.s


@variant(size=ints(1, 5, 20, 60), q_offset=25)
def head_windows(g: Grid) -> Result:
    distance = g.i - g.j
    return (distance >= 0) & (distance <= g.heads("size") - 1), g.s


@variant(allowed=chance(0.5, BATCH, POSITIONS, POSITIONS))
def tensor_mask(g: Grid) -> Result:
    return g.own["allowed"][:, None, : g.s.shape[2], : g.s.shape[3]], g.s
