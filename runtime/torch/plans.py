"""What a kind of call does on the device, done again.

A plan is what memory a call takes, and which compiled kernels it launches with which arguments. A step is a plan whose
gradients are wanted: a call of an autograd function that does the plan and, where it is known, that of its backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .last_call import Alike, guards, modes_of_backward
from .launching import current_stream, giving_scratch, is_seen_by_others, launches_are_watched

_MOST_TRIES = 4
"""So many times a step looks whether what its backward does is known."""


class Plan(NamedTuple):
    """What a kind of call does on the device, its pointers numbered: those it is given, those it allocates, and those
    into a room of memory that its launches alone see, which begin at `offsets`.

    Attributes:
        make: makes a tensor of a shape, strides and dtype. allocations: what it is given.
        zeroed: which of these are filled with zeros. room: what the room is allocated as, its number of floats.
        zeroes_room: whether the room is filled with zeros. results: which of the allocations are returned.
        launches: what runs each kernel, what picks its first arguments from pointers, the stream and `constants`, and
            its other arguments.
        kernels: kept alive: with them their machine code would go.
        takes_scratch: whether a launch asks Triton's allocator for memory.
    """

    device: int
    make: Callable[..., Tensor]
    allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeroed: list[int]
    offsets: list[int]
    room: int
    zeroes_room: bool
    launches: list[tuple[Callable[..., object], Callable[[Sequence[Any]], tuple[Any, ...]], tuple[Any, ...]]]
    constants: list[Any]
    kernels: list[Any]
    results: list[int]
    returns_tuple: bool
    takes_scratch: bool

    def __call__(self, _given: Sequence[Tensor], pointers: list[int]) -> Any:
        device, make, allocations, zeroed, offsets, room, zeroes_room, launches, constants, _, results, *flags = self
        made = [make(shape, stride, dtype) for shape, stride, dtype in allocations]
        for i in zeroed:
            made[i].zero_()
        pointers += [x.data_ptr() for x in made]
        if offsets:
            # Kept until the launches are done with it on their stream, as any tensor is.
            work = make((room,), (1,), torch.float32)
            if zeroes_room:
                work.zero_()
            base = work.data_ptr()
            pointers += [base + offset for offset in offsets]
        values = [*pointers, current_stream(device), *constants]
        returns_tuple, takes_scratch = flags
        if takes_scratch:
            with giving_scratch():
                for run, pick, others in launches:
                    run(*pick(values) + others)
        else:
            for run, pick, others in launches:
                run(*pick(values) + others)
        return tuple([made[i] for i in results]) if returns_tuple else made[results[0]]


class Step:
    """A kind of call whose gradients are wanted: an autograd function of the tensors given, its forward planned.

    Attributes:
        apply: of the autograd function, which takes the step, pointers and tensors. forward: its plan.
        numbers: the other arguments of the function whose calls it stands for. places: those of its tensors there.
        count: how many of the tensors are not tables of a schedule, which come last.
        order: for each tensor its number among those given, and whether its axes 1 and 2 are swapped; None if they are
            those given as they are.
    """

    __slots__ = (
        "_backward",
        "_tries",
        "apply",
        "count",
        "forward",
        "numbers",
        "order",
        "places",
        "returns_tuple",
        "swaps_result",
    )

    def __init__(
        self,
        apply: Callable[..., Any],
        forward: Plan,
        numbers: list[Any],
        places: list[int],
        order: list[tuple[int, bool]],
        num_given: int,
        *,
        swaps_result: bool,
        returns_tuple: bool,
    ) -> None:
        self.apply, self.forward, self.numbers, self.places = apply, forward, numbers, places
        self.count, self.swaps_result, self.returns_tuple = len(places), swaps_result, returns_tuple
        as_given = [(number, False) for number in range(num_given)]
        self.order = None if order == as_given else order
        self._backward: tuple[Alike, Plan, Sequence[int] | None] | None = None
        self._tries = 0

    def __call__(self, given: Sequence[Tensor], pointers: list[int]) -> Any:
        if self.order is not None:
            given = [given[i].transpose(1, 2) if is_swapped else given[i] for i, is_swapped in self.order]
        if not self.returns_tuple:
            o = self.apply(self, pointers, *given)
            return o.transpose(1, 2) if self.swaps_result else o
        o, lse, *_ = self.apply(self, pointers, *given)
        return (o.transpose(1, 2) if self.swaps_result else o), lse

    def gradients(self, given: Sequence[Tensor]) -> tuple[Tensor | None, ...] | None:
        """What its backward returns, from the gradients of its results and what was saved; None if that is to be
        computed as ever."""
        if self._backward is None or is_seen_by_others() or launches_are_watched():
            return None
        like, plan, returned = self._backward
        pointers = like.pointers(given)
        if pointers is None:
            return None
        found = plan(given, pointers)
        if returned is None:
            return (None, None, *found)
        every = (*found, None)
        return (None, None, *[every[i] for i in returned])

    def learn(self, given: Sequence[Tensor], returned: Sequence[int], find: Callable[[], Any]) -> None:
        """Note what the backward of such tensors does, which `find` finds if it is known.

        `returned`: for each tensor the number of its gradient among those that it makes, -1 where it has none.
        """
        if self._backward is not None or self._tries == _MOST_TRIES or is_seen_by_others():
            return
        self._tries += 1
        plan = find()
        if isinstance(plan, Plan):
            try:
                in_order = [*returned] == [*range(len(plan.results))]
                self._backward = Alike(given, modes_of_backward), plan, None if in_order else returned
            except (AttributeError, TypeError, RuntimeError):
                self._tries = _MOST_TRIES


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` behind what it does for transforms."""
    bare: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = bare.apply
    return apply


def maker(device: torch.device) -> Callable[..., Tensor]:
    """What makes an empty tensor of a shape, strides and a dtype on the current device, which is `device`."""
    make: Callable[..., Tensor] | None = getattr(guards, "_empty_strided_cuda", None)  # what inductor allocates with
    if device.type == "cuda" and make is not None:
        return make
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
