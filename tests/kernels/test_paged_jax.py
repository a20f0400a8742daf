"""Calls of the JAX ops on paged caches: bits as torch's, under jit with traced lengths, tables and donated caches."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from codegen.testing.golden_jax import array, load_op, tensor
from generated import paging
from generated._runtime.core.checks import ArgumentError
from tests.kernels.test_paged import LEGAL, LENGTHS, TOLERANCE, Case, draw_case
from tests.support import paged_dims
from tests.support.cases import DEVICE, INTERPRET
from tests.support.rendering import importable

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="jax")


def arrays(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """q, k and v of a case, and its other arguments."""
    given = {name: array(x) for name, x in {**case.own, **case.kwargs}.items()}
    return array(case.q), array(case.k), array(case.v), given | {"layout": "bhsd"}


def assert_same(got: Sequence[jax.Array], want: Sequence[torch.Tensor]) -> None:
    """The same bits, NaN among them."""
    for each, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(tensor(each), wanted.contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize(("page_size", "queries"), [(16, (2,) * 5), (64, (5, 0, 1, 40, 2)), (7, (1,) * 5)])
@pytest.mark.parametrize("variant", LEGAL)
def test_the_same_bits_as_torch(variant: str, page_size: int, queries: Sequence[int]) -> None:
    case = draw_case(variant, page_size, queries)
    q, k, v, given = arrays(case)
    assert_same(load_op(variant)(q, k, v, return_lse=True, **given), case.call())


@pytest.mark.skipif(not INTERPRET, reason="values on a GPU are checked in debug mode alone")
def test_kernels_read_no_pages_beyond_the_cache() -> None:
    q, k = jnp.ones((1, 1, 2, 32)), jnp.ones((10, 16, 2, 32))
    table, lengths = jnp.asarray([[3, 99]]), jnp.asarray([20])
    with pytest.raises(ArgumentError, match=r"causal: page_table: expected pages from 0 to 9 .*, got 99 in sequence 0"):
        load_op("causal")(q, k, k, page_table=table, kv_lengths=lengths)
    assert jnp.isfinite(load_op("causal")(q, k, k, page_table=table, kv_lengths=lengths - 4)).all()


@pytest.fixture(scope="module")
def every_dim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An op with a tensor of each kind of dims, for torch and for JAX."""
    with importable(tmp_path_factory.mktemp("paged") / "tests", "paged_variants", paged_dims.SPEC) as package:
        yield tuple(importlib.import_module(f"{package.name}.{name}").every_dim for name in ("torch", "jax"))


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_of_every_dim(every_dim: tuple[Any, Any], packed: bool) -> None:
    torch_op, jax_op = every_dim
    qkv, call = paged_dims.draw(packed=packed, device=DEVICE)
    given = {name: array(x) for name, x in call.items()}
    got = jax_op(*map(array, qkv), return_lse=True, layout="bhsd", **given)
    assert_same(got, torch_op(*qkv, return_lse=True, **call))


def test_a_plan_goes_through_jit_and_serves_every_layer() -> None:
    case = draw_case("window", 16, (5, 0, 1, 40, 2))
    op: Any = load_op("window")
    q, k, v, given = arrays(case)
    shared = {name: given.pop(name) for name in ("size", "max_seqlen_q", "layout")}
    made = jax.jit(lambda q, k, given: op.plan(q, k, **shared, **given))(q, k, given)

    def layers(q: jax.Array, caches: Any, plan: Any, given: Any) -> jax.Array:
        def layer(q: jax.Array, cache: Any) -> Any:
            o = op(q, *cache, schedule=plan, **shared, **given)
            return q, o

        found: jax.Array = jax.lax.scan(layer, q, caches)[1]
        return found

    caches = tuple(jnp.stack([x, x]) for x in (k, v))
    want = case.call()[0]
    for o in jax.jit(layers)(q, caches, made, given):
        assert_same([o], [want])
    other = draw_case("window", 16, (1,) * 5)
    q, k, v, given = arrays(other)
    with pytest.raises(ArgumentError, match="schedule: expected one made for queries"):
        op(q, k, v, schedule=made, **given)


def test_lengths_and_tables_may_change_without_compiling_again() -> None:
    """Keys after the last one, and pages that are not in the table, are never read."""
    case = draw_case("causal", 16, (1,) * 5)
    op: Any = load_op("causal")
    q, k, v, given = arrays(case)
    table, traces = given["page_table"], []

    @jax.jit
    def step(table: jax.Array, lengths: jax.Array) -> Any:
        traces.append(0)
        return op(q, k, v, page_table=table, kv_lengths=lengths, layout="bhsd")

    for lengths in (LENGTHS, (3, 0, 1, 70, 64)):
        want = case.call(kv_lengths=torch.tensor(lengths, device=DEVICE))[0]
        assert_same([step(table, jnp.asarray(lengths))], [want])
    order = jnp.asarray([1, 0, 2, 3, 4])
    moved = step(table[order], jnp.asarray(LENGTHS)[order])
    assert not jnp.isnan(moved).any()
    assert len(traces) == 1


@pytest.mark.parametrize("splits", [1, 32, "balanced"])
def test_rules_for_splits(splits: int | str) -> None:
    case = draw_case("alibi", 16, (1,) * 5)
    q, k, v, given = arrays(case)
    assert_same(load_op("alibi")(q, k, v, return_lse=True, splits=splits, **given), case.call(splits=splits))


