"""On CPU tensors an op has the derivatives that its kernels have, and refuses the derivatives that they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from codegen.testing.golden import load_op
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from tests.support import transforms
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")

SPEC = """
variants:
  biased:
    score: score + w[h] + u[b, h] + t[kv_idx]
    tensors: {w: {dims: [h]}, u: {dims: [b, h], grad: true}, t: {dims: [kv_idx], grad: true}}
  masked: {mask: "kv_idx == 0 or w[h] >= 0.0", tensors: {w: {dims: [h]}}}
  seen: {mask: "seen[b, kv_idx] and ids[b, kv_idx] > 0", tensors: {
    seen: {dims: [b, kv_idx], dtype: bool}, ids: {dims: [b, kv_idx], dtype: int64}}}
"""
UNDECLARED = (
    'biased: w: it requires grad, but variants.yaml declares it without a gradient: add "grad: true" to its entry'
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ops with tensors of each kind of declaration."""
    with importable(tmp_path_factory.mktemp("own"), "transformed", SPEC):
        yield import_module("transformed.torch")


def biased() -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 2, 2, 7, 16)
    return {"q": q, "k": k, "v": v, "w": torch.randn(2), "u": torch.randn(2, 2), "t": torch.randn(7)}


def draw_alibi() -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 2, 2, 7, 16)
    return {"q": q, "k": k, "v": v, "slope": torch.rand(2)}


@pytest.mark.parametrize("variant", ["causal", "alibi", "forgetting", "gpt_oss", "document"])
def test_transforms_give_the_gradients_of_backward(variant: str) -> None:
    transforms.check_gradients_of_transforms(variant, "cpu")


