# SPDX-License-Identifier: Apache-2.0
"""Plans of calls over several GPUs: the layout for some masks, chosen by their work and the cost model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...archs import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..checks import OFFSET_LIMIT, fail
from .costs import (
    Choices,
    Cost,
    Machine,
    exchange_cost,
    gather_cost,
    gathered_bytes,
    grid_cost,
    heads_cost,
    ring_cost,
)
from .document_deals import deal_documents
from .key_needs import missing_share, needs_of, planned_needs
from .node_layouts import cut_for_nodes
from .packed_rows import count_calls
from .plan_arguments import (
    check_begins,
    check_count,
    check_groups,
    check_heads,
    check_masks,
    check_own,
    check_ranks,
    check_segments,
)
from .ring_steps import ring_steps, why_no_ring
from .shards import (
    DEALS,
    Dealt,
    KeyNeeds,
    Layout,
    RowWork,
    balanced,
    contiguous,
)
from .work import BLOCK, Array, Rows, VariantWork, visited_blocks, work_of

STRATEGIES = ("auto", "heads", "gather", "exchange", "ring", "2d")

MOST_NEEDED = 0.6
"""Ranks that need more than this share of the other ranks' keys gather them all, unless "exchange" is asked for."""


def make_layout(
    op: Any,
    ranks: int | tuple[int, int],
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
    """The layout of `plan`, which documents the arguments, for so many ranks, or for nodes and the ranks of a node."""
    seq = check_count("seq", seq, most=OFFSET_LIMIT)
    head_dim = check_count("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM)
    heads = check_heads(heads)
    machine = Machine() if machine is None else machine
    if not isinstance(machine, Machine):
        fail("plan", "machine", "a Machine or None", type(machine).__name__)
    grid = check_ranks(ranks, strategy, machine)
    row_ranks, inner = grid
    if strategy not in STRATEGIES:
        fail("plan", "strategy", " or ".join(map(repr, STRATEGIES)), repr(strategy))
    if not isinstance(balance, str) or balance not in DEALS:
        fail("plan", "balance", " or ".join(map(repr, DEALS)), repr(balance))
    if cu_seqlens is not None and segment_ids is not None:
        fail("plan", "segment_ids", "None beside cu_seqlens", type(segment_ids).__name__)
    if seq < row_ranks * inner:
        fail("plan", "seq", f"at least a row for each of {row_ranks * inner} ranks", seq)
    begins = None if cu_seqlens is None else check_begins(cu_seqlens, seq)
    ids = None if segment_ids is None else check_segments(segment_ids, seq)
    calls = [(op, own or {})] if masks is None else check_masks(masks)
    works = [work_of(each) for each, _ in calls]
    for (each, given), work in zip(calls, works, strict=True):
        check_own(each, work, given, seq)
    groups = None if head_groups is None else check_groups(head_groups, heads, inner)
    if unsplit := _unsplit(works):
        groups = _one_group(groups, unsplit)
    if row_ranks * inner > 1:
        strategy = _of_query_counts(works, strategy, has_nodes=isinstance(ranks, tuple))

    rows = Rows.of(seq, row_ranks, begins, in_table=any(work.may_visit is not None for work in works))
    if balance == "work":
        blocks = [visited_blocks(work, rows, given, ids) for work, (_, given) in zip(works, calls, strict=True)]
        work = np.sum(blocks, axis=0)
    else:
        work = (rows.ends - rows.begins) * (rows.ends - rows.starts) / BLOCK**2
    in_rows = RowWork.of(rows.begins, rows.ends, work)
    if balance == "work" and begins is not None and strategy != "ring":
        # In a ring all ranks have runs of the same lengths.
        by_documents = deal_documents(in_rows, seq, row_ranks, np.asarray(begins, np.int64))
        dealt = balanced(in_rows, seq, row_ranks, by_documents)
    else:
        dealt = DEALS[balance](in_rows, seq, row_ranks)
    planned = _Planned(
        works=works,
        given=[given for _, given in calls],
        rows=rows,
        begins=begins,
        ids=ids,
        dealt=dealt,
        layers=float(work.sum()) / len(calls),
        seq=seq,
        ranks=row_ranks,
        heads=heads,
        head_dim=head_dim,
        machine=machine,
        groups=groups,
    )
    has_nodes = inner > 1 or isinstance(ranks, tuple)
    asked = "auto" if has_nodes or strategy == "2d" else strategy
    cost, reasons, needs = planned.chosen(asked, balance, by_rows=has_nodes)
    if cost.strategy == "ring" and dealt.lengths.ndim > 1:
        dealt = balanced(in_rows, seq, row_ranks)
        planned = replace(planned, dealt=dealt)
        cost, reasons, needs = planned.chosen(asked, balance, by_rows=has_nodes)
    if cost.strategy == "heads":
        # Every rank computes all rows of its heads: any order is balanced, and this one needs no copy.
        dealt = contiguous(in_rows, seq, row_ranks)
    if cost.strategy == "ring":
        groups = _one_group(groups, "a ring")
    even = cost.strategy == "heads"
    layout = Layout(
        ranks=row_ranks,
        seq=seq,
        chunks=dealt.chunks,
        strategy=cost.strategy,
        head_groups=groups or cost.groups,
        imbalance=0.0 if even else dealt.imbalance,
        bytes_moved=cost.bytes_moved,
        predicted=cost.total,
        reasons=reasons,
        loads=(planned.layers / row_ranks,) * row_ranks if even else tuple((dealt.load / len(calls)).tolist()),
        cost=cost,
        heads=heads,
        head_dim=head_dim,
        needs=tuple(needs) if cost.strategy in ("exchange", "ring") else (),
        cu_seqlens=begins,
        segment_ids=ids,
        segments_digest="" if ids is None else hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16],
    )
    if row_ranks > 1 and layout.local >= seq:
        # Nothing would tell the rows of one rank from the whole rows.
        fail("plan", "seq", f"more than {layout.local} rows, which each rank gets with padding", seq)
    if not has_nodes:
        return layout
    both = grid_cost(cost, seq, grid, heads, head_dim, machine)
    if both is None or (inner > 1 and _unsplit(works)):
        why = _unsplit(works) or f"{heads[0]} query and {heads[1]} key heads"
        fail("plan", "strategy", "a mesh of one dim, as heads cannot be split inside nodes", f"nodes of {inner}, {why}")
    return cut_for_nodes(layout, inner, both)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Planned:
    """The masks of a plan, the rows that were dealt for them, and the sizes that costs depend on."""

    works: Sequence[VariantWork]
    given: Sequence[Mapping[str, Any]]
    rows: Rows
    begins: tuple[int, ...] | None
    ids: Array | None
    dealt: Dealt
    layers: float
    seq: int
    ranks: int
    heads: tuple[int, int]
    head_dim: int
    machine: Machine
    groups: int | None

    def chosen(self, strategy: str, balance: str, *, by_rows: bool) -> tuple[Cost, tuple[str, ...], list[KeyNeeds]]:
        """The cost of the chosen strategy, the reasons for it, and the keys that each rank needs.

        Args:
            by_rows: only "gather" and "exchange" may be chosen.
        """
        sizes = self.seq, self.ranks, self.heads, self.head_dim, self.machine
        runs, is_packed = max(map(len, self.dealt.chunks)), self.begins is not None
        calls = runs if self.begins is None else self.dealt.calls or count_calls(self.begins, self.dealt.chunks)
        gather = gather_cost(self.layers, self.dealt.imbalance, calls, *sizes, self.groups)
        by_heads = None if _unsplit(self.works) or by_rows else heads_cost(self.layers, *sizes)
        why_not_heads = (
            _unsplit(self.works) or f"{self.heads[0]} query and {self.heads[1]} key heads over {self.ranks} ranks"
        )
        whys = [why_no_ring(work, is_packed=is_packed) for work in self.works]
        no_ring = {work.op: why for work, why in zip(self.works, whys, strict=True) if why}
        why_not_ring = next((f"{op}, {why}" for op, why in no_ring.items()), "")
        if strategy == "heads" and by_heads is None:
            others = "fewer ranks" if any(work.by_queries for work in self.works) else "'gather' or 'auto'"
            fail("plan", "strategy", f"{others}, as heads cannot be split", f"'heads' with {why_not_heads}")
        if strategy == "ring" and no_ring:
            fail("plan", "strategy", "'gather', 'exchange' or 'auto'", f"'ring' with {why_not_ring}")
        needs, shares = self._needs(strategy, balance)
        keys = 0 if by_rows else gathered_bytes(self.seq, self.heads, self.head_dim, self.machine)
        ring = None
        if not no_ring and (strategy == "ring" or keys > self.machine.memory):
            ring = ring_cost(replace(gather, runs=runs), self._ring_steps(needs), *sizes)
        in_part = None
        if (needs and strategy != "ring") or strategy == "exchange":
            in_part = exchange_cost(gather, shares, self.heads[1], self.seq, self.ranks, self.machine, self.groups)
        if strategy != "auto":
            asked = {"gather": gather, "exchange": in_part, "heads": by_heads, "ring": ring}[strategy]
            assert asked is not None
            return asked, (str(asked), f"{strategy}: asked for"), needs
        choices = Choices(
            gather=gather,
            exchange=in_part,
            heads=by_heads,
            ring=ring,
            keys=keys,
            why_not_heads=why_not_heads,
            why_not_ring=why_not_ring,
        )
        cost, reasons = choices.best(self.machine)
        return cost, (*reasons, *self._of_nodes(cost, gather, in_part, by_rows=by_rows)), needs

    def _needs(self, strategy: str, balance: str) -> tuple[list[KeyNeeds], list[float]]:
        """The keys that ranks need under each mask whose needs a strategy can use, and each mask's share of keys sent.

        The share is 1 if all keys of other ranks are sent.
        """
        needs: list[KeyNeeds] = []
        shares = [1.0] * len(self.works)
        if strategy not in ("exchange", "ring") and not (strategy == "auto" and balance == "work" and self.ranks > 1):
            return needs, shares
        rows = self.rows.cut(self.dealt.chunks)
        for i, (work, given) in enumerate(zip(self.works, self.given, strict=True)):
            found = needs_of(work, rows, given, self.ids, self.dealt.chunks, exact=strategy != "exchange")
            share = 1.0 if found is None else missing_share(found, self.dealt.chunks, self.seq)
            if found is not None and (share <= MOST_NEEDED or strategy != "auto"):
                needs.append(found)
                shares[i] = share
        return needs, shares

    def _ring_steps(self, needs: Sequence[KeyNeeds]) -> list[int]:
        """The number of steps of a ring for each mask, given the keys that ranks need under some of the masks."""
        layout = Layout(ranks=self.ranks, seq=self.seq, chunks=self.dealt.chunks, strategy="ring", needs=tuple(needs))
        return [
            ring_steps(layout, work, planned_needs(layout, work, given, knows_values=True)).count
            for work, given in zip(self.works, self.given, strict=True)
        ]

    def _of_nodes(self, cost: Cost, gather: Cost, exchange: Cost | None, *, by_rows: bool) -> tuple[str, ...]:
        """The advice to use a mesh of nodes and their ranks, if that is predicted to be faster."""
        node = self.machine.node
        if by_rows or self.ranks <= node or self.ranks % node or _unsplit(self.works):
            return ()
        nodes = self.ranks // node
        sizes = self.seq, nodes, self.heads, self.head_dim, self.machine
        rows = gather_cost(self.layers, self.dealt.imbalance, gather.runs, *sizes, self.groups)
        if exchange is not None:
            share = exchange.bytes_moved / gather.bytes_moved if gather.bytes_moved else 1.0
            rows = exchange_cost(rows, [share], self.heads[1], self.seq, nodes, self.machine, self.groups)
        both = grid_cost(rows, self.seq, (nodes, node), self.heads, self.head_dim, self.machine)
        if both is None or both.total >= cost.total:
            return ()
        return (f"{both}: give a mesh of two dims, {nodes} nodes and {node} ranks of a node",)


def _of_query_counts(works: Sequence[VariantWork], strategy: str, *, has_nodes: bool) -> str:
    """The strategy that was asked for; "heads" if a variant computes with the number of queries of the whole call."""
    op = next((work.op for work in works if work.by_queries), "")
    if not op:
        return strategy
    if has_nodes or strategy not in ("auto", "heads"):
        got = "'2d'" if has_nodes else repr(strategy)
        why = f"{op}, which computes with the number of queries of the whole call"
        fail("plan", "strategy", "'heads', on a mesh of one dim", f"{got} with {why}")
    return "heads"


def _one_group(groups: int | None, what: str) -> int:
    """One group of key heads, because of `what`; more must not have been asked for."""
    if groups not in (None, 1):
        fail("plan", "head_groups", f"None or 1 with {what}", groups)
    return 1


def _unsplit(works: Sequence[VariantWork]) -> str:
    """Why heads cannot be split, if some variant computes with the number of a head; else ""."""
    return next((f"{work.op}, which computes with the number of a head" for work in works if not work.by_heads), "")
