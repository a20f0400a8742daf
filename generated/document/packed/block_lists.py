# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: kernels/block_lists.py.jinja
# hash: b5e16ecde9488011
"""Which blocks of keys a block of queries visits under `document`, and the other way round.

    keep        q_idx >= kv_idx and doc[q_idx] == doc[kv_idx]
    doc_q_min   [B, H, parts]  int64, smallest doc[q_idx] of each part
    doc_q_max   [B, H, parts]  int64, largest
    doc_kv_min  [B, H, parts]  int64, smallest doc[kv_idx] of each part
    doc_kv_max  [B, H, parts]  int64, largest
    spans       [B, H, blocks, 4]  int32, first, partial end, full begin and end of a block's list
    block_list  [entries]  int16 or int32, lists of the blocks to visit

A block is decided by interval arithmetic, at a cost that does not depend on its size: empty where no pair can be kept,
full where every pair is, else partial. Each program lists one row of blocks in its own room of `block_list`: the
partial ones from the left, ascending, the full ones from the right.
"""

import triton
import triton.language as tl


@triton.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "num_heads",
        "q_offset",
    ]
)
def document_packed_extremes(
    doc_ptr,
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    stride_doc_0,
    q_len,
    kv_len,
    num_heads,
    q_offset,
    Q_OFFSET_PER_BATCH: tl.constexpr,
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
        part_idx = program * PARTS + tl.arange(0, PARTS)
        # Beyond the end the last position stands in for itself once more.
        q_idx = tl.minimum(part_idx[:, None] * PART + tl.arange(0, PART)[None, :], q_len - 1) + q_shift
        doc_q = tl.load(doc_ptr + kv_start * stride_doc_0 + clamp_index(q_idx, kv_len).to(tl.int64) * stride_doc_0)
        part_offs = head * num_q + part_idx
        in_parts = part_idx < num_q
        reduced = doc_q.to(tl.int64)
        tl.store(doc_q_min_ptr + part_offs, tl.min(reduced, 1), mask=in_parts)
        tl.store(doc_q_max_ptr + part_offs, tl.max(reduced, 1), mask=in_parts)

    else:
        part_idx = (program - query_programs) * PARTS + tl.arange(0, PARTS)
        # Beyond the end the last position stands in for itself once more.
        kv_idx = tl.minimum(part_idx[:, None] * PART + tl.arange(0, PART)[None, :], kv_len - 1)
        doc_kv = tl.load(doc_ptr + kv_start * stride_doc_0 + clamp_index(kv_idx, kv_len).to(tl.int64) * stride_doc_0)
        part_offs = head * num_kv + part_idx
        in_parts = part_idx < num_kv
        reduced = doc_kv.to(tl.int64)
        tl.store(doc_kv_min_ptr + part_offs, tl.min(reduced, 1), mask=in_parts)
        tl.store(doc_kv_max_ptr + part_offs, tl.max(reduced, 1), mask=in_parts)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "num_heads",
        "q_offset",
    ]
)
def document_packed_query_lists(
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    spans_ptr,
    block_list_ptr,
    q_len,
    kv_len,
    num_heads,
    q_offset,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    b = (head // num_heads).to(tl.int64)

    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    q_first = block * BLOCK_M + q_shift
    q_last = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift

    num_q = tl.cdiv(q_len, PART)
    # Vectors of one element: Triton's interpreter makes numbers of a scalar comparison that meets a vector.
    part_idx = block * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
    part_offs = head * num_q + tl.minimum(part_idx, num_q - 1)
    doc_q_min = tl.min(tl.load(doc_q_min_ptr + part_offs), 1)
    doc_q_max = tl.max(tl.load(doc_q_max_ptr + part_offs), 1)
    num_kv = tl.cdiv(kv_len, PART)
    num_others = tl.cdiv(kv_len, BLOCK_N)
    span = spans_ptr + tl.program_id(0).to(tl.int64) * 4
    list_begin = tl.program_id(0) * num_others if OWN_ROOM else 0
    list_end = list_begin + num_others
    if FILL and not OWN_ROOM:
        list_begin, list_end = tl.load(span), tl.load(span + 3)
    partial_end, full_begin = list_begin, list_end
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        kv_first = other_blocks * BLOCK_N
        kv_last = tl.minimum(other_blocks * BLOCK_N + BLOCK_N, kv_len) - 1

        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
        their_part_offs = head * num_kv + tl.minimum(their_part_idx, num_kv - 1)
        doc_kv_min = tl.min(tl.load(doc_kv_min_ptr + their_part_offs), 1)
        doc_kv_max = tl.max(tl.load(doc_kv_max_ptr + their_part_offs), 1)
        visits = visits & ((q_last >= kv_first) & (doc_q_min <= doc_kv_max) & (doc_q_max >= doc_kv_min))
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & ((q_first >= kv_last) & (doc_q_min >= doc_kv_max) & (doc_q_max <= doc_kv_min))
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
        # How many there are, for the host to give each list its room.
        tl.store(span, partial_end - full_begin + num_others)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "kv_len",
        "num_heads",
        "q_offset",
    ]
)
def document_packed_key_lists(
    doc_q_min_ptr,
    doc_q_max_ptr,
    doc_kv_min_ptr,
    doc_kv_max_ptr,
    spans_ptr,
    block_list_ptr,
    q_len,
    kv_len,
    num_heads,
    q_offset,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    OWN_ROOM: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    b = (head // num_heads).to(tl.int64)

    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    kv_first = block * BLOCK_N
    kv_last = tl.minimum(block * BLOCK_N + BLOCK_N, kv_len) - 1

    num_kv = tl.cdiv(kv_len, PART)
    # Vectors of one element: Triton's interpreter makes numbers of a scalar comparison that meets a vector.
    part_idx = block * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)[None, :]
    part_offs = head * num_kv + tl.minimum(part_idx, num_kv - 1)
    doc_kv_min = tl.min(tl.load(doc_kv_min_ptr + part_offs), 1)
    doc_kv_max = tl.max(tl.load(doc_kv_max_ptr + part_offs), 1)
    num_q = tl.cdiv(q_len, PART)
    num_others = tl.cdiv(q_len, BLOCK_M)
    span = spans_ptr + tl.program_id(0).to(tl.int64) * 4
    list_begin = tl.program_id(0) * num_others if OWN_ROOM else 0
    list_end = list_begin + num_others
    if FILL and not OWN_ROOM:
        list_begin, list_end = tl.load(span), tl.load(span + 3)
    partial_end, full_begin = list_begin, list_end
    for chunk_first in range(0, num_others, CHUNK):
        other_blocks = chunk_first + tl.arange(0, CHUNK)
        q_first = other_blocks * BLOCK_M + q_shift
        q_last = tl.minimum(other_blocks * BLOCK_M + BLOCK_M, q_len) - 1 + q_shift

        visits = other_blocks < num_others
        their_part_idx = other_blocks[:, None] * (BLOCK_M // PART) + tl.arange(0, BLOCK_M // PART)[None, :]
        their_part_offs = head * num_q + tl.minimum(their_part_idx, num_q - 1)
        doc_q_min = tl.min(tl.load(doc_q_min_ptr + their_part_offs), 1)
        doc_q_max = tl.max(tl.load(doc_q_max_ptr + their_part_offs), 1)
        visits = visits & ((q_last >= kv_first) & (doc_q_min <= doc_kv_max) & (doc_q_max >= doc_kv_min))
        # A cut last block is never full: full blocks are read without bounds.
        is_full = (
            visits
            & ((q_first >= kv_last) & (doc_q_min >= doc_kv_max) & (doc_q_max <= doc_kv_min))
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
        # How many there are, for the host to give each list its room.
        tl.store(span, partial_end - full_begin + num_others)
