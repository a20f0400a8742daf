# SPDX-License-Identifier: Apache-2.0
"""Which rows of a long sequence each of several GPUs has: layouts, and how chunks of rows are dealt by their work.

numpy alone is imported. A layout is the same in PyTorch and in JAX.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ..checks import fail
from .costs import Cost
from .work import BLOCK, Array

BALANCED = 0.01
"""Smaller chunks are dealt if the work of the slowest rank exceeds the mean by more than this share."""

FREE_RUNS, RUN_COST = 8, 0.0005
"""Each run of rows of a rank beyond FREE_RUNS must gain RUN_COST of balance, because every run is a launch."""

MOST_SWAPS = 32
"""Swaps of chunks between the fullest and the emptiest rank that a deal tries."""

MOST_PADDING = 64
"""Chunks are small enough that padding is at most the sequence's length over this number, if any size allows that."""

Chunk = tuple[int, int]
"""First row and number of rows."""


@dataclass(frozen=True, kw_only=True)
class KeyNeeds:
    """The keys that the rows of each rank may attend to under one mask.

    Attributes:
        op: the variant. arguments: what its mask reads: numbers, and digests of tensors.
        runs: for each rank the keys in ascending order, as (begin, length).
    """

    op: str
    arguments: tuple[tuple[str, int | float | str], ...]
    runs: tuple[tuple[Chunk, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which rows of a sequence each rank has, and how ranks compute attention together. `plan(...)` makes it.

    Attributes:
        ranks: number of ranks. seq: rows of the sequence.
        chunks: for each rank its rows in the order it has them, as (begin, length). All ranks have the same number of
            rows; rows from `seq` on are padding.
        strategy: "heads": each rank computes some heads of all rows. "gather": each rank computes its own rows and
            gathers the keys of all. "exchange": as "gather", but a rank gets only keys that its rows may attend to.
            "ring": keys go from rank to rank, and no rank has them all. "2d": each node of ranks has rows of its own,
            and nodes gather or exchange keys; each rank of a node computes some heads.
        head_groups: key heads are gathered or exchanged in so many groups, each while the group before it is computed.
        imbalance: by how much the work of the slowest rank exceeds the mean: 0.01 is 1 %.
        bytes_moved: bytes that a rank receives at most in one forward and backward of one batch row.
        predicted: seconds of the slowest rank, forward and backward of one batch row, by the cost model.
        reasons: why this strategy, a sentence each.
        loads: for each rank the blocks of 128 by 128 that its kernels visit, per query head of the whole call.
        cost: the cost model's estimate for the slowest rank.
        heads: query heads and key heads that the layout was planned for. head_dim: the same.
        needs: the keys that each rank needs under "exchange" and "ring", for each mask of the plan.
        cu_seqlens: where packed sequences begin, or None.
        segment_ids: ids of documents in dense rows, int `[S]` or `[B, S]`, or None.
        nodes: under "2d" the layout of the rows over the nodes.
    """

    ranks: int
    seq: int
    chunks: tuple[tuple[Chunk, ...], ...]
    strategy: str
    head_groups: int = 1
    imbalance: float = 0.0
    bytes_moved: int = 0
    predicted: float = 0.0
    reasons: tuple[str, ...] = ()
    loads: tuple[float, ...] = ()
    cost: Cost | None = None
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 128
    needs: tuple[KeyNeeds, ...] = ()
    cu_seqlens: tuple[int, ...] | None = None
    segment_ids: Array | None = field(default=None, compare=False, repr=False)
    segments_digest: str = ""
    nodes: "Layout | None" = None

    @cached_property
    def local(self) -> int:
        """Rows of one rank, padding included."""
        return sum(length for _, length in self.chunks[0])

    @property
    def inner(self) -> int:
        """How many ranks share the rows of a node."""
        return 1 if self.nodes is None else self.ranks // self.nodes.ranks

    @property
    def padded(self) -> int:
        """Rows of all ranks, padding included."""
        return self.local * self.ranks

    @cached_property
    def order(self) -> Array:
        """The rows of all ranks, one rank after the other: int64 `[padded]`. Rows from `seq` on are padding."""
        rows = [np.arange(begin, begin + length) for own in self.chunks for begin, length in own]
        return np.concatenate(rows)

    @cached_property
    def places(self) -> Array:
        """The index of each row of the sequence in `order`: int64 `[seq]`."""
        places = np.empty(self.padded, np.int64)
        places[self.order] = np.arange(self.padded)
        return places[: self.seq]

    @cached_property
    def in_order(self) -> bool:
        """True if `order` is 0, 1, 2, ..."""
        return bool(len(self.chunks[0]) == 1 and np.array_equal(self.order, np.arange(self.padded)))

    @cached_property
    def row_positions(self) -> Array:
        """The position of each row in its sequence, int64 `[seq]`."""
        rows = np.arange(self.seq)
        if self.cu_seqlens is None:
            return rows
        bounds = np.asarray(self.cu_seqlens)
        starts: Array = bounds[np.searchsorted(bounds, rows, side="right") - 1]
        return rows - starts

    @cached_property
    def sequence_numbers(self) -> Array:
        """Which packed sequence each row is in, int64 `[seq]`."""
        assert self.cu_seqlens is not None
        found: Array = np.searchsorted(np.asarray(self.cu_seqlens), np.arange(self.seq), side="right") - 1
        return found

    def runs(self, rank: int) -> list[Chunk]:
        """The rows of a rank that are no padding, adjacent chunks joined."""
        found: list[Chunk] = []
        for begin, length in self.chunks[rank]:
            length = min(length, self.seq - begin)
            if length <= 0:
                continue
            if found and sum(found[-1]) == begin:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((begin, length))
        return found

    def cost_of(self, rank: int) -> Cost:
        """The cost model's estimate for one rank: its kernels take time in proportion to its own work, and its exchange
        takes as long as that of the slowest rank."""
        assert self.cost is not None
        most = max(self.loads)
        return replace(self.cost, kernels=self.cost.kernels * (self.loads[rank] / most if most else 0.0))

    def report(self) -> str:
        """The plan as text in several lines."""
        runs = max(len(self.runs(rank)) for rank in range(self.ranks))
        lines = [
            f"{self.ranks} ranks, {self.seq} rows ({self.padded - self.seq} of padding), strategy {self.strategy}",
            f"runs of rows per rank: {runs}; slowest rank {100 * self.imbalance:.2f} % over the mean",
            f"predicted {1e3 * self.predicted:.3f} ms forward and backward, {self.bytes_moved} bytes received per rank",
        ]
        return "\n".join([*lines, *self.reasons])


# -------------------------------------------------------------------------------------------------------------- dealing


def deal(work: Array, ranks: int) -> Array:
    """Deal chunks to ranks, the same number to each: the rank of each chunk, int64 `[chunks]`.

    Chunks are dealt in rounds, those with the most work first. In a round each rank gets one chunk, and the rank with
    the least work so far gets the chunk with the most. Then the ranks with the most and the least work swap chunks
    while that helps.

    >>> deal(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist()
    [0, 1, 1, 0]
    """
    chosen = np.empty(len(work), np.int64)
    load = np.zeros(ranks)
    longest_first = np.argsort(-work, kind="stable").reshape(-1, ranks)
    for chunks in longest_first:
        emptiest_first = np.argsort(load, kind="stable")
        chosen[chunks] = emptiest_first
        load[emptiest_first] += work[chunks]
    mean = load.mean()
    for _ in range(MOST_SWAPS):
        full, empty = int(load.argmax()), int(load.argmin())
        excess = load[full] - load[empty]
        if load[full] <= mean * (1 + BALANCED / 4):
            break
        ours, theirs = np.flatnonzero(chosen == full), np.flatnonzero(chosen == empty)
        gain = work[ours][:, None] - work[theirs]
        best = int(np.abs(gain - excess / 2).argmin())
        i, j = divmod(best, len(theirs))
        if not 0 < gain[i, j] < excess:
            break
        chosen[ours[i]], chosen[theirs[j]] = empty, full
        load[full] -= gain[i, j]
        load[empty] += gain[i, j]
    return chosen


def imbalance_of(load: Array) -> float:
    """By how much the largest load exceeds the mean, as a share of it."""
    mean = float(load.mean())
    return float(load.max()) / mean - 1 if mean > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Dealt:
    """How rows are dealt.

    Attributes:
        begins: the first row of each of the n chunks of each rank, int64 `[ranks, n]`.
        lengths: rows of the chunks, `[n]` if they are the same for every rank, else `[ranks, n]`. A chunk of 0 rows
            is no chunk.
        load: the work of each rank.
        calls: the number of calls that the rows of a rank take, if it is less than the number of its runs; else 0.
    """

    begins: Array
    lengths: Array
    load: Array
    calls: int = 0

    @property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each rank in the form of `Layout.chunks`."""
        lengths = np.broadcast_to(self.lengths, self.begins.shape).tolist()
        pairs = (zip(own, of_own, strict=True) for own, of_own in zip(self.begins.tolist(), lengths, strict=True))
        return tuple(tuple(chunk for chunk in own if chunk[1]) for own in pairs)

    @property
    def imbalance(self) -> float:
        return imbalance_of(self.load)

    @property
    def cost(self) -> float:
        """The measure by which a deal is chosen: the imbalance, plus the cost of many runs of rows."""
        is_new = self.begins[:, 1:] != self.begins[:, :-1] + self.lengths[..., :-1]
        runs = self.calls or 1 + int(is_new.sum(1).max())
        return max(self.imbalance, BALANCED) + RUN_COST * max(runs - FREE_RUNS, 0)


@dataclass(frozen=True)
class RowWork:
    """Work as a function of rows: rows before `edges[i]` have work `total[i]`. Between two edges it grows linearly."""

    edges: Array
    total: Array

    @classmethod
    def of(cls, begins: Array, ends: Array, work: Array) -> "RowWork":
        return cls(np.concatenate([begins[:1], ends]), np.concatenate([[0.0], np.cumsum(work)]))

    def until(self, rows: Array) -> Array:
        """The work of all rows before each of these."""
        found: Array = np.interp(rows, self.edges, self.total)
        return found

    def between(self, edges: Array) -> Array:
        """The work from each edge to the next; 0 beyond the last row."""
        return np.diff(self.until(edges))


def contiguous(rows: RowWork, seq: int, ranks: int) -> Dealt:
    """One run of rows for each rank."""
    length = -(-seq // ranks)
    edges = np.arange(ranks + 1) * length
    return Dealt(edges[:-1, None], np.array([length]), rows.between(edges))


def zigzag(rows: RowWork, seq: int, ranks: int) -> Dealt:
    """Two runs for each rank: the i-th from the start and the i-th from the end."""
    unit = _unit(seq, ranks)
    length = -(-seq // (2 * ranks * unit)) * unit
    return _zigzag_then_runs(rows, seq, ranks, length)


def _zigzag_then_runs(rows: RowWork, seq: int, ranks: int, length: int) -> Dealt:
    """A zig-zag of chunks of `length` over the first rows, then one run of the others for each rank.

    It balances masks whose work grows over the first rows and is even from there on, such as a window's.
    """
    head = 2 * ranks * length
    rest = -(-max(seq - head, 0) // ranks)
    edges = np.concatenate([np.arange(2 * ranks) * length, head + np.arange(ranks + 1) * rest])
    order = np.stack([np.arange(ranks), np.arange(2 * ranks)[: -ranks - 1 : -1], np.arange(2 * ranks, 3 * ranks)], 1)
    kept = 3 if rest else 2
    load = rows.between(edges)[order].sum(1)
    return Dealt(edges[order][:, :kept], np.array([length, length, rest])[:kept], load)


def balanced(rows: RowWork, seq: int, ranks: int, first: Iterable[Dealt] = ()) -> Dealt:
    """The fewest runs of rows for each rank with which the slowest rank has at most BALANCED over the mean.

    Deals are tried in this order: one run for each rank, the deals `first`, zig-zags over all rows and over the first
    rows, and chunks dealt by their work, the largest chunks first. Many runs are many launches: each run beyond
    FREE_RUNS must gain RUN_COST. If no deal is balanced, the deal of the least `cost` is taken.
    """
    best = contiguous(rows, seq, ranks)
    if best.imbalance <= BALANCED:
        return best
    for dealt in chain(first, _candidates(rows, seq, ranks)):
        best = min(best, dealt, key=lambda each: each.cost)
        if best.imbalance <= BALANCED:
            break
    return best


def _candidates(rows: RowWork, seq: int, ranks: int) -> Iterator[Dealt]:
    """Deals of several runs for each rank, those with few runs first."""
    yield zigzag(rows, seq, ranks)
    unit = _unit(seq, ranks)
    length = unit
    while 2 * ranks * length * 2 <= seq:
        yield _zigzag_then_runs(rows, seq, ranks, length)
        length *= 2
    while length >= unit:
        if length == unit or -seq % (length * ranks) * MOST_PADDING <= seq:
            yield _in_chunks(rows, seq, ranks, length)
        length //= 2


def _in_chunks(rows: RowWork, seq: int, ranks: int, length: int) -> Dealt:
    """Chunks of `length` rows, dealt by their work."""
    count = -(-seq // (length * ranks)) * ranks
    edges = np.arange(count + 1) * length
    work = rows.between(edges)
    chosen = deal(work, ranks)
    load = np.bincount(chosen, weights=work, minlength=ranks)
    by_rank = np.argsort(chosen, kind="stable").reshape(ranks, -1) * length
    return Dealt(by_rank, np.full(by_rank.shape[1], length), load)


def _unit(seq: int, ranks: int) -> int:
    """Rows of the smallest chunk: a block, or in a short sequence few enough that each rank can have two chunks."""
    unit = BLOCK
    while unit > 1 and unit * 2 * ranks > seq:
        unit //= 2
    return unit


DEALS = {"work": balanced, "zigzag": zigzag, "contiguous": contiguous}
"""How rows may be dealt."""


# ------------------------------------------------------------------------------------------------- arrays of any librar


def axis_of(x: Any, dim: int, rows: int, function: str) -> int:
    """A dim counted from the front, checked to have so many rows."""
    rank = len(x.shape)
    if not -rank <= dim < rank or x.shape[dim] != rows:
        got = f"dim {dim} of shape {list(x.shape)}"
        fail(f"Layout.{function}", "x", f"{rows} rows along dim {dim}, as the layout has", got)
    return dim % rank


def rows_ahead(layout: Layout, begin: int) -> int:
    """The number of rows ahead of a chunk at which a call with dropout begins: dropout counts from multiples of 16."""
    return int(layout.row_positions[begin]) % 16 if begin < layout.seq else 0
