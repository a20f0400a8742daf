"""The JAX ops on paged caches on the CPU: the reference, which gathers caches, bad arguments, `generated.paging`."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from codegen.testing.golden_jax import array, load_op, tensor
from generated import paging
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from tests.kernels.test_paged import LEGAL, LENGTHS, check, draw_case
from tests.ops.torch.test_paged import OTHER_PLANS
from tests.support import paged_dims
from tests.support.cases import MANIFEST
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")


@pytest.fixture(autouse=True)
def drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.test_paged.DEVICE", "cpu")
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The op of the variant for torch and for JAX."""
    with importable(tmp_path_factory.mktemp("paged"), "paged_variants", paged_dims.SPEC) as package:
        ops = [importlib.import_module(f"{package.name}.{framework}") for framework in ("torch", "jax")]
        yield ops[0].every_dim, ops[1].every_dim


# ----------------------------------------------------------------------------------------------------------- reference


CALLS = ((16, (2,) * 5), (64, (5, 0, 1, 40, 2)), (7, (1,) * 5))


@pytest.mark.parametrize(("variant", "call"), list(zip(LEGAL, itertools.cycle(CALLS), strict=False)))
def test_against_each_sequence_alone(variant: str, call: tuple[int, Sequence[int]]) -> None:
    """Under jit, with NaN in all places of the caches that no query may read."""
    page_size, queries = call
    case = draw_case(variant, page_size, queries)
    static = {name: case.kwargs[name] for name in ("max_seqlen_q",) if name in case.kwargs}
    given = {name: array(x) for name, x in {**case.own, **case.kwargs}.items() if name not in static}
    op = jax.jit(lambda q, k, v, given: load_op(variant)(q, k, v, layout="bhsd", return_lse=True, **static, **given))
    o, lse = (tensor(x) for x in op(array(case.q), array(case.k), array(case.v), given))
    if "cu_seqlens_q" not in given:
        o, lse = o.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    check((o, lse), case.expected())


