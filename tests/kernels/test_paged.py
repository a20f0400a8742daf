"""Calls on paged caches against float64 of each sequence alone, with NaN in all places that no query may read."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from generated import paging
from generated._runtime.torch import paged as torch_paged
from tests.support.cases import DEVICE, INTERPRET, MANIFEST

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
LEGAL = [
    name
    for name, entry in MANIFEST.items()
    # `draw_tensor` draws no tensor with an element per pair of query and key, such as a bias.
    if not (entry["dropout"] or entry["decay"] or any("q_idx" in x["dims"] for x in entry["tensors"].values()))
]
LENGTHS = (70, 0, 1, 133, 64)
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
TOLERANCE = 1e-5 if INTERPRET else 2e-2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Heads, head dims and dtype of a call."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    dim_v: int = 16
    dtype: torch.dtype = DTYPE


SIZES = Sizes()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call on pages: its arguments, and for each sequence the queries and keys alone."""

    variant: str
    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]
    own: dict[str, Any]
    alone: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]

    def call(self, **others: Any) -> tuple[Tensor, Tensor]:
        op: Any = golden.load_op(self.variant)
        found: tuple[Tensor, Tensor] = op(self.q, self.k, self.v, return_lse=True, **self.own, **self.kwargs | others)
        return found

    def expected(self) -> tuple[Tensor, Tensor]:
        """o and lse of all queries, the sequences concatenated, by the reference in float64."""
        reference = importlib.import_module(f"generated.{self.variant}.torch_reference").reference
        o_parts, lse_parts = [], []
        for number, (q, k, v, own) in enumerate(self.alone):
            wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in own.items()}
            found = reference(
                q.double()[None],
                k.double()[None],
                v.double()[None],
                layout="bshd",
                return_lse=True,
                q_offset=len(k) - len(q),
                first_batch=number,
                **wide,
            )
            o_parts.append(found[0][0])
            lse_parts.append(found[1][0])
        return torch.cat(o_parts), torch.cat(lse_parts, 1)

    def got(self, **others: Any) -> tuple[Tensor, Tensor]:
        """The same results of the op on pages."""
        o, lse = self.call(**others)
        if "cu_seqlens_q" in self.kwargs:
            return o, lse
        return o.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)


