"""What a program of a Hopper kernel has beside its registers: shared memory, mbarriers, TMA and wgmma."""

from __future__ import annotations

import linecache
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from .errors import EmulationError, check
from .partitions import Known, Partition, Scheduler, Wait, emulated_place, learn
from .values import DTYPES, NAMES, Operand, Pointer, Value, inline_asm_elementwise, zeros

SHARED_BYTES = 227 * 1024
"""Shared memory of a program on sm_90."""

NAMED_BARRIER = re.compile(r"bar\.(sync|arrive) (\d+), (\d+);")
"""Of the barriers that the hardware has 16 of, at which so many threads arrive; `sync` waits for the others."""


class Timing(Enum):
    """When the asynchronous happens, within what the hardware may do. Each shows bugs that the other hides."""

    EARLY_PRODUCTS = "products at their issue, copies when nothing else can go on"
    LATE_PRODUCTS = "copies at their issue, products when they are waited for"


class Barrier:
    """An mbarrier: a phase completes once all have arrived and all bytes expected have come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phases = 0  # complete so far
        self.known: Known = {}  # to those who wait for it
        self._arriving: Known = {}
        self._arrivals = self._missing = self._bytes = 0

    def init(self, arrivals: int) -> None:
        check(self._arrivals == 0 and arrivals > 0, f"{self.name}: init({arrivals}) of a barrier with {self._arrivals}")
        self._arrivals = self._missing = arrivals

    def arrive(self, arrivals: int, known: Known, more_bytes: int = 0) -> None:
        self._missing -= arrivals
        check(self._missing >= 0, f"{self.name}: more than {self._arrivals} arrivals in phase {self.phases}")
        self._bytes += more_bytes
        learn(self._arriving, known)
        self._complete()

    def receive(self, landed: int) -> None:
        self._bytes -= landed
        self._complete()

    def _complete(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self.phases += 1
            self._missing = self._arrivals
            learn(self.known, self._arriving)
            self._arriving = {}

    def is_past(self, parity: int) -> bool:
        """Whether the phase before the present one has this parity."""
        return self.phases % 2 != parity

    def check_wait(self, parity: int) -> None:
        check(self._arrivals > 0, f"{self.name} was not initialised")
        check(parity in (0, 1), f"{self.name}: parity {parity}")

    def __str__(self) -> str:
        return f"{self.name} (phase {self.phases}, {self._missing} arrivals and {self._bytes} bytes short)"


class Barriers:
    """An allocation of barriers."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self._barriers = barriers

    def index(self, i: Operand) -> Barrier:
        place = int(i)
        check(0 <= place < len(self._barriers), f"barrier {place} of {len(self._barriers)}")
        return self._barriers[place]


@dataclass(eq=False)
class Store:
    """What a partition stored: seen by TMA and wgmma once it is fenced, by others once they waited for an arrival."""

    arrival: int  # the partition's, which tells of it
    is_fenced: bool = False


@dataclass
class Slot:
    """What is known of one tile's place."""

    name: str
    copy: Copy | None = None  # that filled it last
    stores: dict[Partition, Store] = field(default_factory=dict)  # or that did
    readers: int = 0  # products and additions in flight
    reads: Known = field(default_factory=dict)  # since that copy: the arrival of each reader that tells of its last


class Tile:
    """A view of shared memory, of a program that runs."""

    def __init__(self, program: Program, data: Tensor, layout: Any, slots: Sequence[Slot]) -> None:
        self.program, self.data, self.layout, self._slots = program, data, layout, slots
        self._places: Tensor | Sequence[Tensor] = data  # of what `index` gives

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

    def index(self, i: Operand) -> Tile:
        place = int(i)
        check(0 <= place < len(self._slots), f"tile {place} of {len(self._slots)}")
        return Tile(self.program, self._places[place], self.layout, [self._slots[place]])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Tile:
        """Pieces as the `[tiles, rows, columns]` that they are in memory: a tile has one block of a swizzle's columns
        after the other. What is known of a piece is known of its tile from then on."""
        count = shape[0]
        piece_rows, piece_columns = self.shape[-2:]
        check(dtype == self.dtype and math.prod(shape) == self.data.numel(), f"{self.shape} as {shape} of {dtype}")
        check(piece_columns * self.data.element_size() == layout.swizzle_byte_width, f"{piece_columns} columns a piece")
        tiles = torch.full(shape, float("nan"), dtype=self.data.dtype)
        blocks = [block for tile in tiles for block in tile.split(piece_columns, 1)]
        self._places = [piece[(None,) * (len(self.shape) - 3)] for block in blocks for piece in block.split(piece_rows)]
        slots = [Slot(f"tile {i} of {self._slots[0].name}") for i in range(count)]
        self._slots = [slots[i * count // len(self._slots)] for i in range(len(self._slots))]
        return Tile(self.program, tiles, layout, slots)

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.program, self.data.view(shape), self.layout, self._slots)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.program, self.data.permute(*order), self.layout, self._slots)

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        check(self.data.dim() == 2, "a slice of what is no tile")
        check(0 <= start <= self.data.shape[dim] - length, f"{length} from {start} on of {self.shape}")
        return Tile(self.program, self.data.narrow(dim, start, length), self.layout, self._slots)

    def load(self, layout: Any) -> Value:
        slot, partition = self.program.readable(self, by_hardware=False), self.program.partition
        slot.reads[partition] = partition.arrivals
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        check(value.shape == self.shape and value.dtype == self.dtype, f"{value.shape} stored to {self.shape}")
        self.program.check_overwrite(self.slot)
        self.data.copy_(value.data)
        partition = self.program.partition
        self.slot.stores[partition] = Store(partition.arrivals)


