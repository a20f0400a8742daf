"""Calls that are done again for little more than their launches cost.

What a call computes on the CPU, such as checks, strides and tiles, follows from what its arguments look like, not from
what its tensors hold. So the second call of a kind is noted: what memory it takes, and which kernels it launches with
which arguments. From the third on, that alone is done. A call that does anything else on the device, such as copying an
input or waiting for a number, is never replayed. Where gradients are wanted, what is done again is a call of an
autograd function, whose forward does that alone; the graph of autograd is as ever.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from importlib.metadata import version
from math import copysign
from operator import or_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..core.options import CallOptions
from ..core.schedules import Schedule
from ..core.settings import DEBUG, HAS_TRITON, INTERPRET
from .last_call import LastCall

MOST_KINDS = 2048
"""So many kinds of calls of one function are remembered; then all are forgotten."""

# In these versions a compiled kernel is run with the same arguments. AMD's kernels are specialised on more than a kind
# of call tells: on how large the memory of a tensor is. Where values are checked, every call is to check its own.
ENABLED = (
    HAS_TRITON
    and not INTERPRET
    and not DEBUG
    and torch.version.hip is None
    and version("triton").startswith(("3.6.", "3.7.", "3.8.", "3.9."))
)

if HAS_TRITON:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import _allocation

_P = ParamSpec("_P")
_R = TypeVar("_R")
INTEGERS = (
    "q_offset",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
    "kv_lengths",
    "page_table",
    "page_starts",
)
"""Arguments of every op that are tensors of integers, or may be."""

_SEEN, _NEVER = object(), object()  # What is known of a kind of call: that it came once; that it cannot be replayed.
_PLAIN = (Tensor, torch.nn.Parameter)
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_ZEROS = {torch.ops.aten.new_zeros.default}


class _Allocation(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool


class _Launch(NamedTuple):
    """A launch: `arguments` are all that `compiled.run` takes, once the stream and pointers are at their places."""

    compiled: Any  # Kept alive: with it its machine code would go.
    run: Callable[..., object]
    arguments: list[Any]
    pointers: list[tuple[int, int]]  # (place, number of the pointer)


_STREAM = 3
"""The place of the stream."""


_LINE = 512
"""What begins in memory that launches alone see is a multiple of so many bytes, as what torch allocates is."""


class _Plan(NamedTuple):
    """What a kind of call does on the device, its pointers numbered: those it is given, those it allocates, and those
    into `size` bytes that its launches alone see, which begin at `offsets`."""

    device: torch.device
    allocations: list[_Allocation]
    offsets: list[int]
    size: int
    launches: list[_Launch]
    results: list[int]
    returns_tuple: bool
    takes_scratch: bool

    def __call__(self, _given: Sequence[Tensor], pointers: list[int]) -> Any:
        device, allocations, offsets, size, launches, results, returns_tuple, takes_scratch = self
        made = []
        for shape, stride, dtype, zeroed in allocations:
            x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            made.append(x.zero_() if zeroed else x)
        pointers += [x.data_ptr() for x in made]
        if offsets:
            # Kept until the launches are done with it on their stream, as any tensor is.
            room = torch.empty_strided((size,), (1,), dtype=torch.int8, device=device)
            base = room.data_ptr()
            pointers += [base + offset for offset in offsets]
        stream = _stream(device)
        token = _allocation._allocator.set(_scratch) if takes_scratch else None
        try:
            for _, run, arguments, places in launches:
                arguments = arguments.copy()
                arguments[_STREAM] = stream
                for place, number in places:
                    arguments[place] = pointers[number]
                run(*arguments)
        finally:
            if token is not None:
                _allocation._allocator.reset(token)
        return tuple([made[i] for i in results]) if returns_tuple else made[results[0]]


class _Cast(NamedTuple):
    """A kind of call with integers that are cast before it is a call of another kind."""

    names: list[str]


class _Step(NamedTuple):
    """A kind of call whose gradients are wanted: an autograd function of the tensors given, its forward planned."""

    apply: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, int, bool]]  # (place, number of the tensor, whether its axes 1 and 2 are swapped)
    tables: list[tuple[int, list[int]]]  # (place, numbers of the tensors of a list)
    forward: _Plan
    swaps_result: bool
    returns_tuple: bool

    def __call__(self, given: list[Tensor], pointers: list[int]) -> Any:
        arguments = self.arguments.copy()
        for place, number, is_swapped in self.tensors:
            x = given[number]
            arguments[place] = x.transpose(1, 2) if is_swapped else x
        for place, numbers in self.tables:
            arguments[place] = [given[number] for number in numbers]
        _active.forward = self.forward, pointers
        try:
            o, lse, *_ = self.apply(*arguments)
        finally:
            _active.forward = None
        if self.swaps_result:
            o = o.transpose(1, 2)
        return (o, lse) if self.returns_tuple else o


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


class _Recording(TorchDispatchMode):
    """Notes what a call does."""

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
        # As at the end of `JITFunction.run`, but without hooks.
        arguments = [*grid, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None]
        pointers = []
        for place, name in enumerate(kernel.arg_names, start=len(arguments)):
            value = values[name]
            if isinstance(value, Tensor):
                number = self._numbers.get(value.data_ptr())
                self._is_whole &= number is not None
                pointers.append((place, number or 0))
                value = None
            arguments.append(value)
        self._launches.append(_Launch(compiled, compiled.run, arguments, pointers))

    def plan(self, returned: Any) -> _Plan | None:
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
        allocations: list[_Allocation] = []
        places: dict[int, int] = {}
        offsets: dict[int, int] = {}
        size = 0
        for made, (x, zeroed) in enumerate(zip(self._made, self._zeroed, strict=True)):
            if made in looks or zeroed:
                places[made] = len(allocations)
                look = looks.get(made, x)
                allocations.append(_Allocation(tuple(look.shape), look.stride(), look.dtype, zeroed))
            else:
                offsets[made] = size
                size += -(-x.untyped_storage().nbytes() // _LINE) * _LINE
        numbers = {self._num_given + made: self._num_given + place for made, place in places.items()}
        after = self._num_given + len(allocations)
        numbers |= {self._num_given + made: after + nth for nth, made in enumerate(offsets)}
        launches = [
            launch._replace(pointers=[(place, numbers.get(number, number)) for place, number in launch.pointers])
            for launch in self._launches
        ]
        takes_scratch = any(launch.compiled.metadata.global_scratch_size > 0 for launch in launches)
        results = [places[made] for made in looks]
        is_tuple = isinstance(returned, tuple)
        return _Plan(
            devices.pop(), allocations, [*offsets.values()], size, launches, results, is_tuple, takes_scratch
        )  # fmt: skip

    def step(self, returned: Any) -> _Step | None:
        """What to do in the place of such a call where gradients are wanted."""
        if len(self.applied) != 1 or len(self.forwards) != 1:
            return None
        (function, args, outputs), forward = self.applied[0], self.plan(self.forwards[0])
        pointers = [x.data_ptr() for x in self._given]
        # Of two tensors that begin at one place, none would tell whose the gradient is.
        if forward is None or any(x.requires_grad and pointers.count(x.data_ptr()) > 1 for x in self._given):
            return None
        arguments: list[Any] = []
        tensors: list[tuple[int, int, bool]] = []
        tables: list[tuple[int, list[int]]] = []
        for place, value in enumerate(args):
            if isinstance(value, Tensor):
                ways = [(number, _is_swapped(value, x)) for number, x in enumerate(self._given)]
                found = [(place, number, way) for number, way in ways if way is not None]
                if not found:
                    return None
                tensors.append(found[0])
                value = None
            elif isinstance(value, list) and value:
                # A schedule's own tensors, as they are.
                numbers = [next((n for n, x in enumerate(self._given) if x is table), -1) for table in value]
                if -1 in numbers:
                    return None
                tables.append((place, numbers))
                value = None
            arguments.append(value)
        o, *others = returned if isinstance(returned, tuple) else (returned,)
        swaps_result = _is_swapped(o, outputs[0])
        if swaps_result is None or any(x is not outputs[1] for x in others):
            return None
        return _Step(
            bare_apply(function), arguments, tensors, tables, forward, swaps_result, isinstance(returned, tuple)
        )


class _Active(threading.local):
    recording: _Recording | None = None
    forward: tuple[_Plan, list[int]] | None = None


_active = _Active()


def is_recording() -> bool:
    """Whether a call is being noted, which takes a dispatch mode."""
    return _active.recording is not None


def _scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Memory that a kernel works in, free again for what the stream does after it."""
    with _disable_current_modes():
        return torch.empty(size, dtype=torch.int8, device="cuda")


