# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band: {mask: 'band(before, after)', scalars: {before: {type: int, min: 0, example: 256}, after: {type: int,
#     min: 0, example: 32}}}
# template: paged/hopper_latent.py.jinja
# hash: cc18ae7d95f9e0eb
"""Forward of `band` on Hopper, paged caches, latent attention: values are the first columns of keys.

    keep          q_idx - kv_idx <= before and kv_idx - q_idx <= after
    q             [B, Hq, Sq, D], or [total_q, Hq, D] of packed sequences
    k             [pages, page size, Hkv, D]
    k_scale       [Hkv] or [pages, page size, Hkv], what keys in the cache are times, or None: 1
    v_scale       the same of values, or a number
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

A program computes the splits that `band_paged_plan` has planned, one after the other. A split has a tile of 64
rows: the query heads that share a key head, token by token. `produce_keys` copies blocks of 64 keys from their
pages (TMA), and two warpgroups run `consume`: `_runtime/device/gl_latent.py` says how they share the work. Splits
are merged by `merge_splits`, as those of the portable kernel are. `row_max` is the largest score so far, or up to
8 less, times log2(e), and `row_sums` has the sums of exponentials relative to it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..._runtime.device.gl import LN2, LOG2E, product_layout
from ..._runtime.device.gl_forward import ROWS, add_lanes, lane_layout, raise_maximum, rescale_part
from ..._runtime.device.gl_latent import (
    KEYS,
    REST,
    begin_others,
    begin_own,
    compute_scores,
    end_others,
    end_own,
    in_units,
    largest_elements,
    load_queries,
    load_record,
    make_exchange,
    make_latent_ring,
    make_queries,
    raise_unit,
    rescaling,
    scale_weights,
    score_factors,
    store_half,
)
from ..._runtime.device.gl_latent_bytes import ByteRows, as_words, head_scale, make_byte_ring, value_unit
from ..._runtime.device.gl_pages import PageRows, describe_pages
from ..._runtime.device.gl_versions import concat


@gluon.jit
def produce_keys(
    arguments,
    Q_AT_END: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    FLAT_TABLE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Copy the keys of each split, two blocks at a time: one for each warpgroup."""
    k_desc, ring, pointers, table_stride, num_kv_heads, numbers = arguments
    page_table_ptr, page_starts_ptr, records_ptr, counts_ptr = pointers
    q_offset, before, after = numbers
    turn = 0
    # Memory holds the number of splits: the host does not know it.
    num_items = gl.load(counts_ptr) * num_kv_heads
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        hkv, b, _q_start, q_len, start_row, keys_begin, keys_end, _part, kv_len = load_record(
            records_ptr, item, num_kv_heads
        )
        pages = page_table_ptr + (gl.load(page_starts_ptr + b) if FLAT_TABLE else b * table_stride)
        q_shift = kv_len - q_len if Q_AT_END else gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        q_first = start_row // GROUP + q_shift
        q_last = (gl.minimum(start_row + ROWS, q_len * GROUP) - 1) // GROUP + q_shift
        first_seen = gl.maximum(q_first - before, 0)
        end_seen = gl.minimum(q_last + after + 1, kv_len)
        end_seen = gl.where(first_seen < end_seen, end_seen, 0)
        # Nothing is read of keys that no row may see: their pages may be gone.
        rows = PageRows(pages, hkv.to(gl.int32), gl.maximum(keys_begin, first_seen), gl.minimum(keys_end, end_seen))
        for start_n in range(keys_begin, keys_end, 2 * KEYS):
            ring.send(k_desc, rows, start_n, 2 * turn, HEAD_DIM_V, PAGE_SIZE)
            ring.send(k_desc, rows, start_n + KEYS, 2 * turn + 1, HEAD_DIM_V, PAGE_SIZE)
            turn += 1


