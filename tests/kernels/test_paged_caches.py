"""Caches of 8-bit floats with scales, against float64 of the values that they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import paging
from generated._runtime.core.paged_decay import launch_sums
from generated._runtime.device.paged_decay import append_sums
from generated._runtime.torch import backend
from generated._runtime.torch.paging import _launch
from generated.torch import causal, natten
from tests.kernels.test_paged import DTYPE, LEGAL, LENGTHS, SIZES, check, draw_case
from tests.support.cases import DEVICE, INTERPRET
from tests.support.scaled_caches import FP8, KINDS, draw_scale, own_scales, quantised_case

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
KV_HEADS = SIZES.kv_heads


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("kinds", [(kind, kind) for kind in KINDS] + [("head", "token")], ids="-".join)
def test_each_kind_of_scale(dtype: torch.dtype, kinds: tuple[str, str]) -> None:
    case = draw_case("causal", 16, (2,) * 5)
    case = quantised_case(case, dtype, *own_scales(case, kinds))
    check(case.got(), case.expected())


@pytest.mark.parametrize("variant", LEGAL)
def test_every_variant_on_scaled_caches(variant: str) -> None:
    """Packed calls of few and of many queries, on pages smaller than a block."""
    case = draw_case(variant, 7, (5, 0, 1, 40, 2))
    case = quantised_case(case, torch.float8_e4m3fn, *own_scales(case, ("token", "token")))
    check(case.got(), case.expected())


@pytest.mark.parametrize("kinds", [("number", "number"), ("token", "head")], ids="-".join)
def test_the_reference_on_scaled_caches(kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generated._runtime.torch.paged.runs_reference", lambda _q: True)
    case = draw_case("alibi", 16, (2,) * 5)
    case = quantised_case(case, torch.float8_e4m3fn, *own_scales(case, kinds))
    check(case.got(), case.expected())


def test_small_scales_of_tokens_keep_their_digits() -> None:
    """Half precision cannot represent the product of a weight and such a small scale."""
    case = draw_case("causal", 16, (2,) * 5)
    scale = draw_scale("token", case.v) * 1e-6
    case = quantised_case(replace(case, v=case.v * 1e-6), torch.float8_e4m3fn, 0.01, scale)
    q = case.q.half()
    case = replace(case, q=q, alone=[(one.half(), k, v, own) for one, k, v, own in case.alone])
    o, want = case.got()[0].double(), case.expected()[0]
    # o is in half precision, whose subnormal numbers are 2**-24 apart.
    torch.testing.assert_close(o, want, atol=2**-24, rtol=1e-2)


def test_a_sequence_has_the_same_bits_on_any_pages() -> None:
    case = draw_case("causal", 16, (2,) * 5)
    case = quantised_case(case, torch.float8_e4m3fn, *own_scales(case, ("token", "token")))
    want = case.call()[0][3]
    place = torch.arange(LENGTHS[3], device=DEVICE)
    page, slot = case.kwargs["page_table"][3, place // 16].long(), place % 16
    for page_size in (64, 1):
        pool = paging.Pool(512 // page_size, page_size)
        pool.extend("other", 5)
        slots = torch.tensor(pool.extend("own", LENGTHS[3]), device=DEVICE)
        moved = []
        for x in (case.k, case.v, case.kwargs["k_scale"], case.kwargs["v_scale"]):
            new = torch.zeros((512, *x.shape[2:]), device=DEVICE).to(x.dtype)
            new[slots] = x[page, slot]
            moved.append(new.view(512 // page_size, page_size, *x.shape[2:]))
        table = torch.tensor(pool.page_table(["own"]), device=DEVICE)
        lengths = torch.tensor([LENGTHS[3]], device=DEVICE)
        k, v, k_scale, v_scale = moved
        o = causal(case.q[3:4], k, v, page_table=table, kv_lengths=lengths, k_scale=k_scale, v_scale=v_scale)
        assert torch.equal(o[0], want)


def test_scales_serve_caches_of_the_dtype_of_q() -> None:
    case = draw_case("softcap", 16, (2,) * 5)
    k_scale, v_scale = own_scales(case, ("head", "token"))
    scaled = quantised_case(case, case.k.dtype, k_scale, v_scale)
    check(scaled.got(), scaled.expected())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"k_scale": None}, "k_scale: expected a number, floats .* for a cache of float8_e4m3fn, got None"),
        ({"v_scale": None}, "v_scale: expected a number, floats .* for a cache of float8_e4m3fn, got None"),
        ({"k_scale": -1.0}, "k_scale: expected a finite number of at least 0.0, got -1.0"),
        ({"v_scale": float("inf")}, "v_scale: expected a finite number of at least 0.0, got inf"),
        ({"v_scale": torch.ones(3)}, r"v_scale: expected .*\[2\] or .*, got torch.float32 \[3\]"),
        ({"v_scale": torch.ones(2, dtype=torch.int32)}, "v_scale: expected .* got torch.int32"),
        ({"k_scale": torch.ones(2, requires_grad=True)}, "k_scale: expected a tensor without gradient"),
    ],
)
def test_bad_scales(change: dict[str, Any], expected: str) -> None:
    case = draw_case("causal", 16, (2,) * 5)
    case = quantised_case(case, torch.float8_e4m3fn, 0.01, 0.01)
    with pytest.raises(ValueError, match=expected):
        case.call(**{name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in change.items()})


@pytest.mark.skipif(DEVICE != "cpu", reason="a call does not wait for the values of scales on a GPU")
@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_scales_of_heads_are_finite_and_not_negative(bad: float) -> None:
    case = draw_case("causal", 16, (2,) * 5)
    with pytest.raises(ValueError, match=rf"v_scale: expected finite floats of at least 0\.0, got \[1\.0, {bad}\]"):
        case.call(v_scale=torch.tensor([1.0, bad]))


@pytest.mark.parametrize("of_heads", [False, True], ids=["number", "head"])
def test_keys_whose_scale_is_zero_are_zero(of_heads: bool) -> None:
    case = draw_case("causal", 16, (2,) * 5)
    scale = torch.zeros(KV_HEADS, device=DEVICE) if of_heads else 0.0
    check(
        case.got(k_scale=scale),
        quantised_case(case, case.k.dtype, torch.zeros(KV_HEADS, device=DEVICE), 1.0).expected(),
    )


def test_scales_without_pages_are_refused() -> None:
    x = torch.zeros(1, KV_HEADS, 4, SIZES.dim, device=DEVICE)
    with pytest.raises(
        ValueError, match="k_scale: expected None without page_table or q, k and v of float8_e4m3fn, got float"
    ):
        causal(x, x, x, k_scale=1.0)


def test_other_dtypes_of_caches_are_refused() -> None:
    case = draw_case("causal", 16, (2,) * 5)
    with pytest.raises(ValueError, match=r"k: expected dtype .*, that of q, or torch.float8_e4m3fn .*, got torch.int8"):
        replace(case, k=torch.zeros(case.k.shape, dtype=torch.int8, device=DEVICE)).call()


def test_plans_need_no_scale() -> None:
    case = draw_case("window", 16, (1,) * 5)
    case = quantised_case(case, torch.float8_e4m3fn, 0.01, 0.01)
    sizes = {name: x for name, x in case.kwargs.items() if "scale" not in name}
    from generated.torch import window

    plan = window.plan(case.q, case.k, size=case.own["size"], **sizes)
    assert torch.equal(case.call(schedule=plan)[0], case.call()[0])


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_append_quantises(dtype: torch.dtype, kind: str) -> None:
    """A value is off by at most half a step of its octave. Slots of -1 are skipped. Too large values are clamped."""
    tokens, page_size = 37, 8
    k, v = (torch.randn(tokens, KV_HEADS, 24, device=DEVICE).to(DTYPE) for _ in range(2))
    k[3], v[5] = 0.0, 1e4
    slots = torch.randperm(64, device=DEVICE)[:tokens]
    slots[7] = -1
    caches = [torch.zeros(8, page_size, KV_HEADS, 24, device=DEVICE).to(dtype) for _ in range(2)]
    scales = [draw_scale(kind, cache) for cache in caches]
    before = [scale.clone() if torch.is_tensor(scale) else scale for scale in scales]
    found = paging.append(k, v, caches[0], caches[1], slots, k_scale=scales[0], v_scale=scales[1])
    assert [x is y for x, y in zip(found, [*caches, *(scales if kind == "token" else [])], strict=True)]
    kept = slots >= 0
    page, place = slots[kept] // page_size, slots[kept] % page_size
    for x, cache, scale, old in zip((k, v), caches, scales, before, strict=True):
        factor = scale[..., None] if torch.is_tensor(scale) else scale
        held = (cache.double() * factor)[page, place]
        most = torch.finfo(dtype).max * torch.as_tensor(factor, device=DEVICE).expand(*cache.shape[:3], 1)[page, place]
        want = x[kept].double().clamp(-most, most)
        # The spacing of subnormal numbers, in units of the scale.
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * most / torch.finfo(dtype).max
        assert ((held - want).abs() <= (want.abs() * torch.finfo(dtype).eps + least) * 0.51).all()
        free = torch.ones(64, dtype=torch.bool, device=DEVICE)
        free[slots[kept]] = False
        assert not cache.view(64, KV_HEADS, 24)[free].float().any()
        if kind == "token":
            assert torch.is_tensor(scale)
            assert torch.equal(scale.view(64, -1)[free], old.view(64, -1)[free])  # type: ignore[union-attr]


def test_appended_tokens_are_attended_to() -> None:
    """A call reads caches and scales of tokens that `append` has written."""
    case = draw_case("causal", 16, (2,) * 5)
    caches = [torch.zeros(x.shape, device=DEVICE).to(torch.float8_e4m3fn) for x in (case.k, case.v)]
    scales = [torch.full(x.shape[:3], float("nan"), device=DEVICE) for x in caches]
    for b, (_, k, v, _) in enumerate(case.alone):
        place = torch.arange(len(k), device=DEVICE)
        slots = case.kwargs["page_table"][b, place // 16] * 16 + place % 16
        paging.append(k, v, caches[0], caches[1], slots, k_scale=scales[0], v_scale=scales[1])
    held = [x.double() * scale[..., None].double() for x, scale in zip(caches, scales, strict=True)]
    alone = []
    for b, (q, k, _, own) in enumerate(case.alone):
        place = torch.arange(len(k), device=DEVICE)
        page = case.kwargs["page_table"][b, place // 16].long()
        alone.append((q, held[0][page, place % 16], held[1][page, place % 16], own))
    kwargs = case.kwargs | {"k_scale": scales[0], "v_scale": scales[1]}
    case = replace(case, k=caches[0], v=caches[1], kwargs=kwargs, alone=alone)
    check(case.got(), case.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_append_is_the_same_in_jax(kind: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    k, v = (torch.randn(9, KV_HEADS, 24) for _ in range(2))
    slots = torch.tensor([3, 1, -1, 12, 0, 15, 7, 8, 9], dtype=torch.int32)
    caches = [torch.zeros(4, 4, KV_HEADS, 24).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [draw_scale(kind, cache.to(DEVICE)) for cache in caches]
    scales = [x.cpu() if torch.is_tensor(x) else x for x in scales]

    def in_jax(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        if x.dtype == torch.float8_e4m3fn:
            return jnp.array(x.float().numpy()).astype(jnp.float8_e4m3fn)
        return jnp.array(x.numpy())

    given: list[Any] = [in_jax(x) for x in (k, v, *caches, slots)]
    in_jax_scales = {"k_scale": in_jax(scales[0]), "v_scale": in_jax(scales[1])}
    got = paging.append(given[0], given[1], given[2], given[3], given[4], **in_jax_scales)
    want = paging.append(k, v, caches[0], caches[1], slots, k_scale=scales[0], v_scale=scales[1])
    for x, y in zip(got, want, strict=True):
        # XLA multiplies by a reciprocal, so the last digit of a scale differs, and a value may round to its neighbour.
        rtol = {"token": 1e-6 if y.dtype == torch.float32 else 0.125}.get(kind, 0.0)
        torch.testing.assert_close(torch.tensor(x.astype(jnp.float32).tolist()), y.float(), rtol=rtol, atol=0.0)


@pytest.mark.parametrize(
    ("scale", "dtype", "expected"),
    [
        (torch.ones(2, 4, 3), torch.float8_e4m3fn, r"k_scale: expected scales \[2, 4, 2\] of .*, got \[2, 4, 3\]"),
        (torch.ones(2, 4, 2), torch.float16, "k_scale: expected .* 8-bit floats alone, got a cache of 16 bits"),
        (torch.ones(2, 4, 2).half(), torch.float8_e4m3fn, "k_scale: expected dense float32 .*, got torch.float16"),
        (torch.ones(3), torch.float8_e4m3fn, r"k_scale: expected a number or floats \[2\] .*, got .* \[3\]"),
        (torch.tensor([1.0, 0.0]), torch.float16, r"k_scale: expected finite floats above 0, got \[1.0, 0.0\]"),
        (
            torch.tensor([1.0, float("nan")]),
            torch.float16,
            r"k_scale: expected finite floats above 0, got \[1.0, nan\]",
        ),
        (0.0, torch.float16, "k_scale: expected a finite number above 0, got 0.0"),
        (float("nan"), torch.float16, "k_scale: expected a finite number above 0, got nan"),
    ],
)
def test_append_refuses_scales(scale: Tensor | float, dtype: torch.dtype, expected: str) -> None:
    x, cache = torch.zeros(1, 2, 8), torch.zeros(2, 4, 2, 8).to(dtype)
    with pytest.raises(ValueError, match=expected):
        paging.append(x, x, cache, cache, torch.tensor([0]), k_scale=scale)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.uint64], ids=str)
def test_integers_of_any_dtype(dtype: torch.dtype) -> None:
    x, cache = torch.ones(2, 2, 8), torch.zeros(2, 4, 2, 8)
    paging.append(x, x, cache, cache.clone(), torch.tensor([0, 5]).to(dtype))
    assert cache.sum((2, 3)).nonzero().tolist() == [[0, 0], [1, 1]]
    assert paging.slots(torch.tensor([[3]]).to(dtype), torch.tensor([5]).to(dtype), 100).tolist() == [305]


def test_slots_behind_the_cache_are_skipped() -> None:
    """A kernel that is launched without the check of values, as on a GPU, writes to no other memory."""
    memory, new = torch.zeros(6, 4, 2, 16, device=DEVICE), torch.ones(3, 2, 16, device=DEVICE)
    _launch(new, memory[:3], torch.tensor([12, 2, 999], dtype=torch.int32, device=DEVICE), None)
    assert torch.equal(memory.sum((2, 3)).nonzero(), torch.tensor([[0, 2]], device=DEVICE))


def test_pages_behind_the_cache_get_no_sums() -> None:
    sums, bases = torch.zeros(6, 4, 2, device=DEVICE), torch.zeros(6, 2, device=DEVICE)
    table = torch.tensor([[4, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    g = -torch.ones(7, 2, device=DEVICE)
    launch_sums(backend, append_sums, g, sums[:3], bases[:3], table, None, lengths, None, 7)
    assert not sums[3:].any()
    assert not bases[3:].any()
    assert sums[1].any()


def test_pages_beyond_the_cache_are_refused_where_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with ATTENTION_DEBUG=1, where kernels would read other memory."""
    monkeypatch.setattr("generated._runtime.torch.dispatch.DEBUG", True)
    q, k = torch.randn(1, 2, 1, 32, device=DEVICE), torch.randn(10, 16, 2, 32, device=DEVICE)
    for beyond in (10, 10**6, -1, -(2**31)):
        pages = {"page_table": [[3, beyond]], "kv_lengths": [20]}
        given: dict[str, Any] = {n: torch.tensor(x, dtype=torch.int32, device=DEVICE) for n, x in pages.items()}
        with pytest.raises(ValueError, match=rf"causal: page_table: expected pages from 0 to 9 .*, got {beyond}"):
            causal(q, k, k, **given)
        given["kv_lengths"] -= 4
        o: Any = causal(q, k, k, **given)
        assert o.isfinite().all()


