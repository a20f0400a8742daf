# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_images: {mask: 'band(before, after) or (image[b, q_idx] == image[b, kv_idx] and image[b, q_idx] >= 0)',
#     scalars: {before: {type: int, min: 0, example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {image:
#     {dims: [b, kv_idx], dtype: int32, example: 'where(kv_idx % 400 < 256, kv_idx // 400, -1)'}}}
# template: portable/block_lists.py.jinja
# hash: 148627e0fd9c155a
"""Which blocks of keys a block of queries visits under `band_images`, packed sequences, and the other way round.

    keep           q_idx - kv_idx <= before and kv_idx - q_idx <= after or image[q_idx] == image[kv_idx] and
                   image[q_idx] >= 0
    image_q_min    [B, H, parts]  int32, smallest image[q_idx] of each part
    image_q_max    [B, H, parts]  int32, largest
    image_kv_min   [B, H, parts]  int32, smallest image[kv_idx] of each part
    image_kv_max   [B, H, parts]  int32, largest
    image_q_2_min  [B, H, parts]  int32, smallest image[q_idx] >= 0 of each part
    image_q_2_max  [B, H, parts]  int32, largest
    cu_seqlens_q   [n + 1]  int32, where the sequences of queries begin
    cu_seqlens_k   [n + 1]  int32, where those of keys begin
    block_seqs     [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length
                   of its queries, and of its keys; how many blocks there are
    spans          [H, entries, 4]  int32, first, partial end, full begin and end of a block's list
    block_list     [entries]  int16 or int32, lists of the blocks to visit

Interval arithmetic classifies each block, at a cost that does not depend on its size. A block is empty if no pair can
be kept, full if every pair must be kept, otherwise partial. Each program lists one row of blocks in its own part of
`block_list`: partial blocks from the left in ascending order, full blocks from the right.
"""

import triton
import triton.language as tl

from ..._runtime.device.block_seqs import FIRST_ENTRY, KV_LEN, KV_START, Q_LEN, Q_START, RECORD
from ..._runtime.device.tl_math import clamp_index


