# SPDX-License-Identifier: Apache-2.0
"""Schedules of JAX ops, and the functions by which launches make their tables."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

from ..core.checks import fail
from ..core.configs import INTERPRETER, next_power_of_2
from ..core.schedules import Schedule
from .kernels import INTERPRET, device_arch, launch
from .sequences import Tokens
from .support import values_are_checked
from .tensor import INT32, Tensor

ListLaunch = Callable[[Tensor, Tensor, bool, bool], object]
"""Launches a list kernel on (spans, blocks), with its flags OWN_ROOM and FILL."""


def _flatten(schedule: Schedule) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    static = (schedule.op, tuple(schedule.call.items()), tuple(schedule.tiles.items()))
    return (schedule.sequences, schedule.tables), static


def _unflatten(static: tuple[Any, ...], children: Any) -> Schedule:
    op, call, tiles = static
    sequences, tables = children
    return Schedule(op=op, call=dict(call), sequences=sequences, tiles=dict(tiles), tables=tables)


def _to_bytes(static: tuple[Any, ...]) -> bytes:
    return json.dumps(static).encode()


def _from_bytes(text: bytes) -> Any:
    return _tuples(json.loads(text))


def _tuples(x: Any) -> Any:
    """`x` with tuples for the lists that JSON made of them. Static parts hold no lists: JAX hashes them."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


# As a pytree, a schedule can be passed through jit, scan and checkpoint as arrays can.
jax.tree_util.register_pytree_node(Schedule, _flatten, _unflatten)
# So can it be to exported functions. A process may import several packages, each with schedules of its own.
jax.export.register_pytree_node_serialization(
    Schedule,
    serialized_name=f"{Schedule.__module__}.{Schedule.__qualname__}",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)


def launches_on() -> str | None:
    """The architecture that kernels launched now would be compiled for; None if the reference is computed instead."""
    if jax.default_backend() == "gpu":
        return device_arch("schedule")
    return INTERPRETER if INTERPRET else None


def call_sizes(
    batch: int, heads: int, q_len: int, kv_len: int, row_offset: int, row_offsets: Any, tokens: Tokens | None
) -> dict[str, Any]:
    """What a schedule depends on besides the mask's own arguments."""
    offset = row_offset if row_offsets is None else "one per batch row"
    sizes = {"batch size": batch, "query heads": heads, "q length": q_len, "kv length": kv_len}
    return {"calls": "of dense rows" if tokens is None else tokens.kind, **sizes, "q_offset": offset}


def packed_sizes(
    sequences: int, heads: int, q_len: int, kv_len: int, row_offset: int, row_offsets: Any
) -> dict[str, Any]:
    """The same sizes for a packed call."""
    offset = row_offset if row_offsets is None else "one per sequence"
    sizes = {"query heads": heads, "q rows": q_len, "kv rows": kv_len}
    return {"calls": "of packed sequences", "sequences": sequences, **sizes, "q_offset": offset}


def check_sequences(op: str, schedule: Schedule, cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array) -> None:
    """Check that a schedule was made for these sequences, if their values are known on the host."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for name, made_for, given in zip(names, schedule.sequences, (cu_seqlens_q, cu_seqlens_k), strict=False):
        if made_for is given or not (values_are_checked(given) and values_are_checked(made_for)):
            continue
        if not np.array_equal(np.asarray(made_for), np.asarray(given)):
            fail(op, "schedule", f"one made for the {name} of this call", "one made for other sequences")


def list_blocks(launch_lists: ListLaunch, shape: tuple[int, ...], others: int, like: Tensor) -> list[Tensor]:
    """The spans `[*shape, 4]` of block lists, one for each list, and their entries, with room for `others` in a list.

    No list can need more room. Sizes must be fixed before the device counts the entries.
    """
    spans = like.new_empty((*shape, 4), dtype=INT32)
    count = spans.numel() // 4
    if count * others >= 2**31:
        raise ValueError(f"lists of {count} rows of {others} blocks are more than the 2**31 they can be numbered with")
    blocks = like.new_empty(count * others, dtype="int16" if others < 2**15 else INT32)
    launch_lists(spans, blocks, True, True)
    return [spans, blocks]


def block_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q_total: int, kv_total: int, block: int, by_keys: bool
) -> Tensor:
    """The sequence of each block of packed queries, or `by_keys` of packed keys: int32 `[entries, 8]`.

    There are as many entries as there can be blocks at most.
    """
    # The module defines a kernel, so only packed calls import it.
    from ..core.packed_blocks import packed_blocks

    num_seqs = cu_seqlens_q.shape[0] - 1
    total = kv_total if by_keys else q_total
    num_entries = min(total, total // block + num_seqs)
    block_seqs = cu_seqlens_q.new_empty((num_entries, 8))
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
    """A counter at 0: the pieces of work that the programs of a kernel take in addition to the first of each."""
    return like.new_zeros((1,), dtype=INT32)
