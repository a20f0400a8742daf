# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: hopper/delta.py.jinja
# hash: 4a0fe00d94d7b379
"""What runs before and after the backward of `softcap` on Hopper.

o         [B, Hq, Sq, Dv]
do        [B, Hq, Sq, Dv]
dq        [B, Hq, Sq, D]
lse       [B, Hq, Sq]  fp32, log of the softmax denominator
dlse      [B, Hq, Sq]  fp32, gradient of lse
delta     [B, Hq, Sq]  fp32, sum(o * do) - dlse
row_lse   [B, Hq, blocks * BLOCK_M]  fp32, lse times log2(e), inf where no probability is above 0
row_delta [B, Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row
dq_sums   [B, Hq, blocks, 2, lines, 32]  fp32, gradient of q without its factor
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LOG2E, load_rows


@triton.jit(do_not_specialize=["q_len", "num_heads"])
def softcap_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    q_len,
    num_heads,
    HAS_DLSE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """lse and delta as copies of whole blocks need them.

    Without WITH_DQ another kernel has dq, and left delta.
    """
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    head, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    row_offs = (b * num_heads + h) * q_len + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    if WITH_DQ:
        UNIT: tl.constexpr = 128 // o_ptr.dtype.element_ty.primitive_bitwidth
        o_base = o_ptr + (b * stride_ob + h * stride_oh) * UNIT
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
        o_tile = load_rows(o_base, rows, q_len, stride_os, HEAD_DIM_V, BLOCK_DV)
        do_tile = load_rows(do_base, rows, q_len, stride_dos, HEAD_DIM_V, BLOCK_DV)
        delta = tl.sum(o_tile * do_tile, 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0)
    else:
        delta = tl.load(delta_ptr + row_offs, mask=in_rows, other=0.0)
    padded_offs = ((b * num_heads + h) * num_blocks + block) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A row without any key has none of positive probability either; -inf minus -inf would be NaN.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + padded_offs, lse)
    tl.store(row_delta_ptr + padded_offs, -delta)


@triton.jit(do_not_specialize=["q_len", "num_heads"])
def softcap_hopper_dq_rows(
    dq_sums_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs: tl.constexpr,
    q_len,
    num_heads,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dq from its sums, one warpgroup's part of a block of queries in each program: the order of registers undone."""
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    part, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    head, block = tile // num_blocks, tile % num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * (64 * PART_COLS)
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
    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh + (rows.to(tl.int64) * stride_dqs)[:, None] + cols[None, :]
    tl.store(dq_ptrs, dq_tile.to(dq_ptr.dtype.element_ty), mask=(rows < q_len)[:, None] & (cols < HEAD_DIM)[None, :])
