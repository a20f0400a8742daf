# SPDX-License-Identifier: Apache-2.0
"""Records once what a rank does in a call over several ranks, and repeats it.

Which views and copies a call makes, what it sends, and how it calls its op follow from what its arguments look like and
from its layout, not from the values in its tensors. So the second call of a kind is recorded. From the third on its
steps are repeated, without the code that chose them. A call of the op, of a collective or of a kernel is a single step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import proxy

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from ..backward import Gradients
from ..plans import maker
from .collectives import Collectives, GridCollectives

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_METHODS: Mapping[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: Tensor.add_,
    _aten.cat.default: torch.cat,
    _aten.copy_.default: Tensor.copy_,
    _aten.index_add_.default: Tensor.index_add_,
    _aten.index_copy_.default: Tensor.index_copy_,
    _aten.index_select.default: torch.index_select,
}
"""For some operators a function of the same arguments that takes less CPU time."""

_REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}

_P = ParamSpec("_P")
_R = TypeVar("_R")

Registers = list[Any]
"""The tensors and the seed that a call is given, then constants and the results of its steps, each at its own place."""


class Number(int):
    """A number that each call gives anew, such as a seed: a tape reads it from a register.

    A call may pass it on, but not compute with it: the result would be an `int`, which a tape keeps as a constant.
    """


class Step(NamedTuple):
    """A function of registers. Its results go to those from `first` on. No later step reads the `dead` ones."""

    function: Callable[..., Any]
    arguments: Callable[[Registers], tuple[Any, ...]]
    keywords: tuple[tuple[str, int], ...]
    first: int
    num_results: int
    dead: tuple[int, ...]


class Tape:
    """What a kind of call does: its steps, the constants in registers, and which registers it returns."""

    def __init__(self, constants: Sequence[Any], steps: Sequence[Step], results: Sequence[int | None]) -> None:
        self._constants, self._steps, self._results = constants, steps, results

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        registers: Registers = [*given, *self._constants]
        for function, arguments, keywords, first, count, dead in self._steps:
            if keywords:
                found = function(*arguments(registers), **{name: registers[place] for name, place in keywords})
            else:
                found = function(*arguments(registers))
            if count == 1:
                registers[first] = found
            elif count:
                registers[first : first + count] = found
            for place in dead:
                registers[place] = None
        return [None if place is None else registers[place] for place in self._results]


class Notes(TorchDispatchMode):
    """Records what a call computes from the tensors, and a `Number`, that it is given.

    Attributes:
        op, comm: recorded versions of the op and the collectives, to be called in place of them.
    """

    def __init__(self, given: Sequence[Tensor | Number | None], op: Any, comm: Collectives) -> None:
        super().__init__()
        # Both refer to the notes weakly. A cycle would keep the tensors of the notes until the garbage collector runs.
        self.op, self.comm = _NotedOp(proxy(self), op), noted(proxy(self), comm)
        assert isinstance(given[0], Tensor)
        self._device, self._num_given = given[0].device, len(given)
        # The key of a call does not say whether two arguments are one tensor, so such a call has no tape.
        self._is_whole = len(set(map(id, given))) == len(given)
        self._values: Registers = []
        self._made: set[int] = set()
        self._bases: dict[int, int] = {}  # Id of a tensor -> the register whose memory it is a view of.
        self._owners: dict[int, int] = {}  # Memory -> the register that has it.
        self._views: dict[Any, int] = {}
        self._alive: list[Tensor] = []  # Kept alive, so that no two have one id.
        self._steps: list[tuple[Callable[..., Any], list[int], dict[str, int], int, int]] = []
        places = {id(x): self._new(x) for x in given}
        self._numbers = {id(x): places[id(x)] for x in given if isinstance(x, Number)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as in `Recording`."""
        return False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, (list, tuple)) else [result]
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if not all(isinstance(x, Tensor) and x.device == self._device for x in found) or _REFUSED & set(func.tags):
            self._is_whole = False
        elif func._schema.is_mutable:
            self._is_whole &= result is first
            self._note(_METHODS.get(func, func), args, kwargs or {}, [])
        elif first is not None and found and _memory(found[0]) == _memory(first):
            for x in found:
                self._same_memory(x, first)
        elif func in _ALLOCATIONS:
            self._note(maker(self._device), [tuple(result.shape), result.stride(), result.dtype], {}, found)
        else:
            self._note(_METHODS.get(func, func), args, kwargs or {}, found)
        return result

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that returns tensors, and record the call as one step, whatever the function does."""
        with _disable_current_modes():
            result = function(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})
        self._note(function, args, kwargs, result if isinstance(result, tuple) else [result])
        return result

    def tape(self, results: Sequence[Tensor | None]) -> Tape | None:
        """The tape to run in place of such a call, which returned `results`; None if not all of it was recorded."""
        places = [None if x is None else self._place(x) for x in results]
        if not self._is_whole:
            return None
        last: dict[int, int] = {}
        for number, (_, arguments, keywords, first, count) in enumerate(self._steps):
            last |= dict.fromkeys([*arguments, *keywords.values(), *range(first, first + count)], number)
        if not set(self._numbers.values()) <= set(last):
            return None  # The number is used in another way than as an argument.
        dead: dict[int, list[int]] = {}
        for place, number in last.items():
            if place in self._made and place not in places:
                dead.setdefault(number, []).append(place)
        steps = [
            Step(function, _picked(arguments), tuple(keywords.items()), first, count, tuple(dead.get(number, ())))
            for number, (function, arguments, keywords, first, count) in enumerate(self._steps)
        ]
        constants = [None if place in self._made else x for place, x in enumerate(self._values)]
        return Tape(constants[self._num_given :], steps, places)

    # ------------------------------------------------------------------------------------------------------- registers

    def _note(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Record a step with its results. A result in memory of a known register is still read from that register."""
        arguments = [self._argument(x) for x in args]
        keywords = {name: self._argument(x) for name, x in kwargs.items()}
        first = len(self._values)
        for x in results:
            owner = self._owners.get(_memory(x))
            self._made.add(self._new(x if owner is None else None))
            if owner is not None:
                self._bases.setdefault(id(x), owner)
                self._alive.append(x)
        self._steps.append((function, arguments, keywords, first, len(results)))

    def _new(self, value: Any) -> int:
        """Add a register that holds a value."""
        place = len(self._values)
        self._values.append(value)
        if isinstance(value, Tensor):
            self._bases.setdefault(id(value), place)
            self._owners.setdefault(_memory(value), place)
        return place

    def _same_memory(self, x: Tensor, other: Tensor) -> None:
        base = self._bases.get(id(other))
        if base is not None:
            self._bases.setdefault(id(x), base)
            self._alive.append(x)

    def _argument(self, x: Any) -> int:
        """The register of an argument."""
        if isinstance(x, Tensor):
            return self._place(x)
        if isinstance(x, Number):
            return self._numbers[id(x)]
        if isinstance(x, (list, tuple)) and any(isinstance(each, Tensor) for each in x):
            places = [self._argument(each) for each in x]
            found = self._new(list(x))
            self._made.add(found)
            self._steps.append((_together, places, {}, found, 1))
            return found
        return self._new(x)

    def _place(self, x: Tensor) -> int:
        """The register that holds a tensor. If the tensor is a view, a step is added that makes the view."""
        base = self._bases.get(id(x))
        if base is None:
            # A constant, such as a table of the layout, or a view of one.
            owner = self._owners.get(_memory(x), self._num_given)
            self._is_whole &= x.device == self._device and owner >= self._num_given and owner not in self._made
            return self._new(x)
        if x.dtype != self._values[base].dtype:
            try:
                base = self._view(base, Tensor.view, x.dtype)
            except RuntimeError:  # not all of its memory can be viewed in this dtype
                self._is_whole = False
                return base
        like, geometry = self._values[base], (tuple(x.shape), x.stride(), x.storage_offset())
        if (tuple(like.shape), like.stride(), like.storage_offset()) == geometry:
            return base
        return self._view(base, torch.as_strided, *geometry)

    def _view(self, base: int, function: Callable[..., Tensor], *how: Any) -> int:
        key = (base, function, *how)
        if key not in self._views:
            with _disable_current_modes():
                made = function(self._values[base], *how)
            arguments = [base, *map(self._new, how)]
            self._views[key] = place = len(self._values)
            self._values.append(made)
            self._made.add(place)
            self._steps.append((function, arguments, {}, place, 1))
        return self._views[key]


