"""Layouts over several GPUs: how rows are dealt by the work of masks, what plans say, and what they refuse."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.inspect.block_status import Grid, proven
from codegen.inspect.call import make_call
from codegen.inspect.show import mask_of
from codegen.load.spec_file import load
from codegen.testing.calls import load_op
from generated._runtime.core.parallel.key_needs import needs_of
from generated._runtime.core.parallel.packed_rows import (
    count_calls,
    key_rows,
    keyed_calls,
    own_documents,
    packed_calls,
    pieces_of,
)
from generated._runtime.core.parallel.shards import RowWork, balanced, deal, zigzag
from generated._runtime.core.parallel.work import Rows, VariantWork, visited_blocks, work_of
from generated.torch_parallel import Layout, Machine, plan
from tests.support.paths import ROOT

LONG: dict[str, Any] = {"seq": 131072, "heads": (32, 8), "head_dim": 128}


def documents(seed: int, seq: int, count: int = 12) -> list[int]:
    """The rows at which documents of random lengths begin, and the end of the last one."""
    rng = np.random.default_rng(seed)
    return [0, *np.sort(rng.choice(np.arange(1, seq), count - 1, replace=False)).tolist(), seq]


def causal(ranks: int, **options: Any) -> Layout:
    return plan(load_op("causal"), ranks, **{**LONG, "strategy": "gather", **options})


# ------------------------------------------------------------------------------------------------------------- the deal


@given(st.integers(1, 9), st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_a_deal_gives_each_rank_equally_many_chunks(ranks: int, work: list[float]) -> None:
    chosen = deal(np.resize(work, ranks * len(work)), ranks)
    assert np.bincount(chosen, minlength=ranks).tolist() == [len(work)] * ranks


@settings(max_examples=60, deadline=None)
@given(seq=st.integers(8, 5000), ranks=st.integers(1, 8), seed=st.integers(0, 99), count=st.integers(1, 6))
def test_a_layout_has_each_row_once(seq: int, ranks: int, seed: int, count: int) -> None:
    ends = documents(seed, seq, min(count, seq - 1))
    layout = causal(ranks, seq=seq, cu_seqlens=np.array(ends))
    rows = np.sort(layout.order)
    assert np.array_equal(rows, np.arange(layout.padded))
    assert layout.local * ranks == layout.padded >= seq
    assert layout.padded - seq < max(seq / 8, 2 * ranks * 128)
    assert all(sum(length for _, length in own) == layout.local for own in layout.chunks)
    assert np.array_equal(layout.order[layout.places], np.arange(seq))
    assert sum(length for rank in range(ranks) for _, length in layout.runs(rank)) == seq


@settings(max_examples=40, deadline=None)
@given(ranks=st.sampled_from([2, 4, 8]), seed=st.integers(0, 999), count=st.integers(1, 40))
def test_documents_are_balanced_within_a_hundredth_and_never_worse_than_the_zigzag(
    ranks: int, seed: int, count: int
) -> None:
    seq = 65536
    rows = Rows.of(seq, ranks, documents(seed, seq, count), in_table=False)
    work = visited_blocks(work_of(load_op("causal")), rows, {})
    in_rows = RowWork.of(rows.begins, rows.ends, work)
    found, peers = balanced(in_rows, seq, ranks), zigzag(in_rows, seq, ranks)
    assert found.imbalance <= max(0.01, peers.imbalance)
    assert found.imbalance <= 0.02


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_documents_are_balanced_with_two_cuts_for_each_rank(seed: int, ranks: int) -> None:
    """Seed 0 stands for documents of about the same length. A few ranks have at most one run of each document."""
    generator = np.random.default_rng(seed)
    equal = (np.arange(1, 14) * 65536 // 14 + generator.integers(-40, 40, 13)).tolist()
    ends = documents(seed, 65536, 14) if seed else [0, *equal, 65536]
    layout = causal(ranks, seq=65536, cu_seqlens=ends)
    assert layout.imbalance <= 0.01
    assert count_calls(ends, layout.chunks) <= (1 if ranks <= 4 else 2)
    cuts = sum(len(pieces_of(ends, layout.runs(rank))) for rank in range(ranks)) - 14
    assert cuts <= 2 * (ranks - 1)


@settings(max_examples=40, deadline=None)
@given(
    seq=st.integers(8, 5000),
    ranks=st.integers(1, 6),
    seed=st.integers(0, 99),
    count=st.integers(1, 9),
    balance=st.sampled_from(["work", "zigzag", "contiguous"]),
)
def test_packed_calls_have_each_row_once_and_each_document_once(
    seq: int, ranks: int, seed: int, count: int, balance: str
) -> None:
    ends = np.array(documents(seed, seq, min(count, seq - 1)))
    layout = causal(ranks, seq=seq, cu_seqlens=ends, balance=balance)
    for rank in range(ranks):
        own = layout.order[rank * layout.local : (rank + 1) * layout.local]
        calls = packed_calls(layout, rank, drops=True)
        rows = np.concatenate([np.zeros(0, np.int64), *(call.rows[call.own] for call in calls)])
        assert np.sort(rows).tolist() == np.flatnonzero(own < seq).tolist()
        for call in calls:
            assert np.array_equal(call.sequence_rows[call.own], own[call.rows[call.own]])
            lengths = np.diff(call.begins)
            positions = (
                np.repeat(call.offsets, lengths) + np.arange(len(call.rows)) - np.repeat(call.begins[:-1], lengths)
            )
            assert np.array_equal(positions, layout.positions[call.sequence_rows])
            assert all(offset % 16 == 0 for offset, length in zip(call.offsets, lengths, strict=True) if length)


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
    count=st.integers(1, 9),
    balance=st.sampled_from(["work", "zigzag", "contiguous"]),
    numbered=st.booleans(),
)
def test_packed_calls_have_the_keys_of_their_documents(
    ranks: int, seed: int, count: int, balance: str, numbered: bool
) -> None:
    ends = np.array(documents(seed, 500, count))
    layout = causal(ranks, seq=500, cu_seqlens=ends, balance=balance)
    for rank in range(ranks):
        own, rows = own_documents(layout, rank), key_rows(layout, rank).rows
        found = keyed_calls(layout, rank, drops=False, numbered=numbered)
        assert not found or found[0].keys == (0, len(rows))
        for keyed in found:
            call, (first, keys) = keyed.call, keyed.keys
            assert len(call.begins) == len(keyed.begins) == len(call.offsets) + 1
            assert keyed.begins[-1] == keys <= len(rows)
            if numbered:
                assert len(call.begins) == len(ends)
            else:
                assert len(call.offsets) <= len(own)
            for i, length in enumerate(call.lengths):
                if length == 0:
                    continue
                queries = call.sequence_rows[call.begins[i] : call.begins[i + 1]]
                document = int(np.searchsorted(ends, queries[0], side="right")) - 1
                assert document == i or not numbered
                own_keys = rows[first:][keyed.begins[i] : keyed.begins[i + 1]]
                assert np.array_equal(own_keys, np.arange(ends[document], ends[document + 1]))
                assert call.offsets[i] == queries[0] - ends[document]


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_pure_causal_is_the_zigzag(ranks: int) -> None:
    layout = causal(ranks)
    half = LONG["seq"] // (2 * ranks)
    assert layout.chunks == tuple(((rank * half, half), ((2 * ranks - 1 - rank) * half, half)) for rank in range(ranks))
    assert layout.imbalance < 1e-9


@pytest.mark.parametrize(
    ("variant", "own"), [("full", {}), ("window", {"size": 1024}), ("chunked", {"size": 4096}), ("padding", None)]
)
def test_even_work_is_one_run_for_each_rank(variant: str, own: dict[str, Any] | None) -> None:
    own = {"length": np.array([LONG["seq"]], np.int32)} if own is None else own
    layout = plan(load_op(variant), 4, **{**LONG, "strategy": "gather"}, **own)
    assert [len(layout.runs(rank)) for rank in range(4)] == [1] * 4
    assert layout.imbalance <= 0.01


@pytest.mark.parametrize(("seq", "ranks"), [(32768, 4), (65536, 8), (16384, 2), (16384, 4)])
def test_a_window_is_balanced_by_a_zigzag_of_its_first_rows(seq: int, ranks: int) -> None:
    layout = plan(load_op("window"), ranks, **{**LONG, "seq": seq, "strategy": "gather"}, size=1024)
    assert layout.imbalance <= 0.01
    assert max(len(layout.runs(rank)) for rank in range(ranks)) <= 3


def test_a_layout_says_the_work_and_the_cost_of_each_rank() -> None:
    layout = causal(4, cu_seqlens=documents(1, 131072))
    assert max(layout.loads) / np.mean(layout.loads) - 1 == pytest.approx(layout.imbalance)
    slowest = int(np.argmax(layout.loads))
    assert layout.cost_of(slowest).total == layout.predicted
    assert all(layout.cost_of(rank).compute <= layout.cost_of(slowest).compute for rank in range(4))
    by_heads = causal(4, strategy="heads")
    assert len(set(by_heads.loads)) == 1
    assert sum(by_heads.loads) == pytest.approx(sum(causal(4).loads))


def test_several_masks_share_one_order() -> None:
    """Of six windows and a causal mask the causal mask has most of the work; the plan counts both."""
    window = (load_op("window"), {"size": 1024})
    layout = plan(None, 8, **LONG, strategy="gather", masks=[window] * 6 + [(load_op("causal"), {})])
    assert layout.imbalance <= 0.01
    assert layout.predicted < causal(8).predicted


def test_documents_as_begins_ids_and_a_tensor_of_the_mask_are_the_same_work() -> None:
    ends = documents(3, 16384, 7)
    ids = np.repeat(np.arange(7), np.diff(ends)).astype(np.int32)
    options: dict[str, Any] = {"seq": 16384, "heads": (8, 8), "head_dim": 64, "strategy": "gather"}
    by_begins = causal(4, **options, cu_seqlens=torch.tensor(ends))
    by_ids = causal(4, **options, segment_ids=torch.tensor(ids))
    by_mask = plan(load_op("document"), 4, **options, doc=ids[None])
    assert by_begins.positions.tolist() == [row - ends[ids[row]] for row in range(16384)]
    assert by_ids.predicted == pytest.approx(by_mask.predicted, rel=0.02)
    assert max(layout.imbalance for layout in (by_begins, by_ids, by_mask)) <= 0.01


@pytest.mark.parametrize("variant", ["causal", "window", "streaming_llm", "prefix_lm", "document", "natten", "chunked"])
def test_the_work_is_that_of_the_block_analysis(variant: str) -> None:
    """Work in blocks of 128 by 128. Closed forms round the ends of a run, so they may differ by one block."""
    entry = load(ROOT / "variants.yaml").variants[variant]
    call = make_call(entry, q_len=2048, kv_len=2048, q_offset=0, batch=0, head=0, scalars={}, files={})
    visited = (proven(mask_of(entry), Grid(call=call, block_m=128, block_n=128)) > 0).sum(1)
    rows = Rows.of(2048, 2, None, in_table=False)
    got = visited_blocks(work_of(load_op(variant)), rows, {**call.tensors, **call.scalars})
    assert np.abs(got - visited).max() <= 1


# ------------------------------------------------------------------------------------------------------------- the plan


def calls_of_a_plan(**options: Any) -> int:
    """How many functions are called while it makes the plan. Unlike a time it is the same on every machine."""
    causal(8, **options)
    count = 0

    def watch(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        causal(8, **options)
    finally:
        sys.setprofile(before)
    return count


def test_a_plan_takes_about_as_many_steps_however_long_the_sequence_is() -> None:
    """At this many steps a plan takes about a millisecond: 0.4 ms and 1 ms, or three times as much on a slow core."""
    assert calls_of_a_plan() < 1300
    ends = documents(0, LONG["seq"])
    once = calls_of_a_plan(cu_seqlens=np.array(ends))
    assert once < 5500
    longer = [8 * end for end in ends]
    assert calls_of_a_plan(seq=longer[-1], cu_seqlens=np.array(longer)) < 1.5 * once


def test_equal_plans_are_equal_and_hash_alike() -> None:
    assert causal(4) == causal(4)
    assert hash(causal(4)) == hash(causal(4))
    assert causal(4) != causal(8)
    ids = np.arange(LONG["seq"]) // 5000
    assert causal(4, segment_ids=ids) != causal(4, segment_ids=ids + (ids > 3))


def test_the_strategy_follows_the_cost_and_says_why() -> None:
    many = plan(load_op("window"), 8, **LONG, size=1024)
    assert many.strategy == "exchange"
    assert many.reasons[-1].startswith("exchange: it is ")
    assert many.bytes_moved == 1024 * 8 * 128 * 2 * (
        2 * 2 + 4
    )  # each rank has one run of rows, and needs the keys of the rows before it
    fast_link = plan(load_op("causal"), 2, **LONG, machine=Machine(link=1e15, latency=0.0))
    assert fast_link.strategy == "heads"
    odd = plan(load_op("causal"), 8, seq=32768, heads=(12, 12), head_dim=128)
    assert (odd.strategy, odd.reasons[-1]) == (
        "gather",
        "gather, as heads cannot be split: 12 query and 12 key heads over 8 ranks",
    )
    assert odd.head_groups in (1, 2, 3, 4)
    assert "strategy gather" in odd.report()


def test_a_ring_is_chosen_where_the_keys_of_all_rows_do_not_fit() -> None:
    long: dict[str, Any] = {"seq": 2**20, "heads": (12, 12), "head_dim": 128}
    bytes_of_keys = 2 * 12 * 128 * 2**20 * (2 + 4)
    for memory, strategy in ((bytes_of_keys, "gather"), (bytes_of_keys - 1, "ring")):
        layout = plan(load_op("causal"), 8, **long, machine=Machine(memory=memory))
        assert layout.strategy == strategy
    assert layout.reasons[-1].startswith(
        "ring: the keys of all rows take 19.3 GB, of 19.3 GB that they may; heads cannot"
    )
    assert layout.head_groups == 1
    by_heads = plan(load_op("causal"), 4, **long, machine=Machine(memory=1e9))
    assert by_heads.strategy == "heads"
    images: dict[str, Any] = {"image": np.zeros((1, 2**12), np.int32), "before": 64, "after": 64}
    none = plan(load_op("band_images"), 8, **{**long, "seq": 2**12}, machine=Machine(memory=1.0), **images)
    assert (none.strategy, "there is no ring for band_images" in none.reasons[-1]) == ("gather", True)
    with pytest.raises(
        ValueError, match="plan: strategy: expected 'gather', 'exchange' or 'auto', got 'ring' with band_"
    ):
        plan(load_op("band_images"), 8, **{**long, "seq": 2**12}, strategy="ring", **images)


@settings(max_examples=60, deadline=None)
@given(
    seq=st.integers(32, 5000),
    nodes=st.integers(1, 4),
    inner=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 99),
    count=st.integers(1, 6),
)
def test_ranks_of_a_node_share_its_rows(seq: int, nodes: int, inner: int, seed: int, count: int) -> None:
    """Each row is on one node, and a node has the rows that a plan with one rank per node gives to that rank."""
    ends = np.array(documents(seed, seq, count))
    options: dict[str, Any] = {"seq": seq, "heads": (16, 8), "head_dim": 64, "cu_seqlens": ends}
    layout = plan(load_op("causal"), (nodes, inner), **options)
    assert (layout.strategy, layout.ranks, layout.inner) == ("2d", nodes * inner, inner)
    assert np.array_equal(np.sort(layout.order), np.arange(layout.padded))
    assert layout.nodes is not None
    assert layout.padded == layout.nodes.padded
    assert np.array_equal(layout.order, layout.nodes.order)
    flat = plan(load_op("causal"), nodes, **options, strategy="gather")
    assert [layout.nodes.runs(node) for node in range(nodes)] == [flat.runs(node) for node in range(nodes)]
    assert sum(layout.loads) == pytest.approx(sum(flat.loads))


def test_many_ranks_are_told_what_nodes_would_gain() -> None:
    """64 GPUs in nodes of 8: sending the keys of all rows over the links between nodes takes most of the time."""
    flat = causal(64, strategy="auto")
    assert flat.reasons[-1].startswith("2d: ")
    assert "give a mesh of two dims, 8 nodes and 8 ranks of a node" in flat.reasons[-1]
    both = plan(load_op("causal"), (8, 8), **LONG)
    assert both.predicted < flat.predicted
    assert both.reasons[-1] == "2d: heads inside nodes of 8 ranks, gather over 8 nodes"
    assert both.reasons[0].startswith("8 nodes as ranks: gather: ")
    windows = plan(load_op("window"), (8, 8), **LONG, size=1024)
    assert windows.reasons[-1] == "2d: heads inside nodes of 8 ranks, exchange over 8 nodes"
    assert not any("2d" in reason for reason in causal(8, strategy="auto").reasons)


def test_each_mask_has_its_own_needs() -> None:
    masks = [(load_op("window"), {"size": 1024}), (load_op("causal"), {})]
    layout = plan(load_op("window"), 4, **LONG, masks=masks, strategy="exchange")
    of_window, of_causal = ([sum(n for _, n in runs) for runs in needs.runs] for needs in layout.needs)
    assert max(of_window) < LONG["seq"] // 4 + 1024 * len(layout.chunks[0]) + 1
    assert max(of_causal) == LONG["seq"]
    assert plan(load_op("causal"), 2, **LONG).needs == ()


def test_a_mask_of_batch_rows_has_no_needs_of_one() -> None:
    """The mask reads no tensor with an element per batch row, but computes with the number of the batch row."""
    rows = Rows.of(64, 2, None, in_table=False)
    for by_batch in (False, True):
        work = VariantWork(op="one", tensors={}, ranges=lambda at: [(0, at.q_last + 1)], by_batch=by_batch)
        found = needs_of(work, rows, {}, None, [[(0, 32)], [(32, 32)]], exact=True)
        assert (found is None) is by_batch


def test_a_mask_that_reads_tensors_exchanges_only_if_asked_to() -> None:
    doc = np.repeat(np.arange(4), 1024)[None]
    options: dict[str, Any] = {"seq": 4096, "heads": (12, 12), "head_dim": 128, "doc": doc}
    assert plan(load_op("document"), 8, **options).strategy == "gather"
    asked = plan(load_op("document"), 4, **options, strategy="exchange")
    assert [sum(n for _, n in runs) for runs in asked.needs[0].runs] == [1024] * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seq": 0}, "plan: seq: expected an int from 1 to 1073741824, got 0"),
        ({"head_dim": 513}, "plan: head_dim: expected an int from 8 to 512, got 513"),
        ({"heads": (6, 4)}, "plan: heads: expected (query heads, key heads), the first a multiple of the second"),
        (
            {"strategy": "ulysses"},
            "plan: strategy: expected 'auto' or 'heads' or 'gather' or 'exchange' or 'ring' or '2d', got 'ulysses'",
        ),
        ({"balance": "even"}, "plan: balance: expected 'work' or 'zigzag' or 'contiguous', got 'even'"),
        ({"cu_seqlens": [0, 9, 7, 131072]}, "plan: cu_seqlens: expected integers [n + 1] from 0 to seq = 131072"),
        ({"cu_seqlens": [0, 131072], "segment_ids": [0]}, "plan: segment_ids: expected None beside cu_seqlens"),
        ({"segment_ids": np.zeros(9, np.int32)}, "plan: segment_ids: expected integers [131072] or [B, 131072]"),
        ({"head_groups": 3}, "plan: head_groups: expected a divisor of 8 key heads, got 3"),
        (
            {"strategy": "2d"},
            "plan: mesh: expected a mesh of two dims, or (nodes, ranks of a node), beside strategy='2d'",
        ),
        ({"masks": []}, "plan: masks: expected at least one pair (op, its arguments), in a sequence"),
    ],
)
def test_bad_plans_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="plan: ") as raised:
        causal(2, **options)
    assert str(raised.value).startswith(text)


def test_a_mesh_of_nodes_splits_heads() -> None:
    with pytest.raises(ValueError, match="plan: strategy: expected '2d' or 'auto' for nodes and their ranks"):
        plan(load_op("causal"), (2, 4), **LONG, strategy="gather")
    text = "plan: strategy: expected a mesh of one dim, as heads cannot be split inside nodes, got nodes of 8, 12 query"
    with pytest.raises(ValueError, match=text):
        plan(load_op("causal"), (2, 8), **{**LONG, "heads": (12, 12)})


def test_what_the_mask_reads_must_be_there_or_not_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"plan: window: size: expected what the mask reads"):
        plan(load_op("window"), 2, **LONG)
    layout = plan(load_op("window"), 2, **LONG, strategy="gather", balance="zigzag")
    assert len(layout.chunks[0]) == 2
    with pytest.raises(ValueError, match="plan: mesh: expected a DeviceMesh"):
        plan(load_op("causal"), "cp", **LONG)
    with pytest.raises(ValueError, match="plan: op: expected an op of this package"):
        plan(len, 2, **LONG)
    with pytest.raises(ValueError, match=r"Layout\.shard: layout: expected a DeviceMesh"):
        causal(2).shard(torch.zeros(LONG["seq"]))
    assert causal(2).shard(torch.arange(LONG["seq"]), rank=1)[0] == 32768
