"""Several ranks in one process: threads whose collectives meet at barriers, to test computations over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

SECONDS = 60
"""A rank that waits longer than this for the others fails."""


class _Meeting:
    """The memory through which ranks exchange the values of a collective."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.said: list[Any] = [None] * size
        self.kinds: list[str] = [""] * size
        self.turn = threading.Lock()  # one rank computes at a time: Triton's interpreter is not thread-safe


class ThreadRank:
    """The collectives of one of several threads.

    Attributes:
        calls: the collectives so far. received: the bytes that other ranks sent to this rank, each tensor's once.
    """

    device_type = "cpu"

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self.calls: list[str] = []
        self.received = 0

    def _exchange(self, kind: str, x: Any) -> list[Any]:
        meeting = self._meeting
        self.calls.append(kind)
        meeting.said[self.rank], meeting.kinds[self.rank] = x, kind
        meeting.turn.release()
        try:
            meeting.barrier.wait(SECONDS)
            found, kinds = list(meeting.said), list(meeting.kinds)
            meeting.barrier.wait(SECONDS)
        finally:
            meeting.turn.acquire()
        assert set(kinds) == {kind}, f"ranks meet in different collectives: {kinds}"
        return found

    def _count(self, elements: int, x: Tensor) -> None:
        self.received += elements * x.element_size()

    def all_gather(self, x: Tensor) -> Tensor:
        self._count(x.numel() * (self.size - 1), x)
        return torch.cat([part.detach() for part in self._exchange("all_gather", x)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count(x.numel() // self.size * (self.size - 1), x)
        parts = self._exchange("reduce_scatter", x.detach())
        return torch.stack([part.chunk(self.size)[self.rank] for part in parts]).sum(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        self._count(x.numel() // self.size * (self.size - 1), x)
        return torch.cat([part.chunk(self.size)[self.rank] for part in self._exchange("all_to_all", x.detach())])

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        parts = self._exchange("exchange", x.detach().split(list(sent)))
        found = [part[self.rank] for part in parts]
        assert [len(part) for part in found] == list(received)
        self._count(sum(part.numel() for rank, part in enumerate(found) if rank != self.rank), x)
        return torch.cat(found)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_reduce", x.detach())).sum(0)

    def wait(self, x: Tensor) -> Tensor:
        return x

    def gather_objects(self, x: Any) -> list[Any]:
        return self._exchange("gather_objects", x)


def grid_of(rank: ThreadRank, nodes: int) -> tuple[ThreadRank, ThreadRank]:
    """The collectives of a rank among the nodes, and among the ranks of its node; all ranks must ask for them."""
    inner = rank.size // nodes
    node, at = divmod(rank.rank, inner)
    meetings = rank.gather_objects((_Meeting(nodes), _Meeting(inner)))
    outer_meeting, inner_meeting = meetings[at][0], meetings[node * inner][1]
    for meeting in (outer_meeting, inner_meeting):
        meeting.turn = rank._meeting.turn
    return ThreadRank(outer_meeting, node, nodes), ThreadRank(inner_meeting, at, inner)


def run_ranks(size: int, of_rank: Callable[[ThreadRank], Any]) -> list[Any]:
    """The result of `of_rank` on each rank. The first error of a rank is raised, and stops the other ranks."""
    meeting = _Meeting(size)
    errors: list[BaseException] = []

    def run(rank: int) -> Any:
        with meeting.turn:
            try:
                return of_rank(ThreadRank(meeting, rank, size))
            except threading.BrokenBarrierError:
                return None
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()
                return None

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    if errors:
        raise errors[0]
    return found
