# SPDX-License-Identifier: Apache-2.0
"""A ring over packed documents that are computed apart: calls of a run of a document's rows and a run of its keys.

They serve what one call of several documents cannot: dropout, which counts rows and keys from one place, and variants
that read a number of each document. numpy alone is imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from .checks import DROPOUT_KEYS, DROPOUT_ROWS
from .packed_rows import Piece, packed_layers
from .ring_steps import RingSteps
from .shards import Layout
from .work import BLOCK, Array


@dataclass(frozen=True, kw_only=True)
class DocumentPair:
    """A run of rows of a document and a run of its keys.

    Attributes:
        rows, keys: the runs. layers: the packed call of its rank that each is in.
        is_own: the keys are those of the rows themselves.
    """

    rows: Piece
    keys: Piece
    layers: tuple[int, int]
    is_own: bool


def document_pairs(layout: Layout, steps: RingSteps, rank: int, owner: int) -> Iterator[DocumentPair]:
    """What a rank computes with the keys of another one."""
    if not steps.visits[rank, owner]:
        return
    of_rows, of_keys = packed_layers(layout, rank), packed_layers(layout, owner)
    for i, j in product(range(len(of_rows)), range(len(of_keys))):
        for number, rows in sorted(of_rows[i].items()):
            keys = of_keys[j].get(number)
            if keys is not None and meet(steps, rows, keys):
                yield DocumentPair(rows=rows, keys=keys, layers=(i, j), is_own=rank == owner and i == j)


def meet(steps: RingSteps, rows: Piece, keys: Piece) -> bool:
    """Whether rows of a document visit keys of it."""
    return not (steps.looks_back and keys.position >= rows.position + rows.length)


def rows_before(position: int, unit: int, *, drops: bool) -> int:
    """Rows or keys that a call with dropout begins before a run: it counts them from multiples of a unit on."""
    return position % unit if drops else 0


# ------------------------------------------------------------------------------------ calls of any rank, of equal sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTable:
    """Runs of rows, or of keys, of the calls of every rank, int32 `[ranks, calls]`. A call that a rank has not has a
    run of no row.

    Attributes:
        at: the first row of a run in the rank that has it. position: the same in its document.
        ahead: rows that a call has ahead of it. length: rows of the run.
        count: rows of every call, those ahead included.
    """

    at: Array
    position: Array
    ahead: Array
    length: Array
    count: int

    @property
    def are_full(self) -> bool:
        """True if every row of every call is one of a run."""
        return bool((self.length == self.count).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentCalls:
    """Calls of equal sizes, as many on every rank, for a program that runs on any.

    Attributes:
        documents: int32 `[ranks, calls]`.
        reach: so many rows of a document, from the first of the call's keys on, hold all rows and keys of any call.
        is_own: the keys are those of the rows themselves, whose sink counts.
    """

    rows: RunTable
    keys: RunTable
    documents: Array
    reach: int
    is_own: bool


def document_calls(
    layout: Layout, steps: RingSteps, step: int, *, drops: bool, at_once: bool, has_sink: bool
) -> list[DocumentCalls]:
    """The calls of a step of every rank, those of like sizes together: a call has less than twice the rows of a run,
    and less than twice its keys, where these are more than those of a block.

    Args:
        at_once: no two of a rank that are together have a row in common, or a key.
        has_sink: those whose keys are those of the rows themselves are apart from others.
    """
    kinds: dict[tuple[int, ...], list[list[DocumentPair]]] = {}
    for rank in range(layout.ranks):
        for pair in document_pairs(layout, steps, rank, (rank - step) % layout.ranks):
            sizes = (max(piece.length, BLOCK).bit_length() for piece in (pair.rows, pair.keys))
            kind = has_sink and pair.is_own, *sizes, *(pair.layers if at_once else ())
            of_ranks = kinds.setdefault(kind, [[] for _ in range(layout.ranks)])
            of_ranks[rank].append(pair)
    return [_calls(of_ranks, is_own=bool(kind[0]), drops=drops) for kind, of_ranks in sorted(kinds.items())]


def _calls(of_ranks: Sequence[Sequence[DocumentPair]], *, is_own: bool, drops: bool) -> DocumentCalls:
    rows = _table([[pair.rows for pair in pairs] for pairs in of_ranks], DROPOUT_ROWS, drops=drops)
    keys = _table([[pair.keys for pair in pairs] for pairs in of_ranks], DROPOUT_KEYS, drops=drops)
    documents = np.zeros_like(rows.at)
    for rank, pairs in enumerate(of_ranks):
        documents[rank, : len(pairs)] = [pair.rows.document for pair in pairs]
    first_rows, first_keys = rows.position - rows.ahead, keys.position - keys.ahead
    return DocumentCalls(
        rows=rows,
        keys=keys,
        documents=documents,
        reach=int(np.maximum(first_rows - first_keys + rows.count, keys.count).max()),
        is_own=is_own,
    )


def _table(of_ranks: Sequence[Sequence[Piece]], unit: int, *, drops: bool) -> RunTable:
    table = np.zeros((4, len(of_ranks), max(map(len, of_ranks))), np.int32)
    for rank, pieces in enumerate(of_ranks):
        for n, piece in enumerate(pieces):
            before = rows_before(piece.position, unit, drops=drops)
            table[:, rank, n] = piece.at, piece.position, before, piece.length
    at, position, ahead, length = table
    return RunTable(at=at, position=position, ahead=ahead, length=length, count=int((ahead + length).max()))
