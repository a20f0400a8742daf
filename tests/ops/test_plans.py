"""Plans over several GPUs: the strategy that they choose, what they say, and what they refuse."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.testing.calls import load_op
from generated._runtime.core.parallel.key_needs import needs_of
from generated._runtime.core.parallel.work import Rows, VariantWork
from generated.torch_parallel import Machine, plan
from tests.support.layouts import LONG, causal, documents


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
    two = plan(load_op("causal"), 2, **LONG)
    more = r"heads: it takes \d\.\d % more time than gather, but every gradient has the bits of one GPU"
    assert re.fullmatch(more, two.reasons[-1])
    slow_link = plan(load_op("causal"), 8, **LONG, machine=Machine(link=45e9))
    assert re.fullmatch(r"heads: it takes \d+\.\d % less time than gather", slow_link.reasons[-1])
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
        "ring: the keys of all rows take 19.3 GB, more than the 19.3 GB of `Machine(memory=...)`; heads cannot"
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
        ({"seq": 0}, "plan: seq: expected an int from 1 to 536870912, got 0"),
        ({"head_dim": 513}, "plan: head_dim: expected an int from 8 to 512, got 513"),
        ({"heads": (6, 4)}, "plan: heads: expected (query heads, key heads), the first a multiple of the second"),
        (
            {"strategy": "ulysses"},
            "plan: strategy: expected 'auto' or 'heads' or 'gather' or 'exchange' or 'ring' or '2d', got 'ulysses'",
        ),
        ({"strategy": np.zeros(2)}, "plan: strategy: expected 'auto' or 'heads' or"),
        ({"strategy": ["ring"]}, "plan: strategy: expected 'auto' or 'heads' or"),
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
