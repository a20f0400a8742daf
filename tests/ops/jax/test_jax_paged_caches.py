"""The caches of JAX ops on the CPU: 8-bit floats with scales, sums of a log-decay, values inside keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from codegen.testing import golden
from codegen.testing.golden_jax import array, load_op, tensor
from generated import paging
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from tests.kernels.test_paged import check, draw_case
from tests.support.scaled_caches import FP8, own_scales, quantised_case

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")


@pytest.fixture(autouse=True)
def drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.test_paged.DEVICE", "cpu")
    torch.manual_seed(0)


def small() -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """q of two queries in two sequences, a cache of six pages, and the other arguments."""
    keys = jax.random.split(jax.random.key(0))
    q, cache = jax.random.normal(keys[0], (2, 2, 4, 16)), jax.random.normal(keys[1], (6, 4, 2, 16))
    table = jnp.asarray([[0, 3, -1], [5, 1, 2]])
    return q, cache, {"page_table": table, "kv_lengths": jnp.asarray([7, 12])}


# ------------------------------------------------------------------------------------------------------- 8-bit floats


@pytest.mark.parametrize("kinds", [("number", "token"), ("head", "number")], ids="-".join)
def test_scaled_caches(kinds: tuple[str, str]) -> None:
    """Compare with float64 of the values in the caches, which have NaN in all places that no query may read."""
    case = draw_case("alibi", 16, (2,) * 5)
    case = quantised_case(case, FP8[0], *own_scales(case, kinds))
    given = {name: array(x) for name, x in {**case.own, **case.kwargs}.items()}
    o, lse = load_op("alibi")(*map(array, (case.q, case.k, case.v)), layout="bhsd", return_lse=True, **given)
    o, lse = tensor(o), tensor(lse)
    check((o.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)), case.expected())


def test_a_traced_scale_serves_every_head() -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    want = op(q, cache * 0.5, cache * 0.25, **given)
    got = jax.jit(lambda k, v: op(q, cache, cache, k_scale=k, v_scale=v, **given))(0.5, 0.25)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for scales in ((0.5, 0.25), (np.float32(0.5), np.full(2, 0.25))):
        got = op(q, cache, cache, k_scale=scales[0], v_scale=scales[1], **given)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("scale", ["token", "head", "number"])
def test_append_gives_the_bits_of_torch(scale: str) -> None:
    tokens = torch.randn(2, 40, 2, 16) * torch.rand(40, 1, 1).exp2()
    tokens[0, 3], tokens[1, 4, 0] = 0.0, 1e6
    slots = torch.randperm(48)[:40]
    slots[7] = -1
    shapes = {"token": (6, 8, 2), "head": (2,), "number": ()}
    scales: list[Any] = [torch.full(shapes[scale], x) for x in (0.3, 0.7)]
    if scale == "number":
        scales = [float(x) for x in scales]
    caches = [torch.zeros(6, 8, 2, 16).to(FP8[0]) for _ in range(2)]
    names = ("k", "v", "k_cache", "v_cache", "slots", "k_scale", "v_scale")
    given = dict(zip(names, (*tokens, *caches, slots, *scales), strict=True))
    got = jax.jit(paging.append)(**{name: array(x) for name, x in given.items()})
    want = paging.append(**given)
    assert len(got) == len(want) == (4 if scale == "token" else 2)
    for each, wanted in zip(got, want, strict=True):
        assert torch.equal(tensor(each).view(torch.uint8), wanted.view(torch.uint8))


def test_append_to_caches_with_heads_before_slots() -> None:
    """The results are in the memory of the donated caches; scales by token have the usual layout."""
    tokens, slots = torch.randn(2, 5, 2, 16), torch.tensor([9, -1, 3, 40, 0])
    caches, scales = list(torch.zeros(2, 6, 8, 2, 16).to(FP8[0])), list(torch.zeros(2, 6, 8, 2))
    names = ("k", "v", "k_cache", "v_cache", "slots", "k_scale", "v_scale")
    swapped = [x.transpose(1, 2).contiguous() for x in caches]
    given = [array(x) for x in swapped]
    places = [x.unsafe_buffer_pointer() for x in given]
    append = jax.jit(partial(paging.append, page_layout="phsd"), donate_argnames=("k_cache", "v_cache"))
    others = dict(zip(names, map(array, (*tokens, 0, 0, slots, *scales)), strict=True))
    got = append(**others | {"k_cache": given[0], "v_cache": given[1]})
    assert [x.unsafe_buffer_pointer() for x in got[:2]] == places
    given_torch = dict(zip(names, (*tokens, *swapped, slots, *(x.clone() for x in scales)), strict=True))
    held = paging.append(**given_torch, page_layout="phsd")
    assert held[0] is swapped[0]
    want = paging.append(**dict(zip(names, (*tokens, *caches, slots, *scales), strict=True)))
    want = (*(x.transpose(1, 2) for x in want[:2]), *want[2:])
    for results in (held, [tensor(x) for x in got]):
        for each, wanted in zip(results, want, strict=True):
            assert torch.equal(each.float(), wanted.float())
    with pytest.raises(ArgumentError, match="append: page_layout: expected 'pshd' or 'phsd', got 'psdh'"):
        paging.append(**given_torch, page_layout="psdh")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"k_scale": None}, r"k_scale: expected a number, floats .* for a cache of float8_e5m2, got None"),
        ({"v_scale": None}, r"v_scale: expected a number, floats .* for a cache of float8_e5m2, got None"),
        ({"k_scale": -1.0}, r"k_scale: expected a finite number of at least 0.0, got -1.0"),
        ({"k_scale": jnp.asarray([1.0, -1.0])}, r"k_scale: expected finite floats of at least 0.0, got \[1.0, -1.0\]"),
        (
            {"v_scale": jnp.asarray([1.0, jnp.inf])},
            r"v_scale: expected finite floats of at least 0.0, got \[1.0, inf\]",
        ),
        ({"k_scale": jnp.inf}, r"k_scale: expected a finite number of at least 0.0, got inf"),
        ({"v_scale": jnp.ones(3)}, r"v_scale: expected a number, floats \[2\] or \[6, 4, 2\], got float32 \[3\]"),
        ({"v_scale": jnp.ones(2, int)}, r"v_scale: expected a number, floats .*, got int32 \[2\]"),
        ({"k": jnp.ones((6, 4, 2, 16), jnp.int8)}, "k: expected dtype float32, that of q, or float8_e4m3fn or"),
        ({"page_table": None}, "k_scale: expected None without page_table or q, k and v of float8_e4m3fn, got float"),
    ],
)
def test_bad_scales(change: dict[str, Any], expected: str) -> None:
    q, cache, given = small()
    small_cache = cache.astype(jnp.float8_e5m2)
    arguments = {"k": small_cache, "v": small_cache, "k_scale": 1.0, "v_scale": 1.0} | given | change
    with pytest.raises(ArgumentError, match=f"^causal: {expected}"):
        load_op("causal")(q, **arguments)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"slots": jnp.asarray([0, 24])}, "slots: expected slots below 24, the pages of k_cache times the page size"),
        ({"k_scale": jnp.asarray([1.0, 0.0])}, r"k_scale: expected finite floats above 0, got \[1.0, 0.0\]"),
        ({"v_scale": jnp.asarray(-2.0)}, r"v_scale: expected finite floats above 0, got \[-2.0\]"),
    ],
)
@pytest.mark.parametrize("page_layout", ["pshd", "phsd"])
def test_bad_tokens_to_append(change: dict[str, Any], expected: str, page_layout: str) -> None:
    """Values are checked where they are known; under jit a slot behind the last writes nothing."""
    shape = (6, 4, 2, 16) if page_layout == "pshd" else (6, 2, 4, 16)
    given: dict[str, Any] = {"k": jnp.ones((2, 2, 16)), "k_cache": jnp.zeros(shape), "slots": jnp.asarray([0, 23])}
    given |= {"v": given["k"], "v_cache": given["k_cache"]}
    append = partial(paging.append, page_layout=page_layout)
    append(**given)
    with pytest.raises(ArgumentError, match=f"^append: {expected}"):
        append(**given | change)
    if "slots" in change:
        assert jnp.count_nonzero(jax.jit(append)(**given | change)[0]) == 2 * 16


def test_scales_have_no_gradient_and_are_not_mapped() -> None:
    q, cache, given = small()
    call = partial(load_op("causal"), q, cache, cache, v_scale=1.0, **given)
    with pytest.raises(ArgumentError, match="k_scale: expected an array without gradient in a paged call"):
        jax.grad(lambda scale: call(k_scale=scale).sum())(jnp.ones(2))
    with pytest.raises(ArgumentError, match=r"k_scale: expected an array that jax\.vmap does not map"):
        jax.vmap(lambda scale: call(k_scale=scale))(jnp.ones((3, 2)))


# --------------------------------------------------------------------------------------------------------- log-decay


@pytest.mark.parametrize("steep", [False, True])
def test_sums_of_a_log_decay(steep: bool) -> None:
    """Sums appended in two chunks under jit, and then read, equal those of torch, also after sums of -100,000."""
    heads, size = 4, 16
    table, lengths = torch.tensor([[4, 2, 6], [-1, -1, -1], [1, 3, -1]]), torch.tensor([41, 0, 17])
    k, v = (torch.randn(7, size, 2, 16) for _ in range(2))
    caches = [torch.zeros(7, size, heads), torch.zeros(7, heads)]
    got = [array(x) for x in caches]
    append = jax.jit(paging.append_decay, donate_argnums=(1, 2))
    for new, now in (((36, 0, 16), (36, 0, 16)), ((5, 0, 1), (41, 0, 17))):
        g = torch.nn.functional.logsigmoid(torch.randn(sum(new), heads))
        if steep and sum(new) > 6:
            g[:30] *= 4000
        pages = {"page_table": table, "kv_lengths": torch.tensor(now)}
        begins = torch.tensor([0, *new]).cumsum(0)
        paging.append_decay(g, caches[0], caches[1], cu_seqlens=begins, **pages)
        rest = {name: array(x) for name, x in {**pages, "cu_seqlens": begins}.items()}
        got = list(append(array(g), got[0], got[1], **rest))
        for each, want in zip(got, caches, strict=True):
            assert torch.equal(tensor(each), want)
    q = torch.randn(3, heads, 2, 16)
    pages = {"page_table": table, "kv_lengths": lengths}
    want = golden.load_op("forgetting")(q, k, v, g=caches[0], g_base=caches[1], **pages)
    op = jax.jit(partial(load_op("forgetting"), layout="bhsd"))
    o = op(*map(array, (q, k, v)), g=got[0], g_base=got[1], **{name: array(x) for name, x in pages.items()})
    torch.testing.assert_close(tensor(o), want, rtol=1e-5, atol=1e-5)


def test_tokens_without_a_page_add_nothing_to_the_sums() -> None:
    """A page of -1 in the table has no slots: torch and JAX, as the kernel, write nothing and continue without it."""
    table, lengths, g = torch.tensor([[-1, 1]]), torch.tensor([5]), torch.ones(1, 5, 2)
    caches = torch.zeros(3, 4, 2), torch.zeros(3, 2)
    got = paging.append_decay(*map(array, (g, *caches)), page_table=array(table), kv_lengths=array(lengths))
    paging.append_decay(g, *caches, page_table=table, kv_lengths=lengths)
    assert not caches[0][[0, 2]].any()
    assert caches[0][1, 0].tolist() == [1.0, 1.0]
    for each, want in zip(got, caches, strict=True):
        assert torch.equal(tensor(each), want)


def decay_call() -> dict[str, Any]:
    q, cache, given = small()
    return given | {"q": q, "k": cache, "v": cache, "g": jnp.zeros((6, 4, 4)), "g_base": jnp.zeros((6, 4))}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"g_base": None}, r"g_base: expected float32 \[6, 4\], as paging.append_decay fills it, got nothing"),
        ({"g": jnp.zeros((6, 4, 4), jnp.float16)}, r"g: expected float32 \[6, 4, 4\], .*, got float16"),
        ({"g": jnp.zeros((6, 4, 2))}, r"g: expected float32 \[6, 4, 4\], .*, got float32 \[6, 4, 2\]"),
        ({"page_table": None, "kv_lengths": None}, "g_base: expected None without page_table, got"),
    ],
)
def test_bad_sums(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArgumentError, match=f"^forgetting: {expected}"):
        load_op("forgetting")(**decay_call() | change)


APPENDED = {"g": jnp.zeros((2, 1, 4)), "g_cache": jnp.zeros((6, 4, 4)), "g_base": jnp.zeros((6, 4))}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"g": jnp.zeros((2, 4))}, r"g: expected floats \[B, n, Hq\], got float32 \[2, 4\]"),
        ({"g": jnp.zeros((3, 1, 4))}, "g: expected 2 as its first size, for kv_lengths of 2"),
        ({"g_cache": jnp.zeros((6, 4, 4), jnp.bfloat16)}, "g_cache: expected float32"),
        ({"g_base": torch.zeros(6, 4)}, "g_base: expected a torch.Tensor or jax.Array, as the others"),
        ({"page_table": jnp.ones((3, 3), int)}, "page_table: expected 2 as its first size"),
        ({"kv_lengths": jnp.ones(2)}, "kv_lengths: expected an integer array of 1 dimensions, got float32"),
        ({"kv_lengths": jnp.asarray([7, 13])}, "kv_lengths: expected lengths from 0 to the table's 12 keys, got 13"),
    ],
)
def test_bad_decays_to_append(change: dict[str, Any], expected: str) -> None:
    given = {name: small()[2][name] for name in ("page_table", "kv_lengths")}
    with pytest.raises(ArgumentError, match=f"^append_decay: {expected}"):
        paging.append_decay(**APPENDED | given | change)


def test_sums_have_no_gradient_and_are_not_mapped() -> None:
    given = small()[2]

    def total(**changed: jax.Array) -> jax.Array:
        found: jax.Array = paging.append_decay(**APPENDED | given | changed)[0]
        return found.sum()

    assert not jax.grad(lambda g: total(g=g))(APPENDED["g"]).any()
    with pytest.raises(ArgumentError, match="append_decay: g_base: expected an array without gradient"):
        jax.grad(lambda x: total(g_base=x))(APPENDED["g_base"])
    with pytest.raises(ArgumentError, match=r"append_decay: g: expected an array that jax\.vmap does not map"):
        jax.vmap(lambda g: total(g=g))(jnp.zeros((3, 2, 1, 4)))


# ---------------------------------------------------------------------------------------------------- values in keys


@pytest.mark.parametrize("scaled", [False, True])
def test_values_in_keys_are_appended_as_keys(scaled: bool) -> None:
    new, slots = np.random.default_rng(0).normal(size=(5, 1, 40)).astype(np.float32), [3, 9, -1, 4, 15]
    dtype, given = (jnp.float8_e4m3fn, {"k_scale": jnp.zeros((4, 4, 1))}) if scaled else (jnp.float32, {})
    step = jax.jit(paging.append, donate_argnums=2)
    cache, nothing, *scales = step(
        jnp.asarray(new), None, jnp.zeros((4, 4, 1, 40), dtype), None, jnp.asarray(slots), **given
    )
    assert nothing is None
    held = torch.zeros(4, 4, 1, 40, dtype=torch.float8_e4m3fn if scaled else torch.float32)
    wanted: dict[str, Any] = {"k_scale": torch.zeros(4, 4, 1)} if scaled else {}
    paging.append(torch.tensor(new), None, held, None, torch.tensor(slots), **wanted)
    np.testing.assert_array_equal(np.asarray(cache.astype(jnp.float32)), held.float())
    for scale in scales:
        np.testing.assert_array_equal(scale, wanted["k_scale"])


def test_values_in_keys() -> None:
    """The reference computes this call, also with wide heads."""
    q, cache, given = small()
    for keys, columns in ((cache, 8), (jnp.tile(cache, 36), 512)):
        rows = jnp.tile(q, keys.shape[-1] // q.shape[-1])
        call = jax.jit(partial(load_op("causal"), values_in_keys=columns))
        want = load_op("causal")(rows, keys, keys[..., :columns], **given)
        np.testing.assert_allclose(call(rows, keys, None, **given), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"v": jnp.ones((6, 4, 2, 8))}, "v: expected None beside values_in_keys: values are the first columns of k"),
        ({"values_in_keys": 17}, "values_in_keys: expected an int from 8 to 16, got 17"),
        ({"values_in_keys": None}, "v: expected a jax.Array, got NoneType"),
        ({"page_table": None}, "values_in_keys: expected None without page_table, got int"),
    ],
)
def test_bad_values_in_keys(change: dict[str, Any], expected: str) -> None:
    q, cache, given = small()
    with pytest.raises(ArgumentError, match=f"^causal: {expected}"):
        load_op("causal")(**{"q": q, "k": cache, "values_in_keys": 8} | given | change)


def test_a_traced_call_with_too_few_queries_at_most_is_not_wrong_without_a_word() -> None:
    """The rows beyond are NaN. A number that no sequences of these rows could have is refused."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, shape) for key, shape in zip(keys, [(9, 2, 16), *[(8, 4, 2, 16)] * 2], strict=True)
    )
    pages = {"page_table": jnp.arange(8).reshape(2, 4), "kv_lengths": jnp.array([10, 12])}
    pages["cu_seqlens_q"] = jnp.array([0, 2, 9])

    def call(most: int) -> tuple[jax.Array, jax.Array]:
        given = partial(load_op("causal"), return_lse=True, max_seqlen_q=most)
        found: tuple[jax.Array, jax.Array] = jax.jit(given)(q, k, v, **pages)
        return found

    (o, lse), (part, part_lse) = call(7), call(5)
    assert jnp.isfinite(o).all()
    np.testing.assert_allclose(part[:7], o[:7], atol=1e-6)
    np.testing.assert_allclose(part_lse[:, :7], lse[:, :7], atol=1e-6)
    assert jnp.isnan(part[7:]).all()
    assert jnp.isnan(part_lse[:, 7:]).all()
    message = "^causal: max_seqlen_q: expected at least 5, as 2 sequences have the 9 rows of q, got 4\n"
    with pytest.raises(ArgumentError, match=message):
        call(4)