def test_pages_behind_a_window_are_never_read() -> None:
    case = draw_case("window", 16, (1,) * 5)
    op: Any = load_op("window")
    table, k, v = case.kwargs["page_table"].clone(), case.k.clone(), case.v.clone()
    shared = {"kv_lengths": array(case.kwargs["kv_lengths"]), "size": case.own["size"], "layout": "bhsd"}
    want = op(array(case.q), array(k), array(v), page_table=array(table), **shared)
    for b, n in enumerate(LENGTHS):
        for page in range(max(n - case.own["size"], 0) // 16):
            k[table[b, page]] = v[table[b, page]] = float("nan")
            table[b, page] = -1
    got = op(array(case.q), array(k), array(v), page_table=array(table), **shared)
    np.testing.assert_array_equal(got, want)


def test_a_value_that_a_query_sees_stays_nan() -> None:
    q, cache, given = small()
    broken = cache.at[0, 1, 0, 3].set(jnp.nan)
    o = ops().causal(q, cache, broken, **given)
    assert np.isnan(np.asarray(o[0, :, :2])).all()
    assert not np.isnan(np.asarray(o[0, :, 2:])).any()
    assert not np.isnan(np.asarray(o[1])).any()


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_of_every_dim(own: tuple[Any, Any], packed: bool) -> None:
    """As in torch, tensors of keys lie in pages, and tensors of queries have the rows of q."""
    torch_op, jax_op = own
    (q, k, v), call = paged_dims.draw(packed=packed, device="cpu")
    want = torch_op(q, k, v, return_lse=True, **call)
    given = {name: array(x) for name, x in call.items()}
    got = jax_op(array(q), array(k), array(v), return_lse=True, layout="bhsd", **given)
    for each, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(tensor(each), wanted, rtol=1e-5, atol=1e-5)


def test_calls_with_nothing_to_read() -> None:
    q, cache, given = small()
    op = ops().causal
    nothing = given | {"kv_lengths": jnp.zeros(2, jnp.int32)}
    for table, pages in (((2, 0), cache), ((2, 3), cache[:0])):
        o, lse = op(q, pages, pages, **nothing | {"page_table": jnp.zeros(table, jnp.int32)}, return_lse=True)
        assert not o.any()
        assert (lse == -jnp.inf).all()
    o = op(q[:0], cache, cache, page_table=jnp.zeros((0, 3), jnp.int32), kv_lengths=jnp.zeros(0, jnp.int32))
    assert o.shape == (0, *q.shape[1:])
    begins = jnp.zeros(3, jnp.int32)
    assert op(q.reshape(-1, 4, 16)[:0], cache, cache, cu_seqlens_q=begins, **given).shape == (0, 4, 16)


def test_a_plan_is_checked_and_holds_nothing() -> None:
    q, cache, given = small()
    op = ops().causal
    plan = op.plan(q, cache, **given)
    assert not plan.tables
    np.testing.assert_array_equal(op(q, cache, cache, schedule=plan, **given), op(q, cache, cache, **given))
    with pytest.raises(ArgumentError, match=r"causal: schedule: expected one made for queries \(2, 1\)"):
        op(q[:, :1], cache, cache, schedule=plan, **given)
    with pytest.raises(ArgumentError, match=r"full: schedule: expected one made by full\.plan"):
        ops().full(q, cache, cache, schedule=plan, **given)


@pytest.mark.parametrize(("change", "expected"), OTHER_PLANS)
def test_plans_of_other_keys_are_refused(change: dict[str, Any], expected: str) -> None:
    q, cache, given = small()
    op = ops().window
    change = {name: jnp.asarray(x) if isinstance(x, list) else x for name, x in change.items()}
    plan = op.plan(q, cache, **{"size": 5, **given, **change})
    op(q, cache, cache, **{"size": 5, **given, **change}, schedule=plan)
    with pytest.raises(ArgumentError, match=f"^window: schedule: expected {expected}$"):
        op(q, cache, cache, **given, size=5, schedule=plan)
    # A size that is an array may be traced, so it is not checked.
    op(q, cache, cache, **{"size": jnp.asarray(3), **given, **change}, schedule=plan)


# ------------------------------------------------------------------------------------------------------- bad arguments


def ops() -> Any:
    return importlib.import_module("generated.jax")


def small() -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """q of two queries in two sequences, a cache of six pages, and the other arguments."""
    keys = jax.random.split(jax.random.key(0))
    q, cache = jax.random.normal(keys[0], (2, 2, 4, 16)), jax.random.normal(keys[1], (6, 4, 2, 16))
    table = jnp.asarray([[0, 3, -1], [5, 1, 2]])
    return q, cache, {"page_table": table, "kv_lengths": jnp.asarray([7, 12])}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k rank": ({"k": jnp.ones((6, 4, 32))}, r"k: expected 4 dimensions \[pages, page size, Hkv, D\] beside page_table"),
    "k dtype": (
        {"k": jnp.ones((6, 4, 2, 16), jnp.float16)},
        "k: expected dtype float32, that of q, or float8_e4m3fn or .*, got float16",
    ),
    "v pages": ({"v": jnp.ones((5, 4, 2, 16))}, r"v: expected pages, page size and heads \[6, 4, 2\]"),
    "heads": ({"k": jnp.ones((6, 4, 3, 16)), "v": jnp.ones((6, 4, 3, 16))}, "q: expected a head count"),
    "q rank": ({"q": jnp.ones((2, 4, 16))}, r"q: expected 4 dimensions \[B, Sq, Hq, D\]"),
    "table rank": ({"page_table": jnp.ones(3, int)}, r"page_table: expected an integer array \[B, most pages\]"),
    "table dtype": ({"page_table": jnp.ones((2, 3))}, "page_table: expected an integer array"),
    "table rows": ({"page_table": jnp.ones((3, 3), int)}, "page_table: expected 2 rows, one for each of kv_lengths"),
    "no lengths": ({"kv_lengths": None}, r"kv_lengths: expected an integer array \[B\] beside page_table, got None"),
    "lengths": ({"kv_lengths": jnp.ones(3, int)}, "kv_lengths: expected 2 elements, one for each batch row of q"),
    "too long for its pages": (
        {"page_table": jnp.ones(6, int), "page_starts": jnp.asarray([0, 1, 6]), "kv_lengths": jnp.asarray([5, 20])},
        "kv_lengths: expected lengths from 0 to its pages' 4 keys, got 5 at 0",
    ),
    "pages before the first": (
        {"page_table": jnp.ones(6, int), "page_starts": jnp.asarray([-1, 3, 6]), "kv_lengths": jnp.asarray([5, 5])},
        "kv_lengths: expected lengths from 0 to its pages' 0 keys, got 5 at 0",
    ),
    "too long": ({"kv_lengths": jnp.asarray([7, 13])}, "kv_lengths: expected lengths from 0 to the table's 12 keys"),
    "starts": (
        {"page_table": jnp.ones(6, int), "page_starts": jnp.ones(2, int)},
        "page_starts: expected 3 elements for kv_lengths of 2",
    ),
    "begins": (
        {"q": jnp.ones((4, 4, 16)), "cu_seqlens_q": jnp.asarray([0, 4])},
        "cu_seqlens_q: expected 3 elements for kv_lengths of 2",
    ),
    "padding": ({"padding_id": "x"}, "padding_id: expected an int of 32 bits, got 'x'"),
    "determinism": ({"deterministic": 2}, "deterministic: expected None, True or False, got 2"),
    "splits": ({"splits": 0}, "splits: expected None, 'balanced', 1 for no split, or an int of keys a split, got 0"),
    "offset": ({"q_offset": "start"}, "q_offset: expected an int, 'end' or an integer array, got 'start'"),
    "empty offset": ({"q_offset": ""}, "q_offset: expected an int, 'end' or an integer array, got ''"),
    "page layout": ({"page_layout": "psdh"}, "page_layout: expected 'pshd' or 'phsd', got 'psdh'"),
    "queries": ({"max_seqlen_q": 0}, "max_seqlen_q: expected an int of at least 1, got 0"),
    "queries of a sequence": (
        {"q": jnp.ones((2, 3, 4, 16)), "max_seqlen_q": 2},
        "max_seqlen_q: expected at least 3, the queries of the longest sequence, got 2",
    ),
    "queries of a packed sequence": (
        {"q": jnp.ones((4, 4, 16)), "cu_seqlens_q": jnp.asarray([0, 3, 4]), "max_seqlen_q": 2},
        "max_seqlen_q: expected at least 3, the queries of the longest sequence, got 2",
    ),
    "config": ({"config": {"dq": 3}}, r"config\['dq'\]: expected a mapping with block_m"),
    "family": ({"family": "fastest"}, "family: expected None or one of 'portable', 'hopper', got 'fastest'"),
    "family of other pages": (
        {"family": "hopper"},
        "family: expected None or 'portable' in this call on paged caches: its copies take pages of 16 keys",
    ),
    "ids": ({"q_segment_ids": jnp.ones((2, 2), int)}, "q_segment_ids: expected None beside page_table"),
    "schedule": ({"schedule": 3}, r"schedule: expected what causal\.plan\(\.\.\.\) returns, or None, got int"),
    "no pages": ({"page_table": None, "splits": 1}, "splits: expected None without page_table, got int"),
    "no pages, layout": (
        {"page_table": None, "page_layout": "phsd"},
        "page_layout: expected 'pshd' without page_table",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    changed, message = BAD[case]
    q, cache, given = small()
    arguments = {"q": q, "k": cache, "v": cache, **given, **changed}
    with pytest.raises(ArgumentError, match=f"^causal: {message}"):
        ops().causal(**arguments)
    not_of_plans = {"v", "family", "q_segment_ids", "schedule", "padding_id", "deterministic"}
    if not not_of_plans & changed.keys() and arguments["page_table"] is not None:
        del arguments["v"]
        with pytest.raises(ArgumentError, match=f"^causal: {message}"):
            ops().causal.plan(**arguments)


def test_pages_beyond_the_cache_are_refused_where_a_query_sees_them() -> None:
    q, cache, given = small()
    op: Any = ops().window
    beyond = jnp.asarray([[9, 3, -1], [-2, 9, 2]])
    window = functools.partial(op, q, cache, cache, kv_lengths=given["kv_lengths"])
    np.testing.assert_array_equal(
        window(page_table=beyond, size=2), window(page_table=jnp.asarray([[0, 3, 0], [0, 0, 2]]), size=2)
    )
    with pytest.raises(
        ArgumentError, match=r"^window: page_table: expected pages from 0 to 5 .*, got -2, 9 in seq.* 1"
    ):
        window(page_table=beyond.at[0, 0].set(0), size=7)
    traced = jax.jit(lambda table: window(page_table=table, size=7))(beyond.at[0, 0].set(0))
    assert jnp.isnan(traced).all((1, 2, 3)).tolist() == [False, True]
    packed = {"cu_seqlens_q": jnp.asarray([0, 2, 2]), "size": 12, "page_table": jnp.asarray([0, 3, 9, 1, 2])}
    starts = {"page_starts": jnp.asarray([0, 2, 5]), "kv_lengths": given["kv_lengths"]}
    op(q[0], cache, cache, **packed, **starts)
    with pytest.raises(ArgumentError, match=r"page_table: expected pages from 0 to 5 .*, got 9 in sequence 1"):
        op(q[0], cache, cache, **{**packed, **starts, "cu_seqlens_q": jnp.asarray([0, 1, 2])})


def test_values_that_are_no_numbers_are_no_pages_beyond_the_cache() -> None:
    q, cache, given = small()
    table = jnp.asarray([[9, 3, -1], [-2, 9, 2]])
    o = ops().window(q.at[0].set(jnp.nan), cache, cache, page_table=table, kv_lengths=given["kv_lengths"], size=2)
    assert jnp.isnan(o).all((1, 2, 3)).tolist() == [True, False]


def test_a_plan_of_an_unknown_family() -> None:
    q, cache, given = small()
    with pytest.raises(ArgumentError, match=r"^causal: family: expected None or one of 'portable', 'hopper'"):
        ops().causal.plan(q, cache, family="fastest", **given)


def test_a_plan_takes_values() -> None:
    q, cache, given = small()
    plan = ops().causal.plan(q, cache, cache, **given)
    np.testing.assert_array_equal(
        ops().causal(q, cache, cache, schedule=plan, **given), ops().causal(q, cache, cache, **given)
    )


def test_own_tensors_are_checked() -> None:
    q, cache, given = small()
    with pytest.raises(ArgumentError, match=r"document: doc: expected shape \[6, 4\], got \[2, 12\]"):
        ops().document(q, cache, cache, doc=jnp.ones((2, 12), jnp.int32), **given)


@pytest.mark.parametrize("variant", [n for n, x in MANIFEST.items() if x["dropout"]])
def test_variants_without_kernels_on_pages(variant: str) -> None:
    q, cache, given = small()
    with pytest.raises(ArgumentError, match=r"page_table: expected None: a variant with dropout has no"):
        load_op(variant)(q, cache, cache, **given)


@pytest.mark.parametrize("name", ["grad", "jvp", "jit", "checkpoint"])
def test_there_is_no_gradient(name: str) -> None:
    q, cache, given = small()
    derivatives: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Callable[[jax.Array], Any]]] = {
        "grad": jax.grad,
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (q,)),
        "jit": lambda f: jax.jit(jax.grad(f)),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    }

    def total(q: jax.Array) -> jax.Array:
        found: jax.Array = ops().causal(q, cache, cache, **given).sum()
        return found

    with pytest.raises(ArgumentError, match="q: expected an array without gradient in a paged call; packed calls have"):
        derivatives[name](total)(q)
    assert not jax.grad(lambda q: total(jax.lax.stop_gradient(q)))(q).any()


