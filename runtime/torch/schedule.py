"""Schedules: the blocks that a mask makes a kernel visit, found once and used by many calls."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.configs import next_power_of_2
from ..core.schedules import DENSE_ENTRIES, Schedule
from .dispatch import launches_directly, values_are_checked
from .launching import launch
from .sequences import Tokens

Launch = Callable[[Tensor, Tensor, bool, bool], object]
"""Launches a list kernel on (spans, blocks), with its flags OWN_ROOM and FILL."""


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
    """The same for the schedule of a packed call; q and k are `[total, H, D]`."""
    offset = row_offset if row_offsets is None else "one per sequence"
    sizes = {"query heads": q.shape[1], "q rows": q.shape[0], "kv rows": k.shape[0]}
    sequences = cu_seqlens_q.shape[0] - 1
    return {"calls": "of packed sequences", "sequences": sequences, **sizes, "device": q.device, "q_offset": offset}


def list_blocks(launch: Launch, shape: tuple[int, ...], others: int, like: Tensor) -> list[Tensor]:
    """Spans `[*shape, 4]` and entries of as many lists, each of at most `others` entries."""
    count = math.prod(shape)
    dtype = torch.int16 if others < 2**15 else torch.int32
    spans = like.new_empty((*shape, 4), dtype=torch.int32)
    if count * others <= DENSE_ENTRIES:
        blocks = like.new_empty(count * others, dtype=dtype)
        launch(spans, blocks, True, True)
        return [spans, blocks]
    # Packed sequences may have fewer blocks than there are lists: the other lists stay empty.
    spans.zero_()
    launch(spans, spans, False, False)
    room = spans.view(-1, 4)[:, 0]
    ends = room.cumsum(0)
    total = int(ends[-1])
    if total >= 2**31:
        raise ValueError(f"the lists of blocks have {total} entries, more than the 2**31 they can be numbered with")
    spans.view(-1, 4)[:, 0] = ends - room
    spans.view(-1, 4)[:, 3] = ends
    blocks = like.new_empty(total, dtype=dtype)
    launch(spans, blocks, False, True)
    return [spans, blocks]


def block_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q_total: int, kv_total: int, block: int, by_keys: bool
) -> Tensor:
    """The sequence of each block of packed queries, or `by_keys` of packed keys: int32 `[entries, 8]`.

    There are as many entries as there could be blocks, so that nothing waits for the device.
    """
    # A kernel: imported by the first packed call.
    from ..core.packed_blocks import packed_blocks

    num_seqs = cu_seqlens_q.shape[0] - 1
    total = kv_total if by_keys else q_total
    num_entries = min(total, total // block + num_seqs)
    block_seqs = cu_seqlens_q.new_empty((num_entries, 8))
    if num_seqs > 0:
        launch(
            packed_blocks,
            (num_seqs,),
            (cu_seqlens_q, cu_seqlens_k, block_seqs, num_seqs, q_total, kv_total, num_entries),
            BY_KEYS=by_keys,
            BLOCK=block,
            CHUNK=min(1024, next_power_of_2(max(num_seqs, 16))),
        )
    return block_seqs


def work_counter(like: Tensor) -> Tensor:
    """A counter, 0 at first, of the pieces of work that a kernel's programs take after the first one of each."""
    return like.new_zeros((1,), dtype=torch.int32)


def check_sequences(op: str, schedule: Schedule, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that a schedule is for these sequences: free for the same tensors, else as values of cu_seqlens are."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for name, made_for, given in zip(names, schedule.sequences, (cu_seqlens_q, cu_seqlens_k), strict=False):
        if made_for is given or not launches_directly(given):
            continue
        if values_are_checked(given):
            if not torch.equal(made_for, given):
                fail(op, "schedule", f"one made for the {name} of this call", "one made for other sequences")
        else:
            torch._assert_async((made_for == given).all(), f"{op}: the schedule was made for other {name}")
