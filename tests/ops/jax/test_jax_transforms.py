"""JAX's transformations of functions, applied to the ops: each result is compared with the untransformed one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from generated import jax as ops
from generated._runtime.jax import batching as jax_batching

pytestmark = pytest.mark.covers(variant="name", family="reference", framework="jax")

BATCH, ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 24, 4, 2, 16
Trained = dict[str, jax.Array]


def arrays(seed: int = 0, *lead: int, batch: int = BATCH, kv_heads: int = KV_HEADS) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (HEADS, kv_heads, kv_heads)
    return [jax.random.normal(key, (*lead, batch, ROWS, h, HEAD_DIM)) for key, h in zip(keys, heads, strict=True)]


def own(name: str, seed: int = 1, *lead: int, batch: int = BATCH) -> Trained:
    """The tensors and scalars of a variant."""
    keys = jax.random.split(jax.random.key(seed), 4)
    made: dict[str, Callable[[], Trained]] = {
        "alibi": lambda: {"slope": jax.random.uniform(keys[0], (*lead, HEADS))},
        "gpt_oss": lambda: {"sink": jax.random.normal(keys[0], (*lead, HEADS))},
        "forgetting": lambda: {"g": -jax.random.uniform(keys[0], (*lead, batch, ROWS, HEADS)) / 10},
        "document": lambda: {"doc": jax.random.randint(keys[0], (*lead, batch, ROWS), 0, 3)},
        "window": lambda: {"size": jax.random.randint(keys[0], lead, 1, 12)},
    }
    return made.get(name, dict)()


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), got, want)


def outputs(name: str, q: jax.Array, k: jax.Array, v: jax.Array, mine: Trained, **options: Any) -> Any:
    return getattr(ops, name)(q, k, v, **mine, return_lse=True, **options)


def loss(name: str, q: jax.Array, k: jax.Array, v: jax.Array, mine: Trained, **options: Any) -> jax.Array:
    o, lse = outputs(name, q, k, v, mine, **options)
    return jnp.sum(o**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))


def gradients(name: str, q: jax.Array, k: jax.Array, v: jax.Array, mine: Trained, **options: Any) -> Any:
    trained = {n: x for n, x in mine.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    fixed = {n: x for n, x in mine.items() if n not in trained}

    def of(q: jax.Array, k: jax.Array, v: jax.Array, trained: Trained) -> jax.Array:
        return loss(name, q, k, v, trained | fixed, **options)

    return jax.grad(of, argnums=(0, 1, 2, 3))(q, k, v, trained)


def stacked(function: Callable[..., Any], *mapped: Any) -> Any:
    """The result that vmap over axis 0 must give, computed by one call after the other."""
    size = len(jax.tree.leaves(mapped)[0])
    each = [function(*jax.tree.map(lambda x, i=i: x[i], mapped)) for i in range(size)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


VARIANTS = ["causal", "alibi", "gpt_oss", "forgetting", "document", "window", "gemma2_local"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("function", [outputs, gradients], ids=["outputs", "gradients"])
def test_vmap_over_everything(name: str, function: Callable[..., Any]) -> None:
    """vmap maps arrays, parameters and scalars alike."""
    mapped = (*arrays(0, 3, batch=2), own(name, 1, 3, batch=2))
    one = partial(function, name)
    close(jax.vmap(one)(*mapped), stacked(one, *mapped))


@pytest.mark.parametrize("name", ["causal", "alibi", "gpt_oss", "forgetting"])
def test_vmap_over_arrays_alone(name: str) -> None:
    """A parameter that all mapped calls share has a separate gradient for each call."""
    q, k, v = arrays(0, 3, batch=2)
    mine = own(name, batch=2)
    one = partial(gradients, name)
    want = stacked(lambda q, k, v: one(q, k, v, mine), q, k, v)
    close(jax.vmap(one, in_axes=(0, 0, 0, None))(q, k, v, mine), want)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, 4, -1])
def test_vmap_over_any_axis_in_and_out(axis: int) -> None:
    q, k, v = arrays(0, 3, batch=2)
    want, _ = stacked(lambda q, k, v: outputs("causal", q, k, v, {}), q, k, v)
    moved = [jnp.moveaxis(x, 0, axis) for x in (q, k, v)]
    got, _ = jax.vmap(lambda q, k, v: outputs("causal", q, k, v, {}), in_axes=axis, out_axes=(axis, 0))(*moved)
    close(jnp.moveaxis(got, axis, 0), want)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_vmap_over_some_arrays(which: tuple[int, ...]) -> None:
    many, single = arrays(0, 3, batch=2), arrays(5, batch=2)
    given = [many[i] if i in which else single[i] for i in range(3)]
    axes = [0 if i in which else None for i in range(3)]

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return gradients("causal", q, k, v, {})

    each = [one(*(x[n] if a == 0 else x for x, a in zip(given, axes, strict=True))) for n in range(3)]
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    close(jax.vmap(one, in_axes=axes)(*given), want)


def test_grad_of_vmap_is_the_sum() -> None:
    q, k, v = arrays(0, 3, batch=2)
    slope = own("alibi")["slope"]

    def total(slope: jax.Array) -> jax.Array:
        return jax.vmap(lambda q, k, v: loss("alibi", q, k, v, {"slope": slope}))(q, k, v).sum()

    want = sum(jax.grad(lambda s, i=i: loss("alibi", q[i], k[i], v[i], {"slope": s}))(slope) for i in range(3))
    close(jax.grad(total)(slope), want, 1e-4)


def test_nested_vmap() -> None:
    q, k, v = arrays(0, 2, 3, batch=2)
    one = partial(outputs, "causal", mine={})
    want = stacked(lambda q, k, v: stacked(one, q, k, v), q, k, v)
    close(jax.vmap(jax.vmap(one))(q, k, v), want)


@pytest.mark.parametrize("name", ["causal", "document", "forgetting", "gpt_oss"])
@pytest.mark.parametrize("function", [outputs, gradients], ids=["outputs", "gradients"])
def test_vmap_of_packed_sequences(name: str, function: Callable[..., Any]) -> None:
    """Each mapped call has its own sequences; all of them become the sequences of one call."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (3, 30, h, HEAD_DIM)) for key, h in zip(keys, (4, 2, 2), strict=False))
    begins = jnp.asarray([[0, 7, 7, 30], [0, 1, 29, 30], [0, 10, 20, 30]], jnp.int32)
    mine = {
        "document": {"doc": jnp.zeros((3, 30), jnp.int32)},
        "forgetting": {"g": -jax.random.uniform(keys[3], (3, 30, HEADS))},
        "gpt_oss": {"sink": jnp.ones((3, HEADS))},
    }.get(name, {})

    def one(q: jax.Array, k: jax.Array, v: jax.Array, mine: Trained, begins: jax.Array) -> Any:
        return function(name, q, k, v, mine, cu_seqlens_q=begins)

    close(jax.vmap(one)(q, k, v, mine, begins), stacked(one, q, k, v, mine, begins))


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_gives_each_row_the_offset_of_a_single_row(packed: bool) -> None:
    """Kernels read one offset per batch row or sequence: when axes fold, the offset of a single row is repeated."""
    q, k, v = (x[:, 0] if packed else x for x in arrays(11, 3, batch=1))
    options: dict[str, Any] = {"cu_seqlens_q": jnp.array([0, ROWS], jnp.int32)} if packed else {}

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return outputs("causal", q, k, v, {}, q_offset=jnp.array([-5], jnp.int32), **options)

    close(jax.vmap(one)(q, k, v), stacked(one, q, k, v))