def test_vmap_is_refused() -> None:
    q, cache, given = small()
    mapped = jax.vmap(lambda lengths: ops().causal(q, cache, cache, **given | {"kv_lengths": lengths}))
    with pytest.raises(ArgumentError, match=r"kv_lengths: expected an array that jax\.vmap does not map"):
        mapped(jnp.ones((3, 2), jnp.int32))


# -------------------------------------------------------------------------------------------------------------- paging


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_append_writes_into_donated_caches(dtype: Any) -> None:
    """A slot of -1 is skipped; a value beyond the range of an 8-bit float becomes its largest value."""
    k, v = (jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 16)) * 1000, jnp.float32) for _ in range(2))
    slots, scale = jnp.asarray([9, -1, 2]), jnp.asarray([2.0, 4.0])
    want_k, want_v = torch.zeros(2, 6, 4, 2, 16).to(getattr(torch, jnp.dtype(dtype).name))
    paging.append(tensor(k), tensor(v), want_k, want_v, tensor(slots), k_scale=tensor(scale), v_scale=0.5)
    caches = [jnp.zeros((6, 4, 2, 16), dtype) for _ in range(2)]
    places = [x.unsafe_buffer_pointer() for x in caches]
    append = jax.jit(paging.append, donate_argnums=(2, 3))
    got = append(k, v, *caches, slots, k_scale=scale, v_scale=jnp.asarray(0.5))
    assert all(x.is_deleted() for x in caches)
    assert [x.unsafe_buffer_pointer() for x in got] == places
    for each, wanted in zip(got, (want_k, want_v), strict=True):
        np.testing.assert_array_equal(each.astype(jnp.float32), wanted.float().numpy())