@dataclass(frozen=True)
class BlockType:
    element_ty: Any
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.element_ty.primitive_bitwidth) // 8


@dataclass(frozen=True)
class Descriptor:
    """A tensor in global memory of which TMA copies tiles: the elements that are there, and how it is said to lie in
    them. An address wraps around at 2**64: what counts is where the elements inside a tensor's edges are."""

    elements: Tensor
    sizes: Sequence[int]
    strides: Sequence[int]  # in elements
    block_type: BlockType
    layout: Any

    @property
    def dtype(self) -> Any:
        return self.block_type.element_ty

    def places(self, coordinates: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each element of the tile that begins there: its place, and whether it is inside the tensor's edges."""
        itemsize, rank = self.elements.element_size(), len(self.sizes)
        address, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        axes = zip(coordinates, self.block_type.shape, self.sizes, self.strides, strict=True)
        for axis, (first, length, size, stride) in enumerate(axes):
            check(-(2**31) <= first < 2**31, f"coordinate {first} for TMA")
            index = torch.arange(first, first + length).view([-1 if each == axis else 1 for each in range(rank)])
            # In 64 bits, as the hardware computes it.
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
        """The tile that begins there, zero beyond the tensor's edges."""
        places, inside = self.places(coordinates)
        tile = torch.zeros(places.shape, dtype=self.elements.dtype)
        tile[inside] = self.elements[places[inside]]
        return tile


@dataclass(eq=False)
class Copy:
    """A copy by TMA; its data is there for those who saw phase `phase` of its barrier complete."""

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


@dataclass(eq=False)
class Product:
    """A wgmma: `a @ b`, added to the sums so far."""

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


@dataclass
class Program:
    """One program of a grid."""

    number: int
    grid: int
    warps: int
    timing: Timing
    source: str
    copies: deque[Copy] = field(default_factory=deque)
    shared_bytes: int = 0
    allocations: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self._land_oldest)
        self._slots: list[Slot] = []
        self._named: dict[int, Barrier] = {}
        self._launch = Partition(f"launch of program {self.number}", self.warps)

    @property
    def partition(self) -> Partition:
        """The one that runs; before there are any, all warps of the launch."""
        return self.scheduler.current or self._launch

    def _land_oldest(self) -> bool:
        if not self.copies:
            return False
        self.copies.popleft().land()
        return True

    def _allocation(self) -> str:
        """What an allocation is called: after the variable that it goes to, and where it is made."""
        place = emulated_place()
        outermost = linecache.getline(self.source, int(place.split(" > ")[0].rpartition(":")[2]))
        self.allocations += 1
        return f"allocation {self.allocations}, {outermost.partition(' = ')[0].strip()} ({place})"

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Tile | Barriers:
        name = self._allocation()
        self.shared_bytes += math.prod(shape) * int(dtype.primitive_bitwidth) // 8
        check(self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory, of {SHARED_BYTES}")
        if isinstance(layout, real_mbarrier.MBarrierLayout):
            check(dtype == real.int64 and shape[1:] == [1], f"barriers as {shape} of {dtype}")
            return Barriers([Barrier(f"barrier {i} of {name}") for i in range(shape[0])])
        slots = [Slot(f"tile {i} of {name}") for i in range(shape[0])]
        self._slots += slots
        # Whatever is read before it is written is NaN, or the smallest int.
        data = torch.empty(shape, dtype=DTYPES[dtype])
        data.fill_(float("nan") if data.is_floating_point() else torch.iinfo(data.dtype).min)
        return Tile(self, data, layout, slots)

    def warp_specialize(
        self, functions: list[tuple[Any, tuple[Any, ...]]], worker_num_warps: list[int], worker_num_regs: list[int]
    ) -> None:
        check(
            len(worker_num_warps) == len(worker_num_regs) == len(functions) - 1, "one worker per function but the first"
        )
        warps = [self.warps, *worker_num_warps]
        partitions = [
            Partition(f"{i} ({function.__name__}) of program {self.number}", warps[i])
            for i, (function, _) in enumerate(functions)
        ]
        # They begin at a barrier.
        for partition in partitions:
            learn(partition.known, self._launch.arrive())
        self.scheduler.run(partitions, [lambda f=f, args=args: f(*args) for f, args in functions])  # type: ignore[misc]
        for partition in partitions:
            check(not partition.products, f"{partition.name} ended before its wgmma did")
            check(not partition.additions, f"{partition.name} ended before its additions did")
        check(not self.copies, f"the program ended before {len(self.copies)} copies did")

    def wait(self, barrier: Barrier, parity: Operand) -> None:
        awaited = int(parity)
        barrier.check_wait(awaited)
        if not barrier.is_past(awaited):
            describe = lambda: f"parity {awaited} of {barrier}"  # noqa: E731 - one expression
            self.scheduler.yield_turn(Wait(describe, lambda: barrier.is_past(awaited), emulated_place()))
        self.partition.seen[barrier] = barrier.phases
        learn(self.partition.known, barrier.known)

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.arrive(1, self.partition.arrive(), size)

    def arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        barrier.arrive(count, self.partition.arrive())
        # Whoever waited for this does at once all that it now may.
        self.scheduler.yield_turn()

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Value], dtype: Any, *, is_pure: bool, pack: int
    ) -> Value | tuple[Value, ...]:
        named = NAMED_BARRIER.fullmatch(asm)
        if named is None:
            return inline_asm_elementwise(asm, constraints, args, dtype, is_pure=is_pure, pack=pack)
        threads = 32 * self.partition.warps
        check(args[0].shape == [threads] and pack == 1 and not is_pure, f"{asm!r} not once by each thread")
        self._meet(named[1] == "sync", int(named[2]), int(named[3]) // threads)
        return zeros([threads], dtype, args[0].layout)

    def _meet(self, waits: bool, number: int, partitions: int) -> None:
        """Arrive at a named barrier, as so many partitions do."""
        check(number < 16, f"there is no barrier {number}")
        if number not in self._named:
            self._named[number] = Barrier(f"named barrier {number}")
            self._named[number].init(partitions)
        barrier = self._named[number]
        phase = barrier.phases
        barrier.arrive(1, self.partition.arrive())
        if waits:
            self.wait(barrier, phase & 1)
        else:
            self.scheduler.yield_turn()

    def make_tensor_descriptor(
        self, base: Pointer, shape: list[Operand], strides: list[Operand], block_shape: list[int], layout: Any
    ) -> Descriptor:
        sizes, steps = [int(x) for x in shape], [int(x) for x in strides]
        elements, itemsize = base.memory.elements, base.memory.elements.element_size()
        check(base.memory.align % 16 == 0 and int(base.offsets) == 0, "TMA reads from multiples of 16 bytes")
        check(steps[-1] == 1 and all(x * itemsize % 16 == 0 for x in steps[:-1]), f"strides {steps} for TMA")
        check(all(0 < size < 2**32 for size in sizes), f"sizes {sizes} for TMA")
        check(all(0 <= step * itemsize < 2**40 for step in steps), f"strides {steps} for TMA")
        check(len(sizes) == len(steps) == len(block_shape) <= 5, f"{len(sizes)} dims for TMA")
        check(all(size <= 256 for size in block_shape), f"a tile of {block_shape} for TMA")
        block_type = BlockType(NAMES[elements.dtype], list(block_shape))
        return Descriptor(elements, sizes, steps, block_type, layout)

    def async_load(self, desc: Descriptor, coordinates: list[Operand], barrier: Barrier, tile: Tile) -> None:
        slot = tile.slot
        check(list(tile.data.shape) == desc.block_type.shape, f"{desc.block_type.shape} for {list(tile.data.shape)}")
        check(tile.layout == desc.layout and tile.dtype == desc.dtype, "a tile unlike its descriptor")
        self.check_overwrite(slot)
        for partition, store in slot.stores.items():
            check(store.is_fenced, f"{slot.name} is copied to without a fence after a store")
            known = self.partition.known.get(partition, -1) >= store.arrival
            check(known, f"{slot.name} is overwritten without a wait for what partition {partition.name} stored")
        slot.stores.clear()
        slot.reads.clear()
        data = desc.tile_at([int(x) for x in coordinates])
        slot.copy = Copy(data, tile, barrier, barrier.phases)
        self.copies.append(slot.copy)
        if self.timing is Timing.LATE_PRODUCTS:
            self._land_oldest()

    def check_overwrite(self, slot: Slot) -> None:
        """That nobody still reads what is in a place, as far as this partition knows."""
        check(slot.readers == 0, f"{slot.name} is overwritten while a wgmma may still read it")
        for reader, arrival in slot.reads.items():
            known = reader is self.partition or self.partition.known.get(reader, -1) >= arrival
            check(known, f"{slot.name} is overwritten without a wait for the reads of partition {reader.name}")

    def fence_async_shared(self) -> None:
        for slot in self._slots:
            if self.partition in slot.stores:
                slot.stores[self.partition].is_fenced = True

    def async_add(self, desc: Descriptor, coordinates: list[Operand], tile: Tile) -> None:
        slot = self.readable(tile)
        check(list(tile.data.shape) == desc.block_type.shape, f"{desc.block_type.shape} for {list(tile.data.shape)}")
        check(tile.layout == desc.layout and tile.dtype == desc.dtype, "a tile unlike its descriptor")
        first = [int(x) for x in coordinates]
        places, inside = desc.places(first)
        check(bool(inside.all()), f"{first} of {list(desc.sizes)}: an addition beyond the edge")
        slot.readers += 1
        self.partition.additions.append(Addition(desc.elements, places, tile))

    def store_wait(self, num_outstanding: int) -> None:
        additions = self.partition.additions
        while len(additions) > num_outstanding:
            addition = additions.pop(0)
            addition.compute()
            addition.tile.slot.readers -= 1
            addition.tile.slot.reads[self.partition] = self.partition.arrivals

    def warpgroup_mma(
        self, a: Value | Tile, b: Tile, acc: Value | Product, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        check(is_async, "only asynchronous wgmma are emulated")
        shape = [a.data.shape[0], b.data.shape[1]]
        acc_shape = acc.shape if isinstance(acc, Product) else list(acc.data.shape)
        check(a.data.shape[1] == b.data.shape[0] and shape == acc_shape, f"a product of {shape} for {acc_shape}")
        check(a.data.dtype == b.data.dtype, f"{a.data.dtype} times {b.data.dtype}")
        self._check_layouts(a, acc.layout, shape)
        slots = [self.readable(x) for x in (a, b) if isinstance(x, Tile)]
        added = acc if use_acc else None

        def compute() -> Tensor:
            # What the tiles hold by now; a value never changes.
            result = a.data.float() @ b.data.float()
            if added is None:
                return result
            before = added.result if isinstance(added, Product) else added.data
            assert before is not None
            return result + before

        product = Product(compute, acc.layout, shape, slots)
        if self.timing is Timing.EARLY_PRODUCTS:
            product.result = compute()
        for slot in slots:
            slot.readers += 1
        self.partition.products.append(product)
        return product

    def _check_layouts(self, a: Value | Tile, layout: Any, shape: list[int]) -> None:
        check(isinstance(layout, real.NVMMADistributedLayout), f"sums in {layout}")
        check(math.prod(layout.warps_per_cta) == self.partition.warps == 4, f"{layout.warps_per_cta} warps for wgmma")
        check(shape[0] % 64 == 0 and shape[1] % layout.instr_shape[1] == 0, f"sums of {shape} in {layout}")
        if isinstance(a, Value):
            wanted = real.DotOperandLayout(operand_index=0, parent=layout, k_width=32 // a.dtype.primitive_bitwidth)
            check(a.layout == wanted, f"an operand in {a.layout}, not {wanted}")

    def readable(self, tile: Tile, *, by_hardware: bool = True) -> Slot:
        """The place of a tile that this partition may read, or have read by TMA and wgmma."""
        slot = tile.slot
        for partition, store in slot.stores.items():
            check(store.is_fenced or not by_hardware, f"{slot.name} is read without a fence after a store")
            known = partition is self.partition or self.partition.known.get(partition, -1) >= store.arrival
            check(known, f"{slot.name} is read without a wait for what partition {partition.name} stored")
        if slot.stores:
            return slot
        check(slot.copy is not None, f"{slot.name} is read before anything is copied to it")
        assert slot.copy is not None
        seen = self.partition.seen.get(slot.copy.barrier, 0)
        check(seen > slot.copy.phase, f"{slot.name} is read without a wait for {slot.copy.barrier}")
        return slot

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: tuple[Value | Product, ...] = ()) -> Any:
        check(len(deps) > 0, "a wait for wgmma has deps")
        products = self.partition.products
        while len(products) > num_outstanding:
            product = products.pop(0)
            if product.result is None:
                product.result = product.compute()
            product.is_done = True
            for slot in product.reads:
                slot.readers -= 1
                slot.reads[self.partition] = self.partition.arrivals
        results = tuple(x.value() if isinstance(x, Product) else x for x in deps)
        return results[0] if len(results) == 1 else results