@pytest.mark.parametrize(
    ("variant", "mapped"),
    [
        ("causal", {"q"}),
        ("causal", {"q", "k", "v"}),
        ("alibi", {"slope"}),
        ("alibi", {"k", "slope"}),
        ("forgetting", {"g"}),
        ("document", {"v", "doc"}),
        ("gpt_oss", {"q", "sink"}),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_vmap_is_one_call_after_the_other(variant: str, mapped: set[str], packed: bool) -> None:
    transforms.check_mapped(variant, "cpu", mapped, packed)


@pytest.mark.parametrize("results", ["o", "lse", "both"])
def test_batched_gradients_are_those_of_one_backward_each(results: str) -> None:
    given = {name: x.requires_grad_() for name, x in draw_alibi().items()}
    wanted = [*given.values()]
    o, lse = load_op("alibi")(**given, return_lse=True)
    outputs = {"o": (o,), "lse": (lse,), "both": (o, lse)}[results]
    gradients = [torch.randn(3, *x.shape) for x in outputs]
    mapped = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, is_grads_batched=True)
    for i in range(3):
        of_one = torch.autograd.grad(outputs, wanted, [x[i] for x in gradients], retain_graph=True)
        for got, want in zip(mapped, of_one, strict=True):
            assert torch.equal(got[i], want)
    with pytest.raises(NotImplementedError, match="alibi: second derivatives"):
        torch.autograd.grad(outputs, wanted, gradients, is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", torch.tensor([1.0, 2.0])), ("q_offset", torch.tensor([1, 2])), ("seed", torch.tensor([1, 2]))],
)
def test_vmap_over_a_number_is_refused(name: str, value: Tensor) -> None:
    q, op = torch.randn(1, 2, 4, 16), load_op("causal_dropout")
    text = f"causal_dropout: {name}: expected a number that is the same in all elements of a torch.func.vmap"
    with pytest.raises(ValueError, match=text):
        torch.func.vmap(lambda x: op(q, q, q, **{"dropout_p": 0.5, "seed": 1, name: x}))(value)
    with pytest.raises(ValueError, match="causal_dropout: seed: expected a number that is the same"):
        torch.func.vmap(lambda q: op(q, q, q, dropout_p=0.5), randomness="different")(q[None])


def test_vmap_over_packings() -> None:
    transforms.check_mapped("forgetting", "cpu", {"q", "cu_seqlens_q"}, packed=True)


def test_vmap_over_rows_with_segment_ids() -> None:
    ids = torch.arange(transforms.TOKENS).expand(2, -1) // 4
    transforms.check_mapped("alibi", "cpu", {"q", "v"}, q_segment_ids=ids, kv_lengths=torch.tensor([3, 8]))


def test_vmap_of_dropout_drops_what_each_call_drops() -> None:
    transforms.check_mapped("causal_dropout", "cpu", {"q", "k"}, dropout_p=0.4, seed=3)


def test_vmap_over_axes_of_any_place_and_size() -> None:
    given = transforms.arguments("causal", "cpu")
    op, q = load_op("causal"), torch.randn(2, 2, transforms.TOKENS, 3, 2, transforms.DIM)
    call = torch.func.vmap(lambda q: op(q, given["k"], given["v"]), in_dims=3, out_dims=1)
    mapped = torch.func.vmap(call, in_dims=3)(q)
    assert mapped.shape == (3, 2, 2, 2, transforms.TOKENS, transforms.DIM)
    assert torch.equal(mapped[2, :, 1], op(q[:, :, :, 2, 1], given["k"], given["v"]))
    assert call(q[:, :, :, 0, :0]).shape == (2, 0, 2, transforms.TOKENS, transforms.DIM)


@pytest.mark.parametrize("variant", ["causal", "forgetting"])
def test_what_kernels_refuse_is_refused(variant: str) -> None:
    transforms.check_refusals(variant, "cpu")


FORWARD_MODE = "causal: q: derivatives in forward mode"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_derivatives_in_forward_mode_are_refused(backend: str) -> None:
    torch.compiler.reset()
    op, (q, tangent) = load_op("causal"), (torch.randn(1, 2, 9, 16) for _ in range(2))

    def call(q: Tensor) -> Any:
        return op(q, q, q)

    def pushed(q: Tensor, tangent: Tensor) -> Any:
        return torch.func.jvp(call, (q,), (tangent,))[1]

    def dual(q: Tensor, tangent: Tensor) -> Any:
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(q, tangent) * 2)

    for function, given in ((pushed, (q, tangent)), (torch.func.jacfwd(call), (q,)), (dual, (q, tangent))):
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            torch.compile(function, backend=backend)(*given)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for graph in (compiled, lambda q: torch.ops.generated.causal_fwd(q, q, q, None, 0, 0.25, "plain")):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
            graph(forward_ad.make_dual(q, tangent))
    with forward_ad.dual_level():
        assert torch.equal(compiled(q), call(q))


def test_the_plain_reference_is_ordinary_pytorch() -> None:
    reference = import_module("generated.causal.torch_reference").reference
    q, k, v = (x.double() for x in torch.randn(3, 1, 1, 2, 2))
    assert torch.autograd.gradgradcheck(lambda q: reference(q, k, v), q.requires_grad_())
    torch.func.jvp(lambda q: reference(q, k, v), (q,), (q,))


def test_a_family_of_gpus_is_refused_on_the_cpu() -> None:
    given = transforms.arguments("causal", "cpu")
    op: Any = load_op("causal")
    for call in (op, op.schedule):
        with pytest.raises(ArgumentError, match="family: expected one that can run this call, got 'hopper'"):
            call(**given, family="hopper")


