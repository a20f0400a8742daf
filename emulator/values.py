"""Scalars, blocks and pointers of a Gluon kernel, as torch tensors on the CPU.

Triton's own function finds the type of a result: a Python number takes the type of the other operand. Integers wrap at
their width, `//` and `%` round towards zero. As in the compiler, blocks can be combined only in the same layout.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.language.semantic import TritonSemantic

from .errors import EmulationError, check

DTYPES: dict[Any, torch.dtype] = {
    real.int1: torch.bool,
    real.int8: torch.int8,
    real.int16: torch.int16,
    real.int32: torch.int32,
    real.int64: torch.int64,
    real.float16: torch.float16,
    real.bfloat16: torch.bfloat16,
    real.float8e4nv: torch.float8_e4m3fn,
    real.float8e5: torch.float8_e5m2,
    real.float32: torch.float32,
    real.float64: torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIGNED = {real.uint32: real.int32, real.uint64: real.int64}


Function: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Operator: TypeAlias = Callable[["Value", "Operand"], "Value"]


def _arithmetic(function: Function, a: Operand, b: Operand, divides: bool = False) -> Value:
    x, y = _of_one_type(a, b, divides)
    if x.layout is None or y.layout is None:  # torch itself combines a block with a scalar
        return Value(function(x.data, y.data), y.layout if x.layout is None else x.layout)
    x, y = broadcast(x, y)
    return Value(function(x.data, y.data), x.layout)


def _operators(function: Function, divides: bool = False) -> tuple[Operator, Operator]:
    """An operator, and the same operator with its operands swapped."""
    return lambda a, b: _arithmetic(function, a, b, divides), lambda a, b: _arithmetic(function, b, a, divides)


def _truncated_quotient(a: Tensor, b: Tensor) -> Tensor:
    check(not a.is_floating_point(), "// of floats")
    return torch.div(a, b, rounding_mode="trunc")


class Value:
    """A scalar, or a block in a layout."""

    __slots__ = ("data", "layout")

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        # Here and in `broadcast`, the text of an error is made only if there is an error: these are called most often.
        if layout is None and data.dim():
            raise EmulationError(f"a block {list(data.shape)} without a layout")
        self.data, self.layout = data, layout

    @property
    def dtype(self) -> Any:
        return NAMES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        wanted = DTYPES[dtype]
        if self.data.dtype == wanted:
            return self
        return Value(self.data.view(wanted) if bitcast else self.data.to(wanted), self.layout)

    def __getitem__(self, key: tuple[slice | None, ...]) -> Value:
        x = self
        for axis, index in enumerate(key):
            if index is None:
                x = _expanded(x, axis)
            else:
                check(index == slice(None), f"index {index}: only `:` and None")
        return x

    def __index__(self) -> int:
        check(self.data.dim() == 0 and not self.data.is_floating_point(), "a block or a float where an int must be")
        return int(self.data)

    def __bool__(self) -> bool:
        check(self.data.dim() == 0, "a block as a condition")
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data, self.layout)

    def __invert__(self) -> Value:
        return Value(~self.data, self.layout)

    __add__, __radd__ = _operators(torch.add)
    __sub__, __rsub__ = _operators(torch.sub)
    __mul__, __rmul__ = _operators(torch.mul)
    __truediv__, __rtruediv__ = _operators(torch.true_divide, divides=True)
    __floordiv__, __rfloordiv__ = _operators(_truncated_quotient, divides=True)
    __mod__, __rmod__ = _operators(torch.fmod, divides=True)
    __and__, __rand__ = _operators(torch.bitwise_and)
    __or__, __ror__ = _operators(torch.bitwise_or)
    __xor__, __rxor__ = _operators(torch.bitwise_xor)
    __lshift__, __rlshift__ = _operators(torch.bitwise_left_shift)
    __rshift__, __rrshift__ = _operators(torch.bitwise_right_shift)
    __lt__, __gt__ = _operators(torch.lt)[0], _operators(torch.gt)[0]
    __le__, __ge__ = _operators(torch.le)[0], _operators(torch.ge)[0]
    __eq__, __ne__ = _operators(torch.eq)[0], _operators(torch.ne)[0]  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


Number: TypeAlias = bool | int | float
Operand: TypeAlias = Value | Number


def scalar(number: Operand) -> Value:
    """A number as an argument of a kernel: an int32, an int64 if 32 bits are too few, or a float32."""
    if isinstance(number, Value):
        return number
    if isinstance(number, int):
        return Value(_integer(number))
    return Value(torch.tensor(number, dtype=torch.float32))


@lru_cache(maxsize=4096, typed=True)
def _integer(number: int) -> Tensor:
    """The tensor of a bool or an int. A kernel uses few numbers often, and nothing writes to the tensor of a scalar."""
    if isinstance(number, bool):
        return torch.tensor(number)
    return torch.tensor(number, dtype=torch.int32 if -(2**31) <= number < 2**31 else torch.int64)


@cache
def _common_type(a: torch.dtype, a_is_number: bool, b: torch.dtype, b_is_number: bool, divides: bool) -> torch.dtype:
    """The type of a result by Triton's own rule."""
    found = TritonSemantic(None).computation_type_impl(NAMES[a], a_is_number, NAMES[b], b_is_number, divides)
    return DTYPES[found]


