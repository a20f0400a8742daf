"""Context parallelism: ranks drop what one GPU drops, and sums over ranks are rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan
from tests.support.ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

HEADS = (8, 2)


def drawn(variant: str, seq: int, dtype: torch.dtype = torch.float32) -> calls.Inputs:
    shape = calls.Shape(batch=2, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=32)
    return calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=dtype, device="cpu")


def kept(op: Any, ranks: int, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The pairs that keep their probability in one call and in calls over ranks. v is a unit matrix: o shows them."""
    seq = 70
    inputs = drawn("causal_dropout", seq)
    q, k = inputs.q.detach(), inputs.k.detach()
    v = torch.eye(seq).expand(2, 2, seq, seq).contiguous()
    call: dict[str, Any] = {"dropout_p": 0.5, "seed": 11, "dropout_origin": (1, 8, 24)}

    def of_rank(comm: ThreadRank) -> Tensor:
        layout = plan(op, comm, seq=seq, heads=HEADS, head_dim=32, **options)
        o = context_parallel(op, layout)(*(layout.shard(x, 2) for x in (q, k, v)), **call)
        return layout.unshard(o, 2) != 0

    return op(q, k, v, **call) != 0, run_ranks(ranks, of_rank)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("balance", ["work", "contiguous"])
def test_ranks_drop_what_one_gpu_drops(balance: str, head_groups: int, ranks: int) -> None:
    """The heads are a part of all heads, as under tensor parallelism, and the rows begin anywhere."""
    op = calls.load_op("causal_dropout")
    for strategy in ("gather", "exchange", "ring"):
        groups = {} if strategy == "ring" else {"head_groups": head_groups}
        want, found = kept(op, ranks, strategy=strategy, balance=balance, **groups)
        assert 0.4 < want.float().sum() / (2 * 8 * 70 * 71 / 2) < 0.6
        assert all(torch.equal(x, want) for x in found)
    want, found = kept(op, ranks, strategy="heads")
    assert all(torch.equal(x, want) for x in found)


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The mean error of dk and dv."""
    return {name: (found[name].double() - exact[name]).abs().mean().item() for name in ("dk", "dv")}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["gather", "exchange", "heads", "ring"])
def test_dk_and_dv_are_as_exact_as_those_of_one_call(strategy: str, ranks: int) -> None:
    """The error in bfloat16 is at most 1.1 times that of one call: parts are added up in float32.

    For a ring only dv is compared: a ring computes dk from the rounded o, as kernels do, but autograd does not round o.
    """
    inputs = drawn("causal", 256, torch.bfloat16)
    op = calls.load_op("causal")
    want = calls.evaluate(op, inputs)
    reference = calls.load_reference("causal")
    exact = calls.evaluate(reference, replace(inputs.double(), dlse=inputs.dlse.double()))
    one = errors(want, exact)

    def of_rank(comm: ThreadRank) -> dict[str, Tensor]:
        layout = plan(op, comm, seq=256, heads=HEADS, head_dim=32, strategy=strategy)
        leaves = [layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        o, lse = context_parallel(op, layout)(*leaves, return_lse=True)
        given = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
        found = torch.autograd.grad((o, lse), leaves, given)
        return {f"d{name}": layout.unshard(x, 2) for name, x in zip("qkv", found, strict=True)}

    found = errors(run_ranks(ranks, of_rank)[0], exact)
    if strategy == "ring":
        del found["dk"]
    for name, error in found.items():
        assert error <= 1.1 * one[name], f"{name}: {error / one[name]:.2f} times"