def draw_case(
    variant: str, page_size: int, queries: Sequence[int], lengths: Sequence[int] = LENGTHS, sizes: Sizes = SIZES
) -> Case:
    """Sequences with `queries` queries each, packed if the numbers differ; pages in a random order."""
    entry, count = MANIFEST[variant], len(lengths)
    packed = len(set(queries)) > 1
    most = max(-(-n // page_size) for n in lengths) + 1
    # More pages than the sequences have; the first page belongs to no sequence.
    pages = torch.randperm(count * most)[:, None].view(count, most) + 1
    shape = (count * most + 2, page_size)
    used = torch.zeros(shape, dtype=torch.bool)
    table = torch.full((count, most), -1, dtype=torch.int32)
    for b, n in enumerate(lengths):
        for place in range(n):
            used[pages[b, place // page_size], place % page_size] = True
        filled = -(-n // page_size)
        table[b, :filled] = pages[b, :filled].int()
        table[b, filled:] = 10**6

    def in_pages(rows: Sequence[Tensor], nothing: float) -> Tensor:
        found = torch.full((*shape, *rows[0].shape[1:]), nothing, dtype=rows[0].dtype)
        for b, row in enumerate(rows):
            for place in range(len(row)):
                found[pages[b, place // page_size], place % page_size] = row[place]
        return found

    qs = [torch.randn(n, sizes.heads, sizes.dim).to(sizes.dtype) for n in queries]
    ks = [torch.randn(n, sizes.kv_heads, sizes.dim).to(sizes.dtype) for n in lengths]
    vs = [torch.randn(n, sizes.kv_heads, sizes.dim_v).to(sizes.dtype) for n in lengths]
    own: dict[str, Any] = {}
    each: list[dict[str, Any]] = [{} for _ in lengths]
    for name, spec in entry["tensors"].items():
        own[name], parts = draw_tensor(spec, lengths, in_pages, sizes)
        for b, part in enumerate(parts):
            each[b][name] = part
    for name, kind in entry["scalars"].items():
        own[name] = entry["scalar_examples"][name] or (17 if kind == "int" else 1.5)
    if entry["sink"]:
        own["sink"] = torch.randn(sizes.heads)
    shared = {name: x for name, x in own.items() if name not in entry["tensors"]}
    kwargs: dict[str, Any] = {"page_table": table, "kv_lengths": torch.tensor(lengths, dtype=torch.int32)}
    q = torch.cat(qs) if packed else torch.stack(qs).transpose(1, 2)
    if packed:
        begins = torch.tensor([0, *queries]).cumsum(0).int()
        kwargs |= {"cu_seqlens_q": begins, "max_seqlen_q": max(queries)}

    def put(x: Any) -> Any:
        return x.to(DEVICE) if torch.is_tensor(x) else x

    return Case(
        variant=variant,
        q=put(q),
        k=put(in_pages(ks, float("nan"))),
        v=put(in_pages(vs, float("nan"))),
        kwargs={name: put(x) for name, x in kwargs.items()},
        own={name: put(x) for name, x in own.items()},
        alone=[
            (put(qs[b]), put(ks[b]), put(vs[b]), {n: put(x) for n, x in (each[b] | shared).items()})
            for b in range(count)
        ],
    )


def draw_tensor(
    spec: dict[str, Any], lengths: Sequence[int], in_pages: Any, sizes: Sizes = SIZES
) -> tuple[Tensor, list[Tensor]]:
    """One of a variant's own tensors: in the form for a call on pages, and as each sequence's reference takes it."""
    dims = spec["dims"]

    def values(*shape: int) -> Tensor:
        if spec["dtype"].startswith("int"):
            return torch.randint(0, 3, shape, dtype=getattr(torch, spec["dtype"]))
        return torch.rand(shape) > 0.3 if spec["dtype"] == "bool" else torch.rand(shape) * 0.1

    counts = {"h": sizes.heads, "hkv": sizes.kv_heads, "b": len(lengths)}
    if dims == ["b", "kv_idx"]:
        rows = [values(n) for n in lengths]
        # The reference reads some element even for a sequence without keys.
        return in_pages(rows, 0), [row[None] if len(row) else values(1, 1) for row in rows]
    assert "kv_idx" not in dims, "draw the pages of such a tensor here"
    assert "q_idx" not in dims, "draw the rows of such a tensor here"
    whole = values(*(dim if isinstance(dim, int) else counts.get(dim, 300) for dim in dims))
    # The reference indexes batch rows by the number of the sequence.
    return whole, [whole] * len(lengths)


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[0].double(), want[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(got[1].double(), want[1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("page_size", "queries"), [(16, (2,) * 5), (64, (5, 0, 1, 40, 2)), (7, (1,) * 5)])
@pytest.mark.parametrize("variant", LEGAL)
def test_against_each_sequence_alone(variant: str, page_size: int, queries: Sequence[int]) -> None:
    case = draw_case(variant, page_size, queries)
    check(case.got(), case.expected())


@pytest.mark.parametrize("splits", [1, 32, "balanced"])
def test_rules_for_splits(splits: int | str) -> None:
    case = draw_case("alibi", 16, (1,) * 5)
    check(case.got(splits=splits), case.expected())


def test_a_sequence_has_the_same_bits_anywhere() -> None:
    """The bits are the same alone, in a batch, on pages of any size, and with a flat table."""
    case = draw_case("causal", 16, (2,) * 5)
    want = case.call()[0][3]
    op: Any = golden.load_op("causal")
    q, k, v, _ = case.alone[3]
    for page_size in (64, 16, 1):
        pool = paging.Pool(4096 // page_size, page_size)
        pool.extend("other", 5)
        shape = (4096 // page_size, page_size, SIZES.kv_heads)
        k_cache = torch.full((*shape, SIZES.dim), float("nan"), dtype=DTYPE, device=DEVICE)
        v_cache = torch.full((*shape, SIZES.dim_v), float("nan"), dtype=DTYPE, device=DEVICE)
        paging.append(k, v, k_cache, v_cache, torch.tensor(pool.extend("own", len(k)), device=DEVICE))
        table = torch.tensor(pool.page_table(["own"]), device=DEVICE)
        lengths = torch.tensor(pool.lengths(["own"]), device=DEVICE)
        queries = q.transpose(0, 1)[None]
        alone = op(queries, k_cache, v_cache, page_table=table, kv_lengths=lengths)
        assert torch.equal(alone[0], want)
        starts = torch.tensor([0, table.shape[1]], device=DEVICE)
        flat = op(queries, k_cache, v_cache, page_table=table[0], page_starts=starts, kv_lengths=lengths)
        assert torch.equal(flat, alone)


def test_bits_do_not_depend_on_who_folds_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch alone occupies the chip, which is small here, a program computes eight splits. In Triton's
    interpreter, which is slow, a program computes both of two splits."""
    processors, own, others, want = (
        (2, 200, 4, [[72, 128], [200]]) if INTERPRET else (16, 1100, 16, [[76, *[128] * 8], [76, 1024]])
    )
    monkeypatch.setattr(torch_paged, "multiprocessors", lambda _: processors)
    case = draw_case("alibi", 64, (1,) * (1 + others), (own, *[1100 if INTERPRET else 2048] * others))
    op: Any = golden.load_op("alibi")
    found, splits = [], []
    for rows in (1, 1 + others):
        call = {name: case.kwargs[name][:rows] for name in ("page_table", "kv_lengths")}
        o, lse = op(case.q[:rows], case.k, case.v, return_lse=True, **case.own, **call)
        records, _, counts = op.plan(case.q[:rows], case.k, **call).tables[:3]
        parts = records[: int(counts[0])]
        splits.append((parts[parts[:, 0] == 0][:, 5] - parts[parts[:, 0] == 0][:, 4]).sort().values.tolist())
        found.append((o[0], lse[0]))
    assert splits == want
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    check(case.got(), case.expected())


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("variant", ["window", "chunked"])
def test_pages_behind_a_window_or_a_chunk_are_never_read(
    variant: str, reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reference:
        monkeypatch.setattr(torch_paged, "runs_reference", lambda _q: True)
    case = draw_case(variant, 16, (1,) * 5)
    want = case.call()
    table, k, v = case.kwargs["page_table"].clone(), case.k.clone(), case.v.clone()
    size = case.own["size"]
    for b, n in enumerate(LENGTHS):
        first_seen = max(n - size if variant == "window" else (n - 1) // size * size, 0)
        for page in range(first_seen // 16):
            k[table[b, page]] = v[table[b, page]] = float("nan")
            table[b, page] = -1
    op: Any = golden.load_op(variant)
    got = op(case.q, k, v, return_lse=True, size=size, **case.kwargs | {"page_table": table})
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_plan_serves_every_layer() -> None:
    case = draw_case("window", 16, (1,) * 5)
    op: Any = golden.load_op("window")
    plan = op.plan(case.q, case.k, size=case.own["size"], **case.kwargs)
    assert torch.equal(case.call(schedule=plan)[0], case.call()[0])
    other = draw_case("window", 16, (2,) * 5)
    with pytest.raises(ValueError, match="schedule: expected one made for queries"):
        other.call(schedule=plan)


def test_plans_and_schedules_are_told_apart() -> None:
    case = draw_case("causal", 16, (1,) * 5)
    op: Any = golden.load_op("causal")
    x = torch.zeros(4, 2, 16, device=DEVICE, dtype=DTYPE)
    packed = {"cu_seqlens_q": torch.tensor([0, 4], device=DEVICE)}
    with pytest.raises(ValueError, match=r"schedule: expected one made by causal\.schedule, got .* causal\.plan"):
        op(x, x, x, **packed, schedule=op.plan(case.q, case.k, **case.kwargs))
    with pytest.raises(ValueError, match=r"schedule: expected one made by causal\.plan, got .* causal\.schedule"):
        case.call(schedule=op.schedule(x, x, x, **packed))


def test_two_calls_merge_to_one() -> None:
    case = draw_case("full", 16, (1,) * 5)
    parts = []
    half = case.kwargs["kv_lengths"] // 2 // 16 * 16
    table = case.kwargs["page_table"]
    parts.append(case.call(kv_lengths=half))
    rest = torch.full_like(table, -1)
    for b, begin in enumerate((half // 16).tolist()):
        rest[b, : table.shape[1] - begin] = table[b, begin:]
    parts.append(case.call(page_table=rest, kv_lengths=case.kwargs["kv_lengths"] - half))
    o, lse = paging.merge(parts)
    want_o, want_lse = case.call()
    torch.testing.assert_close(o, want_o, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(lse, want_lse, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths() -> None:
    case = draw_case("causal", 16, (1,) * 5)
    lengths, table = case.kwargs["kv_lengths"].clone(), case.kwargs["page_table"].clone()
    op: Any = golden.load_op("causal")

    def step() -> Tensor:
        found: Tensor = op(case.q, case.k, case.v, page_table=table, kv_lengths=lengths)
        return found

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for change in (torch.tensor([64, 0, 1, 70, 3]), torch.tensor([70, 0, 1, 133, 64])):
        lengths.copy_(change)
        graph.replay()
        assert torch.equal(o, step())
