"""Wide heads on paged caches, and values that are the first columns of keys, as latent attention has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import paging
from generated._runtime.torch import backend
from generated.torch import causal, full, gpt_oss
from tests.support.cases import DEVICE, INTERPRET

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
TOLERANCE = 1e-5 if INTERPRET else 2e-2
LENGTHS = (35, 0, 1, 16)


class Cache:
    """Keys `[pages, page size, 1, D]` of some sequences, with NaN in all places that no query may read."""

    def __init__(self, dim: int, page_size: int, lengths: Sequence[int] = LENGTHS, slots: int = 512) -> None:
        pool = paging.Pool(slots // page_size, page_size)
        pool.extend("nobody", 3)
        self.keys = torch.full((slots // page_size, page_size, 1, dim), float("nan"), device=DEVICE).to(DTYPE)
        self.rows = [torch.randn(length, 1, dim, device=DEVICE).to(DTYPE) for length in lengths]
        for b, row in enumerate(self.rows):
            places = torch.tensor(pool.extend(b, len(row)), device=DEVICE, dtype=torch.int64)
            paging.append(row, row, self.keys, self.keys, places)
        sequences = range(len(lengths))
        self.pages: dict[str, Any] = {
            "page_table": torch.tensor(pool.page_table(sequences), device=DEVICE),
            "kv_lengths": torch.tensor(pool.lengths(sequences), device=DEVICE),
        }

    def expected(self, q: Tensor, dim_v: int, *, is_causal: bool = True) -> Tensor:
        """o in float64."""
        found = []
        for queries, row in zip(q.double(), self.rows, strict=True):
            keys = row[:, 0].double()
            score = queries @ keys.T / queries.shape[-1] ** 0.5
            place = torch.arange(queries.shape[1], device=DEVICE)[:, None] + len(row) - queries.shape[1]
            keep = (torch.arange(len(row), device=DEVICE) <= place) | (not is_causal)
            weights = score.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
            found.append(weights @ keys[:, :dim_v])
        return torch.stack(found)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each forward that is launched, whether one load of keys serves both products."""
    found: list[bool] = []
    launch, launch_hopper = backend.launch, backend.launch_hopper

    def noted(*args: Any, **constants: Any) -> None:
        if "SHARED_KV" in constants:
            found.append(constants["SHARED_KV"])
        launch(*args, **constants)

    def noted_latent(*args: Any, **constants: Any) -> None:
        found.append(True)
        launch_hopper(*args, **constants)

    monkeypatch.setattr(backend, "launch", noted)
    monkeypatch.setattr(backend, "launch_hopper", noted_latent)
    return found


