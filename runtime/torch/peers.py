"""Collectives among the GPUs of one host whose exchanges are copies from each other's memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from .collectives import Collectives, GridCollectives, GroupCollectives, arriving
from .peer_memory import PeerMemory, peer_memory
from .words import copy_words

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

    def _memory(self, x: Tensor, most: int, *, is_same: bool = False) -> PeerMemory | None:
        """The memory that messages like x go through, the longest to a peer of so many bytes; None if they go through
        the process group."""
        if not x.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        memory = peer_memory(self.group, self.rank, self.size)
        if memory is None and self._must:
            fail("context_parallel", "transport", "'auto' or 'group': some ranks cannot read others' memory", "'peers'")
        return memory if memory is not None and memory.takes(most, is_same=is_same) else None

    def deliver(
        self, sent: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], most: int, like: Tensor
    ) -> torch.cuda.Event | None:
        """Copy tensors to contiguous targets of other ranks. What this rank gets may be read behind the event; None if
        they must go through the process group.

        Args:
            sent: for each rank tensors with the elements of its targets, in that order; those for this rank are copied
                at once, each to a target of its shape.
            most: bytes of the longest message of any rank to another one. like: has the targets' dtype and device.
        """
        memory = self._memory(like, most)
        if memory is None:
            return None
        event = memory.exchange(dict(enumerate(sent)), dict(enumerate(targets)), most, like.dtype)
        for target, x in zip(targets[self.rank], sent[self.rank], strict=True):
            copy_words(target, x)
        return event

    def all_to_all(self, x: Tensor) -> Tensor:
        found = x.new_empty(x.shape)
        parts, targets = ([[part] for part in each.chunk(self.size)] for each in (x, found))
        event = self.deliver(parts, targets, x.nbytes // self.size, x)
        return super().all_to_all(x) if event is None else arriving(found, event.wait)

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int], most: int = 0) -> Tensor:
        if most:
            found = x.new_empty((sum(received), *x.shape[1:]))
            pairs = ((x, sent), (found, received))
            parts, targets = ([[part] for part in each.split(list(counts))] for each, counts in pairs)
            event = self.deliver(parts, targets, most * x[:1].nbytes, x)
            if event is not None:
                return arriving(found, event.wait)
        return super().exchange(x, received, sent, most)

    def all_gather(self, x: Tensor) -> Tensor:
        memory = self._memory(x, x.nbytes, is_same=True)
        if memory is None:
            return super().all_gather(x)
        found = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        targets = found.chunk(self.size)
        event = memory.exchange(x, {rank: [target] for rank, target in enumerate(targets)}, x.nbytes, x.dtype)
        targets[self.rank].copy_(x)
        return arriving(found, event.wait)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        most = x.nbytes // self.size
        # A sum of more than two has another order in the group's own, which a captured call takes.
        memory = self._memory(x, most) if self.size == 2 else None
        if memory is None:
            return super().reduce_scatter(x)
        parts, came, peer = x.chunk(2), x.new_empty((x.shape[0] // 2, *x.shape[1:])), 1 - self.rank
        event = memory.exchange({peer: [parts[peer]]}, {peer: [came]}, most, x.dtype)

        def add() -> None:
            event.wait()
            came.add_(parts[self.rank])

        return arriving(came, add)


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
