# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: paged/portable.py.jinja
# hash: 329f42a0ef0c4647
"""`document` on paged caches: `o = softmax(score) v` of a split of the keys, and the plan of the splits.

    keep          q_idx >= kv_idx and doc[b, q_idx] == doc[b, kv_idx]
    q             [B, Hq, Sq, D], or [total_q, Hq, D] of packed sequences
    k             [pages, page size, Hkv, D]
    v             [pages, page size, Hkv, Dv]
    k_scale       [Hkv] or [pages, page size, Hkv], what keys in the cache are times, or None: 1
    v_scale       the same of values, or a number
    doc           [kv_page, kv_slot]  int32
    page_table    [B, most pages]  int32, or with page_starts [all pages]: the pages of each sequence, in order; none
                  where a page is a batch row
    page_starts   [B + 1]  int32, where the pages of each sequence begin in page_table
    records       [entries, 16]  int32, a part each: sequence, start and length of its queries, first row of the tile,
                  first and last key of the part with gaps taken out, where its sums go (-1: it is all), its number,
                  keys of the sequence, keys of a split
    counts        [2]  int32, how many parts and how many tiles there are
    o             as q, with Dv
    lse           [B, Hq, Sq] or [Hq, total_q]  fp32, log of the softmax denominator
    partial_o     [entries, Hkv, rows, Dv]  fp32, sums of values of each part
    partial_sums  [entries, Hkv, rows, 2]  fp32, maximum of logits and sum of their exponentials of each part
    cu_seqlens_q  [B + 1]  int32, where the packed sequences of queries begin
    kv_lengths    [B]  int32, keys of each sequence; none where each has most_keys
    tiles         [tiles, 8]  int32, each tile of several parts: sequence, start and length of its queries, first row,
                  first part, number of parts, splits of a part

A tile has BLOCK_M rows: the query heads that share a key head, token by token. Its keys are split, so that a few
queries on long caches occupy the chip. `document_paged_plan` plans the splits: `least_keys` or more each, at most
`most_splits` of a sequence. Each split is folded in block by block (online softmax, arXiv:2205.14135), and splits
are folded into each other in their order: by one program, if it takes several, else by `merge_splits`. Splits
follow from the sequence's own lengths alone, and the bits do not depend on where they are folded: results are the
same in any batch. Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..._runtime.device.column_pairs import split_columns
from ..._runtime.device.paged import (
    FOLDED,
    WAVES,
    add_values,
    dot_keys,
    first_columns,
    head_scale,
    in_columns,
    join_parts,
    load_cache,
    load_heads,
    load_pages,
    page_of,
    slot_of,
    store_heads,
    token_scales,
    value_unit,
    zero_sums,
)
from ..._runtime.device.tl import LN2, LOG2E


@triton.jit(do_not_specialize=["q_offset", "doc_size_1", "table_stride", "num_kv_heads", "partial_rows"])
def document_paged_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale,
    v_scale,
    doc_ptr,
    page_table_ptr,
    page_starts_ptr,
    records_ptr,
    counts_ptr,
    q_offset,
    o_ptr,
    lse_ptr,
    partial_o_ptr,
    partial_sums_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kp,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vp,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lseb,
    stride_lseh,
    stride_doc_0,
    stride_doc_1,
    doc_size_1,
    table_stride,
    num_kv_heads,
    partial_rows,
    softmax_scale,
    Q_AT_END: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED_KV: tl.constexpr,
    FLAT_TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if OVERLAPS:
        # The kernel that merges the parts may be launched: it waits for the end of this one.
        gdc_launch_dependents()
    # An item is an entry of the records and a key head. Memory holds the number of entries: the host does not know it.
    num_items = tl.load(counts_ptr) * num_kv_heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        record = records_ptr + item // num_kv_heads * 16
        hkv = (item % num_kv_heads).to(tl.int64)
        b, q_start = tl.load(record).to(tl.int64), tl.load(record + 1).to(tl.int64)
        q_len, start_row = tl.load(record + 2), tl.load(record + 3)
        first_step, last_step = tl.load(record + 4), tl.load(record + 5)
        part = tl.load(record + 6).to(tl.int64)
        kv_len, keys = tl.load(record + 8), tl.load(record + 9)
        # Without a table a page is a batch row.
        pages = (
            b
            if page_table_ptr is None
            else page_table_ptr + (tl.load(page_starts_ptr + b) if FLAT_TABLE else b * table_stride)
        )
        q_shift = kv_len - q_len if Q_AT_END else tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        tile_rows = start_row + tl.arange(0, BLOCK_M)
        is_row = tile_rows < q_len * GROUP
        rows = tl.minimum(tile_rows // GROUP, q_len - 1)
        q_head = hkv * GROUP + tile_rows % GROUP
        q_rows = b * stride_qb + (q_start + rows) * stride_qs + q_head * stride_qh
        q_tile = load_heads(q_ptr, q_rows, is_row, HEAD_DIM, BLOCK_D)
        if PAIRS != "":
            # Two columns of an 8-bit cache are read at a time: products are of even and of odd columns, in float16.
            q_tile, q_unit = split_columns(q_tile)
        k_base, v_base = k_ptr + hkv * stride_kh, v_ptr + hkv * stride_vh
        # A scale of 0 times the score -inf of a key that is not kept would be NaN.
        scale = tl.maximum(softmax_scale * head_scale(k_scale, hkv, K_SCALE), 1e-30)
        # The unit of acc: the sum of values is acc times it.
        v_unit = value_unit(v_scale, hkv, V_SCALE)
        qk_scale = scale * LOG2E
        q_idx = rows + q_shift
        doc_q = tl.load(
            doc_ptr
            + page_of(pages, q_idx, kv_len, PAGE_SIZE) * stride_doc_0
            + slot_of(q_idx, kv_len, doc_size_1, PAGE_SIZE) * stride_doc_1
        )
        q_last = (tl.minimum(start_row + BLOCK_M, q_len * GROUP) - 1) // GROUP + q_shift

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = zero_sums(BLOCK_M, HEAD_DIM_V, BLOCK_DV, PAIRS)
        split_end = first_step + keys
        if FOLDS:
            all_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            all_sum = tl.zeros([BLOCK_M], tl.float32)
            all_acc = zero_sums(BLOCK_M, HEAD_DIM_V, BLOCK_DV, PAIRS)
        # A page's number is loaded a block ahead: else the copies of its keys would wait for it.
        final_step = first_step + tl.maximum(last_step - first_step - 1, 0) // BLOCK_N * BLOCK_N
        next_n = first_step
        next_page = load_pages(pages, next_n, kv_len, PAGE_SIZE, BLOCK_N)
        for step in range(first_step, last_step, BLOCK_N):
            # Each split begins anew, as if another program took it: so its bits are the same.
            if FOLDS and step == split_end:
                acc = [columns * v_unit for columns in acc]
                all_max, all_sum, all_acc = join_parts(all_max, all_sum, all_acc, row_max, row_sum, acc)
                row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_M], tl.float32)
                acc = zero_sums(BLOCK_M, HEAD_DIM_V, BLOCK_DV, PAIRS)
                if V_SCALE == "token":
                    v_unit = value_unit(v_scale, hkv, V_SCALE)
                split_end += keys
            start_n, page = next_n, next_page
            next_n = tl.minimum(step + BLOCK_N, final_step)
            next_page = load_pages(pages, next_n, kv_len, PAGE_SIZE, BLOCK_N)
            kv_idx = start_n + tl.arange(0, BLOCK_N)
            # Nothing is read of keys that no row may see: their pages may be gone.
            seen = (kv_idx < tl.minimum(q_last + 1, kv_len)) & (kv_idx < kv_len)
            kv_page = tl.where(seen, page, 0)
            kv_slot = tl.where(seen, kv_idx, 0) % PAGE_SIZE
            k_tile = load_cache(
                k_base,
                page,
                start_n,
                seen,
                stride_kp,
                stride_ks,
                q_ptr.dtype.element_ty,
                PAGE_SIZE,
                BLOCK_N,
                HEAD_DIM,
                BLOCK_D,
                PAIRS,
            )
            qk = dot_keys(q_tile, k_tile)  # [M, N]
            if PAIRS != "":
                qk *= q_unit[:, None]
            if K_SCALE == "token":
                scales = token_scales(k_scale, hkv, num_kv_heads, page, start_n, seen, PAGE_SIZE, BLOCK_N)
                qk *= scales[None, :]
            doc_kv = tl.load(doc_ptr + kv_page * stride_doc_0 + kv_slot * stride_doc_1)
            keep = (q_idx[:, None] >= kv_idx[None, :]) & (doc_q[:, None] == doc_kv[None, :])
            qk = tl.where(keep & seen[None, :], qk, float("-inf"))
            max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
            # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
            max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
            p = tl.exp2(qk * qk_scale - max_ref[:, None])
            alpha = tl.exp2(row_max - max_ref)
            row_sum = row_sum * alpha + tl.sum(p, 1)
            if V_SCALE == "token":
                # In units of the largest scale so far: a weight times a small scale does not fit into 16 bits.
                scales = token_scales(v_scale, hkv, num_kv_heads, page, start_n, seen, PAGE_SIZE, BLOCK_N)
                unit_new = tl.maximum(v_unit, tl.max(scales, 0))
                p *= (scales / unit_new)[None, :]
                alpha *= v_unit / unit_new
                v_unit = unit_new
            if SHARED_KV:
                v_tile = first_columns(k_tile, HEAD_DIM_V, BLOCK_DV, PAIRS)
            else:
                v_tile = load_cache(
                    v_base,
                    page,
                    start_n,
                    seen,
                    stride_vp,
                    stride_vs,
                    q_ptr.dtype.element_ty,
                    PAGE_SIZE,
                    BLOCK_N,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    PAIRS,
                )
            acc = add_values(acc, p, v_tile, alpha)
            row_max = max_new

        acc = [columns * v_unit for columns in acc]
        if FOLDS:
            row_max, row_sum, acc = join_parts(all_max, all_sum, all_acc, row_max, row_sum, acc)
        if part < 0:
            # A row without any key gives o = 0 and lse = -inf.
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            o_tile = in_columns([columns / row_sum[:, None] for columns in acc], PAIRS)
            o_rows = b * stride_ob + (q_start + rows) * stride_os + q_head * stride_oh
            store_heads(o_ptr, o_tile, o_rows, is_row, HEAD_DIM_V, BLOCK_DV)
            lse = (row_max + tl.log2(row_sum)) * LN2
            tl.store(lse_ptr + b * stride_lseb + q_head * stride_lseh + q_start + rows, lse, mask=is_row)
        else:
            part_rows = (part * num_kv_heads + hkv) * partial_rows + tl.arange(0, BLOCK_M)
            store_heads(partial_o_ptr, in_columns(acc, PAIRS), part_rows * HEAD_DIM_V, is_row, HEAD_DIM_V, BLOCK_DV)
            tl.store(partial_sums_ptr + part_rows * 2, row_max, mask=is_row)
            tl.store(partial_sums_ptr + part_rows * 2 + 1, row_sum, mask=is_row)


@triton.jit
def document_paged_plan_tile(
    b,
    tile,
    share,
    cu_seqlens_q_ptr,
    kv_lengths_ptr,
    q_offset,
    q_rows,
    most_keys,
    most_splits,
    least_keys,
    Q_AT_END: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    PACKED: tl.constexpr,
    BALANCED: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    LAST_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The splits of a tile of one sequence, or of several sequences, if `b` is a vector.

    Returned are start and length of the queries; the number of keys; the first visited key and the number of visited
    keys, both with gaps taken out; keys of a split; splits of a part; and the number of parts, 0 if the sequence does
    not have that tile.
    """
    kv_len = most_keys
    if kv_lengths_ptr is not None:
        kv_len = tl.maximum(tl.minimum(tl.load(kv_lengths_ptr + b), most_keys), 0)
    q_start = tl.load(cu_seqlens_q_ptr + b) if PACKED else 0
    q_len = tl.load(cu_seqlens_q_ptr + b + 1) - q_start if PACKED else q_rows
    # Sequences of fewer rows than FIRST_ROWS or more than LAST_ROWS are left to another plan.
    is_served = (q_len * GROUP >= FIRST_ROWS) & (q_len * GROUP <= LAST_ROWS)
    num_tiles = tl.where(is_served, tl.cdiv(q_len * GROUP, BLOCK_M), 0)
    # The tiles of one sequence share the most splits that it may have: those of a long prompt are not split.
    most = tl.cdiv(most_splits, tl.maximum(num_tiles, 1))
    least = least_keys
    if BALANCED:
        least = tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, least_keys)
        most = tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)
    q_shift = kv_len - q_len if Q_AT_END else tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    q_last = (tl.minimum(tile * BLOCK_M + BLOCK_M, q_len * GROUP) - 1) // GROUP + q_shift
    kv_end = tl.minimum(q_last + 1, kv_len)

    first_step = 0
    span = tl.maximum(kv_end - first_step, 0)
    keys = tl.maximum(tl.cdiv(tl.cdiv(span, most), BLOCK_N) * BLOCK_N, least)
    # If the batch alone occupies the chip, a program takes several splits, so that they need not be merged.
    taken = tl.where(keys * FOLDED * WAVES <= share, FOLDED, 1) if FOLDS else 1
    parts = tl.cdiv(tl.maximum(tl.cdiv(span, keys), 1), taken)
    return q_start, q_len, kv_len, first_step, span, keys, taken, tl.where(tile < num_tiles, parts, 0)