def _of_one_type(a: Operand, b: Operand, divides: bool = False) -> tuple[Value, Value]:
    """Two operands, converted to the type of their result."""
    for operand in (a, b):
        if not isinstance(operand, (Value, int, float)):
            raise EmulationError(f"arithmetic on a {type(operand).__name__}")
    x, y = scalar(a), scalar(b)
    wanted = _common_type(x.data.dtype, not isinstance(a, Value), y.data.dtype, not isinstance(b, Value), divides)
    if x.data.dtype != wanted:
        x = Value(x.data.to(wanted), x.layout)
    if y.data.dtype != wanted:
        y = Value(y.data.to(wanted), y.layout)
    return x, y


def broadcast(*values: Value) -> list[Value]:
    """Values broadcast to their common shape, in their common layout."""
    blocks = [x for x in values if x.layout is not None]
    if not blocks:
        return list(values)
    first, layout = blocks[0].data, blocks[0].layout
    for x in blocks[1:]:
        if x.data.dim() != first.dim():
            raise EmulationError(f"blocks of {x.shape} and {blocks[0].shape} elements meet")
        if x.layout is not layout and x.layout != layout:
            raise EmulationError(f"blocks in two layouts meet: {x.layout} and {layout}")
    if all(x.data.shape == first.shape for x in values):
        return list(values)
    return [Value(data, layout) for data in torch.broadcast_tensors(*(x.data for x in values))]


def _expanded(x: Value, axis: int) -> Value:
    check(isinstance(x.layout, real.SliceLayout), f"an axis is added to a block in {x.layout}")
    check(x.layout.dim == axis, f"axis {axis} is added to a slice of axis {x.layout.dim}")
    return Value(x.data.unsqueeze(axis), x.layout.parent)


class Memory(NamedTuple):
    """The memory that a kernel may access through a pointer argument: a tensor from its first to its last element."""

    elements: Tensor
    align: int

    @staticmethod
    def of(x: Tensor) -> Memory:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        flat = x.detach().as_strided((extent if x.numel() else 0,), (1,))
        return Memory(flat, x.data_ptr() & -x.data_ptr())


class PointerType(NamedTuple):
    element_ty: Any


class Pointer:
    """Addresses in one memory: offsets in elements from its first element."""

    def __init__(self, memory: Memory, offsets: Value) -> None:
        self.memory, self.offsets = memory, offsets

    @property
    def dtype(self) -> PointerType:
        return PointerType(NAMES[self.memory.elements.dtype])

    def to(self, dtype: PointerType, bitcast: bool = False) -> Pointer:
        """The same memory as elements of another type. Only a pointer to its first element is cast."""
        wanted = DTYPES[dtype.element_ty]
        check(bitcast and not self.offsets.data.any(), "a cast of a pointer that is not the first of its memory")
        elements, step = self.memory.elements, wanted.itemsize // self.memory.elements.element_size()
        whole = elements[: len(elements) // step * step].view(wanted)
        return Pointer(Memory(whole, self.memory.align), self.offsets)

    def __add__(self, other: Operand) -> Pointer:
        step = scalar(other)
        check(not step.data.is_floating_point(), "a float is added to a pointer")
        # The step was computed in its own width, and may have wrapped there.
        return Pointer(self.memory, self.offsets + step.to(real.int64))

    def places(self, mask: Operand | None) -> tuple[Value, Tensor]:
        """The offsets, and which of them are accessed. Raises an error if an accessed offset is outside the memory."""
        given = scalar(True if mask is None else mask)
        check(given.data.dtype == torch.bool, f"a mask of {given.data.dtype}")
        offsets, keep = broadcast(self.offsets, given)
        check(offsets.shape == self.offsets.shape, f"pointers {self.offsets.shape} and a mask {given.shape}")
        outside = keep.data & ((offsets.data < 0) | (offsets.data >= len(self.memory.elements)))
        if outside.any():
            first = int(offsets.data[outside].flatten()[0])
            raise EmulationError(f"element {first} is accessed of a tensor that spans {len(self.memory.elements)}")
        return offsets, keep.data


def load(pointer: Pointer, mask: Operand | None = None, other: Number | None = None) -> Value:
    """Elements that are masked off are `other`; without `other` they are undefined: NaN, or the smallest int."""
    offsets, keep = pointer.places(mask)
    elements = pointer.memory.elements
    found = elements[torch.where(keep, offsets.data, 0)].clone()  # indexing by a scalar returns a view
    if not keep.all():
        undefined = float("nan") if elements.is_floating_point() else -(2 ** (8 * elements.element_size() - 1))
        found = found.masked_fill(~keep, undefined if other is None else other)
    return Value(found, offsets.layout)


def store(pointer: Pointer, value: Operand, mask: Operand | None = None) -> None:
    offsets, keep = pointer.places(mask)
    elements = pointer.memory.elements
    placed = scalar(value)
    data = broadcast(offsets, placed)[1].data.to(elements.dtype)
    check(data.shape == offsets.data.shape, f"pointers {offsets.shape} and values {placed.shape}")
    elements[offsets.data[keep]] = data[keep]


def atomic_add(pointer: Pointer, value: Operand, *, sem: str, mask: Value | None = None) -> Value:
    """Add without regard to `sem`: programs run one after the other, so no other access comes between."""
    check(sem in ("relaxed", "acquire", "release", "acq_rel"), f"an atomic operation with the semantics {sem!r}")
    offsets, keep = pointer.places(mask)
    places = offsets.data[keep].flatten()
    check(len(places.unique()) == len(places), "an atomic operation of a block twice on an element")
    before = load(pointer, mask=mask)
    store(pointer, before + value, mask=mask)
    return before


def arange(start: int, end: int, layout: Any) -> Value:
    check((end - start) & (end - start - 1) == 0, f"{end - start} elements are no power of two")
    return Value(torch.arange(start, end, dtype=torch.int32), layout)


def full(shape: list[int], value: Number, dtype: Any, layout: Any) -> Value:
    return Value(torch.full(shape, value, dtype=DTYPES[dtype]), layout)


def zeros(shape: list[int], dtype: Any, layout: Any) -> Value:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Value) -> Value:
    return Value(torch.zeros_like(x.data), x.layout)


