# SPDX-License-Identifier: Apache-2.0
"""Device functions of kernels before and after Hopper's backward: delta from o, and dq from the sums of its parts."""

import triton
import triton.language as tl

from .tl import load_rows


@triton.jit
def row_delta(
    o_base,
    do_base,
    dlse_ptr,
    row_offs,
    rows,
    q_len,
    stride_os,
    stride_dos,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """`sum(o * do)` of each row; with HAS_DLSE minus the gradient of lse at `row_offs`."""
    o_tile = load_rows(o_base, rows, q_len, stride_os, HEAD_DIM_V, BLOCK_DV)
    do_tile = load_rows(do_base, rows, q_len, stride_dos, HEAD_DIM_V, BLOCK_DV)
    delta = tl.sum(o_tile * do_tile, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_offs, mask=rows < q_len, other=0.0)
    return delta


@triton.jit
def load_dq_rows(sums_ptr, scale, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """One warpgroup's part of dq of a block of queries, `[64, BLOCK_D * BLOCK_M // 128]`, in the order of rows."""
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    sums = tl.load(sums_ptr + tl.arange(0, 64 * PART_COLS)) * scale
    sums = tl.permute(tl.reshape(sums, [PART_COLS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return tl.reshape(sums, [64, PART_COLS])


@triton.jit
def store_dq_rows(
    dq_ptr,
    first,
    stride_first,
    h,
    stride_dqh,
    dq_tile,
    block,
    part,
    q_len,
    stride_dqs,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store a part of `load_dq_rows`: half of the rows if BLOCK_M is 128, all rows and half of the columns if it is 64.

    `first` is the batch row, or the first row of a packed sequence; `stride_first` is the stride of that index.
    """
    PART_COLS: tl.constexpr = dq_tile.shape[1]
    rows = block * BLOCK_M + tl.arange(0, 64)
    cols = tl.arange(0, PART_COLS)
    if BLOCK_M == 128:
        rows += part * 64
    else:
        cols += part * PART_COLS
    dq_ptrs = dq_ptr + first * stride_first + h * stride_dqh + (rows.to(tl.int64) * stride_dqs)[:, None] + cols[None, :]
    tl.store(dq_ptrs, dq_tile.to(dq_ptr.dtype.element_ty), mask=(rows < q_len)[:, None] & (cols < HEAD_DIM)[None, :])
