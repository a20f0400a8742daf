"""Calls on paged caches, and dense calls that split their keys, under torch.compile, torch.export and opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.testing import golden
from generated._runtime.torch import few_queries
from tests.kernels.test_paged import LEGAL, Case, draw_case
from tests.kernels.test_paged_dense import SHAPE, drawn
from tests.support.cases import DEVICE, INTERPRET
from tests.support.operators import OperatorRecorder

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
BACKEND = "aot_eager" if INTERPRET else "inductor"


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(few_queries, "LEAST_DENSE_KEYS", 256)


def told_strides(x: Tensor) -> list[int]:
    """The strides of axes with more than one element. A compiler may report any stride for other axes."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for x, wanted in zip(got, want, strict=True):
        assert torch.equal(x, wanted)
        assert (x.dtype, told_strides(x)) == (wanted.dtype, told_strides(wanted))


def arguments(case: Case) -> dict[str, Any]:
    return {"return_lse": True, **case.own, **case.kwargs}


@pytest.mark.parametrize("queries", [(1,) * 5, (5, 0, 1, 40, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize("variant", LEGAL)
def test_compiled_equals_eager(variant: str, queries: tuple[int, ...]) -> None:
    case = draw_case(variant, 16, queries)
    op: Any = golden.load_op(variant)

    def model(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        o, lse = op(q * 2, k, v, **others)
        return o * 2, lse

    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    assert_same(compiled(case.q, case.k, case.v, **arguments(case)), model(case.q, case.k, case.v, **arguments(case)))


def test_a_plan_inside_and_outside() -> None:
    """A step of two layers: the plan is made in the traced code, or given to it."""
    case = draw_case("window", 16, (1,) * 5)
    op: Any = golden.load_op("window")

    def layers(q: Tensor, plan: Any) -> Tensor:
        for _ in range(2):
            q = torch.cat([op(q, case.k, case.v, schedule=plan, **case.own, **case.kwargs)] * 2, 3)
        return q

    def step(q: Tensor) -> Tensor:
        return layers(q, op.plan(q, case.k, **case.own, **case.kwargs))

    want = step(case.q)
    assert torch.equal(torch.compile(step, fullgraph=True, backend=BACKEND)(case.q), want)
    plan = op.plan(case.q, case.k, **case.own, **case.kwargs)
    assert torch.equal(torch.compile(layers, fullgraph=True, backend=BACKEND)(case.q, plan), want)


def test_compiled_once_for_all_batches() -> None:
    graphs = 0

    def counting(graph: Any, _examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    op: Any = golden.load_op("causal")
    compiled = torch.compile(op, fullgraph=True, backend=counting)
    for lengths in ((70, 3), (5, 0, 64), (9, 10, 1, 80), (40, 2, 90, 3, 1)):
        case = draw_case("causal", 16, (1,) * len(lengths), lengths)
        assert torch.equal(compiled(case.q, case.k, case.v, **case.kwargs), op(case.q, case.k, case.v, **case.kwargs))
    assert graphs <= 3


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "traced"])
def test_exported(strict: bool) -> None:
    case = draw_case("alibi", 16, (1,) * 5)
    op: Any = golden.load_op("alibi")

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
            found: Tensor = op(q, k, v, page_table=table, kv_lengths=lengths, **case.own)
            return found

    given = (case.q, case.k, case.v, case.kwargs["page_table"], case.kwargs["kv_lengths"])
    program = torch.export.export(Layer(), given, strict=strict)
    assert torch.equal(program.module()(*given), Layer()(*given))


def test_exported_dense_calls_keep_the_dense_kernels_where_sizes_differ() -> None:
    inputs = drawn("causal")
    op: Any = golden.load_op("causal")

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found: Tensor = op(q, k, v, q_offset="end")
            return found

    given = (inputs.q, inputs.k, inputs.v)
    keys = {2: torch.export.Dim("keys", min=2, max=4096)}
    dynamic = torch.export.export(Layer(), given, dynamic_shapes=({}, keys, keys))
    static = torch.export.export(Layer(), given)
    assert "causal_fwd" in dynamic.graph_module.code
    assert "causal_paged_fwd" in static.graph_module.code
    assert torch.equal(static.module()(*given), Layer()(*given))
    want = op(*given, q_offset="end", family="portable")
    assert torch.equal(dynamic.module()(*given), want)


@pytest.mark.parametrize("variant", ["causal", "document", "gpt_oss"])
def test_compiled_dense_calls_split_their_keys(variant: str) -> None:
    inputs = drawn(variant)
    op: Any = golden.load_op(variant)
    lengths = torch.tensor([SHAPE.keys, 30], device=DEVICE)

    def model(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = op(*args, return_lse=True, q_offset="end", **kwargs)
        return found

    graphs: list[str] = []

    def noting(graph: Any, _examples: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    every: list[dict[str, Any]] = [{}, {"kv_lengths": lengths}]
    for options in every:
        got = inputs.call(torch.compile(model, fullgraph=True, backend=noting), **options)
        assert f"{variant}_paged_fwd" in graphs.pop()
        assert_same(got, inputs.call(model, **options))


@pytest.mark.parametrize("variant", ["causal", "window", "gpt_oss"])
def test_opcheck(variant: str) -> None:
    case = draw_case(variant, 16, (1,) * 3, (20, 0, 5))
    op: Any = golden.load_op(variant)
    bounds = {name: x for name, x in case.own.items() if name == "size"}
    with OperatorRecorder() as recorder:
        plan = op.plan(case.q, case.k, **bounds, **case.kwargs)
        op(case.q, case.k, case.v, schedule=plan, **case.own, **case.kwargs)
    names = [func.name() for func, _ in recorder.calls]
    assert names == [f"generated::{variant}_paged_plan", f"generated::{variant}_paged_fwd"]
    for func, args in recorder.calls:
        # Entries of a plan beyond their number are uninitialised memory.
        skipped = ("test_aot_dispatch_dynamic",) if func.name().endswith("plan") else ()
        tests = [
            name
            for name in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
            if name not in skipped
        ]
        torch.library.opcheck(func, args, test_utils=tests)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    case = draw_case("causal", 16, (2,) * 5)
    want = case.call()
    with FakeTensorMode() as mode:
        faked = {name: mode.from_tensor(x) for name, x in case.kwargs.items()}
        q, k, v = (mode.from_tensor(x) for x in (case.q, case.k, case.v))
        op: Any = golden.load_op("causal")
        got = op(q, k, v, return_lse=True, schedule=op.plan(q, k, **faked), **faked)
    for x, wanted in zip(got, want, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("name", ["q", "k", "page_table", "kv_lengths", "slope"])
def test_calls_are_mapped(name: str) -> None:
    """`torch.func.vmap` over any tensor of a call."""
    case = draw_case("alibi", 16, (1,) * 5)
    op: Any = golden.load_op("alibi")
    given = {"q": case.q, "k": case.k, "v": case.v, **case.own, **case.kwargs}
    table = case.kwargs["page_table"].clone()
    table[[0, 3], 0] = table[[3, 0], 0]
    other = {"q": -case.q, "k": case.k * 2, "slope": -case.own["slope"], "page_table": table}
    other["kv_lengths"] = case.kwargs["kv_lengths"].clamp(max=60)
    pair = [given[name], other[name]]

    def call(x: Tensor) -> Tensor:
        o: Tensor = op(**{**given, name: x})
        return o

    got = torch.func.vmap(call)(torch.stack(pair))
    assert torch.equal(got, torch.stack([call(x) for x in pair]))
