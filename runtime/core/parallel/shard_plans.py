"""Plans of calls over several GPUs: the layout for some masks, chosen by their work and the cost model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..checks import fail
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
from .plan_requests import PlanRequest, one_group
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
from .work import BLOCK, Array, Rows, visited_blocks

MOST_NEEDED = 0.6
"""Ranks that need more than this share of the other ranks' keys gather them all, unless "exchange" is asked for."""


def make_layout(asked: PlanRequest) -> Layout:
    """The layout of a plan."""
    rows = Rows.of(
        asked.seq, asked.ranks, asked.begins, in_table=any(work.may_visit is not None for work in asked.works)
    )
    work = _work_of_rows(asked, rows)
    in_rows = RowWork.of(rows.begins, rows.ends, work)
    planned = _Planned(asked=asked, rows=rows, dealt=_deal(asked, in_rows), layers=float(work.sum()) / len(asked.works))
    cost, reasons, needs = planned.chosen()
    if cost.strategy == "ring" and planned.dealt.lengths.ndim > 1:
        planned = replace(planned, dealt=balanced(in_rows, asked.seq, asked.ranks))
        cost, reasons, needs = planned.chosen()
    if cost.strategy == "heads":
        # Every rank computes all rows of its heads: any order is balanced, and this one needs no copy.
        planned = replace(planned, dealt=contiguous(in_rows, asked.seq, asked.ranks))
    layout = planned.layout(cost, reasons, needs)
    if asked.ranks > 1 and layout.local >= asked.seq:
        # Nothing would tell the rows of one rank from the whole rows.
        fail("plan", "seq", f"more than {layout.local} rows, which each rank gets with padding", asked.seq)
    return _over_nodes(asked, layout, cost) if asked.has_nodes else layout


def _work_of_rows(asked: PlanRequest, rows: Rows) -> Array:
    """The blocks that each run of rows visits under all masks. Without balance by work, the keys from the start of its
    sequence to its own end count."""
    total: Array = (rows.ends - rows.begins) * (rows.ends - rows.starts) / BLOCK**2
    if asked.balance == "work":
        masks = zip(asked.works, asked.given, strict=True)
        total = np.sum([visited_blocks(work, rows, given, asked.ids) for work, given in masks], axis=0)
    return total


def _deal(asked: PlanRequest, in_rows: RowWork) -> Dealt:
    """The rows of each rank, for a strategy that computes a part of the rows."""
    sizes = asked.seq, asked.ranks
    # In a ring all ranks have runs of the same lengths.
    if asked.balance == "work" and asked.begins is not None and asked.strategy != "ring":
        by_documents = deal_documents(in_rows, *sizes, np.asarray(asked.begins, np.int64))
        return balanced(in_rows, *sizes, by_documents)
    return DEALS[asked.balance](in_rows, *sizes)


