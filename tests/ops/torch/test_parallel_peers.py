"""Calls whose ranks copy from each other's memory: they bring what collectives bring, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated._runtime.core.checks import ArgumentError
from generated.torch_parallel import context_parallel, plan
from tests.support.ranks import ThreadPeer, ThreadRank, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

HEADS, DIM = (8, 4), 16


def results(
    variant: str, *, strategy: str, layout: str, batch: int, ranks: int, groups: int, ends: list[int] | None, seq: int
) -> list[list[list[Tensor]]]:
    """o, lse and gradients of each rank, by collectives and by copies."""
    shape = calls.Shape(batch=1 if ends else batch, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=DIM)
    entry = calls.load_manifest()[variant]
    inputs = calls.draw_inputs(entry, shape, dtype=torch.float32, device="cpu")
    inputs = calls.packed(entry, inputs) if ends else inputs
    op, scalars = calls.load_op(variant), dict[str, Any](inputs.scalars)
    axis = 0 if ends else 1 if layout == "bshd" else 2

    def of_rank(comm: ThreadRank) -> list[Tensor]:
        planned = plan(
            op,
            comm,
            seq=seq,
            heads=HEADS,
            head_dim=DIM,
            strategy=strategy,
            cu_seqlens=ends,
            head_groups=groups,
            **scalars,
        )

        def local(x: Tensor) -> Tensor:
            x = x.detach() if axis != 1 else x.detach().transpose(1, 2)
            return planned.shard(x, axis).contiguous()

        q, k, v = (local(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        form = {} if ends else {"layout": layout}
        own = {name: x.detach() for name, x in inputs.tensors.items()}
        o, lse = context_parallel(op, planned)(q, k, v, **own, **scalars, **form, return_lse=True)
        dlse = planned.shard(inputs.dlse.detach(), inputs.dlse.dim() - 1)
        finite = torch.where(torch.isinf(lse), 0.0, lse)
        loss = (o * local(inputs.do)).sum() + (finite * dlse).sum()
        found = [o.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))]
        if isinstance(comm, ThreadPeer) and strategy != "gather":
            assert "deliver" in comm.calls
            assert not {"all_to_all", "exchange"} & set(comm.calls)
        return found

    return [run_ranks(ranks, of_rank, kind) for kind in (ThreadRank, ThreadPeer)]


def check_same(want: list[list[Tensor]], got: list[list[Tensor]]) -> None:
    for of_rank, other in zip(want, got, strict=True):
        for x, y in zip(of_rank, other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (2, 64), (1, 61), (2, 61)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (2, 2), (4, 1)])
def test_heads_are_the_same_by_copies(ranks: int, groups: int, layout: str, batch: int, seq: int) -> None:
    given: dict[str, Any] = {"layout": layout, "batch": batch, "ranks": ranks, "groups": groups, "seq": seq}
    check_same(*results("gpt_oss", strategy="heads", ends=None, **given))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ends", [None, [0, 20, 41, 97, 130, 137, 200], [0, 150, 170, 200], [0, 3, 200]])
def test_needed_keys_are_the_same_by_copies(ends: list[int] | None, groups: int, ranks: int) -> None:
    for variant in ("causal", "window"):
        check_same(
            *results(
                variant, strategy="exchange", layout="bhsd", batch=2, ranks=ranks, groups=groups, ends=ends, seq=200
            )
        )


@pytest.mark.parametrize(
    ("transport", "text"),
    [("nccl", "transport: expected 'auto' or 'peers' or 'group', got 'nccl'"), ("peers", "no NVIDIA GPUs")],
)
def test_a_transport_that_there_is_not_is_refused(transport: str, text: str) -> None:
    def of_rank(comm: ThreadRank) -> None:
        op = calls.load_op("causal")
        context_parallel(op, plan(op, comm, seq=64, heads=HEADS, head_dim=DIM), transport=transport)

    with pytest.raises(ArgumentError, match=text):
        run_ranks(2, of_rank)
