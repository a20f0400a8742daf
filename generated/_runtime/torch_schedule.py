"""Schedules: the blocks that a mask makes a kernel visit, found once and used by many calls."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from .checks import fail
from .configs import PASSES, Tile, Tiles, next_power_of_2
from .torch_sequences import Tokens, values_are_checked
from .torch_support import HAS_TRITON, launches_directly, on_device

if HAS_TRITON:
    from .packed_blocks import packed_blocks

DENSE_ENTRIES = 2**22
"""Lists of so many entries at most get the room they could need; beyond it the entries are counted first."""

POSITIONS = 1024
"""So many positions of a tensor are reduced by one program."""

SEGMENTS = 8
"""A row with segment ids is taken to hold so many segments, for the choice of tiles."""

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)

Launch = Callable[[Tensor, Tensor, bool, bool], object]
"""Launches a list kernel on (spans, blocks), with its flags OWN_ROOM and FILL."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """The blocks that the kernels of one op visit, for calls of one size. Make it with `op.schedule(...)`.

    It holds what the mask's tensors and scalars were when it was made. `tables` are, for each pass in the order of
    PASSES, its ranges of blocks, int32 `[B or 1, Hq or 1, blocks, 4]`, or for a mask with holes the spans of its lists,
    of that shape, and the lists themselves, int16 or int32. Passes with the same blocks share theirs. Of packed
    sequences, `sequences` are cu_seqlens_q and cu_seqlens_k, and each pass has one table more, first, with the sequence
    of each block; the others are `[Hq or 1, entries, 4]`.
    """

    op: str
    call: Mapping[str, Any]
    sequences: tuple[Tensor, ...] = ()
    tiles: Mapping[str, tuple[int, int]]
    tables: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum({id(x): x.nbytes for x in self.tables}.values())


class ScheduledOp(Protocol, Generic[_P, _R]):
    """An op whose blocks are read from tables."""

    schedule: Callable[..., Schedule]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


def scheduled(schedule: Callable[..., Schedule]) -> Callable[[Callable[_P, _R]], ScheduledOp[_P, _R]]:
    """Give an op its `schedule` function."""

    def attach(op: Callable[_P, _R]) -> ScheduledOp[_P, _R]:
        op.__dict__["schedule"] = schedule
        whole: Any = op
        attached: ScheduledOp[_P, _R] = whole
        return attached

    return attach


def call_sizes(
    q: Tensor, k: Tensor, row_offset: int, row_offsets: Tensor | None, tokens: Tokens | None
) -> dict[str, Any]:
    """What a schedule depends on besides the mask's own arguments; q and k are `[B, H, S, D]`."""
    offset = row_offset if row_offsets is None else "one per batch row"
    sizes = {"batch size": q.shape[0], "query heads": q.shape[1], "q length": q.shape[2], "kv length": k.shape[2]}
    kind = "of dense rows" if tokens is None else tokens.kind
    return {"calls": kind, **sizes, "device": q.device, "q_offset": offset}


def packed_sizes(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, row_offset: int, row_offsets: Tensor | None
) -> dict[str, Any]:
    """The same of a packed call; q and k are `[1, H, total, D]`."""
    offset = row_offset if row_offsets is None else "one per sequence"
    sizes = {"query heads": q.shape[1], "q rows": q.shape[2], "kv rows": k.shape[2]}
    sequences = cu_seqlens_q.shape[0] - 1
    return {"calls": "of packed sequences", "sequences": sequences, **sizes, "device": q.device, "q_offset": offset}


def least_block(*tiles: Tile) -> int:
    """The smallest block of some passes: its multiples, powers of two as they all are, make up every other."""
    return min(min(tile.block_m, tile.block_n) for tile in tiles)


