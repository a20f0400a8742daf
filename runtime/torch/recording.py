"""Records what a call does on the device: its allocations and launches, and which allocations it returns."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.settings import HAS_TRITON
from .launching import launcher_of
from .plans import Plan, Step, bare_apply, maker

if HAS_TRITON:
    from triton.compiler import CompiledKernel

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_ZEROS = {torch.ops.aten.new_zeros.default}

_STREAM = 3
"""The place of the stream among the arguments of a launch."""

_SCRATCH = 7
"""The place of the pointer to scratch memory among the arguments of `CudaLauncher.launch`."""

_LINE = 512
"""Offsets into memory that only launches use are multiples of so many bytes, as addresses of torch's memory are."""


class _Launch(NamedTuple):
    """A launch. `arguments` are all arguments of `run`; the stream and pointers are still to be put at their places."""

    compiled: Any
    run: Callable[..., object]
    arguments: list[Any]
    pointers: list[tuple[int, int]]  # (place, number of the pointer)
    scratch: int  # Bytes of scratch memory, for which the arguments have a place.

    def split(
        self, stream: int, constants: list[Any]
    ) -> tuple[Callable[[Sequence[Any]], tuple[Any, ...]], tuple[Any, ...]]:
        """The arguments in two parts: a function that picks those up to the last pointer, and the others as they are.

        The function picks from a list of the pointers, the stream, at index `stream`, and `constants`. The first
        arguments that are neither pointers nor the stream are appended to `constants`.
        """
        places = dict(self.pointers) | {_STREAM: stream}
        end = max(places) + 1
        for place, value in enumerate(self.arguments[:end]):
            if place not in places:
                places[place] = stream + 1 + len(constants)
                constants.append(value)
        return itemgetter(*(places[place] for place in range(end))), tuple(self.arguments[end:])


def _is_swapped(x: Tensor, of: Tensor) -> bool | None:
    """True if `x` is the tensor `of` with axes 1 and 2 swapped, False if it is that tensor itself; None for others."""
    if (x.data_ptr(), x.dtype, x.requires_grad) != (of.data_ptr(), of.dtype, of.requires_grad):
        return None
    looks = list(zip(x.shape, x.stride(), strict=True))
    others = list(zip(of.shape, of.stride(), strict=True))
    if looks == others:
        return False
    swapped = [others[i] for i in (0, 2, 1, 3)] if len(others) == 4 else None
    return True if looks == swapped else None


