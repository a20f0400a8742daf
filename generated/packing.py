# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths in one array: end to end for a packed call, or in rows of a dense batch.

`pack` and `pack_rows` work on torch tensors, numpy arrays and JAX arrays, which keep their dtype and device. Lists of
numbers become torch tensors. Importing this module imports none of the three libraries: a caller with an array has
imported its library.

>>> batch = pack([[1, 2, 3], [4, 5]])
>>> batch.data.tolist(), batch.cu_seqlens.tolist(), batch.positions.tolist()
([1, 2, 3, 4, 5], [0, 3, 5], [0, 1, 2, 0, 1])
>>> [x.tolist() for x in batch.unpack(batch.data * 10)]
[[10, 20, 30], [40, 50]]

>>> rows = pack_rows([[1, 2, 3], [4, 5, 6], [7]], length=4)
>>> rows.data.tolist(), rows.segment_ids.tolist()
([[1, 2, 3, 7], [4, 5, 6, 0]], [[0, 0, 0, 1], [0, 0, 0, -1]])
>>> rows.positions.tolist(), rows.fill
([[0, 1, 2, 0], [0, 1, 2, 0]], 0.875)
>>> [x.tolist() for x in rows.unpack(rows.data * 10)]
[[10, 20, 30], [40, 50, 60], [70]]
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from ._runtime.core.checks import check_flag, check_int, fail, host_number
from ._runtime.core.sequences import refuse_nested

__all__ = ["Packed", "PackedRows", "pack", "pack_rows"]

_ARRAYS = {"torch": "Tensor", "numpy": "ndarray", "jax": "Array"}
_INTEGERS, _OTHER_NUMBERS = ("int", "uint"), ("bool", "float", "bfloat", "complex")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Sequences end to end, as a packed call takes them.

    Args:
        data: `[total, ...]`.
        cu_seqlens: int32 `[n + 1]`; sequence i is `data[cu_seqlens[i]:cu_seqlens[i + 1]]`.
        positions: int32 `[total]`, the position of each token in its own sequence.
        lengths: of the n sequences, on the host.
    """

    data: Any
    cu_seqlens: Any
    positions: Any
    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    def unpack(self, outputs: Any, axis: int = 0) -> list[Any]:
        """The part of each sequence, in order. Tokens lie along `axis`: 0 for o `[total, Hq, D]`, -1 for lse."""
        axis = _checked_axis("Packed.unpack", outputs, axis, self.total)
        return _split(outputs, self.lengths, axis)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Sequences in rows of one length, as a dense batch with segment ids takes them.

    Args:
        data: `[B, length, ...]`, with `padding_value` after the last sequence of a row.
        segment_ids: int32 `[B, length]`, the number of a token's sequence in its row, from 0; padding: `padding_id`.
        positions: int32 `[B, length]`, the position of each token in its own sequence, 0 in the padding.
        lengths: of the sequences, on the host.
        rows: for each row the numbers of its sequences, from left to right.
        length: of a row.
    """

    data: Any
    segment_ids: Any
    positions: Any
    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    length: int

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @property
    def fill(self) -> float:
        """The share of tokens in the rows that are not padding, from 0 to 1."""
        return sum(self.lengths) / (len(self.rows) * self.length)

    def unpack(self, outputs: Any, axis: int = 1) -> list[Any]:
        """The part of each sequence, in the order they were given, without the axis of rows.

        Rows lie along axis 0, tokens along `axis`: 1 for o `[B, S, H, D]`, 2 for o `[B, H, S, D]` and lse `[B, H, S]`.
        """
        op = "PackedRows.unpack"
        axis = _checked_axis(op, outputs, axis, self.length)
        if axis == 0 or outputs.shape[0] != len(self.rows):
            expected = f"{len(self.rows)} rows along axis 0 and {self.length} tokens along another"
            fail(op, "outputs", expected, f"tokens along axis {axis} of shape {list(outputs.shape)}")
        found: dict[int, Any] = {}
        # Indexing is avoided, because the gradient of each index would be as large as all outputs.
        for members, row in zip(self.rows, outputs, strict=True):
            lengths = [self.lengths[i] for i in members]
            *parts, _ = _split(row, [*lengths, self.length - sum(lengths)], axis - 1)
            found.update(zip(members, parts, strict=True))
        return [found[i] for i in range(len(self.lengths))]


