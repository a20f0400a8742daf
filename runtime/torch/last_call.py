"""The last replayed call of a function, kept to find out at little cost whether the next call looks the same.

torch.compile's guards compare all tensors in one step of C++: dtypes, shapes, strides, devices, whether gradients are
wanted, and the modes that decide what an operator does. Everything else is compared in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import is_seed
from ..core.options import CallOptions
from ..core.schedules import Schedule

try:
    from torch._C._dynamo import guards as guards
except ImportError:  # it is no public name
    guards = None  # type: ignore[assignment]

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (int, float, str)


def modes_of_forward() -> tuple[Any, ...]:
    """What a call depends on besides its arguments."""
    return (
        torch._C._cuda_getDevice() if torch.cuda.is_initialized() else None,
        torch.is_grad_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.are_deterministic_algorithms_enabled(),
        forward_ad._current_level,
    )


def modes_of_backward() -> tuple[Any, ...]:
    """What a backward depends on besides its arguments."""
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else None, torch.is_grad_enabled()


def _is_equal(x: object, known: object) -> bool:
    """Whether two values, not tensors, have one type and are equal. Zeros never are: their signs may differ."""
    if type(x) is not type(known):
        return False
    if isinstance(x, CallOptions) and isinstance(known, CallOptions):
        return x.key == known.key
    return type(x) in _PLAIN and x == known and x != 0


class Alike:
    """What some tensors look like, and the modes that were on when they were given."""

    __slots__ = ("_check", "_count", "_find", "_modes")

    def __init__(self, tensors: Sequence[Tensor], modes: Callable[[], tuple[Any, ...]] = modes_of_forward) -> None:
        """Raises `TypeError` for tensors that cannot be compared, `AttributeError` where torch has no such guards."""
        compared: Any = getattr(guards, "TensorGuards")  # noqa: B009  # an AttributeError where torch has none
        self._find, self._modes, self._count = modes, modes(), len(tensors)
        self._check = compared(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        if self.pointers(tensors) is None:
            raise TypeError("one tensor twice, or at places that decide which kernels are compiled")

    def pointers(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """The addresses of tensors that look like the known ones.

        None if they look different, or if their addresses could change which kernels are compiled.
        """
        if len(tensors) != self._count or self._find() != self._modes or not self._check(*tensors):
            return None
        return plain_places([x.data_ptr() for x in tensors])


def plain_places(pointers: list[int]) -> list[int] | None:
    """The pointers; None if one of them is not a multiple of 16, occurs twice or is 0."""
    return pointers if gcd(*pointers) % 16 == 0 and 0 not in pointers and len(set(pointers)) == len(pointers) else None


class LastCall:
    """What a call looked like, and `plan`, which is run in its place.

    A schedule is held by a weak reference, because it keeps tables on the device.
    """

    __slots__ = ("_alike", "_count", "_names", "_order", "_others", "_schedules", "_seed_place", "_tensors", "plan")

    def __init__(self, values: Sequence[Any], names: Iterable[str], plan: Any, seed_place: int | None = None) -> None:
        """Raises `TypeError` for a call that cannot be compared so, `AttributeError` where torch has no such guards.

        `seed_place`: the place of a seed, which may be another one in the next call.
        """
        self.plan = plan
        self._names = tuple(names)
        self._tensors = [place for place, x in enumerate(values) if type(x) in _TENSORS]
        self._schedules = {place: ref(x) for place, x in enumerate(values) if type(x) is Schedule}
        told = {*self._tensors, *self._schedules}
        self._order = sorted(told)
        self._seed_place, self._count = seed_place, len(values)
        self._others = [(place, x) for place, x in enumerate(values) if place not in told and place != seed_place]
        if any(type(x) is list for _, x in self._others):
            raise TypeError("lists of tensors are not compared")
        self._alike = Alike([values[place] for place in self._tensors])
        if self.pointers(values, self._names) is None:
            raise TypeError("a tensor twice, one of them in a schedule")

    def pointers(self, values: Sequence[Any], names: Iterable[str]) -> tuple[Sequence[Tensor], list[int]] | None:
        """The tensors of a call and their addresses, in the order of its arguments, then its seed if it has one.

        None if the call looks different, or if the addresses could change which kernels are compiled.
        """
        if len(values) != self._count:
            return None
        for place, known in self._others:
            x = values[place]
            if x is not known and not _is_equal(x, known):
                return None
        seeds = []
        if self._seed_place is not None:
            seeds = [values[self._seed_place]]
            if not is_seed(seeds[0]):
                return None
        tensors = [values[place] for place in self._tensors]
        if tuple(names) != self._names or (pointers := self._alike.pointers(tensors)) is None:
            return None
        if not self._schedules:
            return tensors, pointers + seeds
        given: list[Tensor] = []
        pointers = []
        for place in self._order:
            x = values[place]
            held = self._schedules.get(place)
            if held is None:
                given.append(x)
                pointers.append(x.data_ptr())
            elif held() is x:
                _, tables, places, _ = x.__dict__["known"]
                given += tables
                pointers += places
            else:
                return None
        return None if plain_places(pointers) is None else (given, pointers + seeds)
