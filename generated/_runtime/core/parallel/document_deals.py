# SPDX-License-Identifier: Apache-2.0
"""How packed documents are dealt to ranks, so that each rank has at most one run of rows of each document.

A rank then computes all its rows in one packed call. numpy alone is imported.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from .packed_rows import count_calls, joined
from .shards import BALANCED, Chunk, Dealt, RowWork
from .work import BLOCK, Array

CUTS = (BLOCK, 16, 1)
"""Documents are cut at multiples of the first of these numbers that balances the ranks: kernels compute whole blocks of
rows, and dropout draws random words for 16 rows at once."""


def deal_documents(rows: RowWork, seq: int, ranks: int, begins: Array) -> Iterator[Dealt]:
    """A deal of whole documents, with at most two cuts for each rank; yields nothing if the last rank has no row.

    Documents form a line, sorted by their work per row, the most first. Each rank takes the same number of rows from
    the two ends of the line. As many of them come from the front as make the rank's work the mean. If no number does,
    the rank takes adjacent rows from inside the line. Of all places for them, those at the ends included, one has the
    mean work: the work changes little from place to place, and over all places, with the line closed to a circle, its
    average is the mean.

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
    runs.append(joined(sorted(each.run for each in line.documents)))
    loads.append(line.work)
    calls = count_calls(begins.tolist(), runs)
    if local * ranks > seq:
        runs[-1].append((seq, local * ranks - seq))
    table = np.zeros((ranks, max(map(len, runs)), 2), np.int64)
    for rank, own in enumerate(runs):
        table[rank, : len(own)] = own
    yield Dealt(table[..., 0], table[..., 1], np.array(loads), calls)


@dataclass(slots=True)
class _Document:
    """The remaining rows of a document, from `begin` up to `end`.

    Attributes:
        origin: the first row of the whole document. until_begin, until_end: the work of all rows before these two.
    """

    begin: int
    end: int
    origin: int
    until_begin: float
    until_end: float

    @property
    def run(self) -> Chunk:
        return self.begin, self.end - self.begin