def pack(sequences: Iterable[Any]) -> Packed:
    """Put sequences `[L_i, ...]` end to end, as `cu_seqlens_q=` of an op expects them.

    Differentiable in torch and JAX. Sequences may be empty; they agree in all sizes but the first, dtype and device.

    Raises:
        ArgumentError: there are no sequences, or they disagree; the error names the first that differs.
    """
    xp, arrays = _checked("pack", sequences)
    lengths = tuple(int(x.shape[0]) for x in arrays)
    total = sum(lengths)
    if total >= 2**31:
        fail("pack", "sequences", "fewer than 2**31 tokens, as cu_seqlens is int32", total)
    counting = array("i", range(max(lengths)))
    positions = array("i")
    for n in lengths:
        positions += counting[:n]
    return Packed(
        data=xp.concatenate(arrays),
        cu_seqlens=_int32(xp, array("i", accumulate(lengths, initial=0)), arrays[0]),
        positions=_int32(xp, positions, arrays[0]),
        lengths=lengths,
    )


def pack_rows(
    sequences: Iterable[Any], length: int, padding_value: float = 0, padding_id: int = -1, *, decreasing: bool = False
) -> PackedRows:
    """Put sequences `[L_i, ...]` into rows of `length` tokens, by first-fit.

    Each sequence goes into the first row that has room for it, or opens the next row. That takes at most 1.7 times as
    many rows as the best packing. With `decreasing=True` the longest sequence goes first, and equally long ones keep
    their order. That takes at most 11/9 times as many rows as the best packing, and one more (Johnson et al., 1974;
    Dosa, 2007). O(n log n) for n sequences.

    The place of a sequence depends on the lengths alone, so labels that another call packs are placed as their tokens
    are. Differentiable in torch and JAX. Sequences may be empty: such a sequence is a segment of the row it fits in.

    Args:
        sequences: they agree in all sizes but the first, dtype and device.
        length: tokens of a row.
        padding_value: the value after the last sequence of a row, a number that the dtype can hold.
        padding_id: the segment id of the padding, negative.
        decreasing: whether to place the longest first; the order of `unpack` stays that of `sequences`.

    Raises:
        ArgumentError: a sequence is longer than a row, there are none, they disagree, or an option is out of range.
    """
    op = "pack_rows"
    xp, arrays = _checked(op, sequences)
    length = check_int(op, "length", length, minimum=1)
    padding_id = check_int(op, "padding_id", padding_id, maximum=-1)
    decreasing = check_flag(op, "decreasing", decreasing)
    lengths = tuple(int(x.shape[0]) for x in arrays)
    for i, n in enumerate(lengths):
        if n > length:
            fail(op, f"sequences[{i}]", f"at most {length} tokens, the length of a row", n)
    rows = _first_fit(lengths, length, decreasing)
    padding = _padding(op, xp, arrays[0], length, padding_value)
    counting = array("i", range(length))
    pieces, segment_ids, positions = [], array("i"), array("i")
    for row in rows:
        for segment, i in enumerate(row):
            pieces.append(arrays[i])
            segment_ids += array("i", [segment]) * lengths[i]
            positions += counting[: lengths[i]]
        rest = length - sum(lengths[i] for i in row)
        pieces.append(padding[:rest])
        segment_ids += array("i", [padding_id]) * rest
        positions += array("i", [0]) * rest
    shape = (len(rows), length)
    return PackedRows(
        data=xp.concatenate(pieces).reshape((*shape, *arrays[0].shape[1:])),
        segment_ids=_int32(xp, segment_ids, arrays[0]).reshape(shape),
        positions=_int32(xp, positions, arrays[0]).reshape(shape),
        lengths=lengths,
        rows=rows,
        length=length,
    )


def _first_fit(lengths: Sequence[int], length: int, decreasing: bool) -> tuple[tuple[int, ...], ...]:
    """The numbers of the sequences in each row, in the order of their placement.

    A segment tree: leaf `leaves + r` holds the room in row r, and each node above holds the larger value of its two
    children. All rows that can be needed are in the tree from the start, so that opening a row is no special case.
    """
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [length] * (2 * leaves)
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True) if decreasing else range(len(lengths)):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < lengths[i]:
                node += 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return tuple(map(tuple, rows))


# -------------------------------------------------------------------------------------------------------------- arrays


def _library(x: object) -> Any:
    """The module with the array functions for `x`; None if `x` is not an array."""
    for name, array_type in _ARRAYS.items():
        module = sys.modules.get(name)
        if module is not None and isinstance(x, getattr(module, array_type)):
            return module.numpy if name == "jax" else module
    return None


def _is_torch(xp: Any) -> bool:
    return bool(xp.__name__ == "torch")


