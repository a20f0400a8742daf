# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank that the other GPUs of its host read by their copy engines, beside kernels that hold every
multiprocessor.

A rank writes what it sends into a buffer of its own (torch's symmetric memory), and then a number into the memory of
each peer. The peer's copy stream waits for that number, copies, and writes it back: then the rank may write there
again. No kernel is launched, so that nothing waits for a multiprocessor.
"""

import ctypes
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.peer_regions import Regions

MOST_BYTES = 2**28
"""Messages to all peers together that are longer than this are sent by the process group: the buffer has room for two
of the longest."""

LEAST_ROOM = 2**24
FLAGS, DONE = 4096, 2048
"""Bytes of flags at the begin of the buffer, and where those begin by which peers say that they have copied."""

MOST_RANKS = DONE // 4
_WAIT_UNTIL_AT_LEAST = 0


class Driver:
    """The calls of the CUDA driver that make a stream wait for a number in memory, write one, and copy."""

    def __init__(self) -> None:
        """Raises `OSError` or `AttributeError` where there is no such driver."""
        library = ctypes.CDLL("libcuda.so.1")
        pointer, number, size = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        self._copy = library.cuMemcpyDtoDAsync_v2
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, pointer, number, ctypes.c_uint]
        self._copy.argtypes = [pointer, pointer, size, ctypes.c_void_p]

    def wait(self, stream: int, flag: int, number: int) -> None:
        """Later work of the stream waits until the number at `flag` is at least this one."""
        _check(self._wait(stream, flag, number, _WAIT_UNTIL_AT_LEAST), "cuStreamWaitValue32")

    def write(self, stream: int, flag: int, number: int) -> None:
        """Write a number, behind all earlier work of the stream."""
        _check(self._write(stream, flag, number, 0), "cuStreamWriteValue32")

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Copy bytes on the device, or from another one."""
        _check(self._copy(target, source, size, stream), "cuMemcpyDtoDAsync")


def _check(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} returned CUDA error {status}")


@cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()


class PeerMemory:
    """The buffers of the ranks of a process group, all of one size, and the streams that copy from them.

    All ranks must send messages of the same length in the same order.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        import torch.distributed as dist

        self._dist, self._group, self.rank, self.size = dist, group, rank, size
        self.device = torch.cuda.current_device()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._driver = driver()
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._count = 0
        self._open(LEAST_ROOM)

    def _open(self, room: int) -> None:
        """Make buffers with so much room, in place of those that there are: waits for all ranks."""
        import torch.distributed._symmetric_memory as symmetric

        if self._count:
            # Nobody may still copy from a buffer that is given up.
            torch.cuda.synchronize(self.device)
            self._dist.barrier(self._group, device_ids=[self.device])
            torch.cuda.synchronize(self.device)
        self._count = 0
        self._regions = Regions(room)
        self._buffer = symmetric.empty(FLAGS + room, dtype=torch.uint8, device=torch.device("cuda", self.device))
        self._handle = symmetric.rendezvous(self._buffer, self._group.group_name)
        self._buffer[:FLAGS].zero_()
        views = [self._handle.get_buffer(each, (FLAGS + room,), torch.uint8) for each in range(self.size)]
        self._begins = [view.data_ptr() for view in views]
        torch.cuda.synchronize(self.device)
        self._dist.barrier(self._group, device_ids=[self.device])
        torch.cuda.synchronize(self.device)

    def takes(self, size: int) -> bool:
        """Whether messages of so many bytes, to all peers together, are exchanged here."""
        return size <= MOST_BYTES and torch.cuda.current_device() == self.device

    def exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor | None], most: int, *, is_same: bool = False
    ) -> torch.cuda.Event:
        """Send each peer a tensor, and copy what peers send to contiguous tensors, which may be read behind the event.

        Args:
            sent, received: by rank; None for nothing, and for this rank. `sent[rank]` is not read.
            most: bytes of the longest message between two ranks. is_same: all peers are sent the same tensor.
        """
        places = 1 if is_same else self.size - 1
        stride = max(-(-most // 512), 1) * 512
        if 2 * places * stride > self._regions.room:
            self._open(1 << (2 * places * stride - 1).bit_length())
        stream = torch.cuda.current_stream(self.device)
        raw, copies = stream.cuda_stream, self._stream.cuda_stream
        self._count += 1
        count, own, driver = self._count, self._begins[self.rank], self._driver
        begin, free_from = self._regions.take(places * stride, count)
        if free_from:
            for peer in self._peers:
                driver.wait(raw, own + DONE + 4 * peer, free_from)
        begin += FLAGS
        for peer in self._peers[:places]:
            place = 0 if is_same else peer - (peer > self.rank)
            self._put(raw, begin + place * stride, sent[peer])
        for peer in self._peers:
            driver.write(raw, self._begins[peer] + 4 * self.rank, count)
        # The targets may be memory that earlier work of this stream still reads.
        self._stream.wait_event(stream.record_event())
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            driver.wait(copies, own + 4 * peer, count)
            target = received[peer]
            if target is not None and target.numel():
                place = 0 if is_same else self.rank - (self.rank > peer)
                driver.copy(copies, target.data_ptr(), self._begins[peer] + begin + place * stride, target.nbytes)
        for peer in self._peers:
            driver.write(copies, self._begins[peer] + DONE + 4 * self.rank, count)
        found: torch.cuda.Event = self._stream.record_event()
        return found

    def _put(self, stream: int, begin: int, x: Tensor) -> None:
        """Copy a tensor into the buffer."""
        if x.is_contiguous():
            if x.numel():
                self._driver.copy(stream, self._begins[self.rank] + begin, x.data_ptr(), x.nbytes)
            return
        self._buffer[begin : begin + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


_memories: "WeakKeyDictionary[Any, PeerMemory | None]" = WeakKeyDictionary()


def peer_memory(group: Any, rank: int, size: int) -> PeerMemory | None:
    """The memory that the ranks of a process group share, made once for each; None where they cannot reach it.

    All ranks must ask for it, and get it or do not.
    """
    if group not in _memories:
        _memories[group] = _made(group, rank, size)
    return _memories[group]


def _made(group: Any, rank: int, size: int) -> PeerMemory | None:
    import torch.distributed as dist

    told: list[Any] = [None] * size
    dist.all_gather_object(told, _whereabouts(), group=group)
    hosts, devices = zip(*told, strict=True)
    if len(set(hosts)) > 1 or None in devices or len(set(devices)) < size or not 1 < size <= MOST_RANKS:
        return None
    others = [device for device in devices if device != devices[rank]]
    dist.all_gather_object(told, all(torch.cuda.can_device_access_peer(devices[rank], x) for x in others), group=group)
    if not all(told):
        return None
    # Collectives of a graph are the process group's own: what connects its ranks is set up while nothing is captured.
    _connect(group, size)
    memory: PeerMemory | None = None
    with suppress(RuntimeError, ImportError, AttributeError, OSError):
        memory = PeerMemory(group, rank, size)
    dist.all_gather_object(told, memory is not None, group=group)
    return memory if all(told) else None


def _whereabouts() -> tuple[str, int | None]:
    """Which host this is, and the GPU; None for a GPU whose driver lacks the calls that are needed."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = (
        f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''} {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    )
    try:
        driver()
    except (OSError, AttributeError):
        return host, None
    return host, torch.cuda.current_device()


def _connect(group: Any, size: int) -> None:
    import torch.distributed as dist

    x = torch.zeros(size, dtype=torch.float32, device="cuda")
    dist.all_to_all_single(torch.empty_like(x), x, group=group)
    dist.all_gather_into_tensor(x.new_empty(size * size), x, group=group)
    dist.reduce_scatter_tensor(x.new_empty(1), x, group=group)
