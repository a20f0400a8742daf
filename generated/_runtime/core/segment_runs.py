# SPDX-License-Identifier: Apache-2.0
"""Segmented calls whose segments are runs of tokens: the kernels of packed calls compute them. No framework is
imported.

Only the device knows whether segments are runs. So a kernel finds out, and lays out blocks for the packed kernels that
begin where segments begin. If segments are no runs, there are no blocks, and the segmented kernels, which are launched
after the packed ones, compute the call. Otherwise the segmented kernels do nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .configs import Tile, cdiv, next_power_of_2
from .launches import Backend, Tensor, dq_rows_constants
from .options import CallOptions
from .tiles import HOPPER

LEAST_TOKENS = 64
"""Calls with fewer tokens per segment, on average over a batch row, take the segmented kernels."""

LEAST_BLOCKS = 4
"""Calls with fewer blocks of rows per segment take the segmented backward if one kernel computes all gradients: each
segment takes whole blocks of the sums of dq, so short segments cost memory and time."""

LEAST_ITEMS = 8
"""Least blocks of rows per multiprocessor: from there on, the time of two more launches is no more than noise."""

BLOCK = 128
"""Rows of a block of the packed forward."""

OPTIONS = CallOptions(family=HOPPER)
"""The options of the packed forward."""

_MOST_ROWS = 2**30
_MOST_TOKENS = 4096

LayOut = Callable[..., Tensor]
"""A function that lays out a table of blocks: `(block, most_runs, *, row_block, by_keys)`. Blocks have `block` rows, or
keys if `by_keys`; a batch row has at most `most_runs` runs."""


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
    """The table of the sequence of each block of rows, int32 `[entries, 8]`, as in packed calls.

    None if the call's layout or size rules the packed forward out.
    """
    lay_out = _find_runs(backend, q, k, v, q_segment_ids, kv_segment_ids, padding_id, positions)
    return None if lay_out is None else lay_out(BLOCK, cdiv(q.shape[2], LEAST_TOKENS))


def _find_runs(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    positions: Tensor | None,
) -> LayOut | None:
    """Find the runs of a call; None if its layout or size rules packed kernels out."""
    batch, num_heads, length, _ = q.shape
    q_rows, k_rows, v_rows = map(batch_rows, (q, k, v))
    # One id for all tokens, with a stride of 0, is one segment.
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

    def lay_out(block: int, most_runs: int, *, row_block: int = 1, by_keys: bool = False) -> Tensor:
        blocks = q.new_empty((batch * (length // block + most_runs), 8), dtype=backend.INT32)
        backend.launch(
            lay_out_runs,
            (batch * room,),
            (runs, counts, blocks),
            (batch, room, most_runs, length, q_rows, k_rows, num_heads),
            BY_KEYS=by_keys,
            BLOCK=block,
            ROW_BLOCK=row_block,
            CHUNK=min(1024, next_power_of_2(max(batch * room, 32))),
        )
        return blocks

    return lay_out


def batch_rows(x: Tensor) -> int | None:
    """The distance between batch rows of `[B, H, S, D]`, in rows in memory; None if that is no whole number."""
    batch, batch_stride, row_stride = x.shape[0], int(x.stride(0)), int(x.stride(2))
    if batch == 1:
        return 0
    return None if row_stride <= 0 or batch_stride % row_stride else batch_stride // row_stride


@dataclass(frozen=True, kw_only=True)
class BackwardRuns:
    """The tables and buffers from which the packed backward computes the runs of a segmented call.

    Attributes:
        rows, keys: tables of the blocks of rows and of keys. query_rows: table of the blocks of rows of dq's kernel.
        lse, delta: buffers for the rows of runs, in whole blocks `[Hq, row_blocks * block_m]`.
    """

    rows: Tensor
    query_rows: Tensor
    keys: Tensor
    lse: Tensor
    delta: Tensor

    @property
    def row_blocks(self) -> int:
        """The largest number of blocks of rows that a head may have."""
        return int(self.rows.shape[0])


def backward_runs(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: tuple[Tensor, ...],
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    positions: Tensor | None,
    row_offsets: Tensor | None,
    tile: Tile,
    query_tile: Tile,
) -> BackwardRuns | None:
    """The tables of a backward, and buffers for its rows; None if the call's layout or size rules out the packed one.

    Args:
        others: o, do, dq, dk and dv, whose batch rows must be as far apart as those of q and k.
        tile: of dk and dv. query_tile: of dq, the same tile if one kernel computes all gradients.
    """
    wanted = [batch_rows(x) for x in (q, q, q, k, k)]
    if row_offsets is not None or [batch_rows(x) for x in others] != wanted:
        return None
    lay_out = _find_runs(backend, q, k, v, q_segment_ids, kv_segment_ids, padding_id, positions)
    if lay_out is None:
        return None
    fused = query_tile.family == HOPPER
    most_runs = cdiv(q.shape[2], LEAST_BLOCKS * tile.block_m if fused else LEAST_TOKENS)
    rows = lay_out(tile.block_m, most_runs)
    query_rows = rows if query_tile.block_m == tile.block_m else lay_out(query_tile.block_m, most_runs)
    keys = lay_out(tile.block_n, most_runs, row_block=tile.block_m, by_keys=True)
    lse = q.new_empty((q.shape[1], rows.shape[0] * tile.block_m), dtype=backend.FP32)
    return BackwardRuns(
        rows=rows, query_rows=query_rows, keys=keys, lse=lse, delta=q.new_empty(lse.shape, dtype=backend.FP32)
    )


def pad_rows(
    backend: Backend, runs: BackwardRuns, row_lse: Tensor, row_delta: Tensor, length: int, tile: Tile, *, linear: bool
) -> None:
    """Fill lse and delta of the rows of runs from those of batch rows. `linear`: the score is the scaled product."""
    from ..device.segment_runs import pad_runs

    num_heads = row_lse.shape[1]
    backend.launch(
        pad_runs,
        (num_heads * runs.row_blocks,),
        (row_lse, row_delta, runs.rows, runs.keys, runs.lse, runs.delta),
        (length, num_heads, runs.row_blocks),
        LINEAR=linear,
        BLOCK_M=tile.block_m,
    )


def store_dq(
    backend: Backend, runs: BackwardRuns, dq_sums: Tensor, dq: Tensor, scale: float, tile: Tile, head_dim: int
) -> None:
    """Compute dq from the sums of the kernel that computed the call."""
    from ..device.segment_runs import run_dq_rows

    batch, num_heads, length, _ = dq.shape
    backend.launch(
        run_dq_rows,
        (2 * num_heads * runs.row_blocks,),
        (dq_sums, runs.rows, runs.keys, dq),
        (*dq.stride()[:3], batch, length, num_heads, runs.row_blocks, scale),
        **dq_rows_constants(tile, head_dim),
    )
