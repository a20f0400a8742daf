# SPDX-License-Identifier: Apache-2.0
"""Layouts of nodes: the ranks of a node share rows, and each rank computes some of the heads."""

from collections.abc import Sequence
from dataclasses import replace

from .costs import Cost
from .shards import Chunk, Layout


def cut_for_nodes(nodes: Layout, inner: int, cost: Cost) -> Layout:
    """The layout of all ranks of the nodes: the rows of each node are cut into consecutive parts for its ranks."""
    extra = -nodes.local % inner
    chunks = [
        (*own, (nodes.padded + number * extra, extra)) if extra else own for number, own in enumerate(nodes.chunks)
    ]
    nodes = replace(nodes, chunks=tuple(chunks))
    length = nodes.local // inner
    pieces = [_piece(own, i * length, length) for own in nodes.chunks for i in range(inner)]
    loads = tuple(load / inner for load in nodes.loads for _ in range(inner))
    # These compare how rows travel between nodes; their times are those of one rank for all heads of a node.
    between = [f"{nodes.ranks} nodes as ranks: {reason}" for reason in nodes.reasons[:-1]]
    why = f"2d: heads inside nodes of {inner} ranks, {nodes.strategy} over {nodes.ranks} nodes"
    return replace(
        nodes,
        ranks=nodes.ranks * inner,
        chunks=tuple(pieces),
        strategy="2d",
        head_groups=cost.groups,
        bytes_moved=cost.bytes_moved,
        predicted=cost.total,
        reasons=(*between, str(cost), why),
        loads=loads,
        cost=cost,
        nodes=replace(nodes, head_groups=cost.groups if nodes.head_groups > 1 else 1),
    )


def _piece(chunks: Sequence[Chunk], first: int, length: int) -> tuple[Chunk, ...]:
    """`length` rows of some chunks, from row `first` of all their rows on."""
    found, at = [], 0
    for begin, rows in chunks:
        low, high = max(first - at, 0), min(first + length - at, rows)
        if low < high:
            found.append((begin + low, high - low))
        at += rows
    return tuple(found)
