# SPDX-License-Identifier: Apache-2.0
"""Schedules: the blocks that a mask makes kernels visit, found once, used by many calls. No framework is imported."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from .checks import fail
from .configs import Tile, Tiles

DENSE_ENTRIES = 2**22
"""Lists of at most so many possible entries get memory for all of them; for longer lists entries are counted first."""

POSITIONS = 1024
"""Number of positions of a tensor that one program reduces."""

SEGMENTS = 8
"""For the choice of tiles, a batch row with segment ids is assumed to hold this many segments."""

PLANNED = "keys"
"""A key among the sizes of a plan of calls on paged caches. No other schedule has it."""

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """The blocks that the kernels of one op visit, for calls of one size. Make it with `op.schedule(...)`.

    It is valid for the values that the mask's tensors and scalars had when it was made. `tables` are, for each pass in
    the order of PASSES, its ranges of blocks, int32 `[B or 1, Hq or 1, blocks, 4]`. For a mask with holes they are the
    spans of its lists, of the same shape, and the lists themselves, int16 or int32. Passes with the same blocks share
    their tables. In packed calls, `sequences` are cu_seqlens_q and cu_seqlens_k, and the first table of each pass holds
    the sequence of each block; the others are `[Hq or 1, entries, 4]`.
    """

    op: str
    call: Mapping[str, Any]
    sequences: tuple[Any, ...] = ()
    tiles: Mapping[str, tuple[int, int]]
    tables: tuple[Any, ...]

    @property
    def is_plan(self) -> bool:
        """True if `op.plan(...)` made it: it then holds how the keys of each sequence are split."""
        return PLANNED in self.call

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum({id(x): x.nbytes for x in self.tables}.values())

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a replay keeps the addresses of the tables here, which are others in a copy."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class ScheduledOp(Protocol, Generic[_P, _R]):
    """An op whose blocks are read from tables."""

    schedule: Callable[..., Schedule]
    plan: Callable[..., Schedule]
    backward: Callable[..., Any]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


def scheduled(
    schedule: Callable[..., Schedule], plan: Callable[..., Schedule] | None = None
) -> Callable[[Callable[_P, _R]], ScheduledOp[_P, _R]]:
    """Give an op its `schedule` function, and its `plan` function of calls on paged caches if there is one.

    Both take all keywords of the op: one call's keywords serve all three. They read those that blocks depend on.
    """

    def attach(op: Callable[_P, _R]) -> ScheduledOp[_P, _R]:
        for name, function in (("schedule", schedule), ("plan", plan)):
            if function is not None:
                op.__dict__[name] = _with_keywords_of(op, f"{op.__name__}.{name}", function)
        whole: Any = op
        attached: ScheduledOp[_P, _R] = whole
        return attached

    return attach


def _with_keywords_of(op: Callable[..., Any], name: str, function: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """A function that leaves out the keywords that the op alone takes."""
    read, known = inspect.signature(function).parameters, inspect.signature(op).parameters

    @wraps(function)
    def call(*args: Any, **given: Any) -> Schedule:
        # What neither knows is passed on: Python refuses it.
        return function(
            *args, **{keyword: x for keyword, x in given.items() if keyword in read or keyword not in known}
        )

    # Python's errors about arguments name a function by this.
    inspect.unwrap(function).__qualname__ = call.__qualname__ = name
    return call


def least_block(*tiles: Tile) -> int:
    """The smallest block of some passes. All blocks are powers of two, so every block is a multiple of it."""
    return min(min(tile.block_m, tile.block_n) for tile in tiles)


def schedule_tables(op: str, schedule: object, call: Mapping[str, Any], tiles: Tiles | None) -> list[Any]:
    """The tables of a call's schedule, checked to be of this op, this size and these tiles."""
    if not isinstance(schedule, Schedule):
        fail(op, "schedule", f"what {op}.schedule(...) returns, or None", type(schedule).__name__)
    if schedule.op != op:
        fail(op, "schedule", f"one made by {op}.schedule", f"one made by {schedule.op}.schedule")
    if schedule.is_plan:
        fail(op, "schedule", f"one made by {op}.schedule", f"one made by {op}.plan")
    for name, value in call.items():
        if schedule.call[name] != value:
            fail(op, "schedule", f"one made for {name} {value}", f"one made for {name} {schedule.call[name]}")
    for name, (block_m, block_n) in schedule.tiles.items():
        tile = None if tiles is None else tiles[name]
        if tile is not None and (tile.block_m, tile.block_n) != (block_m, block_n):
            expected = f"one made for {name} blocks of {tile.block_m} by {tile.block_n}, those of this call"
            fail(op, "schedule", expected, f"one made for {block_m} by {block_n}")
    return list(schedule.tables)
