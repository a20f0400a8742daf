"""Graphs that hold the operators alone, such as exported programs, have the gradients of the calls in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from codegen.testing.golden import load_op
from generated._runtime.core.settings import INTERPRET
from tests.support import transforms
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")

ENDS = torch.tensor([0, 4, transforms.TOKENS], dtype=torch.int32)
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("causal", {}),
    "bshd": ("causal", {"layout": "bshd"}),
    "packed": ("causal", {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}),
    "segmented": ("causal", {"q_segment_ids": torch.arange(transforms.TOKENS).expand(2, -1) // 4}),
    "tables": ("document", {}),
    "sink": ("gpt_oss", {}),
    "own tensor": ("alibi", {}),
    "wanted tensor": ("relative_bias", {}),
    "third result": ("forgetting", {}),
    "dropout": ("causal_dropout", {"dropout_p": 0.3, "seed": 5}),
    "negative scale": ("causal", {"scale": -0.5}),
}


class Model(torch.nn.Module):
    """A call whose tensors depend on trained ones."""

    def __init__(self, name: str, results: str = "o and lse") -> None:
        super().__init__()
        variant, self.options = CALLS[name]
        self.op, self.results = load_op(variant), results
        given = transforms.arguments(variant, "cpu", packed=name == "packed")
        if name == "bshd":
            given = {key: x.transpose(1, 2).contiguous() for key, x in given.items()}
        self.fixed = {key: x for key, x in given.items() if not x.is_floating_point()}
        self.trained = torch.nn.ParameterDict({key: x for key, x in given.items() if x.is_floating_point()})

    def forward(self, factor: Tensor) -> Tensor:
        given = {key: self.trained[key] * factor for key in self.trained} | self.fixed
        o, lse = self.op(**given, **self.options, return_lse=True)
        found: dict[str, Tensor] = {"o": o, "lse": lse, "o and lse": torch.cat([o.flatten(), lse.flatten()])}
        return found[self.results]


def gradients_of(call: Callable[..., Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    loss = call(torch.tensor(1.5)).square().sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


# An export with `strict` traces Python by its bytecode first. What it may stumble over are a call's options and the
# kinds of its tensors, which these calls have between them.
TRACED_BY_BYTECODE = ("packed", "tables", "wanted tensor", "dropout")
EXPORTS = [
    pytest.param(name, strict, marks=[pytest.mark.full] if strict and name not in TRACED_BY_BYTECODE else [])
    for name in CALLS
    for strict in (False, True)
]


@pytest.mark.parametrize(("name", "strict"), EXPORTS)
def test_an_exported_program_has_the_gradients_of_the_model(name: str, strict: bool) -> None:
    model = Model(name)
    factor = torch.tensor(1.5)
    want = gradients_of(model, dict(model.named_parameters()))
    program = torch.export.export(model, (factor,), strict=strict)
    module: Any = program.module()
    assert torch.equal(module(factor), model(factor))
    parameters = dict(module.named_parameters())
    assert parameters.keys() == want.keys()
    for call in (module, torch.compile(module, backend="aot_eager")):
        for key, x in gradients_of(call, parameters).items():
            torch.testing.assert_close(x, want[key], rtol=0, atol=0)
    # Programs for inference are lowered from the same graph.
    torch.testing.assert_close(program.run_decompositions().module()(factor), model(factor))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("results", ["o", "lse"])
def test_an_exported_program_has_the_gradients_of_one_result(results: str, strict: bool) -> None:
    model = Model("dense", results)
    want = gradients_of(model, dict(model.named_parameters()))
    module: Any = torch.export.export(model, (torch.tensor(1.5),), strict=strict).module()
    for key, x in gradients_of(module, dict(module.named_parameters())).items():
        torch.testing.assert_close(x, want[key], rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_a_seed_and_a_length_of_an_exported_program_may_change(strict: bool) -> None:
    class Dropped(torch.nn.Module):
        op = staticmethod(load_op("causal_dropout"))

        def forward(self, x: Tensor, seed: Tensor) -> Any:
            return self.op(x, x, x, dropout_p=0.3, seed=seed)

    rows = torch.export.Dim("rows", min=4, max=64)
    given = torch.randn(1, 2, 9, 16), torch.tensor(7)
    program = torch.export.export(Dropped(), given, dynamic_shapes=({2: rows}, None), strict=strict)
    x, seed = torch.randn(1, 2, 33, 16, requires_grad=True), torch.tensor(8)
    got, want = (torch.autograd.grad(call(x, seed).square().sum(), x) for call in (program.module(), Dropped()))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_holds_one_operator(strict: bool) -> None:
    program = torch.export.export(Model("dense"), (torch.tensor(1.5),), strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("generated.causal_fwd.default") == 1
    assert not any("set_grad_enabled" in target or "autograd" in target for target in called)


def test_a_call_that_is_mapped_is_exported() -> None:
    class Mapped(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mapped: Tensor = torch.func.vmap(lambda x: load_op("causal")(x, x, x))(x)
            return mapped

    x = torch.randn(3, 1, 2, 9, 16)
    program = torch.export.export(Mapped(), (x,), strict=False)
    torch.testing.assert_close(program.module()(x), Mapped()(x))


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_graph_has_the_gradients_of_the_model(name: str) -> None:
    model = Model(name)
    parameters = dict(model.named_parameters())
    want = gradients_of(model, parameters)
    graph = make_fx(lambda own, factor: torch.func.functional_call(model, own, factor))(parameters, torch.tensor(1.5))
    for key, x in gradients_of(lambda factor: graph(parameters, factor), parameters).items():
        torch.testing.assert_close(x, want[key], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_by_jit_has_the_gradients_of_the_call() -> None:
    x, op = torch.randn(1, 2, 9, 16, requires_grad=True), load_op("causal")
    traced = torch.jit.trace(lambda x: op(x, x, x), x)
    want, got = (torch.autograd.grad(call(x).square().sum(), x) for call in (lambda x: op(x, x, x), traced))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_operators_that_are_called_directly_have_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 9, 16))
    forward = torch.ops.generated.causal_fwd

    def results(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return forward(q, k, v, None, 0, 0.25, "plain")

    want = torch.autograd.grad(load_op("causal")(q, k, v).square().sum(), (q, k, v))
    got = torch.autograd.grad(results(q, k, v)[0].square().sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    mapped = torch.autograd.grad(results(q, k, v)[0], (q, k, v), torch.ones(2, 1, 2, 9, 16), is_grads_batched=True)
    of_one = torch.autograd.grad(results(q, k, v)[0].sum(), (q, k, v))
    torch.testing.assert_close([x[1] for x in mapped], [*of_one], rtol=0, atol=0)
    for call in (results, torch.compile(results, backend="aot_eager", fullgraph=True)):
        (gradient,) = torch.autograd.grad(call(q, k, v)[0].sum(), q, retain_graph=True)
        torch.testing.assert_close(gradient, of_one[0], rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(results(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal: second derivatives"):
        gradient.square().sum().backward()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A variant with a tensor that has no gradient."""
    spec = "variants: {biased: {score: 'score + w[h]', tensors: {w: {dims: [h]}}}}"
    with importable(tmp_path_factory.mktemp("own"), "exported", spec):
        yield import_module("exported.torch")


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_refuses_a_gradient_that_is_not_declared(package: Any, strict: bool) -> None:
    class Biased(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            o: Tensor = package.biased(x, x, x, w=w)
            return o

    x, w = torch.randn(1, 2, 9, 16), torch.randn(2)
    module = torch.export.export(Biased(), (x, w), strict=strict).module()
    module(x.clone().requires_grad_(), w).sum().backward()
    with pytest.raises(ValueError, match="biased: w: it requires grad, but"):
        module(x, w.requires_grad_())


class Served(torch.nn.Module):
    """A call of each kind whose operator takes a list, none of which has an element on the CPU."""

    def forward(self, x: Tensor, ids: Tensor, ends: Tensor, table: Tensor, lengths: Tensor) -> Any:
        packed = x[0].transpose(0, 1)
        causal: Any = load_op("causal")
        document = load_op("document")
        paged = {"page_table": table, "kv_lengths": lengths}
        query, cache = x[:, :, :1], packed.unflatten(0, (-1, 3))
        plan = causal.plan(query, cache, **paged)
        return (
            document(x, x, x, doc=ids),
            causal(x, x, x, q_segment_ids=ids),
            causal(packed, packed, packed, cu_seqlens_q=ends),
            causal(query, cache, cache, **paged),
            causal(query, cache, cache, **paged, schedule=plan),
        )


@pytest.mark.skipif(which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aotinductor_computes_what_the_model_does(tmp_path: Path) -> None:
    def given(length: int) -> tuple[Tensor, ...]:
        ids, table = torch.arange(length)[None] // 4, torch.arange(length // 3)[None]
        integers = (ids, torch.tensor([0, 4, length]), table, torch.tensor([length - 1]))
        return (torch.randn(1, 2, length, 16), *(x.to(torch.int32) for x in integers))

    pages = torch.export.Dim("pages", min=2, max=64)
    shapes = ({2: 3 * pages}, {1: 3 * pages}, None, {1: pages}, None)
    program = torch.export.export(Served(), given(9), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "served.pt2"))
    again = torch._inductor.aoti_load_package(package)
    for length in (9, 33):
        tensors = given(length)
        torch.testing.assert_close(again(*tensors), Served()(*tensors))


@pytest.mark.parametrize("tables", [[], None], ids=["an empty list", "none"])
def test_operators_take_no_tables_in_either_form(tables: list[Tensor] | None) -> None:
    x = torch.randn(1, 2, 9, 16, requires_grad=True)
    ids = torch.arange(9, dtype=torch.int32)[None] // 4
    o, _ = torch.ops.generated.document_fwd(x, x, x, ids, None, 0, 0.25, "plain", tables)
    want = load_op("document")(x, x, x, doc=ids)
    assert torch.equal(o, want)
    assert torch.equal(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (o, want)))
