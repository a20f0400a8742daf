"""Arrays that are sharded over the devices of a mesh: few key heads, packed calls, axes of type Explicit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from generated import jax as ops
from generated._runtime.core.checks import ArgumentError
from generated._runtime.jax import passes
from tests.ops.jax.test_jax_transforms import BATCHED, HEADS, arrays, close, collectives, gradients, mesh, outputs, own

pytestmark = pytest.mark.covers(variant="name", family="reference", framework="jax")


def test_packed_calls_keep_sharded_heads() -> None:
    on = mesh(2, 2)
    given = [x.reshape(-1, *x.shape[2:]) for x in arrays()]
    begins = jnp.asarray([0, 30, 31, 96])
    put = [jax.device_put(x, NamedSharding(on, P(None, "model"))) for x in given]
    for function in (outputs, gradients):
        one: Any = partial(function, "causal", mine={}, cu_seqlens_q=begins)
        close(jax.jit(one)(*put), one(*given), 1e-4)


def test_dropout_of_sharded_arrays_draws_what_one_device_draws() -> None:
    on = mesh(2, 2)
    given = arrays()
    put = [jax.device_put(x, NamedSharding(on, BATCHED)) for x in given]
    one: Any = partial(ops.causal_dropout, dropout_p=0.5, seed=jax.random.key(3))
    close(jax.jit(one)(*put), one(*given))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keys", [P(), P(None, None, "data")])
def test_more_devices_than_key_heads(kv_heads: int, keys: P) -> None:
    """Query heads may be sharded over more devices than there are key heads."""
    on = mesh(2, 2)
    q, k, v = arrays(kv_heads=kv_heads)
    keys = keys if kv_heads > 1 else P()
    specs = (P(None, None, ("data", "model")), keys, keys)
    put = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip((q, k, v), specs, strict=True)]
    for function in (outputs, gradients):
        one: Any = partial(function, "causal", mine={})
        close(jax.jit(one)(*put), one(q, k, v), 1e-4)


# The mesh, and the specs of q, of k and v, and of a tensor per head. Two devices share each of two key heads.
SHARED = [
    ((1, 4), P(None, None, "model"), P(), P("model")),
    ((4, 1), P(None, None, "data"), P(), P()),
    ((2, 2), P(None, None, ("data", "model")), P(None, None, "data"), P(("data", "model"))),
    ((2, 2), P(None, None, ("model", "data")), P(None, None, "model"), P(("model", "data"))),
]


@pytest.mark.parametrize("name", ["causal", "alibi", "gpt_oss", "forgetting", "document"])
@pytest.mark.parametrize(("shape", "queries", "keys", "headed"), SHARED)
def test_devices_share_a_key_head(name: str, shape: tuple[int, int], queries: P, keys: P, headed: P) -> None:
    """No array moves, except for the sums of dk and dv over the devices that share a key head."""
    on = mesh(*shape)
    q, k, v = arrays()
    mine = own(name)
    specs = {"slope": headed, "sink": headed, "g": P(None, None, *headed), "doc": P()}
    put = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip((q, k, v), (queries, keys, keys), strict=True)]
    put_mine = {n: jax.device_put(x, NamedSharding(on, specs[n])) for n, x in mine.items()}
    for function, moves in ((outputs, set()), (gradients, {"all-reduce"})):
        one: Any = partial(function, name)
        close(jax.jit(one)(*put, put_mine), one(q, k, v, mine), 1e-4)
        assert collectives(one, *put, put_mine) <= moves


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_of_a_shared_key_head_are_sharded_as_queries(layout: str, kind: AxisType) -> None:
    """In packed calls and others, with axes of either type."""
    on = Mesh(mesh(1, 4).devices, ("data", "model"), axis_types=(kind, kind))
    q, k, v = arrays() if layout == "bshd" else (x.swapaxes(1, 2) for x in arrays())
    packed = [x.reshape(-1, *x.shape[2:]) for x in arrays()]
    dense: Any = partial(gradients, "causal", mine={}, layout=layout)
    rows: Any = partial(gradients, "causal", mine={}, cu_seqlens_q=jnp.asarray([0, 30, 31, 96]))
    for one, given, axis in ((dense, (q, k, v), layout.index("h")), (rows, packed, 1)):
        want = one(*given)
        with jax.set_mesh(on):
            put = [jax.device_put(given[0], P(*[None] * axis, "model")), *given[1:]]
            dq, dk, dv, _ = got = jax.jit(one)(*put)
        close(got, want, 1e-4)
        assert dq.sharding.is_equivalent_to(put[0].sharding, dq.ndim)
        assert dk.sharding.is_fully_replicated
        assert dv.sharding.is_fully_replicated


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_whole_arrays_under_a_mesh(kind: AxisType) -> None:
    devices = mesh(2, 2).devices
    q, k, v = arrays()
    one: Any = partial(gradients, "alibi", mine=own("alibi"))
    want = one(q, k, v)
    with jax.set_mesh(Mesh(devices, ("data", "model"), axis_types=(kind, kind))):
        close(jax.jit(one)(q, k, v), want, 1e-4)
        close(one(q, k, v), want, 1e-4)


# The specs of q, of k and v, of o.
EXPLICIT = [
    (BATCHED, BATCHED, BATCHED),
    (P("data"), P(), P("data", None, None, None)),
    (P(), P("data"), P("data", None, None, None)),
    (P(None, "data"), P(None, None, None, "model"), P(None, None, None, None)),
]


@pytest.mark.parametrize("name", ["causal", "alibi", "gpt_oss", "forgetting", "document"])
@pytest.mark.parametrize(("queries", "keys", "result"), EXPLICIT)
def test_explicit_axes_shard_results_as_operands(name: str, queries: P, keys: P, result: P) -> None:
    """The types of o and of gradients name the axes of type Explicit along batch rows and heads."""
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    given, mine = arrays(), own(name)
    one: Any = partial(outputs, name, mine=mine)
    backward: Any = partial(gradients, name, mine=mine)
    want = one(*given), backward(*given)
    with jax.set_mesh(on):
        put = [jax.device_put(x, spec) for x, spec in zip(given, (queries, keys, keys), strict=True)]
        got = jax.jit(one)(*put), jax.jit(backward)(*put)
        close(got, want, 1e-4)
        assert jax.typeof(got[0][0]).sharding.spec == result
        for x, gradient in zip(put, got[1], strict=False):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(x).sharding.spec


def test_vmap_keeps_explicit_axes() -> None:
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    given = arrays(0, 3)
    want = jax.vmap(ops.causal)(*given)
    with jax.set_mesh(on):
        put = [jax.device_put(x, P(None, *BATCHED)) for x in given]
        got = jax.jit(jax.vmap(ops.causal))(*put)
        close(got, want)
        assert jax.typeof(got).sharding.spec == P(None, *BATCHED)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("spec", "packed", "kept"),
    [
        (P("data"), False, False),
        (P(None, None, "data"), False, False),
        (P(None, "data"), True, False),
        (P(), False, True),
    ],
)
def test_a_schedule_serves_only_a_whole_call(
    spec: P, packed: bool, kept: bool, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables are those of all batch rows and heads, so devices with some of them make their own."""
    given: list[jax.Array] = arrays()
    doc, options = own("document")["doc"], {}
    if packed:
        given, doc = [x.reshape(-1, *x.shape[2:]) for x in given], doc.reshape(-1)
        options = {"cu_seqlens_q": jnp.asarray([0, 30, 31, 96])}
    # On the CPU a schedule is empty, because the reference reads no tables.
    made = replace(ops.document.schedule(*given, doc=doc, **options), tables=(jnp.zeros((4, 1, 4, 4), jnp.int32),) * 3)
    seen = []
    direction = passes.Backward if backward else passes.Forward
    reference = direction.reference

    def recorded(self: Any, call: passes.Call, arrays: Any) -> Any:
        seen.append("table_0" in call.operands)
        return reference(self, call, arrays)

    monkeypatch.setattr(direction, "reference", recorded)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, schedule: Any) -> Any:
        return gradients("document", q, k, v, {"doc": doc}, **options, schedule=schedule)[:3]

    on = NamedSharding(mesh(2, 2), spec)
    q, k, v = given
    got = jax.jit(one)(*(jax.device_put(x, on) for x in (q, k, v)), made)
    assert set(seen) == {kept}
    monkeypatch.undo()
    close(got, one(q, k, v, None), 1e-4)


