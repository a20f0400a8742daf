"""Context parallelism in JAX over the devices of one process, against one call: results, gradients, collectives."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from codegen.testing import calls
from generated.jax_parallel import context_parallel, plan
from tests.support.cases import VARIANTS

pytestmark = [
    pytest.mark.covers(family="reference", framework="jax"),
    pytest.mark.skipif(len(jax.devices()) < 4, reason="XLA_FLAGS gives JAX fewer than 4 devices"),
]

HEADS, DIM, BATCH = (4, 2), 16, 2
BOUND = 2e-5
NO_RING = ("band_images", "forgetting_pruned")
"""Variants that read a tensor at rows of queries and of keys, and attend to keys after a query or compute with
positions themselves."""


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(sizes)
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def load(variant: str) -> Any:
    import generated.jax

    return getattr(generated.jax, variant)


def draw(variant: str, seq: int, batch: int = BATCH) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arrays that have a gradient, arrays that have none, and numbers of a call in layout "bshd"."""
    shape = calls.Shape(batch=batch, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=DIM)
    import torch

    inputs = calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=torch.float32, device="cpu")
    arrays = {name: jnp.asarray(getattr(inputs, name).detach().transpose(1, 2).numpy()) for name in ("q", "k", "v")}
    arrays |= {name: jnp.asarray(x.detach().numpy()) for name, x in inputs.tensors.items()}
    trained = {name for name in arrays if name in "qkv" or inputs.tensors[name].requires_grad}
    return (
        {name: x for name, x in arrays.items() if name in trained},
        {name: x for name, x in arrays.items() if name not in trained},
        dict(inputs.scalars),
    )


def loss_of(o: jax.Array, lse: jax.Array) -> jax.Array:
    """A number that depends on all of o and lse; rows without keys have an lse of -inf."""
    weights = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
    finite = jnp.where(jnp.isinf(lse), 0.0, lse)
    return (o * weights).sum() + jnp.sin(finite).sum()


def compare(got: Any, want: Any, bound: float = BOUND) -> None:
    for name, wanted in want.items():
        # By NumPy: JAX compiles each step for each shape.
        a, b = (np.nan_to_num(np.asarray(x), neginf=0.0) for x in (got[name], wanted))
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
        assert error < bound, f"{name}: {error:.1e}"


def loss_over(call: Any, layout: Any, given: dict[str, Any], axis: int) -> Any:
    """The loss of a call over several devices, with o and lse in the order of one device; `axis`: of q's rows."""

    def several(trained: dict[str, Any]) -> Any:
        rows = {name: layout.shard(x, axis) if name in ("q", "k", "v", "g") else x for name, x in trained.items()}
        o, lse = call(**rows, **given, return_lse=True)
        o, lse = layout.unshard(o, axis), layout.unshard(lse, axis + 1)
        return loss_of(o, lse), (o, lse)

    return several


def check(variant: str, mesh: Any, spec: Any, strategy: str, seq: int = 36, **plan_options: Any) -> Any:
    """Compare with one device, and return the compiled function of the gradients over several devices."""
    op = load(variant)
    trained, fixed, numbers = draw(variant, seq)
    unread = ("q", "k", "v", "g", "sink", "dropout_p", "seed")
    read = {name: x for name, x in {**trained, **fixed, **numbers}.items() if name not in unread}
    axis = "cp" if "cp" in mesh.shape else tuple(mesh.shape)
    ranks = mesh.shape.get("cp", mesh)
    layout = plan(op, ranks, seq=seq, heads=HEADS, head_dim=DIM, strategy=strategy, **read, **plan_options)
    over_devices = context_parallel(op, layout, axis=axis, mesh=mesh, spec=spec)

    def one(trained: dict[str, Any]) -> Any:
        o, lse = op(**trained, **fixed, **numbers, return_lse=True)
        return loss_of(o, lse), (o, lse)

    several = loss_over(over_devices, layout, {**fixed, **numbers}, axis=1)
    compiled = jax.jit(jax.grad(several, has_aux=True)).lower(trained).compile()
    (found, (o, lse)), (wanted, (want_o, want_lse)) = compiled(trained), jax.grad(one, has_aux=True)(trained)
    compare({**found, "o": o, "lse": lse}, {**wanted, "o": want_o, "lse": want_lse})
    return compiled


