"""The tables by which ranks exchange keys and the gradients of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.testing.calls import load_op
from generated._runtime.core.parallel.key_routes import key_tables, routes
from generated._runtime.core.parallel.packed_rows import key_rows
from generated.torch_parallel import Layout, plan


def layout_of(seq: int, ranks: int, size: int, seed: int | None) -> Layout:
    """A layout of windows, in documents if there is a seed."""
    options: dict[str, Any] = {"seq": seq, "heads": (2, 2), "head_dim": 16, "strategy": "exchange", "size": size}
    if seed is not None:
        options["cu_seqlens"] = [0, *sorted(np.random.default_rng(seed).integers(0, seq + 1, 3).tolist()), seq]
    return plan(load_op("window"), ranks, **options)


def taken(table: np.ndarray, own: np.ndarray, came: np.ndarray) -> np.ndarray:
    """The sum of the terms of each row of a table."""
    total: np.ndarray = np.append(own, 0)[table[:, 0]]
    for numbers in table.T[1:]:
        total = total + np.append(came, 0)[numbers]
    return total


def exchanged(parts: list[np.ndarray], sent: list[tuple[int, ...]]) -> list[np.ndarray]:
    """What each rank receives of these parts, one rank after the other; `sent` has the sizes that each rank sends."""
    cut = [np.split(part, np.cumsum(sizes)[:-1]) for part, sizes in zip(parts, sent, strict=True)]
    return [np.concatenate([pieces[rank] for pieces in cut]) for rank in range(len(parts))]


@settings(max_examples=40, deadline=None)
@given(
    seq=st.integers(16, 2000),
    ranks=st.integers(1, 6),
    size=st.integers(1, 700),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_keys_arrive_and_their_gradients_are_added_up(seq: int, ranks: int, size: int, seed: int | None) -> None:
    layout = layout_of(seq, ranks, size, seed)
    tables = [key_tables(layout, layout.needs[0], rank) for rank in range(ranks)]
    values = np.random.default_rng(0).integers(1, 1000, layout.padded)  # of the rows of all ranks
    own = np.split(values, ranks)
    came = exchanged([x[t.send[:, 0]] for x, t in zip(own, tables, strict=True)], [t.sent for t in tables])
    of_sequence = values[layout.places]
    gradients = []
    for rank, table in enumerate(tables):
        assert len(came[rank]) == sum(table.received) <= table.most_received
        rows = np.arange(seq) if seed is None else key_rows(layout, rank).rows
        keys = taken(table.keys, own[rank], came[rank])
        is_here = (table.keys >= 0).any(1)
        assert np.array_equal(keys, np.where(is_here, of_sequence[rows], 0))
        if table.own_run is not None:
            first, count = table.own_run
            assert np.array_equal(keys, own[rank][first : first + count])
        gradients.append(np.where(is_here, keys + rank, 0))  # a gradient of its own for each key and rank

    returned = exchanged(
        [x[t.send_back[:, 0]] for x, t in zip(gradients, tables, strict=True)], [t.received for t in tables]
    )
    total = np.concatenate([taken(t.sums, *x) for t, *x in zip(tables, gradients, returned, strict=True)])
    wanted = np.zeros(layout.padded, np.int64)
    for rank, gradient in enumerate(gradients):
        rows = np.arange(seq) if seed is None else key_rows(layout, rank).rows
        wanted[layout.places[rows]] += gradient
    assert np.array_equal(total, wanted)


@settings(max_examples=30, deadline=None)
@given(seq=st.integers(16, 3000), ranks=st.integers(1, 6), size=st.integers(1, 700), seed=st.integers(0, 99))
def test_what_ranks_send_is_what_they_need(seq: int, ranks: int, size: int, seed: int) -> None:
    layout = layout_of(seq, ranks, size, seed)
    ends = np.array(layout.cu_seqlens)
    of_ranks = routes(layout, layout.needs[0])
    for rank, mine in enumerate(of_ranks):
        got = set(np.concatenate(mine.receive).tolist())
        rows = [row for begin, length in layout.runs(rank) for row in range(begin, begin + length)]
        starts = ends[np.searchsorted(ends, rows, side="right") - 1]
        wanted = {
            key for row, start in zip(rows, starts, strict=True) for key in range(max(start, row - size + 1), row + 1)
        }
        assert wanted <= got
        for other, theirs in enumerate(of_ranks):
            owned = layout.order[rank * layout.local : (rank + 1) * layout.local]
            assert np.array_equal(owned[mine.send[other]], theirs.receive[rank])