def test_slots_under_jit() -> None:
    table = jnp.asarray([[2, 0, -1], [5, -1, -1]])
    slots = jax.jit(lambda positions: paging.slots(table, positions, page_size=4))
    assert slots(jnp.asarray([5, 3])).tolist() == [1, 23]
    assert slots(jnp.asarray([[0, 4, 8, -1, 12], [3, 4, 0, 1, 2]])).tolist() == [
        [8, 0, -1, -1, -1],
        [23, -1, 20, 21, 22],
    ]


def test_merge_joins_calls_on_disjoint_keys() -> None:
    q, cache, given = small()
    op = ops().full
    whole = op(q, cache, cache, **given, return_lse=True)

    @jax.jit
    def both(q: jax.Array) -> Any:
        first = op(q, cache, cache, **given | {"kv_lengths": jnp.asarray([4, 4])}, return_lse=True)
        rest = {"page_table": given["page_table"][:, 1:], "kv_lengths": given["kv_lengths"] - 4}
        return paging.merge([first, op(q, cache, cache, **rest, return_lse=True)])

    for got, want in zip(both(q), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"merge: parts: expected o \[2, 4, 2, Dv\] beside lse \[2, 4, 2\]"):
        paging.merge([whole], layout="bhsd")
    refused: list[tuple[Any, str]] = [
        (None, "parts: expected pairs \\(o, lse\\), got NoneType"),
        (whole, "parts: expected pairs"),
        ([(whole[0], None)], "lse: expected a torch.Tensor or jax.Array"),
        ([(np.asarray(whole[0]), np.asarray(whole[1]))], "parts: expected a torch.Tensor or jax.Array"),
        ([(whole[0].astype(int), whole[1])], "o: expected dtype float16, bfloat16, float32 or float64, got int32"),
        ([(whole[0], whole[1].astype(jnp.bfloat16))], "lse: expected dtype float32 or float64, got bfloat16"),
    ]
    for parts, error in refused:
        with pytest.raises(ArgumentError, match=f"merge: {error}"):
            paging.merge(parts)


# ------------------------------------------------------------------------------------------------------------ sharding


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("by", ["batch", "heads"])
def test_sharded_arrays(by: str, planned: bool) -> None:
    """Heads and sequences stay on their devices, except with a plan, which is of all; o is always sharded as q is."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2 before JAX starts")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    q, cache, given = small()
    specs = (P("x"), P()) if by == "batch" else (P(None, None, "x"), P(None, None, "x"))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, cache), specs, strict=True)]

    def call(q: jax.Array, cache: jax.Array) -> Any:
        plan = ops().causal.plan(q, cache, **given) if planned else None
        return ops().causal(q, cache, cache, schedule=plan, return_lse=True, **given)

    o, lse = jax.jit(call)(*placed)
    want = ops().causal(q, cache, cache, return_lse=True, **given)
    np.testing.assert_allclose(o, want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-6)
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), 4)
