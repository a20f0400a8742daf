"""Repeats what a kind of call does on the device.

A plan says which memory a call allocates, and which compiled kernels it launches with which arguments. A step stands
for a call whose gradients are wanted: it calls an autograd function that runs the plan of the forward and, if it is
known, the plan of the backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .last_call import Alike, guards, modes_of_backward
from .launching import current_stream, giving_scratch, is_seen_by_others, launches_are_watched

_MOST_TRIES = 4
"""How many times a step looks at most whether the plan of its backward is known."""


class Plan(NamedTuple):
    """What a kind of call does on the device.

    Its pointers are numbered: first those of the given tensors, then those of the tensors that it allocates, then those
    into a room, which is memory that only its launches use, at the byte `offsets`. A seed that each call gives has the
    number after those of the given tensors.

    Attributes:
        make: makes a tensor of a shape, strides and dtype. allocations: the arguments for it, one tuple per tensor.
        zeroed: which of these tensors are filled with zeros. room: the size of the room, in float32 numbers.
        zeroes_room: whether the room is filled with zeros. results: which of the allocated tensors are returned.
        launches: for each kernel the function that runs it, the function that picks its first arguments from pointers,
            the stream and `constants`, and its other arguments.
        kernels: the compiled kernels. This reference keeps their machine code loaded.
        takes_scratch: whether a launch asks Triton's allocator for memory. takes_seed: whether a seed follows the
            pointers of the given tensors.
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
    takes_seed: bool

    def __call__(self, _given: Sequence[Tensor], pointers: list[int]) -> Any:
        device, make, allocations, zeroed, offsets, room, zeroes_room, launches, constants, _, results, *flags = self
        made = [make(shape, stride, dtype) for shape, stride, dtype in allocations]
        for i in zeroed:
            made[i].zero_()
        pointers += [x.data_ptr() for x in made]
        if offsets:
            # As with any tensor, its memory is reused only by work that is queued on the stream after the launches.
            work = make((room,), (1,), torch.float32)
            if zeroes_room:
                work.zero_()
            base = work.data_ptr()
            pointers += [base + offset for offset in offsets]
        values = [*pointers, current_stream(device), *constants]
        returns_tuple, takes_scratch, _ = flags
        if takes_scratch:
            with giving_scratch():
                for run, pick, others in launches:
                    run(*pick(values) + others)
        else:
            for run, pick, others in launches:
                run(*pick(values) + others)
        return tuple([made[i] for i in results]) if returns_tuple else made[results[0]]


class Step:
    """A kind of call whose gradients are wanted: an autograd function whose forward runs a plan.

    Attributes:
        apply: `apply` of the autograd function, which takes the step, pointers and tensors. forward: the plan.
        numbers: the arguments of the function whose calls this one replaces, with None for tensors. places: the places
            of the tensors among them.
        count: how many of the tensors are not tables of a schedule, which come last. num_given: of all given tensors.
        seed_place: the place of a seed, which each call gives anew, among the arguments of the function, or None.
        order: for each tensor its number among the given ones, and whether its axes 1 and 2 are swapped; None if the
            tensors are the given ones, unchanged.
    """

    __slots__ = (
        "_backward",
        "_tries",
        "apply",
        "count",
        "forward",
        "num_given",
        "numbers",
        "order",
        "places",
        "returns_tuple",
        "seed_place",
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
        seed_place: int | None = None,
        swaps_result: bool,
        returns_tuple: bool,
    ) -> None:
        self.apply, self.forward, self.numbers, self.places = apply, forward, numbers, places
        self.count, self.swaps_result, self.returns_tuple = len(places), swaps_result, returns_tuple
        self.num_given, self.seed_place = num_given, seed_place
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

    def seed_of(self, pointers: Sequence[int]) -> int | None:
        """The seed of a call with these pointers."""
        return None if self.seed_place is None else pointers[self.num_given]

    def gradients(self, given: Sequence[Tensor], seed: int | None) -> tuple[Tensor | None, ...] | None:
        """What the backward returns, from the gradients of the results and the saved tensors, by the known plan.

        None if no plan is known for these tensors, or if it must not be used: the caller then computes the gradients.
        """
        if self._backward is None or is_seen_by_others() or launches_are_watched():
            return None
        like, plan, returned = self._backward
        pointers = like.pointers(given)
        if pointers is None:
            return None
        if seed is not None:
            pointers.append(seed)
        found = plan(given, pointers)
        if returned is None:
            return (None, None, *found)
        every = (*found, None)
        return (None, None, *[every[i] for i in returned])

    def learn(self, given: Sequence[Tensor], returned: Sequence[int], find: Callable[[], Any]) -> None:
        """Keep the plan of the backward of tensors that look like these, if `find` finds one.

        `returned`: for each tensor the number of its gradient among the plan's results, or -1 if it has none.
        """
        if self._backward is not None or self._tries == _MOST_TRIES or is_seen_by_others():
            return
        self._tries += 1
        plan = find()
        if isinstance(plan, Plan) and plan.takes_seed == (self.seed_place is not None):
            try:
                in_order = [*returned] == [*range(len(plan.results))]
                self._backward = Alike(given, modes_of_backward), plan, None if in_order else returned
            except (AttributeError, TypeError, RuntimeError):
                self._tries = _MOST_TRIES


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the code that it runs for transforms of `torch.func`."""
    bare: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = bare.apply
    return apply


def maker(device: torch.device) -> Callable[..., Tensor]:
    """A function that makes empty tensors from shape, strides and dtype on the current device, which is `device`."""
    make: Callable[..., Tensor] | None = getattr(guards, "_empty_strided_cuda", None)  # what inductor allocates with
    if device.type == "cuda" and make is not None:
        return make
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
