# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: portable/block_lists.py.jinja
# hash: b3fd6e57cb19f1de
"""Which blocks of keys a block of queries visits under `natten`, packed sequences, and the other way round.

    keep        abs(min(max(q_idx % 128, 6), 121) - kv_idx % 128) <= 6 and abs(min(max(q_idx // 128, 6), 121) - kv_idx
                // 128) <= 6
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    spans       [H, entries, 4]  int32, first, partial end, full begin and end of a block's list
    block_list  [entries]  int16 or int32, lists of the blocks to visit

Interval arithmetic classifies each block, at a cost that does not depend on its size. A block is empty if no pair can
be kept, full if every pair must be kept, otherwise partial. Each program lists one row of blocks in its own part of
`block_list`: partial blocks from the left in ascending order, full blocks from the right.
"""

import triton
import triton.language as tl

from ..._runtime.device.block_seqs import FIRST_ENTRY, KV_LEN, Q_LEN, RECORD
from ..._runtime.device.tl_math import floor_div, floor_mod


@triton.jit(do_not_specialize=["q_offset", "num_others_most", "num_heads"])
def natten_packed_query_lists(
    block_seqs_ptr,
    q_offset,
    spans_ptr,
    block_list_ptr,
    num_others_most,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_heads
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = program % num_blocks
    head = program // num_blocks
    table_row = (head * (tl.num_programs(0) // num_heads) + first_entry + block).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    q_first = block * BLOCK_M + q_shift
    q_last = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
    num_others = tl.cdiv(kv_len, BLOCK_N)
    span = spans_ptr + table_row * 4
    list_begin = table_row.to(tl.int32) * num_others_most if OWN_ROOM else 0
    list_end = list_begin + num_others
    if FILL and not OWN_ROOM:
        list_begin, list_end = tl.load(span), tl.load(span + 3)
    partial_end, full_begin = list_begin, list_end
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        kv_first = other_blocks * BLOCK_N
        kv_last = tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1
        visits = visits & (
            (
                tl.minimum(
                    tl.maximum(
                        tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_first, 128), 0), 6
                    ),
                    121,
                )
                - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_last, 128), 127)
                <= 6
            )
            & (
                tl.minimum(
                    tl.maximum(
                        tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_last, 128), 127), 6
                    ),
                    121,
                )
                - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_first, 128), 0)
                >= -6
            )
            & (tl.minimum(tl.maximum(floor_div(q_first, 128), 6), 121) - floor_div(kv_last, 128) <= 6)
            & (tl.minimum(tl.maximum(floor_div(q_last, 128), 6), 121) - floor_div(kv_first, 128) >= -6)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (
                    tl.minimum(
                        tl.maximum(
                            tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_last, 128), 127), 6
                        ),
                        121,
                    )
                    - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_first, 128), 0)
                    <= 6
                )
                & (
                    tl.minimum(
                        tl.maximum(
                            tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_first, 128), 0), 6
                        ),
                        121,
                    )
                    - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_last, 128), 127)
                    >= -6
                )
                & (tl.minimum(tl.maximum(floor_div(q_last, 128), 6), 121) - floor_div(kv_first, 128) <= 6)
                & (tl.minimum(tl.maximum(floor_div(q_first, 128), 6), 121) - floor_div(kv_last, 128) >= -6)
            )
            & (other_blocks * BLOCK_N + BLOCK_N <= kv_len)
        )
        visits, is_full = visits.to(tl.int32), is_full.to(tl.int32)
        is_partial = visits - is_full
        if FILL:
            list_entries = other_blocks.to(block_list_ptr.dtype.element_ty)
            tl.store(block_list_ptr + partial_end + tl.cumsum(is_partial, 0) - 1, list_entries, mask=is_partial > 0)
            tl.store(block_list_ptr + full_begin - tl.cumsum(is_full, 0), list_entries, mask=is_full > 0)
        partial_end += tl.sum(is_partial, 0)
        full_begin -= tl.sum(is_full, 0)
    if FILL:
        if OWN_ROOM:
            tl.store(span, list_begin)
            tl.store(span + 3, list_end)
        tl.store(span + 1, partial_end)
        tl.store(span + 2, full_begin)
    else:
        # The number of visited blocks, from which the host computes where each list begins.
        tl.store(span, partial_end - full_begin + num_others)