@triton.jit(do_not_specialize=["q_offset", "q_rows", "num_seqs", "most_keys", "most_splits", "least_keys"])
def document_paged_plan(
    cu_seqlens_q_ptr,
    kv_lengths_ptr,
    q_offset,
    records_ptr,
    tiles_ptr,
    counts_ptr,
    q_rows,
    num_seqs,
    most_keys,
    most_splits,
    least_keys,
    Q_AT_END: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    PACKED: tl.constexpr,
    BALANCED: tl.constexpr,
    PLANNERS: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    LAST_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Several programs plan the tiles of a sequence, if it may have several.
    b, planner = (tl.program_id(0) // PLANNERS).to(tl.int64), tl.program_id(0) % PLANNERS
    ONE_TILE: tl.constexpr = LAST_ROWS <= BLOCK_M
    # `share`: the keys of each program if the keys of all tiles were divided evenly over `most_splits` programs.
    all_keys = tl.full([], 0, tl.int64)
    for first in range(0, num_seqs, 256):
        seqs = first + tl.arange(0, 256)
        is_seq = seqs < num_seqs
        keys = tl.where(is_seq, most_keys, 0).to(tl.int64)
        if kv_lengths_ptr is not None:
            keys = tl.load(kv_lengths_ptr + seqs, mask=is_seq, other=0).to(tl.int64)
        if not ONE_TILE:
            q_len = q_rows
            if PACKED:
                q_len = tl.load(cu_seqlens_q_ptr + seqs + 1, mask=is_seq, other=0)
                q_len -= tl.load(cu_seqlens_q_ptr + seqs, mask=is_seq, other=0)
            keys *= tl.cdiv(q_len * GROUP, BLOCK_M)
        all_keys += tl.sum(keys, 0)
    share = tl.minimum(tl.cdiv(all_keys, most_splits), 2**30).to(tl.int32)
    if ONE_TILE:
        # Each program counts the parts of all sequences: no counter has to be cleared before.
        entry, entries, split_tile, split_tiles = 0, 0, 0, 0
        for first in range(0, num_seqs, 256):
            seqs = first + tl.arange(0, 256)
            _, _, _, _, _, _, _, parts = document_paged_plan_tile(
                tl.minimum(seqs, num_seqs - 1),
                0,
                share,
                cu_seqlens_q_ptr,
                kv_lengths_ptr,
                q_offset,
                q_rows,
                most_keys,
                most_splits,
                least_keys,
                Q_AT_END,
                Q_OFFSET_PER_BATCH,
                PACKED,
                BALANCED,
                FIRST_ROWS,
                LAST_ROWS,
                GROUP,
                FOLDS,
                BLOCK_M,
                BLOCK_N,
            )
            parts = tl.where(seqs < num_seqs, parts, 0)
            merges = (parts > 1).to(tl.int32)
            entry += tl.sum(tl.where(seqs < b, parts, 0), 0)
            entries += tl.sum(parts, 0)
            split_tile += tl.sum(tl.where(seqs < b, merges, 0), 0)
            split_tiles += tl.sum(merges, 0)
        tl.store(counts_ptr, entries, mask=b == 0)
        tl.store(counts_ptr + 1, split_tiles, mask=b == 0)
        num_tiles = 1
    else:
        q_len = tl.load(cu_seqlens_q_ptr + b + 1) - tl.load(cu_seqlens_q_ptr + b) if PACKED else q_rows
        num_tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
        entries = 0
        for tile in range(planner, num_tiles, PLANNERS):
            _, _, _, _, _, _, _, parts = document_paged_plan_tile(
                b,
                tile,
                share,
                cu_seqlens_q_ptr,
                kv_lengths_ptr,
                q_offset,
                q_rows,
                most_keys,
                most_splits,
                least_keys,
                Q_AT_END,
                Q_OFFSET_PER_BATCH,
                PACKED,
                BALANCED,
                FIRST_ROWS,
                LAST_ROWS,
                GROUP,
                FOLDS,
                BLOCK_M,
                BLOCK_N,
            )
            entries += parts
        entry = tl.atomic_add(counts_ptr, entries)
    for tile in range(planner, num_tiles, PLANNERS):
        q_start, q_len, kv_len, first_step, span, keys, taken, parts = document_paged_plan_tile(
            b,
            tile,
            share,
            cu_seqlens_q_ptr,
            kv_lengths_ptr,
            q_offset,
            q_rows,
            most_keys,
            most_splits,
            least_keys,
            Q_AT_END,
            Q_OFFSET_PER_BATCH,
            PACKED,
            BALANCED,
            FIRST_ROWS,
            LAST_ROWS,
            GROUP,
            FOLDS,
            BLOCK_M,
            BLOCK_N,
        )
        for first in range(0, parts, 32):
            nth = first + tl.arange(0, 32)
            record = records_ptr + (entry + nth) * 16
            begin = first_step + nth * taken * keys
            end = tl.minimum(begin + taken * keys, first_step + span)
            tl.store(record, b.to(tl.int32), mask=nth < parts)
            tl.store(record + 1, q_start, mask=nth < parts)
            tl.store(record + 2, q_len, mask=nth < parts)
            tl.store(record + 3, tile * BLOCK_M, mask=nth < parts)
            tl.store(record + 4, begin, mask=nth < parts)
            tl.store(record + 5, end, mask=nth < parts)
            tl.store(record + 6, tl.where(parts > 1, entry + nth, -1), mask=nth < parts)
            tl.store(record + 7, nth, mask=nth < parts)
            tl.store(record + 8, kv_len, mask=nth < parts)
            tl.store(record + 9, keys, mask=nth < parts)
        if parts > 1:
            record = tiles_ptr + (split_tile if ONE_TILE else tl.atomic_add(counts_ptr + 1, 1)) * 8
            tl.store(record, b.to(tl.int32))
            tl.store(record + 1, q_start)
            tl.store(record + 2, q_len)
            tl.store(record + 3, tile * BLOCK_M)
            tl.store(record + 4, entry)
            tl.store(record + 5, parts)
            tl.store(record + 6, taken)
        entry += parts