def cast(x: Operand, dtype: Any) -> Value:
    return scalar(x).to(dtype)


def convert_layout(x: Value, layout: Any, **_: bool) -> Value:
    check(x.layout is not None, "a scalar has no layout")
    return Value(x.data, layout)


def where(condition: Operand, a: Operand, b: Operand) -> Value:
    keep, x, y = broadcast(scalar(condition), *_of_one_type(a, b))
    check(keep.data.dtype == torch.bool, f"a condition of {keep.dtype}")
    return Value(torch.where(keep.data, x.data, y.data), keep.layout)


# NaN if either operand is NaN; the device returns the other operand. So undefined numbers stay visible.
def minimum(a: Operand, b: Operand) -> Value:
    return _arithmetic(torch.minimum, a, b)


def maximum(a: Operand, b: Operand) -> Value:
    return _arithmetic(torch.maximum, a, b)


def cdiv(a: Operand, b: Operand) -> Operand:
    """Triton's formula; a quotient of a negative `a` is rounded towards zero."""
    return (a + (b - 1)) // b


def unsigned(number: int, dtype: Any) -> Value:
    """An argument of an unsigned type, stored as the signed type of the same width with the same bits."""
    bits = int(dtype.primitive_bitwidth)
    check(0 <= number < 2**bits, f"{number} as {dtype}")
    signed = number - 2**bits if number >= 2 ** (bits - 1) else number
    return Value(torch.tensor(signed, dtype=DTYPES[SIGNED[dtype]]))


def reduction(function: Callable[[Tensor, int], Tensor]) -> Callable[[Value, int], Value]:
    def reduce(x: Value, axis: int) -> Value:
        # In the type of the block, also if torch would use a wider type.
        found = function(x.data, axis).to(x.data.dtype)
        return Value(found, real.SliceLayout(axis, x.layout) if found.dim() else None)

    return reduce


class Derived(NamedTuple):
    """A layout that the compiler derives from a block's layout `of` and the operation `done` on the block."""

    of: Any
    done: tuple[Any, ...]


def reshape(x: Value, shape: list[int]) -> Value:
    return Value(x.data.reshape(shape), Derived(x.layout, ("reshape", *shape)))


def permute(x: Value, order: list[int]) -> Value:
    return Value(x.data.permute(*order), Derived(x.layout, ("permute", *order)))


def split(x: Value) -> tuple[Value, Value]:
    check(x.shape[-1] == 2, f"a block {x.shape} is split in two")
    layout = Derived(x.layout, ("split",))
    return Value(x.data[..., 0], layout), Value(x.data[..., 1], layout)


def join(a: Value, b: Value) -> Value:
    x, y = broadcast(a, b)
    return Value(torch.stack((x.data, y.data), -1), Derived(x.layout, ("join",)))


def elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Value], Value]:
    return lambda x: Value(function(x.data), x.layout)


def device_range(*bounds: Operand) -> Iterator[Value]:
    """`range` of a kernel: its counter is an int32, whose `//` rounds towards zero, unlike Python's."""
    return map(scalar, builtins.range(*(int(x) for x in bounds)))