@pytest.mark.parametrize("variant", ["causal", "forgetting"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_meta_tensors_give_shapes_without_values(variant: str, packed: bool) -> None:
    given = transforms.arguments(variant, "cpu", packed=packed)
    ends = torch.tensor([0, 4, transforms.TOKENS])
    outputs, grads = [], []
    for device in ("cpu", "meta"):
        leaves = {name: x.to(device).requires_grad_() for name, x in given.items()}
        options = {"cu_seqlens_q": ends.to(device)} if packed else {}
        outputs.append(load_op(variant)(**leaves, **options, return_lse=True))
        grads.append(torch.autograd.grad(outputs[-1][0].sum(), list(leaves.values())))
    for want, got in zip((*outputs[0], *grads[0]), (*outputs[1], *grads[1]), strict=True):
        assert got.is_meta
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("variant", ["causal", "alibi"])
def test_packed_calls_are_traced_whole(variant: str) -> None:
    torch.compiler.reset()
    given = transforms.arguments(variant, "cpu", packed=True)
    ends = torch.tensor([0, 4, transforms.TOKENS])
    op: Any = load_op(variant)
    leaves = {name: x.requires_grad_() for name, x in given.items()}

    def loss(leaves: dict[str, Tensor]) -> Any:
        return op(**leaves, cu_seqlens_q=ends).square().sum()

    wanted = torch.autograd.grad(loss(leaves), list(leaves.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(leaves), list(leaves.values())), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in leaves.items()}
        o = op(**fake, cu_seqlens_q=mode.from_tensor(ends))
        assert torch.autograd.grad(o.sum(), fake["q"])[0].shape == given["q"].shape


@pytest.mark.parametrize("keyword", [None, "q_segment_ids", "cu_seqlens_q"])
def test_a_traced_call_may_get_one_tensor_twice(keyword: str | None) -> None:
    """Dynamo itself refuses an autograd function that does."""
    torch.compiler.reset()
    packed = keyword == "cu_seqlens_q"
    x = torch.randn((6, 2, 16) if packed else (1, 2, 6, 16), requires_grad=True)
    ends, ids = torch.tensor([0, 4, 6]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    of_both = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if packed else {"q_segment_ids": ids, "kv_segment_ids": ids}

    op: Any = load_op("causal")

    def loss(x: Tensor) -> Any:
        return op(x, x, x, **(of_both if keyword else {})).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mode", ["dense", "packed", "segmented", "paged"])
def test_traced_by_jit(mode: str) -> None:
    """`torch.jit.trace`, as TensorBoard's `add_graph` traces a model: the trace computes calls of other lengths."""

    def given(length: int) -> tuple[Tensor, ...]:
        q, k, v = torch.randn(3, 2, 4, length, 16)
        if mode == "dense":
            return q, k, v
        if mode == "segmented":
            return q, k, v, torch.randint(2, (2, length))
        if mode == "packed":
            return *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 3, length])
        cache = torch.randn(4, 16, 2, 16)
        return q[:, :, :1], cache, cache, torch.tensor([[1, 0], [3, 2]]), torch.tensor([length, 7])

    def call(*tensors: Tensor) -> Any:
        names = {"dense": (), "packed": ("cu_seqlens_q",), "segmented": ("q_segment_ids",)}
        own = dict(zip(names.get(mode, ("page_table", "kv_lengths")), tensors[3:], strict=True))
        return load_op("causal")(*tensors[:3], return_lse=True, **own)

    traced = torch.jit.trace(call, given(9))
    other = given(20)
    for got, want in zip(traced(*other), call(*other), strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_by_jit_needs_a_seed() -> None:
    x = torch.randn(1, 1, 9, 16)
    with pytest.raises(ArgumentError, match="seed: expected an int under torch"):
        torch.jit.trace(lambda x: load_op("causal_dropout")(x, x, x, dropout_p=0.5), x)


def test_rows_without_keys_have_no_nan_in_their_gradients() -> None:
    """Anomaly detection also finds a NaN that a later step hides."""
    sinks = {"causal": None, "gpt_oss": torch.tensor([float("-inf"), 0.5])}
    for variant, sink in sinks.items():
        leaves = transforms.arguments(variant, "cpu") | ({} if sink is None else {"sink": sink})
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        with torch.autograd.set_detect_anomaly(True):
            o, lse = load_op(variant)(**leaves, q_offset=-4, return_lse=True)
            assert lse[0, 0, 0] == float("-inf")
            (o.sum() + torch.where(lse.isinf(), 0.0, lse).sum()).backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves.values())


def test_a_gradient_that_is_not_declared_is_refused(package: Any) -> None:
    given = biased()
    wanted = given | {"w": given["w"].clone().requires_grad_()}
    for call in (package.biased, torch.compile(package.biased, backend="eager")):
        with pytest.raises(ValueError, match=UNDECLARED):
            call(**wanted)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=UNDECLARED):
        package.biased(**{name: mode.from_tensor(x) for name, x in wanted.items()})

    def op(w: Tensor) -> Any:
        return package.biased(**given | {"w": w})

    with pytest.raises(ValueError, match=UNDECLARED):
        torch.func.grad(lambda w: op(w).sum())(given["w"])
    with pytest.raises(ValueError, match=UNDECLARED):
        torch.func.grad(lambda w: torch.func.vmap(op)(w).sum())(torch.stack([given["w"]] * 2))
    with pytest.raises(ValueError, match="masked: w: it requires grad, but only the mask reads it"):
        package.masked(given["q"], given["k"], given["v"], w=wanted["w"])
    with torch.no_grad():
        want = package.biased(**wanted)
    with torch.inference_mode():
        assert torch.equal(package.biased(**wanted), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_own_tensors_of_any_float_have_gradients_of_theirs(package: Any, dtype: torch.dtype) -> None:
    """Gradients are summed in float32 and rounded once."""
    given = biased()
    given |= {name: given[name].to(dtype) for name in "wut"}
    results = []
    for cast in (dtype, torch.float32):
        own = {name: given[name].to(cast).requires_grad_() for name in "ut"}
        o = package.biased(**given | own)
        results.append((o, *torch.autograd.grad(o.square().sum(), list(own.values()))))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want.to(got.dtype))
    assert results[0][1].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.uint64], ids=str)
