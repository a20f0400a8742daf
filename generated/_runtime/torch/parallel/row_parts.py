# SPDX-License-Identifier: Apache-2.0
"""The rows of a rank that one call computes: a run of dense rows, or rows of several packed documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.parallel.packed_rows import KeyedCall, PackedCall, key_rows, keyed_calls, packed_calls
from ...core.parallel.shards import Chunk, Layout, rows_ahead
from .exchange import kept


class RowPart(Protocol):
    """Rows of a rank that are computed by one call, which may put rows of zeros before some of them."""

    def take(self, x: Tensor, value: float = 0.0) -> Tensor:
        """These rows of `[local, ...]`; rows put before them are filled with `value`."""

    def own(self, part: Tensor) -> Tensor:
        """The rows of a result of the call that are rows of this rank."""

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a result of the call to these rows of `[local, ...]`."""

    @property
    def span(self) -> Chunk | None:
        """The first row and their number, if they are consecutive rows of the rank and no row is put before them."""

    def keys(self, x: Tensor, axis: int = 0) -> Tensor:
        """The keys of the call, from an axis that has all keys that are here; a view."""


@dataclass(frozen=True)
class Run:
    """A run of rows, which begins at row `at` of its rank. A call puts `ahead` rows before it."""

    run: Chunk
    at: int
    ahead: int

    @property
    def begin(self) -> int:
        """The first row of the call."""
        return self.run[0] - self.ahead

    @property
    def length(self) -> int:
        """Rows of the call."""
        return self.run[1] + self.ahead

    def take(self, x: Tensor, value: float = 0.0) -> Tensor:
        rows = x.narrow(0, self.at, self.run[1])
        return rows if self.ahead == 0 else torch.cat([x.new_full((self.ahead, *x.shape[1:]), value), rows])

    def own(self, part: Tensor) -> Tensor:
        return part if self.ahead == 0 else part[self.ahead :]

    def put(self, whole: Tensor, part: Tensor) -> None:
        whole.narrow(0, self.at, self.run[1]).copy_(self.own(part))

    def add(self, whole: Tensor, part: Tensor) -> None:
        """Add the rows of a result to these rows of `[local, ...]`."""
        whole.narrow(0, self.at, self.run[1]).add_(self.own(part))

    @property
    def span(self) -> Chunk | None:
        return (self.at, self.run[1]) if self.ahead == 0 else None

    def keys(self, x: Tensor, axis: int = 0) -> Tensor:  # noqa: ARG002  # a dense call has all keys
        return x


class Documents:
    """Rows of several packed documents, at most one run of each."""

    def __init__(self, call: PackedCall, device: torch.device) -> None:
        def there(rows: Any) -> Tensor:
            return torch.as_tensor(rows, device=device)

        self.cu_seqlens, self.q_offset = _numbers(call.begins, device), _numbers(call.offsets, device)
        self.length, self.span, self._sequence_span = len(call.rows), call.span, call.sequence_span
        # Contiguous rows need no table: `take` returns a view of them.
        self._rows = None if call.span is not None else there(call.rows[call.own])
        self._own = None if len(call.own) == self.length else there(call.own)
        self._sequence_rows = None if call.sequence_span is not None else there(call.sequence_rows)

    def take(self, x: Tensor, value: float = 0.0) -> Tensor:
        if self._rows is None:
            assert self.span is not None
            return x.narrow(0, *self.span)
        rows = x.index_select(0, self._rows)
        if self._own is None:
            return rows
        return x.new_full((self.length, *x.shape[1:]), value).index_copy_(0, self._own, rows)

    def own(self, part: Tensor) -> Tensor:
        return part if self._own is None else part.index_select(0, self._own)

    def put(self, whole: Tensor, part: Tensor) -> None:
        if self._rows is None:
            assert self.span is not None
            whole.narrow(0, *self.span).copy_(part)
        else:
            whole.index_copy_(0, self._rows, self.own(part).to(whole.dtype))

    def add(self, whole: Tensor, part: Tensor) -> None:
        """Add the rows of a result to these rows of `[local, ...]`."""
        if self._rows is None:
            self.take(whole).add_(part)
        else:
            whole.index_add_(0, self._rows, self.own(part))

    def of_sequence(self, x: Tensor, axis: int) -> Tensor:
        """These rows, taken from an axis that has the rows of the whole call."""
        if self._sequence_rows is None:
            assert self._sequence_span is not None
            return x.narrow(axis, *self._sequence_span)
        return x.index_select(axis, self._sequence_rows)


class KeyedDocuments(Documents):
    """Rows of several packed documents, and the keys of these documents among those of all documents of the rank."""

    def __init__(self, found: KeyedCall, device: torch.device) -> None:
        super().__init__(found.call, device)
        self.cu_seqlens_k, self._keys = _numbers(found.begins, device), found.keys

    def keys(self, x: Tensor, axis: int = 0) -> Tensor:
        return x.narrow(axis, *self._keys)


@dataclass(frozen=True)
class DocumentKeys:
    """The keys of the documents that a rank has rows of, on a device.

    Attributes:
        rows: which rows of the whole call they are. places: where they are among the rows of all ranks. Both are None
            if they are all rows.
    """

    rows: Tensor | None
    places: Tensor | None

    def of_sequence(self, x: Tensor, axis: int) -> Tensor:
        """These keys, taken from an axis that has the rows of the whole call."""
        return x if self.rows is None else x.index_select(axis, self.rows)


def dense_parts(layout: Layout, rank: int, *, drops: bool) -> list[Run]:
    """The calls of a rank with dense rows, one for each run; with dropout they may begin some rows before the run."""

    def make() -> list[Run]:
        runs, found, at = layout.runs(rank), [], 0
        for run in runs:
            found.append(Run(run, at, rows_ahead(layout, run[0]) if drops else 0))
            at += run[1]
        return found

    parts: list[Run] = kept(layout, ("runs", rank, drops), make)
    return parts


def packed_parts(layout: Layout, rank: int, device: torch.device, *, drops: bool) -> list[Documents]:
    """The calls of a rank that has packed rows, made once for each layout."""
    key = ("packed calls", rank, drops, device)
    parts: list[Documents] = kept(
        layout, key, lambda: [Documents(call, device) for call in packed_calls(layout, rank, drops=drops)]
    )
    return parts


def keyed_parts(
    layout: Layout, rank: int, device: torch.device, *, drops: bool, numbered: bool
) -> list[KeyedDocuments]:
    """The same calls with the keys of their documents; `numbered`: as for `keyed_calls`."""

    def make() -> list[KeyedDocuments]:
        return [KeyedDocuments(call, device) for call in keyed_calls(layout, rank, drops=drops, numbered=numbered)]

    parts: list[KeyedDocuments] = kept(layout, ("keyed calls", rank, drops, numbered, device), make)
    return parts


def document_keys(layout: Layout, rank: int, device: torch.device) -> DocumentKeys:
    """The keys of all documents that a rank has rows of, made once for each layout."""

    def make() -> DocumentKeys:
        found = key_rows(layout, rank)
        if found.count == layout.seq:
            return DocumentKeys(None, None)
        of_all = (torch.as_tensor(x, device=device) for x in (found.rows, layout.places[found.rows]))
        return DocumentKeys(*of_all)

    keys: DocumentKeys = kept(layout, ("document keys", rank, device), make)
    return keys


def _numbers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
