# SPDX-License-Identifier: Apache-2.0
"""A ring over packed documents that are computed apart: each call takes a run of a document's rows and one of its keys.

These calls serve what one call of several documents cannot: dropout, which counts rows and keys from one origin, and
variants that read the number of keys of each document, or its element of a tensor. numpy alone is imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..checks import DROPOUT_KEYS, DROPOUT_ROWS
from .packed_rows import Piece, packed_layers
from .ring_steps import RingSteps
from .shards import Layout
from .work import BLOCK, Array


@dataclass(frozen=True, kw_only=True)
class DocumentPair:
    """A run of rows of a document and a run of its keys.

    Attributes:
        rows, keys: the runs. layers: for each run the index of the packed call of its rank that it is in.
        is_own: the keys are those of the rows themselves.
    """

    rows: Piece
    keys: Piece
    layers: tuple[int, int]
    is_own: bool


def document_pairs(layout: Layout, steps: RingSteps, rank: int, owner: int) -> Iterator[DocumentPair]:
    """The pairs of runs that `rank` computes with the keys of `owner`."""
    if not steps.visits[rank, owner]:
        return
    of_rows, of_keys = packed_layers(layout, rank), packed_layers(layout, owner)
    for i, j in product(range(len(of_rows)), range(len(of_keys))):
        for number, rows in sorted(of_rows[i].items()):
            keys = of_keys[j].get(number)
            if keys is not None and meet(steps, rows, keys):
                yield DocumentPair(rows=rows, keys=keys, layers=(i, j), is_own=rank == owner and i == j)


def meet(steps: RingSteps, rows: Piece, keys: Piece) -> bool:
    """Whether a run of a document's rows visits a run of its keys."""
    return not (steps.looks_back and keys.position >= rows.position + rows.length)


def rows_before(position: int, unit: int, *, drops: bool) -> int:
    """Rows or keys ahead of a run at which a call with dropout begins: dropout counts from multiples of `unit`."""
    return position % unit if drops else 0


# ------------------------------------------------------------------------------------ calls of any rank, of equal sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTable:
    """Runs of rows, or of keys, of the calls of every rank, int32 `[ranks, calls]`.

    If a rank has fewer calls than others, its remaining runs have length 0.

    Attributes:
        at: the index of a run's first row in the rank that has it. position: its position in the document.
        ahead: rows of the call ahead of the run. length: rows of the run.
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
    """Calls of equal sizes, the same number on every rank, so that one program serves every rank.

    Attributes:
        documents: the document of each call, int32 `[ranks, calls]`.
        reach: number of a document's rows, counted from a call's first key, that contain the rows and keys of any call.
        is_own: the keys are those of the rows themselves. Only in these calls does the sink count.
    """

    rows: RunTable
    keys: RunTable
    documents: Array
    reach: int
    is_own: bool


def document_calls(
    layout: Layout, steps: RingSteps, step: int, *, drops: bool, at_once: bool, has_sink: bool
) -> list[DocumentCalls]:
    """The calls of a step of every rank, with pairs of similar sizes together.

    A call has less than twice the rows of each of its runs, and less than twice the keys, if these are more than a
    block's.

    Args:
        at_once: no two pairs of a rank in the same `DocumentCalls` have a row or a key in common.
        has_sink: pairs whose keys are those of the rows themselves are kept apart from others.
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
