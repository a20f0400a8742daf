"""Neighbourhood attention on an image that is stored in tiles: `python -m examples.image_tiles`.

In neighbourhood attention (Hassani et al., 2023, arXiv:2204.07143) a pixel attends to the pixels around it, 13 x 13 of
them here. If the pixels are stored row by row, the keys of 64 neighbouring queries lie in 13 strips of the sequence,
one for each row of the image, and the mask drops most scores of the blocks that a kernel visits. Stored in tiles of
8 x 8 pixels, neighbours in the image are neighbours in the sequence, and more scores of a block count (as in Hassani et
al., 2024, arXiv:2403.04690). The mask is the same in other coordinates, and the model changes in two places:

    x = to_tiles(pixels, width)        # before the first layer
    o = tiles(q, k, v)                 # in every layer, the generated op
    pixels = from_tiles(x, width)      # after the last layer

The script renders an op for each order, compares outputs and gradients of both with the formula in float64, and prints
which share of the scores in visited blocks counts. `--full` uses the image of the variant `natten`, and prints times on
a GPU. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from codegen.cli.options import at_least
from codegen.tune.timing import in_turn
from examples.rendering import render

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TILE = 8
"""Side of a tile in pixels: its 64 pixels are the rows, or the keys, of one block."""

NAMES = ("o", "dq", "dk", "dv")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error relative to the largest element: sums of float32, or 4 roundings to bfloat16."""

SPEC = """
masks:
  # A query's window of keys stays inside the image.
  near(q_x, q_y, kv_x, kv_y): >-
    abs(clamp(q_x, {half}, {width} - 1 - {half}) - kv_x) <= {half}
    and abs(clamp(q_y, {half}, {height} - 1 - {half}) - kv_y) <= {half}
variants:
  rows:
    mask: near(q_idx % {width}, q_idx // {width}, kv_idx % {width}, kv_idx // {width})
  tiles:
    mask: >-
      near(
      q_idx // 64 % {across} * 8 + q_idx % 8, q_idx // 64 // {across} * 8 + q_idx % 64 // 8,
      kv_idx // 64 % {across} * 8 + kv_idx % 8, kv_idx // 64 // {across} * 8 + kv_idx % 64 // 8)
    # As `codegen tune` measured them on an H100: the rows of a tile of the kernel are a tile of the image.
    archs:
      sm_90:
        fwd: {{64: {{block_m: 64, block_n: 16, num_warps: 4, num_stages: 2}}}}
        dkdv: {{64: {{block_m: 64, block_n: 64, num_warps: 4, num_stages: 1}}}}
        dq: {{64: {{block_m: 64, block_n: 16, num_warps: 4, num_stages: 2}}}}
"""


def to_tiles(x: Tensor, width: int) -> Tensor:
    """Reorder pixels that are stored row by row, `[..., height * width, D]`: tile by tile, and row by row in a tile."""
    lines: Tensor = x.unflatten(-2, (-1, TILE, width // TILE, TILE))  # [..., tiles down, y, tiles across, x, D]
    return lines.transpose(-4, -3).flatten(-5, -2)


def from_tiles(x: Tensor, width: int) -> Tensor:
    """The inverse of `to_tiles`."""
    lines: Tensor = x.unflatten(-2, (-1, width // TILE, TILE, TILE))  # [..., tiles down, tiles across, y, x, D]
    return lines.transpose(-4, -3).flatten(-5, -2)


def neighbours(width: int, height: int, kernel: int, device: str) -> Tensor:
    """The mask of pixels stored row by row, `[height * width, height * width]`."""
    pixel = torch.arange(width * height, device=device)
    half = kernel // 2
    x, y = pixel % width, pixel // width
    near_x = (x.clamp(half, width - 1 - half)[:, None] - x).abs() <= half
    near_y = (y.clamp(half, height - 1 - half)[:, None] - y).abs() <= half
    near: Tensor = near_x & near_y
    return near


def masked(mask: Tensor) -> Attention:
    """Attention by its formula, with a mask `[S, S]`."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        o: Tensor = scores.softmax(-1) @ v
        return o

    return attention


def counting_share(mask: Tensor) -> float:
    """Unmasked scores, as a share of all scores in blocks of 64 x 64 with at least one of them."""
    counts = mask.unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).sum((1, 3))
    return float(counts.sum() / (counts.count_nonzero() * 64 * 64))


def results(attention: Attention, inputs: tuple[Tensor, ...], do: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    o = attention(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.to(o.dtype))]


def milliseconds(attention: Attention, inputs: tuple[Tensor, ...], do: Tensor) -> tuple[float, float]:
    """Times of a forward and of a backward on the GPU."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    o = attention(q, k, v)
    times, failed = in_turn(
        {
            "forward": lambda: attention(q, k, v),
            "backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
        },
        budget_ms=150.0,
    )
    for error in failed.values():
        raise error
    return times["forward"].ms, times["backward"].ms


def main() -> int:
    """Compare; returns 0 if all results are right."""
    parser = argparse.ArgumentParser(prog="python -m examples.image_tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="use the image of `natten`, and measure times on a GPU")
    parser.add_argument("--head-dim", type=at_least(8), default=64, help="columns of a head (default: 64)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width, height, kernel, heads = (128, 128, 13, max(1, 2048 // options.head_dim)) if options.full else (64, 32, 13, 2)
    ops = render(SPEC.format(width=width, height=height, half=kernel // 2, across=width // TILE), "image_ops")

    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 1, heads, height * width, options.head_dim, device=device, dtype=dtype)
    mask = neighbours(width, height, kernel, device)
    # One head of the formula at a time, because it holds a number per pair of pixels in memory.
    parts = [
        results(masked(mask), tuple(x[:, h : h + 1].double() for x in (q, k, v)), do[:, h : h + 1].double())
        for h in range(heads)
    ]
    want = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
    print(f"{kernel} x {kernel} keys on {width} x {height} pixels, {heads} heads, D{options.head_dim}, {dtype}:")
    right = True
    for name in ("rows", "tiles"):
        in_tiles = name == "tiles"
        op: Attention = getattr(ops, name)
        inputs: tuple[Tensor, ...] = (q, k, v)
        given, seen = do, mask
        if in_tiles:
            inputs, given = tuple(to_tiles(x, width) for x in inputs), to_tiles(do, width)
            seen = to_tiles(to_tiles(mask, width).mT, width).mT
        found = results(op, inputs, given)
        found = [from_tiles(x, width) for x in found] if in_tiles else found
        errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, want, strict=True)]
        right &= all(error <= BOUND[dtype] for error in errors)
        shown = "  ".join(f"{result} {error:.1e}" for result, error in zip(NAMES, errors, strict=True))
        print(f"  {name:6} {counting_share(seen):.0%} of the computed scores count  {shown}")
        if device == "cuda":
            # A score takes 4 D operations forward, and 2.5 times as many backward.
            work = 4e-9 * heads * options.head_dim * mask.sum().item()
            for which, share, ms in zip(
                ("forward", "backward"), (1, 2.5), milliseconds(op, inputs, given), strict=True
            ):
                print(f"         {which:8} {ms:.3f} ms, {share * work / ms:.0f} TFLOP/s")
    print("All is well." if right else f"FAILED: an error is above {BOUND[dtype]:.0e}.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