class _Line:
    """The remaining rows of the documents, sorted by their work per row, the most first.

    Attributes:
        documents: those with remaining rows.
        late: rows at the end of a document have more work than rows at its beginning. If so, the front of the line
            gives rows from a document's end, and the back gives rows from its beginning; else the reverse.
    """

    def __init__(self, rows: RowWork, bounds: Array) -> None:
        bounds = bounds[np.append(True, np.diff(bounds) > 0)]
        begins, ends = bounds[:-1], bounds[1:]
        first, middle, last = (rows.until(each) for each in (begins, (begins + ends) / 2, ends))
        order = np.argsort(-(last - first) / (ends - begins), kind="stable")
        self.late = bool((last - middle).sum() >= (middle - first).sum())
        columns = [x[order].tolist() for x in (begins, ends, begins, first, last)]
        self.documents = [_Document(*values) for values in zip(*columns, strict=True)]
        self._edges: list[float] = rows.edges.tolist()
        self._total: list[float] = rows.total.tolist()
        self._rates: list[float] = (np.diff(rows.total) / np.diff(rows.edges)).tolist()
        self._measure()

    def _measure(self) -> None:
        """Sum the rows and the work ahead of each document of the line."""
        self._rows = list(accumulate([each.end - each.begin for each in self.documents], initial=0))
        self._work = list(accumulate([each.until_end - each.until_begin for each in self.documents], initial=0.0))

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
        place, last = self._front(count, wanted), count
        load_of: Callable[[int, int], float] = self._load
        taken: Callable[[int, int], list[Chunk]] = self._taken
        if abs(load_of(place, count) - wanted) > BALANCED / 4 * wanted:
            begin = self._inside(count, wanted)
            if begin is not None:
                place, last = begin, self._rows[-1] - count
                load_of, taken = self._load_inside, self._taken_inside
        for unit in CUTS:
            loads = {near: load_of(near, count) for near in self._rounded(place, unit) if 0 <= near <= last}
            if not loads:
                continue
            best = min(loads, key=lambda near: abs(loads[near] - wanted))
            if abs(loads[best] - wanted) <= BALANCED / 4 * wanted:
                return taken(best, count), loads[best]
        load = load_of(place, count)
        return taken(place, count), load

    def _inside(self, count: int, wanted: float) -> int | None:
        """A row of the line from which on `count` rows have about the wanted work; None if there is none."""
        last = self._rows[-1] - count
        # Between these places the load changes in one direction, or little.
        places = sorted({0, last, *(x for edge in self._rows for x in (edge, edge - count) if 0 < x < last)})
        excess = [self._load_inside(place, count) - wanted for place in places]
        for (low, high), (at_low, at_high) in zip(pairwise(places), pairwise(excess), strict=True):
            if at_low * at_high > 0:
                continue
            while high - low > 1:
                middle = (low + high) // 2
                is_alike = (self._load_inside(middle, count) - wanted) * at_low > 0
                low, high = (middle, high) if is_alike else (low, middle)
            return high
        return None

    def _load_inside(self, begin: int, count: int) -> float:
        """The work of `count` rows from row `begin` of the line on."""
        return self._until_line(begin + count) - self._until_line(begin)

    def _until_line(self, count: int) -> float:
        """The work of the line's first rows."""
        at, rest = self._at_front(count)
        if rest == 0:
            return self._work[at]
        document = self.documents[at]
        if self.late:
            return self._work[at] + document.until_end - self._until(document.end - rest)
        return self._work[at] + self._until(document.begin + rest) - document.until_begin

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
        return self._until_line(front) + self.work - self._until_line(self._rows[-1] - (count - front))

    def _at_front(self, count: int) -> tuple[int, int]:
        """The number of whole documents in the line's first `count` rows, and the rows of the next one."""
        at = bisect_right(self._rows, count) - 1
        return at, count - self._rows[at]

    def _rounded(self, front: int, unit: int) -> list[int]:
        """Counts of rows from the front, near `front`, that cut a document at a multiple of `unit` of its rows."""
        at, rest = self._at_front(front)
        if rest == 0:
            return [front]
        document = self.documents[at]
        cut = (document.end - rest if self.late else document.begin + rest) - document.origin
        return [front + (move if self.late else -move) for move in (cut % unit, cut % unit - unit)]

    def _taken(self, front: int, count: int) -> list[Chunk]:
        """Remove `count` rows from the line, `front` of them from its front; returns their runs."""
        first = self._removed(0, front)
        back = count - front
        return joined(sorted(first + self._removed(self._rows[-1] - back, back)))

    def _taken_inside(self, begin: int, count: int) -> list[Chunk]:
        """Remove `count` rows from row `begin` of the line on; returns their runs."""
        return joined(sorted(self._removed(begin, count)))

    def _removed(self, begin: int, count: int) -> list[Chunk]:
        """Remove `count` rows from row `begin` of the line on; returns those of each document."""
        removed: list[Chunk] = []
        left: list[_Document] = []
        for ahead, document in zip(self._rows[:-1], self.documents, strict=True):
            # The document's rows that are removed, counted in the order of the line.
            rows = document.end - document.begin
            first, last = (min(max(row - ahead, 0), rows) for row in (begin, begin + count))
            if first == last:
                left.append(document)
                continue
            low, high = (rows - last, rows - first) if self.late else (first, last)
            low, high = document.begin + low, document.begin + high
            removed.append((low, high - low))
            rest = [(document.begin, low), (high, document.end)]
            for part in reversed(rest) if self.late else rest:
                if part[0] < part[1]:
                    left.append(_Document(*part, document.origin, *map(self._until, part)))
        self.documents = left
        self._measure()
        return removed
