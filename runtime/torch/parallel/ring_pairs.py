"""What a step of a ring computes: a run of rows with a run of keys, or packed documents with their keys."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ...core.checks import DROPOUT_KEYS, DROPOUT_ROWS
from ...core.parallel.packed_rows import Piece, packed_call, packed_layers
from ...core.parallel.ring_documents import document_pairs, meet, rows_before
from ...core.parallel.ring_steps import RingSteps
from ...core.parallel.shards import Chunk, Layout
from ...core.parallel.work import VariantWork
from .exchange import kept
from .row_parts import Documents, Run, packed_parts
from .row_strategies import starts


@dataclass(frozen=True)
class Pair:
    """A run of rows and a run of keys of a dense call.

    Dropout draws for blocks of rows and keys. If a run begins inside a block, rows of zeros are put before it.

    Attributes:
        document, start: the packed document of both, and its first row in the whole call; 0 for dense rows. Runs are
            counted from that row on.
        is_beside: another call of the same step, a packed one, has these rows as well, and counts their sink.
    """

    queries: Run
    keys: Run
    document: int = 0
    start: int = 0
    is_beside: bool = False

    @property
    def counts_sink(self) -> bool:
        """Whether the sink of these rows counts here: in one call, that of the keys of the rows themselves."""
        return self.queries.run == self.keys.run and not self.is_beside

    def rows(self, x: Tensor, value: float = 0.0) -> Tensor:
        """These rows of a tensor of this rank's rows, `[local, ...]`; rows put before them are filled with `value`."""
        return self.queries.take(x, value)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a part that `rows` returned back to `whole`, unless it is a view of it."""
        if self.queries.ahead:
            self.queries.put(whole, part)

    def of_keys(self, x: Tensor) -> Tensor:
        """These keys of a tensor of the keys that are here."""
        return self.keys.take(x)

    def add(self, whole: Tensor, part: Tensor) -> None:
        """Add to these rows."""
        self.queries.add(whole, part)

    def add_keys(self, whole: Tensor, part: Tensor) -> None:
        """Add to these keys."""
        self.keys.add(whole, part)


@dataclass(frozen=True)
class PackedPair:
    """Documents of a rank, and keys of these documents that a rank has: one run of rows and at most one of keys each.

    Attributes:
        q_offset: for each document the position of its first row, counted from its first key.
        counts_sink: the keys are those of the rows themselves.
    """

    queries: Documents
    keys: Documents
    q_offset: Tensor
    counts_sink: bool

    def rows(self, x: Tensor, value: float = 0.0) -> Tensor:
        return self.queries.take(x, value)

    def put(self, whole: Tensor, part: Tensor) -> None:
        if self.queries.span is None:
            self.queries.put(whole, part)

    def of_keys(self, x: Tensor) -> Tensor:
        return self.keys.take(x)

    def add(self, whole: Tensor, part: Tensor) -> None:
        self.queries.add(whole, part)

    def add_keys(self, whole: Tensor, part: Tensor) -> None:
        self.keys.add(whole, part)


def takes_documents(work: VariantWork) -> bool:
    """Whether a packed call may have some of each document's keys: no tensor of rows or keys, or key count, is read."""
    return not (work.by_length or any(work.axes(name, "q_idx", "kv_idx") for name in work.tensors))


def dense_pairs(layout: Layout, steps: RingSteps, rank: int, owner: int, *, drops: bool) -> Iterator[Pair]:
    """The pairs that a rank with dense rows computes with the keys of rank `owner`."""
    runs, key_runs = layout.runs(rank), layout.runs(owner)
    for run, at in zip(runs, starts(runs), strict=True):
        for keys, keys_at in zip(key_runs, starts(key_runs), strict=True):
            if steps.visited(rank, owner, run, keys):
                yield _pair(run, at, keys, keys_at, drops=drops)


def _pair(run: Chunk, at: int, keys: Chunk, keys_at: int, *, drops: bool, document: int = 0, start: int = 0) -> Pair:
    ahead, keys_ahead = rows_before(run[0], DROPOUT_ROWS, drops=drops), rows_before(keys[0], DROPOUT_KEYS, drops=drops)
    return Pair(Run(run, at, ahead), Run(keys, keys_at, keys_ahead), document, start)


def pairs_by_document(layout: Layout, steps: RingSteps, rank: int, owner: int, *, drops: bool) -> Iterator[Pair]:
    """The pairs of a rank with packed rows: a dense call for each run of rows and each run of keys of a document."""
    for pair in document_pairs(layout, steps, rank, owner):
        yield _of_document(layout, pair.rows, pair.keys, drops=drops)


def _of_document(layout: Layout, rows: Piece, keys: Piece, *, drops: bool) -> Pair:
    assert layout.cu_seqlens is not None
    runs = (rows.position, rows.length), rows.at, (keys.position, keys.length), keys.at
    return _pair(*runs, drops=drops, document=rows.document, start=layout.cu_seqlens[rows.document])


def packed_pairs(
    layout: Layout, steps: RingSteps, rank: int, owner: int, device: torch.device, *, drops: bool
) -> list[Pair | PackedPair]:
    """What a rank with packed rows computes with the keys of rank `owner`, made once for each layout.

    For dropout a packed call counts the keys of each document from 0. A document whose first key here has another
    position gets its own dense call.
    """

    def make() -> list[Pair | PackedPair]:
        if not steps.visits[rank, owner]:
            return []
        counts = [len(packed_layers(layout, each)) for each in (rank, owner)]
        layers = product(range(counts[0]), range(counts[1]))
        return [pair for each in layers for pair in _packed(layout, steps, (rank, owner), each, device, drops=drops)]

    key = ("packed pairs", rank, owner, steps.looks_back, bool(steps.visits[rank, owner]), drops, device)
    pairs: list[Pair | PackedPair] = kept(layout, key, make)
    return pairs


def _packed(
    layout: Layout,
    steps: RingSteps,
    ranks: tuple[int, int],
    layers: tuple[int, int],
    device: torch.device,
    *,
    drops: bool,
) -> Iterator[Pair | PackedPair]:
    """The pairs of the rows of one packed call of a rank and the keys of one packed call of another rank."""
    rows, keys = (packed_layers(layout, rank)[layer] for rank, layer in zip(ranks, layers, strict=True))
    met = [number for number, own in rows.items() if number in keys and meet(steps, own, keys[number])]
    apart = [number for number in met if drops and keys[number].position]
    all_apart = len(apart) == len(met)
    for number in apart:
        yield replace(_of_document(layout, rows[number], keys[number], drops=drops), is_beside=not all_apart)
    if all_apart:
        return
    # Rows of documents without keys here stay in the call, so that adjacent rows remain one span.
    of_rows = packed_call(layout, rows, drops=drops)
    queries = packed_parts(layout, ranks[0], device, drops=drops)[layers[0]]
    if apart:
        of_keys = packed_call(layout, {n: x for n, x in keys.items() if n not in apart}, drops=False)
        own_keys = Documents(of_keys, device)
    else:
        of_keys = packed_call(layout, keys, drops=False)
        own_keys = packed_parts(layout, ranks[1], device, drops=False)[layers[1]]
    offsets = [a - b for a, b in zip(of_rows.offsets, of_keys.offsets, strict=True)]
    q_offset = torch.tensor(offsets, dtype=torch.int32, device=device)
    yield PackedPair(queries, own_keys, q_offset, counts_sink=ranks[0] == ranks[1] and layers[0] == layers[1])
