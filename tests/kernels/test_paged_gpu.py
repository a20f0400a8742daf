"""Captured in a CUDA graph: calls on paged caches and dense calls that split their keys, with other values replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from tests.kernels.test_paged import LEGAL, Case, draw_case
from tests.kernels.test_paged_dense import SHAPE, drawn
from tests.support.cases import DEVICE
from tests.support.waiting import without_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch"),
]
CHANGES = ((64, 0, 1, 70, 3), (70, 0, 1, 133, 64), (1, 0, 0, 2, 0))


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of a step, warmed up on a stream of its own, as torch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def check_replays(case: Case, step: Callable[[], tuple[Tensor, ...]]) -> None:
    """Replays of a step with other lengths, and with each sequence on other pages."""
    lengths, table = case.kwargs["kv_lengths"], case.kwargs["page_table"]
    graph, results = captured(step)
    for number, change in enumerate(CHANGES):
        lengths.copy_(torch.tensor(change))
        if number == 1:
            # Sequence 3 moves to pages of its own.
            pages = case.k.shape[0]
            table[3].copy_(table[3].flip(0).clamp(0, pages - 1))
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
@pytest.mark.parametrize("queries", [(1,) * 5, (5, 0, 1, 40, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize("variant", LEGAL)
def test_pages(variant: str, queries: tuple[int, ...], planned: bool) -> None:
    """The plan of a step is captured with it: two layers share it."""
    case = draw_case(variant, 16, queries)
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    op: Any = golden.load_op(variant)

    def step() -> tuple[Tensor, ...]:
        plan = op.plan(case.q, case.k, **case.own, **case.kwargs) if planned else None
        first = case.call(schedule=plan)
        return (*first, *case.call(schedule=plan, scale=0.1))

    check_replays(case, step)


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
def test_dense_keys(planned: bool) -> None:
    inputs = drawn("causal")
    op: Any = golden.load_op("causal")
    lengths = torch.tensor([SHAPE.keys, 30], dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"q_offset": "end", "kv_lengths": lengths}

    def step() -> tuple[Tensor, ...]:
        plan = op.plan(inputs.q, inputs.k, **options) if planned else None
        found: tuple[Tensor, ...] = inputs.call(op, return_lse=True, schedule=plan, **options)
        return found

    graph, results = captured(step)
    for change in ([1, 0], [130, 257], [SHAPE.keys, SHAPE.keys]):
        lengths.copy_(torch.tensor(change))
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)


def test_nothing_waits_for_the_device() -> None:
    case = draw_case("document", 16, (5, 0, 1, 40, 2))
    op: Any = golden.load_op("document")
    case.call()
    with without_waiting():
        plan = op.plan(case.q, case.k, **case.kwargs)
        case.call(schedule=plan)
        case.call()
