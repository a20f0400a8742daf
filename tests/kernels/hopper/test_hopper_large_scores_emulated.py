"""Probabilities of large scores in Hopper's backward, without a GPU, with products that lose digits as on tensor cores.

A backward computes scores again, and their probabilities from the lse of the forward. An error of a score that the
forward did not make becomes a relative error of a probability, and scores in the thousands have few fractional digits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from emulator import Timing
from tests.kernels.hopper.test_hopper_backward_emulated import WIDE, emulate_backward
from tests.support.cases import Shape, draw

TERMS = 16
"""The number of products that one instruction adds to a sum."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="backward", dtype="float16", framework="torch"),
]


def cut_product(a: Tensor, b: Tensor, before: Tensor | None) -> Tensor:
    """`a @ b + before` in the arithmetic of tensor cores: an instruction shifts its terms and the previous sum to the
    largest exponent, truncates them after the 25th digit, and truncates the new sum to float32 (arXiv:2512.07004)."""
    sums = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64) if before is None else before.double()
    for start in range(0, a.shape[1], TERMS):
        stop = start + TERMS
        terms = a[:, start:stop, None].double() * b[None, start:stop].double()
        terms = torch.cat([terms, sums[:, None]], 1)
        largest = terms.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        digit = torch.exp2(torch.floor(torch.log2(largest)) - 24)
        cut = torch.where(largest.isinf(), terms, torch.trunc(terms / digit) * digit)
        sums = _cut(cut.sum(1)).double()
    return sums.float()


def _cut(x: Tensor) -> Tensor:
    """x in float32, rounded toward zero."""
    rounded = x.float()
    return torch.where(rounded.double().abs() > x.abs(), torch.nextafter(rounded, torch.zeros(())), rounded)


@pytest.mark.parametrize(
    ("variant", "stem", "dim", "magnitude"),
    [
        ("full", "hopper_bwd", 64, 100.0),
        ("full", "hopper_bwd", 128, 100.0),
        ("full", WIDE, 256, 100.0),
        ("band_mask", "hopper_bwd", 64, 100.0),
        # Terms of rows, keys and blocks. The forward cuts a score once more, when it adds a key's term by a product: of
        # scores of 45000, at 100, the probabilities are 7.9e-4 too large.
        ("alibi", "hopper_bwd", 64, 70.0),
        ("forgetting", "hopper_bwd", 64, 100.0),
    ],
)
def test_probabilities_of_a_row_sum_to_one(
    monkeypatch: pytest.MonkeyPatch, variant: str, stem: str, dim: int, magnitude: float
) -> None:
    """If do is 1, dv is the sum of a key's probabilities. Its sum over all keys is the number of rows."""
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, stem=stem)
    monkeypatch.setattr("emulator.device.multiply", cut_product)
    inputs = draw(variant, Shape(q_len=100, dim=dim), magnitude=magnitude)
    inputs = replace(inputs, do=torch.ones_like(inputs.do))
    got = golden.evaluate(golden.load_op(variant), inputs, family="hopper", deterministic=False)
    assert kernel.launches == 1
    # Each dv is rounded to float16, with errors of both signs.
    found, rows = got["dv"][..., 0].double().sum().item(), inputs.q[..., 0].numel()
    assert abs(found / rows - 1) <= 0.5 * torch.finfo(torch.float16).eps, f"{found} for {rows} rows"
