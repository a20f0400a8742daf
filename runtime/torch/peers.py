"""Collectives among the GPUs of one host whose exchanges are copies from each other's memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from .collectives import Collectives, GridCollectives, GroupCollectives
from .peer_memory import PeerMemory, peer_memory

TRANSPORTS = ("auto", "peers", "group")


class PeerCollectives(GroupCollectives):
    """Those of a process group, but for exchanges that the copy engines can make: these leave its kernels alone.

    Recorded for a CUDA graph, or traced, all are those of the group: a message has a number, which a graph would
    repeat.
    """

    def __init__(self, group: Any, device_type: str, *, must: bool) -> None:
        """must: raise an error where the ranks cannot reach each other's memory."""
        super().__init__(group, device_type)
        self._must = must

    def _memory(self, x: Tensor, size: int) -> PeerMemory | None:
        """The memory that a message of so many bytes goes through; None: through the process group."""
        if not x.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        memory = peer_memory(self.group, self.rank, self.size)
        if memory is None and self._must:
            fail("context_parallel", "transport", "'auto' or 'group': some ranks cannot read others' memory", "'peers'")
        return memory if memory is not None and memory.takes(size) else None

    def all_to_all(self, x: Tensor) -> Tensor:
        most = x.nbytes // self.size
        memory = self._memory(x, most * (self.size - 1))
        if memory is None:
            return super().all_to_all(x)
        found = x.new_empty(x.shape)
        parts, targets = x.chunk(self.size), found.chunk(self.size)
        event = memory.exchange(parts, targets, most)
        targets[self.rank].copy_(parts[self.rank])
        return _arriving(found, event)

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int], most: int = 0) -> Tensor:
        memory = self._memory(x, most * x[:1].nbytes * (self.size - 1)) if most else None
        if memory is None:
            return super().exchange(x, received, sent, most)
        found = x.new_empty((sum(received), *x.shape[1:]))
        parts, targets = x.split(list(sent)), found.split(list(received))
        event = memory.exchange(parts, targets, most * x[:1].nbytes)
        if received[self.rank]:
            targets[self.rank].copy_(parts[self.rank])
        return _arriving(found, event)

    def all_gather(self, x: Tensor) -> Tensor:
        memory = self._memory(x, x.nbytes)
        if memory is None:
            return super().all_gather(x)
        found = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        targets = found.chunk(self.size)
        event = memory.exchange([x] * self.size, targets, x.nbytes, is_same=True)
        targets[self.rank].copy_(x)
        return _arriving(found, event)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        most = x.nbytes // self.size
        # A sum of more than two has another order in the group's own, which a captured call takes.
        memory = self._memory(x, most) if self.size == 2 else None
        if memory is None:
            return super().reduce_scatter(x)
        parts, came = x.chunk(2), x.new_empty((x.shape[0] // 2, *x.shape[1:]))
        event = memory.exchange(parts, [None if rank == self.rank else came for rank in range(2)], most)
        return _arriving(came, event, parts[self.rank])

    def wait(self, x: Tensor) -> Tensor:
        arrival = getattr(x, "arrival", None)
        if arrival is None:
            return super().wait(x)
        event, other = arrival
        torch.cuda.current_stream(x.device).wait_event(event)
        del x.arrival  # type: ignore[attr-defined]
        return x if other is None else x.add_(other)


def _arriving(x: Tensor, event: torch.cuda.Event, other: Tensor | None = None) -> Tensor:
    """A tensor that may be read behind an event, to which another is then added."""
    x.arrival = event, other  # type: ignore[attr-defined]
    return x


def transported(comm: Collectives, transport: str) -> Collectives:
    """The collectives of a layout, with exchanges through the memory of peers where `transport` has them."""
    if transport not in TRANSPORTS:
        fail("context_parallel", "transport", " or ".join(map(repr, TRANSPORTS)), repr(transport))
    if transport == "group":
        return comm
    if isinstance(comm, GridCollectives):
        return GridCollectives(_peers_of(comm.outer, transport), _peers_of(comm.inner, transport))
    found: Collectives = _peers_of(comm, transport)
    return found


def _peers_of(comm: Any, transport: str) -> Any:
    if type(comm) is not GroupCollectives or comm.device_type != "cuda" or torch.version.hip is not None:
        if transport == "peers" and type(comm) is not PeerCollectives:
            fail("context_parallel", "transport", "'auto' or 'group' where ranks are no NVIDIA GPUs", "'peers'")
        return comm
    return PeerCollectives(comm.group, comm.device_type, must=transport == "peers")
