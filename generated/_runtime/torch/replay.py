# SPDX-License-Identifier: Apache-2.0
"""Replays calls at little more than the cost of their launches.

What a call computes on the CPU, such as checks, strides and tiles, follows from what its arguments look like, not from
the values in its tensors. So the second call of a kind is recorded: which memory it allocates, and which kernels it
launches with which arguments. From the third call on, only that is done. A call that does anything else on the device,
such as copying an input or waiting for a number, is never replayed. If gradients are wanted, the replay calls an
autograd function. Its forward only allocates and launches, and so does its backward once that was recorded; the graph
of autograd is the same as without replay. The seed of dropout, another one in each step, is no part of a call's kind:
launches get the one of the call, which follows the pointers of its tensors.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from math import copysign
from operator import or_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import SEED_END, is_seed
from ..core.options import CallOptions
from ..core.schedules import Schedule
from .last_call import LastCall
from .launching import ENABLED, active, launches_are_watched
from .plans import Plan, Step, bare_apply
from .recording import Recording

MOST_KINDS = 2048
"""The most kinds of calls of one function that are remembered. Before one more is, all are forgotten."""

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

_SEEN, _NEVER = object(), object()  # States of a kind of call without a plan: seen once; never to be replayed.
_SEED = object()  # Stands for any seed.
_PLAIN = (Tensor, torch.nn.Parameter)


class _Cast(NamedTuple):
    """A kind of call whose arguments `names` must be cast to int32; after the cast it is a call of another kind."""

    names: list[str]


def apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Tensor, ...]:
    """`function.apply(*args)`, of an autograd function whose forward calls one that is `replayed`."""
    results: tuple[Tensor, ...]
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            # A program keeps no autograd function: what one computes would have no gradient. An operator has its own.
            results = function.kernels().forward_op(*args)  # type: ignore[attr-defined]
            return results
        results = function.apply(*_distinct(args))
        return results
    if torch._C._are_functorch_transforms_active():
        results = getattr(function, "transformed", function).apply(*args)
        return results
    # The same as `function.apply` without transforms, except that it would look up the forward's signature each time.
    unwrapped = [torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args]
    compile_ahead = getattr(function, "compile_ahead", None)
    if compile_ahead is not None and torch.is_grad_enabled() and any(_requires_grad(x) for x in unwrapped):
        compile_ahead(unwrapped)
    results = bare_apply(function)(*unwrapped)
    if active.recording is not None:
        active.recording.applied.append((function, unwrapped, results))
    return results


def _distinct(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, views for tensors that came before: Dynamo traces no autograd function that gets one twice."""
    found: list[Any] = []
    for x in args:
        is_repeated = isinstance(x, Tensor) and any(x is before for before in found)
        found.append(x.view(x.shape) if is_repeated else x)
    return tuple(found)