def test_vmap_folds_an_offset_of_one_row_into_one_per_row() -> None:
    """Positions of one row may stay one row for all, because a stride of 0 repeats them; offsets have no strides."""
    assert jax_batching._fold("row_offsets", jnp.array([-5]), 0, 3, 1, False, {}).tolist() == [-5, -5, -5]
    assert jax_batching._fold("q_positions", jnp.zeros((1, ROWS)), 0, 3, 1, False, {}).shape == (1, ROWS)


def test_vmap_of_dropout_draws_what_each_call_alone_draws() -> None:
    q, k, v = arrays(0, 3, batch=2)
    seeds = jnp.asarray([1, 2, 3])

    def one(q: jax.Array, k: jax.Array, v: jax.Array, seed: Any) -> Any:
        return ops.causal_dropout(q, k, v, dropout_p=0.3, seed=seed)

    close(jax.vmap(one)(q, k, v, seeds), stacked(one, q, k, v, seeds))
    five = partial(one, seed=5)
    close(jax.vmap(five)(q, k, v), stacked(five, q, k, v))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_seed_is_a_key_of_any_generator(impl: str) -> None:
    q, k, v = arrays(batch=1)
    keys = jax.random.split(jax.random.key(0, impl=impl))

    def of(key: jax.Array) -> Any:
        return ops.causal_dropout(q, k, v, dropout_p=0.3, seed=key)

    first = of(keys[0])
    assert not jnp.array_equal(first, of(keys[1]))
    close(first, jax.jit(of)(keys[0]))


