# SPDX-License-Identifier: Apache-2.0
"""The kernel that transposes values ahead of Hopper's forward of float8_e4m3fn."""

import triton
import triton.language as tl

from .gl_fp8 import UNIT


@triton.jit(do_not_specialize=["kv_len", "v_columns", "num_seqs"])
def value_columns(
    v_ptr,
    cu_seqlens_ptr,
    columns_ptr,
    stride_vb,
    stride_vh,
    stride_vs,
    kv_len,
    v_columns,
    num_heads,
    num_seqs,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write `v` `[B, Hkv, Skv, D]` to `columns` `[B, Hkv, D, v_columns]`, each 16 keys in the order of the weights.

    Column 4t + 2g + e of 16 is key 8g + 2t + e. Columns without a key are 0. Packed sequence b, which begins at row s,
    begins at column (s // 16 + b) * 16.
    """
    num_blocks = tl.cdiv(v_columns, BLOCK_N)
    head_index = (tl.program_id(0) // num_blocks).to(tl.int64)
    b, h = head_index // num_heads, head_index % num_heads
    column = tl.program_id(0) % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    key = (column & -UNIT) + (column >> 1 & 1) * 8 + (column >> 2 & 3) * 2 + (column & 1)
    if PACKED:
        # Search for the last sequence that begins at the column or ahead of it.
        first, last = column * 0, column * 0 + num_seqs - 1
        steps = num_seqs
        while steps > 0:
            middle = (first + last + 1) // 2
            is_there = tl.load(cu_seqlens_ptr + middle) // UNIT + middle <= column // UNIT
            first, last = tl.where(is_there, middle, first), tl.where(is_there, last, middle - 1)
            steps = steps // 2
        start, end = tl.load(cu_seqlens_ptr + first), tl.load(cu_seqlens_ptr + first + 1)
        row = start + key - (start // UNIT + first) * UNIT
        is_key = (row < end) & (column < v_columns)
    else:
        row = key
        is_key = row < kv_len
    cols = tl.arange(0, BLOCK_D)
    in_head = cols < HEAD_DIM
    source = v_ptr + b * stride_vb + h * stride_vh + row.to(tl.int64)[:, None] * stride_vs + cols[None, :]
    tile = tl.load(source, mask=is_key[:, None] & in_head[None, :], other=0.0)
    target = columns_ptr + (head_index * HEAD_DIM + cols[:, None]) * v_columns + column[None, :]
    tl.store(target, tl.trans(tile), mask=in_head[:, None] & (column < v_columns)[None, :])
