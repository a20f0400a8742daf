"""The bytes that a plan says a rank receives, against those that its collectives bring in a forward and a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.testing.calls import load_op
from generated.torch_parallel import Layout, context_parallel, plan
from tests.support.ranks import ThreadRank, grid_of, run_ranks

SEQ, DIM = 768, 16


def received(op: str, ranks: int | tuple[int, int], heads: tuple[int, int], **options: Any) -> tuple[Layout, int]:
    """The layout, and the most bytes that a rank received in a call in bfloat16."""
    arguments = {"size": options.pop("size")} if "size" in options else {}

    def of_rank(comm: ThreadRank) -> tuple[Layout, int]:
        meshes = (comm,) if isinstance(ranks, int) else grid_of(comm, ranks[0])
        mesh = meshes[0] if len(meshes) == 1 else meshes
        layout = plan(load_op(op), mesh, seq=SEQ, heads=heads, head_dim=DIM, **options, **arguments)
        shapes = [(1, count, SEQ, DIM) for count in (heads[0], heads[1], heads[1])]
        q, k, v = (layout.shard(torch.ones(shape, dtype=torch.bfloat16), 2).requires_grad_() for shape in shapes)
        before = sum(each.received for each in meshes)
        context_parallel(load_op(op), layout, check=False)(q, k, v, **arguments).sum().backward()
        return layout, sum(each.received for each in meshes) - before

    found = run_ranks(ranks if isinstance(ranks, int) else ranks[0] * ranks[1], of_rank)
    return found[0][0], max(each for _, each in found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["heads", "gather", "ring"])
def test_a_plan_knows_the_bytes_of_a_call(strategy: str, ranks: int) -> None:
    layout, got = received("causal", ranks, (12, 12), strategy=strategy)
    assert layout.bytes_moved == got


def test_gradients_of_repeated_key_heads_are_sent_in_float32() -> None:
    layout, got = received("causal", 4, (8, 2), strategy="heads")
    assert layout.bytes_moved == got


def test_a_ring_of_a_window_ends_early() -> None:
    layout, got = received("window", 3, (4, 4), strategy="ring", size=50)
    whole, _ = received("causal", 3, (4, 4), strategy="ring")
    assert layout.bytes_moved == got < whole.bytes_moved
    assert layout.cost is not None
    assert whole.cost is not None
    assert layout.cost.exchange < whole.cost.exchange


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1), (1, 4)])
def test_the_backward_of_nodes_sends_all_tensors_again(ranks: tuple[int, int]) -> None:
    """Its q, k, v, o and lse change from rows to heads inside each node a second time."""
    layout, got = received("causal", ranks, (8, 2))
    assert layout.bytes_moved == got


@pytest.mark.parametrize("size", [50, 400])
def test_an_exchange_brings_at_most_the_planned_bytes(size: int) -> None:
    layout, got = received("window", 3, (4, 2), strategy="exchange", size=size)
    assert 0 < got <= layout.bytes_moved
