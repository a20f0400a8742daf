"""Tiles in shared memory, and the asynchronous operations on them: copies and additions by TMA, products by wgmma.

The slot of a tile records who filled the tile and who may still read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .barriers import Barrier
from .errors import EmulationError, check
from .partitions import Known, Partition
from .values import NAMES, Operand, Value

if TYPE_CHECKING:
    from .device import Program


@dataclass(eq=False)
class Store:
    """A store of a partition: other partitions see it after a wait for the arrival, and TMA and wgmma after a fence, of
    this partition or, after its wait, of the one that issues them."""

    arrival: int  # the partition's next arrival after the store
    is_fenced: bool = False
    fenced_by_readers: set[Partition] = field(default_factory=set)

    def is_fenced_for(self, partition: Partition) -> bool:
        return self.is_fenced or partition in self.fenced_by_readers


@dataclass
class Slot:
    """The memory of one tile, and who wrote and reads it."""

    name: str
    copy: Copy | None = None  # the last copy to it
    stores: dict[Partition, Store] = field(default_factory=dict)  # the stores since that copy
    readers: int = 0  # products and additions in flight
    reads: Known = field(default_factory=dict)  # since that copy: for each reader, its next arrival after its last read


class Tile:
    """A view of shared memory, of a program that runs."""

    def __init__(self, program: Program, data: Tensor, layout: Any, slots: Sequence[Slot]) -> None:
        self.program, self.data, self.layout, self._slots = program, data, layout, slots
        self._places: Tensor | Sequence[Tensor] = data  # the data of each tile that `index` returns
        self._followers: Sequence[Tile] = ()  # of a tile from `index`: the tiles that follow it in memory

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return NAMES[self.data.dtype]

    @property
    def slot(self) -> Slot:
        check(len(self._slots) == 1, "all tiles of an allocation at once")
        return self._slots[0]

    @property
    def slots(self) -> Sequence[Slot]:
        """Those that a product with the tile reads."""
        return [self.slot]

    def index(self, i: Operand) -> Tile:
        place = int(i)
        check(0 <= place < len(self._slots), f"tile {place} of {len(self._slots)}")
        own, *followers = [
            Tile(self.program, self._places[at], self.layout, [self._slots[at]])
            for at in range(place, len(self._slots))
        ]
        own._followers = followers
        return own

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Tile:
        """Pieces as `[tiles, rows, columns]`, as they lie in memory: a tile consists of blocks of a swizzle's columns,
        one after the other. From then on a piece has the slot of its tile. As `[rows, columns]`: a piece and those that
        follow it as one tile."""
        if len(shape) == 2:
            return self._join(dtype, shape, layout)
        count = shape[0]
        piece_rows, piece_columns = self.shape[-2:]
        check(dtype == self.dtype and math.prod(shape) == self.data.numel(), f"{self.shape} as {shape} of {dtype}")
        check(piece_columns * self.data.element_size() == layout.swizzle_byte_width, f"{piece_columns} columns a piece")
        tiles = torch.full(shape, float("nan"), dtype=self.data.dtype)
        blocks = [block for tile in tiles for block in tile.split(piece_columns, 1)]
        self._places = [piece[(None,) * (len(self.shape) - 3)] for block in blocks for piece in block.split(piece_rows)]
        slots = [Slot(f"tile {i} of {self._slots[0].name}") for i in range(count)]
        self.program.slots += slots
        self._slots = [slots[i * count // len(self._slots)] for i in range(len(self._slots))]
        return Tile(self.program, tiles, layout, slots)

    def view(self, dtype: Any, shape: list[int], layout: Any) -> JoinedTiles:
        """Pieces as `[tiles, rows, columns]`, each of several pieces of that many rows, which keep their slots."""
        check(math.prod(shape) == self.data.numel(), f"{self.shape} as {shape}")
        places = range(0, len(self._slots), len(self._slots) // shape[0])
        return JoinedTiles([self.index(place)._join(dtype, shape[1:], layout) for place in places])

    def _join(self, dtype: Any, shape: list[int], layout: Any) -> JoinedTile:
        rows, columns = self.shape[-2:]
        check(dtype == self.dtype and rows == shape[0], f"{self.shape} as {shape} of {dtype}")
        # A tile consists of blocks of a swizzle's columns, one after the other; so does a piece.
        check(columns * self.data.element_size() % layout.swizzle_byte_width == 0, f"{columns} columns a piece")
        count = shape[1] // columns
        pieces = [piece.reshape([rows, columns]) for piece in (self, *self._followers[: count - 1])]
        nothing = torch.full([rows, columns], float("nan"), dtype=self.data.dtype)
        behind = Tile(self.program, nothing, self.layout, [Slot(f"the memory behind {self._slots[0].name}")])
        return JoinedTile(self.program, [*pieces, *[behind] * (count - len(pieces))], layout)

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.program, self.data.view(shape), self.layout, self._slots)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.program, self.data.permute(*order), self.layout, self._slots)

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        check(self.data.dim() == 2, "a slice of what is no tile")
        check(0 <= start <= self.data.shape[dim] - length, f"{length} from {start} on of {self.shape}")
        return Tile(self.program, self.data.narrow(dim, start, length), self.layout, self._slots)

    def load(self, layout: Any) -> Value:
        [slot], partition = self.program.readable(self, by_hardware=False), self.program.partition
        slot.reads[partition] = partition.arrivals
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        check(value.shape == self.shape and value.dtype == self.dtype, f"{value.shape} stored to {self.shape}")
        self.program.check_overwrite(self.slot)
        self.data.copy_(value.data)
        partition = self.program.partition
        self.slot.stores[partition] = Store(partition.arrivals)


class JoinedTile(Tile):
    """Pieces of columns as one tile, for products: a part of it may be read if no piece is missing there."""

    def __init__(self, program: Program, pieces: Sequence[Tile], layout: Any, is_transposed: bool = False) -> None:
        self.pieces, self.is_transposed = pieces, is_transposed
        super().__init__(program, self._joined(), layout, [piece.slot for piece in pieces])

    def _joined(self) -> Tensor:
        whole = torch.cat([piece.data for piece in self.pieces], 1)
        return whole.T if self.is_transposed else whole

    @property
    def slots(self) -> Sequence[Slot]:
        return self._slots

    def refresh(self) -> None:
        """Read the pieces again, as they are now."""
        self.data = self._joined()

    def permute(self, order: Sequence[int]) -> Tile:
        check(list(order) == [1, 0], f"axes in the order {order}")
        return JoinedTile(self.program, self.pieces, self.layout, not self.is_transposed)

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        """Some columns, of whole pieces or of one."""
        check(dim == 1 and not self.is_transposed, f"a slice of axis {dim}")
        check(0 <= start <= self.data.shape[1] - length, f"{length} from {start} on of {self.shape}")
        columns = self.pieces[0].shape[1]
        first, last = start // columns, (start + length - 1) // columns
        if first == last:
            return self.pieces[first].slice(start % columns, length, dim=1)
        check(start % columns == length % columns == 0, f"{length} columns from {start} on of pieces of {columns}")
        return JoinedTile(self.program, self.pieces[first : last + 1], self.layout)


@dataclass(frozen=True)
class JoinedTiles:
    """The tiles of an allocation that is seen as `[tiles, rows, columns]`."""

    tiles: Sequence[JoinedTile]

    def index(self, i: Operand) -> JoinedTile:
        check(0 <= int(i) < len(self.tiles), f"tile {int(i)} of {len(self.tiles)}")
        return self.tiles[int(i)]


@dataclass(frozen=True)
class BlockType:
    element_ty: Any
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.element_ty.primitive_bitwidth) // 8


@dataclass(frozen=True)
class Descriptor:
    """A tensor in global memory whose tiles TMA copies: the elements of the memory, and the tensor's sizes and strides
    in them. Addresses wrap around at 2**64, so only the addresses of elements inside the tensor's edges matter."""

    elements: Tensor
    sizes: Sequence[int]
    strides: Sequence[int]  # in elements
    block_type: BlockType
    layout: Any

    @property
    def dtype(self) -> Any:
        return self.block_type.element_ty

    def places(self, coordinates: Sequence[int]) -> tuple[Tensor, Tensor]:
        """For each element of the tile at `coordinates`: its index, and whether it is inside the tensor's edges."""
        itemsize, rank = self.elements.element_size(), len(self.sizes)
        address, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        axes = zip(coordinates, self.block_type.shape, self.sizes, self.strides, strict=True)
        for axis, (first, length, size, stride) in enumerate(axes):
            check(-(2**31) <= first < 2**31, f"coordinate {first} for TMA")
            index = torch.arange(first, first + length).view([-1 if each == axis else 1 for each in range(rank)])
            # In 64 bits, as the hardware computes addresses.
            address = address + index * (stride * itemsize)
            inside = inside & (index >= 0) & (index < size)
        address, inside = torch.broadcast_tensors(address, inside)
        outside = inside & ((address < 0) | (address >= len(self.elements) * itemsize))
        if outside.any():
            first = int(address[outside][0])
            bytes_there = len(self.elements) * itemsize
            raise EmulationError(f"TMA copies byte {first} of a tensor that spans {bytes_there}, from {coordinates} on")
        return address // itemsize, inside

    def tile_at(self, coordinates: Sequence[int]) -> Tensor:
        """The tile that begins at `coordinates`, zero outside the tensor's edges."""
        places, inside = self.places(coordinates)
        if inside.all():
            return self.elements[places]
        tile = torch.zeros(places.shape, dtype=self.elements.dtype)
        tile[inside] = self.elements[places[inside]]
        return tile


@dataclass(eq=False)
class Copy:
    """A copy by TMA. A partition may read the data once it has seen phase `phase` of the barrier complete."""

    data: Tensor
    tile: Tile
    barrier: Barrier
    phase: int

    def land(self) -> None:
        self.tile.data.copy_(self.data)
        self.barrier.receive(self.data.numel() * self.data.element_size())


@dataclass(eq=False)
class Addition:
    """A tile that TMA adds to memory."""

    elements: Tensor
    places: Tensor
    tile: Tile

    def compute(self) -> None:
        self.elements[self.places] += self.tile.data


def multiply(a: Tensor, b: Tensor, before: Tensor | None) -> Tensor:
    """The product of a wgmma, rounded as float32; the hardware truncates instead."""
    result = a.float() @ b.float()
    return result if before is None else result + before


@dataclass(eq=False)
class Product:
    """A wgmma: `a @ b`, added to the accumulators."""

    compute: Callable[[], Tensor]
    layout: Any
    shape: list[int]
    reads: list[Slot]
    result: Tensor | None = None
    is_done: bool = False

    def value(self) -> Value:
        check(self.is_done and self.result is not None, "the sums of a wgmma that may still run are used")
        assert self.result is not None
        return Value(self.result, self.layout)
