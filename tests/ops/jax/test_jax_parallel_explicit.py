"""Context parallelism in JAX on meshes with axes of the type Explicit, which `jax.make_mesh` makes by default."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from generated.jax_parallel import context_parallel, plan
from tests.ops.jax.test_jax_parallel import DIM, HEADS, check, compare, load

pytestmark = [
    pytest.mark.covers(family="reference", framework="jax"),
    pytest.mark.skipif(len(jax.devices()) < 4, reason="XLA_FLAGS gives JAX fewer than 4 devices"),
]

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(kinds: tuple[AxisType, ...], **sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


@pytest.mark.parametrize("strategy", ["heads", "gather", "ring"])
@pytest.mark.parametrize("variant", ["alibi", "forgetting", "gpt_oss", "document", "causal_dropout"])
def test_devices_give_the_results_of_one(variant: str, strategy: str) -> None:
    check(variant, mesh_of((EXPLICIT,), cp=4), P(None, "cp", None), strategy)


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_batch_rows_are_cut_as_well(kinds: tuple[AxisType, ...], strategy: str) -> None:
    """36 rows of the layout do not divide by the devices in the order of the sequence, whose number is 35."""
    check("alibi", mesh_of(kinds, dp=2, cp=2), P("dp", "cp", None), strategy, seq=35)
    check("causal_dropout", mesh_of(kinds, dp=2, cp=2), P("dp", "cp", None), strategy, seq=36)


def test_nodes() -> None:
    check("window", mesh_of((EXPLICIT, EXPLICIT), node=2, gpu=2), P(None, ("node", "gpu"), None), "2d", seq=35)


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_numbers_and_an_axis_that_the_spec_does_not_name(is_set: bool, traced: bool) -> None:
    """The batch rows of q are cut over an axis that `spec` leaves out: they are gathered."""
    mesh = mesh_of((EXPLICIT, AUTO), dp=2, cp=2)
    op = load("window")
    layout = plan(op, 2, seq=36, heads=HEADS, head_dim=DIM, strategy="gather", size=5)
    call = context_parallel(op, layout, mesh=mesh, spec=P(None, "cp"))
    shapes = {"q": (2, 36, HEADS[0], DIM), "k": (2, 36, HEADS[1], DIM), "v": (2, 36, HEADS[1], DIM)}
    whole = {name: jax.random.normal(jax.random.key(len(name)), shape) for name, shape in shapes.items()}

    def loss(attend: Any, size: Any, **given: jax.Array) -> jax.Array:
        return jnp.sin(attend(size, **given)).sum()

    def several(size: Any, **given: jax.Array) -> jax.Array:
        return layout.unshard(call(**{name: layout.shard(x, 1) for name, x in given.items()}, size=size), 1)

    def one(size: Any, **given: jax.Array) -> jax.Array:
        o: jax.Array = op(**given, size=size)
        return o

    def gradients(attend: Any, given: dict[str, jax.Array]) -> Any:
        size = jnp.int32(5) if traced else 5

        def of_size(given: dict[str, jax.Array], size: Any) -> jax.Array:
            return loss(attend, size, **given)

        if traced:
            return jax.jit(jax.grad(of_size))(given, size)
        return jax.jit(jax.grad(lambda given: of_size(given, size)))(given)

    want = gradients(one, whole)
    with jax.set_mesh(mesh) if is_set else jax.default_device(jax.devices()[0]):
        sharded = {name: jax.device_put(x, NamedSharding(mesh, P("dp"))) for name, x in whole.items()}
        compare(gradients(several, sharded), want)


def test_rows_stay_cut() -> None:
    mesh = mesh_of((EXPLICIT,), cp=4)
    layout = plan(load("causal"), 4, seq=64, heads=HEADS, head_dim=DIM, strategy="gather", balance="zigzag")
    x = jnp.arange(128.0).reshape(64, 2)
    cut = layout.shard(jax.device_put(x, NamedSharding(mesh, P("cp"))))
    assert jax.typeof(cut).sharding.spec == P("cp", None)
    assert not layout.in_order
    whole = layout.unshard(cut)
    assert jax.typeof(whole).sharding.spec == P("cp", None)
    np.testing.assert_array_equal(whole, x)


def test_rows_in_the_order_of_the_sequence_do_not_move() -> None:
    mesh = mesh_of((AUTO,), cp=4)
    layout = plan(load("full"), 4, seq=64, heads=HEADS, head_dim=DIM, strategy="gather", balance="contiguous")
    by_rows = NamedSharding(mesh, P("cp"))
    x = jax.device_put(jnp.arange(128.0).reshape(64, 2), by_rows)
    for step in (layout.shard, layout.unshard):
        text = jax.jit(step, out_shardings=by_rows).lower(x).compile().as_text()
        assert "all-gather" not in str(text)
        np.testing.assert_array_equal(step(x), x)


def test_bad_arguments_are_named() -> None:
    op, mesh = load("alibi"), mesh_of((EXPLICIT,), cp=2)
    layout = plan(op, jax.sharding.AbstractMesh((2,), ("cp",)), seq=64, heads=HEADS, head_dim=DIM)
    q = jnp.zeros((1, 64, 4, DIM))
    attend = context_parallel(op, layout, mesh=mesh, spec=P(None, "cp"))
    for slope in ([0.1] * 4, 0.1):
        with pytest.raises(ValueError, match=r"alibi: slope: expected a jax.Array, got (list|float)"):
            attend(q, q, q, slope=slope)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mesh": 4}, "mesh: expected a jax.sharding.Mesh or None, got 4"),
        ({"spec": NamedSharding(mesh, P("cp"))}, "spec: expected a PartitionSpec or None, got NamedSharding"),
        ({"spec": P("cp", "cp")}, "spec: expected each axis of the mesh once, got "),
    ]
    for bad, text in wrong:
        with pytest.raises(ValueError, match=f"context_parallel: {text}"):
            context_parallel(op, layout, **{"mesh": mesh, **bad})
    with pytest.raises(ValueError, match="context_parallel: op: expected an op of this package, such as"):
        context_parallel(jnp.sum, layout)
    with pytest.raises(ValueError, match="plan: mesh: expected an int of at least 1, got 0"):
        plan(op, 0, seq=64, heads=HEADS, head_dim=DIM)
    for name in ("cu_seqlens", "segment_ids"):
        with pytest.raises(ValueError, match=f"plan: {name}: expected an array with values, got a traced array"):
            jax.jit(lambda x, name=name: plan(op, 2, seq=64, heads=HEADS, head_dim=DIM, **{name: x}).seq)(jnp.zeros(64))