@gluon.jit
def convert_keys(
    arguments,
    Q_AT_END: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    K_SCALE: gl.constexpr,
    V_SCALE: gl.constexpr,
    FLAT_TABLE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Load the keys of each split from a cache of 8-bit floats, and store them as float16."""
    k_ptr, ring, scales, pointers, strides, table_stride, num_kv_heads, numbers = arguments
    page_table_ptr, page_starts_ptr, records_ptr, counts_ptr = pointers
    stride_kh, stride_ks, k_page_rows = strides
    q_offset, before, after = numbers
    turn = 0
    num_items = gl.load(counts_ptr) * num_kv_heads
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        hkv, b, _q_start, q_len, start_row, keys_begin, keys_end, _part, kv_len = load_record(
            records_ptr, item, num_kv_heads
        )
        pages = page_table_ptr + (gl.load(page_starts_ptr + b) if FLAT_TABLE else b * table_stride)
        q_shift = kv_len - q_len if Q_AT_END else gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        q_first = start_row // GROUP + q_shift
        q_last = (gl.minimum(start_row + ROWS, q_len * GROUP) - 1) // GROUP + q_shift
        first_seen = gl.maximum(q_first - before, 0)
        end_seen = gl.minimum(q_last + after + 1, kv_len)
        end_seen = gl.where(first_seen < end_seen, end_seen, 0)
        # Nothing is read of keys that no row may see: their pages may be gone.
        first_seen, end_seen = gl.maximum(keys_begin, first_seen), gl.minimum(keys_end, end_seen)
        # The stride of heads counts units of 16 bytes, which are four words.
        rows = ByteRows(
            as_words(k_ptr) + hkv * stride_kh * 4,
            hkv,
            num_kv_heads,
            pages,
            k_page_rows,
            stride_ks // 4,
            first_seen,
            end_seen,
        )
        turn = ring.fill(rows, scales, keys_begin, keys_end, turn, K_SCALE, V_SCALE, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V)


@gluon.jit
def consume(
    arguments,
    PART: gl.constexpr,
    Q_AT_END: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    K_SCALE: gl.constexpr,
    V_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Compute the columns of warpgroup PART of each split."""
    queries, ring, exchange, pointers, strides, num_kv_heads, partial_rows, scale, scales, numbers = arguments
    q_ptr, records_ptr, counts_ptr, o_ptr, lse_ptr, partial_o_ptr, partial_sums_ptr = pointers
    stride_qb, stride_qh, stride_qs, stride_ob, stride_oh, stride_os, stride_lseb, stride_lseh = strides
    q_offset, before, after = numbers
    k_scale, v_scale = scales
    DTYPE: gl.constexpr = queries[0].dtype
    HALF: gl.constexpr = HEAD_DIM_V // 2
    FIRST_COL: gl.constexpr = PART * HALF
    SCORES: gl.constexpr = product_layout(KEYS)
    SUMS: gl.constexpr = product_layout(HALF)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    BLOCK_N: gl.constexpr = KEYS
    turn, q_turn = 0, 0
    num_items = gl.load(counts_ptr) * num_kv_heads
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        hkv, b, q_start, q_len, start_row, keys_begin, keys_end, part, kv_len = load_record(
            records_ptr, item, num_kv_heads
        )
        tile_rows = start_row + gl.arange(0, ROWS, layout=ROW)
        is_row = tile_rows < q_len * GROUP
        rows = gl.minimum(tile_rows // GROUP, q_len - 1)
        q_head = hkv * GROUP + tile_rows % GROUP
        q_rows = b * stride_qb + (q_start + rows) * stride_qs + q_head * stride_qh
        q_unit = gl.full([ROWS], 1.0, gl.float32, ROW)  # [ROWS]
        if q_ptr.dtype.element_ty != DTYPE:
            q_unit = largest_elements(q_ptr, q_rows, is_row, PART, HEAD_DIM, HEAD_DIM_V)
            q_unit = exchange.query_units(q_unit, q_turn, PART, ROW)
        load_queries(queries[PART].index(0), q_ptr, q_rows, is_row, q_unit, FIRST_COL, HEAD_DIM)
        if PART == 1:
            load_queries(queries[2].index(0), q_ptr, q_rows, is_row, q_unit, HEAD_DIM_V, HEAD_DIM)
        exchange.share_queries()
        # Scores are times it: then exponentials are one `exp2`.
        qk_scale = score_factors(scale * head_scale(k_scale, hkv, K_SCALE) * LOG2E, q_unit)  # [ROWS]
        v_unit = value_unit(v_scale, hkv, V_SCALE)
        q_shift = kv_len - q_len if Q_AT_END else gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        q_first = start_row // GROUP + q_shift
        q_last = (gl.minimum(start_row + ROWS, q_len * GROUP) - 1) // GROUP + q_shift
        q_idx = rows + q_shift
        kv_begin = gl.maximum(q_first - before, 0) // BLOCK_N * BLOCK_N
        kv_end = gl.minimum(q_last + after + 1, kv_len)
        full_begin = gl.cdiv(gl.maximum(q_last - before, kv_begin), BLOCK_N) * BLOCK_N
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(kv_end, kv_begin), BLOCK_N) * BLOCK_N)
        full_end = gl.minimum(q_first + after + 1, kv_len) // BLOCK_N * BLOCK_N
        full_end = gl.maximum(full_end, full_begin)

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # [ROWS]
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)  # [ROWS, 4]
        acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)  # [ROWS, HALF]
        mbarrier.wait(exchange.has_queries.index(0), q_turn & 1)
        for pair_n in range(keys_begin, keys_end, 2 * KEYS):
            start_n = pair_n + PART * KEYS
            qk = compute_scores(queries, ring, 2 * turn + PART, PART, K_SCALE, SCORES)  # [ROWS, KEYS]
            if (start_n < full_begin) | (start_n + KEYS > gl.minimum(full_end, keys_end)):
                kv_idx = start_n + gl.arange(0, KEYS, layout=KEY)
                keep = ((q_idx[:, None] - kv_idx[None, :] <= before) & (kv_idx[None, :] - q_idx[:, None] <= after)) & (
                    kv_idx < keys_end
                )[None, :]
                qk = gl.where(keep, qk, float("-inf"))
            found = gl.max(qk, 1) * qk_scale
            if PART == 0:
                max_new, alpha = raise_maximum(row_max, found)
                row_alpha = alpha
                unit_new = raise_unit(v_unit, ring, 0, V_SCALE, KEY)
                alpha = in_units(alpha, v_unit, unit_new, V_SCALE)
            else:
                # The even block comes first: its weights are multiplied while this warpgroup takes its exponentials.
                max_even = exchange.other_maxima(turn, 0, ROW)
                unit_even = exchange.other_unit(v_unit, 0, V_SCALE)
                alpha_even = rescaling(row_max, max_even)
                acc = rescale_part(acc, in_units(alpha_even, v_unit, unit_even, V_SCALE), SUMS)
                acc = begin_others(acc, exchange, ring, turn, 1)
                max_new, alpha = raise_maximum(max_even, found)
                row_alpha = alpha_even * alpha
                unit_new = raise_unit(unit_even, ring, 1, V_SCALE, KEY)
                alpha = in_units(alpha, unit_even, unit_new, V_SCALE)
            exchange.share_maxima(max_new, unit_new, PART, V_SCALE)
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(qk * qk_scale[:, None] - max_ref[:, None])  # [ROWS, KEYS]
            row_sums = add_lanes(row_sums, row_alpha, p, LANES)
            weights = scale_weights(p, ring, unit_new, PART, V_SCALE, KEY).to(DTYPE)
            exchange.share_weights(ring, weights, PART)
            weights = gl.convert_layout(weights, WEIGHTS)
            if PART == 0:
                acc = begin_own(rescale_part(acc, alpha, SUMS), weights, ring, 0)
                row_max = exchange.other_maxima(turn, 1, ROW)
                v_unit = exchange.other_unit(v_unit, 1, V_SCALE)
                alpha = rescaling(max_new, row_max)
                row_sums *= gl.convert_layout(alpha, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None]
                alpha = in_units(alpha, unit_new, v_unit, V_SCALE)
                acc = end_own(acc, ring, turn, 0)
                acc = begin_others(rescale_part(acc, alpha, SUMS), exchange, ring, turn, 0)
                acc = end_others(acc, ring, turn, 0)
            else:
                row_max, v_unit = max_new, unit_new
                acc = end_others(acc, ring, turn, 1)
                acc = begin_own(rescale_part(acc, alpha, SUMS), weights, ring, 1)
                acc = end_own(acc, ring, turn, 1)
            turn += 1

        row_sum = gl.convert_layout(gl.sum(row_sums, 1), ROW)
        row_sum = exchange.join_sums(row_sum, q_turn, PART, ROW)
        q_turn += 1
        acc *= v_unit
        if part < 0:
            # A row without any key gives o = 0 and lse = -inf.
            row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
            inv_sum = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, SUMS))
            o_rows = b * stride_ob + (q_start + rows) * stride_os + q_head * stride_oh
            store_half(o_ptr, acc * inv_sum[:, None], o_rows, is_row, FIRST_COL, SUMS)
            if PART == 0:
                lse = (row_max + gl.log2(row_sum)) * LN2
                gl.store(lse_ptr + b * stride_lseb + q_head * stride_lseh + q_start + rows, lse, mask=is_row)
        else:
            part_rows = (part * num_kv_heads + hkv) * partial_rows + gl.arange(0, ROWS, layout=ROW)
            store_half(partial_o_ptr, acc, part_rows * HEAD_DIM_V, is_row, FIRST_COL, SUMS)
            if PART == 0:
                gl.store(partial_sums_ptr + part_rows * 2, row_max, mask=is_row)
                gl.store(partial_sums_ptr + part_rows * 2 + 1, row_sum, mask=is_row)


