"""Memory of calls over several ranks: calls keep no tensors, and a layout keeps nothing alive once it is dropped.

Garbage collection is off: it does not know how full a device's memory is, and training loops turn it off.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.peers.replayed import lone
from codegen.testing import calls
from generated._runtime.torch.parallel import exchange
from generated._runtime.torch.parallel.tape import Tape
from generated.torch_parallel import context_parallel, plan

pytestmark = pytest.mark.covers(family="reference", framework="torch")

RANKS, HEADS, DIM, SEQ = 4, (8, 4), 16, 64
STRATEGIES = ("heads", "gather", "exchange", "ring", "2d")


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    gc.freeze()  # `alive` then skips the objects of other tests and libraries, more than a million.
    yield
    gc.unfreeze()
    gc.enable()


def layout_of(strategy: str, **documents: Any) -> Any:
    mesh = lone(1, RANKS, 2 if strategy == "2d" else 0, "cpu")
    op = calls.load_op("causal")
    return plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, **documents)


def step(call: Any, layout: Any, *, trains: bool = True) -> list[weakref.ref[Tensor]]:
    """Compute a call and its backward; return weak references to the tensors of both."""
    packed = layout.cu_seqlens is not None
    sizes = [(layout.local, n, DIM) if packed else (1, n, layout.local, DIM) for n in (HEADS[0], HEADS[1], HEADS[1])]
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    o = call(*leaves)
    do = torch.ones_like(o)
    found = torch.autograd.grad(o, leaves, do) if trains else ()
    assert all(x.grad is None for x in leaves)
    return [weakref.ref(x) for x in (*leaves, o, do, *found)]


def alive() -> int:
    """How many tensors were made since the test began, and are alive."""
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def documents_of(batch: int) -> dict[str, Any]:
    return {"cu_seqlens": [0, 5 + 3 * batch, 40 + batch, SEQ]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layout_for_each_batch_keeps_nothing_of_those_before(strategy: str) -> None:
    op, counts = calls.load_op("causal"), []
    for batch in range(3):
        layout = layout_of(strategy, **documents_of(batch))
        call = context_parallel(op, layout)
        assert call is context_parallel(op, layout)
        assert call.layout == layout
        held: list[Any] = [weakref.ref(x) for x in (layout, call, layout.comm)]
        for _ in range(3):
            held += step(call, layout)
        assert [type(tape) for tape in call._tapes.values()] == [Tape, Tape]
        del layout, call
        assert not [ref() for ref in held if ref() is not None]
        counts.append(alive())
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("trains", [True, False], ids=["both passes", "no backward"])
def test_the_tensors_of_a_call_end_with_it(strategy: str, trains: bool) -> None:
    # With a document for each rank, "exchange" saves the keys of the forward for the backward.
    for documents in ({}, documents_of(0), {"cu_seqlens": [*range(0, SEQ + 1, SEQ // RANKS)]}):
        layout = layout_of(strategy, **documents)
        call = context_parallel(calls.load_op("causal"), layout)
        # The second call of a kind is recorded; from the third on the recording is replayed.
        for number in range(4):
            held = step(call, layout, trains=trains)
            assert not [ref() for ref in held if ref() is not None], f"call {number}"


def test_a_call_outlives_other_names_of_its_layout_and_shares_its_tables() -> None:
    layout = layout_of("gather", **documents_of(0))
    call = context_parallel(calls.load_op("causal"), layout)
    step(call, layout)
    assert layout.__dict__["_tables"] is call.layout.__dict__["_tables"]
    equal, before = call.layout, weakref.ref(layout)
    del layout
    assert before() is None
    step(call, equal)


def test_tables_of_a_layout_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_TABLES", 3)
    layout = layout_of("gather")
    for number in range(3):
        assert exchange.kept(layout, number, partial(list, [number])) == [number]
    assert exchange.kept(layout, 0, lambda: "made anew") == [0]
    assert exchange.kept(layout, 3, lambda: [3]) == [3]
    assert exchange.kept(layout, 0, lambda: "made anew") == "made anew"
    assert len(layout.__dict__["_tables"]) == 2
