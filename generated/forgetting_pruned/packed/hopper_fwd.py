# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting_pruned: {mask: "causal and kv_idx >= first_key[b, h, q_idx]", tensors: {first_key: {dims: [b, h,
#     q_idx], dtype: int32}}, decay: true}
# template: hopper/fwd.py.jinja
# hash: c46af8617cbe4b6a
"""Forward of `forgetting_pruned`, packed sequences on Hopper: `o = softmax(score) v`.

    keep        q_idx >= kv_idx and kv_idx >= first_key[h, q_idx]
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    first_key   [h, q_idx]  int32
    decay       [Hq, total_k]  fp32, cumulative log-decay of each sequence times log2(e)
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    ranges      [H, entries, 4]  int32, first visited, first full, end of full and end of visited blocks
    o           [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator

A program computes one block of query rows after the other. Its warps run side by side: `produce_rows` schedules the
work and copies queries to shared memory (TMA), `produce_keys` copies the keys and values of each visited block, and
each warpgroup of `consume` computes 64 of the rows. While the tensor cores add up the values of one block, a
warpgroup takes the exponentials of the next (arXiv:2407.08608). The last values of a block of rows are added while the
first scores of the next block of rows are computed. This is the online softmax of arXiv:2205.14135: `row_max` is the
largest score so far, or up to 8 less, and `row_sums` has the sums of exponentials relative to it. Scores are kept times
log2(e), so that each exponential is one `exp2`. `templates/hopper/README.md` has a picture.

For more than 256 columns of q or v there is `forgetting_pruned_packed_hopper_fwd_wide`: the sums over the values
of 64 rows do not fit the registers of one warpgroup. `compute_weights` hands the weights of each block through
shared memory to two warpgroups that run `add_values`, each for half of the columns of o.

Sequences have any lengths, so work is scheduled dynamically: a producer warp takes the next work item from a
counter in memory. Tiles are clipped at the ends of a sequence, so that none holds rows of another.

Products add the part of a score that all rows of a key share, as 16 more columns of q and k:
`_runtime/device/gl_terms.py` says how. The kernel for more than 256 columns adds it score by score.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.gl import (
    LN2,
    LOG2E,
    SWIZZLE_COLS,
    SequenceRows,
    at_columns,
    columns_before,
    count_pieces,
    describe_packed_rows,
    load_sequence,
    make_ring,
    make_work_ring,
    no_sums,
    piece_columns,
    product_layout,
    sum_parts,
)
from ..._runtime.device.gl_forward import (
    ROWS,
    add_lanes,
    begin_block,
    begin_pv,
    change_turns,
    end_pv,
    lane_layout,
    make_key_ring,
    pack_pairs,
    query_stages,
    raise_maximum,
    rescale,
    store_rest,
    store_rows,
    unpack_pairs,
)
from ..._runtime.device.gl_forward_wide import compute_scores, make_weight_ring, make_wide_key_ring, no_half_sums
from ..._runtime.device.gl_math import clamp_index
from ..._runtime.device.gl_terms import make_key_terms, term_layout
from ..._runtime.device.gl_versions import aggregate, concat


@aggregate
class Work:
    """One block of query rows, as `produce_rows` publishes it; `h` is -1 after the last block."""

    item: gl.tensor
    h: gl.tensor
    block: gl.tensor
    q_shift: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor
    lse_start: gl.tensor
    num_masked: gl.tensor
    num_plain: gl.tensor
    first_plain: gl.tensor


@gluon.jit
def visited_keys(first_entry, h, ranges_ptr, start_m, stride_ranges_h, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of keys the rows from `start_m` on visit, with a mask and without, and where they begin."""
    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + h * stride_ranges_h + (first_entry + start_m // BLOCK_M) * 4
    kv_begin, full_begin = gl.load(block_range) * BLOCK_N, gl.load(block_range + 1) * BLOCK_N
    full_end, kv_end = gl.load(block_range + 2) * BLOCK_N, gl.load(block_range + 3) * BLOCK_N
    gap = full_end - full_begin
    num_partial = gl.maximum(gl.cdiv(kv_end - gap - kv_begin, BLOCK_N), 0)
    num_full = (full_end - full_begin) // BLOCK_N
    # Rows that attend to nothing visit block 0, and their mask keeps none of its keys.
    num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
    # The first block always takes the loop with the mask.
    num_masked = gl.maximum(num_partial, 1)
    return kv_begin, full_begin, gap, num_partial, num_full, num_masked


@gluon.jit
def produce_rows(arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Publish each work item, and copy its queries."""
    q_desc, q_ring, work_ring, block_seqs_ptr, ranges_ptr, q_offset, stride_ranges_h, num_heads, work_counter_ptr = (
        arguments
    )
    PARTS: gl.constexpr = BLOCK_M // ROWS
    q_turn = 0
    # A work item is a block of rows of one head. After its first item, a program takes the next one that is not taken.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_heads
    item = gl.program_id(0)
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        b, first_entry, q_start, q_len, kv_start, kv_len, lse_start = load_sequence(block_seqs_ptr, item // num_heads)
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        block = sequence_item % num_blocks
        h = (sequence_item // num_blocks).to(gl.int64)
        start_m = block * BLOCK_M
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        _kv_begin, full_begin, _gap, num_partial, num_full, num_masked = visited_keys(
            first_entry, h, ranges_ptr, start_m, stride_ranges_h, BLOCK_M, BLOCK_N
        )
        num_plain = num_full - (num_masked - num_partial)
        first_plain = full_begin // BLOCK_N + num_masked - num_partial
        work_ring.publish(
            q_turn,
            (item, h, block, q_shift, q_start, q_len, kv_start, kv_len, lse_start, num_masked, num_plain, first_plain),
        )
        q_head, q_end = h.to(gl.int32), q_start.to(gl.int32) + q_len
        q_rows = SequenceRows(q_end, q_len, q_head)
        for part in gl.static_range(PARTS):
            q_ring.send(q_desc, q_rows, start_m + part * ROWS, PARTS * q_turn + part)
        q_turn += 1
        item = gl.num_programs(0) + gl.atomic_add(work_counter_ptr, 1, sem="relaxed")
    work_ring.publish(q_turn, (-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1))


@gluon.jit
def produce_keys(arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each block that the rows of a work item visit."""
    k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, ranges_ptr, stride_ranges_h, num_heads, group_size = arguments
    kv_turn = 0
    # The values follow their keys by one turn. The first turn takes values from behind the last key, which are zeros.
    v_rows, v_start = SequenceRows(gl.cast(0, gl.int32), gl.cast(0, gl.int32), gl.cast(0, gl.int32)), 0
    work_turn = 0
    item = Work(*work_ring.receive(work_turn, 1)).item
    while item >= 0:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        _b, first_entry, _q_start, q_len, kv_start, kv_len, _lse_start = load_sequence(
            block_seqs_ptr, item // num_heads
        )
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        block = sequence_item % num_blocks
        h = (sequence_item // num_blocks).to(gl.int64)
        hkv = h // group_size
        start_m = block * BLOCK_M
        kv_begin, full_begin, gap, num_partial, num_full, num_masked = visited_keys(
            first_entry, h, ranges_ptr, start_m, stride_ranges_h, BLOCK_M, BLOCK_N
        )
        kv_head, k_end = hkv.to(gl.int32), kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, kv_head)
        for nth in range(num_masked):
            start_n = kv_begin + nth * BLOCK_N
            start_n = gl.where(start_n < full_begin, start_n, start_n + gap)
            start_n = gl.where(start_n < kv_len, start_n, 0)
            if num_partial == 0:
                start_n = full_begin
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            v_rows, v_start = kv_rows, start_n
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            start_n = full_begin + nth * BLOCK_N
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            v_rows, v_start = kv_rows, start_n
            kv_turn += 1
        work_turn += 1
        item = Work(*work_ring.receive(work_turn, 1)).item
    kv_ring.v.send(v_desc, v_rows, v_start, kv_turn)


@gluon.jit
def produce_keys_and_terms(arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each block that the rows of a work item visit, and compute the terms of the keys."""
    k_desc, v_desc, kv_ring, work_ring, key_terms, pointers, strides, numbers = arguments
    decay_ptr, block_seqs_ptr, ranges_ptr, q_offset = pointers
    stride_decay_0, stride_ranges_h = strides
    num_heads, group_size, scale = numbers
    OWN_KEY: gl.constexpr = gl.SliceLayout(1, term_layout(BLOCK_N))
    # Consumers multiply the terms by the scale, as they do the product.
    inverse_scale = 1.0 / (scale * LOG2E)
    kv_turn = 0
    # The values follow their keys by one turn. The first turn takes values from behind the last key, which are zeros.
    v_rows, v_start = SequenceRows(gl.cast(0, gl.int32), gl.cast(0, gl.int32), gl.cast(0, gl.int32)), 0
    work_turn = 0
    item = Work(*work_ring.receive(work_turn, 1)).item
    while item >= 0:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        b, first_entry, _q_start, q_len, kv_start, kv_len, _lse_start = load_sequence(block_seqs_ptr, item // num_heads)
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        block = sequence_item % num_blocks
        h = (sequence_item // num_blocks).to(gl.int64)
        hkv = h // group_size
        start_m = block * BLOCK_M
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_begin, full_begin, gap, num_partial, num_full, num_masked = visited_keys(
            first_entry, h, ranges_ptr, start_m, stride_ranges_h, BLOCK_M, BLOCK_N
        )
        kv_head, k_end = hkv.to(gl.int32), kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, kv_head)
        row_start = start_m + q_shift
        decay_val = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(row_start, kv_len))
        for nth in range(num_masked):
            start_n = kv_begin + nth * BLOCK_N
            start_n = gl.where(start_n < full_begin, start_n, start_n + gap)
            start_n = gl.where(start_n < kv_len, start_n, 0)
            if num_partial == 0:
                start_n = full_begin
            own_key = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            decay_kv = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(own_key, kv_len))
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            key_terms.put((decay_val - decay_kv) * inverse_scale, kv_ring.k, kv_turn)
            v_rows, v_start = kv_rows, start_n
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            start_n = full_begin + nth * BLOCK_N
            own_key = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            decay_kv = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(own_key, kv_len))
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            key_terms.put((decay_val - decay_kv) * inverse_scale, kv_ring.k, kv_turn)
            v_rows, v_start = kv_rows, start_n
            kv_turn += 1
        work_turn += 1
        item = Work(*work_ring.receive(work_turn, 1)).item
    kv_ring.v.send(v_desc, v_rows, v_start, kv_turn)


@gluon.jit
def consume(
    arguments,
    PART: gl.constexpr,
    stride_os: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute the rows of warpgroup PART of each work item."""
    q_ring, kv_ring, key_terms, work_ring, pointers, strides, numbers = arguments
    first_key_ptr, decay_ptr, o_ptr, lse_ptr = pointers
    stride_oh, stride_first_key_0, stride_first_key_1, stride_decay_0 = strides
    q_total, scale = numbers
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    SUM_COLS: gl.constexpr = sum_parts(BLOCK_DV, HEAD_DIM_V)[0]
    SUMS: gl.constexpr = product_layout(SUM_COLS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    PARTS: gl.constexpr = BLOCK_M // ROWS
    Q_BLOCKS: gl.constexpr = q_ring.stages // PARTS
    qk_scale = scale * LOG2E
    kv_turn, q_turn = 0, 0
    if PART == PARTS - 1:
        change_turns("arrive", 0)
    # Pipeline prologue: a dummy block of rows with P = 0, so that the first product with values adds nothing.
    p_pairs = pack_pairs(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES), DTYPE)  # [ROWS, BLOCK_N // 2]
    acc = no_sums(BLOCK_DV, HEAD_DIM_V)
    inv_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SUMS))
    # The results of the dummy block are not stored: its rows lie behind the last one.
    o_start, o_row, o_len = gl.cast(0, gl.int64), 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        q_shift = work.q_shift
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        kv_start = work.kv_start.to(gl.int64)
        kv_len = work.kv_len
        lse_start = work.lse_start
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + PART * ROWS + gl.arange(0, ROWS, layout=ROW)
        q_idx = rows + q_shift
        first_key_q = gl.load(
            first_key_ptr
            + h * stride_first_key_0
            + q_start * stride_first_key_1
            + clamp_index(gl.maximum(q_idx, 0) - q_shift, q_len).to(gl.int64) * stride_first_key_1
        )
        decay_q = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(q_idx, kv_len))
        row_start = start_m + q_shift
        decay_val = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(row_start, kv_len))

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # [ROWS]
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)  # [ROWS, 4]

        q_stage = PARTS * (q_turn % Q_BLOCKS) + PART
        mbarrier.wait(q_ring.full.index(q_stage), (q_turn // Q_BLOCKS) & 1)
        q_tile = q_ring.tile(q_stage)  # [ROWS, BLOCK_D]
        for nth in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            qk, acc = begin_block(
                q_tile, p_pairs, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS, HEAD_DIM, key_terms
            )
            # Always true. Without the branch the mask is computed ahead of the product and kept in registers.
            if start_m < q_len:
                run_first = first_key_q
                run_end = q_idx + 1
                run_end = gl.minimum(run_end, kv_len)
                run_bits = columns_before(run_end - start_n, KEY, BLOCK_N) & ~columns_before(
                    run_first - start_n, KEY, BLOCK_N
                )
                keep = at_columns(run_bits, KEY, BLOCK_N)

                qk = gl.where(keep, qk, float("-inf"))
            # The part of a score that all keys of a row share.
            row_term = decay_q - decay_val
            max_new, alpha = raise_maximum(row_max, gl.max(qk, 1) * qk_scale + row_term)
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(qk * qk_scale - (max_ref - row_term)[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = pack_pairs(p, DTYPE)
            row_max = max_new
            acc = end_pv(acc, kv_ring.v, kv_turn)
            if nth == 0:
                # Epilogue of the previous rows: this product has added their last values.
                store_rows(o_ptr + o_start, (acc[0] * inv_sum[:, None]).to(DTYPE), o_row, o_len, stride_os, HEAD_DIM_V)
                store_rest(o_ptr + o_start, acc, inv_sum, o_row, o_len, stride_os, HEAD_DIM_V)
                acc = no_sums(BLOCK_DV, HEAD_DIM_V)
            else:
                acc = rescale(acc, alpha)
            kv_turn += 1

        for _ in range(work.num_plain):
            qk, acc = begin_block(
                q_tile, p_pairs, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS, HEAD_DIM, key_terms
            )
            # The part of a score that all keys of a row share.
            row_term = decay_q - decay_val
            max_new, alpha = raise_maximum(row_max, gl.max(qk, 1) * qk_scale + row_term)
            p = gl.exp2(qk * qk_scale - (max_new - row_term)[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = pack_pairs(p, DTYPE)
            row_max = max_new
            acc = end_pv(acc, kv_ring.v, kv_turn)
            acc = rescale(acc, alpha)
            kv_turn += 1

        mbarrier.arrive(q_ring.empty.index(q_stage), count=1)
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), ROW)
        # A row without any key gives o = 0 and lse = -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN2  # [ROWS]
        gl.store(lse_ptr + h * q_total + lse_start + rows, lse, mask=rows < q_len)
        # The epilogue of these rows runs beside the first block of the next rows.
        inv_sum = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, SUMS))
        o_start, o_row = q_start * stride_os + h * stride_oh, start_m + PART * ROWS
        o_len = q_len
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))

    acc = begin_pv(unpack_pairs(p_pairs, DTYPE, WEIGHTS), acc, kv_ring.v, kv_turn)
    acc = end_pv(acc, kv_ring.v, kv_turn)
    store_rows(o_ptr + o_start, (acc[0] * inv_sum[:, None]).to(DTYPE), o_row, o_len, stride_os, HEAD_DIM_V)
    store_rest(o_ptr + o_start, acc, inv_sum, o_row, o_len, stride_os, HEAD_DIM_V)


