"""Trees of drafted tokens on paged caches: the library's `tree_attention`, against float64 of each sequence alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import paging
from generated.torch import causal
from tests.support.cases import DEVICE, INTERPRET
from tests.support.paths import LIBRARY
from tests.support.rendering import importable

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
PACKAGE = "drafted_trees"
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
TOLERANCE = 1e-5 if INTERPRET else 2e-2
HEADS, KV_HEADS, DIM, PAGE_SIZE = 6, 2, 32, 16
TREES = ([0, 0, 0, 1, 1, 2, 5, 3], [0, 0, 1, 2, 3, 4, 5, 6], [0] * 8)
"""The parent of each drafted token, which is the token itself for the root: a bush, a chain and a star."""
LENGTHS = (133, 0, 64)
"""Tokens before the drafted ones."""


@pytest.fixture(scope="module")
def tree_attention(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yaml = pytest.importorskip("yaml", reason="rendering needs pyyaml")
    entry = yaml.safe_load(LIBRARY.read_text(encoding="utf-8"))["variants"]["tree_attention"]
    spec = yaml.safe_dump({"variants": {"tree_attention": entry}})
    with importable(tmp_path_factory.mktemp("trees") / "tests", PACKAGE, spec):
        yield importlib.import_module(f"{PACKAGE}.torch").tree_attention


def ancestors(parents: list[int]) -> Tensor:
    """`[drafted, drafted]`: True where the column's token is an ancestor of the row's token, or the same token."""
    keep = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        keep[node] |= keep[parent]
    return keep


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """A step that verifies drafted tokens: caches with NaN where no query may read, and each sequence alone."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    length: Tensor
    kv_lengths: Tensor
    ancestor: Tensor
    alone: list[tuple[Tensor, Tensor, Tensor]]

    def expected(self, b: int) -> Tensor:
        """o of a sequence's drafted tokens, `[drafted, Hq, D]`, in float64."""
        q, k, v = (x.double() for x in self.alone[b])
        before = torch.ones(len(q), int(self.length[b]), dtype=torch.bool, device=DEVICE)
        keep = torch.cat([before, self.ancestor[b, : len(q), : len(q)]], 1)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        return torch.einsum("hqk,khd->qhd", score.masked_fill(~keep, -torch.inf).softmax(-1), v)


def draw_drafts(drafted: tuple[int, ...]) -> Drafts:
    pool = paging.Pool(64, PAGE_SIZE)
    caches = [torch.full((64, PAGE_SIZE, KV_HEADS, DIM), float("nan"), device=DEVICE).to(DTYPE) for _ in range(2)]
    alone = []
    for b, (length, count) in enumerate(zip(LENGTHS, drafted, strict=True)):
        keys = length + count
        slots = torch.tensor(pool.extend(b, keys), device=DEVICE)
        q, k, v = (
            torch.randn(n, h, DIM, device=DEVICE).to(DTYPE) for n, h in ((count, HEADS), *[(keys, KV_HEADS)] * 2)
        )
        paging.append(k, v, caches[0], caches[1], slots)
        alone.append((q, k, v))
    sequences = range(len(LENGTHS))
    return Drafts(
        q=torch.cat([q for q, _, _ in alone]),
        k_cache=caches[0],
        v_cache=caches[1],
        table=torch.tensor(pool.page_table(sequences), device=DEVICE),
        length=torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
        kv_lengths=torch.tensor(pool.lengths(sequences), device=DEVICE),
        ancestor=torch.stack([ancestors(parents) for parents in TREES]).to(DEVICE),
        alone=alone,
    )


@pytest.mark.parametrize("splits", [None, 32])
def test_drafts_of_one_size(tree_attention: Any, splits: int | None) -> None:
    drafts = draw_drafts((8, 8, 8))
    pages = {"page_table": drafts.table, "kv_lengths": drafts.kv_lengths, "splits": splits}
    own = {"length": drafts.length, "ancestor": drafts.ancestor}
    q = drafts.q.view(3, 8, HEADS, DIM).transpose(1, 2)
    o = tree_attention(q, drafts.k_cache, drafts.v_cache, **own, **pages)
    for b in range(3):
        torch.testing.assert_close(o[b].transpose(0, 1).double(), drafts.expected(b), atol=TOLERANCE, rtol=TOLERANCE)
    plan = tree_attention.plan(q, drafts.k_cache, length=drafts.length, **pages)
    assert torch.equal(tree_attention(q, drafts.k_cache, drafts.v_cache, **own, **pages, schedule=plan), o)


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_packed_drafts(tree_attention: Any, by_reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of different sizes, one of them a single token; `ancestor` has a row for each query."""
    if by_reference:
        monkeypatch.setattr(f"{PACKAGE}._runtime.torch.paged.runs_reference", lambda _q: True)
    counts = (8, 1, 5)
    drafts = draw_drafts(counts)
    begins = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    ancestor = torch.cat([drafts.ancestor[b, :count] for b, count in enumerate(counts)])
    o = tree_attention(
        drafts.q,
        drafts.k_cache,
        drafts.v_cache,
        length=drafts.length,
        ancestor=ancestor,
        page_table=drafts.table,
        kv_lengths=drafts.kv_lengths,
        cu_seqlens_q=begins,
        max_seqlen_q=max(counts),
    )
    want = torch.cat([drafts.expected(b) for b in range(3)])
    torch.testing.assert_close(o.double(), want, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_chain_of_drafts_is_causal(tree_attention: Any) -> None:
    drafts = draw_drafts((8, 8, 8))
    chain = ancestors(TREES[1]).to(DEVICE).expand(3, 8, 8)
    pages: dict[str, Any] = {"page_table": drafts.table, "kv_lengths": drafts.kv_lengths}
    q = drafts.q.view(3, 8, HEADS, DIM).transpose(1, 2)
    o = tree_attention(q, drafts.k_cache, drafts.v_cache, length=drafts.length, ancestor=chain, **pages)
    want: Any = causal(q, drafts.k_cache, drafts.v_cache, **pages)
    torch.testing.assert_close(o, want, atol=TOLERANCE, rtol=TOLERANCE)