def _requires_grad(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def replayed_op(*integers: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`replayed` of an op. Its kernels read these arguments, and those of INTEGERS, as int32, whatever their dtype."""

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        return replayed(function, (*INTEGERS, *integers))

    return decorated


def replayed(
    function: Callable[_P, _R], integers: Sequence[str] = (), parameters: Sequence[str] = ()
) -> Callable[_P, _R]:
    """Replay the calls of a function that returns tensors which its launches filled: one, or a tuple.

    Tensors among `integers` of another dtype than int32 are cast in each call, because the host cannot know whether a
    CUDA graph or another kernel has changed their values. After the cast, the call is replayed. `parameters`: the names
    of arguments that are given by position.
    """
    if not ENABLED:
        return function
    plans: dict[Hashable, Any] = {}
    seed_place = parameters.index("seed") if "seed" in parameters else None
    before: Plan | Step | None = None
    last: LastCall | None = None

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A traced call is not replayed.
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return function(*args, **kwargs)
        # Nor is a call that a dispatch mode or a transform sees.
        if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
            result = function(*args, **kwargs)
            if active.recording is not None:
                active.recording.forwards.append(result)
            return result
        nonlocal before, last
        if kwargs.get("dropout_p") is not None and type(kwargs.get("seed")) is not int:
            kwargs["seed"] = _seed_of(args, kwargs)
        values = (*args, *kwargs.values())
        like = last
        if like is not None and (found := like.pointers(values, kwargs)) is not None and not launches_are_watched():
            return like.plan(*found)  # type: ignore[no-any-return]
        given: list[Tensor] = []
        pointers: list[int] = []
        place = seed_place
        if "seed" in kwargs:
            names: list[Any] = [*kwargs]
            place = len(args) + names.index("seed")
        key = _kind_of(values, given, pointers, kwargs, place)
        if key is None or launches_are_watched():
            return function(*args, **kwargs)
        plan = plans.get(key)
        if isinstance(plan, (Plan, Step)):
            if plan is before:
                # Only a kind that comes twice in a row is kept as the last call. Other calls are found by their keys.
                last = _last_call(values, kwargs, plan, place if len(pointers) > len(given) else None)
            before = plan
            return plan(given, pointers)  # type: ignore[no-any-return]
        if plan is None and (others := [name for name in integers if _is_other_integer(kwargs.get(name))]):
            plan = plans[key] = _Cast(others)
        if isinstance(plan, _Cast):
            changed: Any = dict(kwargs)
            changed |= {name: changed[name].to(torch.int32) for name in plan.names}
            return call(*args, **changed)
        if plan is _SEEN:
            with Recording(given, pointers) as recording:
                active.recording = recording
                try:
                    result = function(*args, **kwargs)
                finally:
                    active.recording = None
            differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in given)
            plans[key] = (recording.step if differentiates else recording.plan)(result) or _NEVER
            return result
        result = function(*args, **kwargs)
        if plan is None:
            if len(plans) >= MOST_KINDS:
                plans.clear()
            plans[key] = _SEEN
        return result

    def plan_of(values: Sequence[Any]) -> Any:
        """What is known of calls with such arguments: a plan, a step, or one of the other values of `plans`."""
        key = _kind_of(values, [], [], (), seed_place)
        return None if key is None else plans.get(key)

    call.__dict__["plan_of"] = plan_of
    return call


def _last_call(
    values: Sequence[Any], names: Iterable[str], plan: Plan | Step, seed_place: int | None
) -> LastCall | None:
    """The call in a form to compare the next one with, which has the same plan if it looks the same."""
    try:
        return LastCall(values, names, plan, seed_place)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _seed_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The seed of a call of an op as a number: one in a tensor on the CPU, or a drawn one. Any other is returned as it
    is: the op draws one, or refuses it."""
    seed, dropout_p = kwargs.get("seed"), kwargs["dropout_p"]
    if type(seed) is Tensor and seed.dim() == 0 and seed.device.type == "cpu" and seed.dtype == torch.int64:
        return seed.item()
    may_draw = seed is None and type(dropout_p) is float and 0 < dropout_p < 1
    if may_draw and args and type(args[0]) in _PLAIN and _is_current(args[0]):
        return drawn_seed().item()
    return seed


def drawn_seed() -> Tensor:
    """A seed `[]` from torch's default CPU generator, which `torch.manual_seed` repeats."""
    return torch.randint(SEED_END - 1, (), device="cpu")


def _kind_of(
    values: Sequence[Any],
    given: list[Tensor],
    pointers: list[int],
    names: Iterable[str],
    seed_place: int | None,
) -> tuple[Any, ...] | None:
    """All that decides what a call does; None if it must not be replayed.

    The tensors of the call and their pointers are appended to `given` and `pointers`, and at last to the pointers the
    number at `seed_place`, if there is one and it is a seed.
    """
    if not values or type(values[0]) not in _PLAIN or not _is_current(values[0]) or forward_ad._current_level >= 0:
        return None
    differentiates = torch.is_grad_enabled()
    autocast_dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    kind: list[Any] = [*names, autocast_dtype, torch.are_deterministic_algorithms_enabled()]
    pending = list(values)
    low_bits = 0
    seeds = []
    if seed_place is not None and is_seed(values[seed_place]):
        seeds = [values[seed_place]]
        pending[seed_place] = _SEED
    try:
        for x in pending:
            of = type(x)
            if of in _PLAIN:
                pointer = x.data_ptr()
                if pointer == 0 or x.is_neg():
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
            elif x is _SEED:
                kind.append(of)
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
        # A tensor has no memory, such as one of `torch.func.vmap`.
        return None
    if low_bits % 16:
        # Triton compiles another kernel if a pointer is not a multiple of 16.
        kind += [pointer % 16 for pointer in pointers]
    if len(set(pointers)) < len(pointers):
        # A recording knows tensors by their pointers alone, so the key says which arguments have the same one.
        kind += [pointers.index(pointer) for pointer in pointers]
    pointers += seeds
    return tuple(kind)


def _known(schedule: Schedule) -> tuple[Hashable, list[Tensor], list[int], int]:
    """The key of a schedule, its tensors, their pointers, and the bitwise or of these pointers."""
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
    """Whether a value is a tensor of integers of another dtype than int32."""
    if not isinstance(x, Tensor) or x.dtype in (torch.int32, torch.bool):
        return False
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _is_current(x: Tensor) -> bool:
    """Whether a tensor is on the current device: Triton launches there."""
    return x.is_cuda and x.get_device() == torch._C._cuda_getDevice()
