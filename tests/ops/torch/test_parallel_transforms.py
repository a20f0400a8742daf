"""Context parallelism under `torch.func.grad` and `vmap`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from generated.torch import alibi
from generated.torch_parallel import context_parallel, plan
from tests.support.ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")

SEQ = 70


def drawn(*batch: int) -> list[Tensor]:
    """q, k, v and a weight for each element of o."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*batch, 2, heads, SEQ, 16, generator=generator) for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("strategy", ["heads", "gather", "exchange", "ring"])
def test_gradients_of_samples(strategy: str) -> None:
    """The transforms see the first call, which compares the arguments of all ranks, and later ones."""
    inputs, slope = drawn(3), torch.rand(4, generator=torch.Generator().manual_seed(1))

    def whole(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
        o: Any = alibi(q, k, v, slope=slope)
        return torch.sum(o * weight)

    def of_rank(comm: ThreadRank) -> list[Tensor]:
        layout = plan(alibi, comm, seq=SEQ, heads=(4, 2), head_dim=16, strategy=strategy)
        call = context_parallel(alibi, layout)

        def loss(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
            o, _ = call(*(layout.shard(x, dim=2) for x in (q, k, v)), slope=slope, return_lse=True)
            return (layout.unshard(o, dim=2) * weight).sum()

        of_sample: Any = torch.func.grad(loss, argnums=(0, 1, 2, 4))
        one = of_sample(*(x[0] for x in inputs), slope)
        mapped = torch.func.vmap(of_sample, in_dims=(0, 0, 0, 0, None))(*inputs, slope)
        for x, first in zip(mapped, one, strict=True):
            torch.testing.assert_close(x[0], first)
        return list(mapped)

    of_sample: Any = torch.func.grad(whole, argnums=(0, 1, 2, 4))
    wanted = torch.func.vmap(of_sample, in_dims=(0, 0, 0, 0, None))(*inputs, slope)
    ranks = run_ranks(2, of_rank)
    for of_ranks, whole_gradient in zip(zip(*ranks, strict=True), wanted[:3], strict=False):
        # The gradient of each rank is that of its own rows.
        torch.testing.assert_close(sum(of_ranks), whole_gradient, atol=1e-4, rtol=1e-4)
    for found in ranks:
        torch.testing.assert_close(found[3], wanted[3], atol=1e-3, rtol=1e-4)


def test_what_has_no_derivative() -> None:
    q, k, v, _ = drawn()

    def of_rank(comm: ThreadRank) -> None:
        layout = plan(alibi, comm, seq=SEQ, heads=(4, 2), head_dim=16)
        rows = [layout.shard(x, dim=2) for x in (q, k, v)]
        call = context_parallel(alibi, layout)

        def loss(x: Tensor) -> Any:
            return call(x, *rows[1:], slope=torch.ones(4)).square().sum()

        with pytest.raises(NotImplementedError, match=r"context_parallel\(alibi\): q: derivatives in forward mode"):
            torch.func.jvp(loss, (rows[0],), (rows[0],))
        gradient: Any = torch.func.grad(loss)
        with pytest.raises(NotImplementedError, match="context_parallel: second derivatives"):
            torch.func.grad(lambda x: gradient(x).sum())(rows[0])

    run_ranks(2, of_rank)
