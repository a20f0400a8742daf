"""Segmented calls whose segments are runs of tokens: the forward of packed calls computes them. No framework is
imported.

Whether segments are runs only the device knows. So a kernel finds out, and lays out blocks of rows that begin where
segments do: those of the packed forward. Where segments are no runs there are no blocks, and the segmented forward,
which is launched behind it, computes the call; else that one does nothing.
"""

from .configs import cdiv, next_power_of_2
from .launches import Backend, Tensor
from .options import CallOptions
from .tiles import HOPPER

LEAST_TOKENS = 64
"""Calls of fewer tokens in a segment, on average over a batch row, take the segmented kernel."""

LEAST_ITEMS = 8
"""Blocks of rows for each multiprocessor from which on what two launches more take is no more than noise."""

BLOCK = 128
"""Rows of a block of the packed forward."""

OPTIONS = CallOptions(family=HOPPER)
"""What the packed forward is asked for."""

_MOST_ROWS = 2**30
_MOST_TOKENS = 4096


def run_blocks(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    positions: Tensor | None,
) -> Tensor | None:
    """The sequence of each block of rows, int32 `[entries, 8]`, as packed calls have it; None where the call's layout
    or size rules the packed forward out."""
    batch, num_heads, length, _ = q.shape
    q_rows, k_rows, v_rows = map(batch_rows, (q, k, v))
    # One id for all, with a stride of 0, is one segment.
    if positions is not None or k.shape[2] != length or not q_segment_ids.stride(1):
        return None
    if q_rows is None or k_rows is None or k_rows != v_rows or batch * max(q_rows, k_rows, 1) >= _MOST_ROWS:
        return None
    num_items = batch * num_heads * cdiv(length, BLOCK)
    if num_items < LEAST_ITEMS * backend.multiprocessors(q) or batch * num_heads * length >= 2**31:
        return None
    from ..device.segment_runs import find_runs, lay_out_runs

    room = cdiv(length, LEAST_TOKENS)
    runs = q.new_empty((batch, room, 2), dtype=backend.INT32)
    counts = q.new_empty((batch,), dtype=backend.INT32)
    backend.launch(
        find_runs,
        (batch,),
        (q_segment_ids, kv_segment_ids, runs, counts),
        (*q_segment_ids.stride(), *kv_segment_ids.stride(), length, padding_id, room),
        CHUNK=min(_MOST_TOKENS, next_power_of_2(max(length, 32))),
    )
    block_seqs = q.new_empty((batch * (length // BLOCK + room), 8), dtype=backend.INT32)
    backend.launch(
        lay_out_runs,
        (batch * room,),
        (runs, counts, block_seqs),
        (batch, room, length, q_rows, k_rows, num_heads),
        BLOCK=BLOCK,
        CHUNK=min(1024, next_power_of_2(max(batch * room, 32))),
    )
    return block_seqs


def batch_rows(x: Tensor) -> int | None:
    """How many rows in memory batch rows of `[B, H, S, D]` are apart; None if that is no whole number."""
    batch, batch_stride, row_stride = x.shape[0], int(x.stride(0)), int(x.stride(2))
    if batch == 1:
        return 0
    return None if row_stride <= 0 or batch_stride % row_stride else batch_stride // row_stride