def as_one_step(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that returns new tensors: a tape records its call as one step, whatever it does."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        notes = _get_current_dispatch_mode()
        found: _R = notes.called(function, *args, **kwargs) if isinstance(notes, Notes) else function(*args, **kwargs)
        return found

    return call


class _InputGradients:
    """An op's gradients of q, k and v alone. A tape keeps this object, so it must not refer to the notes' tensors."""

    def __init__(self, op: Any) -> None:
        self._op = op

    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._op.backward(*args, **keywords)[:3]
        return found


class _NotedOp:
    """An op whose calls are recorded as steps."""

    def __init__(self, notes: Notes, op: Any) -> None:
        self._notes, self._op = notes, op
        self._of_inputs = _InputGradients(op)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._notes.called(self._op, *args, **keywords)

    def backward(self, *args: Any, **keywords: Any) -> Gradients:
        """The gradients of q, k and v. A call with gradients of the variant's own tensors is never recorded."""
        dq, dk, dv = self._notes.called(self._of_inputs, *args, **keywords)
        return Gradients(dq, dk, dv, {})


class _NotedCollectives:
    """Collectives whose calls are recorded as steps."""

    def __init__(self, notes: Notes, comm: Any) -> None:
        self._notes, self._comm = notes, comm
        self.size, self.rank, self.device_type = comm.size, comm.rank, comm.device_type

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        return lambda *args: self._notes.called(method, *args)


def noted(notes: Notes, comm: Any) -> Any:
    """Collectives whose calls are recorded in `notes`."""
    if isinstance(comm, GridCollectives):
        return GridCollectives(noted(notes, comm.outer), noted(notes, comm.inner))
    return _NotedCollectives(notes, comm)


def _memory(x: Tensor) -> int:
    """A number that identifies the memory of a tensor while it lives."""
    found: int = x.untyped_storage()._cdata
    return found


def _plain(x: Any) -> Any:
    return int(x) if isinstance(x, Number) else x


def _together(*tensors: Any) -> tuple[Any, ...]:
    return tensors


def _picked(places: Sequence[int]) -> Callable[[Registers], tuple[Any, ...]]:
    """A function that picks the values of some registers."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places or (-1,)
    return (lambda registers: (registers[place],)) if places else lambda registers: ()
