# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal: {mask: causal}
# template: hopper/split.py.jinja
# hash: f4772bbec1b095d0
"""Gradients of `causal` on Hopper for more than 256 columns of q or v: a launch for each of dq, dk and dv.

    keep   q_idx >= kv_idx
    q      [B, Hq, Sq, D]
    k      [B, Hkv, Skv, D]
    v      [B, Hkv, Skv, Dv]
    do     [B, Hq, Sq, Dv]
    lse    [B, Hq, Sq]  fp32, log of the softmax denominator
    delta  [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dkv    dk with SUMS_DK, otherwise dv

`lse_ptr` and `delta_ptr` are the outputs `row_lse` and `row_delta` of `causal_hopper_delta`, padded to whole
blocks of rows.

The sums of dk and dv of 64 keys would fill all registers of a multiprocessor. So each gradient has a launch, in which
the scores are computed again. A program holds 64 keys, or for dq 64 rows, in shared memory, and copies 32 of the other
side at a time (TMA). One warpgroup computes probabilities and ds of each block. It hands them through shared memory to
two warpgroups, each of which adds up half of the columns. All sums are in a fixed order.

Tensors of the call say how many rows a block visits, so work is scheduled dynamically: a producer warp
takes the next work item from a counter in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .._runtime.device.gl import (
    LOG2E,
    HeadRows,
    at_columns,
    balanced_blocks,
    columns_before,
    count_items,
    count_pieces,
    longest_first,
    make_ring,
    make_work_ring,
    product_layout,
)
from .._runtime.device.gl_backward import describe_input, describe_vector, heads_in_cache
from .._runtime.device.gl_forward import ROWS
from .._runtime.device.gl_forward_wide import ADDERS, begin_scores, no_half_sums
from .._runtime.device.gl_split import (
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
from .._runtime.device.gl_versions import aggregate, concat


@gluon.jit
def visited_rows(kv_len, q_len, q_shift, start_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of query rows see the keys from `start_n` on, with a mask and without, and where they begin."""
    kv_first = start_n
    kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
    # Blocks from full_begin to full_end need no mask.
    full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
    full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(q_len, row_begin), BLOCK_M) * BLOCK_M)
    full_end = q_len // BLOCK_M * BLOCK_M
    full_end = gl.maximum(full_end, full_begin)
    gap = full_end - full_begin
    num_partial = gl.maximum(gl.cdiv(q_len - gap - row_begin, BLOCK_M), 0)
    num_full = (full_end - full_begin) // BLOCK_M
    return row_begin, full_begin, gap, num_partial, num_full