def collectives(compiled: Any) -> dict[str, int]:
    """The number of collectives of each kind in a compiled function."""
    text = compiled.as_text()
    kinds = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return {kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)) for kind in kinds}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["heads", "gather", "ring"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_devices_give_the_results_of_one(variant: str, strategy: str, ranks: int) -> None:
    if strategy == "ring" and variant in NO_RING:
        with pytest.raises(
            ValueError, match="plan: strategy: expected 'gather', 'exchange' or 'auto', got 'ring' with"
        ):
            check(variant, mesh_of(cp=ranks), P(None, "cp", None), strategy)
        return
    check(variant, mesh_of(cp=ranks), P(None, "cp", None), strategy)


@pytest.mark.parametrize("strategy", ["heads", "gather", "ring"])
def test_batch_rows_and_heads_are_cut_as_well(strategy: str) -> None:
    check("alibi", mesh_of(dp=2, cp=2), P("dp", "cp", None), strategy, seq=35)
    if strategy != "heads":
        check("alibi", mesh_of(cp=2, tp=2), P(None, "cp", "tp"), strategy)
    # Several devices drop what one device drops, because dropout counts batch rows and heads of the whole call.
    check("causal_dropout", mesh_of(dp=2, cp=2), P("dp", "cp", None), strategy, seq=35)
    if strategy != "heads":
        check("causal_dropout", mesh_of(cp=2, tp=2), P(None, "cp", "tp"), strategy)


@pytest.mark.parametrize("variant", ["alibi", "forgetting", "causal_dropout"])
def test_heads_are_split_inside_nodes_and_keys_gathered_across(variant: str) -> None:
    compiled = check(variant, mesh_of(node=2, gpu=2), P(None, ("node", "gpu"), None), "2d", seq=35)
    counts = collectives(compiled)
    assert "all-to-all" in compiled.as_text()
    assert counts["all-gather"] + counts["collective-permute"] > 0, counts  # nodes gather keys, or exchange them


def test_a_ring_sends_keys_round_and_gathers_none() -> None:
    """Four devices permute k and v three times each in each pass, and their gradients four times in the backward. XLA
    on the CPU drops barriers, and then merges the equal permutes of both passes."""
    compiled = check("causal", mesh_of(cp=4), P(None, "cp", None), "ring", seq=64)
    counts = collectives(compiled)
    assert counts["all-gather"] == counts["reduce-scatter"] == counts["all-to-all"] == 0, counts
    assert counts["collective-permute"] in (2 * (3 + 4), 2 * (3 + 3 + 4)), counts


def test_a_ring_ends_where_no_row_needs_more() -> None:
    """Rows of a window need the keys of their own device and of the two before it: three of four steps remain."""
    compiled = check("window", mesh_of(cp=4), P(None, "cp", None), "ring", seq=64, balance="contiguous")
    assert collectives(compiled)["collective-permute"] in (2 * (2 + 3), 2 * (2 + 2 + 3))


@pytest.mark.parametrize("variant", ["window", "forgetting", "causal_dropout"])
def test_devices_may_get_only_the_keys_that_they_need(variant: str) -> None:
    """Devices exchange these keys by permutes; under a window nothing is gathered."""
    compiled = check(variant, mesh_of(cp=4), P(None, "cp", None), "exchange", seq=63)
    counts = collectives(compiled)
    assert counts["collective-permute"] > 0
    if variant == "window":
        assert counts["all-gather"] == counts["reduce-scatter"] == 0, counts


def test_devices_need_only_keys_of_their_documents() -> None:
    """Each of two devices has one of two documents, so that nothing is sent."""
    op, mesh = load("causal"), mesh_of(cp=2)
    ids = np.arange(64) // 32
    layout = plan(
        op, mesh, seq=64, heads=HEADS, head_dim=DIM, strategy="exchange", segment_ids=ids, balance="contiguous"
    )
    call = context_parallel(op, layout, mesh=mesh, spec=P(None, "cp"))
    trained, _, _ = draw("causal", seq=64)

    def several(x: dict[str, Any]) -> Any:
        return jnp.sin(call(**x)).sum()

    def one(x: dict[str, Any]) -> Any:
        return jnp.sin(op(**x, q_segment_ids=jnp.tile(jnp.asarray(ids), (BATCH, 1)))).sum()

    compiled = jax.jit(jax.grad(several)).lower(trained).compile()
    assert not any(collectives(compiled).values())
    compare(compiled(trained), jax.grad(one)(trained))


def test_packed_sequences_send_only_needed_keys() -> None:
    packed_sequences("causal", "exchange")


def test_packed_sequences_go_round_a_ring() -> None:
    packed_sequences("forgetting", "ring")


def test_keys_are_gathered_and_their_gradients_scattered() -> None:
    """No device adds up gradients of all keys: each array that is reduced over all devices is smaller."""
    compiled = check("causal", mesh_of(cp=2), P(None, "cp", None), "gather", seq=64)
    text, counts = compiled.as_text(), collectives(compiled)
    assert counts["reduce-scatter"] == 2, counts
    assert counts["all-to-all"] == 0, counts
    reduced = re.findall(r"= f32\[([\d,]*)\]\S* all-reduce", text)
    assert all(int(np.prod([int(n) for n in each.split(",") if n])) < 64 * DIM for each in reduced), reduced


@pytest.mark.parametrize("strategy", ["heads", "gather"])
@pytest.mark.parametrize("variant", ["causal", "causal_dropout", "alibi", "forgetting"])
def test_packed_sequences_are_cut_anywhere(variant: str, strategy: str) -> None:
    packed_sequences(variant, strategy)


def packed_sequences(variant: str, strategy: str) -> None:
    """Compare gradients of packed sequences with those of one device."""
    op, mesh, ends = load(variant), mesh_of(cp=2), jnp.array([0, 5, 29, 37])
    trained, fixed, numbers = draw(variant, seq=37, batch=1)
    trained = {name: x[0] if name in ("q", "k", "v", "g") else x for name, x in trained.items()}
    layout = plan(op, 2, seq=37, heads=HEADS, head_dim=DIM, strategy=strategy, cu_seqlens=ends)
    over_devices = context_parallel(op, layout, mesh=mesh, spec=P("cp", None))

    def one(trained: dict[str, Any]) -> Any:
        return loss_of(*op(**trained, **fixed, **numbers, cu_seqlens_q=ends, return_lse=True))

    def several(trained: dict[str, Any]) -> Any:
        rows = {name: layout.shard(x, 0) if name in ("q", "k", "v", "g") else x for name, x in trained.items()}
        o, lse = over_devices(**rows, **fixed, **numbers, return_lse=True)
        return loss_of(layout.unshard(o, 0), layout.unshard(lse, 1))

    compare(jax.jit(jax.grad(several))(trained), jax.grad(one)(trained))


# Over heads only what query heads of one key head give is added up, as in a call of one device.
@pytest.mark.parametrize(("strategy", "ranks"), [("gather", 4), pytest.param("heads", 4, marks=pytest.mark.full)])
def test_gradients_are_as_exact_as_those_of_one_call(strategy: str, ranks: int) -> None:
    """The mean error in bfloat16 is at most 1.1 times that of one call: parts are added up in float32."""
    op = load("alibi")
    trained, _, _ = draw("alibi", seq=128)
    narrow = {name: x.astype(jnp.bfloat16) if name in ("q", "k", "v") else x for name, x in trained.items()}
    layout = plan(op, ranks, seq=128, heads=HEADS, head_dim=DIM, strategy=strategy)
    call = context_parallel(op, layout, mesh=mesh_of(cp=ranks), spec=P(None, "cp", None))

    def one(x: dict[str, Any]) -> Any:
        return loss_of(*op(**x, return_lse=True))

    def several(x: dict[str, Any]) -> Any:
        o, lse = call(**{name: layout.shard(x[name], 1) for name in ("q", "k", "v")}, slope=x["slope"], return_lse=True)
        return loss_of(layout.unshard(o, 1), layout.unshard(lse, 2))

    exact = jax.grad(one)({name: x.astype(jnp.float32) for name, x in narrow.items()})
    of_one, found = jax.grad(one)(narrow), jax.grad(several)(narrow)  # compiled, XLA leaves out roundings
    for name in ("q", "k", "v"):
        assert found[name].dtype == jnp.bfloat16
        errors = [jnp.abs(x[name].astype(jnp.float32) - exact[name]).mean() for x in (found, of_one)]
        assert errors[0] <= 1.1 * errors[1], f"d{name}: {errors[0] / errors[1]:.2f} times"
    compare({"slope": found["slope"]}, {"slope": of_one["slope"]}, 2e-2)


@pytest.mark.parametrize(("strategy", "sizes"), [("heads", {"cp": 4}), ("gather", {"dp": 2, "cp": 2})])
def test_dropout_in_16_bits_has_gradients(strategy: str, sizes: dict[str, int]) -> None:
    """The batch rows and heads of a device, from which dropout counts, are traced numbers."""
    op = load("causal_dropout")
    trained = {name: x.astype(jnp.bfloat16) for name, x in draw("causal_dropout", seq=40)[0].items()}
    layout = plan(op, sizes["cp"], seq=40, heads=HEADS, head_dim=DIM, strategy=strategy)
    spec = P("dp" if "dp" in sizes else None, "cp", None)
    call = context_parallel(op, layout, mesh=mesh_of(**sizes), spec=spec)
    dropped = {"dropout_p": 0.5, "seed": 3}

    def one(x: dict[str, Any]) -> Any:
        return loss_of(*op(**x, **dropped, return_lse=True)), None

    both = (loss_over(call, layout, dropped, axis=1), one)
    found, wanted = (jax.jit(jax.grad(f, has_aux=True))(trained)[0] for f in both)
    found, wanted = ({name: x.astype(jnp.float32) for name, x in each.items()} for each in (found, wanted))
    compare(found, wanted, bound=2e-2)


@pytest.mark.parametrize("strategy", ["gather", "ring"])
def test_a_seed_may_be_a_key(strategy: str) -> None:
    op = load("causal_dropout")
    trained, _, _ = draw("causal_dropout", seq=40)
    layout = plan(op, 2, seq=40, heads=HEADS, head_dim=DIM, strategy=strategy)
    call = context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))

    @jax.jit
    def several(key: jax.Array) -> jax.Array:
        rows = {name: layout.shard(x, 1) for name, x in trained.items()}
        return layout.unshard(call(**rows, dropout_p=0.5, seed=key), 1)

    key = jax.random.key(3)
    compare({"o": several(key)}, {"o": op(**trained, dropout_p=0.5, seed=key)})


