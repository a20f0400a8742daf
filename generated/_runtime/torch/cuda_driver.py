# SPDX-License-Identifier: Apache-2.0
"""Calls of the CUDA driver that PyTorch has no names for: what streams do without a kernel, and memory of other
processes."""

import ctypes
from functools import cache
from typing import Any

_AT_LEAST = 0
_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class Driver:
    """The driver on the current device. Streams and addresses are numbers."""

    def __init__(self) -> None:
        """Raises `OSError` or `AttributeError` where there is no such driver."""
        library = ctypes.CDLL("libcuda.so.1")
        address, number, size = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
        stream, found = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)

        def function(name: str, *types: Any) -> Any:
            call = getattr(library, name)
            call.argtypes = types
            return call

        self._wait = function("cuStreamWaitValue32_v2", stream, address, number, ctypes.c_uint)
        self._write = function("cuStreamWriteValue32_v2", stream, address, number, ctypes.c_uint)
        self._copy = function("cuMemcpyDtoDAsync_v2", address, address, size, stream)
        self._allocate = function("cuMemAlloc_v2", found, size)
        self._free = function("cuMemFree_v2", address)
        self._handle = function("cuIpcGetMemHandle", ctypes.POINTER(_Handle), address)
        self._open = function("cuIpcOpenMemHandle_v2", found, _Handle, ctypes.c_uint)
        self._close = function("cuIpcCloseMemHandle", address)

    def wait(self, stream: int, flag: int, number: int) -> None:
        """Later work of the stream waits until the number at `flag` is at least this one."""
        _check(self._wait(stream, flag, number, _AT_LEAST), "cuStreamWaitValue32")

    def write(self, stream: int, flag: int, number: int) -> None:
        """Write a number, behind all earlier work of the stream."""
        _check(self._write(stream, flag, number, 0), "cuStreamWriteValue32")

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Copy bytes on the device, or from another one."""
        _check(self._copy(target, source, size, stream), "cuMemcpyDtoDAsync")

    def allocate(self, size: int) -> int:
        """The address of so many new bytes, which other processes may open."""
        found = ctypes.c_uint64()
        _check(self._allocate(ctypes.byref(found), size), "cuMemAlloc")
        return found.value

    def free(self, address: int) -> None:
        """Free them."""
        _check(self._free(address), "cuMemFree")

    def handle_of(self, address: int) -> bytes:
        """What another process of this host opens them by."""
        found = _Handle()
        _check(self._handle(ctypes.byref(found), address), "cuIpcGetMemHandle")
        return ctypes.string_at(ctypes.byref(found), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """The address of another process's bytes, which may lie on another device."""
        found = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        _check(self._open(ctypes.byref(found), given, _ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle")
        return found.value

    def close(self, address: int) -> None:
        """Close them."""
        _check(self._close(address), "cuIpcCloseMemHandle")


def _check(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} returned CUDA error {status}")


@cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()
