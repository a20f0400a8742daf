# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: hopper/split.py.jinja
# hash: 772aca34311d049f
"""Gradients of `natten`, packed sequences on Hopper for more than 256 columns of q or v: a launch for each of dq, dk
and dv.

    keep        abs(min(max(q_idx % 128, 6), 121) - kv_idx % 128) <= 6 and abs(min(max(q_idx // 128, 6), 121) - kv_idx
                // 128) <= 6
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    do          [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator
    delta       [Hq, total_q]  fp32, sum(o * do) - dlse
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    spans       [H, entries, 4]  int32, first, partial end, full begin and end of a block's list
    block_list  [entries]  int16 or int32, lists of the blocks to visit
    dkv         dk with SUMS_DK, otherwise dv

`lse_ptr` and `delta_ptr` are the outputs `row_lse` and `row_delta` of `natten_packed_hopper_delta`, padded to
whole blocks of rows.

The sums of dk and dv of 64 keys would fill all registers of a multiprocessor. So each gradient has a launch, in which
the scores are computed again. A program holds 64 keys, or for dq 64 rows, in shared memory, and copies 32 of the other
side at a time (TMA). One warpgroup computes probabilities and ds of each block. It hands them through shared memory to
two warpgroups, each of which adds up half of the columns. All sums are in a fixed order.

Sequences have any lengths, so work is scheduled dynamically: a producer warp takes the next work item from a
counter in memory. Tiles are clipped at the ends of a sequence, so that none holds rows of another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.gl import (
    LOG2E,
    SequenceRows,
    at_columns,
    columns_before,
    count_pieces,
    describe_packed_rows,
    load_sequence,
    make_ring,
    make_work_ring,
    product_layout,
)
from ..._runtime.device.gl_backward import describe_vector, locate_keys
from ..._runtime.device.gl_forward import ROWS
from ..._runtime.device.gl_forward_wide import ADDERS, begin_scores, no_half_sums
from ..._runtime.device.gl_math import floor_div, floor_mod
from ..._runtime.device.gl_split import (
    CHUNK,
    CHUNK_STAGES,
    add_weighted,
    begin_dp,
    end_dp,
    make_row_stream,
    make_split_key_ring,
    make_weights,
    send_chunks,
    send_keys,
    store_sums,
    wait_for_scores,
)
from ..._runtime.device.gl_versions import aggregate, concat


@gluon.jit
def visited_rows(first_entry, spans_ptr, start_n, BLOCK_N: gl.constexpr):
    """How many blocks of query rows see the keys from `start_n` on, with a mask and without, and where they begin."""
    # The list of this block: partial blocks from the left, full ones from the right.
    span = spans_ptr + (first_entry + start_n // BLOCK_N) * 4
    list_begin, partial_end = gl.load(span), gl.load(span + 1)
    full_begin, list_end = gl.load(span + 2), gl.load(span + 3)
    num_partial, num_full = partial_end - list_begin, list_end - full_begin
    return list_begin, partial_end, full_begin, list_end, num_partial, num_full


@gluon.jit
def produce(
    rings,
    arguments,
    SUMS_DK: gl.constexpr,
    V_PIECES: gl.constexpr,
    HEAD_GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_stream, do_ring = rings
    work_ring, pointers, numbers = arguments
    block_seqs_ptr, spans_ptr, block_list_ptr, work_counter_ptr = pointers
    q_total, num_heads, group_size, num_seqs = numbers
    num_head_groups = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, first_entry, q_start, q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        # The first block of the sequence in lse and delta, whose sequences are padded to whole blocks of rows.
        row_first = q_start // BLOCK_M + b
        hkv = head_group // HEAD_GROUPS
        q_end, k_end = q_start.to(gl.int32) + q_len, kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, hkv.to(gl.int32))
        k_ring.send(k_desc, kv_rows, start_n, k_lap)
        if SUMS_DK:
            v_ring.send(v_desc, kv_rows, start_n, k_lap)
        list_begin, partial_end, full_begin, list_end, num_partial, num_full = visited_rows(
            first_entry, spans_ptr, start_n, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                list_entry = list_begin + nth
                start_m = (
                    gl.load(block_list_ptr + list_entry, mask=list_entry < partial_end, other=0).to(gl.int32) * BLOCK_M
                )
                head_row = h * num_row_blocks + row_first
                first = (head_row * BLOCK_M + start_m).to(gl.int32)
                rows = SequenceRows(q_end, q_len, h.to(gl.int32))
                q_stream.send(q_desc, lse_desc, delta_desc, rows, start_m, first, q_turn)
                if SUMS_DK:
                    send_chunks(do_ring, do_desc, rows, start_m, q_turn, V_PIECES)
                else:
                    do_ring.send(do_desc, rows, start_m, q_turn)
                q_turn += 1
            for nth in range(num_full):
                # If heads share keys, the last rows come first: all programs visit them, and find them in the cache.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                list_entry = full_begin + row_turn
                start_m = (
                    gl.load(block_list_ptr + list_entry, mask=list_entry < list_end, other=0).to(gl.int32) * BLOCK_M
                )
                head_row = h * num_row_blocks + row_first
                first = (head_row * BLOCK_M + start_m).to(gl.int32)
                rows = SequenceRows(q_end, q_len, h.to(gl.int32))
                q_stream.send(q_desc, lse_desc, delta_desc, rows, start_m, first, q_turn)
                if SUMS_DK:
                    send_chunks(do_ring, do_desc, rows, start_m, q_turn, V_PIECES)
                else:
                    do_ring.send(do_desc, rows, start_m, q_turn)
                q_turn += 1
        k_lap ^= 1
        item = work_ring.fetch(work_counter_ptr, work_turn)
        work_turn += 1


@gluon.jit
def score_keys(
    rings,
    arguments,
    SUMS_DK: gl.constexpr,
    V_PIECES: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute the probabilities of each work item, or if SUMS_DK its ds."""
    k_ring, v_ring, q_stream, do_ring, weights = rings
    work_ring, block_seqs_ptr, spans_ptr, block_list_ptr, q_offset, num_heads, group_size, scale = arguments
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    k_tile = k_ring.tile(0)  # [BLOCK_N, BLOCK_D]
    v_tile = v_ring.tile(0)  # [BLOCK_N, BLOCK_DV]
    qk_scale = scale * LOG2E
    num_head_groups = num_heads // group_size
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, first_entry, _q_start, q_len, _kv_start, kv_len, _head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + gl.arange(0, KEYS, layout=KEY)
        mbarrier.wait(k_ring.full.index(0), k_lap)
        if SUMS_DK:
            mbarrier.wait(v_ring.full.index(0), k_lap)
        list_begin, partial_end, _full_begin, _list_end, num_partial, num_full = visited_rows(
            first_entry, spans_ptr, start_n, BLOCK_N
        )
        for _ in range(group_size):
            for nth in range(num_partial):
                list_entry = list_begin + nth
                start_m = (
                    gl.load(block_list_ptr + list_entry, mask=list_entry < partial_end, other=0).to(gl.int32) * BLOCK_M
                )
                q_stage = q_turn % q_stream.ring.stages
                qk = begin_scores(k_tile, q_stream.ring.receive(q_turn), SCORES, HEAD_DIM)
                if SUMS_DK:
                    dp = begin_dp(v_tile, do_ring, q_turn, SCORES, V_PIECES)
                    qk = wait_for_scores(qk)
                else:
                    qk = warpgroup_mma_wait(0, deps=(qk,))
                qk = qk + q_stream.lse.index(q_stage).load(ROW)[None, :]
                # Always true. Without the branch this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = rows + q_shift
                    keep = (
                        gl.abs(
                            gl.minimum(gl.maximum(floor_mod(q_idx, 128), 6), 121)[None, :]
                            - floor_mod(kv_idx, 128)[:, None]
                        )
                        <= 6
                    ) & (
                        gl.abs(
                            gl.minimum(gl.maximum(floor_div(q_idx, 128), 6), 121)[None, :]
                            - floor_div(kv_idx, 128)[:, None]
                        )
                        <= 6
                    )
                    keep = keep & (kv_idx < kv_len)[:, None]
                    qk = gl.where(keep, qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                if SUMS_DK:
                    dp, p = end_dp(dp, p, v_tile, do_ring, q_turn, V_PIECES)
                    ds = p * (dp + q_stream.delta.index(q_stage).load(ROW)[None, :])  # [KEYS, BLOCK_M]
                    weights.put(ds.to(DTYPE), q_turn)
                else:
                    weights.put(p.to(DTYPE), q_turn)
                q_stream.ring.release(q_turn)
                q_turn += 1
            for _ in range(num_full):
                q_stage = q_turn % q_stream.ring.stages
                qk = begin_scores(k_tile, q_stream.ring.receive(q_turn), SCORES, HEAD_DIM)
                if SUMS_DK:
                    dp = begin_dp(v_tile, do_ring, q_turn, SCORES, V_PIECES)
                    qk = wait_for_scores(qk)
                else:
                    qk = warpgroup_mma_wait(0, deps=(qk,))
                qk = qk + q_stream.lse.index(q_stage).load(ROW)[None, :]
                if start_n + BLOCK_N > kv_len:
                    qk = gl.where((kv_idx < kv_len)[:, None], qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                if SUMS_DK:
                    dp, p = end_dp(dp, p, v_tile, do_ring, q_turn, V_PIECES)
                    ds = p * (dp + q_stream.delta.index(q_stage).load(ROW)[None, :])  # [KEYS, BLOCK_M]
                    weights.put(ds.to(DTYPE), q_turn)
                else:
                    weights.put(p.to(DTYPE), q_turn)
                q_stream.ring.release(q_turn)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        if SUMS_DK:
            mbarrier.arrive(v_ring.empty.index(0), count=1)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def add_rows(
    rings,
    arguments,
    PART: gl.constexpr,
    SUMS_DK: gl.constexpr,
    stride_dkvs: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Add up half PART of the columns of dv of each work item, or if SUMS_DK of dk."""
    _k_ring, _v_ring, q_stream, do_ring, weights = rings
    work_ring, block_seqs_ptr, spans_ptr, dkv_ptr, stride_dkvh, num_heads, group_size, scale = arguments
    summed = q_stream.ring if SUMS_DK else do_ring
    COLS: gl.constexpr = BLOCK_D if SUMS_DK else BLOCK_DV
    OWN_DIM: gl.constexpr = HEAD_DIM if SUMS_DK else HEAD_DIM_V
    num_head_groups = num_heads // group_size
    q_turn = 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        _b, first_entry, _q_start, _q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        acc = no_half_sums(PART, COLS, OWN_DIM)
        _list_begin, _partial_end, _full_begin, _list_end, num_partial, num_full = visited_rows(
            first_entry, spans_ptr, start_n, BLOCK_N
        )
        for _ in range(group_size):
            for _ in range(num_partial):
                acc = add_weighted(acc, weights, summed, q_turn, PART)
                q_turn += 1
            for _ in range(num_full):
                acc = add_weighted(acc, weights, summed, q_turn, PART)
                q_turn += 1

        dkv_start = dkv_ptr + kv_start * stride_dkvs + head_group * stride_dkvh
        store_sums(dkv_start, acc, scale if SUMS_DK else 1.0, start_n, kv_len, stride_dkvs, PART, COLS, OWN_DIM)
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit(do_not_specialize=["q_offset", "q_total", "num_heads", "group_size", "num_seqs"])
def natten_packed_hopper_split_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    spans_ptr,
    block_list_ptr,
    q_offset,
    dkv_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dkvh,
    stride_dkvs: gl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    num_seqs,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS_DK: gl.constexpr,
):
    kv_heads = num_heads // (group_size * HEAD_GROUPS)
    PIECES: gl.constexpr = count_pieces(BLOCK_D, HEAD_DIM, CHUNK)
    V_PIECES: gl.constexpr = count_pieces(BLOCK_DV, HEAD_DIM_V, CHUNK)
    # Each sequence is padded to whole blocks of rows: this is the largest possible number of rows.
    num_rows = num_heads * (q_total // BLOCK_M + num_seqs) * BLOCK_M
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, CHUNK)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, CHUNK)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, CHUNK)
    do_desc = describe_packed_rows(do_ptr, num_heads, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, CHUNK)
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 1, PIECES)
    if SUMS_DK:
        v_ring = make_ring(v_desc, 1, 1, 1, V_PIECES)
        q_stream = make_row_stream(q_desc, lse_desc, STAGES, 1 + ADDERS, PIECES)
        do_ring = make_ring(do_desc, CHUNK_STAGES, 1, 1)
    else:
        # dv needs no values.
        v_ring = k_ring
        q_stream = make_row_stream(q_desc, lse_desc, STAGES, 1, PIECES)
        do_ring = make_ring(do_desc, STAGES, 1, ADDERS, V_PIECES)
    weights = make_weights(q_desc.dtype, BLOCK_N, BLOCK_M)
    work_ring = make_work_ring(1, 3)
    rings = (k_ring, v_ring, q_stream, do_ring, weights)
    copied = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_stream, do_ring)
    scorer = (work_ring, block_seqs_ptr, spans_ptr, block_list_ptr, q_offset, num_heads, group_size, scale)
    summer = (work_ring, block_seqs_ptr, spans_ptr, dkv_ptr, stride_dkvh, num_heads, group_size, scale)
    producer = (
        work_ring,
        (block_seqs_ptr, spans_ptr, block_list_ptr, work_counter_ptr),
        (q_total, num_heads, group_size, num_seqs),
    )
    CONSTANTS: gl.constexpr = (stride_dkvs, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N)
    gl.warp_specialize(
        [
            (score_keys, (rings, scorer, SUMS_DK, V_PIECES, Q_OFFSET_PER_BATCH, HEAD_DIM, BLOCK_M, BLOCK_N)),
            (add_rows, concat((rings, summer, 0, SUMS_DK), CONSTANTS)),
            (add_rows, concat((rings, summer, 1, SUMS_DK), CONSTANTS)),
            (produce, (copied, producer, SUMS_DK, V_PIECES, HEAD_GROUPS, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 4, 1],
        worker_num_regs=[168, 168, 24],
    )


@aggregate
class Work:
    """One block of query rows, as `produce_rows` publishes it; `h` is -1 after the last block."""

    item: gl.tensor
    h: gl.tensor
    b: gl.tensor
    block: gl.tensor
    q_shift: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    num_masked: gl.tensor
    num_plain: gl.tensor


@gluon.jit
def visited_keys(first_entry, spans_ptr, start_m, BLOCK_M: gl.constexpr):
    """How many blocks of keys the rows from `start_m` on visit, with a mask and without, and where they begin."""
    # The list of this block: partial blocks from the left, full ones from the right.
    span = spans_ptr + (first_entry + start_m // BLOCK_M) * 4
    list_begin, partial_end = gl.load(span), gl.load(span + 1)
    full_begin, list_end = gl.load(span + 2), gl.load(span + 3)
    num_partial, num_full = partial_end - list_begin, list_end - full_begin
    # Rows that attend to nothing visit block 0, and their mask keeps none of its keys.
    num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
    # The first block always takes the loop with the mask.
    num_masked = gl.maximum(num_partial, 1)
    return list_begin, partial_end, full_begin, list_end, num_partial, num_full, num_masked


@gluon.jit
def produce_rows(arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr):
    """Publish each work item, and copy its queries and their gradients."""
    q_desc, do_desc, q_ring, do_ring, work_ring, block_seqs_ptr, spans_ptr, q_offset, num_heads, work_counter_ptr = (
        arguments
    )
    q_turn = 0
    # A work item is a block of rows of one head. After its first item, a program takes the next one that is not taken.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_heads
    item = gl.program_id(0)
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        b, first_entry, q_start, q_len, _kv_start, kv_len, _lse_start = load_sequence(block_seqs_ptr, item // num_heads)
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        block = sequence_item % num_blocks
        h = (sequence_item // num_blocks).to(gl.int64)
        start_m = block * BLOCK_M
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        _list_begin, _partial_end, _full_begin, _list_end, num_partial, num_full, num_masked = visited_keys(
            first_entry, spans_ptr, start_m, BLOCK_M
        )
        num_plain = num_full - (num_masked - num_partial)
        work_ring.publish(q_turn, (item, h, b, block, q_shift, q_start, q_len, kv_len, num_masked, num_plain))
        q_head, q_end = h.to(gl.int32), q_start.to(gl.int32) + q_len
        q_rows = SequenceRows(q_end, q_len, q_head)
        q_ring.send(q_desc, q_rows, start_m, q_turn)
        do_ring.send(do_desc, q_rows, start_m, q_turn)
        q_turn += 1
        item = gl.num_programs(0) + gl.atomic_add(work_counter_ptr, 1, sem="relaxed")
    work_ring.publish(q_turn, (-1, -1, -1, -1, -1, -1, -1, -1, -1, -1))


@gluon.jit
def produce_keys(arguments, V_PIECES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each block that the rows of a work item visit."""
    k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, spans_ptr, block_list_ptr, num_heads, group_size = arguments
    kv_turn = 0
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
        list_begin, partial_end, full_begin, list_end, num_partial, num_full, num_masked = visited_keys(
            first_entry, spans_ptr, start_m, BLOCK_M
        )
        kv_head, k_end = hkv.to(gl.int32), kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, kv_head)
        for nth in range(num_masked):
            list_entry = list_begin + nth
            start_n = (
                gl.load(block_list_ptr + list_entry, mask=list_entry < partial_end, other=0).to(gl.int32) * BLOCK_N
            )
            if num_partial == 0:
                list_entry = full_begin
                start_n = (
                    gl.load(block_list_ptr + list_entry, mask=list_entry < list_end, other=0).to(gl.int32) * BLOCK_N
                )
            send_keys(kv_ring, k_desc, v_desc, kv_rows, start_n, kv_turn, V_PIECES, BLOCK_N)
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            list_entry = full_begin + nth
            start_n = gl.load(block_list_ptr + list_entry, mask=list_entry < list_end, other=0).to(gl.int32) * BLOCK_N
            send_keys(kv_ring, k_desc, v_desc, kv_rows, start_n, kv_turn, V_PIECES, BLOCK_N)
            kv_turn += 1
        work_turn += 1
        item = Work(*work_ring.receive(work_turn, 1)).item


@gluon.jit
def score_rows(arguments, V_PIECES: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Compute ds of the rows of each work item."""
    q_ring, do_ring, kv_ring, work_ring, weights, lse_ptr, delta_ptr, q_total, scale, num_seqs = arguments
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    qk_scale = scale * LOG2E
    q_tile = q_ring.tile(0)  # [BLOCK_M, BLOCK_D]
    do_tile = do_ring.tile(0)  # [BLOCK_M, BLOCK_DV]
    num_row_blocks = q_total // BLOCK_N + num_seqs
    kv_turn, q_turn = 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        b = work.b.to(gl.int64)
        q_shift = work.q_shift
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        kv_len = work.kv_len
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + gl.arange(0, ROWS, layout=ROW)
        q_idx = rows + q_shift
        # Vectors of rows are padded to blocks of as many rows as a block has keys.
        own_rows = (h * num_row_blocks + q_start // BLOCK_N + b) * BLOCK_N + rows
        row_lse = gl.load(lse_ptr + own_rows, mask=rows < q_len, other=float("-inf"))  # [BLOCK_M]
        row_delta = gl.load(delta_ptr + own_rows, mask=rows < q_len, other=0.0)  # [BLOCK_M]
        mbarrier.wait(q_ring.full.index(0), q_turn & 1)
        mbarrier.wait(do_ring.full.index(0), q_turn & 1)
        for _ in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            kv_idx = start_n + gl.arange(0, BLOCK_N, layout=KEY)
            qk = begin_scores(q_tile, kv_ring.k.receive(kv_turn), SCORES, HEAD_DIM)
            dp = begin_dp(do_tile, kv_ring.v, kv_turn, SCORES, V_PIECES)
            qk = wait_for_scores(qk)
            # Always true. Without the branch the mask is computed ahead of the product and kept in registers.
            if start_m < q_len:
                run_first = 128 * (gl.minimum(gl.maximum(floor_div(q_idx, 128), 6), 121) - 6)
                run_end = 128 * (gl.minimum(gl.maximum(floor_div(q_idx, 128), 6), 121) + 6) + 128
                run_end = gl.minimum(run_end, kv_len)
                run_bits = columns_before(run_end - start_n, KEY, BLOCK_N) & ~columns_before(
                    run_first - start_n, KEY, BLOCK_N
                )
                keep = at_columns(run_bits, KEY, BLOCK_N) & (
                    gl.abs(
                        gl.minimum(gl.maximum(floor_mod(q_idx, 128), 6), 121)[:, None] - floor_mod(kv_idx, 128)[None, :]
                    )
                    <= 6
                )

                qk = gl.where(keep, qk, float("-inf"))
            p = gl.exp2((qk + row_lse[:, None]) * qk_scale)  # [BLOCK_M, BLOCK_N]
            dp, p = end_dp(dp, p, do_tile, kv_ring.v, kv_turn, V_PIECES)
            ds = p * (dp + row_delta[:, None])  # [BLOCK_M, BLOCK_N]
            weights.put(ds.to(DTYPE), kv_turn)
            kv_ring.k.release(kv_turn)
            kv_turn += 1

        for _ in range(work.num_plain):
            qk = begin_scores(q_tile, kv_ring.k.receive(kv_turn), SCORES, HEAD_DIM)
            dp = begin_dp(do_tile, kv_ring.v, kv_turn, SCORES, V_PIECES)
            qk = wait_for_scores(qk)
            p = gl.exp2((qk + row_lse[:, None]) * qk_scale)  # [BLOCK_M, BLOCK_N]
            dp, p = end_dp(dp, p, do_tile, kv_ring.v, kv_turn, V_PIECES)
            ds = p * (dp + row_delta[:, None])  # [BLOCK_M, BLOCK_N]
            weights.put(ds.to(DTYPE), kv_turn)
            kv_ring.k.release(kv_turn)
            kv_turn += 1

        q_ring.release(q_turn)
        do_ring.release(q_turn)
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))


@gluon.jit
def add_keys(
    arguments,
    PART: gl.constexpr,
    stride_dqs: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Add up half PART of the columns of dq of each work item, and store them."""
    k_ring, work_ring, weights, dq_ptr, stride_dqh, scale = arguments
    turn, q_turn = 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        acc = no_half_sums(PART, BLOCK_D, HEAD_DIM)
        for _ in range(work.num_masked + work.num_plain):
            acc = add_weighted(acc, weights, k_ring, turn, PART)
            turn += 1
        dq_start = dq_ptr + q_start * stride_dqs + h * stride_dqh
        store_sums(dq_start, acc, scale, work.block * BLOCK_M, q_len, stride_dqs, PART, BLOCK_D, HEAD_DIM)
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))


@gluon.jit(do_not_specialize=["q_offset", "q_total", "num_heads", "group_size", "num_seqs"])
def natten_packed_hopper_split_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    spans_ptr,
    block_list_ptr,
    q_offset,
    dq_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dqh,
    stride_dqs: gl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    num_seqs,
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
    PIECES: gl.constexpr = count_pieces(BLOCK_D, HEAD_DIM, CHUNK)
    V_PIECES: gl.constexpr = count_pieces(BLOCK_DV, HEAD_DIM_V, CHUNK)
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, CHUNK)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, CHUNK)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, CHUNK)
    do_desc = describe_packed_rows(do_ptr, num_heads, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, CHUNK)
    q_ring, do_ring = make_ring(q_desc, 1, 1, 1, PIECES), make_ring(do_desc, 1, 1, 1, V_PIECES)
    kv_ring, weights = make_split_key_ring(k_desc, v_desc, STAGES, PIECES), make_weights(q_desc.dtype, BLOCK_M, BLOCK_N)
    work_ring = make_work_ring(10, 4)
    scorer = (q_ring, do_ring, kv_ring, work_ring, weights, lse_ptr, delta_ptr, q_total, scale, num_seqs)
    adder = (kv_ring.k, work_ring, weights, dq_ptr, stride_dqh, scale)
    rows = (
        q_desc,
        do_desc,
        q_ring,
        do_ring,
        work_ring,
        block_seqs_ptr,
        spans_ptr,
        q_offset,
        num_heads,
        work_counter_ptr,
    )
    keys = (k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, spans_ptr, block_list_ptr, num_heads, group_size)
    gl.warp_specialize(
        [
            (score_rows, (scorer, V_PIECES, HEAD_DIM, BLOCK_M, BLOCK_N)),
            (add_keys, (adder, 0, stride_dqs, HEAD_DIM, BLOCK_D, BLOCK_M)),
            (add_keys, (adder, 1, stride_dqs, HEAD_DIM, BLOCK_D, BLOCK_M)),
            (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M)),
            (produce_keys, (keys, V_PIECES, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 4, 1, 1],
        worker_num_regs=[168, 168, 24, 24],
    )
