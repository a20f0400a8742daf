# SPDX-License-Identifier: Apache-2.0
"""Launches in Triton's interpreter, for tests without a GPU: callbacks that work on numpy arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.settings import INTERPRETER
from .tensor import Tensor


class _Storage:
    """The storage methods of a tensor that the interpreter calls. The memory is on the host already."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def cpu(self) -> "_Storage":
        return self

    def copy_(self, _other: "_Storage") -> None:
        """Nothing was moved to the host, so nothing moves back."""


class _Pointer:
    """A numpy array with the methods of a tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray, element: str) -> None:
        self.array = array
        self.dtype = element

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, _size: int, device: str) -> "_Pointer":
        del device
        return _Pointer(self.array, self.dtype)

    def set_(self, *_where: object) -> None:
        """The new tensor is the old one: both are on the host."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def interpreted(
    kernel: Any,
    grid: tuple[int],
    args: Sequence[Any],
    options: dict[str, Any],
    filled: Sequence[Tensor],
    changed: Sequence[Tensor],
) -> Sequence[jax.Array]:
    """The arrays of `filled` and `changed` from a kernel that Triton's interpreter runs.

    Elements that the kernel does not write are NaN (integers: 77) in `filled`, and unchanged in `changed`.
    """
    read = [x for x in args if isinstance(x, Tensor) and x not in filled]

    def run(*values: Any) -> list[np.ndarray]:
        arrays = {id(x): np.ascontiguousarray(value) for x, value in zip(read, values, strict=True)}
        arrays |= {id(x): _poisoned(x) for x in filled} | {id(x): arrays[id(x)].copy() for x in changed}
        bound = [_Pointer(arrays[id(x)], x.element) if isinstance(x, Tensor) else x for x in args]
        with INTERPRETER:
            kernel[grid](*bound, **options)
        return [arrays[id(x)] for x in (*filled, *changed)]

    results = [jax.ShapeDtypeStruct(x.memory, x.dtype) for x in (*filled, *changed)]
    called: Sequence[jax.Array] = jax.pure_callback(run, results, *(x.array for x in read), vmap_method="sequential")
    return called


def _poisoned(x: Tensor) -> np.ndarray:
    if x.zeroed:
        return np.zeros(x.memory, x.dtype)
    return np.full(x.memory, np.nan if x.dtype.kind == "f" else 77, x.dtype)