def test_scan_over_layers_with_a_window_each() -> None:
    q, k, v = arrays()
    sizes = jnp.asarray([3, 7, 12])

    def layer(x: Any, size: jax.Array) -> tuple[Any, None]:
        return ops.window(x, k, v, size=size), None

    def scanned(q: Any) -> Any:
        return jax.lax.scan(layer, q, sizes)[0].sum()

    def unrolled(q: Any) -> Any:
        for size in (3, 7, 12):
            q = ops.window(q, k, v, size=size)
        return q.sum()

    close(jax.value_and_grad(scanned)(q), jax.value_and_grad(unrolled)(q))


@pytest.mark.parametrize("name", ["causal", "alibi", "forgetting"])
def test_checkpoint_saves_what_the_policy_names(name: str) -> None:
    """With o and lse saved, and the running sums of a log-decay, the backward runs no forward again."""
    q, k, v = arrays()

    def block(q: jax.Array) -> jax.Array:
        return jnp.sin(jnp.asarray(getattr(ops, name)(jnp.cos(q), k, v, **own(name)))).sum()

    policy = jax.checkpoint_policies.save_only_these_names(ops.RESIDUALS)
    want = jax.grad(block)(q)
    for chosen, forwards in ((None, 2), (policy, 1)):
        saved = jax.checkpoint(block, policy=chosen)
        close(jax.grad(saved)(q), want)
        assert str(jax.make_jaxpr(jax.grad(saved))(q)).count(f"{name}_fwd[") == forwards


@pytest.mark.parametrize("name", ["causal", "forgetting", "document"])
def test_strict_promotion_of_dtypes_changes_nothing(name: str) -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())

    def gradient() -> jax.Array:
        dq: jax.Array = jax.grad(lambda q: getattr(ops, name)(q, k, v, **own(name)).astype(jnp.float32).sum())(q)
        return dq

    want = gradient()
    with jax.numpy_dtype_promotion("strict"):
        close(gradient(), want)


def test_a_seed_that_is_known_is_not_negative() -> None:
    q, k, v = arrays()
    with pytest.raises(
        ValueError, match=r"causal_dropout: seed: expected an int from 0 to 2\*\*63 - 1 or None, got -1"
    ):
        ops.causal_dropout(q, k, v, dropout_p=0.5, seed=jnp.int32(-1))