def test_layouts_flat_tables_and_offsets() -> None:
    case = draw_case("causal", 16, (2,) * 5)
    op: Any = load_op("causal")
    q, k, v, given = arrays(case)
    want = op(q, k, v, return_lse=True, **given)
    others = given | {"layout": "bshd", "page_layout": "phsd"}
    rows, caches = q.transpose(0, 2, 1, 3), [x.transpose(0, 2, 1, 3) for x in (k, v)]
    o, lse = op(rows, *caches, return_lse=True, **others)
    np.testing.assert_array_equal(o.transpose(0, 2, 1, 3), want[0])
    np.testing.assert_array_equal(lse, want[1])
    most = given["page_table"].shape[1]
    flat = {"page_table": given["page_table"].reshape(-1), "page_starts": jnp.arange(6) * most}
    np.testing.assert_array_equal(op(q, k, v, **given | flat), want[0])
    offsets = jnp.asarray(LENGTHS) - 2
    np.testing.assert_array_equal(op(q, k, v, **given, q_offset=offsets), want[0])
    np.testing.assert_array_equal(op(q, k, v, **given, q_offset=7), op(q, k, v, **given, q_offset=jnp.asarray(7)))


def test_scalars_may_be_arrays() -> None:
    case = draw_case("window", 16, (1,) * 5)
    q, k, v, given = arrays(case)
    op = jax.jit(load_op("window"), static_argnames="layout")
    assert_same([op(q, k, v, **given | {"size": jnp.asarray(given["size"])})], case.call()[:1])


def test_a_step_appends_to_donated_caches() -> None:
    """A step writes the new keys into the caches in place, and reads them."""
    op: Any = load_op("causal")
    shape = (6, 16, 2, 32)
    caches = [jnp.full(shape, jnp.nan, jnp.float32) for _ in range(2)]
    table = jnp.asarray([[2, 0, -1], [5, -1, -1]], jnp.int32)
    lengths = np.asarray([20, 3])
    keys, values = (jnp.asarray(np.random.default_rng(0).normal(size=(2, 22, 2, 32)), jnp.float32) for _ in range(2))

    def step(k_cache: Any, v_cache: Any, positions: Any, k: Any, v: Any, q: Any) -> Any:
        slots = paging.slots(table, positions, page_size=16)
        k_cache, v_cache = paging.append(k, v, k_cache, v_cache, slots)
        return k_cache, v_cache, op(q, k_cache, v_cache, page_table=table, kv_lengths=positions + 1)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    q = jnp.ones((2, 1, 4, 32))
    for place in range(20):
        positions = jnp.asarray([place, place if place < 3 else -1])
        k_cache, v_cache, o = jitted(*caches, positions, keys[:, place], values[:, place], q)
        assert all(x.is_deleted() for x in caches)
        caches = [k_cache, v_cache]
    for row, n in enumerate(lengths):
        whole = op(q[row : row + 1], keys[row : row + 1, :n], values[row : row + 1, :n], q_offset="end")
        alone = op(q[row : row + 1], *caches, page_table=table[row : row + 1], kv_lengths=jnp.asarray([n]))
        np.testing.assert_allclose(alone, whole, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(o[:1], op(q[:1], *caches, page_table=table[:1], kv_lengths=jnp.asarray([20])))
    text = jitted.lower(*caches, positions, keys[:, 0], values[:, 0], q).compile().as_text()
    assert "input_output_alias={ {0}: (0" in str(text)


def test_two_calls_merge_to_one() -> None:
    case = draw_case("full", 16, (1,) * 5)
    op: Any = load_op("full")
    q, k, v, given = arrays(case)
    half, table = given["kv_lengths"] // 2 // 16 * 16, given["page_table"]
    given |= {"layout": "bshd", "return_lse": True}
    q = q.transpose(0, 2, 1, 3)
    places = jnp.minimum(half[:, None] // 16 + jnp.arange(table.shape[1])[None], table.shape[1] - 1)
    rest = jnp.take_along_axis(table, places, 1)

    @jax.jit
    def both(half: jax.Array, rest: jax.Array) -> Any:
        first = op(q, k, v, **given | {"kv_lengths": half})
        second = op(q, k, v, **given | {"kv_lengths": given["kv_lengths"] - half, "page_table": rest})
        return paging.merge([first, second])

    for got, want in zip(both(half, rest), op(q, k, v, **given), strict=True):
        torch.testing.assert_close(tensor(got), tensor(want), rtol=TOLERANCE, atol=TOLERANCE)


def test_inside_shard_map() -> None:
    """A plan of each device's own heads."""
    case = draw_case("causal", 16, (1,) * 5)
    op: Any = load_op("causal")
    q, k, v, given = arrays(case)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        plan = op.plan(q, k, **given)
        return op(q, k, v, schedule=plan, **given)

    devices = jax.devices()[:2]  # if there are two, each has one of the two key heads
    mesh = Mesh(np.asarray(devices), ("heads",))
    heads, cache = P(None, "heads"), P(None, None, "heads")
    by_head = jax.shard_map(local, mesh=mesh, in_specs=(heads, cache, cache), out_specs=heads)
    # Triton's interpreter is not thread-safe, so the computation on two devices is waited for.
    got = jax.block_until_ready(jax.jit(by_head)(q, k, v))
    assert_same([got], case.call()[:1])