def list_blocks(launch: Launch, shape: tuple[int, ...], others: int, device: torch.device) -> list[Tensor]:
    """Spans `[*shape, 4]` and entries of as many lists, each of at most `others` entries."""
    count = math.prod(shape)
    dtype = torch.int16 if others < 2**15 else torch.int32
    spans = torch.empty((*shape, 4), dtype=torch.int32, device=device)
    if count * others <= DENSE_ENTRIES:
        blocks = torch.empty(count * others, dtype=dtype, device=device)
        launch(spans, blocks, True, True)
        return [spans, blocks]
    # Packed sequences may have fewer blocks than there are lists: the others count nothing.
    spans.zero_()
    launch(spans, spans, False, False)
    room = spans.view(-1, 4)[:, 0]
    ends = room.cumsum(0)
    total = int(ends[-1])
    if total >= 2**31:
        raise ValueError(f"the lists of blocks have {total} entries, more than the 2**31 they can be numbered with")
    spans.view(-1, 4)[:, 0] = ends - room
    spans.view(-1, 4)[:, 3] = ends
    blocks = torch.empty(total, dtype=dtype, device=device)
    launch(spans, blocks, False, True)
    return [spans, blocks]


def block_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q_total: int, kv_total: int, block: int, by_keys: bool
) -> Tensor:
    """The sequence of each block of packed queries, or `by_keys` of packed keys: int32 `[entries, 8]`.

    There are as many entries as there could be blocks, so that nothing waits for the device.
    """
    num_seqs = cu_seqlens_q.shape[0] - 1
    total = kv_total if by_keys else q_total
    num_entries = min(total, total // block + num_seqs)
    block_seqs = cu_seqlens_q.new_empty((num_entries, 8))
    if num_seqs > 0:
        with on_device(cu_seqlens_q):
            packed_blocks[(num_seqs,)](
                cu_seqlens_q,
                cu_seqlens_k,
                block_seqs,
                num_seqs,
                q_total,
                kv_total,
                num_entries,
                BY_KEYS=by_keys,
                BLOCK=block,
                CHUNK=min(1024, next_power_of_2(max(num_seqs, 16))),
            )
    return block_seqs


def schedule_tables(op: str, schedule: object, call: Mapping[str, Any], tiles: Tiles | None) -> list[Tensor]:
    """The tables of a call's schedule, checked to be of this op, this size and these tiles."""
    if not isinstance(schedule, Schedule):
        fail(op, "schedule", f"what {op}.schedule(...) returns, or None", type(schedule).__name__)
    if schedule.op != op:
        fail(op, "schedule", f"one made by {op}.schedule", f"one made by {schedule.op}.schedule")
    for name, value in call.items():
        if schedule.call[name] != value:
            fail(op, "schedule", f"one made for {name} {value}", f"one made for {name} {schedule.call[name]}")
    for name, (block_m, block_n) in schedule.tiles.items():
        tile = None if tiles is None else tiles[name]
        if tile is not None and (tile.block_m, tile.block_n) != (block_m, block_n):
            expected = f"one made for {name} blocks of {tile.block_m} by {tile.block_n}, those of this call"
            fail(op, "schedule", expected, f"one made for {block_m} by {block_n}")
    return list(schedule.tables)


def check_sequences(op: str, schedule: Schedule, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that a schedule is of these sequences: at no cost if they are the very tensors, else as cu_seqlens are."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for name, made_for, given in zip(names, schedule.sequences, (cu_seqlens_q, cu_seqlens_k), strict=False):
        if made_for is given or not launches_directly(given):
            continue
        if values_are_checked(given):
            if not torch.equal(made_for, given):
                fail(op, "schedule", f"one made for the {name} of this call", "one made for other sequences")
        else:
            torch._assert_async((made_for == given).all(), f"{op}: the schedule was made for other {name}")


def pass_table(tables: list[Tensor], name: str, count: int) -> list[Tensor]:
    """The `count` tables of one pass: its ranges, or spans and entries; none where no schedule was given."""
    first = count * PASSES.index(name)
    return tables[first : first + count]
