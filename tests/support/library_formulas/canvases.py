"""Masks of canvases, images and video."""

from __future__ import annotations

from functools import cache

import torch

from tests.support.library_formulas.draws import normal
from tests.support.library_formulas.formula import BATCH, HEADS, POSITIONS, Grid, Result, variant


@cache
def _neighbours(width: int, height: int, kernel: int, x: int, y: int) -> set[tuple[int, int]]:
    """The pixels that pixel (x, y) of a canvas sees: a full window, moved inside where it would reach over an edge."""

    def window(centre: int, length: int) -> range:
        first = min(max(centre - kernel // 2, 0), length - kernel)
        return range(first, first + kernel)

    return {(u, v) for u in window(x, width) for v in window(y, height)}


@variant(q_len=50, kv_len=140, q_offset=70)
def sasa(g: Grid) -> Result:
    places = [(n % 20, n // 20) for n in range(POSITIONS * 2)]
    return g.each(lambda i, j: max(abs(a - b) for a, b in zip(places[i], places[j], strict=True)) <= 3), g.s


@variant(q_len=50, kv_len=96, q_offset=30, width=12, height=8, kernel_size=5)
def natten_canvas(g: Grid) -> Result:
    return g.each(lambda i, j: divmod(j, 12)[::-1] in _neighbours(12, 8, 5, i % 12, i // 12)), g.s


@variant(q_len=60, kv_len=240, q_offset=100)
def natten_tiled(g: Grid) -> Result:
    corners = [(x, y) for y in range(0, 12, 4) for x in range(0, 20, 4)]
    pixels = [(x + u, y + v) for x, y in corners for v in range(4) for u in range(4)]
    return g.each(lambda i, j: pixels[j] in _neighbours(20, 12, 5, *pixels[i])), g.s


@variant(q_len=60, kv_len=280)
def natten_morton(g: Grid) -> Result:
    """The keys from 256 on lie behind the canvas: no query sees them."""
    pixels = [(int(f"{n:010b}"[1::2], 2), int(f"{n:010b}"[0::2], 2)) for n in range(280)]
    return g.each(lambda i, j: pixels[j] in _neighbours(16, 16, 5, *pixels[i])), g.s


@variant(q_len=98, kv_len=98, bias=normal(HEADS, 169))
def swin(g: Grid) -> Result:
    def entry(i: int, j: int) -> int:
        (y, x), (v, u) = divmod(i % 49, 7), divmod(j % 49, 7)
        return (y - v + 6) * 13 + (x - u + 6)

    return g.each(lambda i, j: i // 49 == j // 49), g.s + g.own["bias"][:, g.each(entry)]


@variant(size=9, q_offset=20)
def block_causal(g: Grid) -> Result:
    return g.each(lambda i, j: j < (i // g.own["size"] + 1) * g.own["size"]), g.s


@variant(image=lambda: torch.tensor([[-1] * 5 + [0] * 20 + [-1] * 3 + [1] * 68, [2] * 30 + [-1] * 66]).int())
def transfusion(g: Grid) -> Result:
    def holds(image: list[int], i: int, j: int) -> bool:
        return j <= i or (image[i] != -1 and image[i] == image[j])

    return g.each_by_row("image", holds), g.s


@variant(
    q_len=60,
    kv_len=33,
    size=10,
    start=lambda: torch.tensor([[3, 20, 20, 50], [0, 0, 70, 10]]).int(),
    stop=lambda: torch.tensor([[20, 40, 50, 60], [30, 60, 80, 44]]).int(),
)
def flamingo(g: Grid) -> Result:
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b in range(BATCH):
        for image in range(4):
            start, stop = int(g.own["start"][b, image]), int(g.own["stop"][b, image])
            keep[b, :, start:stop, image * 10 : image * 10 + 10] = True
    return keep, g.s