def test_eval_shape_and_donated_buffers() -> None:
    q, k, v = arrays()
    o, lse = jax.eval_shape(partial(ops.causal, return_lse=True), q, k, v)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (BATCH, HEADS, ROWS), jnp.float32)
    want = ops.causal(q, k, v)
    close(jax.jit(ops.causal, donate_argnums=0)(q.copy(), k, v), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_go_through(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in arrays())
    o, lse = ops.causal(q, k, v, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, jnp.float32)
    dq, dk, dv = jax.grad(lambda *x: jnp.sum(jnp.asarray(ops.causal(*x)), dtype=jnp.float32), argnums=(0, 1, 2))(
        q, k, v
    )
    assert dq.dtype == dk.dtype == dv.dtype == dtype


@pytest.mark.parametrize("name", ["causal", "forgetting"])
def test_without_jit(name: str) -> None:
    q, k, v = arrays(batch=1)
    mine = own(name, batch=1)
    want = outputs(name, q, k, v, mine), gradients(name, q, k, v, mine)
    with jax.disable_jit():
        close((outputs(name, q, k, v, mine), gradients(name, q, k, v, mine)), want)


def test_vmap_without_jit() -> None:
    mapped = arrays(0, 2, batch=1)
    one = partial(outputs, "causal", mine={})
    with jax.disable_jit():
        close(jax.vmap(one)(*mapped), stacked(one, *mapped))


def test_new_values_do_not_trace_again() -> None:
    q, k, v = arrays()
    traces = []

    @jax.jit
    def step(q: jax.Array, size: jax.Array) -> Any:
        traces.append(1)
        return ops.window(q, k, v, size=size)

    for size in (2, 5, 9):
        close(step(q, jnp.asarray(size)), ops.window(q, k, v, size=size))
    assert len(traces) == 1


def test_a_schedule_goes_where_arrays_go() -> None:
    q, k, v = arrays()
    doc = own("document")["doc"]
    schedule = ops.document.schedule(q, k, v, doc=doc)

    @jax.jit
    def layers(q: Any, schedule: Any) -> Any:
        return jax.lax.scan(lambda x, _: (ops.document(x, k, v, doc=doc, schedule=schedule), None), q, None, 2)[0]

    once: Any = ops.document(q, k, v, doc=doc)
    close(layers(q, schedule), ops.document(once, k, v, doc=doc))


# ----------------------------------------------------------------------------------------------------------- sharding


def mesh(*shape: int) -> Mesh:
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4 before JAX starts")
    return Mesh(np.array(devices[:4]).reshape(shape), ("data", "model"))


def collectives(function: Callable[..., Any], *given: Any) -> set[str]:
    """The operations of a compiled program that move data between devices."""
    text = str(jax.jit(function).lower(*given).compile().as_text())
    names = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
    return {name for name in names if f" {name}(" in text or f" {name}-start(" in text}


BATCHED, HEADED = P("data", None, "model", None), P("model")


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("name", ["causal", "alibi", "gpt_oss", "forgetting", "document"])
def test_sharded_arrays_stay_where_they_are(name: str, shape: tuple[int, int]) -> None:
    """Cut along batch and heads, no device needs data of another device, except for sums over the batch."""
    on = mesh(*shape)
    q, k, v = arrays()
    mine = own(name)
    specs = {"slope": HEADED, "sink": HEADED, "g": P("data", None, "model"), "doc": P("data", None)}
    put = [jax.device_put(x, NamedSharding(on, BATCHED)) for x in (q, k, v)]
    put_mine = {n: jax.device_put(x, NamedSharding(on, specs[n])) for n, x in mine.items()}
    one = partial(outputs, name)
    close(jax.jit(one)(*put, put_mine), one(q, k, v, mine))
    assert collectives(one, *put, put_mine) == set()
    backward = partial(gradients, name)
    got = jax.jit(backward)(*put, put_mine)
    close(got, backward(q, k, v, mine), 1e-4)
    # The gradient of a tensor that all batch rows read is a sum over the batch rows.
    assert collectives(backward, *put, put_mine) <= {"all-reduce"}
    assert got[0].sharding.is_equivalent_to(NamedSharding(on, BATCHED), 4)


def test_one_key_head_for_sharded_query_heads() -> None:
    on = mesh(1, 4)
    q, k, v = arrays(kv_heads=1)
    put = [jax.device_put(q, NamedSharding(on, P(None, None, "model", None))), k, v]
    backward = partial(gradients, "causal")
    close(jax.jit(backward)(*put, {}), backward(q, k, v, {}), 1e-4)
    assert collectives(partial(outputs, "causal"), *put, {}) == set()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["causal", "alibi", "forgetting"])
def test_shard_map_over_batch_and_heads(name: str, check_vma: bool) -> None:
    on = mesh(2, 2)
    q, k, v = arrays()
    mine = own(name)
    specs = {"slope": HEADED, "g": P("data", None, "model")}
    mapped = jax.shard_map(
        lambda q, k, v, mine: getattr(ops, name)(q, k, v, **mine),
        mesh=on,
        in_specs=(BATCHED, BATCHED, BATCHED, {n: specs[n] for n in mine}),
        out_specs=BATCHED,
        check_vma=check_vma,
    )
    close(mapped(q, k, v, mine), getattr(ops, name)(q, k, v, **mine))

    def total(function: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, mine: Trained) -> jax.Array:
        return jnp.sum(function(q, k, v, mine) ** 2)

    argnums = (0, 1, 2, 3)
    want = jax.grad(partial(total, lambda q, k, v, mine: getattr(ops, name)(q, k, v, **mine)), argnums)(q, k, v, mine)
    close(jax.jit(jax.grad(partial(total, mapped), argnums))(q, k, v, mine), want, 1e-4)
