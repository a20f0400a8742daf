"""One program of a Hopper kernel: its shared memory, mbarriers, TMA, wgmma and warps."""

from __future__ import annotations

import linecache
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from .assembly import inline_asm_elementwise
from .barriers import Barrier, Barriers
from .errors import check
from .partitions import Partition, Scheduler, Wait, emulated_place, learn
from .tiles import Addition, BlockType, Copy, Descriptor, JoinedTile, Product, Slot, Tile, multiply
from .values import DTYPES, NAMES, Operand, Pointer, Value, zeros

SHARED_BYTES = 227 * 1024
"""Shared memory of a program on sm_90."""

NAMED_BARRIER = re.compile(r"bar\.(sync|arrive) (\d+), (\d+);")
"""Instructions on one of the 16 named barriers of the hardware: number, and threads that arrive; `sync` also waits."""


class Timing(Enum):
    """When asynchronous operations happen. The hardware may do either, and each shows bugs that the other hides."""

    EARLY_PRODUCTS = "products at their issue, copies when nothing else can go on"
    LATE_PRODUCTS = "copies at their issue, products when they are waited for"


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
        self.slots: list[Slot] = []
        self._named: dict[int, Barrier] = {}
        self._launch = Partition(f"launch of program {self.number}", self.warps)

    @property
    def partition(self) -> Partition:
        """The partition that runs now; outside `warp_specialize` a partition of all warps of the launch."""
        return self.scheduler.current or self._launch

    def _land_oldest(self) -> bool:
        if not self.copies:
            return False
        self.copies.popleft().land()
        return True

    def _allocation(self) -> str:
        """The name of an allocation in errors: the variable that it is assigned to, and its place in the source."""
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
        self.slots += slots
        # Elements that are read before they are written are NaN, or the smallest int.
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
        # The partitions begin at a barrier, so they know what the launch did before.
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
        # A partition that waited for this arrival runs at once, as far as it can.
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
        """Arrive at a named barrier, where `partitions` partitions arrive in each phase."""
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
        # A copy takes the columns of a swizzled tile in parts of 128 bytes.
        check(all(size <= 256 for size in block_shape[:-1]), f"a tile of {block_shape} for TMA")
        block_type = BlockType(NAMES[elements.dtype], list(block_shape))
        return Descriptor(elements, sizes, steps, block_type, layout)

    def async_load(self, desc: Descriptor, coordinates: list[Operand], barrier: Barrier, tile: Tile) -> None:
        slot = tile.slot
        check(list(tile.data.shape) == desc.block_type.shape, f"{desc.block_type.shape} for {list(tile.data.shape)}")
        check(tile.layout == desc.layout and tile.dtype == desc.dtype, "a tile unlike its descriptor")
        self.check_overwrite(slot)
        for partition, store in slot.stores.items():
            fenced = store.is_fenced_for(self.partition)
            check(fenced, f"{slot.name} is copied to without a fence after a store")
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
        """Check that this partition knows that all reads of a slot are over."""
        check(slot.readers == 0, f"{slot.name} is overwritten while a wgmma may still read it")
        for reader, arrival in slot.reads.items():
            known = reader is self.partition or self.partition.known.get(reader, -1) >= arrival
            check(known, f"{slot.name} is overwritten without a wait for the reads of partition {reader.name}")

    def fence_async_shared(self) -> None:
        for slot in self.slots:
            for partition, store in slot.stores.items():
                if partition is self.partition:
                    store.is_fenced = True
                elif partition is not self._launch and self.partition.known.get(partition, -1) >= store.arrival:
                    # What is stored ahead of all partitions is fenced there: none of them waits for it.
                    store.fenced_by_readers.add(self.partition)

    def async_add(self, desc: Descriptor, coordinates: list[Operand], tile: Tile) -> None:
        [slot] = self.readable(tile)
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
        slots = [slot for x in (a, b) if isinstance(x, Tile) for slot in self.readable(x)]
        added = acc if use_acc else None

        def compute() -> Tensor:
            # The tiles are read as they are when the product happens; values in registers never change.
            for x in (a, b):
                if isinstance(x, JoinedTile):
                    x.refresh()
            before = added.result if isinstance(added, Product) else None if added is None else added.data
            assert added is None or before is not None
            return multiply(a.data, b.data, before)

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

    def readable(self, tile: Tile, *, by_hardware: bool = True) -> Sequence[Slot]:
        """The slots of a tile, after a check that this partition, or TMA and wgmma for it, may read the tile."""
        for slot in tile.slots:
            self._check_readable(slot, by_hardware)
        return tile.slots

    def _check_readable(self, slot: Slot, by_hardware: bool) -> None:
        for partition, store in slot.stores.items():
            fenced = store.is_fenced_for(self.partition)
            check(fenced or not by_hardware, f"{slot.name} is read without a fence after a store")
            known = partition is self.partition or self.partition.known.get(partition, -1) >= store.arrival
            check(known, f"{slot.name} is read without a wait for what partition {partition.name} stored")
        if slot.stores:
            return
        check(slot.copy is not None, f"{slot.name} is read before anything is copied to it")
        assert slot.copy is not None
        seen = self.partition.seen.get(slot.copy.barrier, 0)
        check(seen > slot.copy.phase, f"{slot.name} is read without a wait for {slot.copy.barrier}")

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
