"""A ring that computes packed documents in separate calls: each row meets each of its keys in one of these calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.testing.calls import load_op
from generated._runtime.core.parallel.ring_documents import document_calls
from generated._runtime.core.parallel.ring_steps import ring_steps
from generated._runtime.core.parallel.shards import Layout
from generated._runtime.core.parallel.work import work_of
from generated.torch_parallel import plan

ENDS = (0, 1, 700, 700, 790, 1900, 1930, 2000)


def layout_of(variant: str, ranks: int, balance: str) -> Layout:
    options: dict[str, Any] = {"seq": ENDS[-1], "heads": (4, 2), "head_dim": 16, "balance": balance}
    return plan(load_op(variant), ranks, cu_seqlens=ENDS, strategy="ring", **options)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("variant", "ranks", "balance"), [("causal", 4, "zigzag"), ("full", 3, "contiguous")])
def test_each_row_meets_each_of_its_keys_once(variant: str, ranks: int, balance: str, drops: bool) -> None:
    layout, work = layout_of(variant, ranks, balance), work_of(load_op(variant))
    steps = ring_steps(layout, work, None)
    met = np.zeros((layout.seq, layout.seq), np.int8)
    for step in range(steps.count):
        for calls in document_calls(layout, steps, step, drops=drops, at_once=not drops, has_sink=True):
            for rank in range(ranks):
                owner = (rank - step) % ranks
                of_ranks = [layout.order[n * layout.local : (n + 1) * layout.local] for n in (rank, owner)]
                for n, document in enumerate(calls.documents[rank]):
                    runs = [
                        (int(table.at[rank, n]), int(table.position[rank, n]), int(table.length[rank, n]))
                        for table in (calls.rows, calls.keys)
                    ]
                    rows, keys = (own[at : at + length] for own, (at, _, length) in zip(of_ranks, runs, strict=True))
                    for found, (_, position, length) in zip((rows, keys), runs, strict=True):
                        assert np.array_equal(found, ENDS[document] + position + np.arange(length))
                    met[np.ix_(rows, keys)] += 1
                    if len(rows):
                        assert calls.is_own == np.array_equal(rows, keys)
    documents = np.searchsorted(ENDS, np.arange(layout.seq), side="right")
    wanted = documents[:, None] == documents
    assert met.max() == 1
    assert not met[~wanted].any()
    assert met[np.tril(wanted) if variant == "causal" else wanted].all()


@pytest.mark.parametrize("drops", [False, True])
def test_calls_of_like_sizes_are_together(drops: bool) -> None:
    layout = layout_of("causal", 4, "zigzag")
    steps = ring_steps(layout, work_of(load_op("causal")), None)
    for calls in document_calls(layout, steps, 0, drops=drops, at_once=True, has_sink=False):
        for table, unit in ((calls.rows, 16), (calls.keys, 32)):
            there = table.length > 0
            longest, shortest = table.length.max(), table.length[there].min()
            assert longest < max(2 * shortest, 256)
            assert longest <= table.count < longest + unit
            assert ((table.position - table.ahead)[there] % unit == 0).all() or not drops
        first = calls.keys.position - calls.keys.ahead
        ends = (calls.rows.position - calls.rows.ahead + calls.rows.count, first + calls.keys.count)
        assert (np.maximum(*ends) - first <= calls.reach).all()
        for rank in range(layout.ranks):
            rows = [np.arange(at, at + n) for at, n in zip(calls.rows.at[rank], calls.rows.length[rank], strict=True)]
            assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))