@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "queries", "page_size", "is_shared"),
    [
        (576, 512, 16, 1, 16, True),
        (576, 512, 128, 1, 64, True),
        (576, 512, 16, 6, 1, True),
        (576, 576, 4, 2, 16, True),
        (320, 256, 4, 2, 16, True),
        (96, 64, 4, 2, 16, True),
        (64, 64, 4, 2, 16, True),
        (576, 128, 4, 1, 16, False),
        (64, 32, 4, 2, 16, False),
    ],
)
def test_values_in_keys(
    dim: int, dim_v: int, heads: int, queries: int, page_size: int, is_shared: bool, shared: list[bool]
) -> None:
    cache = Cache(dim, page_size)
    q = torch.randn(4, heads, queries, dim, device=DEVICE).to(DTYPE)
    o: Any = causal(q, cache.keys, cache.keys[..., :dim_v], **cache.pages)
    torch.testing.assert_close(o.double(), cache.expected(q, dim_v), atol=TOLERANCE, rtol=TOLERANCE)
    assert set(shared) == {is_shared}


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "queries", "page_size"), [(128, 1, 64), (64, 2, 16), (32, 3, 256), (128, 70, 64)])
def test_long_sequences(heads: int, queries: int, page_size: int) -> None:
    """Each sequence alone has the same bits as in the batch."""
    cache = Cache(576, page_size, (5000, 70, 0, 1300), slots=8192)
    q = torch.randn(4, heads, queries, 576, device=DEVICE).to(DTYPE)
    values = cache.keys[..., :512]
    o: Any = causal(q, cache.keys, values, **cache.pages)
    torch.testing.assert_close(o.double(), cache.expected(q, 512), atol=TOLERANCE, rtol=TOLERANCE)
    for b in range(4):
        own = {name: x[b : b + 1] for name, x in cache.pages.items()}
        alone: Any = causal(q[b : b + 1], cache.keys, values, **own)
        assert torch.equal(alone[0], o[b])
    balanced: Any = causal(q, cache.keys, values, splits="balanced", **cache.pages)
    torch.testing.assert_close(balanced, o, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dim_v", [512, 8])
def test_wide_keys_with_values_of_their_own(dim_v: int, shared: list[bool]) -> None:
    cache = Cache(576, 16)
    q = torch.randn(4, 16, 2, 576, device=DEVICE).to(DTYPE)
    o: Any = causal(q, cache.keys, cache.keys.clone()[..., :dim_v], **cache.pages)
    torch.testing.assert_close(o.double(), cache.expected(q, dim_v), atol=TOLERANCE, rtol=TOLERANCE)
    assert set(shared) == {False}


def test_views_that_begin_elsewhere_are_not_shared(shared: list[bool]) -> None:
    cache = Cache(128, 16)
    q = torch.randn(4, 4, 1, 64, device=DEVICE).to(DTYPE)
    keys, values = cache.keys[..., :64], cache.keys[..., 64:]
    o: Any = full(q, keys, values, **cache.pages)
    want: Any = full(q, keys.clone(), values.clone(), **cache.pages)
    torch.testing.assert_close(o, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert set(shared) == {False}


def test_wide_rows_are_split_and_planned(shared: list[bool]) -> None:
    """A plan depends on keys alone, not on values."""
    cache = Cache(576, 16, (100, 0, 1, 2))
    q = torch.randn(4, 16, 1, 576, device=DEVICE).to(DTYPE)
    values = cache.keys[..., :512]
    plan = causal.plan(q, cache.keys, splits=32, **cache.pages)
    o: Any = causal(q, cache.keys, values, splits=32, schedule=plan, **cache.pages)
    torch.testing.assert_close(o.double(), cache.expected(q, 512), atol=TOLERANCE, rtol=TOLERANCE)
    assert set(shared) == {True}


def test_wide_caches_of_8_bits(shared: list[bool]) -> None:
    cache = Cache(576, 16)
    q = torch.randn(4, 16, 1, 576, device=DEVICE).to(DTYPE)
    small = (cache.keys.float() / 0.01).to(torch.float8_e4m3fn)
    cache.rows = [(row.float() / 0.01).to(torch.float8_e4m3fn).double() * 0.01 for row in cache.rows]
    o: Any = causal(q, small, small[..., :512], k_scale=0.01, v_scale=0.01, **cache.pages)
    torch.testing.assert_close(o.double(), cache.expected(q, 512), atol=TOLERANCE, rtol=TOLERANCE)
    # In the interpreter queries are float32; then columns are not read in pairs.
    assert set(shared) == {not INTERPRET}


def test_any_variant_has_wide_heads() -> None:
    """Packed, with a sink, by the reference and by the kernels."""
    cache = Cache(576, 16)
    counts = [3, 0, 1, 16]
    pages: dict[str, Any] = cache.pages | {
        "cu_seqlens_q": torch.tensor([0, *counts], device=DEVICE).cumsum(0),
        "max_seqlen_q": 16,
    }
    q = torch.randn(sum(counts), 4, 576, device=DEVICE).to(DTYPE)
    sink = torch.randn(4, device=DEVICE)
    values = cache.keys[..., :512]
    got: Any = gpt_oss(q, cache.keys, values, sink=sink, **pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("generated._runtime.torch.paged.runs_reference", lambda _q: True)
        want: Any = gpt_oss(q, cache.keys, values, sink=sink, **pages)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_messages_say_where_heads_may_be_wide() -> None:
    x = torch.zeros(1, 1, 4, 576, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"q: expected a head_dim from 8 to 512, got 576 .*; calls on paged caches take"
    ):
        causal(x, x, x)
    cache = Cache(64, 16)
    wide = torch.zeros(*cache.keys.shape[:3], 584, device=DEVICE).to(DTYPE)
    q = torch.zeros(4, 1, 1, 584, device=DEVICE).to(DTYPE)
    with pytest.raises(ValueError, match="q: expected a head_dim from 8 to 576 on paged caches, got 584"):
        causal(q, wide, wide, **cache.pages)
