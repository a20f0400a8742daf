# SPDX-License-Identifier: Apache-2.0
"""Regions of a buffer that messages take one after the other. No framework is imported."""

from collections import deque


class Regions:
    """A buffer of `room` bytes, used from its begin to its end and then again. Messages are numbered from 1 on."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._next = 0
        self._taken: deque[tuple[int, int, int]] = deque()

    def take(self, size: int, number: int) -> tuple[int, int]:
        """Where message `number` begins, and the number of the last message that must be done before it is written; 0
        if none must be.

        >>> regions = Regions(100)
        >>> [regions.take(size, number) for number, size in enumerate((40, 40, 40, 20), start=1)]
        [(0, 0), (40, 0), (0, 1), (40, 2)]
        """
        begin = self._next if self._next + size <= self.room else 0
        self._next = begin + size
        last = 0
        # Regions are taken in turn: those in the way are the oldest ones.
        while self._taken and self._is_in_the_way(begin, size):
            last = self._taken.popleft()[2]
        self._taken.append((begin, begin + size, number))
        return begin, last

    def _is_in_the_way(self, begin: int, size: int) -> bool:
        return any(low < begin + size and begin < high for low, high, _ in self._taken)