def test_integers_of_any_dtype_are_those_of_int32(package: Any, dtype: torch.dtype) -> None:
    given = transforms.arguments("document", "cpu")
    qkv = {name: given[name] for name in "qkv"}
    ids, positions = (
        torch.arange(transforms.TOKENS).expand(2, -1) // 4,
        torch.arange(transforms.TOKENS).expand(2, -1) % 4,
    )
    seen = torch.ones(2, transforms.TOKENS, dtype=torch.bool)
    calls: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (load_op("document"), {"doc": given["doc"]}, {}),
        (load_op("causal"), {"q_segment_ids": ids, "q_positions": positions}, {}),
        (load_op("causal"), {"kv_lengths": torch.tensor([3, 7])}, {"q_offset": "end"}),
        (load_op("causal"), {"q_offset": torch.tensor([0, 2])}, {}),
        (package.seen, {"ids": ids}, {"seen": seen}),
    ]
    for op, integers, others in calls:
        want = op(**qkv, **{name: x.to(torch.int32) for name, x in integers.items()}, **others)
        assert torch.equal(op(**qkv, **{name: x.to(dtype) for name, x in integers.items()}, **others), want)
    document: Any = load_op("document")
    own = {"doc": given["doc"].to(dtype)}
    assert torch.equal(document(**qkv, **own, schedule=document.schedule(**qkv, **own)), document(**given))


def test_integers_beyond_int32_are_refused() -> None:
    given = transforms.arguments("document", "cpu")
    for value, dtype in ((2**31, torch.int64), (-(2**31) - 1, torch.int64), (2**32 - 5, torch.uint32)):
        doc = torch.full((2, transforms.TOKENS), value).to(dtype)
        with pytest.raises(ArgumentError, match=f"doc: expected values that torch.int32 holds, got {value}"):
            load_op("document")(**given | {"doc": doc})


