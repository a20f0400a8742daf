"""Arrays that are sharded over the devices of a mesh: few key heads, packed calls, axes of type Explicit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from generated import jax as ops
from generated._runtime.core.checks import ArgumentError
from tests.ops.jax.test_jax_transforms import BATCHED, arrays, close, gradients, mesh, outputs, own

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


def test_batch_rows_on_different_explicit_axes_are_refused() -> None:
    on = Mesh(mesh(2, 2).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v = arrays()
    message = "causal: k: expected batch rows sharded over 'data', as those of q, or whole, got 'model'"
    with jax.set_mesh(on), pytest.raises(ArgumentError, match=message):
        ops.causal(jax.device_put(q, P("data")), jax.device_put(k, P("model")), v)