def test_it_is_called_inside_a_shard_map_of_ones_own_under_checkpoint() -> None:
    op, mesh = load("causal"), mesh_of(cp=2)
    trained, _, _ = draw("causal", seq=32)
    layout = plan(op, mesh, seq=32, heads=HEADS, head_dim=DIM, strategy="gather", segment_ids=np.arange(32) // 12)
    on_device = jax.checkpoint(context_parallel(op, layout))
    rows = P(None, "cp")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)
    ids = jnp.tile(jnp.arange(32) // 12, (BATCH, 1))

    def several(x: dict[str, Any]) -> Any:
        return jnp.sin(layout.unshard(mapped(*(layout.shard(x[name], 1) for name in ("q", "k", "v"))), 1)).sum()

    def one(x: dict[str, Any]) -> Any:
        return jnp.sin(op(**x, q_segment_ids=ids)).sum()

    compare(jax.jit(jax.grad(several))(trained), jax.grad(one)(trained))


@pytest.mark.parametrize(("variant", "strategy"), [("band_bias", "gather"), ("causal", "ring")])
def test_positions_may_come_in_any_order(variant: str, strategy: str) -> None:
    """A row attends to keys of later rows if their positions are earlier. `band_bias` reads a tensor by query row."""
    op, (trained, _, numbers) = load(variant), draw(variant, seq=23)
    positions = jnp.tile(jnp.arange(23)[::-1], (BATCH, 1))
    layout = plan(op, 2, seq=23, heads=HEADS, head_dim=DIM, strategy=strategy, balance="contiguous")
    call = context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))

    def one(x: dict[str, Any]) -> Any:
        return loss_of(*op(**x, **numbers, q_positions=positions, return_lse=True)), None

    several = loss_over(call, layout, {**numbers, "q_positions": layout.shard(positions, 1)}, axis=1)
    found, wanted = (jax.jit(jax.grad(f, has_aux=True))(trained)[0] for f in (several, one))
    compare(found, wanted)


