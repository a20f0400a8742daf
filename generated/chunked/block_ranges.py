# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: chunked: {mask: causal and chunk(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: portable/block_ranges.py.jinja
# hash: e18b2c8dbbba9960
"""Which blocks of keys a block of queries visits under `chunked`, and the other way round.

    keep    q_idx >= kv_idx and q_idx // size == kv_idx // size
    ranges  [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks

Interval arithmetic classifies each block, at a cost that does not depend on its size. A block is empty if no pair can
be kept, full if every pair must be kept, otherwise partial. Each program finds the range of one row of blocks: from the
first block that is not empty to the last. The first run of full blocks inside the range is computed without a mask. All
other blocks of the range are computed with a mask, empty ones included.
"""

import triton
import triton.language as tl

from .._runtime.device.tl import store_range
from .._runtime.device.tl_math import floor_div


@triton.jit(do_not_specialize=["q_offset", "size", "q_len", "kv_len", "num_heads"])
def chunked_query_ranges(
    q_offset,
    size,
    ranges_ptr,
    q_len,
    kv_len,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    size = tl.load(size) if SCALARS_LOADED else size
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    table_row = tl.program_id(0).to(tl.int64)
    b = (head // num_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    q_first = block * BLOCK_M + q_shift
    q_last = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
    num_others = tl.cdiv(kv_len, BLOCK_N)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        kv_first = other_blocks * BLOCK_N
        kv_last = tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1
        visits = visits & (
            (q_last >= kv_first)
            & (
                tl.minimum(floor_div(q_first, size), floor_div(q_last, size))
                <= tl.maximum(floor_div(kv_first, size), floor_div(kv_last, size))
            )
            & (
                tl.maximum(floor_div(q_first, size), floor_div(q_last, size))
                >= tl.minimum(floor_div(kv_first, size), floor_div(kv_last, size))
            )
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_first >= kv_last)
                & (
                    tl.minimum(floor_div(q_first, size), floor_div(q_last, size))
                    >= tl.maximum(floor_div(kv_first, size), floor_div(kv_last, size))
                )
                & (
                    tl.maximum(floor_div(q_first, size), floor_div(q_last, size))
                    <= tl.minimum(floor_div(kv_first, size), floor_div(kv_last, size))
                )
            )
            & (other_blocks * BLOCK_N + BLOCK_N <= kv_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)


@triton.jit(do_not_specialize=["q_offset", "size", "q_len", "kv_len", "num_heads"])
def chunked_key_ranges(
    q_offset,
    size,
    ranges_ptr,
    q_len,
    kv_len,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    size = tl.load(size) if SCALARS_LOADED else size
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    table_row = tl.program_id(0).to(tl.int64)
    b = (head // num_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    kv_first = block * BLOCK_N
    kv_last = tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1
    num_others = tl.cdiv(q_len, BLOCK_M)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        q_first = other_blocks * BLOCK_M + q_shift
        q_last = tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
        visits = visits & (
            (q_last >= kv_first)
            & (
                tl.minimum(floor_div(q_first, size), floor_div(q_last, size))
                <= tl.maximum(floor_div(kv_first, size), floor_div(kv_last, size))
            )
            & (
                tl.maximum(floor_div(q_first, size), floor_div(q_last, size))
                >= tl.minimum(floor_div(kv_first, size), floor_div(kv_last, size))
            )
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_first >= kv_last)
                & (
                    tl.minimum(floor_div(q_first, size), floor_div(q_last, size))
                    >= tl.maximum(floor_div(kv_first, size), floor_div(kv_last, size))
                )
                & (
                    tl.maximum(floor_div(q_first, size), floor_div(q_last, size))
                    <= tl.minimum(floor_div(kv_first, size), floor_div(kv_last, size))
                )
            )
            & (other_blocks * BLOCK_M + BLOCK_M <= q_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)