@gluon.jit
def produce(
    rings,
    arguments,
    SUMS_DK: gl.constexpr,
    V_PIECES: gl.constexpr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_stream, do_ring = rings
    work_ring, q_offset, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr = arguments
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = num_key_blocks * num_head_groups * batch
    near_heads = heads_in_cache(q_len, num_head_groups, batch, group_size, BLOCK_D, BLOCK_DV)
    item, work_turn = longest_first(gl.program_id(0), num_items, num_key_blocks, near_heads), 0
    while item < num_items:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        hkv = head_group // HEAD_GROUPS
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        batch_row = b.to(gl.int32)
        kv_rows = HeadRows(batch_row, hkv.to(gl.int32))
        k_ring.send(k_desc, kv_rows, start_n, k_lap)
        if SUMS_DK:
            v_ring.send(v_desc, kv_rows, start_n, k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                head_row = (b * num_heads + h) * num_blocks
                first = (head_row * BLOCK_M + start_m).to(gl.int32)
                rows = HeadRows(batch_row, h.to(gl.int32))
                q_stream.send(q_desc, lse_desc, delta_desc, rows, start_m, first, q_turn)
                if SUMS_DK:
                    send_chunks(do_ring, do_desc, rows, start_m, q_turn, V_PIECES)
                else:
                    do_ring.send(do_desc, rows, start_m, q_turn)
                q_turn += 1
            for nth in range(num_full):
                # If heads share keys, the last rows come first: all programs visit them, and find them in the cache.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                head_row = (b * num_heads + h) * num_blocks
                first = (head_row * BLOCK_M + start_m).to(gl.int32)
                rows = HeadRows(batch_row, h.to(gl.int32))
                q_stream.send(q_desc, lse_desc, delta_desc, rows, start_m, first, q_turn)
                if SUMS_DK:
                    send_chunks(do_ring, do_desc, rows, start_m, q_turn, V_PIECES)
                else:
                    do_ring.send(do_desc, rows, start_m, q_turn)
                q_turn += 1
        k_lap ^= 1
        item = work_ring.fetch_longest_first(work_counter_ptr, work_turn, num_items, num_key_blocks, near_heads)
        work_turn += 1


@gluon.jit
def score_keys(
    rings,
    arguments,
    SUMS_DK: gl.constexpr,
    V_PIECES: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute the probabilities of each work item, or if SUMS_DK its ds."""
    k_ring, v_ring, q_stream, do_ring, weights = rings
    work_ring, q_offset, q_len, kv_len, num_heads, group_size, scale, batch = arguments
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    k_tile = k_ring.tile(0)  # [BLOCK_N, BLOCK_D]
    v_tile = v_ring.tile(0)  # [BLOCK_N, BLOCK_DV]
    qk_scale = scale * LOG2E
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = num_key_blocks * num_head_groups * batch
    near_heads = heads_in_cache(q_len, num_head_groups, batch, group_size, BLOCK_D, BLOCK_DV)
    item, work_turn = longest_first(gl.program_id(0), num_items, num_key_blocks, near_heads), 0
    while item < num_items:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + gl.arange(0, KEYS, layout=KEY)
        mbarrier.wait(k_ring.full.index(0), k_lap)
        if SUMS_DK:
            mbarrier.wait(v_ring.full.index(0), k_lap)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
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
                    run_first = kv_idx - q_shift
                    if RAGGED:
                        run_first = gl.where(kv_idx < kv_len, run_first, start_m + BLOCK_M)
                    run_bits = ~columns_before(run_first - start_m, ROW, BLOCK_M)
                    keep = at_columns(run_bits, ROW, BLOCK_M)
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
                if RAGGED and start_n + BLOCK_N > kv_len:
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
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Add up half PART of the columns of dv of each work item, or if SUMS_DK of dk."""
    _k_ring, _v_ring, q_stream, do_ring, weights = rings
    work_ring, pointers, strides, numbers = arguments
    q_offset, dkv_ptr = pointers
    stride_dkvb, stride_dkvh = strides
    q_len, kv_len, num_heads, group_size, scale, batch = numbers
    summed = q_stream.ring if SUMS_DK else do_ring
    COLS: gl.constexpr = BLOCK_D if SUMS_DK else BLOCK_DV
    OWN_DIM: gl.constexpr = HEAD_DIM if SUMS_DK else HEAD_DIM_V
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn = 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = num_key_blocks * num_head_groups * batch
    near_heads = heads_in_cache(q_len, num_head_groups, batch, group_size, BLOCK_D, BLOCK_DV)
    item, work_turn = longest_first(gl.program_id(0), num_items, num_key_blocks, near_heads), 0
    while item < num_items:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        acc = no_half_sums(PART, COLS, OWN_DIM)
        _row_begin, _full_begin, _gap, num_partial, num_full = visited_rows(
            kv_len, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for _ in range(group_size):
            for _ in range(num_partial):
                acc = add_weighted(acc, weights, summed, q_turn, PART)
                q_turn += 1
            for _ in range(num_full):
                acc = add_weighted(acc, weights, summed, q_turn, PART)
                q_turn += 1

        dkv_start = dkv_ptr + b * stride_dkvb + head_group * stride_dkvh
        store_sums(dkv_start, acc, scale if SUMS_DK else 1.0, start_n, kv_len, stride_dkvs, PART, COLS, OWN_DIM)
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit(do_not_specialize=["q_offset", "q_len", "kv_len", "num_heads", "group_size", "batch"])
def causal_hopper_split_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_offset,
    dkv_ptr,
    stride_qb,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vb,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dkvb,
    stride_dkvh,
    stride_dkvs: gl.constexpr,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    batch,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    RAGGED: gl.constexpr,
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
    num_rows = batch * num_heads * gl.maximum(gl.cdiv(q_len, BLOCK_M), 1) * BLOCK_M
    q_desc = describe_input(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, CHUNK)
    k_desc = describe_input(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, CHUNK)
    v_desc = describe_input(v_ptr, batch, kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, CHUNK)
    do_desc = describe_input(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, CHUNK
    )
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
    scorer = (work_ring, q_offset, q_len, kv_len, num_heads, group_size, scale, batch)
    summer = (
        work_ring,
        (q_offset, dkv_ptr),
        (stride_dkvb, stride_dkvh),
        (q_len, kv_len, num_heads, group_size, scale, batch),
    )
    producer = (work_ring, q_offset, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr)
    CONSTANTS: gl.constexpr = (
        stride_dkvs,
        Q_OFFSET_PER_BATCH,
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_D,
        BLOCK_DV,
        BLOCK_M,
        BLOCK_N,
    )
    gl.warp_specialize(
        [
            (
                score_keys,
                (
                    rings,
                    scorer,
                    SUMS_DK,
                    V_PIECES,
                    Q_OFFSET_PER_BATCH,
                    RAGGED,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                ),
            ),
            (add_rows, concat((rings, summer, 0, SUMS_DK), CONSTANTS)),
            (add_rows, concat((rings, summer, 1, SUMS_DK), CONSTANTS)),
            (
                produce,
                (
                    copied,
                    producer,
                    SUMS_DK,
                    V_PIECES,
                    HEAD_GROUPS,
                    Q_OFFSET_PER_BATCH,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                ),
            ),
        ],
        worker_num_warps=[4, 4, 1],
        worker_num_regs=[168, 168, 24],
    )


@aggregate
class Work:
    """One block of query rows, as `produce_rows` publishes it; `h` is -1 after the last block."""

    h: gl.tensor
    b: gl.tensor
    block: gl.tensor
    q_shift: gl.tensor
    num_masked: gl.tensor
    num_plain: gl.tensor


@gluon.jit
def visited_keys(kv_len, q_len, q_shift, start_m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of keys the rows from `start_m` on visit, with a mask and without, and where they begin."""
    q_first = start_m + q_shift
    q_last = gl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_end = gl.minimum(q_last + 1, kv_len)
    # Blocks before full_end need no mask.
    full_end = gl.minimum(q_first + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = gl.maximum(full_end, 0)
    num_partial = gl.maximum(gl.cdiv(kv_end - full_end, BLOCK_N), 0)
    num_full = full_end // BLOCK_N
    # Rows that attend to nothing visit block 0, and their mask keeps none of its keys.
    num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
    # The first block always takes the loop with the mask.
    num_masked = gl.maximum(num_partial, 1)
    return full_end, num_partial, num_full, num_masked


@gluon.jit
def produce_rows(arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Publish each work item, and copy its queries and their gradients."""
    q_desc, do_desc, q_ring, do_ring, work_ring, q_offset, q_len, kv_len, num_heads, batch = arguments
    q_turn = 0
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    # Later rows see more keys: blocks are counted from the last one.
    num_items, single_heads = count_items(num_blocks, num_heads * batch)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, from_end, num_taken = balanced_blocks(item, num_items, num_blocks, num_heads * batch, single_heads)
        for nth_block in range(num_taken):
            block = gl.where(nth_block == 0, num_blocks - 1 - from_end, from_end)
            b = (head // num_heads).to(gl.int64)
            h = (head % num_heads).to(gl.int64)
            start_m = block * BLOCK_M
            q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
            _full_end, num_partial, num_full, num_masked = visited_keys(
                kv_len, q_len, q_shift, start_m, BLOCK_M, BLOCK_N
            )
            num_plain = num_full - (num_masked - num_partial)
            work_ring.publish(q_turn, (h, b, block, q_shift, num_masked, num_plain))
            q_rows = HeadRows(b.to(gl.int32), h.to(gl.int32))
            q_ring.send(q_desc, q_rows, start_m, q_turn)
            do_ring.send(do_desc, q_rows, start_m, q_turn)
            q_turn += 1

    work_ring.publish(q_turn, (-1, -1, -1, -1, -1, -1))


@gluon.jit
def produce_keys(
    arguments, V_PIECES: gl.constexpr, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Copy the keys and values of each block that the rows of a work item visit."""
    k_desc, v_desc, kv_ring, q_offset, q_len, kv_len, num_heads, group_size, batch = arguments
    kv_turn = 0
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    # Later rows see more keys: blocks are counted from the last one.
    num_items, single_heads = count_items(num_blocks, num_heads * batch)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, from_end, num_taken = balanced_blocks(item, num_items, num_blocks, num_heads * batch, single_heads)
        for nth_block in range(num_taken):
            block = gl.where(nth_block == 0, num_blocks - 1 - from_end, from_end)
            b = (head // num_heads).to(gl.int64)
            h = (head % num_heads).to(gl.int64)
            hkv = h // group_size
            start_m = block * BLOCK_M
            q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
            full_end, num_partial, num_full, num_masked = visited_keys(
                kv_len, q_len, q_shift, start_m, BLOCK_M, BLOCK_N
            )
            kv_rows = HeadRows(b.to(gl.int32), hkv.to(gl.int32))
            for nth in range(num_masked):
                start_n = full_end + nth * BLOCK_N
                start_n = gl.where(num_partial > 0, start_n, 0)
                send_keys(kv_ring, k_desc, v_desc, kv_rows, start_n, kv_turn, V_PIECES, BLOCK_N)
                kv_turn += 1
            for nth in range(num_masked - num_partial, num_full):
                start_n = nth * BLOCK_N
                send_keys(kv_ring, k_desc, v_desc, kv_rows, start_n, kv_turn, V_PIECES, BLOCK_N)
                kv_turn += 1


@gluon.jit
def score_rows(
    arguments,
    V_PIECES: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute ds of the rows of each work item."""
    q_ring, do_ring, kv_ring, work_ring, weights, lse_ptr, delta_ptr, q_len, kv_len, num_heads, scale = arguments
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    qk_scale = scale * LOG2E
    q_tile = q_ring.tile(0)  # [BLOCK_M, BLOCK_D]
    do_tile = do_ring.tile(0)  # [BLOCK_M, BLOCK_DV]
    num_row_blocks = gl.cdiv(q_len, BLOCK_N)
    kv_turn, q_turn = 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        b = work.b.to(gl.int64)
        q_shift = work.q_shift
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + gl.arange(0, ROWS, layout=ROW)
        q_idx = rows + q_shift
        # Vectors of rows are padded to blocks of as many rows as a block has keys.
        own_rows = (b * num_heads + h) * num_row_blocks * BLOCK_N + rows
        row_lse = gl.load(lse_ptr + own_rows, mask=rows < q_len, other=float("-inf"))  # [BLOCK_M]
        row_delta = gl.load(delta_ptr + own_rows, mask=rows < q_len, other=0.0)  # [BLOCK_M]
        mbarrier.wait(q_ring.full.index(0), q_turn & 1)
        mbarrier.wait(do_ring.full.index(0), q_turn & 1)
        for _ in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            qk = begin_scores(q_tile, kv_ring.k.receive(kv_turn), SCORES, HEAD_DIM)
            dp = begin_dp(do_tile, kv_ring.v, kv_turn, SCORES, V_PIECES)
            qk = wait_for_scores(qk)
            # Always true. Without the branch the mask is computed ahead of the product and kept in registers.
            if start_m < q_len:
                run_end = q_idx + 1
                if RAGGED:
                    run_end = gl.minimum(run_end, kv_len)
                run_bits = columns_before(run_end - start_n, KEY, BLOCK_N)
                keep = at_columns(run_bits, KEY, BLOCK_N)

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
    k_ring, work_ring, weights, dq_ptr, stride_dqb, stride_dqh, q_len, scale = arguments
    turn, q_turn = 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        b = work.b.to(gl.int64)
        acc = no_half_sums(PART, BLOCK_D, HEAD_DIM)
        for _ in range(work.num_masked + work.num_plain):
            acc = add_weighted(acc, weights, k_ring, turn, PART)
            turn += 1
        dq_start = dq_ptr + b * stride_dqb + h * stride_dqh
        store_sums(dq_start, acc, scale, work.block * BLOCK_M, q_len, stride_dqs, PART, BLOCK_D, HEAD_DIM)
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))


@gluon.jit(do_not_specialize=["q_offset", "q_len", "kv_len", "num_heads", "group_size", "batch"])
def causal_hopper_split_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_offset,
    dq_ptr,
    stride_qb,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vb,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dqb,
    stride_dqh,
    stride_dqs: gl.constexpr,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    batch,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    RAGGED: gl.constexpr,
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
    q_desc = describe_input(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, CHUNK)
    k_desc = describe_input(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, CHUNK)
    v_desc = describe_input(v_ptr, batch, kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, CHUNK)
    do_desc = describe_input(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, CHUNK
    )
    q_ring, do_ring = make_ring(q_desc, 1, 1, 1, PIECES), make_ring(do_desc, 1, 1, 1, V_PIECES)
    kv_ring, weights = make_split_key_ring(k_desc, v_desc, STAGES, PIECES), make_weights(q_desc.dtype, BLOCK_M, BLOCK_N)
    work_ring = make_work_ring(6, 3)
    scorer = (q_ring, do_ring, kv_ring, work_ring, weights, lse_ptr, delta_ptr, q_len, kv_len, num_heads, scale)
    adder = (kv_ring.k, work_ring, weights, dq_ptr, stride_dqb, stride_dqh, q_len, scale)
    rows = (q_desc, do_desc, q_ring, do_ring, work_ring, q_offset, q_len, kv_len, num_heads, batch)
    keys = (k_desc, v_desc, kv_ring, q_offset, q_len, kv_len, num_heads, group_size, batch)
    gl.warp_specialize(
        [
            (score_rows, (scorer, V_PIECES, RAGGED, HEAD_DIM, BLOCK_M, BLOCK_N)),
            (add_keys, (adder, 0, stride_dqs, HEAD_DIM, BLOCK_D, BLOCK_M)),
            (add_keys, (adder, 1, stride_dqs, HEAD_DIM, BLOCK_D, BLOCK_M)),
            (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
            (produce_keys, (keys, V_PIECES, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 4, 1, 1],
        worker_num_regs=[168, 168, 24, 24],
    )