@triton.jit(do_not_specialize=["q_offset", "q_parts", "kv_parts", "num_seqs"])
def band_images_packed_extremes(
    image_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_offset,
    image_q_min_ptr,
    image_q_max_ptr,
    image_q_2_min_ptr,
    image_q_2_max_ptr,
    image_kv_min_ptr,
    image_kv_max_ptr,
    stride_image_0,
    q_parts,
    kv_parts,
    num_seqs,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    # One program reduces PARTS parts of PART positions each, of the queries or of the keys.
    num_q = q_parts
    query_programs = tl.cdiv(num_q, PARTS)
    num_kv = kv_parts
    programs = query_programs + tl.cdiv(num_kv, PARTS)
    head = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if program < query_programs:
        slots = program * PARTS + tl.arange(0, PARTS)[:, None]
        # The parts of sequence s begin at slot cu_seqlens[s] // PART + s: no sequences share a slot, some stay empty.
        b = tl.zeros([PARTS, 1], tl.int64)
        for step in tl.static_range(SEARCH_STEPS):
            probe = b + (1 << (SEARCH_STEPS - 1 - step))
            first_slot = tl.load(cu_seqlens_q_ptr + tl.minimum(probe, num_seqs)) // PART + probe
            b = tl.where((probe < num_seqs) & (first_slot <= slots), probe, b)
        q_start = tl.load(cu_seqlens_q_ptr + b).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q_ptr + b + 1) - q_start).to(tl.int32)
        kv_start = tl.load(cu_seqlens_k_ptr + b).to(tl.int64)
        kv_len = (tl.load(cu_seqlens_k_ptr + b + 1) - kv_start).to(tl.int32)
        part_idx = slots - q_start // PART - b
        has_part = part_idx * PART < q_len
        # A slot without a part reads the first tokens and stores nothing.
        q_len, kv_len, part_idx = (
            tl.where(has_part, q_len, 0),
            tl.where(has_part, kv_len, 0),
            tl.where(has_part, part_idx, 0),
        )
        q_start, kv_start = tl.where(q_len > 0, q_start, 0), tl.where(kv_len > 0, kv_start, 0)
        q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        # Elements beyond the end repeat the last position.
        q_idx = tl.minimum(part_idx * PART + tl.arange(0, PART)[None, :], q_len - 1) + q_shift
        image_q = tl.load(
            image_ptr + kv_start * stride_image_0 + clamp_index(q_idx, kv_len).to(tl.int64) * stride_image_0
        )
        part_offs = head * q_parts + slots
        in_parts = has_part
        q_values = image_q.to(tl.int32)
        tl.store(image_q_min_ptr + part_offs, tl.min(q_values, 1, keep_dims=True), mask=in_parts)
        tl.store(image_q_max_ptr + part_offs, tl.max(q_values, 1, keep_dims=True), mask=in_parts)
        q_values = (image_q >= 0).to(tl.int32)
        tl.store(image_q_2_min_ptr + part_offs, tl.min(q_values, 1, keep_dims=True), mask=in_parts)
        tl.store(image_q_2_max_ptr + part_offs, tl.max(q_values, 1, keep_dims=True), mask=in_parts)

    else:
        slots = (program - query_programs) * PARTS + tl.arange(0, PARTS)[:, None]
        # The parts of sequence s begin at slot cu_seqlens[s] // PART + s: no sequences share a slot, some stay empty.
        b = tl.zeros([PARTS, 1], tl.int64)
        for step in tl.static_range(SEARCH_STEPS):
            probe = b + (1 << (SEARCH_STEPS - 1 - step))
            first_slot = tl.load(cu_seqlens_k_ptr + tl.minimum(probe, num_seqs)) // PART + probe
            b = tl.where((probe < num_seqs) & (first_slot <= slots), probe, b)
        q_start = tl.load(cu_seqlens_q_ptr + b).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q_ptr + b + 1) - q_start).to(tl.int32)
        kv_start = tl.load(cu_seqlens_k_ptr + b).to(tl.int64)
        kv_len = (tl.load(cu_seqlens_k_ptr + b + 1) - kv_start).to(tl.int32)
        part_idx = slots - kv_start // PART - b
        has_part = part_idx * PART < kv_len
        # A slot without a part reads the first tokens and stores nothing.
        q_len, kv_len, part_idx = (
            tl.where(has_part, q_len, 0),
            tl.where(has_part, kv_len, 0),
            tl.where(has_part, part_idx, 0),
        )
        q_start, kv_start = tl.where(q_len > 0, q_start, 0), tl.where(kv_len > 0, kv_start, 0)
        q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        # Elements beyond the end repeat the last position.
        kv_idx = tl.minimum(part_idx * PART + tl.arange(0, PART)[None, :], kv_len - 1)
        image_kv = tl.load(
            image_ptr + kv_start * stride_image_0 + clamp_index(kv_idx, kv_len).to(tl.int64) * stride_image_0
        )
        part_offs = head * kv_parts + slots
        in_parts = has_part
        kv_values = image_kv.to(tl.int32)
        tl.store(image_kv_min_ptr + part_offs, tl.min(kv_values, 1, keep_dims=True), mask=in_parts)
        tl.store(image_kv_max_ptr + part_offs, tl.max(kv_values, 1, keep_dims=True), mask=in_parts)


