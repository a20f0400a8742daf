"""`append` and `append_decay` in PyTorch, on the CPU: caches whose values are in keys, views of caches, and traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from generated import paging
from generated._runtime.core.checks import ArgumentError

FLOAT8 = torch.float8_e4m3fn
COLUMNS, VALUES = 40, 32


def latent(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """New tokens, a cache of 4 pages of 4 slots, and slots."""
    torch.manual_seed(0)
    new = torch.randn(5, 1, COLUMNS)
    new[..., VALUES:] *= 20
    return new, torch.zeros(4, 4, 1, COLUMNS, dtype=dtype), torch.tensor([3, 9, -1, 4, 15])


def rows(cache: Tensor, slots: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """The tokens that a cache holds in these slots, times their scales."""
    if isinstance(scale, Tensor):
        scale = scale.flatten(0, 1)[slots][..., None]
    return cache.flatten(0, 1)[slots].float() * scale


@pytest.mark.parametrize("form", ["none", "views"])
@pytest.mark.parametrize("scaling", ["tokens", "number", "heads"])
def test_a_cache_with_values_in_keys_has_one_scale(form: str, scaling: str) -> None:
    new, cache, slots = latent(FLOAT8)
    scale: Any = {"tokens": torch.zeros(4, 4, 1), "number": 0.5, "heads": torch.tensor([0.5])}[scaling]
    if form == "none":
        found = paging.append(new, None, cache, None, slots, k_scale=scale)
    else:
        found = paging.append(new, new[..., :VALUES], cache, cache[..., :VALUES], slots, k_scale=scale, v_scale=scale)
    assert found[0] is cache
    assert (found[1] is None) == (form == "none")
    kept = slots >= 0
    wide = scale if scaling == "tokens" else 0.5
    error = rows(cache, slots[kept], wide) - new[kept]
    assert (error.norm(dim=-1) / new[kept].norm(dim=-1)).max() < 0.05
    assert (rows(cache, slots[kept], wide) != 0).all()


def test_values_in_keys_are_those_of_the_keys() -> None:
    new, cache, slots = latent(FLOAT8)
    part = new[..., :VALUES], cache, cache[..., :VALUES], slots
    given: list[dict[str, Any]] = [{"k_scale": 1.0, "v_scale": 2.0}, {"k_scale": 1.0}, {"v_scale": 1.0}]
    for scales in given:
        with pytest.raises(
            ArgumentError, match="append: v_scale: expected that of the keys, because v_cache is a view"
        ):
            paging.append(new, *part, **scales)
    tokens: dict[str, Any] = {"k_scale": torch.zeros(4, 4, 1), "v_scale": torch.zeros(4, 4, 1)}
    with pytest.raises(ArgumentError, match="append: v_scale: expected that of the keys"):
        paging.append(new, *part, **tokens)
    with pytest.raises(ArgumentError, match="append: v: expected the first columns of k, because v_cache is a view"):
        paging.append(new, 2 * part[0], *part[1:])
    with pytest.raises(ArgumentError, match="append: v_cache: expected None, because v or v_cache is None, got Tensor"):
        paging.append(new, None, cache, cache, slots)
    with pytest.raises(ArgumentError, match="append: v_scale: expected None"):
        paging.append(new, None, cache, None, slots, v_scale=1.0)
    assert not cache.float().any()


def test_tokens_move_within_a_cache() -> None:
    """As those of an accepted branch of drafts do: each is read before one is written."""
    cache, values = torch.zeros(4, 4, 1, COLUMNS), torch.randn(4, 4, 1, 8)
    paging.append(torch.randn(16, 1, COLUMNS), torch.randn(16, 1, 8), cache, values, torch.arange(16))
    keys, held = cache.flatten(0, 1).clone(), values.flatten(0, 1).clone()
    moved = cache.flatten(0, 1)[4:8], values.flatten(0, 1)[4:8]
    paging.append(*moved, cache, values, torch.tensor([5, 6, 7, 8]))
    assert torch.equal(cache.flatten(0, 1)[5:9], keys[4:8])
    assert torch.equal(values.flatten(0, 1)[5:9], held[4:8])
    keys = cache.flatten(0, 1).clone()
    source = cache.flatten(0, 1)[5:9]
    paging.append(source, source[..., :VALUES], cache, cache[..., :VALUES], torch.tensor([6, 7, 8, 9]))
    assert torch.equal(cache.flatten(0, 1)[6:10], keys[5:9])


def test_tokens_of_8_bits_move_as_they_are() -> None:
    """A cache of 8 bits holds numbers in units of scales: dividing them again would change them."""
    new, cache, slots = latent(FLOAT8)
    scale = torch.zeros(4, 4, 1)
    paging.append(new, None, cache, None, slots, k_scale=scale)
    wanted = rows(cache, slots[:2], scale)
    at, onto = slots[:2], torch.tensor([0, 1])
    moved = cache.flatten(0, 1)[at]
    with pytest.raises(ArgumentError, match="append: k_scale: expected None beside k of 8-bit numbers, whose scales"):
        paging.append(moved, None, cache, None, onto, k_scale=scale)
    paging.append(moved, None, cache, None, onto)
    scale.flatten(0, 1)[onto] = scale.flatten(0, 1)[at]
    assert torch.equal(rows(cache, onto, scale), wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_tokens_are_floats(dtype: torch.dtype) -> None:
    new, cache, slots = latent()
    with pytest.raises(ArgumentError, match="append: k: expected a dtype of floats"):
        paging.append(new.to(dtype), None, cache, None, slots)
    with pytest.raises(ArgumentError, match="append: v: expected a dtype of floats"):
        paging.append(new, new.to(dtype), cache, cache.clone(), slots)


@pytest.mark.parametrize("form", ["caches", "none", "views"])
@pytest.mark.parametrize("scaled", [False, True])
def test_append_is_traced(form: str, scaled: bool) -> None:
    def step(new: Tensor, cache: Tensor, other: Tensor, slots: Tensor, scale: Tensor, second: Tensor) -> Tensor:
        scales: dict[str, Any] = {"k_scale": scale, "v_scale": scale if form == "views" else second} if scaled else {}
        if form == "none":
            paging.append(2 * new, None, cache, None, slots, k_scale=scales.get("k_scale"))
        elif form == "views":
            paging.append(2 * new, 2 * new[..., :VALUES], cache, cache[..., :VALUES], slots, **scales)
        else:
            paging.append(2 * new, 3 * new, cache, other, slots, **scales)
        return cache.float().sum() + other.float().sum() + scale.sum()

    new, cache, slots = latent(FLOAT8 if scaled else torch.float32)
    eager, traced = (
        [new, cache.clone(), cache.clone(), slots, torch.zeros(4, 4, 1), torch.zeros(4, 4, 1)] for _ in range(2)
    )
    want = step(*eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*traced)
    assert torch.equal(got, want)
    for x, y in zip(traced, eager, strict=True):
        assert torch.equal(x.float(), y.float())


@pytest.mark.parametrize("packed", [False, True])
def test_append_decay_is_traced(packed: bool) -> None:
    def step(g: Tensor, cache: Tensor, base: Tensor, lengths: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        table = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
        paging.append_decay(g, cache, base, page_table=table, kv_lengths=lengths, cu_seqlens=cu_seqlens)
        return cache.sum() + base.sum()

    g = -torch.rand(6, 2) if packed else -torch.rand(2, 3, 2)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32) if packed else None
    lengths, (eager, traced) = torch.tensor([5, 7]), ((torch.zeros(4, 4, 2), torch.zeros(4, 2)) for _ in range(2))
    want = step(g, *eager, lengths, ends)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(g, *traced, lengths, ends), want)
    assert torch.equal(traced[0], eager[0])
    assert torch.equal(traced[1], eager[1])


def test_a_pool_forks_and_truncates() -> None:
    pool = paging.Pool(pages=6, page_size=4)
    pool.extend("a", 6)
    assert pool.page_table(["a"]) == [[0, 1]]
    # The first page is shared. The second one has room, so that the fork has one of its own.
    assert pool.fork("a", "b") == [(1, 2)]
    assert pool.page_table(["a", "b"]) == [[0, 1], [0, 2]]
    assert pool.extend("b", 3) == [10, 11, 12]
    assert pool.extend("a", 1) == [6]
    assert pool.lengths(["a", "b"]) == [7, 9]
    assert pool.free_pages == 2
    # Drafts that are not accepted are taken back.
    assert pool.truncate("b", 7) == []
    assert (pool.page_table(["b"]), pool.free_pages) == ([[0, 2]], 3)
    # Within a shared page, what follows goes to a copy.
    assert pool.truncate("b", 2) == [(0, 2)]
    assert (pool.page_table(["a", "b"]), pool.free_pages) == ([[0, 1], [2, -1]], 3)
    pool.free("a")
    pool.free("b")
    assert pool.free_pages == 6
    assert sorted(pool._free) == list(range(6))


def test_truncation_takes_a_page_that_it_frees() -> None:
    pool = paging.Pool(pages=4, page_size=4)
    pool.extend("a", 6)
    pool.fork("a", "b")
    pool.extend("b", 6)
    assert (pool.page_table(["a", "b"]), pool.free_pages) == ([[0, 1, -1], [0, 2, 3]], 0)
    ((source, to),) = pool.truncate("b", 2)
    assert source == 0
    assert to in (2, 3)
    assert (pool.page_table(["a", "b"]), pool.free_pages) == ([[0, 1], [to, -1]], 1)


def test_what_a_pool_cannot_do_changes_nothing() -> None:
    pool = paging.Pool(pages=2, page_size=4)
    pool.extend("a", 5)
    for call, error in (
        (lambda: pool.fork("a", "b"), MemoryError),
        (lambda: pool.fork("c", "b"), KeyError),
        (lambda: pool.fork("a", "a"), ArgumentError),
        (lambda: pool.truncate("a", 6), ArgumentError),
        (lambda: pool.truncate("a", -1), ArgumentError),
        (lambda: pool.truncate("c", 0), KeyError),
    ):
        with pytest.raises(error):
            call()
    assert (pool.page_table(["a"]), pool.lengths(["a"]), pool.free_pages) == ([[0, 1]], [5], 0)
    assert pool.truncate("a", 4) == []
    assert pool.fork("a", "b") == []
    assert pool.page_table(["a", "b"]) == [[0], [0]]
    with pytest.raises(MemoryError, match=r"Pool.extend: 2 pages wanted for 'b', 1 are free"):
        pool.extend("b", 5)
    assert pool.truncate("b", 3) == [(0, 1)]
    assert pool.truncate("a", 3) == []
    with pytest.raises(MemoryError, match=r"Pool.fork: 1 pages wanted for 'd', 0 are free"):
        pool.fork("a", "d")
