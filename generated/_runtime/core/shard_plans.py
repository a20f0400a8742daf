# SPDX-License-Identifier: Apache-2.0
"""Plans of calls over several GPUs: the layout of some masks, from their work and the cost model."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .checks import fail
from .costs import Machine, choose, exchange_cost, gather_cost, heads_cost
from .key_needs import missing_share, needs_of
from .shards import DEALS, Layout, RowWork, balanced, check_begins, check_count, check_segments, contiguous
from .work import BLOCK, Rows, VariantWork, visited_blocks, work_of

STRATEGIES = ("auto", "heads", "gather", "exchange")

MOST_NEEDED = 0.6
"""Ranks that need more than this share of the other ranks' keys gather them all, unless "exchange" is asked for."""


def make_layout(
    op: Any,
    ranks: int,
    *,
    seq: int,
    heads: tuple[int, int],
    head_dim: int,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    masks: Sequence[tuple[Any, Mapping[str, Any]]] | None = None,
    strategy: str = "auto",
    balance: str = "work",
    head_groups: int | None = None,
    machine: Machine | None = None,
    own: Mapping[str, Any] | None = None,
) -> Layout:
    """The layout of `plan`, which documents the arguments, for so many ranks."""
    ranks, seq, head_dim = check_count("ranks", ranks), check_count("seq", seq), check_count("head_dim", head_dim, 8)
    heads = _check_heads(heads)
    if strategy not in STRATEGIES:
        fail("plan", "strategy", " or ".join(map(repr, STRATEGIES)), repr(strategy))
    if balance not in DEALS:
        fail("plan", "balance", " or ".join(map(repr, DEALS)), repr(balance))
    if cu_seqlens is not None and segment_ids is not None:
        fail("plan", "segment_ids", "None beside cu_seqlens", type(segment_ids).__name__)
    if seq < ranks:
        fail("plan", "seq", f"at least a row for each of {ranks} ranks", seq)
    machine = Machine() if machine is None else machine
    begins = None if cu_seqlens is None else check_begins(cu_seqlens, seq)
    ids = None if segment_ids is None else check_segments(segment_ids, seq)
    calls = [(op, own or {})] if masks is None else list(masks)
    if not calls:
        fail("plan", "masks", "at least one (op, arguments)", masks)
    works = [work_of(each) for each, _ in calls]

    rows = Rows.of(seq, ranks, begins, in_table=any(work.may_visit is not None for work in works))
    if balance == "work":
        blocks = [visited_blocks(work, rows, given, ids) for work, (_, given) in zip(works, calls, strict=True)]
        work = np.sum(blocks, axis=0)
    else:
        work = (rows.ends - rows.begins) * (rows.ends - rows.starts) / BLOCK**2
    in_rows = RowWork.of(rows.begins, rows.ends, work)
    dealt = (balanced if balance == "work" else DEALS[balance])(in_rows, seq, ranks)

    layers = float(work.sum()) / len(calls)
    gather = gather_cost(layers, dealt.imbalance, seq, ranks, heads, head_dim, machine)
    by_heads = None if _unsplit(works) else heads_cost(layers, seq, ranks, heads, head_dim, machine)
    why_not = _unsplit(works) or f"{heads[0]} query and {heads[1]} key heads over {ranks} ranks"
    if strategy == "heads" and by_heads is None:
        fail("plan", "strategy", "'gather' or 'auto', as heads cannot be split", f"'heads' with {why_not}")
    needs, shares = [], [1.0] * len(calls)
    if strategy == "exchange" or (strategy == "auto" and balance == "work" and ranks > 1):
        for i, (work_of_op, (_, given)) in enumerate(zip(works, calls, strict=True)):
            found = needs_of(work_of_op, rows, given, ids, dealt.chunks, exact=strategy == "auto")
            share = 1.0 if found is None else missing_share(found, dealt.chunks, seq)
            if found is not None and (share <= MOST_NEEDED or strategy == "exchange"):
                needs.append(found)
                shares[i] = share
    in_part = exchange_cost(gather, shares, heads[1], machine) if needs or strategy == "exchange" else None
    if strategy == "auto":
        cost, reasons = choose(gather, in_part, by_heads, why_not)
    else:
        asked = {"gather": gather, "exchange": in_part, "heads": by_heads}[strategy]
        assert asked is not None
        cost, reasons = asked, (str(asked), f"{strategy}: asked for")
    if cost.strategy == "heads":
        # Every rank computes all rows of its heads: any order is balanced, and this one needs no copy.
        dealt = contiguous(in_rows, seq, ranks)
    groups = cost.groups if head_groups is None else _check_groups(head_groups, heads)
    return Layout(
        ranks=ranks,
        seq=seq,
        chunks=dealt.chunks,
        strategy=cost.strategy,
        head_groups=groups if cost.strategy != "heads" and not _unsplit(works) else 1,
        imbalance=0.0 if cost.strategy == "heads" else dealt.imbalance,
        bytes_moved=cost.bytes_moved,
        predicted=cost.total,
        reasons=reasons,
        loads=(layers / ranks,) * ranks if cost.strategy == "heads" else tuple((dealt.load / len(calls)).tolist()),
        cost=cost,
        heads=heads,
        head_dim=head_dim,
        needs=tuple(needs) if cost.strategy == "exchange" else (),
        cu_seqlens=begins,
        segment_ids=ids,
        segments_digest="" if ids is None else hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16],
    )


def _check_heads(heads: Any) -> tuple[int, int]:
    pair = isinstance(heads, tuple) and len(heads) == 2
    if not pair or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in heads) or heads[0] % heads[1]:
        fail("plan", "heads", "(query heads, key heads), the first a multiple of the second", repr(heads))
    return heads[0], heads[1]


def _check_groups(head_groups: Any, heads: tuple[int, int]) -> int:
    groups = check_count("head_groups", head_groups)
    if heads[1] % groups:
        fail("plan", "head_groups", f"a divisor of {heads[1]} key heads", groups)
    return groups


def _unsplit(works: Sequence[VariantWork]) -> str:
    """Why heads of some variant cannot be told apart from each other's numbers."""
    return next((f"{work.op}, which computes with the number of a head" for work in works if not work.by_heads), "")