def _checked(op: str, sequences: Any) -> tuple[Any, list[Any]]:
    """The module with the array functions for `sequences`, and the sequences as arrays that can be concatenated."""
    try:
        arrays = list(sequences)
    except TypeError:
        fail(op, "sequences", "a list of arrays", type(sequences).__name__)
    if not arrays:
        fail(op, "sequences", "at least one, whose dtype and sizes are those of all", "none")
    if all(isinstance(x, Sequence) and not isinstance(x, (str, bytes)) for x in arrays):
        arrays = _tensors(op, arrays)
    first, xp = arrays[0], _library(arrays[0])
    if xp is None:
        fail(op, "sequences[0]", "a torch tensor, a numpy or JAX array or a list of numbers", type(first).__name__)
    if not _dtype_name(first).startswith((*_INTEGERS, *_OTHER_NUMBERS)):
        fail(op, "sequences[0]", "an array of numbers", f"dtype {first.dtype}")
    refuse_nested(op, "sequences[0]", first)
    sizes, dtype, device = first.shape[1:], first.dtype, first.device if _is_torch(xp) else None
    for i, x in enumerate(arrays):
        if _library(x) is not xp:
            fail(op, f"sequences[{i}]", f"a {type(first).__name__}, as is sequences[0]", type(x).__name__)
        refuse_nested(op, f"sequences[{i}]", x)
        if len(x.shape) == 0 or x.shape[1:] != sizes:
            like = ", as sequences[0]" if i else ""
            fail(op, f"sequences[{i}]", f"shape [{', '.join(['L', *map(str, sizes)])}]{like}", list(x.shape))
        if x.dtype != dtype:
            fail(op, f"sequences[{i}]", f"dtype {dtype}, that of sequences[0]", x.dtype)
        if device is not None and x.device != device:
            fail(op, f"sequences[{i}]", f"device {device}, that of sequences[0]", x.device)
    return xp, arrays


def _tensors(op: str, lists: list[Sequence[Any]]) -> list[Any]:
    """Lists of numbers as tensors. The dtype follows from all numbers together, so that an empty list has it, too."""
    import torch

    try:
        whole = torch.tensor(list(chain.from_iterable(lists)))
    except (RuntimeError, TypeError, ValueError) as error:
        fail(op, "sequences", "arrays, or lists of numbers", f"lists of which torch makes no tensor: {error}")
    return _split(whole, [len(x) for x in lists], 0)


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _padding(op: str, xp: Any, like: Any, length: int, value: Any) -> Any:
    """`[length, ...]` of `value`, in the dtype and on the device of `like`."""
    name = _dtype_name(like)
    value = host_number(op, "padding_value", value)
    fits = isinstance(value, (int, float))
    if name == "bool":
        fits = fits and value in (0, 1)
    elif name.startswith(_INTEGERS):
        limits = xp.iinfo(like.dtype)
        fits = isinstance(value, int) and limits.min <= value <= limits.max
    shape = (length, *like.shape[1:])
    try:
        if fits:
            return like.new_full(shape, value) if _is_torch(xp) else xp.full(shape, value, like.dtype)
    except (OverflowError, RuntimeError):
        pass  # a float outside the range of the dtype
    fail(op, "padding_value", f"a number of dtype {like.dtype}, that of the sequences", repr(value))


def _int32(xp: Any, numbers: "array[int]", like: Any) -> Any:
    """Numbers on the host as int32 `[n]`, on the device of `like`. In JAX they go to its default device."""
    if not _is_torch(xp):
        return xp.asarray(sys.modules["numpy"].array(numbers, "int32"))
    if not numbers:
        return xp.empty(0, dtype=xp.int32, device=like.device)
    return xp.frombuffer(numbers, dtype=xp.int32).to(like.device)


def _checked_axis(op: str, outputs: Any, axis: int, size: int) -> int:
    """`axis` of `outputs` counted from the front, after a check that its size is `size`."""
    if _library(outputs) is None:
        fail(op, "outputs", "a torch tensor or a numpy or JAX array", type(outputs).__name__)
    shape = list(outputs.shape)
    axis = host_number(op, "axis", axis)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        fail(op, "axis", f"an axis of outputs {shape}", repr(axis))
    if shape[axis] != size:
        fail(op, "outputs", f"{size} tokens along axis {axis}", shape)
    return axis % len(shape)


def _split(x: Any, lengths: Sequence[int], axis: int) -> list[Any]:
    """The parts of these lengths, one after the other along `axis`."""
    xp = _library(x)
    if _is_torch(xp):
        return list(x.split(list(lengths), axis))
    *ends, _ = accumulate(lengths)
    return list(xp.split(x, ends, axis))
