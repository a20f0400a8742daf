"""A log-decay on paged caches: running sums that are exact in sequences of any length, and calls that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from generated import paging
from generated._runtime.core.checks import ArgumentError
from generated.forgetting.torch_reference import reference
from tests.support.cases import DEVICE, INTERPRET

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
TOLERANCE = 2e-5 if INTERPRET else 2e-2
HEADS, KV_HEADS, DIM, DIM_V = 6, 2, 32, 16
LENGTHS = (70, 0, 1, 133, 64)
STEEP = -2000.0
"""The log-decay of one token. After a few such tokens, float32 sums lose all fractional digits."""


def forget() -> Any:
    return golden.load_op("forgetting")


def sums_of(g: Tensor, page_size: int, chunks: Sequence[int], heads: int) -> tuple[Tensor, Tensor]:
    """The caches of one sequence that is appended in chunks, with its pages in order."""
    pages = -(-len(g) // page_size)
    g_cache = torch.full((pages, page_size, heads), float("nan"), device=DEVICE)
    g_base = torch.full((pages, heads), float("nan"), device=DEVICE)
    table = torch.arange(pages, device=DEVICE)[None]
    length = 0
    for new in chunks:
        lengths = torch.tensor([length + new], device=DEVICE)
        rows = g[None, length : length + new]
        paging.append_decay(rows, g_cache, g_base, page_table=table, kv_lengths=lengths)
        length += new
    assert length == len(g)
    return g_cache, g_base


def differences(g_cache: Tensor, g_base: Tensor, count: int) -> Tensor:
    """The decay that a call adds to the scores of the last query, for each key and head, as its kernel computes it."""
    bases = g_base.repeat_interleave(g_cache.shape[1], 0)[:count]
    own = g_cache.flatten(0, 1)[:count]
    return (bases[-1] - bases) + (own[-1] - own)


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_sums_of_131072_tokens_are_exact(page_size: int) -> None:
    """The decay of keys that have weight is right to the last digits, while plain float32 sums are off by far more."""
    count = 131072 if page_size == 16 else 16384
    g = torch.nn.functional.logsigmoid(torch.randn(count, 1, device=DEVICE)) * 8
    found = differences(*sums_of(g, page_size, [count - 300, 300], 1), count)
    total = g.double().cumsum(0)
    want = total[-1] - total
    near = want > -100
    assert near.sum() > 1
    assert (found - want)[near].abs().max() < 1e-4
    # Far keys have no weight; their error is one rounding.
    assert ((found - want).abs() <= 1e-6 * want.abs() + 1e-4).all()
    plain = g.cumsum(0)
    assert ((plain[-1] - plain) - want)[near].abs().max() > 1e-3


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_chunks_and_single_tokens_agree(page_size: int) -> None:
    g = torch.nn.functional.logsigmoid(torch.randn(150, HEADS, device=DEVICE))
    total = g.double().cumsum(0)
    for chunks in ([150], [1] * 20 + [130], [40, 1, 8, 100, 1]):
        g_cache, g_base = sums_of(g, page_size, chunks, HEADS)
        own = g_cache.flatten(0, 1)[:150].double() + g_base.repeat_interleave(page_size, 0)[:150].double()
        torch.testing.assert_close(own, total, atol=1e-5, rtol=0)
        if page_size > 1:
            # Sums within a page are small, and so keep their digits.
            assert g_cache.flatten(0, 1)[:150].abs().max() < 50


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences whose keys and log-decays are in caches, and the tensors of each sequence alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]
    alone: list[tuple[Tensor, Tensor, Tensor, Tensor]]

    def call(self, **others: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = forget()(self.q, self.k, self.v, return_lse=True, **self.kwargs | others)
        return found

    def check(self, o: Tensor, lse: Tensor) -> None:
        """Check that o and lse of packed queries are those of each sequence alone in float64."""
        o_parts, lse_parts = [], []
        for q, k, v, g in self.alone:
            found = reference(
                q.double()[None], k.double()[None], v.double()[None],
                g=g.double()[None] if len(g) else g.new_zeros(1, 1, HEADS).double(),
                layout="bshd", return_lse=True, q_offset=len(k) - len(q),
            )  # fmt: skip
            o_parts.append(found[0][0])
            lse_parts.append(found[1][0])
        torch.testing.assert_close(o.double(), torch.cat(o_parts), atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(lse.double(), torch.cat(lse_parts, 1), atol=TOLERANCE, rtol=TOLERANCE)


def draw_case(page_size: int, queries: Sequence[int], *, steep: int = 0) -> Case:
    """Sequences on pages in a random order, NaN elsewhere. The first `steep` log-decays of each sequence are STEEP."""
    pool = paging.Pool(sum(-(-n // page_size) for n in LENGTHS) + 3, page_size)
    free = pool.free_pages
    pool.extend("nobody", page_size)
    shape = (free, page_size)
    k_cache = torch.full((*shape, KV_HEADS, DIM), float("nan"), dtype=DTYPE, device=DEVICE)
    v_cache = torch.full((*shape, KV_HEADS, DIM_V), float("nan"), dtype=DTYPE, device=DEVICE)
    g_cache = torch.full((*shape, HEADS), float("nan"), device=DEVICE)
    g_base = torch.full((free, HEADS), float("nan"), device=DEVICE)
    alone = []
    for b, (n, new) in enumerate(zip(LENGTHS, queries, strict=True)):
        q = torch.randn(new, HEADS, DIM, device=DEVICE).to(DTYPE)
        k = torch.randn(n, KV_HEADS, DIM, device=DEVICE).to(DTYPE)
        v = torch.randn(n, KV_HEADS, DIM_V, device=DEVICE).to(DTYPE)
        g = torch.nn.functional.logsigmoid(torch.randn(n, HEADS, device=DEVICE))
        g[: min(steep, n)] = STEEP
        paging.append(k, v, k_cache, v_cache, torch.tensor(pool.extend(b, n), device=DEVICE, dtype=torch.int64))
        alone.append((q, k, v, g))
    table = torch.tensor(pool.page_table(range(len(LENGTHS))), dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    # All but the last tokens of each sequence come as one chunk, then the last.
    for begin, end in ((0, 5), (5, 0)):
        parts = [g[: max(len(g) - 5, 0)] if begin == 0 else g[max(len(g) - 5, 0) :] for *_, g in alone]
        cu = torch.tensor([0, *(len(x) for x in parts)], device=DEVICE).cumsum(0)
        now = (lengths - end).clamp(min=0)
        paging.append_decay(torch.cat(parts), g_cache, g_base, page_table=table, kv_lengths=now, cu_seqlens=cu)
    kwargs: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "g": g_cache, "g_base": g_base}
    q = torch.cat([part[0] for part in alone])
    kwargs["cu_seqlens_q"] = torch.tensor([0, *queries], device=DEVICE).cumsum(0)
    kwargs["max_seqlen_q"] = max(queries)
    return Case(q=q, k=k_cache, v=v_cache, kwargs=kwargs, alone=alone)


@pytest.mark.parametrize("queries", [(1,) * 5, (5, 0, 1, 40, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
def test_against_each_sequence_alone(page_size: int, queries: Sequence[int]) -> None:
    case = draw_case(page_size, queries)
    case.check(*case.call())


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_great_sums(page_size: int) -> None:
    """After pages of tokens of -2000 each, float32 sums have hardly a fractional digit, but differences have."""
    case = draw_case(page_size, (1,) * 5, steep=48)
    case.check(*case.call())


def test_splits_and_plans() -> None:
    case = draw_case(16, (1,) * 5)
    want = case.call()
    bounds = {name: x for name, x in case.kwargs.items() if not name.startswith("g")}
    plan = forget().plan(case.q, case.k, **bounds)
    assert torch.equal(case.call(schedule=plan)[0], want[0])
    for splits in (1, 64, "balanced"):
        case.check(*case.call(splits=splits))


def test_a_shared_prefix() -> None:
    """Two sequences share the pages of their common prefix. Each gives the same bits as on pages of its own."""
    size, shared, own = 16, 48, 21
    k, v = torch.randn(shared + own, KV_HEADS, DIM).to(DTYPE), torch.randn(shared + own, KV_HEADS, DIM_V).to(DTYPE)
    k, v = k.to(DEVICE), v.to(DEVICE)
    g = torch.nn.functional.logsigmoid(torch.randn(shared + own, HEADS, device=DEVICE))
    caches = [torch.zeros(12, size, *x.shape[1:], dtype=DTYPE, device=DEVICE) for x in (k, v)]
    g_cache, g_base = torch.zeros(12, size, HEADS, device=DEVICE), torch.zeros(12, HEADS, device=DEVICE)
    apart = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], device=DEVICE)
    together = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 10, 11]], device=DEVICE)
    for table, rows in ((apart, (0, 1)), (together, (1,))):
        for b in rows:
            pages = table[b : b + 1]
            begin = 0 if table is apart else shared
            for first, end in ((0, shared), (shared, shared + own)):
                if first < begin:
                    continue
                places = torch.arange(first, end, device=DEVICE)[None]
                slots = paging.slots(pages, places, size)[0]
                paging.append(k[first:end], v[first:end], caches[0], caches[1], slots)
                lengths = torch.tensor([end], device=DEVICE)
                paging.append_decay(g[None, first:end], g_cache, g_base, page_table=pages, kv_lengths=lengths)
    q = torch.randn(1, HEADS, 1, DIM, device=DEVICE).to(DTYPE).expand(2, -1, -1, -1)
    lengths = torch.tensor([shared + own] * 2, device=DEVICE)
    found = [
        forget()(q, *caches, g=g_cache, g_base=g_base, page_table=table, kv_lengths=lengths)
        for table in (apart, together)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][0], found[0][1])


def test_rows_that_pad_a_batch_write_nothing() -> None:
    """A token for a sequence of length 0, as in captured graphs, and a token whose page is -1."""
    g_cache, g_base = torch.full((4, 8, 2), 7.0, device=DEVICE), torch.full((4, 2), 7.0, device=DEVICE)
    table = torch.tensor([[0, -1], [-1, -1], [1, -1]], device=DEVICE)
    lengths = torch.tensor([0, 1, 3], device=DEVICE)
    g = torch.full((3, 1, 2), -0.5, device=DEVICE)
    g_cache[1, 1], g_base[1] = -2.0, 0.0
    paging.append_decay(g, g_cache, g_base, page_table=table, kv_lengths=lengths)
    assert (g_cache[[0, 2, 3]] == 7).all()
    assert (g_base[[0, 2, 3]] == 7).all()
    assert (g_cache[1, 2] == -2.5).all()
    assert (g_cache[1, 0] == 7).all()


def test_a_flat_table() -> None:
    case = draw_case(16, (1,) * 5)
    table = case.kwargs["page_table"]
    starts = torch.arange(len(LENGTHS) + 1, device=DEVICE) * table.shape[1]
    flat = {"page_table": table.flatten(), "page_starts": starts}
    assert torch.equal(case.call(**flat)[0], case.call()[0])
    caches = [torch.zeros_like(case.kwargs[name]) for name in ("g", "g_base")]
    wanted = [torch.zeros_like(x) for x in caches]
    g = torch.randn(5, 2, HEADS, device=DEVICE)
    lengths = case.kwargs["kv_lengths"].clamp(min=2)
    paging.append_decay(g, *caches, kv_lengths=lengths, **flat)
    paging.append_decay(g, *wanted, page_table=table, kv_lengths=lengths)
    assert all(map(torch.equal, caches, wanted))


def test_compiled() -> None:
    torch.compiler.reset()
    case, op = draw_case(16, (1,) * 5), forget()

    def model(q: Tensor, **kwargs: Any) -> Tensor:
        found: Tensor = op(q, case.k, case.v, **kwargs)
        return found

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.q, **case.kwargs), case.call()[0])


def test_bad_arguments() -> None:
    case = draw_case(16, (1,) * 5)
    g, g_base = case.kwargs["g"], case.kwargs["g_base"]
    for others, message in (
        ({"g_base": None}, r"forgetting: g_base: expected float32 \[\d+, 6\] on .*append_decay fills it, got nothing"),
        ({"g": g.half()}, r"forgetting: g: expected float32 \[\d+, 16, 6\]"),
        ({"g": g[:, :, :2]}, r"forgetting: g: expected float32 \[\d+, 16, 6\]"),
        ({"g": g.clone().requires_grad_()}, "forgetting: g: expected a tensor without gradient in a paged call"),
    ):
        with pytest.raises(ArgumentError, match=message):
            case.call(**others)
    q = torch.randn(1, HEADS, 8, DIM, device=DEVICE)
    with pytest.raises(ArgumentError, match="g_base: expected None without page_table"):
        forget()(q, q, q, g=torch.zeros(1, 8, HEADS, device=DEVICE), g_base=g_base)
    table, lengths = case.kwargs["page_table"], case.kwargs["kv_lengths"]
    new = torch.zeros(5, 1, HEADS, device=DEVICE)
    for given, options, message in (
        ((new[:, 0], g, g_base), {}, r"g: expected floats \[B, n, Hq\]"),
        ((new, g.double(), g_base), {}, "g_cache: expected float32"),
        ((new, g, g_base[:-1]), {}, "g_base: expected float32"),
        ((new, g, g_base), {"page_table": table[:2]}, "page_table: expected 5 as its first size"),
        ((new, g, g_base), {"kv_lengths": lengths.float()}, "kv_lengths: expected an integer tensor"),
        ((new[:2], g, g_base), {}, "g: expected 5 as its first size"),
    ):
        with pytest.raises(ArgumentError, match=message):
            paging.append_decay(*given, **{"page_table": table, "kv_lengths": lengths} | options)


@pytest.mark.skipif(DEVICE != "cpu", reason="a call does not wait for lengths on a GPU")
def test_append_refuses_lengths_beyond_the_table() -> None:
    g, table = torch.zeros(1, 2, HEADS), torch.tensor([[0, 1]])
    with pytest.raises(
        ArgumentError, match="append_decay: kv_lengths: expected lengths from 0 to the table's 8 keys, got 9"
    ):
        paging.append_decay(
            g, torch.zeros(2, 4, HEADS), torch.zeros(2, HEADS), page_table=table, kv_lengths=torch.tensor([9])
        )
