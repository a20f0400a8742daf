"""Arguments that the JAX ops accept on the CPU (dtypes, numpy scalars and arrays), and gradients that they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from codegen.testing import golden, golden_jax
from codegen.testing.golden import Inputs
from generated import paging
from generated._runtime.core.settings import INTERPRET
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")

# Any: the tests call the ops with arguments that their annotations do not allow, such as numpy numbers.
ops: Any = importlib.import_module("generated.jax")

SPEC = """
variants:
  biased:
    mask: causal and time[b, kv_idx] <= limit
    score: score + bias[h, kv_idx] + cap * w[h % 3]
    tensors: {bias: {dims: [h, kv_idx]}, w: {dims: [3], grad: true}, time: {dims: [b, kv_idx]}}
    scalars: {cap: float, limit: float}
  formula:
    mask: (q_idx - kv_idx) % 3 != 1 or kv_idx < h or b == 1 or seen[b, kv_idx]
    score: >-
      score * t[hkv, h // 2] + bias[h % 3, min(kv_idx, 4)] * where(q_idx % 2 == 0, 1, cap)
      + far[b, q_idx // 4] / (1 + h) + row[2] * one
    tensors:
      t: {dims: [hkv, 2], grad: true}
      bias: {dims: [3, 5], grad: true}
      far: {dims: [b, 8], grad: true}
      row: {dims: [3], grad: true}
      one: {dims: [], grad: true}
      seen: {dims: [b, kv_idx], dtype: bool}
    scalars: {cap: float}
    decay: true
    sink: true
    dropout: true
"""
BATCH, ROWS, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 16


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The rendered ops for JAX."""
    with importable(tmp_path_factory.mktemp("arguments"), "argument_variants", SPEC) as package:
        yield importlib.import_module(f"{package.name}.jax")


def qkv() -> list[jax.Array]:
    draw = np.random.default_rng(0)
    shapes = [(BATCH, ROWS, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes]


# --------------------------------------------------------------------------------------------------- missing gradients

TENSORS = {"bias": jnp.ones((HEADS, ROWS)), "w": jnp.ones(3), "time": jnp.zeros((BATCH, ROWS))}
BY_MASK = r"^biased: time: it requires grad, but only the mask reads it, which has no gradient: detach it with jax.lax"
BY_SCALAR = "^biased: cap: it requires grad, but a scalar has no gradient: declare a tensor of dims"
BY_ENTRY = (
    '^biased: bias: it requires grad, but variants.yaml declares it without a gradient: add "grad: true" to its entry, '
    "or detach it with jax.lax.stop_gradient"
)


def loss_of(own: Any) -> Callable[..., Any]:
    def loss(q: Any, **given: Any) -> Any:
        arguments = TENSORS | {"cap": 0.5, "limit": 1.0} | given
        return own.biased(q, q[:, :, :2], q[:, :, :2], **arguments).sum()

    return loss


TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit": lambda f: jax.jit(jax.grad(jax.jit(f), (0, 1))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "vmap": lambda f: lambda q, x: jax.vmap(jax.grad(f, (0, 1)))(q[None], x[None]),
    "of_vmap": lambda f: lambda q, x: jax.grad(lambda *a: jax.vmap(f)(*a).sum(), (0, 1))(q[None], x[None]),
    "scan": lambda f: jax.grad(lambda q, x: jax.lax.scan(lambda s, _: (s + f(q, x), None), 0.0, None, 2)[0], (0, 1)),
    "jvp": lambda f: lambda q, x: jax.jvp(f, (q, x), (q, x)),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize(("name", "message"), [("bias", BY_ENTRY), ("time", BY_MASK), ("cap", BY_SCALAR)])
def test_a_gradient_that_the_entry_does_not_declare_is_refused(
    own: Any, transform: str, name: str, message: str
) -> None:
    """Without the refusal JAX would return zeros."""
    loss, x = loss_of(own), jnp.asarray(TENSORS.get(name, 0.5))
    transformed = TRANSFORMED[transform](lambda q, x: loss(q, **{name: x}))
    with pytest.raises(ValueError, match=message):
        transformed(qkv()[0], x)


@pytest.mark.parametrize("transform", [name for name in TRANSFORMED if name != "jvp"])
@pytest.mark.parametrize("name", ["bias", "cap"])
def test_a_gradient_that_nobody_asks_for_is_not_refused(own: Any, transform: str, name: str) -> None:
    loss, x = loss_of(own), jnp.asarray(TENSORS.get(name, 0.5))
    transformed = TRANSFORMED[transform](lambda q, x: loss(q, **{name: jax.lax.stop_gradient(x)}))
    assert jax.eval_shape(transformed, qkv()[0], x)[1].size == x.size
    other = TRANSFORMED[transform](lambda q, w: jax.jit(lambda x: loss(q, **{name: x, "w": w}))(x))
    assert jax.eval_shape(other, qkv()[0], TENSORS["w"])[1].shape[-1] == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_missing_gradient_is_refused_inside_shard_map(own: Any, check_vma: bool) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2 before JAX starts")
    on = Mesh(np.array(jax.devices()[:2]), ("data",))
    loss = loss_of(own)
    mapped = jax.shard_map(
        lambda q, bias, time: loss(q, bias=bias, time=time)[None],
        mesh=on,
        in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    for by in (lambda f: f, jax.jit):
        given = (qkv()[0], TENSORS["bias"], TENSORS["time"])
        jax.eval_shape(by(jax.grad(lambda *x: mapped(*x).sum())), *given)
        with pytest.raises(ValueError, match=BY_ENTRY):
            by(jax.grad(lambda *x: mapped(*x).sum(), 1))(*given)


def test_derivatives_that_do_not_exist_are_refused() -> None:
    q, k, v = qkv()

    def first(q: jax.Array) -> Any:
        return jax.grad(lambda q: ops.causal(q, k, v).sum())(q)

    message = "^causal: second derivatives, and those in forward mode, are not implemented; `reference` in jax_ref"
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda q: first(q).sum())(q)
    with pytest.raises(NotImplementedError, match=message):
        jax.jvp(first, (q,), (q,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: ops.causal(q, k, v), (q,), (q,))


def test_a_family_of_another_chip_is_refused() -> None:
    """The references on the CPU refuse it as kernels in Triton's interpreter do."""
    message = (
        "^causal: family: expected one that can run this call, got 'hopper': its kernels run on sm_90, not on the CPU"
    )
    with pytest.raises(ValueError, match=message):
        ops.causal(*qkv(), family="hopper")
    with pytest.raises(ValueError, match=message):
        ops.causal.schedule(*qkv(), family="hopper")


@pytest.mark.parametrize("op", [ops.causal, ops.causal.schedule, ops.causal.backward])
def test_a_layout_that_does_not_exist_is_refused_in_packed_calls_too(op: Any) -> None:
    q, k, v = (x[0] for x in qkv())
    given = (q, q, k, v, q, jnp.zeros(q.shape[1::-1])) if op is ops.causal.backward else (q, k, v)
    with pytest.raises(ValueError, match=r"^causal: layout: expected 'bhsd' or 'bshd', got 'bsdh'"):
        op(*given, cu_seqlens_q=ints([0, 5, 12]), layout="bsdh")


# --------------------------------------------------------------------------------------------------------------- dtypes

IDS = np.array([[0] * 5 + [1] * 7, [3] * 12])
INTEGERS: dict[str, Callable[[Any], Any]] = {
    "segment_ids": lambda t: ops.causal(*qkv(), q_segment_ids=t(IDS), kv_segment_ids=t(IDS)),
    "positions": lambda t: ops.causal(*qkv(), q_positions=t(IDS), kv_positions=t(IDS)),
    "lengths": lambda t: ops.causal(*qkv(), kv_lengths=t(np.array([12, 7])), q_offset="end"),
    "offsets": lambda t: ops.causal(*qkv(), q_offset=t(np.array([0, 3]))),
    "one_offset": lambda t: ops.causal(*qkv(), q_offset=t(np.array(3))),
    "begins": lambda t: ops.causal(*(x[0] for x in qkv()), cu_seqlens_q=t(np.array([0, 5, 12]))),
    "both_begins": lambda t: ops.causal(
        *(x[0] for x in qkv()),
        cu_seqlens_q=t(np.array([0, 5, 12])),
        cu_seqlens_k=t(np.array([0, 7, 12])),
        q_offset="end",
    ),
    "tensor": lambda t: ops.document(*qkv(), doc=t(IDS)),
    "scalar": lambda t: ops.window(*qkv(), size=t(np.array(5))),
}


@pytest.mark.parametrize("call", INTEGERS)
def test_integers_of_any_dtype(call: str) -> None:
    """numpy arrays, and JAX arrays of int64 if JAX has 64 bits, traced and not traced."""
    want = np.asarray(INTEGERS[call](lambda x: jnp.asarray(x, jnp.int32)))
    for dtype in ("int64", "uint8", "int16", "uint32"):
        np.testing.assert_array_equal(INTEGERS[call](lambda x, dtype=dtype: x.astype(dtype)), want)
    with jax.enable_x64(True):
        np.testing.assert_allclose(INTEGERS[call](lambda x: jnp.asarray(x, "int64")), want, atol=1e-6)
        traced = jax.make_jaxpr(lambda one: INTEGERS[call](lambda x: jnp.asarray(x, "int64") * one))(1)
        assert " i64[" not in str(traced.jaxpr.eqns[-1])


@pytest.mark.parametrize(
    "call", [name for name in INTEGERS if name not in ("one_offset", "begins", "both_begins", "scalar")]
)
def test_integers_that_do_not_fit_are_refused(call: str) -> None:
    with pytest.raises(ValueError, match=r": expected values that int32 holds, got \d{11,}"):
        INTEGERS[call](lambda x: x + 2**40)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("call", INTEGERS)
def test_integers_must_be_integers(call: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"integer.*, got {dtype}"):
        INTEGERS[call](lambda x: jnp.asarray(x, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_trained_tensors_of_any_float_dtype(dtype: str) -> None:
    """The gradient is summed in float32 and comes back in the dtype of the tensor."""
    q, k, v = qkv()

    def gradient(slope: Any) -> Any:
        return jax.grad(lambda slope: (ops.alibi(q, k, v, slope=slope) ** 2).sum())(slope)

    with jax.enable_x64(dtype == "float64"):
        slope = jnp.asarray([0.5, 0.25, 0.125, 0.0625], dtype)
        got, want = gradient(slope), gradient(slope.astype(jnp.float32))
        assert got.dtype == slope.dtype
        np.testing.assert_array_equal(got, want.astype(dtype))
    with pytest.raises(ValueError, match=r"^alibi: slope: expected a floating-point dtype, got int32"):
        ops.alibi(q, k, v, slope=jnp.ones(4, jnp.int32))


def test_arrays_and_scalars_of_numpy() -> None:
    q, k, v = qkv()
    host = [np.asarray(x, np.float64) for x in (q, k, v)]
    slope = np.array([0.5, 0.25, 0.125, 0.0625])
    want = ops.alibi(q, k, v, slope=jnp.asarray(slope), scale=0.25)
    for scale in (np.float32(0.25), np.array(0.25), jnp.asarray(0.25)):
        np.testing.assert_array_equal(ops.alibi(*host, slope=slope, scale=scale), want)
    want = ops.window(q, k, v, size=5, q_offset=2)
    for number in (np.int64(5), np.uint8(5), np.array(5), jnp.asarray(5)):
        np.testing.assert_array_equal(ops.window(q, k, v, size=number, q_offset=np.int32(2)), want)
    ids = {"q_segment_ids": IDS, "padding_id": np.int64(3)}
    np.testing.assert_array_equal(ops.full(q, k, v, **ids), ops.full(q, k, v, **ids | {"padding_id": 3}))
    dropped = ops.causal_dropout(q, k, v, dropout_p=0.5, seed=2**40 + 3)
    for p, seed in ((np.float32(0.5), np.int64(2**40 + 3)), (jnp.asarray(0.5), np.array(2**40 + 3))):
        np.testing.assert_array_equal(ops.causal_dropout(q, k, v, dropout_p=p, seed=seed), dropped)
    with jax.enable_x64(True):
        wide = jnp.asarray(2**40 + 3)
        np.testing.assert_array_equal(ops.causal_dropout(q, k, v, dropout_p=0.5, seed=wide), dropped)


# ------------------------------------------------------------------------------------------------------- two spellings


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


CALLS: dict[str, dict[str, Any]] = {
    "dense": {"q_offset": 2},
    "offsets": {"q_offset": ints([0, 3])},
    "segments": {"q_segment_ids": ints(IDS)},
    "positions": {
        "q_segment_ids": ints([[0] * 6 + [1] * 6, [0] * 12]),
        "q_positions": ints([[*range(6), *range(6)], [*range(12)]]),
    },
    "packed": {"cu_seqlens_q": ints([0, 5, 12]), "cu_seqlens_k": ints([0, 7, 12]), "q_offset": "end"},
}


def test_arrays_without_axes_are_numbers() -> None:
    """Also where a number must be known while tracing: an array that is known on the host is."""
    q, cache = jnp.ones((2, 4, 2, 16)), jnp.ones((8, 4, 2, 16))
    pages = {"page_table": jnp.arange(8).reshape(2, 4), "kv_lengths": jnp.array([10, 12])}
    for name, number in (("splits", 1), ("values_in_keys", 8), ("k_scale", 2), ("v_scale", 2)):
        v = None if name == "values_in_keys" else cache
        want, got = (ops.causal(q, cache, v, **pages, **{name: x}) for x in (number, jnp.array(number)))
        np.testing.assert_allclose(got, want, rtol=1e-6)
    own = {"g": -jnp.ones((2, 4, 2))}
    np.testing.assert_array_equal(*[ops.forgetting(q, q, q, **own, prune=x) for x in (0.25, jnp.array(0.25))])
    message = r"^causal: splits: expected .*, got JitTracer\(~int32\[\]\)\n"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: ops.causal(q, cache, cache, **pages, splits=x))(1)


@pytest.mark.parametrize("element", [5, np.int64(5), np.array(5), jnp.array(5), -16, jnp.array(-16), jnp.array(16.0)])
def test_where_dropout_begins_to_count_is_checked_in_arrays_too(element: Any) -> None:
    q = jnp.ones((1, 4, 2, 16))

    def call(row: Any) -> jax.Array:
        o: jax.Array = ops.causal_dropout(q, q, q, dropout_p=0.5, seed=1, dropout_origin=(0, 0, 2, row, 0))
        return o

    np.testing.assert_array_equal(call(16), call(jnp.array(16)))
    np.testing.assert_array_equal(call(16), jax.jit(call)(16))
    with pytest.raises(ValueError, match=r"^causal_dropout: dropout_origin: expected (a row that is|None, \()"):
        call(element)


@pytest.mark.parametrize("call", CALLS)
def test_a_formula_is_the_same_in_torch(own: Any, call: str) -> None:
    """Batch rows, heads, queries and keys are broadcast although JAX's setting forbids rank promotion."""
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
    torch.manual_seed(0)
    packed = call == "packed"
    lead = (ROWS,) if packed else (BATCH, ROWS)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM)]
    q, k, v = (torch.randn(*lead, *shape, requires_grad=True) for shape in shapes)
    drawn = {"t": (KV_HEADS, 2), "bias": (3, 5), "far": (BATCH, 8), "row": (3,), "one": (), "sink": (HEADS,)}
    tensors = {name: torch.randn(shape, requires_grad=True) for name, shape in drawn.items()}
    tensors["g"] = (-torch.rand(*lead[:-1], ROWS if packed else ROWS + 3, HEADS)).requires_grad_()
    tensors["seen"] = torch.rand(lead) < 0.3
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        do=torch.randn_like(q),
        dlse=torch.randn(HEADS, ROWS) if packed else torch.randn(BATCH, HEADS, ROWS),
        tensors=tensors,
        scalars={"cap": 0.7, "dropout_p": 0.4, "seed": 5},
    )
    options = CALLS[call] if packed else {"layout": "bshd", **CALLS[call]}
    package = own.__name__.rpartition(".")[0]
    want = golden.evaluate(importlib.import_module(f"{package}.torch").formula, inputs, **options)
    got = golden_jax.evaluate("formula", inputs, package=package, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------- known values inside of a trace

TOKENS, CACHE = np.zeros((8, 2, 16), np.float32), np.zeros((4, 4, 2, 16), np.float32)
SLOTS, ENDS = np.arange(8, dtype=np.int32), np.array([0, 3, 8], np.int32)


def _decayed(x: jax.Array, t: Any) -> Any:
    paged = {"page_table": t(np.array([[0, 1], [2, 3]])), "kv_lengths": t(np.array([8, 8]))}
    given = jnp.zeros((2, 8, 2)), t(np.zeros((4, 4, 2), np.float32)), t(np.zeros((4, 2), np.float32))
    return x + paging.append_decay(*given, **paged)[0][0, 0, 0]


CLOSED_OVER: dict[str, Any] = {
    "ids": lambda x, t: ops.causal(x[None], x[None], x[None], q_segment_ids=t(np.zeros((1, 8), np.uint32))),
    "offsets": lambda x, t: ops.causal(x[None], x[None], x[None], q_offset=t(np.array([3]))),
    "schedule": lambda x, t: ops.causal(
        *[x] * 3, cu_seqlens_q=t(ENDS), schedule=ops.causal.schedule(*[TOKENS] * 3, cu_seqlens_q=t(ENDS))
    ),
    "slots": lambda x, t: paging.append(x, x, t(CACHE), t(CACHE), t(SLOTS))[0],
    "scale": lambda x, t: paging.append(x, x, t(CACHE), t(CACHE), t(SLOTS), k_scale=t(np.ones(2, np.float32)))[0],
    "lengths": _decayed,
}


@pytest.mark.parametrize("call", CLOSED_OVER)
def test_arrays_that_a_jitted_function_closes_over_are_checked(call: str) -> None:
    """Their values are known, but JAX traces whatever it computes from them inside of `jit`."""
    made: list[jax.Array] = []

    def keep(x: np.ndarray) -> jax.Array:
        made.append(jnp.asarray(x))
        return made[-1]

    x = jnp.asarray(TOKENS)
    want = CLOSED_OVER[call](x, keep)
    closed = iter(made)
    np.testing.assert_array_equal(jax.jit(lambda x: CLOSED_OVER[call](x, lambda _: next(closed)))(x), want)
