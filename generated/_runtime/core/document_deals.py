# SPDX-License-Identifier: Apache-2.0
"""How packed documents are dealt to ranks, so that each rank has at most one run of rows of each document.

A rank then computes all its rows in one packed call. numpy alone is imported.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub

import numpy as np

from .packed_rows import count_calls
from .shards import BALANCED, Chunk, Dealt, RowWork
from .work import BLOCK, Array

CUTS = (BLOCK, 16, 1)
"""Documents are cut at multiples of the first of these numbers that balances the ranks: kernels compute whole blocks of
rows, and dropout draws random words for 16 rows at once."""


def deal_documents(rows: RowWork, seq: int, ranks: int, begins: Array) -> Iterator[Dealt]:
    """A deal of whole documents, with at most two cuts for each rank; yields nothing if the last rank has no row.

    Documents form a line, sorted by their work per row, the most first. Each rank takes the same number of rows from
    the two ends of the line. As many of them come from the front as make the rank's work the mean.

    Args:
        begins: the first row of each document, and the end of the last, int64.
    """
    local = -(-seq // ranks)
    if seq <= local * (ranks - 1):
        return
    line = _Line(rows, begins)
    runs, loads = [], []
    for rank in range(ranks - 1):
        taken, load = line.take(local, line.work / (ranks - rank))
        runs.append(taken)
        loads.append(load)
    runs.append(_runs(line.begins, line.ends))
    loads.append(line.work)
    calls = count_calls(begins.tolist(), runs)
    if local * ranks > seq:
        runs[-1].append((seq, local * ranks - seq))
    table = np.zeros((ranks, max(map(len, runs)), 2), np.int64)
    for rank, own in enumerate(runs):
        table[rank, : len(own)] = own
    yield Dealt(table[..., 0], table[..., 1], np.array(loads), calls)


class _Line:
    """The remaining rows of the documents, sorted by their work per row, the most first.

    Attributes:
        begins, ends: the remaining rows of each document. origins: the first row of each whole document.
        late: rows at the end of a document have more work than rows at its beginning. If so, the front of the line
            gives rows from a document's end, and the back gives rows from its beginning; else the reverse.
    """

    def __init__(self, rows: RowWork, bounds: Array) -> None:
        bounds = bounds[np.append(True, np.diff(bounds) > 0)]
        begins, ends = bounds[:-1], bounds[1:]
        first, middle, last = (rows.until(each) for each in (begins, (begins + ends) / 2, ends))
        order = np.argsort(-(last - first) / (ends - begins), kind="stable")
        self.late = bool((last - middle).sum() >= (middle - first).sum())
        self.begins: list[int] = begins[order].tolist()
        self.ends: list[int] = ends[order].tolist()
        self.origins = list(self.begins)
        self._before: list[float] = first[order].tolist()
        self._until_end: list[float] = last[order].tolist()
        self._edges: list[float] = rows.edges.tolist()
        self._total: list[float] = rows.total.tolist()
        self._rates: list[float] = (np.diff(rows.total) / np.diff(rows.edges)).tolist()
        self._measure()

    def _measure(self) -> None:
        """Sum the rows and the work ahead of each document of the line."""
        self._rows: list[int] = list(accumulate(map(sub, self.ends, self.begins), initial=0))
        self._work: list[float] = list(accumulate(map(sub, self._until_end, self._before), initial=0.0))

    def _until(self, row: int) -> float:
        """The work of all rows before this one."""
        at = bisect_right(self._edges, row, 1, len(self._rates)) - 1
        return self._total[at] + self._rates[at] * (row - self._edges[at])

    @property
    def work(self) -> float:
        """The work of the remaining rows."""
        return self._work[-1]

    def take(self, count: int, wanted: float) -> tuple[list[Chunk], float]:
        """Take `count` rows with about the wanted work; returns their runs and their work."""
        front = self._front(count, wanted)
        for unit in CUTS:
            loads = {near: self._load(near, count) for near in self._rounded(front, unit) if 0 <= near <= count}
            best = min(loads, key=lambda near: abs(loads[near] - wanted), default=front)
            if best in loads and abs(loads[best] - wanted) <= BALANCED / 4 * wanted:
                return self._taken(best, count), loads[best]
        load = self._load(front, count)
        return self._taken(front, count), load

    def _front(self, count: int, wanted: float) -> int:
        """The fewest rows from the front with which `count` rows have at least the wanted work; `count` if none have.

        A bisection in which every other step interpolates, because the work grows almost linearly within a document.
        """
        low, high = 0, count
        less, more = self._load(low, count), self._load(high, count)
        if less >= wanted:
            return low
        by_line = True
        while high - low > 1:
            middle = (low + high) // 2
            if by_line and more > less:
                along = low + int((wanted - less) / (more - less) * (high - low))
                middle = min(max(along, low + 1), high - 1)
            load = self._load(middle, count)
            by_line = not by_line
            low, less, high, more = (middle, load, high, more) if load < wanted else (low, less, middle, load)
        return high

    def _load(self, front: int, count: int) -> float:
        """The work of `count` rows, `front` of them from the front of the line and the rest from its back."""
        first, of_first = self._at_front(front)
        last, of_last = self._at_back(count - front)
        load = self._work[first] + self.work - self._work[last]
        if of_first:
            load += self._part(first, of_first, at_end=self.late)
        if of_last:
            load += self._part(last - 1, of_last, at_end=not self.late)
        return load

    def _part(self, document: int, count: int, *, at_end: bool) -> float:
        """The work of `count` rows at a document's end, or at its beginning."""
        if at_end:
            return self._until_end[document] - self._until(self.ends[document] - count)
        return self._until(self.begins[document] + count) - self._before[document]

    def _at_front(self, count: int) -> tuple[int, int]:
        """The number of whole documents in the line's first `count` rows, and the rows of the next one."""
        at = bisect_right(self._rows, count) - 1
        return at, count - self._rows[at]

    def _at_back(self, count: int) -> tuple[int, int]:
        """The first document that is whole in the line's last `count` rows, and the rows of the one before it."""
        begin = self._rows[-1] - count
        at = bisect_left(self._rows, begin)
        return at, self._rows[at] - begin

    def _rounded(self, front: int, unit: int) -> list[int]:
        """Counts of rows from the front, near `front`, that cut a document at a multiple of `unit` of its rows."""
        at, rest = self._at_front(front)
        if rest == 0:
            return [front]
        cut = (self.ends[at] - rest if self.late else self.begins[at] + rest) - self.origins[at]
        return [front + (move if self.late else -move) for move in (cut % unit, cut % unit - unit)]

    def _taken(self, front: int, count: int) -> list[Chunk]:
        """Remove `count` rows from the line, `front` of them from its front; returns their runs."""
        (first, of_first), (last, of_last) = self._at_front(front), self._at_back(count - front)
        begins, ends = self.begins[:first] + self.begins[last:], self.ends[:first] + self.ends[last:]
        for at, rest, of_front in ((first, of_first, True), (last - 1, of_last, False)):
            if rest == 0:
                continue
            begin, end = self.begins[at], self.ends[at]
            if self.late == of_front:
                begin = self.ends[at] = end - rest
                self._until_end[at] = self._until(begin)
            else:
                end = self.begins[at] = begin + rest
                self._before[at] = self._until(end)
            begins.append(begin)
            ends.append(end)
        kept = [i for i in range(first, last) if self.begins[i] < self.ends[i]]
        self.begins, self.ends, self.origins = ([x[i] for i in kept] for x in (self.begins, self.ends, self.origins))
        self._before, self._until_end = ([x[i] for i in kept] for x in (self._before, self._until_end))
        self._measure()
        return _runs(begins, ends)


def _runs(begins: Sequence[int], ends: Sequence[int]) -> list[Chunk]:
    """Runs of rows as (begin, length) in order, adjacent ones joined."""
    found: list[Chunk] = []
    for begin, end in sorted(zip(begins, ends, strict=True)):
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], end - found[-1][0])
        else:
            found.append((begin, end - begin))
    return found
