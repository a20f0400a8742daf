# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank that the other GPUs of its host read by their copy engines, beside kernels that hold every
multiprocessor: buffers shared by handles of CUDA, and the messages of `core.peer_messages` in them."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..core.peer_messages import FLAGS, MOST_RANKS, Messages
from .cuda_driver import driver
from .words import copy_words

MOST_BYTES = 2**28
"""Messages of a rank to all its peers that are longer than this are sent by the process group: the buffer has room for
two of the longest."""

LEAST_ROOM = 2**24


class _Buffer:
    """Bytes on the current device, outside of PyTorch's allocator, as what `torch.as_tensor` takes."""

    def __init__(self, size: int) -> None:
        self.address = driver().allocate(size)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class PeerMemory:
    """The buffers of the ranks of a process group, all of one size, and the stream that copies from them.

    All ranks send messages of the same longest length in the same order.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """Raises `RuntimeError` on every rank if one of them cannot share memory."""
        self._group, self.rank, self.size = ref(group), rank, size
        self.device = torch.cuda.current_device()
        self._driver = driver()
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._most = MOST_BYTES
        self._open(LEAST_ROOM)

    def _open(self, room: int) -> None:
        """Make buffers with so much room: waits for all ranks."""
        self._room, self._own, self._opened, handle = room, 0, list[int](), None
        with suppress(RuntimeError):
            owned = _Buffer(FLAGS + room)
            self._own = owned.address
            self._buffer = torch.as_tensor(owned, device=torch.device("cuda", self.device))
            self._buffer[:FLAGS].zero_()
            handle = self._driver.handle_of(self._own)
        torch.cuda.synchronize(self.device)
        handles = self._told(handle)
        begins: list[int] = []
        with suppress(RuntimeError, TypeError):
            for rank, theirs in enumerate(handles):
                begins.append(self._own if rank == self.rank else self._driver.open(theirs))
        self._opened = [x for x in begins if x != self._own]
        if not all(self._told(len(begins) == self.size)):
            self._close()
            raise RuntimeError("a rank cannot share memory with another one")
        self._messages = Messages(self._driver, self.rank, begins, room)

    def _close(self) -> None:
        """Give up the buffers, behind all that copies from them: waits for all ranks."""
        self._wait_for_all()
        for address in self._opened:
            self._driver.close(address)
        self._wait_for_all()
        if self._own:
            del self._buffer
            self._driver.free(self._own)

    def _wait_for_all(self) -> None:
        torch.cuda.synchronize(self.device)
        self._told(None)

    def _told(self, x: Any) -> list[Any]:
        """What every rank gives."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group=self._group())
        return found

    def takes(self, most: int, *, is_same: bool = False) -> bool:
        """Whether messages are sent here of which the longest of any rank to a peer has so many bytes: `is_same` for
        all peers, or others for each. A buffer that is too small is made anew, which waits for all ranks."""
        copies = 1 if is_same else self.size - 1
        if most * copies > self._most or torch.cuda.current_device() != self.device:
            return False
        if self._messages.fits(most, is_same=is_same):
            return True
        room = self._room
        self._close()
        try:
            self._open(1 << (2 * copies * (most + FLAGS) - 1).bit_length())
        except RuntimeError:
            self._most = most * copies - 1
            self._open(room)
            return False
        return True

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
    with suppress(RuntimeError):
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
