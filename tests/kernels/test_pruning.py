"""`prune=` through the kernels: it acts as a mask, and without a decay it gives the same bits as the plain call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.core.pruning import GROUP
from generated._runtime.torch.pruning import first_keys
from tests.support.cases import DTYPES, FRAMEWORKS, Shape, draw, evaluate, tiles
from tests.support.judge import check_results
from tests.support.packings import Packing, draw_packed

pytestmark = pytest.mark.covers(family="portable", dtype="float16")

SHAPE = Shape(q_len=400, kv_heads=2, group=2, dim=16)
PACKED = Packing.of(300, 301, 720)
PRUNE = 2**-24
CONFIG = tiles(64, 64)


def with_decay(g: Tensor, rate: float) -> Tensor:
    """Log-decays that are strong for all heads except the last, which has 1/100 of the rate."""
    rates = torch.full((g.shape[-1],), rate, device=g.device)
    rates[-1] = rate / 100
    return (-rates * (0.5 + torch.rand(g.shape, device=g.device))).to(g.dtype).requires_grad_()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dense_calls_have_the_whole_call_s_accuracy(framework: str) -> None:
    inputs = draw("forgetting", SHAPE, DTYPES[0])
    inputs = replace(inputs, tensors={"g": with_decay(inputs.tensors["g"], 1.5)})
    q, k, g = inputs.q, inputs.k, inputs.tensors["g"]
    first = first_keys("forgetting", q, k, k, g, PRUNE)
    assert (first[:, :-1, 2 * GROUP :] > 0).all()
    got = evaluate("forgetting", inputs, framework=framework, prune=PRUNE, config=CONFIG)
    check_results("forgetting", inputs, got)


def test_packed_calls_have_the_whole_call_s_accuracy() -> None:
    inputs = draw_packed("forgetting", PACKED, DTYPES[0], kv_heads=1, group=2, dim=16)
    inputs = replace(inputs, tensors={"g": with_decay(inputs.tensors["g"], 1.5)})
    options: dict[str, Any] = PACKED.options()
    got = evaluate("forgetting", inputs, prune=PRUNE, config=CONFIG, **options)
    check_results("forgetting", inputs, got, **options)


@pytest.mark.parametrize("packing", [None, PACKED], ids=["dense", "packed"])
def test_without_a_decay_bits_are_those_of_the_plain_call(packing: Packing | None) -> None:
    options: dict[str, Any] = {} if packing is None else packing.options()
    if packing is None:
        inputs = draw("forgetting", SHAPE, DTYPES[0])
    else:
        inputs = draw_packed("forgetting", packing, DTYPES[0], dim=16)
    inputs = replace(inputs, tensors={"g": torch.zeros_like(inputs.tensors["g"]).requires_grad_()})
    plain = evaluate("forgetting", inputs, config=CONFIG, **options)
    pruned = evaluate("forgetting", inputs, prune=PRUNE, config=CONFIG, **options)
    for name, x in plain.items():
        if name == "dg":
            # Compiled, the portable kernels of both variants sum columns in different orders.
            torch.testing.assert_close(pruned[name], x)
        else:
            assert torch.equal(x, pruned[name]), name