@contextmanager
def _giving_scratch() -> Iterator[None]:
    """Kernels that describe their copies to the hardware get the memory for it, whatever allocator Triton has."""
    token = _allocation._allocator.set(_scratch)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def launch_hopper(kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None:
    """`launch` of a kernel of Hopper's family."""
    with _giving_scratch():
        launch(kernel, grid, *groups, **constants)


def launch(kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the device of the tensors; `args` are those of all groups."""
    args = tuple([x for group in groups for x in group])
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        compiled = kernel[grid](*args, **constants)
    else:
        with torch.cuda.device(device):
            compiled = kernel[grid](*args, **constants)
    if _active.recording is not None:
        _active.recording.note(kernel, compiled, grid, args, constants)


def apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, ...]:
    """`function.apply(*args)`, of an autograd function whose forward calls one that is `replayed`."""
    results: tuple[Tensor, ...]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        results = function.apply(*args)
        return results
    # What `function.apply` does without transforms, but for the signature of its forward, which it looks up each time.
    unwrapped = [torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args]
    results = bare_apply(function)(*unwrapped)
    if _active.recording is not None:
        _active.recording.applied.append((function, unwrapped, results))
    return results


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` behind what it does for transforms."""
    bare: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = bare.apply
    return apply


def replayed_op(*integers: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`replayed` of an op. Its kernels read these arguments, and those of INTEGERS, as int32, whatever they come as."""

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        return replayed(function, (*INTEGERS, *integers))

    return decorated


def replayed(function: Callable[_P, _R], integers: Sequence[str] = ()) -> Callable[_P, _R]:
    """Replay the calls of a function that returns tensors which its launches filled: one, or a tuple.

    Tensors of `integers` of another dtype than int32 are cast by each call: nothing on the host could tell that a graph
    or a kernel of somebody has changed what they hold. Behind the cast, the call is replayed.
    """
    if not ENABLED:
        return function
    plans: dict[Hashable, Any] = {}
    before: _Plan | _Step | None = None
    last: LastCall | None = None

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Traced, a call is what it is written as.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        planned = _active.forward
        if planned is not None:
            _active.forward = None
            return planned[0]([], planned[1])  # type: ignore[no-any-return]
        # So it is where a mode of somebody sees it, or a transform.
        if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
            result = function(*args, **kwargs)
            if _active.recording is not None:
                _active.recording.forwards.append(result)
            return result
        nonlocal before, last
        values = (*args, *kwargs.values())
        like = last
        if like is not None and (found := like.pointers(values, kwargs)) is not None and not _launches_are_watched():
            return like.plan(*found)  # type: ignore[no-any-return]
        given: list[Tensor] = []
        pointers: list[int] = []
        key = _kind_of(values, given, pointers, kwargs)
        if key is None or _launches_are_watched():
            return function(*args, **kwargs)
        plan = plans.get(key)
        if isinstance(plan, (_Plan, _Step)):
            if plan is before:
                # Calls of several kinds in turn are found by their keys.
                last = _last_call(values, kwargs, plan)
            before = plan
            return plan(given, pointers)  # type: ignore[no-any-return]
        if plan is None and (others := [name for name in integers if _is_other_integer(kwargs.get(name))]):
            plan = plans[key] = _Cast(others)
        if isinstance(plan, _Cast):
            changed: Any = dict(kwargs)
            changed |= {name: changed[name].to(torch.int32) for name in plan.names}
            return call(*args, **changed)
        if plan is _SEEN:
            with _Recording(given, pointers) as recording:
                _active.recording = recording
                try:
                    result = function(*args, **kwargs)
                finally:
                    _active.recording = None
            differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in given)
            plans[key] = (recording.step if differentiates else recording.plan)(result) or _NEVER
            return result
        result = function(*args, **kwargs)
        if plan is None:
            if len(plans) >= MOST_KINDS:
                plans.clear()
            plans[key] = _SEEN
        return result

    return call


def _last_call(values: Sequence[Any], names: Iterable[str], plan: _Plan | _Step) -> LastCall | None:
    """A call to compare the next with, which has the same plan if it looks the same."""
    try:
        return LastCall(values, names, plan)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _kind_of(
    values: Sequence[Any], given: list[Tensor], pointers: list[int], names: Iterable[str]
) -> tuple[Any, ...] | None:
    """All that decides what a call does; None where it must not be replayed. Its tensors and pointers are appended."""
    if not values or type(values[0]) not in _PLAIN or not _is_current(values[0]) or forward_ad._current_level >= 0:
        return None
    differentiates = torch.is_grad_enabled()
    autocast_dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    kind: list[Any] = [*names, autocast_dtype, torch.are_deterministic_algorithms_enabled()]
    pending = list(values)
    low_bits = 0
    try:
        for x in pending:
            of = type(x)
            if of in _PLAIN:
                pointer = x.data_ptr()
                if pointer == 0:
                    return None
                given.append(x)
                pointers.append(pointer)
                low_bits |= pointer
                kind += (x.dtype, x.shape, x.stride(), x.get_device(), differentiates and x.requires_grad)
            elif of is int or of is str or of is bool or x is None:
                kind += (of, x)
            elif of is float:
                kind += (of, copysign(1.0, x), x)
            elif of is tuple and all(type(each) is int for each in x):
                kind += (of, x)
            elif of is CallOptions:
                kind += (of, x.key)
            elif of is list:
                kind += (of, len(x))
                pending += x
            elif of is Schedule:
                key, tables, places, bits = _known(x)
                if 0 in places:
                    return None
                given += tables
                pointers += places
                low_bits |= bits
                kind += (of, key)
            else:
                return None
    except RuntimeError:
        # It has no memory, as a tensor of `torch.func.vmap` has none.
        return None
    if low_bits % 16:
        # Triton compiles another kernel where a pointer is no multiple of 16.
        kind += [pointer % 16 for pointer in pointers]
    if len(set(pointers)) < len(pointers):
        # Tensors that are one and the same are told apart by nothing that is noted.
        kind += [pointers.index(pointer) for pointer in pointers]
    return tuple(kind)


def _known(schedule: Schedule) -> tuple[Hashable, list[Tensor], list[int], int]:
    """What decides of a schedule what a call does, its tensors, where they are, and all bits of these."""
    found: tuple[Hashable, list[Tensor], list[int], int] | None = schedule.__dict__.get("known")
    if found is None:
        tables = [*schedule.tables, *schedule.sequences]
        looks = tuple((x.dtype, x.shape, x.stride(), x.device) for x in tables)
        key = (schedule.op, tuple(schedule.call.items()), tuple(schedule.tiles.items()), looks)
        pointers = [x.data_ptr() for x in tables]
        found = key, tables, pointers, reduce(or_, pointers, 0)
        schedule.__dict__["known"] = found
    return found


def _is_other_integer(x: object) -> bool:
    """Whether a value is a tensor of integers that are no int32."""
    if not isinstance(x, Tensor) or x.dtype in (torch.int32, torch.bool):
        return False
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _is_current(x: Tensor) -> bool:
    """Whether a tensor is on the current device: Triton launches there."""
    return x.is_cuda and x.get_device() == torch._C._cuda_getDevice()


def _stream(device: torch.device) -> int:
    """The current stream, as Triton takes it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _launches_are_watched() -> bool:
    """Whether somebody, such as a profiler, asked Triton to do more than to launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )
