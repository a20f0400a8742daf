# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: portable/block_ranges.py.jinja
# hash: a4c2e650b7623264
"""Which blocks of keys a block of queries visits under `document`, packed sequences, and the other way round.

    keep          q_idx >= kv_idx and doc[q_idx] == doc[kv_idx]
    doc_q_min     [B, H, parts]  int32, smallest doc[q_idx] of each part
    doc_q_max     [B, H, parts]  int32, largest
    doc_kv_min    [B, H, parts]  int32, smallest doc[kv_idx] of each part
    doc_kv_max    [B, H, parts]  int32, largest
    cu_seqlens_q  [n + 1]  int32, where the sequences of queries begin
    cu_seqlens_k  [n + 1]  int32, where those of keys begin
    block_seqs    [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                  its queries, and of its keys; how many blocks there are
    ranges        [H, entries, 4]  int32, first visited, first full, end of full and end of visited blocks

Interval arithmetic classifies each block, at a cost that does not depend on its size. A block is empty if no pair can
be kept, full if every pair must be kept, otherwise partial. Each program finds the range of one row of blocks: from the
first block that is not empty to the last. The first run of full blocks inside the range is computed without a mask. All
other blocks of the range are computed with a mask, empty ones included.
"""

import triton
import triton.language as tl

from ..._runtime.device.block_seqs import FIRST_ENTRY, KV_LEN, KV_START, Q_LEN, Q_START, RECORD
from ..._runtime.device.tl import store_range
from ..._runtime.device.tl_math import clamp_index


@triton.jit(do_not_specialize=["q_offset", "q_parts", "kv_parts", "num_seqs"])
def document_packed_extremes(
    doc_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_offset,
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    stride_doc_0,
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
        doc_q = tl.load(doc_ptr + kv_start * stride_doc_0 + clamp_index(q_idx, kv_len).to(tl.int64) * stride_doc_0)
        part_offs = head * q_parts + slots
        in_parts = has_part
        q_values = doc_q.to(tl.int32)
        tl.store(doc_q_min_ptr + part_offs, tl.min(q_values, 1, keep_dims=True), mask=in_parts)
        tl.store(doc_q_max_ptr + part_offs, tl.max(q_values, 1, keep_dims=True), mask=in_parts)

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
        doc_kv = tl.load(doc_ptr + kv_start * stride_doc_0 + clamp_index(kv_idx, kv_len).to(tl.int64) * stride_doc_0)
        part_offs = head * kv_parts + slots
        in_parts = has_part
        kv_values = doc_kv.to(tl.int32)
        tl.store(doc_kv_min_ptr + part_offs, tl.min(kv_values, 1, keep_dims=True), mask=in_parts)
        tl.store(doc_kv_max_ptr + part_offs, tl.max(kv_values, 1, keep_dims=True), mask=in_parts)


@triton.jit(do_not_specialize=["q_offset", "q_parts", "kv_parts", "num_heads"])
def document_packed_query_ranges(
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    block_seqs_ptr,
    q_offset,
    ranges_ptr,
    q_parts,
    kv_parts,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
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
    doc_q_min = tl.min(tl.load(doc_q_min_ptr + part_offs), 1).to(tl.int64)
    doc_q_max = tl.max(tl.load(doc_q_max_ptr + part_offs), 1).to(tl.int64)
    q_first = block * BLOCK_M + q_shift
    q_last = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
    num_kv = tl.cdiv(kv_len, PART)
    num_others = tl.cdiv(kv_len, BLOCK_N)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
        their_part_offs = head * kv_parts + kv_start // PART + b + tl.minimum(their_part_idx, num_kv - 1)
        doc_kv_min = tl.min(tl.load(doc_kv_min_ptr + their_part_offs), 1).to(tl.int64)
        doc_kv_max = tl.max(tl.load(doc_kv_max_ptr + their_part_offs), 1).to(tl.int64)
        kv_first = other_blocks * BLOCK_N
        kv_last = tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1
        visits = visits & ((q_last >= kv_first) & (doc_q_min <= doc_kv_max) & (doc_q_max >= doc_kv_min))
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & ((q_first >= kv_last) & (doc_q_min >= doc_kv_max) & (doc_q_max <= doc_kv_min))
            & (other_blocks * BLOCK_N + BLOCK_N <= kv_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)


@triton.jit(do_not_specialize=["q_offset", "q_parts", "kv_parts", "num_heads"])
def document_packed_key_ranges(
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    block_seqs_ptr,
    q_offset,
    ranges_ptr,
    q_parts,
    kv_parts,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
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
    doc_kv_min = tl.min(tl.load(doc_kv_min_ptr + part_offs), 1).to(tl.int64)
    doc_kv_max = tl.max(tl.load(doc_kv_max_ptr + part_offs), 1).to(tl.int64)
    kv_first = block * BLOCK_N
    kv_last = tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1
    num_q = tl.cdiv(q_len, PART)
    num_others = tl.cdiv(q_len, BLOCK_M)
    visited_begin, visited_end = num_others, 0
    full_begin, full_end = num_others, num_others
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
        their_part_offs = head * q_parts + q_start // PART + b + tl.minimum(their_part_idx, num_q - 1)
        doc_q_min = tl.min(tl.load(doc_q_min_ptr + their_part_offs), 1).to(tl.int64)
        doc_q_max = tl.max(tl.load(doc_q_max_ptr + their_part_offs), 1).to(tl.int64)
        q_first = other_blocks * BLOCK_M + q_shift
        q_last = tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift
        visits = visits & ((q_last >= kv_first) & (doc_q_min <= doc_kv_max) & (doc_q_max >= doc_kv_min))
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & ((q_first >= kv_last) & (doc_q_min >= doc_kv_max) & (doc_q_max <= doc_kv_min))
            & (other_blocks * BLOCK_M + BLOCK_M <= q_len)
        )
        visited_begin = tl.minimum(visited_begin, tl.min(tl.where(visits, other_blocks, num_others), 0))
        visited_end = tl.maximum(visited_end, tl.max(tl.where(visits, other_blocks + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(is_full, other_blocks, num_others), 0))
        behind_full = (other_blocks > full_begin) & ~is_full
        full_end = tl.minimum(full_end, tl.min(tl.where(behind_full, other_blocks, num_others), 0))
    store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others)