class Recording(TorchDispatchMode):
    """Records what a call does on the device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skipping Dynamo would import it at the first use, for two seconds. Dynamo never traces a recording."""
        return False

    def __init__(self, given: Sequence[Tensor], pointers: Sequence[int]) -> None:
        """`pointers` are those of the given tensors, then the seed of the call if a replay gets another one."""
        super().__init__()
        self._is_whole = True
        self._given, self._num_given = given, len(pointers)
        self._seed = pointers[len(given)] if len(pointers) > len(given) else None
        self._numbers: dict[int, int] = {}
        for number, pointer in enumerate(pointers[: len(given)]):
            self._numbers.setdefault(pointer, number)
        self._made: list[Tensor] = []  # Kept alive, so that no two have one pointer.
        self._zeroed: list[bool] = []
        self._launches: list[_Launch] = []
        self.applied: list[tuple[Any, Sequence[Any], tuple[Tensor, ...]]] = []
        self.forwards: list[Any] = []  # What the forwards of `applied` returned.

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS or func in _ZEROS:
            self._numbers.setdefault(result.data_ptr(), self._num_given + len(self._made))
            self._made.append(result)
            self._zeroed.append(func in _ZEROS)
        elif not func.is_view or not isinstance(result, Tensor) or result.data_ptr() != args[0].data_ptr():
            self._is_whole = False
        return result

    def note(
        self, kernel: Any, compiled: Any, grid: tuple[int], args: Sequence[Any], constants: dict[str, Any]
    ) -> None:
        """Note a launch."""
        if not isinstance(compiled, CompiledKernel):
            self._is_whole = False
            return
        values = dict(zip(kernel.arg_names, args, strict=False)) | constants
        run, arguments, scratch = launcher_of(compiled, grid)
        pointers = []
        for place, name in enumerate(kernel.arg_names, start=len(arguments)):
            value = values[name]
            if isinstance(value, Tensor):
                number = self._numbers.get(value.data_ptr())
                self._is_whole &= number is not None
                pointers.append((place, number or 0))
                value = None
            elif name == "seed" and self._seed is not None:
                self._is_whole &= value == self._seed
                pointers.append((place, len(self._given)))
                value = None
            arguments.append(value)
        self._launches.append(_Launch(compiled, run, arguments, pointers, scratch))

    def plan(self, returned: Any) -> Plan | None:
        """The plan to run in place of such a call; None if the call did more than allocate and launch."""
        looks: dict[int, Tensor] = {}
        for x in returned if isinstance(returned, tuple) else (returned,):
            made = self._numbers.get(x.data_ptr(), -1) - self._num_given
            if made < 0 or made in looks or (x.numel(), x.dtype) != (self._made[made].numel(), self._made[made].dtype):
                return None
            # A result that is a view with its axes in another order is allocated in that order.
            looks[made] = x
        devices = {x.device for x in self._made}
        if not self._is_whole or len(devices) != 1:
            return None
        device = devices.pop()
        sizes = [0 if made in looks else _room_of(x.untyped_storage().nbytes()) for made, x in enumerate(self._made)]
        zeroed = {made for made, x in enumerate(self._made) if self._zeroed[made] and x.numel() > 0}
        scratches = [_room_of(launch.scratch) for launch in self._launches]
        # If most of the room must be zeros, all of it is zeroed. Otherwise zeros are tensors of their own.
        zeroes_room = 2 * sum(sizes[made] for made in zeroed) > sum(sizes) + sum(scratches)
        apart = {*looks, *([] if zeroes_room else zeroed)}
        allocations = [looks.get(made, self._made[made]) for made in sorted(apart)]
        numbers = {self._num_given + made: self._num_given + place for place, made in enumerate(sorted(apart))}
        offsets: list[int] = []
        room, after = 0, self._num_given + len(allocations)
        for made, size in enumerate(sizes):
            if made not in apart:
                numbers[self._num_given + made] = after + len(offsets)
                offsets.append(room)
                room += size
        launches = []
        for launch, size in zip(self._launches, scratches, strict=True):
            pointers = [(place, numbers.get(number, number)) for place, number in launch.pointers]
            if size:
                pointers.append((_SCRATCH, after + len(offsets)))
                offsets.append(room)
                room += size
            launches.append(launch._replace(pointers=pointers))
        constants: list[Any] = []
        return Plan(
            device=device.index or 0,
            make=maker(device),
            allocations=[(tuple(x.shape), x.stride(), x.dtype) for x in allocations],
            zeroed=[place for place, made in enumerate(sorted(apart)) if made in zeroed],
            offsets=offsets,
            room=room // torch.float32.itemsize,
            zeroes_room=zeroes_room,
            launches=[(each.run, *each.split(after + len(offsets), constants)) for each in launches],
            constants=constants,
            kernels=[each.compiled for each in launches],
            results=[sorted(apart).index(made) for made in looks],
            returns_tuple=isinstance(returned, tuple),
            takes_scratch=any(each.scratch == 0 < each.compiled.metadata.global_scratch_size for each in launches),
            takes_seed=self._seed is not None,
        )

    def step(self, returned: Any) -> Step | None:
        """The step to run in place of such a call if gradients are wanted; None if the call cannot be replayed."""
        if len(self.applied) != 1 or len(self.forwards) != 1:
            return None
        (function, args, outputs), forward = self.applied[0], self.plan(self.forwards[0])
        pointers = [x.data_ptr() for x in self._given]
        # If two tensors begin at one address, nothing tells which of them a gradient belongs to.
        if forward is None or any(x.requires_grad and pointers.count(x.data_ptr()) > 1 for x in self._given):
            return None
        numbers: list[Any] = []
        places: list[int] = []
        order: list[tuple[int, bool]] = []
        tables: list[tuple[int, bool]] = []
        for place, value in enumerate(args):
            if isinstance(value, Tensor):
                ways = [(number, _is_swapped(value, x)) for number, x in enumerate(self._given)]
                found = [(number, way) for number, way in ways if way is not None]
                if not found:
                    return None
                places.append(place)
                order.append(found[0])
                value = None
            elif isinstance(value, list) and value:
                # The tensors of a schedule, which must be the given ones themselves.
                tables = [(next((n for n, x in enumerate(self._given) if x is each), -1), False) for each in value]
                if (-1, False) in tables:
                    return None
                value = None
            numbers.append(value)
        o, *others = returned if isinstance(returned, tuple) else (returned,)
        swaps_result = _is_swapped(o, outputs[0])
        if swaps_result is None or any(x is not outputs[1] for x in others):
            return None
        seed_place = None
        if self._seed is not None:
            seed_place = function.kernels().parameters.index("seed")
            if args[seed_place] != self._seed:
                return None
        return Step(
            bare_apply(function.again),
            forward,
            numbers,
            places,
            order + tables,
            len(self._given),
            seed_place=seed_place,
            swaps_result=swaps_result,
            returns_tuple=isinstance(returned, tuple),
        )


def _room_of(size: int) -> int:
    """A number of bytes, rounded up to a multiple of _LINE."""
    return -(-size // _LINE) * _LINE