@pytest.mark.parametrize(
    ("tensor", "dtype", "text"),
    [
        ("seen", torch.uint8, "expected dtype torch.bool, got torch.uint8"),
        ("seen", torch.int64, "expected dtype torch.bool, got torch.int64"),
        ("ids", torch.bool, "expected dtype torch.int64 or another of integers, got torch.bool"),
        ("ids", torch.float32, "expected dtype torch.int64 or another of integers, got torch.float32"),
    ],
)
def test_bools_are_no_integers(package: Any, tensor: str, dtype: torch.dtype, text: str) -> None:
    x = torch.randn(1, 1, 4, 16)
    given = {"seen": torch.ones(1, 4, dtype=torch.bool), "ids": torch.ones(1, 4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=f"seen: {tensor}: {text}"):
        package.seen(x, x, x, **given | {tensor: given[tensor].to(dtype)})


def test_scalars_of_numpy_and_tensors_of_one_number() -> None:
    given, op = transforms.arguments("window", "cpu"), load_op("window")
    want = op(**given, size=3, scale=0.5, q_offset=1)
    integers: list[Any] = [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8)]
    for integer in integers:
        for number in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float16)):
            offset = integer - integer + 1
            assert torch.equal(op(**given, size=integer, scale=number, q_offset=offset), want)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"size": np.float32(3)}, "size: expected an int of at least 1, got 3.0"),
        ({"size": torch.tensor(True)}, "size: expected an int of at least 1, got True"),
        ({"size": torch.tensor([3])}, "size: expected an int of at least 1, got Tensor of torch.int64 \\[1\\]"),
        ({"size": torch.tensor(3, device="meta")}, "size: expected a number, or a tensor .. on the CPU"),
        (
            {"size": 3, "scale": torch.tensor(0.5, requires_grad=True)},
            "scale: expected a number, which has no gradient",
        ),
    ]
    for options, text in refused:
        with pytest.raises(ArgumentError, match=text):
            op(**given, **options)


@pytest.mark.parametrize("size", [np.int64(3), torch.tensor(3)])
def test_compiled_with_scalars_that_are_no_python_numbers(size: Any) -> None:
    """torch.compile sees an array in a numpy scalar, and breaks its graph to read it."""
    given, op = transforms.arguments("window", "cpu"), load_op("window")
    compiled = torch.compile(lambda size: op(**given, size=size), backend="eager")
    assert torch.equal(compiled(size), op(**given, size=3))


def test_exported_with_symbolic_sizes() -> None:
    """Non-strict tracing, torch's default, hands the op sizes that are no Python ints."""
    padding, window = load_op("padding"), load_op("window")

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, length: Tensor) -> Any:
            whole = padding(q, k, k, length=length)
            return whole + window(q, k, k, size=q.shape[2] // 2, q_offset=k.shape[2] - q.shape[2])

    def given(batch: int, rows: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, 2, rows, 16), torch.randn(batch, 2, 20, 16), torch.arange(1, batch + 1)

    batch, rows = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("rows", min=4, max=20)
    program = torch.export.export(Layer(), given(2, 7), dynamic_shapes=({0: batch, 2: rows}, {0: batch}, {0: batch}))
    for call in (given(3, 12), given(5, 4)):
        torch.testing.assert_close(program.module()(*call), Layer()(*call))


@pytest.mark.parametrize("seed", [None, torch.tensor(3)])
def test_dropout_of_fake_tensors_needs_no_value_of_a_seed(seed: Tensor | None) -> None:
    state = torch.get_rng_state()
    with FakeTensorMode() as mode:
        x = torch.randn(1, 2, 9, 16, requires_grad=True)
        given = None if seed is None else mode.from_tensor(seed)
        o = load_op("causal_dropout")(x, x, x, dropout_p=0.1, seed=given)
        assert torch.autograd.grad(o.sum(), x)[0].shape == o.shape == x.shape
    assert torch.equal(torch.get_rng_state(), state)