@gluon.jit(do_not_specialize=["q_offset", "stride_ranges_h", "q_total", "num_heads", "group_size"])
def forgetting_pruned_packed_hopper_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    first_key_ptr,
    decay_ptr,
    block_seqs_ptr,
    ranges_ptr,
    q_offset,
    o_ptr,
    lse_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_oh,
    stride_os: gl.constexpr,
    stride_first_key_0,
    stride_first_key_1,
    stride_decay_0,
    stride_ranges_h,
    q_total,
    num_heads,
    group_size,
    scale,
    work_counter_ptr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    kv_heads = num_heads // group_size
    PARTS: gl.constexpr = BLOCK_M // ROWS
    PIECE_COLS: gl.constexpr = piece_columns(BLOCK_D, HEAD_DIM)
    PIECES: gl.constexpr = count_pieces(BLOCK_D, HEAD_DIM, PIECE_COLS)
    V_PIECE_COLS: gl.constexpr = piece_columns(BLOCK_DV, HEAD_DIM_V)
    V_PIECES: gl.constexpr = count_pieces(BLOCK_DV, HEAD_DIM_V, V_PIECE_COLS)
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, ROWS, PIECE_COLS)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, PIECE_COLS)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, V_PIECE_COLS)
    q_ring = make_ring(q_desc, PARTS * query_stages(BLOCK_D), 1, 1, PIECES)
    kv_ring = make_key_ring(k_desc, v_desc, STAGES, PARTS, PIECES, V_PIECES)
    key_terms = make_key_terms(BLOCK_N, STAGES)
    work_ring = make_work_ring(12, PARTS + 1)
    consumer = (
        q_ring,
        kv_ring,
        key_terms,
        work_ring,
        (first_key_ptr, decay_ptr, o_ptr, lse_ptr),
        (stride_oh, stride_first_key_0, stride_first_key_1, stride_decay_0),
        (q_total, scale),
    )
    CONSTANTS: gl.constexpr = (stride_os, HEAD_DIM, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N)
    rows = (
        q_desc,
        q_ring,
        work_ring,
        block_seqs_ptr,
        ranges_ptr,
        q_offset,
        stride_ranges_h,
        num_heads,
        work_counter_ptr,
    )
    keys = (
        k_desc,
        v_desc,
        kv_ring,
        work_ring,
        key_terms,
        (decay_ptr, block_seqs_ptr, ranges_ptr, q_offset),
        (stride_decay_0, stride_ranges_h),
        (num_heads, group_size, scale),
    )
    # The registers of each thread. The first consumer gets what is left, which is as much as the others have.
    gl.warp_specialize(
        [
            (consume, concat((consumer, 0), CONSTANTS)),
            (consume, concat((consumer, 1), CONSTANTS)),
            (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
            (produce_keys_and_terms, (keys, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[240, 32, 32],
    )


@gluon.jit
def compute_weights(arguments, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Compute the weights of the rows of each work item, and their lse."""
    q_ring, kv_ring, work_ring, weight_ring, pointers, strides, numbers = arguments
    first_key_ptr, decay_ptr, lse_ptr = pointers
    stride_first_key_0, stride_first_key_1, stride_decay_0 = strides
    q_total, scale = numbers
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    OWN_KEY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    kv_turn, q_turn = 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        q_shift = work.q_shift
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        kv_start = work.kv_start.to(gl.int64)
        kv_len = work.kv_len
        lse_start = work.lse_start
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + gl.arange(0, ROWS, layout=ROW)
        q_idx = rows + q_shift
        first_key_q = gl.load(
            first_key_ptr
            + h * stride_first_key_0
            + q_start * stride_first_key_1
            + clamp_index(gl.maximum(q_idx, 0) - q_shift, q_len).to(gl.int64) * stride_first_key_1
        )
        decay_q = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(q_idx, kv_len))

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # [ROWS]
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)  # [ROWS, 4]

        q_tile = q_ring.receive(q_turn)  # [ROWS, BLOCK_D]
        for _ in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            own_key = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            decay_kv = gl.load(decay_ptr + h * stride_decay_0 + kv_start + clamp_index(own_key, kv_len))
            qk = compute_scores(q_tile, kv_ring.k, kv_turn, SCORES, HEAD_DIM)
            decay_kv = gl.convert_layout(decay_kv, KEY)
            logit = qk
            # Always true. Without the branch the mask is computed ahead of the product and kept in registers.
            if start_m < q_len:
                logit = 1.4426950408889634 * scale * qk - decay_kv[None, :]
                run_first = first_key_q
                run_end = q_idx + 1
                run_end = gl.minimum(run_end, kv_len)
                run_bits = columns_before(run_end - start_n, KEY, BLOCK_N) & ~columns_before(
                    run_first - start_n, KEY, BLOCK_N
                )
                keep = at_columns(run_bits, KEY, BLOCK_N)

                logit = gl.where(keep, logit, float("-inf"))
            max_new, alpha = raise_maximum(row_max, gl.max(logit, 1) + decay_q)
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(logit - (max_ref - decay_q)[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = pack_pairs(p, DTYPE)
            row_max = max_new
            weight_ring.send(p_pairs, alpha, kv_turn, SCORES)
            kv_turn += 1

        for nth in range(work.num_plain):
            start_n = (work.first_plain + nth) * BLOCK_N
            own_key = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            decay_kv = gl.load(decay_ptr + h * stride_decay_0 + kv_start + own_key)
            qk = compute_scores(q_tile, kv_ring.k, kv_turn, SCORES, HEAD_DIM)
            decay_kv = gl.convert_layout(decay_kv, KEY)
            logit = 1.4426950408889634 * scale * qk - decay_kv[None, :]
            max_new, alpha = raise_maximum(row_max, gl.max(logit, 1) + decay_q)
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(logit - (max_ref - decay_q)[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = pack_pairs(p, DTYPE)
            row_max = max_new
            weight_ring.send(p_pairs, alpha, kv_turn, SCORES)
            kv_turn += 1

        q_ring.release(q_turn)
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), ROW)
        # A row without any key gives o = 0 and lse = -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN2  # [ROWS]
        gl.store(lse_ptr + h * q_total + lse_start + rows, lse, mask=rows < q_len)
        weight_ring.finish(1.0 / row_sum, q_turn)
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))


@gluon.jit
def add_values(
    arguments,
    PART: gl.constexpr,
    stride_os: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Add up half PART of the columns of the values of each work item, and store them."""
    v_ring, work_ring, weight_ring, o_ptr, stride_oh = arguments
    turn, q_turn = 0, 0
    # The first turn brings no values: they follow their keys by one turn.
    v_ring.receive(0)
    v_ring.release(0)
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        acc = no_half_sums(PART, BLOCK_DV, HEAD_DIM_V)
        for _ in range(work.num_masked + work.num_plain):
            acc = weight_ring.add_block(acc, v_ring, turn, PART)
            turn += 1
        o_start = q_start * stride_os + h * stride_oh
        weight_ring.store_half(
            o_ptr + o_start, acc, q_turn, work.block * BLOCK_M, q_len, stride_os, PART, BLOCK_DV, HEAD_DIM_V
        )
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))


@gluon.jit(do_not_specialize=["q_offset", "stride_ranges_h", "q_total", "num_heads", "group_size"])
def forgetting_pruned_packed_hopper_fwd_wide(
    q_ptr,
    k_ptr,
    v_ptr,
    first_key_ptr,
    decay_ptr,
    block_seqs_ptr,
    ranges_ptr,
    q_offset,
    o_ptr,
    lse_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_oh,
    stride_os: gl.constexpr,
    stride_first_key_0,
    stride_first_key_1,
    stride_decay_0,
    stride_ranges_h,
    q_total,
    num_heads,
    group_size,
    scale,
    work_counter_ptr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    kv_heads = num_heads // group_size
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, ROWS, SWIZZLE_COLS)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, SWIZZLE_COLS)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, SWIZZLE_COLS)
    PIECES: gl.constexpr = count_pieces(BLOCK_D, HEAD_DIM, SWIZZLE_COLS)
    V_PIECES: gl.constexpr = count_pieces(BLOCK_DV, HEAD_DIM_V, SWIZZLE_COLS)
    q_ring, kv_ring = make_ring(q_desc, 1, 1, 1, PIECES), make_wide_key_ring(k_desc, v_desc, STAGES, PIECES, V_PIECES)
    weight_ring, work_ring = make_weight_ring(q_desc.dtype, BLOCK_N), make_work_ring(12, 4)
    weigher = (
        q_ring,
        kv_ring,
        work_ring,
        weight_ring,
        (first_key_ptr, decay_ptr, lse_ptr),
        (stride_first_key_0, stride_first_key_1, stride_decay_0),
        (q_total, scale),
    )
    adder = (kv_ring.v, work_ring, weight_ring, o_ptr, stride_oh)
    rows = (
        q_desc,
        q_ring,
        work_ring,
        block_seqs_ptr,
        ranges_ptr,
        q_offset,
        stride_ranges_h,
        num_heads,
        work_counter_ptr,
    )
    keys = (k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, ranges_ptr, stride_ranges_h, num_heads, group_size)
    # The warpgroup of weights gets the registers that the others leave: 152 for each thread.
    gl.warp_specialize(
        [
            (compute_weights, (weigher, HEAD_DIM, BLOCK_M, BLOCK_N)),
            (add_values, (adder, 0, stride_os, HEAD_DIM_V, BLOCK_DV, BLOCK_M)),
            (add_values, (adder, 1, stride_os, HEAD_DIM_V, BLOCK_DV, BLOCK_M)),
            (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
            (produce_keys, (keys, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 4, 1, 1],
        worker_num_regs=[168, 168, 24, 24],
    )
