"""Layouts over several GPUs: how rows are dealt, and the blocks that the ranks of a mask visit."""

from __future__ import annotations

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
from generated._runtime.core.parallel.packed_rows import (
    count_calls,
    key_rows,
    keyed_calls,
    own_documents,
    packed_calls,
    pieces_of,
)
from generated._runtime.core.parallel.shards import RowWork, balanced, deal, zigzag
from generated._runtime.core.parallel.work import Rows, visited_blocks, work_of
from generated.torch_parallel import plan
from tests.support.layouts import LONG, causal, documents
from tests.support.paths import ROOT

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