def _over_nodes(asked: PlanRequest, layout: Layout, rows: Cost) -> Layout:
    """The layout for nodes whose ranks split heads; `rows`: the cost of splitting the rows over nodes."""
    both = grid_cost(rows, asked.seq, (asked.ranks, asked.inner), asked.heads, asked.head_dim, asked.machine)
    if both is None or (asked.inner > 1 and asked.unsplit):
        why = asked.unsplit or f"{asked.heads[0]} query and {asked.heads[1]} key heads"
        expected = "a mesh of one dim, as heads cannot be split inside nodes"
        fail("plan", "strategy", expected, f"nodes of {asked.inner}, {why}")
    return cut_for_nodes(layout, asked.inner, both)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Planned:
    """What was asked for, and the rows that were dealt for it. `layers`: the work of a layer in blocks, on average over
    the masks."""

    asked: PlanRequest
    rows: Rows
    dealt: Dealt
    layers: float

    @property
    def _sizes(self) -> tuple[int, int, tuple[int, int], int, Machine]:
        """What the costs of all strategies depend on."""
        asked = self.asked
        return asked.seq, asked.ranks, asked.heads, asked.head_dim, asked.machine

    def chosen(self) -> tuple[Cost, tuple[str, ...], list[KeyNeeds]]:
        """The cost of the chosen strategy, the reasons for it, and the keys that each rank needs.

        Over nodes it is the strategy for the rows, which is "gather" or "exchange".
        """
        asked, by_rows, sizes = self.asked, self.asked.has_nodes, self._sizes
        strategy = "auto" if by_rows or asked.strategy == "2d" else asked.strategy
        runs = max(map(len, self.dealt.chunks))
        calls = runs if asked.begins is None else self.dealt.calls or count_calls(asked.begins, self.dealt.chunks)
        gather = gather_cost(self.layers, self.dealt.imbalance, calls, *sizes, asked.groups)
        by_heads = None if asked.unsplit or by_rows else heads_cost(self.layers, *sizes)
        why_not_heads = (
            asked.unsplit or f"{asked.heads[0]} query and {asked.heads[1]} key heads over {asked.ranks} ranks"
        )
        whys = [why_no_ring(work, is_packed=asked.begins is not None) for work in asked.works]
        no_ring = {work.op: why for work, why in zip(asked.works, whys, strict=True) if why}
        why_not_ring = next((f"{op}, {why}" for op, why in no_ring.items()), "")
        if strategy == "heads" and by_heads is None:
            others = "fewer ranks" if any(work.by_queries for work in asked.works) else "'gather' or 'auto'"
            fail("plan", "strategy", f"{others}, as heads cannot be split", f"'heads' with {why_not_heads}")
        if strategy == "ring" and no_ring:
            fail("plan", "strategy", "'gather', 'exchange' or 'auto'", f"'ring' with {why_not_ring}")
        needs, shares = self._needs(strategy)
        keys = 0 if by_rows else gathered_bytes(asked.seq, asked.heads, asked.head_dim, asked.machine)
        ring = None
        if not no_ring and (strategy == "ring" or keys > asked.machine.memory):
            ring = ring_cost(replace(gather, runs=runs), self._ring_steps(needs), *sizes)
        in_part = None
        if (needs and strategy != "ring") or strategy == "exchange":
            in_part = self._exchange_cost(gather, shares, asked.ranks)
        if strategy != "auto":
            cost = {"gather": gather, "exchange": in_part, "heads": by_heads, "ring": ring}[strategy]
            assert cost is not None
            return cost, (str(cost), f"{strategy}: asked for"), needs
        choices = Choices(
            gather=gather,
            exchange=in_part,
            heads=by_heads,
            ring=ring,
            keys=keys,
            why_not_heads=why_not_heads,
            why_not_ring=why_not_ring,
        )
        best, reasons = choices.best(asked.machine)
        return best, (*reasons, *self._of_nodes(best, gather, in_part)), needs

    def layout(self, cost: Cost, reasons: tuple[str, ...], needs: Sequence[KeyNeeds]) -> Layout:
        """The layout for the strategy of a cost."""
        asked, by_heads = self.asked, cost.strategy == "heads"
        groups = one_group(asked.groups, "a ring") if cost.strategy == "ring" else asked.groups
        loads = np.full(asked.ranks, self.layers / asked.ranks) if by_heads else self.dealt.load / len(asked.works)
        ids = asked.ids
        return Layout(
            ranks=asked.ranks,
            seq=asked.seq,
            chunks=self.dealt.chunks,
            strategy=cost.strategy,
            head_groups=groups or cost.groups,
            imbalance=0.0 if by_heads else self.dealt.imbalance,
            bytes_moved=cost.bytes_moved,
            predicted=cost.total,
            reasons=reasons,
            loads=tuple(loads.tolist()),
            cost=cost,
            heads=asked.heads,
            head_dim=asked.head_dim,
            needs=tuple(needs) if cost.strategy in ("exchange", "ring") else (),
            cu_seqlens=asked.begins,
            segment_ids=ids,
            segments_digest="" if ids is None else hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16],
        )

    def _exchange_cost(self, gather: Cost, shares: list[float], ranks: int) -> Cost:
        """The cost of sending these shares of the keys among so many ranks; `gather`: that of sending all."""
        asked = self.asked
        return exchange_cost(gather, shares, asked.heads[1], asked.seq, ranks, asked.machine, asked.groups)

    def _needs(self, strategy: str) -> tuple[list[KeyNeeds], list[float]]:
        """The keys that ranks need under each mask whose needs a strategy can use, and each mask's share of keys sent.

        The share is 1 if all keys of other ranks are sent.
        """
        asked = self.asked
        needs: list[KeyNeeds] = []
        shares = [1.0] * len(asked.works)
        may_choose = strategy == "auto" and asked.balance == "work" and asked.ranks > 1
        if strategy not in ("exchange", "ring") and not may_choose:
            return needs, shares
        rows = self.rows.cut(self.dealt.chunks)
        for i, (work, given) in enumerate(zip(asked.works, asked.given, strict=True)):
            found = needs_of(work, rows, given, asked.ids, self.dealt.chunks, exact=strategy != "exchange")
            share = 1.0 if found is None else missing_share(found, self.dealt.chunks, asked.seq)
            if found is not None and (share <= MOST_NEEDED or strategy != "auto"):
                needs.append(found)
                shares[i] = share
        return needs, shares

    def _ring_steps(self, needs: Sequence[KeyNeeds]) -> list[int]:
        """The number of steps of a ring for each mask, given the keys that ranks need under some of the masks."""
        asked = self.asked
        layout = Layout(ranks=asked.ranks, seq=asked.seq, chunks=self.dealt.chunks, strategy="ring", needs=tuple(needs))
        return [
            ring_steps(layout, work, planned_needs(layout, work, given, knows_values=True)).count
            for work, given in zip(asked.works, asked.given, strict=True)
        ]

    def _of_nodes(self, cost: Cost, gather: Cost, exchange: Cost | None) -> tuple[str, ...]:
        """The advice to use a mesh of nodes and their ranks, if that is predicted to be faster."""
        asked, node = self.asked, self.asked.machine.node
        if asked.has_nodes or asked.ranks <= node or asked.ranks % node or asked.unsplit:
            return ()
        nodes = asked.ranks // node
        sizes = asked.seq, nodes, asked.heads, asked.head_dim, asked.machine
        rows = gather_cost(self.layers, self.dealt.imbalance, gather.runs, *sizes, asked.groups)
        if exchange is not None:
            share = exchange.bytes_moved / gather.bytes_moved if gather.bytes_moved else 1.0
            rows = self._exchange_cost(rows, [share], nodes)
        both = grid_cost(rows, asked.seq, (nodes, node), asked.heads, asked.head_dim, asked.machine)
        if both is None or both.total >= cost.total:
            return ()
        return (f"{both}: give a mesh of two dims, {nodes} nodes and {node} ranks of a node",)