@triton.jit(do_not_specialize=["q_offset", "num_others_most", "num_heads"])
def natten_packed_key_lists(
    block_seqs_ptr,
    q_offset,
    spans_ptr,
    block_list_ptr,
    num_others_most,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_heads
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    block = program % num_blocks
    head = program // num_blocks
    table_row = (head * (tl.num_programs(0) // num_heads) + first_entry + block).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    kv_first = block * BLOCK_N
    kv_last = tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1
    num_others = tl.cdiv(q_len, BLOCK_M)
    span = spans_ptr + table_row * 4
    list_begin = table_row.to(tl.int32) * num_others_most if OWN_ROOM else 0
    list_end = list_begin + num_others
    if FILL and not OWN_ROOM:
        list_begin, list_end = tl.load(span), tl.load(span + 3)
    partial_end, full_begin = list_begin, list_end
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        q_first = other_blocks * BLOCK_M + q_shift
        q_last = tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
        visits = visits & (
            (
                tl.minimum(
                    tl.maximum(
                        tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_first, 128), 0), 6
                    ),
                    121,
                )
                - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_last, 128), 127)
                <= 6
            )
            & (
                tl.minimum(
                    tl.maximum(
                        tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_last, 128), 127), 6
                    ),
                    121,
                )
                - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_first, 128), 0)
                >= -6
            )
            & (tl.minimum(tl.maximum(floor_div(q_first, 128), 6), 121) - floor_div(kv_last, 128) <= 6)
            & (tl.minimum(tl.maximum(floor_div(q_last, 128), 6), 121) - floor_div(kv_first, 128) >= -6)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (
                    tl.minimum(
                        tl.maximum(
                            tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_last, 128), 127), 6
                        ),
                        121,
                    )
                    - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_first, 128), 0)
                    <= 6
                )
                & (
                    tl.minimum(
                        tl.maximum(
                            tl.where(floor_div(q_first, 128) == floor_div(q_last, 128), floor_mod(q_first, 128), 0), 6
                        ),
                        121,
                    )
                    - tl.where(floor_div(kv_first, 128) == floor_div(kv_last, 128), floor_mod(kv_last, 128), 127)
                    >= -6
                )
                & (tl.minimum(tl.maximum(floor_div(q_last, 128), 6), 121) - floor_div(kv_first, 128) <= 6)
                & (tl.minimum(tl.maximum(floor_div(q_first, 128), 6), 121) - floor_div(kv_last, 128) >= -6)
            )
            & (other_blocks * BLOCK_M + BLOCK_M <= q_len)
        )
        visits, is_full = visits.to(tl.int32), is_full.to(tl.int32)
        is_partial = visits - is_full
        if FILL:
            list_entries = other_blocks.to(block_list_ptr.dtype.element_ty)
            tl.store(block_list_ptr + partial_end + tl.cumsum(is_partial, 0) - 1, list_entries, mask=is_partial > 0)
            tl.store(block_list_ptr + full_begin - tl.cumsum(is_full, 0), list_entries, mask=is_full > 0)
        partial_end += tl.sum(is_partial, 0)
        full_begin -= tl.sum(is_full, 0)
    if FILL:
        if OWN_ROOM:
            tl.store(span, list_begin)
            tl.store(span + 3, list_end)
        tl.store(span + 1, partial_end)
        tl.store(span + 2, full_begin)
    else:
        # The number of visited blocks, from which the host computes where each list begins.
        tl.store(span, partial_end - full_begin + num_others)