@triton.jit(do_not_specialize=["q_offset", "before", "after", "q_parts", "kv_parts", "num_others_most", "num_heads"])
def band_images_packed_query_lists(
    image_q_min_ptr,
    image_q_max_ptr,
    image_q_2_min_ptr,
    image_q_2_max_ptr,
    image_kv_min_ptr,
    image_kv_max_ptr,
    block_seqs_ptr,
    q_offset,
    before,
    after,
    spans_ptr,
    block_list_ptr,
    q_parts,
    kv_parts,
    num_others_most,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_start = tl.load(record + Q_START).to(tl.int64)
    kv_start = tl.load(record + KV_START).to(tl.int64)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_heads
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = program % num_blocks
    head = program // num_blocks
    table_row = (head * (tl.num_programs(0) // num_heads) + first_entry + block).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    num_q = tl.cdiv(q_len, PART)
    # These are vectors of one element: Triton's interpreter turns a comparison of scalars into a number where it is
    # combined with a vector.
    part_idx = block * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
    part_offs = head * q_parts + q_start // PART + b + tl.minimum(part_idx, num_q - 1)
    image_q_min = tl.min(tl.load(image_q_min_ptr + part_offs), 1).to(tl.int64)
    image_q_max = tl.max(tl.load(image_q_max_ptr + part_offs), 1).to(tl.int64)
    image_q_2_min = tl.min(tl.load(image_q_2_min_ptr + part_offs), 1).to(tl.int64)
    image_q_2_max = tl.max(tl.load(image_q_2_max_ptr + part_offs), 1).to(tl.int64)
    q_first = block * BLOCK_M + q_shift
    q_last = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
    num_kv = tl.cdiv(kv_len, PART)
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
        their_part_idx = other_blocks[:, None] * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
        their_part_offs = head * kv_parts + kv_start // PART + b + tl.minimum(their_part_idx, num_kv - 1)
        image_kv_min = tl.min(tl.load(image_kv_min_ptr + their_part_offs), 1).to(tl.int64)
        image_kv_max = tl.max(tl.load(image_kv_max_ptr + their_part_offs), 1).to(tl.int64)
        kv_first = other_blocks * BLOCK_N
        kv_last = tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1
        visits = visits & (
            (q_first - kv_last <= before) & (kv_first - q_last <= after)
            | (image_q_min <= image_kv_max) & (image_q_max >= image_kv_min) & (image_q_2_max > 0)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_last - kv_first <= before) & (kv_last - q_first <= after)
                | (image_q_min >= image_kv_max) & (image_q_max <= image_kv_min) & (image_q_2_min > 0)
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


@triton.jit(do_not_specialize=["q_offset", "before", "after", "q_parts", "kv_parts", "num_others_most", "num_heads"])
def band_images_packed_key_lists(
    image_q_min_ptr,
    image_q_max_ptr,
    image_q_2_min_ptr,
    image_q_2_max_ptr,
    image_kv_min_ptr,
    image_kv_max_ptr,
    block_seqs_ptr,
    q_offset,
    before,
    after,
    spans_ptr,
    block_list_ptr,
    q_parts,
    kv_parts,
    num_others_most,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_start = tl.load(record + Q_START).to(tl.int64)
    kv_start = tl.load(record + KV_START).to(tl.int64)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_heads
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    block = program % num_blocks
    head = program // num_blocks
    table_row = (head * (tl.num_programs(0) // num_heads) + first_entry + block).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    num_kv = tl.cdiv(kv_len, PART)
    # These are vectors of one element: Triton's interpreter turns a comparison of scalars into a number where it is
    # combined with a vector.
    part_idx = block * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
    part_offs = head * kv_parts + kv_start // PART + b + tl.minimum(part_idx, num_kv - 1)
    image_kv_min = tl.min(tl.load(image_kv_min_ptr + part_offs), 1).to(tl.int64)
    image_kv_max = tl.max(tl.load(image_kv_max_ptr + part_offs), 1).to(tl.int64)
    kv_first = block * BLOCK_N
    kv_last = tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1
    num_q = tl.cdiv(q_len, PART)
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
        their_part_idx = other_blocks[:, None] * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
        their_part_offs = head * q_parts + q_start // PART + b + tl.minimum(their_part_idx, num_q - 1)
        image_q_min = tl.min(tl.load(image_q_min_ptr + their_part_offs), 1).to(tl.int64)
        image_q_max = tl.max(tl.load(image_q_max_ptr + their_part_offs), 1).to(tl.int64)
        image_q_2_min = tl.min(tl.load(image_q_2_min_ptr + their_part_offs), 1).to(tl.int64)
        image_q_2_max = tl.max(tl.load(image_q_2_max_ptr + their_part_offs), 1).to(tl.int64)
        q_first = other_blocks * BLOCK_M + q_shift
        q_last = tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
        visits = visits & (
            (q_first - kv_last <= before) & (kv_first - q_last <= after)
            | (image_q_min <= image_kv_max) & (image_q_max >= image_kv_min) & (image_q_2_max > 0)
        )
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & (
                (q_last - kv_first <= before) & (kv_last - q_first <= after)
                | (image_q_min >= image_kv_max) & (image_q_max <= image_kv_min) & (image_q_2_min > 0)
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
