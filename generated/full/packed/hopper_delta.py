# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: hopper/delta.py.jinja
# hash: ad6bff259ccc2d1b
"""What runs before and after the backward of `full`, packed sequences on Hopper.

o         [total_q, Hq, Dv]
do        [total_q, Hq, Dv]
dq        [total_q, Hq, D]
lse       [Hq, total_q]  fp32, log of the softmax denominator
dlse      [Hq, total_q]  fp32, gradient of lse
delta     [Hq, total_q]  fp32, sum(o * do) - dlse
row_seqs  [entries, 8]  int32, the sequence of each block of rows, as `block_seqs`
row_lse   [Hq, blocks * BLOCK_M]  fp32, -lse / scale, -inf where no probability is above 0
row_delta [Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row
dq_sums   [Hq, blocks, 2, lines, 32]  fp32, gradient of q without its factor
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LOG2E, load_rows


@triton.jit(do_not_specialize=["q_total", "num_row_blocks", "num_entries"])
def full_packed_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    row_seqs_ptr,
    delta_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_oh,
    stride_os: tl.constexpr,
    stride_doh,
    stride_dos: tl.constexpr,
    q_total,
    num_row_blocks,
    num_entries,
    scale,
    HAS_DLSE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """lse and delta as copies of whole blocks need them.

    Without WITH_DQ another kernel has dq, and left delta.
    """
    h, entry = (tl.program_id(0) // num_entries).to(tl.int64), tl.program_id(0) % num_entries
    record = row_seqs_ptr + entry * 8
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + 1)
    q_start, q_len = tl.load(record + 2).to(tl.int64), tl.load(record + 3)
    # There may be more entries than blocks.
    if b < 0:
        return
    block = entry - first_entry
    # Each sequence has whole blocks of rows, and none begins where the one before may end.
    row_block = h * num_row_blocks + q_start // BLOCK_M + b + block
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    row_offs = h * q_total + q_start + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    if WITH_DQ:
        UNIT: tl.constexpr = 128 // o_ptr.dtype.element_ty.primitive_bitwidth
        o_base = o_ptr + q_start * stride_os + h * stride_oh * UNIT
        do_base = do_ptr + q_start * stride_dos + h * stride_doh * UNIT
        o_tile = load_rows(o_base, rows, q_len, stride_os, HEAD_DIM_V, BLOCK_DV)
        do_tile = load_rows(do_base, rows, q_len, stride_dos, HEAD_DIM_V, BLOCK_DV)
        delta = tl.sum(o_tile * do_tile, 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0)
    else:
        delta = tl.load(delta_ptr + row_offs, mask=in_rows, other=0.0)
    padded_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # A row without any key has none of positive probability either; -inf minus -inf would be NaN.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + padded_offs, -lse / (scale * LOG2E))
    tl.store(row_delta_ptr + padded_offs, -delta)


@triton.jit(do_not_specialize=["num_row_blocks", "num_entries"])
def full_packed_hopper_dq_rows(
    dq_sums_ptr,
    row_seqs_ptr,
    dq_ptr,
    stride_dqh,
    stride_dqs: tl.constexpr,
    num_row_blocks,
    num_entries,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dq from its sums, one warpgroup's part of a block of queries in each program: the order of registers undone."""
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    part, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    h, entry = (tile // num_entries).to(tl.int64), tile % num_entries
    record = row_seqs_ptr + entry * 8
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + 1)
    q_start, q_len = tl.load(record + 2).to(tl.int64), tl.load(record + 3)
    # There may be more entries than blocks.
    if b < 0:
        return
    block = entry - first_entry
    # Each sequence has whole blocks of rows, and none begins where the one before may end.
    row_block = h * num_row_blocks + q_start // BLOCK_M + b + block
    first = (2 * row_block + part) * (64 * PART_COLS)
    sums = tl.load(dq_sums_ptr + first + tl.arange(0, 64 * PART_COLS)) * scale
    sums = tl.permute(tl.reshape(sums, [PART_COLS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    dq_tile = tl.reshape(sums, [64, PART_COLS])
    rows = block * BLOCK_M + tl.arange(0, 64)
    cols = tl.arange(0, PART_COLS)
    # Of 128 rows each warpgroup has half; of 64 it has half of the columns.
    if BLOCK_M == 128:
        rows += part * 64
    else:
        cols += part * PART_COLS
    dq_ptrs = dq_ptr + q_start * stride_dqs + h * stride_dqh + (rows.to(tl.int64) * stride_dqs)[:, None] + cols[None, :]
    tl.store(dq_ptrs, dq_tile.to(dq_ptr.dtype.element_ty), mask=(rows < q_len)[:, None] & (cols < HEAD_DIM)[None, :])
