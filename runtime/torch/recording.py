"""What a call does on the device, noted: its allocations and launches, and what of them makes its results."""

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
"""The place of the memory that a kernel works in, among the arguments of `CudaLauncher.launch`."""

_LINE = 512
"""What begins in memory that launches alone see is a multiple of so many bytes, as what torch allocates is."""


class _Launch(NamedTuple):
    """A launch: `arguments` are all that `run` takes, once the stream and pointers are at their places."""

    compiled: Any
    run: Callable[..., object]
    arguments: list[Any]
    pointers: list[tuple[int, int]]  # (place, number of the pointer)
    scratch: int  # Bytes of memory to work in that the arguments have a place for.

    def split(
        self, stream: int, constants: list[Any]
    ) -> tuple[Callable[[Sequence[Any]], tuple[Any, ...]], tuple[Any, ...]]:
        """The arguments in two parts: a function that picks those up to the last pointer, and the others as they are.

        It picks from pointers, the stream, at index `stream`, and `constants`, to which this adds.
        """
        places = dict(self.pointers) | {_STREAM: stream}
        end = max(places) + 1
        for place, value in enumerate(self.arguments[:end]):
            if place not in places:
                places[place] = stream + 1 + len(constants)
                constants.append(value)
        return itemgetter(*(places[place] for place in range(end))), tuple(self.arguments[end:])


def _is_swapped(x: Tensor, of: Tensor) -> bool | None:
    """Whether `x` is another tensor with axes 1 and 2 swapped, or that tensor itself; None where it is neither."""
    if (x.data_ptr(), x.dtype, x.requires_grad) != (of.data_ptr(), of.dtype, of.requires_grad):
        return None
    looks = list(zip(x.shape, x.stride(), strict=True))
    others = list(zip(of.shape, of.stride(), strict=True))
    if looks == others:
        return False
    swapped = [others[i] for i in (0, 2, 1, 3)] if len(others) == 4 else None
    return True if looks == swapped else None


class Recording(TorchDispatchMode):
    """Notes what a call does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep Dynamo out PyTorch would import it when a mode is first used, for two seconds; it traces none."""
        return False

    def __init__(self, given: Sequence[Tensor], pointers: Sequence[int]) -> None:
        super().__init__()
        self._is_whole = True
        self._given, self._num_given = given, len(given)
        self._numbers: dict[int, int] = {}
        for number, pointer in enumerate(pointers):
            self._numbers.setdefault(pointer, number)
        self._made: list[Tensor] = []  # Kept alive: no two have one pointer.
        self._zeroed: list[bool] = []
        self._launches: list[_Launch] = []
        self.applied: list[tuple[Any, Sequence[Any], tuple[Tensor, ...]]] = []
        self.forwards: list[Any] = []  # What the forwards of these returned.

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
            arguments.append(value)
        self._launches.append(_Launch(compiled, run, arguments, pointers, scratch))

    def plan(self, returned: Any) -> Plan | None:
        """What to do in the place of such a call; None where it did something else as well."""
        looks: dict[int, Tensor] = {}
        for x in returned if isinstance(returned, tuple) else (returned,):
            made = self._numbers.get(x.data_ptr(), -1) - self._num_given
            if made < 0 or made in looks or (x.numel(), x.dtype) != (self._made[made].numel(), self._made[made].dtype):
                return None
            # What is returned as a view, its axes in another order, is allocated like that.
            looks[made] = x
        devices = {x.device for x in self._made}
        if not self._is_whole or len(devices) != 1:
            return None
        device = devices.pop()
        sizes = [0 if made in looks else _room_of(x.untyped_storage().nbytes()) for made, x in enumerate(self._made)]
        zeroed = {made for made, x in enumerate(self._made) if self._zeroed[made] and x.numel() > 0}
        scratches = [_room_of(launch.scratch) for launch in self._launches]
        # Zeros are most of what launches alone see, or are tensors of their own.
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
        )

    def step(self, returned: Any) -> Step | None:
        """What to do in the place of such a call where gradients are wanted."""
        if len(self.applied) != 1 or len(self.forwards) != 1:
            return None
        (function, args, outputs), forward = self.applied[0], self.plan(self.forwards[0])
        pointers = [x.data_ptr() for x in self._given]
        # Of two tensors that begin at one place, none would tell whose the gradient is.
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
                # A schedule's own tensors, as they are.
                tables = [(next((n for n, x in enumerate(self._given) if x is each), -1), False) for each in value]
                if (-1, False) in tables:
                    return None
                value = None
            numbers.append(value)
        o, *others = returned if isinstance(returned, tuple) else (returned,)
        swaps_result = _is_swapped(o, outputs[0])
        if swaps_result is None or any(x is not outputs[1] for x in others):
            return None
        return Step(
            bare_apply(function.again),
            forward,
            numbers,
            places,
            order + tables,
            len(self._given),
            swaps_result=swaps_result,
            returns_tuple=isinstance(returned, tuple),
        )


def _room_of(size: int) -> int:
    """So many bytes, in whole lines."""
    return -(-size // _LINE) * _LINE