def test_slots_without_pages() -> None:
    positions = torch.tensor([0, 3])
    assert paging.slots(torch.zeros(2, 0, dtype=torch.int32), positions, 4).tolist() == [-1, -1]
    with pytest.raises(ValueError, match=r"slots: page_table: expected a dtype of integers, got torch\.float32"):
        paging.slots(torch.zeros(2, 1), positions, 4)


def test_bits_do_not_depend_on_who_folds_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch alone occupies the chip, a program computes several splits, each with its own scales."""
    processors, own, others, other = (2, 200, 4, 1100) if INTERPRET else (16, 1100, 16, 2048)
    monkeypatch.setattr("generated._runtime.torch.paged.multiprocessors", lambda _: processors)
    case = draw_case("causal", 64, (1,) * (1 + others), (own, *[other] * others))
    case = quantised_case(case, torch.float8_e4m3fn, *own_scales(case, ("token", "token")))
    own_call = {name: case.kwargs[name][:1] for name in ("page_table", "kv_lengths")}
    scales = {name: case.kwargs[name] for name in ("k_scale", "v_scale")}
    alone: Any = causal(case.q[:1], case.k, case.v, **own_call, **scales)
    together, _ = case.call()
    assert torch.equal(together[0], alone[0])
    check(case.got(), case.expected())


def test_bits_do_not_depend_on_keys_between_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that computes several splits reads the keys between them. Their scales must not count."""
    monkeypatch.setattr("generated._runtime.torch.paged.multiprocessors", lambda _: 4)
    tile = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2, "keys_per_split": 16}
    sizes = replace(SIZES, heads=1, kv_heads=1)
    case = draw_case("natten", 16, (1,) * 3, (200, 2400, 2400), sizes)
    scale = torch.arange(case.v.shape[0] * 16.0, device=DEVICE).view(-1, 16, 1) + 1.0
    results = []
    for rows in (1, 3):
        call = {name: case.kwargs[name][:rows] for name in ("page_table", "kv_lengths")}
        o: Any = natten(case.q[:rows], case.k, case.v, v_scale=scale, config={"decode": tile}, **call)
        results.append(o[0])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"slots": torch.tensor([3, 32])},
            r"slots: expected slots below 32, the pages of k_cache times the page size, got 32",
        ),
        (
            {"v_cache": torch.zeros(8, 4, 2, 16, dtype=torch.int8)},
            r"v_cache: expected a dtype of floats, got torch\.int8",
        ),
    ],
)
def test_append_refuses_what_it_cannot_write(change: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"k": torch.zeros(2, 2, 16), "v": torch.zeros(2, 2, 16), "slots": torch.tensor([0, -1])}
    given |= {"k_cache": torch.zeros(8, 4, 2, 16), "v_cache": torch.zeros(8, 4, 2, 16)}
    with pytest.raises(ValueError, match=f"append: {expected}"):
        paging.append(**{**given, **change})


@pytest.mark.parametrize("begins", [None, torch.tensor([0, 3, 3])])
def test_no_sequence_has_more_queries_than_the_call_says(begins: Tensor | None) -> None:
    """Kernels would leave out the rows beyond."""
    q = torch.zeros(2, 4, 3, 16) if begins is None else torch.zeros(3, 4, 16)
    cache = torch.zeros(8, 4, 2, 16)
    table, lengths = torch.tensor([[0, 1], [2, 3]]), torch.tensor([8, 5])
    call: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "cu_seqlens_q": begins}
    causal(q, cache, cache, max_seqlen_q=3, **call)
    with pytest.raises(ValueError, match="max_seqlen_q: expected at least 3, the queries of the longest"):
        causal(q, cache, cache, max_seqlen_q=2, **call)