# How x `[mapped, B, S, H, D]` is sharded.
MAPPED = [P("data"), P("data", "model"), P("data", None, None, "model"), P(("data", "model")), P(None, "data")]


# A case compiles five functions. Without a mesh in the context, calls find it by their arrays, whatever the spec, so
# the axis that is mapped and one that is not stand for all.
CONTEXTS = [
    pytest.param(spec, in_context, id=f"{spec}-{'set_mesh' if in_context else 'no_mesh'}", marks=marks)
    for spec in MAPPED
    for in_context, marks in (
        (True, []),
        (False, [] if spec in (P("data"), P(None, "data")) else [pytest.mark.full]),
    )
]


def calls_that_are_not_folded(x: jax.Array) -> list[Callable[[jax.Array], Any]]:
    """Of `[mapped, B, S, H, D]`."""
    slope = jnp.full(HEADS, 0.3)
    keys = x[0]

    def dropped(x: jax.Array) -> Any:
        return jax.vmap(lambda y: ops.causal_dropout(y, y, y, dropout_p=0.5, seed=1))(x)

    def of_one_key_array(x: jax.Array) -> Any:
        return jax.vmap(lambda y: ops.causal_dropout(y, keys, keys, dropout_p=0.5, seed=1))(x)

    def of_slope(x: jax.Array) -> Any:
        alibi: Any = ops.alibi
        return jax.grad(lambda s: (jax.vmap(lambda y: alibi(y, y, y, slope=s))(x) ** 2).sum())(slope)

    return [dropped, of_one_key_array, jax.grad(lambda x: (dropped(x) ** 2).sum()), of_slope]