@gluon.jit(
    do_not_specialize=["q_offset", "before", "after", "k_page_rows", "table_stride", "num_kv_heads", "partial_rows"]
)
def band_paged_hopper_latent(
    q_ptr,
    k_ptr,
    k_scale,
    v_scale,
    page_table_ptr,
    page_starts_ptr,
    records_ptr,
    counts_ptr,
    q_offset,
    before,
    after,
    o_ptr,
    lse_ptr,
    partial_o_ptr,
    partial_sums_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lseb,
    stride_lseh,
    k_page_rows,
    table_stride,
    num_kv_heads,
    partial_rows,
    softmax_scale,
    Q_AT_END: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    SCALARS_LOADED: gl.constexpr,
    K_SCALE: gl.constexpr,
    V_SCALE: gl.constexpr,
    FLAT_TABLE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    before = gl.load(before) if SCALARS_LOADED else before
    after = gl.load(after) if SCALARS_LOADED else after
    # Products of 8-bit keys are computed in float16.
    CONVERTS: gl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    DTYPE: gl.constexpr = gl.float16 if CONVERTS else q_ptr.dtype.element_ty
    HALF: gl.constexpr = HEAD_DIM_V // 2
    if CONVERTS:
        paged_ring = make_byte_ring(k_ptr.dtype.element_ty, HEAD_DIM_V)
    else:
        k_desc = describe_pages(k_ptr, num_kv_heads, stride_kh, stride_ks, HEAD_DIM, PAGE_SIZE, KEYS)
        paged_ring = make_latent_ring(k_desc, k_page_rows, HEAD_DIM_V)
    queries = (make_queries(DTYPE, HALF), make_queries(DTYPE, HALF), make_queries(DTYPE, REST))
    exchange = make_exchange()
    pointers = (q_ptr, records_ptr, counts_ptr, o_ptr, lse_ptr, partial_o_ptr, partial_sums_ptr)
    strides = (stride_qb, stride_qh, stride_qs, stride_ob, stride_oh, stride_os, stride_lseb, stride_lseh)
    scales = (k_scale, v_scale)
    # A scale of 0 times the score -inf of a key that is not kept would be NaN.
    scale = gl.maximum(softmax_scale, 1e-30)
    numbers = (q_offset, before, after)
    consumer = (
        queries,
        paged_ring.read(),
        exchange,
        pointers,
        strides,
        num_kv_heads,
        partial_rows,
        scale,
        scales,
        numbers,
    )
    CONSTANTS: gl.constexpr = (Q_AT_END, Q_OFFSET_PER_BATCH, K_SCALE, V_SCALE, GROUP, HEAD_DIM, HEAD_DIM_V)
    pages = (page_table_ptr, page_starts_ptr, records_ptr, counts_ptr)
    # The registers of each thread. The first consumer gets what is left.
    if CONVERTS:
        producer = (
            k_ptr,
            paged_ring,
            scales,
            pages,
            (stride_kh, stride_ks, k_page_rows),
            table_stride,
            num_kv_heads,
            numbers,
        )
        gl.warp_specialize(
            [
                (consume, concat((consumer, 0), CONSTANTS)),
                (consume, concat((consumer, 1), CONSTANTS)),
                (
                    convert_keys,
                    (
                        producer,
                        Q_AT_END,
                        Q_OFFSET_PER_BATCH,
                        K_SCALE,
                        V_SCALE,
                        FLAT_TABLE,
                        PAGE_SIZE,
                        GROUP,
                        HEAD_DIM,
                        HEAD_DIM_V,
                    ),
                ),
            ],
            worker_num_warps=[4, 4],
            worker_num_regs=[200, 104],
        )
    else:
        keys = (k_desc, paged_ring, pages, table_stride, num_kv_heads, numbers)
        gl.warp_specialize(
            [
                (consume, concat((consumer, 0), CONSTANTS)),
                (consume, concat((consumer, 1), CONSTANTS)),
                (produce_keys, (keys, Q_AT_END, Q_OFFSET_PER_BATCH, FLAT_TABLE, PAGE_SIZE, GROUP, HEAD_DIM_V)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 40],
        )
