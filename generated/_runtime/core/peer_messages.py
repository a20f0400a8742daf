# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs that read each other's memory. No framework is imported.

A rank writes what it sends into a buffer of its own, and then the message's number into a flag in the memory of each
peer. A stream of the peer waits for that number, copies, and writes it back into a second flag: when all peers have
done so, the rank may write there again. Streams wait and copy without a kernel: nothing needs a multiprocessor.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

FLAGS, DONE = 4096, 2048
"""Bytes of flags at the begin of a buffer, and where those begin by which peers say that they have copied."""

MOST_RANKS = DONE // 4

LINE = 512
"""Messages begin at multiples of so many bytes."""


class Driver(Protocol):
    """What streams do, each in order."""

    def wait(self, stream: int, flag: int, number: int) -> None:
        """Later work of the stream waits until the number at `flag` is at least this one."""

    def write(self, stream: int, flag: int, number: int) -> None:
        """Write a number, behind all earlier work of the stream."""

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Copy bytes on the device, or from another one."""


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


class Messages:
    """The messages of one rank. All ranks send as many, of the same longest length, in the same order.

    Args:
        begins: where the buffer of each rank is, FLAGS bytes of zeros and `room` bytes.
    """

    def __init__(self, driver: Driver, rank: int, begins: Sequence[int], room: int) -> None:
        self.rank, self.size, self._driver, self._begins = rank, len(begins), driver, begins
        self._peers = [(rank + step) % self.size for step in range(1, self.size)]
        self._regions, self.count, self._at, self._stride = Regions(room), 0, 0, 0

    def fits(self, most: int, *, is_same: bool) -> bool:
        """Whether there is room for two messages of which the longest to a peer has so many bytes."""
        return 2 * self._size_of(most, is_same=is_same) <= self._regions.room

    def _size_of(self, most: int, *, is_same: bool) -> int:
        return max(-(-most // LINE), 1) * LINE * (1 if is_same else self.size - 1)

    def send(self, stream: int, puts: Mapping[int, Callable[[int], None]] | Callable[[int], None], most: int) -> None:
        """Begin a message.

        Args:
            stream: what it is written by. most: its longest length to a peer, of all ranks.
            puts: what writes it to an address, for each peer; a single one for all of them.
        """
        is_same, own = callable(puts), self._begins[self.rank]
        size = self._size_of(most, is_same=is_same)
        self.count += 1
        begin, last = self._regions.take(size, self.count)
        self._at, self._stride = FLAGS + begin, 0 if is_same else size // (self.size - 1)
        if last:
            for peer in self._peers:
                self._driver.wait(stream, own + DONE + 4 * peer, last)
        if callable(puts):
            puts(own + self._at)
        else:
            for peer, put in puts.items():
                put(own + self._at + self._stride * _place(peer, self.rank))
        for peer in self._peers:
            self._driver.write(stream, self._begins[peer] + 4 * self.rank, self.count)

    def fetch(self, stream: int, targets: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Copy what peers sent in the message that was begun last, by another stream.

        Args:
            targets: for each peer where to, and how many bytes, one behind the other.
        """
        own, driver = self._begins[self.rank], self._driver
        for peer in self._peers:
            driver.wait(stream, own + 4 * peer, self.count)
            source = self._begins[peer] + self._at + self._stride * _place(self.rank, peer)
            for target, size in targets.get(peer, ()):
                if size:
                    driver.copy(stream, target, source, size)
                source += size
        for peer in self._peers:
            driver.write(stream, self._begins[peer] + DONE + 4 * self.rank, self.count)


def _place(peer: int, rank: int) -> int:
    """The place of the message to a peer among those of a rank."""
    return peer - (peer > rank)
