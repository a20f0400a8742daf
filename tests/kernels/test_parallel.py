"""Kernels under context parallelism: rows on several ranks get the same bits as in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.testing.calls import BOUND, Shape, draw_inputs, evaluate, load_manifest, load_op, load_reference
from generated.torch_parallel import context_parallel, plan
from tests.support.cases import DEVICE
from tests.support.ranks import ThreadRank, run_ranks

SEQ = 256
HEADS = (2, 1)
MORE_HEADS = (4, 2)
"""For ranks that have heads of their own."""


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [
        ("causal", "heads"),
        ("window", "gather"),
        ("alibi", "gather"),
        ("window", "exchange"),
        ("causal_dropout", "heads"),
        ("causal_dropout", "gather"),
        ("causal_dropout", "exchange"),
    ],
)
def test_o_and_lse_have_the_bits_of_one_call(variant: str, strategy: str) -> None:
    """Gradients too, except on a GPU: there autograd has one thread for all ranks of a process."""
    heads = MORE_HEADS if strategy == "heads" else HEADS
    shape = Shape(batch=1, heads=heads[0], kv_heads=heads[1], seq=SEQ, dim=16)
    inputs = draw_inputs(load_manifest()[variant], shape, dtype=torch.float16, device=DEVICE)
    op, has_gradients = load_op(variant), DEVICE == "cpu"
    whole, lse = inputs.call(op, return_lse=True)
    names = ("q", "k", "v") if strategy == "heads" else ("q",)
    leaves = [getattr(inputs, name) for name in names]
    want = {"o": whole, "lse": lse}
    if has_gradients:
        found = torch.autograd.grad(whole, leaves, inputs.do)
        want |= {f"d{name}": x for name, x in zip(names, found, strict=True)}
    scalars: dict[str, Any] = dict(inputs.scalars)

    def of_rank(comm: ThreadRank) -> dict[str, torch.Tensor]:
        layout = plan(
            op, comm, seq=SEQ, heads=heads, head_dim=16, strategy=strategy, balance="zigzag", head_groups=1, **scalars
        )
        own = {name: x.detach() for name, x in inputs.tensors.items()}
        parts = {name: layout.shard(getattr(inputs, name).detach(), 2).requires_grad_() for name in ("q", "k", "v")}
        o, lse = context_parallel(op, layout)(**parts, **own, **scalars, return_lse=True)
        got = {"o": o.detach(), "lse": lse.detach()}
        if has_gradients:
            found = torch.autograd.grad(o, [parts[name] for name in names], layout.shard(inputs.do, 2))
            got |= {f"d{name}": x for name, x in zip(names, found, strict=True)}
        return {name: layout.unshard(x, 2) for name, x in got.items()}

    for got in run_ranks(2, of_rank):
        for name, wanted in want.items():
            assert torch.equal(got[name], wanted), name


@pytest.mark.parametrize(
    ("variant", "ranks"), [("gpt_oss", 2), ("chunked", 2), ("forgetting", 2), ("causal_dropout", 2)]
)
def test_a_ring_merges_the_parts_of_kernels(variant: str, ranks: int) -> None:
    merges_parts(variant, ranks, SEQ)


def test_a_ring_merges_parts_that_compute_with_the_number_of_keys(library: str) -> None:
    merges_parts("log_n", 2, 100, library)


def merges_parts(variant: str, ranks: int, seq: int, package: str = "generated") -> None:
    """Check o, lse and all gradients against one call. Each part is rounded to float16 once, dk and dv at their end."""
    shape = Shape(batch=1, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=16)
    inputs = draw_inputs(load_manifest(package)[variant], shape, dtype=torch.float16, device=DEVICE)
    op, scalars = load_op(variant, package), dict[str, Any](inputs.scalars)
    want = evaluate(op, inputs)

    def of_rank(comm: ThreadRank) -> dict[str, torch.Tensor]:
        layout = plan(op, comm, seq=seq, heads=HEADS, head_dim=16, strategy="ring", balance="zigzag", **scalars)
        parts = {name: layout.shard(getattr(inputs, name).detach(), 2).requires_grad_() for name in ("q", "k", "v")}
        own = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in inputs.tensors.items()}
        o, lse = context_parallel(op, layout)(**parts, **own, **scalars, return_lse=True)
        got = {"o": o.detach(), "lse": lse.detach()}
        if DEVICE == "cpu":
            leaves = parts | {name: x for name, x in own.items() if x.requires_grad}
            given = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
            found = torch.autograd.grad((o, lse), list(leaves.values()), given)
            got |= {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
        whole = ("o", "lse", "dq", "dk", "dv")
        return {name: layout.unshard(x, 2) if name in whole else x for name, x in got.items()}

    for got in run_ranks(ranks, of_rank):
        for name, x in got.items():
            error = (x.double() - want[name].double()).abs().max() / want[name].double().abs().max()
            assert error < 2 * BOUND[torch.float16], f"{name}: {error:.1e}"


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU autograd has one thread for all ranks of a process")
@pytest.mark.parametrize("strategy", ["gather", "ring"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_dk_and_dv_are_as_exact_as_those_of_one_call(ranks: int, strategy: str) -> None:
    """At most 1.1 times the mean error of one call, because ranks send their parts in float32."""
    shape = Shape(batch=1, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=16)
    inputs, op = draw_inputs(load_manifest()["causal"], shape, dtype=torch.float16, device=DEVICE), load_op("causal")
    exact, one = evaluate(load_reference("causal"), inputs.double()), evaluate(op, inputs)

    def of_rank(comm: ThreadRank) -> dict[str, torch.Tensor]:
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=16, strategy=strategy)
        leaves = [layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        o, lse = context_parallel(op, layout)(*leaves, return_lse=True)
        given = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2)
        found = torch.autograd.grad((o, lse), leaves, given)
        return {f"d{name}": layout.unshard(x, 2) for name, x in zip("qkv", found, strict=True)}

    got = run_ranks(ranks, of_rank)[0]
    for name in ("dk", "dv"):
        error, of_one = ((x[name].double() - exact[name]).abs().mean() for x in (got, one))
        assert error <= 1.1 * of_one, f"{name}: {error / of_one:.2f} times"
