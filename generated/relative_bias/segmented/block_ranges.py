# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: portable/block_ranges.py.jinja
# hash: eba6bd457ddfc455
"""Which blocks of keys a block of queries visits under `relative_bias`, with segment ids, and the other way round.

    keep                     q_idx >= kv_idx and q_segment_ids[b, rows] == kv_segment_ids[b, cols] and kv_segment_ids[b,
                             cols] != padding_id
    q_segment_ids_q_min      [B, H, parts]  int32, smallest q_segment_ids[b, rows] of each part
    q_segment_ids_q_max      [B, H, parts]  int32, largest
    kv_segment_ids_kv_min    [B, H, parts]  int32, smallest kv_segment_ids[b, cols] of each part
    kv_segment_ids_kv_max    [B, H, parts]  int32, largest
    kv_segment_ids_kv_2_min  [B, H, parts]  int32, smallest kv_segment_ids[b, cols] != padding_id of each part
    kv_segment_ids_kv_2_max  [B, H, parts]  int32, largest
    ranges                   [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks

Interval arithmetic classifies each block, at a cost that does not depend on its size. A block is empty if no pair can
be kept, full if every pair must be kept, otherwise partial. Each program finds the range of one row of blocks: from the
first block that is not empty to the last. The first run of full blocks inside the range is computed without a mask. All
other blocks of the range are computed with a mask, empty ones included.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import store_range
from ..._runtime.device.tl_math import clamp_index


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_segment_ids_size_1",
        "kv_segment_ids_size_1",
        "q_len",
        "kv_len",
        "num_heads",
        "padding_id",
    ]
)
def relative_bias_segmented_extremes(
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    q_offset,
    q_segment_ids_q_min_ptr,
    q_segment_ids_q_max_ptr,
    kv_segment_ids_kv_min_ptr,
    kv_segment_ids_kv_max_ptr,
    kv_segment_ids_kv_2_min_ptr,
    kv_segment_ids_kv_2_max_ptr,
    q_position_min_ptr,
    q_position_max_ptr,
    kv_position_min_ptr,
    kv_position_max_ptr,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    q_len,
    kv_len,
    num_heads,
    padding_id,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    # One program reduces PARTS parts of PART positions each, of the queries or of the keys.
    num_q = tl.cdiv(q_len, PART)
    query_programs = tl.cdiv(num_q, PARTS)
    num_kv = tl.cdiv(kv_len, PART)
    programs = query_programs + tl.cdiv(num_kv, PARTS)
    head = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    b = (head // num_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    if program < query_programs:
        part_idx = program * PARTS + tl.arange(0, PARTS)[:, None]
        # Elements beyond the end repeat the last position.
        rows = tl.minimum(part_idx * PART + tl.arange(0, PART)[None, :], q_len - 1)
        q_idx = tl.load(q_positions_ptr + b * stride_q_positions_b + rows) if POSITIONS else rows + q_shift
        q_segment_ids_q = tl.load(
            q_segment_ids_ptr
            + b * stride_q_segment_ids_0
            + clamp_index(rows, q_segment_ids_size_1).to(tl.int64) * stride_q_segment_ids_1
        )
        part_offs = head * num_q + part_idx
        in_parts = part_idx < num_q
        q_values = q_segment_ids_q.to(tl.int32)
        tl.store(q_segment_ids_q_min_ptr + part_offs, tl.min(q_values, 1, keep_dims=True), mask=in_parts)
        tl.store(q_segment_ids_q_max_ptr + part_offs, tl.max(q_values, 1, keep_dims=True), mask=in_parts)
        if POSITIONS:
            tl.store(q_position_min_ptr + part_offs, tl.min(q_idx, 1, keep_dims=True), mask=in_parts)
            tl.store(q_position_max_ptr + part_offs, tl.max(q_idx, 1, keep_dims=True), mask=in_parts)

    else:
        part_idx = (program - query_programs) * PARTS + tl.arange(0, PARTS)[:, None]
        # Elements beyond the end repeat the last position.
        cols = tl.minimum(part_idx * PART + tl.arange(0, PART)[None, :], kv_len - 1)
        kv_idx = tl.load(kv_positions_ptr + b * stride_kv_positions_b + cols) if POSITIONS else cols
        kv_segment_ids_kv = tl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
        )
        part_offs = head * num_kv + part_idx
        in_parts = part_idx < num_kv
        kv_values = kv_segment_ids_kv.to(tl.int32)
        tl.store(kv_segment_ids_kv_min_ptr + part_offs, tl.min(kv_values, 1, keep_dims=True), mask=in_parts)
        tl.store(kv_segment_ids_kv_max_ptr + part_offs, tl.max(kv_values, 1, keep_dims=True), mask=in_parts)
        kv_values = (kv_segment_ids_kv != padding_id).to(tl.int32)
        tl.store(kv_segment_ids_kv_2_min_ptr + part_offs, tl.min(kv_values, 1, keep_dims=True), mask=in_parts)
        tl.store(kv_segment_ids_kv_2_max_ptr + part_offs, tl.max(kv_values, 1, keep_dims=True), mask=in_parts)
        if POSITIONS:
            tl.store(kv_position_min_ptr + part_offs, tl.min(kv_idx, 1, keep_dims=True), mask=in_parts)
            tl.store(kv_position_max_ptr + part_offs, tl.max(kv_idx, 1, keep_dims=True), mask=in_parts)


@triton.jit(do_not_specialize=["q_offset", "q_len", "kv_len", "num_heads"])
def relative_bias_segmented_query_ranges(
    q_segment_ids_q_min_ptr,
    q_segment_ids_q_max_ptr,
    kv_segment_ids_kv_min_ptr,
    kv_segment_ids_kv_max_ptr,
    kv_segment_ids_kv_2_min_ptr,
    kv_segment_ids_kv_2_max_ptr,
    q_position_min_ptr,
    q_position_max_ptr,
    kv_position_min_ptr,
    kv_position_max_ptr,
    q_offset,
    ranges_ptr,
    q_len,
    kv_len,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    table_row = tl.program_id(0).to(tl.int64)
    b = (head // num_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    num_q = tl.cdiv(q_len, PART)
    # These are vectors of one element: Triton's interpreter turns a comparison of scalars into a number where it is
    # combined with a vector.
    part_idx = block * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
    part_offs = head * num_q + tl.minimum(part_idx, num_q - 1)
    q_segment_ids_q_min = tl.min(tl.load(q_segment_ids_q_min_ptr + part_offs), 1).to(tl.int64)
    q_segment_ids_q_max = tl.max(tl.load(q_segment_ids_q_max_ptr + part_offs), 1).to(tl.int64)
    q_first = tl.min(tl.load(q_position_min_ptr + part_offs), 1) if POSITIONS else block * BLOCK_M + q_shift
    q_last = (
        tl.max(tl.load(q_position_max_ptr + part_offs), 1)
        if POSITIONS
        else tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
    )
    num_kv = tl.cdiv(kv_len, PART)
    num_others = tl.cdiv(kv_len, BLOCK_N)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
        their_part_offs = head * num_kv + tl.minimum(their_part_idx, num_kv - 1)
        kv_segment_ids_kv_min = tl.min(tl.load(kv_segment_ids_kv_min_ptr + their_part_offs), 1).to(tl.int64)
        kv_segment_ids_kv_max = tl.max(tl.load(kv_segment_ids_kv_max_ptr + their_part_offs), 1).to(tl.int64)
        kv_segment_ids_kv_2_min = tl.min(tl.load(kv_segment_ids_kv_2_min_ptr + their_part_offs), 1).to(tl.int64)
        kv_segment_ids_kv_2_max = tl.max(tl.load(kv_segment_ids_kv_2_max_ptr + their_part_offs), 1).to(tl.int64)
        kv_first = tl.min(tl.load(kv_position_min_ptr + their_part_offs), 1) if POSITIONS else other_blocks * BLOCK_N
        kv_last = (
            tl.max(tl.load(kv_position_max_ptr + their_part_offs), 1)
            if POSITIONS
            else tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1
        )
        visits = visits & (
            (q_last >= kv_first)
            & (q_segment_ids_q_min <= kv_segment_ids_kv_max)
            & (q_segment_ids_q_max >= kv_segment_ids_kv_min)
            & (kv_segment_ids_kv_2_max > 0)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_first >= kv_last)
                & (q_segment_ids_q_min >= kv_segment_ids_kv_max)
                & (q_segment_ids_q_max <= kv_segment_ids_kv_min)
                & (kv_segment_ids_kv_2_min > 0)
            )
            & (other_blocks * BLOCK_N + BLOCK_N <= kv_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)


@triton.jit(do_not_specialize=["q_offset", "q_len", "kv_len", "num_heads"])
def relative_bias_segmented_key_ranges(
    q_segment_ids_q_min_ptr,
    q_segment_ids_q_max_ptr,
    kv_segment_ids_kv_min_ptr,
    kv_segment_ids_kv_max_ptr,
    kv_segment_ids_kv_2_min_ptr,
    kv_segment_ids_kv_2_max_ptr,
    q_position_min_ptr,
    q_position_max_ptr,
    kv_position_min_ptr,
    kv_position_max_ptr,
    q_offset,
    ranges_ptr,
    q_len,
    kv_len,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    table_row = tl.program_id(0).to(tl.int64)
    b = (head // num_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    num_kv = tl.cdiv(kv_len, PART)
    # These are vectors of one element: Triton's interpreter turns a comparison of scalars into a number where it is
    # combined with a vector.
    part_idx = block * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
    part_offs = head * num_kv + tl.minimum(part_idx, num_kv - 1)
    kv_segment_ids_kv_min = tl.min(tl.load(kv_segment_ids_kv_min_ptr + part_offs), 1).to(tl.int64)
    kv_segment_ids_kv_max = tl.max(tl.load(kv_segment_ids_kv_max_ptr + part_offs), 1).to(tl.int64)
    kv_segment_ids_kv_2_min = tl.min(tl.load(kv_segment_ids_kv_2_min_ptr + part_offs), 1).to(tl.int64)
    kv_segment_ids_kv_2_max = tl.max(tl.load(kv_segment_ids_kv_2_max_ptr + part_offs), 1).to(tl.int64)
    kv_first = tl.min(tl.load(kv_position_min_ptr + part_offs), 1) if POSITIONS else block * BLOCK_N
    kv_last = (
        tl.max(tl.load(kv_position_max_ptr + part_offs), 1)
        if POSITIONS
        else tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1
    )
    num_q = tl.cdiv(q_len, PART)
    num_others = tl.cdiv(q_len, BLOCK_M)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
        their_part_offs = head * num_q + tl.minimum(their_part_idx, num_q - 1)
        q_segment_ids_q_min = tl.min(tl.load(q_segment_ids_q_min_ptr + their_part_offs), 1).to(tl.int64)
        q_segment_ids_q_max = tl.max(tl.load(q_segment_ids_q_max_ptr + their_part_offs), 1).to(tl.int64)
        q_first = (
            tl.min(tl.load(q_position_min_ptr + their_part_offs), 1) if POSITIONS else other_blocks * BLOCK_M + q_shift
        )
        q_last = (
            tl.max(tl.load(q_position_max_ptr + their_part_offs), 1)
            if POSITIONS
            else tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
        )
        visits = visits & (
            (q_last >= kv_first)
            & (q_segment_ids_q_min <= kv_segment_ids_kv_max)
            & (q_segment_ids_q_max >= kv_segment_ids_kv_min)
            & (kv_segment_ids_kv_2_max > 0)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_first >= kv_last)
                & (q_segment_ids_q_min >= kv_segment_ids_kv_max)
                & (q_segment_ids_q_max <= kv_segment_ids_kv_min)
                & (kv_segment_ids_kv_2_min > 0)
            )
            & (other_blocks * BLOCK_M + BLOCK_M <= q_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)