def test_bad_calls_are_refused() -> None:
    op = load("causal")
    layout = plan(op, 2, seq=64, heads=HEADS, head_dim=DIM)
    by_nodes = plan(op, (2, 2), seq=64, heads=HEADS, head_dim=DIM)
    call, rows = context_parallel(op, by_nodes, mesh=mesh_of(cp=4), spec=P(None, "cp", None)), jnp.zeros((1, 64, 4, 16))
    with pytest.raises(ValueError, match=r"causal: layout: expected one planned for the axes .*, got '2d' with nodes"):
        call(rows, rows, rows)
    with pytest.raises(ValueError, match=r"causal: return_lse: expected True or False, got 'no'"):
        call(rows, rows, rows, return_lse="no")
    q = jnp.zeros((1, 60, 4, 16))
    with pytest.raises(ValueError, match=r"causal: q: expected 32 rows in \[B, rows, H, D\]"):
        context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))(q, q, q)
    with pytest.raises(ValueError, match=r"causal: q: expected 64 rows, in the order of layout\.shard, got 61"):
        context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))(*[jnp.zeros((1, 61, 4, 16))] * 3)
    decay, padded = load("forgetting"), plan(load("forgetting"), 2, seq=61, heads=HEADS, head_dim=DIM, strategy="ring")
    with_decay = context_parallel(decay, padded, mesh=mesh_of(cp=2), spec=P(None, "cp", None))
    with pytest.raises(ValueError, match=r"forgetting: g: expected 62 rows, in the order of layout\.shard, got 61"):
        with_decay(*[jnp.zeros((1, 62, 4, 16))] * 3, g=jnp.zeros((1, 61, 4)))
    with pytest.raises(
        ValueError, match="context_parallel: mesh: expected a mesh with the axes 'cp', 'dp', of the type"
    ):
        context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P("dp", "cp"))(q, q, q)
    with pytest.raises(ValueError, match="causal: layout: expected one planned for the 4 devices of the axis 'cp'"):
        context_parallel(op, layout, mesh=mesh_of(cp=4), spec=P(None, "cp", None))(q, q, q)
    with pytest.raises(ValueError, match="causal: layout: expected one planned for the 3 devices of the axis 'cp'"):
        context_parallel(op, layout, mesh=mesh_of(cp=3), spec=P(None, "cp", None))(*[jnp.zeros((1, 64, 4, 16))] * 3)
    uneven = (
        r"causal: q: expected a multiple of 2 along axis 0, which the devices of the mesh axis 'dp' share, got 1 in"
    )
    with pytest.raises(ValueError, match=uneven):
        context_parallel(op, layout, mesh=mesh_of(dp=2, cp=2), spec=P("dp", "cp"))(*[jnp.zeros((1, 64, 4, 16))] * 3)
    with pytest.raises(ValueError, match="context_parallel: spec: expected 'cp', the axis of the call, for rows"):
        context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P("cp"))(q, q, q)
    with pytest.raises(ValueError, match="context_parallel: mesh: expected a mesh, or a call inside jax"):
        context_parallel(op, layout)(q, q, q)
    assert len({layout, plan(op, 2, seq=64, heads=HEADS, head_dim=DIM)}) == 1
