"""Schedules: lists of blocks made once, for calls of one size, give what a call makes for itself."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import golden
from bench.golden import Inputs
from bench.peers import make_schedule
from generated._runtime import torch_schedule
from generated._runtime.checks import ArgumentError

from .cases import DEVICE, VARIANTS, Shape, draw, evaluate, tiles, variants_where

LISTED = variants_where(golden.has_lists)
SHAPE = Shape(q_len=150, kv_len=200, batch=2, dim=16)
CONFIG = tiles(32, 16)


def _schedule(variant: str, inputs: Inputs, **options: Any) -> Any:
    return make_schedule(golden.load_op(variant), inputs, **options)


def test_some_variants_have_schedules() -> None:
    assert {"document", "natten"} <= set(LISTED) < set(VARIANTS)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("variant", LISTED)
def test_a_schedule_changes_no_bit(variant: str, backward: bool) -> None:
    inputs = draw(variant, SHAPE)
    schedule = _schedule(variant, inputs, config=CONFIG, backward=backward)
    assert schedule.nbytes > 0
    got = evaluate(variant, inputs, config=CONFIG, schedule=schedule)
    for name, want in evaluate(variant, inputs, config=CONFIG).items():
        assert torch.equal(got[name], want), name


@pytest.mark.parametrize("variant", LISTED)
def test_counted_lists_are_those_with_room_of_their_own(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a size lists are counted before they are filled; each then has just the room it needs."""
    inputs = draw(variant, SHAPE)
    roomy = _schedule(variant, inputs, config=CONFIG)
    monkeypatch.setattr(torch_schedule, "DENSE_ENTRIES", 0)
    exact = _schedule(variant, inputs, config=CONFIG)
    assert exact.nbytes < roomy.nbytes
    for spans, entries, exact_spans, exact_entries in zip(
        *(x.tables[i::2] for x in (roomy, exact) for i in (0, 1)), strict=True
    ):
        assert _lists(spans, entries) == _lists(exact_spans, exact_entries)
        begin, partial_end, full_begin, end = exact_spans.reshape(-1, 4).unbind(1)
        assert torch.equal(partial_end, full_begin)
        assert torch.equal(begin[1:], end[:-1])


def _lists(spans: torch.Tensor, entries: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    """Partial and full blocks of each list."""
    rows = spans.reshape(-1, 4).tolist()
    return [(entries[a:b].tolist(), entries[c:d].tolist()) for a, b, c, d in rows]


@pytest.mark.parametrize("variant", LISTED)
def test_a_schedule_of_another_call_is_refused(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    schedule = _schedule(variant, inputs, config=CONFIG)
    shorter = draw(variant, replace(SHAPE, q_len=90))
    with pytest.raises(ArgumentError, match=f"{variant}: schedule: expected one made for q length 90, got .* 150"):
        evaluate(variant, shorter, config=CONFIG, schedule=schedule)
    with pytest.raises(ArgumentError, match=r"schedule: expected one made for q_offset 7, got .* 0"):
        evaluate(variant, inputs, config=CONFIG, schedule=schedule, q_offset=7)
    with pytest.raises(
        ArgumentError, match=r"schedule: expected one made for fwd blocks of 64 by 64, .* got .* 32 by 16"
    ):
        evaluate(variant, inputs, config=tiles(64, 64), schedule=schedule)
    with pytest.raises(ArgumentError, match=f"schedule: expected what {variant}.schedule"):
        evaluate(variant, inputs, schedule=schedule.tables)


def test_a_schedule_of_another_op_is_refused() -> None:
    schedule = _schedule("natten", draw("natten", SHAPE), config=CONFIG)
    with pytest.raises(ArgumentError, match=r"expected one made by document.schedule, got one made by natten.schedule"):
        evaluate("document", draw("document", SHAPE), config=CONFIG, schedule=schedule)


def test_a_schedule_checks_its_arguments() -> None:
    inputs = draw("document", SHAPE)
    op: Any = golden.load_op("document")
    with pytest.raises(ArgumentError, match=r"document: doc: expected a torch.Tensor of shape"):
        op.schedule(inputs.q, inputs.k, inputs.v)
    with pytest.raises(ArgumentError, match=r"document: doc: expected dtype int32"):
        op.schedule(inputs.q, inputs.k, inputs.v, doc=inputs.tensors["doc"].float())


def test_schedules_in_a_graph() -> None:
    """Traced, the lists are made inside the operator, or given to it."""
    inputs = draw("document", SHAPE)
    op: Any = golden.load_op("document")
    schedule = _schedule("document", inputs)

    def call(q: torch.Tensor, schedule: Any) -> torch.Tensor:
        o: torch.Tensor = op(q, inputs.k, inputs.v, doc=inputs.tensors["doc"], schedule=schedule)
        return o

    want = call(inputs.q, None)
    for given in (None, schedule):
        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(inputs.q, given), want)


def test_on_the_cpu_a_schedule_is_empty() -> None:
    support = importlib.import_module("generated.document.torch_op")
    if DEVICE != "cpu":
        pytest.skip("a GPU makes lists")
    inputs = draw("document", SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "runs_reference", lambda q: True)
        schedule = _schedule("document", inputs)
        assert schedule.tables == ()
        assert schedule.nbytes == 0
        evaluate("document", inputs, schedule=schedule)
