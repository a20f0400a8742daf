"""Context parallelism under torch.compile: whole graphs, with the gradients of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from codegen.testing import calls
from generated.torch_parallel import context_parallel, plan
from tests.support.operators import OperatorCall, check_operators
from tests.support.ranks import ThreadRank, grid_of, run_ranks

HEADS, DIM, SEQ = (4, 2), 16, 48


def graphs_of(kept: list[Any]) -> Any:
    """A backend that keeps the graphs it is given, of the forward and of the backward, and runs them as they are."""

    def kept_as_is(graph: Any, _examples: Any) -> Any:
        kept.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=kept_as_is, bw_compiler=kept_as_is)


def running(ran: list[OperatorCall]) -> Any:
    """A backend that runs graphs, and keeps the calls of operators that compute over ranks."""

    class Interpreter(torch.fx.Interpreter):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "context_parallel" in str(target):
                ran.append((target, args))
            return super().call_function(target, args, kwargs)

    def interpreted(graph: Any, _examples: Any) -> Any:
        return make_boxed_func(Interpreter(graph).run)

    return aot_autograd(fw_compiler=interpreted, bw_compiler=interpreted)


def operators(graph: Any) -> list[str]:
    """The operators of a graph that compute over ranks, and the collectives."""
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.partition(".")[2] for name in called if "context_parallel" in name or "c10d" in name]


@pytest.fixture(autouse=True)
def _forget_graphs() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [("alibi", "gather"), ("gpt_oss", "ring"), ("forgetting", "heads"), ("window", "exchange"), ("band_bias", "2d")],
)
def test_a_call_is_one_operator_of_each_pass(variant: str, strategy: str) -> None:
    """With `fullgraph=True` o, lse and all gradients have the bits of an eager call."""
    shape = calls.Shape(batch=2, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=DIM)
    inputs = calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=torch.float32, device="cpu")
    op: Any = calls.load_op(variant)
    scalars: dict[str, Any] = dict(inputs.scalars)
    kept: list[Any] = []
    backend = graphs_of(kept)
    ids = torch.arange(SEQ, dtype=torch.int32).expand(2, -1) // 20

    def of_rank(comm: ThreadRank) -> None:
        mesh = grid_of(comm, 2) if strategy == "2d" else comm
        layout = plan(op, mesh, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, **scalars)
        call = context_parallel(op, layout)
        leaves = {name: layout.shard(getattr(inputs, name).detach(), 2).requires_grad_() for name in ("q", "k", "v")}
        own = {
            name: (layout.shard(x.detach(), 1) if name == "g" else x.detach().clone()).requires_grad_(x.requires_grad)
            for name, x in inputs.tensors.items()
        }
        trained = [x for x in (*leaves.values(), *own.values()) if x.requires_grad]
        do, dlse, local_ids = layout.shard(inputs.do, 2), layout.shard(inputs.dlse, 2), layout.shard(ids, 1)

        def loss(scale: float) -> Any:
            given: dict[str, Any] = {"q_segment_ids": local_ids} if variant != "forgetting" else {}
            o, lse = call(**leaves, **own, **scalars, **given, scale=scale, return_lse=True)
            return (o * do).sum() + (torch.where(torch.isinf(lse), 0.0, lse) * dlse).sum()

        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        for scale in (0.25, 0.5):
            want = torch.autograd.grad(loss(scale), trained)
            for x, y in zip(torch.autograd.grad(compiled(scale), trained), want, strict=True):
                assert torch.equal(x, y)

    run_ranks(4 if strategy == "2d" else 2, of_rank)
    assert {tuple(operators(graph)) for graph in kept} == {
        ("context_parallel_fwd.default",),
        ("context_parallel_bwd.default",),
    }


@pytest.mark.parametrize(
    ("variant", "strategy"), [("alibi", "gather"), ("gpt_oss", "ring"), ("forgetting", "heads"), ("window", "exchange")]
)
def test_opcheck(variant: str, strategy: str) -> None:
    shape = calls.Shape(batch=2, heads=HEADS[0], kv_heads=HEADS[1], seq=SEQ, dim=DIM)
    inputs = calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=torch.float32, device="cpu")
    op: Any = calls.load_op(variant)
    scalars: dict[str, Any] = dict(inputs.scalars)

    def of_rank(comm: ThreadRank) -> None:
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy=strategy, **scalars)
        call: Any = context_parallel(op, layout)
        leaves = [layout.shard(x.detach(), 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        own = {name: x.detach().requires_grad_(x.requires_grad) for name, x in inputs.tensors.items()}
        ran: list[OperatorCall] = []
        compiled = torch.compile(lambda: call(*leaves, **own, **scalars), fullgraph=True, backend=running(ran))
        compiled().sum().backward()
        assert [func.name().partition("::")[2] for func, _ in ran] == ["context_parallel_fwd", "context_parallel_bwd"]
        check_operators(ran)

    run_ranks(2, of_rank)


def test_a_bad_call_is_an_error_of_every_rank() -> None:
    """A compiled function checks arguments when its first call runs."""

    def of_rank(comm: ThreadRank) -> str:
        op = calls.load_op("causal")
        call = context_parallel(op, plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather"))
        q, k = torch.zeros(1, 4, SEQ // 2 - comm.rank, DIM), torch.zeros(1, 2, SEQ // 2 - comm.rank, DIM)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            torch.compile(lambda q, k: call(q, k, k), fullgraph=True, backend="eager")(q, k)
        return str(caught.value)

    first, second = run_ranks(2, of_rank)
    assert "causal: rank 1 raised ArgumentError: causal: q: expected 24 rows" in first
    assert "causal: q: expected 24 rows" in second


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"q_offset": 3}, "causal_dropout: q_offset: expected None over several ranks"),
        ({"dropout_p": 0.5}, "causal_dropout: seed: expected a seed over several ranks"),
        ({"scale": float("nan")}, "causal_dropout: scale: expected a finite number or None, got nan"),
        ({"rows": 30}, "causal_dropout: q: expected 24 rows"),
    ],
)
def test_every_call_is_checked(keywords: dict[str, Any], text: str) -> None:
    """Also the compiled calls after a first call."""

    def of_rank(comm: ThreadRank) -> str:
        op = calls.load_op("causal_dropout")
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
        call, given = context_parallel(op, layout), dict(keywords)
        call(*(torch.zeros(1, heads, SEQ // 2, DIM) for heads in (4, 2, 2)), dropout_p=0.0)
        q, k = (torch.zeros(1, heads, given.get("rows", SEQ // 2), DIM) for heads in HEADS)
        given.pop("rows", None)
        given = {"dropout_p": 0.0, **given}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            torch.compile(lambda q, k: call(q, k, k, **given), fullgraph=True, backend="eager")(q, k)
        return str(caught.value)

    assert all(text in message for message in run_ranks(2, of_rank))


def test_arguments_of_every_call_are_compared_if_asked_for() -> None:
    def of_rank(comm: ThreadRank) -> str:
        op = calls.load_op("causal")
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather")
        call = context_parallel(op, layout, check=True)
        q, k = (torch.zeros(1, heads, SEQ // 2, DIM) for heads in HEADS)
        compiled = torch.compile(lambda scale: call(q, k, k, scale=scale), fullgraph=True, backend="eager")
        compiled(1.0)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            compiled(1.0 + comm.rank)
        return str(caught.value)

    text = "causal: scale: expected the same on every rank, 1.0 as on rank 0, got 2.0 on rank 1"
    assert all(text in message for message in run_ranks(2, of_rank))


def test_seeds_share_a_graph() -> None:
    """The first seed may have a graph of its own; each call drops what an eager call drops."""
    op = calls.load_op("causal_dropout")
    kept: list[Any] = []
    layout = plan(op, 1, seq=SEQ, heads=HEADS, head_dim=DIM)
    call, q, k = context_parallel(op, layout), torch.randn(1, 4, SEQ, DIM), torch.randn(1, 2, SEQ, DIM)
    attend = torch.compile(
        lambda seed: call(q, k, k, dropout_p=0.5, seed=seed), fullgraph=True, backend=graphs_of(kept)
    )
    for seed in (7, 8, 9, 2**63 - 1):
        assert torch.equal(attend(seed), call(q, k, k, dropout_p=0.5, seed=seed))
    assert len(kept) <= 2


def test_gradients_have_no_gradient() -> None:
    def of_rank(comm: ThreadRank) -> None:
        op = calls.load_op("causal")
        call = context_parallel(op, plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather"))
        q, k = torch.rand(1, 4, SEQ // 2, DIM, requires_grad=True), torch.rand(1, 2, SEQ // 2, DIM)
        (dq,) = torch.autograd.grad(call(q, k, k).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="context_parallel: second derivatives"):
            torch.autograd.grad(dq.sum(), q)

    run_ranks(2, of_rank)


def test_a_graph_serves_every_layout_of_the_same_sizes() -> None:
    """For example layouts of each batch's documents: the first layout has a separate graph, all others share one."""
    op, comm = calls.load_op("causal"), 1
    q, k = torch.rand(1, 4, SEQ, DIM), torch.rand(1, 2, SEQ, DIM)
    kept: list[Any] = []

    def attend(call: Any, q: Tensor, k: Tensor) -> Tensor:
        found: Tensor = call(q, k, k)
        return found

    compiled = torch.compile(attend, fullgraph=True, backend=graphs_of(kept))
    for length in (8, 12, 16, 24, 30):
        ids = torch.arange(SEQ) // length
        layout = plan(op, comm, seq=SEQ, heads=HEADS, head_dim=DIM, strategy="gather", segment_ids=ids)
        call = context_parallel(op, layout)
        assert torch.equal(compiled(call, q, k), call(q, k, k))
    assert len(kept) <= 2
