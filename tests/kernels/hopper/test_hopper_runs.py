"""Segmented calls whose segments are runs of tokens, on a Hopper GPU: the packed forward computes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from generated._runtime.core import segment_runs
from generated._runtime.kernels import TRAITS
from generated._runtime.torch.devices import arch_of
from tests.kernels.hopper.test_hopper import check_replays_and_graphs
from tests.support.cases import DEVICE, Shape, assert_same, evaluate
from tests.support.judge import check_results
from tests.support.segments import PADDING, Call, runs

VARIANTS = ("causal", "full", "window", "alibi", "softcap", "relative_bias", "gpt_oss", "gemma2_local")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.covers(mode="segmented", family="hopper", direction="forward", dtype="bfloat16", framework="torch"),
]

RISING, PADDED = runs((1, 700), (3, 20), (7, 1110)), runs((0, 300), (PADDING, 250), (4, 70), (5, 1210))
TWICE = runs((1, 700), (3, 20), (1, 1110))
CALLS = {
    "runs": Call(shape=Shape(q_len=1830, batch=2, dim=128), tokens={"q_segment_ids": [RISING, PADDED]}),
    "runs at 64 columns": Call(
        shape=Shape(q_len=1830, batch=2, kv_heads=2, group=3, dim=64), tokens={"q_segment_ids": [PADDED, RISING]}
    ),
    "groups of heads": Call(
        shape=Shape(q_len=1830, batch=2, group=4, dim=128), tokens={"q_segment_ids": [RISING, PADDED]}
    ),
    "no runs": Call(shape=Shape(q_len=1830, batch=2, kv_heads=2, dim=128), tokens={"q_segment_ids": [RISING, TWICE]}),
    "wide tiles": Call(shape=Shape(q_len=1830, dim=256, dim_v=128), tokens={"q_segment_ids": [RISING]}),
}
with_calls = pytest.mark.parametrize("name", CALLS)
with_variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(autouse=True)
def runs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if arch_of(torch.empty(0, device=DEVICE)) != "sm_90":
        pytest.skip("kernels of sm_90 alone")
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)


@with_calls
@with_variants
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_results(variant: str, name: str, framework: str, deterministic: bool) -> None:
    if deterministic and "segmented" in TRAITS[variant].atomic_modes:
        pytest.skip("gradients that are added with atomics have no fixed order")
    inputs, options = CALLS[name].inputs(variant, torch.bfloat16), CALLS[name].options()
    given: dict[str, Any] = {"framework": framework, "family": "hopper", "deterministic": deterministic, **options}
    check_results(variant, inputs, evaluate(variant, inputs, **given), **options)


@with_calls
def test_replays_and_graphs(name: str) -> None:
    drawn = partial(CALLS[name].inputs, "causal", torch.bfloat16)
    check_replays_and_graphs("causal", drawn, CALLS[name].options(), scheduled=True)


@with_calls
def test_a_schedule_gives_the_same_bits(name: str) -> None:
    op = golden.load_op("causal")
    inputs, options = CALLS[name].inputs("causal", torch.bfloat16), CALLS[name].options()
    schedule = make_schedule(op, inputs, family="hopper", **options)
    with torch.no_grad():
        want = inputs.call(op, family="hopper", **options)
        assert_same("causal", "o", inputs.call(op, family="hopper", schedule=schedule, **options), want)
