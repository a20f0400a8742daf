"""Messages between ranks that read each other's memory, simulated: streams run in any order that their waits allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generated._runtime.core.peer_messages import FLAGS, LINE, Messages, Regions

ROOM = 64


@given(st.lists(st.integers(1, ROOM // 2), max_size=60))
def test_no_region_is_taken_before_its_last_message_is_done(sizes: list[int]) -> None:
    regions, done = Regions(ROOM), 0
    in_use: list[tuple[int, int, int]] = []
    for number, size in enumerate(sizes, start=1):
        begin, last = regions.take(size, number)
        assert 0 <= begin <= ROOM - size
        assert last < number
        done = max(done, last)
        in_use = [each for each in in_use if each[0] > done]
        assert all(high <= begin or begin + size <= low for _, low, high in in_use)
        in_use.append((number, begin, begin + size))


def test_two_messages_of_half_the_room_do_not_wait_for_each_other() -> None:
    regions = Regions(ROOM)
    assert [regions.take(ROOM // 2, number)[1] for number in (1, 2, 3, 4)] == [0, 0, 1, 2]


class Streams:
    """A driver whose streams do their work when `run` lets them. Memory is one array of bytes for all ranks."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.work: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}

    def _later(self, stream: int, do: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        self.work.setdefault(stream, deque()).append((may, do))

    def number(self, flag: int) -> int:
        return int.from_bytes(self.memory[flag : flag + 4], "little")

    def wait(self, stream: int, flag: int, number: int) -> None:
        self._later(stream, lambda: None, lambda: self.number(flag) >= number)

    def write(self, stream: int, flag: int, number: int) -> None:
        self._later(stream, partial(self.put, flag, number.to_bytes(4, "little")))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        self._later(stream, lambda: self.put(target, self.memory[source : source + size]))

    def put(self, address: int, data: bytes | bytearray) -> None:
        self.memory[address : address + len(data)] = data

    def store(self, stream: int, data: bytes, address: int) -> None:
        """What a kernel does that writes a message."""
        self._later(stream, partial(self.put, address, data))

    def read(self, stream: int, address: int, size: int, found: list[bytes]) -> None:
        self._later(stream, lambda: found.append(bytes(self.memory[address : address + size])))

    def run(self, chance: random.Random) -> None:
        """Do everything, one piece of work at a time, of any stream whose first piece may be done."""
        while any(self.work.values()):
            ready = [work for work in self.work.values() if work and work[0][0]()]
            assert ready, "every stream waits"
            chance.choice(ready).popleft()[1]()


@pytest.mark.parametrize("ranks", [2, 3, 5])
@given(seed=st.integers(0, 2**32))
def test_messages_arrive_in_any_order_of_streams(ranks: int, seed: int) -> None:
    chance = random.Random(seed)
    room, span = 4 * LINE * (ranks - 1), FLAGS + 40 * LINE * ranks
    streams = Streams(2 * ranks * span)
    begins = [2 * rank * span for rank in range(ranks)]
    messages = [Messages(streams, rank, begins, room) for rank in range(ranks)]
    wanted: list[bytes] = []
    found: list[list[bytes]] = []
    for number in range(12):
        is_same = chance.random() < 0.3
        lengths = [[chance.randint(0, 2 * LINE) for _ in range(ranks)] for _ in range(ranks)]
        if is_same:
            lengths = [[own[0]] * ranks for own in lengths]
        most = max(max(own) for own in lengths)
        data = [[chance.randbytes(n) for n in own] for own in lengths]
        if is_same:
            data = [[own[0]] * ranks for own in data]
        for rank in chance.sample(range(ranks), ranks):
            kernels, copies = 2 * rank, 2 * rank + 1
            assert messages[rank].fits(most, is_same=is_same)
            puts = {peer: partial(streams.store, kernels, data[rank][peer]) for peer in range(ranks) if peer != rank}
            messages[rank].send(kernels, puts[(rank + 1) % ranks] if is_same else puts, most)
            # Every message has a target of its own; two pieces of it lie apart.
            at = begins[rank] + span + FLAGS + number * 3 * LINE * ranks
            targets: dict[int, list[tuple[int, int]]] = {}
            for peer in range(ranks):
                if peer == rank:
                    continue
                length = lengths[peer][rank]
                cut = length // 3
                targets[peer] = [(at + 3 * LINE * peer, cut), (at + 3 * LINE * peer + LINE, length - cut)]
                wanted.append(data[peer][rank])
            messages[rank].fetch(copies, targets)
            for pieces in targets.values():
                found.append([])
                for address, size in pieces:
                    streams.read(copies, address, size, found[-1])
    streams.run(chance)
    assert [b"".join(pieces) for pieces in found] == wanted
