"""Memory of one rank that the other GPUs of its host read by their copy engines, beside kernels that hold every
multiprocessor: torch's symmetric memory, and the messages of `core.peer_messages` in it."""

import ctypes
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.peer_messages import FLAGS, MOST_RANKS, Messages
from .words import copy_words

MOST_BYTES = 2**28
"""Messages of a rank to all its peers that are longer than this are sent by the process group: the buffer has room for
two of the longest."""

LEAST_ROOM = 2**24
_AT_LEAST = 0


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
        _check(self._wait(stream, flag, number, _AT_LEAST), "cuStreamWaitValue32")

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
    """The buffers of the ranks of a process group, all of one size, and the stream that copies from them.

    All ranks send messages of the same longest length in the same order.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self.device = torch.cuda.current_device()
        self._driver = driver()
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._open(LEAST_ROOM)

    def _open(self, room: int) -> None:
        """Make buffers with so much room: waits for all ranks."""
        import torch.distributed._symmetric_memory as symmetric

        self._buffer = symmetric.empty(FLAGS + room, dtype=torch.uint8, device=torch.device("cuda", self.device))
        self._handle = symmetric.rendezvous(self._buffer, self._group.group_name)
        self._buffer[:FLAGS].zero_()
        self._wait_for_all()
        views = [self._handle.get_buffer(each, (FLAGS + room,), torch.uint8) for each in range(self.size)]
        self._own = views[self.rank].data_ptr()
        self._messages = Messages(self._driver, self.rank, [view.data_ptr() for view in views], room)

    def _wait_for_all(self) -> None:
        import torch.distributed as dist

        torch.cuda.synchronize(self.device)
        dist.barrier(self._group, device_ids=[self.device])
        torch.cuda.synchronize(self.device)

    def takes(self, size: int) -> bool:
        """Whether messages of so many bytes, to all peers together, are sent here."""
        return size <= MOST_BYTES and torch.cuda.current_device() == self.device

    def exchange(
        self,
        sent: Mapping[int, Sequence[Tensor]] | Tensor,
        targets: Mapping[int, Sequence[Tensor]],
        most: int,
        dtype: torch.dtype,
    ) -> torch.cuda.Event:
        """Send each peer some tensors, and copy what peers send to contiguous ones, to be read behind the event.

        Args:
            sent: for each peer tensors of the shapes of its targets, any strides; or one tensor for all.
            targets: for each peer what its tensors are copied to. most: bytes of the longest message of any rank to a
                peer. dtype: of the targets.
        """
        is_same = isinstance(sent, Tensor)
        if not self._messages.fits(most, is_same=is_same):
            # Nobody may still copy from a buffer that is given up.
            self._wait_for_all()
            copies = 2 * (1 if is_same else self.size - 1)
            self._open(1 << (copies * (most + FLAGS) - 1).bit_length())
        stream = torch.cuda.current_stream(self.device)
        raw = stream.cuda_stream
        if isinstance(sent, Tensor):
            self._messages.send(raw, partial(self._put, raw, dtype, [sent]), most)
        else:
            puts = {peer: partial(self._put, raw, dtype, own) for peer, own in sent.items() if peer != self.rank}
            self._messages.send(raw, puts, most)
        # The targets may be memory that earlier work of this stream still reads.
        self._stream.wait_event(stream.record_event())
        places = {peer: [(x.data_ptr(), x.nbytes) for x in tensors] for peer, tensors in targets.items()}
        self._messages.fetch(self._stream.cuda_stream, places)
        found: torch.cuda.Event = self._stream.record_event()
        return found

    def _put(self, stream: int, dtype: torch.dtype, tensors: Sequence[Tensor], address: int) -> None:
        """Copy tensors into the buffer, one behind the other."""
        for x in tensors:
            size = x.numel() * dtype.itemsize
            if x.dtype == dtype and x.is_contiguous():
                if size:
                    self._driver.copy(stream, address, x.data_ptr(), size)
            else:
                begin = address - self._own
                copy_words(self._buffer[begin : begin + size].view(dtype).view(x.shape), x)
            address += size


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