@pytest.fixture(scope="module")
def not_folded() -> tuple[jax.Array, list[Callable[[jax.Array], Any]], list[jax.Array]]:
    """An array, the functions of it, and their results on one device."""
    x = arrays(0, 4, kv_heads=HEADS)[0]
    functions = calls_that_are_not_folded(x)
    return x, functions, [function(x) for function in functions]


@pytest.mark.parametrize(("spec", "in_context"), CONTEXTS)
def test_each_device_computes_its_calls_of_a_vmap(not_folded: Any, spec: P, in_context: bool) -> None:
    """Calls that cannot be folded into one call, over an axis that is sharded over axes of type Explicit."""
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, functions, want = not_folded
    with jax.set_mesh(on) if in_context else nullcontext():
        put = jax.device_put(x, NamedSharding(on, spec))
        got = [jax.jit(function)(put) for function in functions]
        close(got, want, 1e-4)
        for result in got[:3]:
            assert jax.typeof(result).sharding.spec == P(*spec, *[None] * (5 - len(spec)))
        # Dropout depends on the numbers of batch rows and heads, so each call needs all of its own.
        assert len(spec) > 1 or not collectives(functions[0], put)


def test_vmap_inside_of_shard_map_over_another_axis() -> None:
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = arrays(0, 4, kv_heads=HEADS)[0]

    def dropped(x: jax.Array) -> Any:
        return jax.vmap(lambda y: ops.causal_dropout(y, y, y, dropout_p=0.5, seed=1))(x)

    # Each device along "data" numbers its batch rows from 0.
    want = jnp.concatenate([dropped(x[:, :2]), dropped(x[:, 2:])], 1)
    with jax.set_mesh(on):
        by_rows = jax.shard_map(dropped, in_specs=P(None, "data"), out_specs=P(None, "data"), axis_names={"data"})
        close(jax.jit(by_rows)(jax.device_put(x, P("model", "data"))), want)


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")])
def test_a_mesh_of_one_device_with_explicit_axes(spec: P) -> None:
    given = arrays()
    one: Any = partial(gradients, "causal", mine={})
    want = one(*given)
    with jax.set_mesh(Mesh(jax.devices()[:1], ("data",), axis_types=(AxisType.Explicit,))):
        close(jax.jit(one)(*(jax.device_put(x, spec) for x in given)), want, 1e-4)


def test_batch_rows_on_different_explicit_axes_are_refused() -> None:
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v = arrays()
    message = "causal: k: expected batch rows sharded over 'data', as those of q, or whole, got 'model'"
    with jax.set_mesh(on), pytest.raises(ArgumentError, match=message):
        ops.causal(jax.device_put(q, P("data")), jax.device_put(k, P("model")), v)
