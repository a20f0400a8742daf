# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: hopper/bwd_wide.py.jinja
# hash: 9a95c7e222709d57
"""Gradients of `gemma2_local`, with segment ids on Hopper, as in `hopper_bwd`, for q or v of more than 128 columns.

    keep            q_idx >= kv_idx and q_idx - kv_idx < 4096 and q_segment_ids[b, rows] == kv_segment_ids[b, cols] and
                    kv_segment_ids[b, cols] != padding_id
    score           50.0 * tanh(0.02 * score)
    q               [B, Hq, Sq, D]
    k               [B, Hkv, Skv, D]
    v               [B, Hkv, Skv, Dv]
    do              [B, Hq, Sq, Dv]
    lse             [B, Hq, Sq]  fp32, log of the softmax denominator
    delta           [B, Hq, Sq]  fp32, sum(o * do) - dlse
    q_segment_ids   [b, q_row]  int32
    kv_segment_ids  [b, k_row]  int32
    q_positions     [B, Sq]  int32, or None: by row
    kv_positions    [B, Skv]  int32, or None: by row
    ranges          [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks
    dk              [B, Hkv, Skv, D]
    dv              [B, Hkv, Skv, Dv]

lse and delta come from `gemma2_local_segmented_hopper_delta`, padded to whole blocks of rows. The gradient of q
is added to `dq_sums`, [B, Hq, blocks, 2, lines, 32], fp32, zeros at first, in the order of `in_fragments` and
without its factor.

A program takes one block of keys of one key head after the other. The accumulator of dk or of dv fills half of a
warpgroup's registers, so that each of two warpgroups has one. `score` computes probabilities and ds of each block
of queries, and sums dk. Through shared memory it hands both to `accumulate`, which sums dv, and with WITH_DQ
multiplies ds by the keys and adds the product to `dq_sums`, in any order, so that equal inputs may give other last
bits. A warp, `produce`, copies the keys, and the rows of each block of queries, to shared memory (TMA).

Tensors of the call say how many rows a block visits, so work is scheduled dynamically: a producer warp
takes the next work item from a counter in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..._runtime.device.gl import HeadRows, describe_rows, make_ring, make_work_ring, product_layout
from ..._runtime.device.gl_backward import (
    add_sums,
    begin_with,
    describe_vector,
    make_hand_over,
    make_row_ring,
    store_tile,
)
from ..._runtime.device.gl_math import clamp_index, tanh


@gluon.jit
def produce(rings, arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring = rings
    work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr = arguments
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_kv_heads * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        batch_row = b.to(gl.int32)
        kv_rows = HeadRows(batch_row, hkv.to(gl.int32))
        k_ring.fill(k_desc, kv_rows, start_n, 0, k_lap)
        v_ring.fill(v_desc, kv_rows, start_n, 0, k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        # Of the blocks this one visits, those from full_begin to full_end need no mask.
        block_range = ranges_ptr + b * stride_ranges_b + start_n // BLOCK_N * 4
        row_begin, full_begin = gl.load(block_range) * BLOCK_M, gl.load(block_range + 1) * BLOCK_M
        full_end, row_end = gl.load(block_range + 2) * BLOCK_M, gl.load(block_range + 3) * BLOCK_M
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for member in range(group_size):
            h = hkv * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                first = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                rows = HeadRows(batch_row, h.to(gl.int32))
                q_ring.send(q_desc, lse_desc, rows, start_m, first, q_turn)
                do_ring.send(do_desc, delta_desc, rows, start_m, first, q_turn)
                q_turn += 1
            for nth in range(num_full):
                # Of heads that share keys the last rows first: all programs have these, and so meet them at a time.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                first = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                rows = HeadRows(batch_row, h.to(gl.int32))
                q_ring.send(q_desc, lse_desc, rows, start_m, first, q_turn)
                do_ring.send(do_desc, delta_desc, rows, start_m, first, q_turn)
                q_turn += 1
        k_lap ^= 1
        item = work_ring.fetch(work_counter_ptr, work_turn)
        work_turn += 1


@gluon.jit
def score(
    rings,
    arguments,
    stride_dks: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    POSITIONS: gl.constexpr,
    HARDWARE_TANH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Probabilities and ds of each work item, and its dk."""
    k_ring, v_ring, q_ring, do_ring, p_ring, ds_ring = rings
    (
        work_ring,
        q_segment_ids_ptr,
        kv_segment_ids_ptr,
        q_positions_ptr,
        kv_positions_ptr,
        ranges_ptr,
        q_offset,
        dk_ptr,
        stride_dkb,
        stride_dkh,
        stride_q_segment_ids_0,
        stride_q_segment_ids_1,
        stride_kv_segment_ids_0,
        stride_kv_segment_ids_1,
        stride_q_positions_b,
        stride_kv_positions_b,
        q_segment_ids_size_1,
        kv_segment_ids_size_1,
        stride_ranges_b,
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
        padding_id,
        batch,
    ) = arguments
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN_ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SUMS: gl.constexpr = product_layout(BLOCK_D)
    K_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    k_tile = k_ring.tile(0)  # [BLOCK_N, BLOCK_D]
    v_tile = v_ring.tile(0)  # [BLOCK_N, BLOCK_DV]
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_kv_heads * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        cols = start_n + gl.arange(0, KEYS, layout=KEY)
        kv_idx = (
            gl.load(kv_positions_ptr + b * stride_kv_positions_b + cols, mask=cols < kv_len, other=0)
            if POSITIONS
            else cols
        )
        kv_segment_ids_kv = gl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(gl.int64) * stride_kv_segment_ids_1
        )
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, SUMS)  # [KEYS, BLOCK_D]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(0), k_lap)
        # Of the blocks this one visits, those from full_begin to full_end need no mask.
        block_range = ranges_ptr + b * stride_ranges_b + start_n // BLOCK_N * 4
        row_begin, full_begin = gl.load(block_range) * BLOCK_M, gl.load(block_range + 1) * BLOCK_M
        full_end, row_end = gl.load(block_range + 2) * BLOCK_M, gl.load(block_range + 3) * BLOCK_M
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                own_row = start_m + gl.arange(0, BLOCK_M, layout=OWN_ROW)
                own_position = (
                    gl.load(q_positions_ptr + b * stride_q_positions_b + own_row, mask=own_row < q_len, other=0)
                    if POSITIONS
                    else own_row + q_shift
                )
                own_segment = gl.load(
                    q_segment_ids_ptr
                    + b * stride_q_segment_ids_0
                    + clamp_index(own_row, q_segment_ids_size_1).to(gl.int64) * stride_q_segment_ids_1
                )
                qk, dp, q_tile, _do_tile = begin_block(k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = qk
                # Always true: otherwise this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift
                    logit = 72.13475204444816 * tanh_val
                    keep = (q_idx[None, :] >= kv_idx[:, None]) & (q_idx[None, :] - kv_idx[:, None] < 4096)
                    # Beyond the last row a score of zeros may be inf.
                    keep = keep & (rows < q_len)[None, :]
                    if RAGGED:
                        keep = keep & (cols < kv_len)[:, None]
                    logit = gl.where(keep, logit, float("-inf"))
                    q_segment_ids_q = gl.convert_layout(own_segment, ROW)
                    logit = gl.where(
                        (q_segment_ids_q[None, :] == kv_segment_ids_kv[:, None])
                        & (kv_segment_ids_kv != padding_id)[:, None],
                        logit,
                        float("-inf"),
                    )
                lse = q_ring.vectors.index(q_turn % q_ring.stages).load(ROW)  # [BLOCK_M]
                p = gl.exp2(logit - lse[None, :])  # [KEYS, BLOCK_M]
                p_ring.put(p.to(DTYPE), q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                # The others have no gradient, masked or not.
                keep = p > 0.0
                ds = gl.where(keep, ds * (1.0 - tanh_val * tanh_val), 0.0)
                dk = end_block(ds.to(DTYPE), dk, q_tile, ds_ring, q_ring, do_ring, q_turn, K_WEIGHTS, WITH_DQ)
                q_turn += 1
            for nth in range(num_full):
                # Of heads that share keys the last rows first: all programs have these, and so meet them at a time.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                qk, dp, q_tile, _do_tile = begin_block(k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = 72.13475204444816 * tanh_val
                if RAGGED and start_n + BLOCK_N > kv_len:
                    logit = gl.where((cols < kv_len)[:, None], logit, float("-inf"))
                lse = q_ring.vectors.index(q_turn % q_ring.stages).load(ROW)  # [BLOCK_M]
                p = gl.exp2(logit - lse[None, :])  # [KEYS, BLOCK_M]
                p_ring.put(p.to(DTYPE), q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                ds = ds * (1.0 - tanh_val * tanh_val)
                if RAGGED:
                    ds = gl.where((cols < kv_len)[:, None], ds, 0.0)
                dk = end_block(ds.to(DTYPE), dk, q_tile, ds_ring, q_ring, do_ring, q_turn, K_WEIGHTS, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dk_start = dk_ptr + b * stride_dkb + hkv * stride_dkh
        store_tile(dk_start, (dk * scale).to(DTYPE), start_n, kv_len, stride_dks, HEAD_DIM, SUMS)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def accumulate(
    rings,
    dq_sums_ptr,
    arguments,
    stride_dvs: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """dv of each work item, and what it adds to dq."""
    k_ring, v_ring, do_ring, p_ring, ds_ring = rings
    (
        work_ring,
        ranges_ptr,
        dv_ptr,
        stride_dvb,
        stride_dvh,
        stride_ranges_b,
        q_len,
        kv_len,
        num_heads,
        group_size,
        batch,
    ) = arguments
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    k_tile = k_ring.tile(0)  # [BLOCK_N, BLOCK_D]
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_kv_heads * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, SUMS)  # [KEYS, BLOCK_DV]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(0), k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        # Of the blocks this one visits, those from full_begin to full_end need no mask.
        block_range = ranges_ptr + b * stride_ranges_b + start_n // BLOCK_N * 4
        row_begin, full_begin = gl.load(block_range) * BLOCK_M, gl.load(block_range + 1) * BLOCK_M
        full_end, row_end = gl.load(block_range + 2) * BLOCK_M, gl.load(block_range + 3) * BLOCK_M
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for member in range(group_size):
            h = hkv * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, k_tile, p_ring, ds_ring, do_ring, q_turn, HEAD_DIM, BLOCK_M, WITH_DQ)
                q_turn += 1
            for nth in range(num_full):
                # Of heads that share keys the last rows first: all programs have these, and so meet them at a time.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, k_tile, p_ring, ds_ring, do_ring, q_turn, HEAD_DIM, BLOCK_M, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dv_start = dv_ptr + b * stride_dvb + hkv * stride_dvh
        store_tile(dv_start, dv.to(DTYPE), start_n, kv_len, stride_dvs, HEAD_DIM_V, SUMS)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def begin_block(
    k_tile,
    v_tile,
    q_ring,
    do_ring,
    turn,
    SCORES: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Issue `k q^T` and `v do^T - delta` of a block, [KEYS, BLOCK_M], and wait for the first.

    The difference costs nothing: accumulators begin with what is subtracted.
    """
    KEYS: gl.constexpr = k_tile.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage = turn % q_ring.stages
    q_tile = q_ring.receive(turn)  # [BLOCK_M, BLOCK_D]
    do_tile = do_ring.receive(turn)  # [BLOCK_M, BLOCK_DV]
    dp = begin_with(do_ring.vectors.index(stage).load(ROW), KEYS, SCORES)
    none = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    qk = warpgroup_mma(k_tile, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), dp, is_async=True)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    return qk, dp, q_tile, do_tile


@gluon.jit
def end_block(ds, dk, q_tile, ds_ring, q_ring, do_ring, turn, K_WEIGHTS: gl.constexpr, WITH_DQ: gl.constexpr):
    """Add block `turn` to dk, and with WITH_DQ hand over its ds."""
    stage = turn % q_ring.stages
    dk = warpgroup_mma(gl.convert_layout(ds, K_WEIGHTS), q_tile, dk, is_async=True)
    do_ring.release(stage)
    if WITH_DQ:
        ds_ring.put(ds, turn)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    # For both warpgroups: the other does not read it.
    q_ring.release(stage, 2)
    return dk


@gluon.jit
def add_block(
    dv,
    dq_part,
    k_tile,
    p_ring,
    ds_ring,
    do_ring,
    turn,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Add block `turn` to dv, and with WITH_DQ its product with the keys to dq in memory."""
    do_tile = do_ring.receive(turn)  # [BLOCK_M, BLOCK_DV]
    dv = warpgroup_mma(p_ring.take(turn), do_tile, dv, is_async=True)
    if WITH_DQ:
        ds_tile = ds_ring.take(turn).permute((1, 0))  # [BLOCK_M, BLOCK_N]
        none = gl.zeros([BLOCK_M, 64], gl.float32, product_layout(64))
        # 64 columns at a time: these are added while the next are multiplied. Those that pad a tile stay zero.
        PARTS: gl.constexpr = (HEAD_DIM + 63) // 64
        dq = warpgroup_mma(ds_tile, k_tile.slice(0, 64, dim=1), none, use_acc=False, is_async=True)
        dv, dq = warpgroup_mma_wait(0, deps=(dv, dq))
        do_ring.release(turn % do_ring.stages)
        p_ring.release(turn)
        for part in gl.static_range(1, PARTS):
            next_dq = warpgroup_mma(ds_tile, k_tile.slice(part * 64, 64, dim=1), none, use_acc=False, is_async=True)
            add_sums(dq_part + (part - 1) * (BLOCK_M * 64), dq)
            dq = warpgroup_mma_wait(0, deps=(next_dq,))
        ds_ring.release(turn)
        add_sums(dq_part + (PARTS - 1) * (BLOCK_M * 64), dq)
    else:
        dv = warpgroup_mma_wait(0, deps=(dv,))
        do_ring.release(turn % do_ring.stages)
        p_ring.release(turn)
    return dv


@gluon.jit(
    do_not_specialize=[
        "q_offset",
        "q_segment_ids_size_1",
        "kv_segment_ids_size_1",
        "stride_ranges_b",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
        "padding_id",
        "batch",
    ]
)
def gemma2_local_segmented_hopper_bwd_wide(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    dk_ptr,
    dv_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dks: gl.constexpr,
    stride_dvb,
    stride_dvh,
    stride_dvs: gl.constexpr,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    padding_id,
    dq_sums_ptr,
    batch,
    work_counter_ptr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    POSITIONS: gl.constexpr,
    HARDWARE_TANH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    num_kv_heads = num_heads // group_size
    num_rows = batch * num_heads * gl.maximum(gl.cdiv(q_len, BLOCK_M), 1) * BLOCK_M
    # A descriptor has no dim of size 0. Of no rows nothing is copied.
    q_desc = describe_rows(
        q_ptr, batch, num_heads, gl.maximum(q_len, 1), stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D
    )
    k_desc = describe_rows(
        k_ptr, batch, num_kv_heads, gl.maximum(kv_len, 1), stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D
    )
    v_desc = describe_rows(
        v_ptr,
        batch,
        num_kv_heads,
        gl.maximum(kv_len, 1),
        stride_vb,
        stride_vh,
        stride_vs,
        HEAD_DIM_V,
        BLOCK_N,
        BLOCK_DV,
    )
    do_desc = describe_rows(
        do_ptr,
        batch,
        num_heads,
        gl.maximum(q_len, 1),
        stride_dob,
        stride_doh,
        stride_dos,
        HEAD_DIM_V,
        BLOCK_M,
        BLOCK_DV,
    )
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 1, 1, 2)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    work_ring = make_work_ring(1, 2)
    p_ring, ds_ring = make_hand_over(DTYPE, BLOCK_N, BLOCK_M), make_hand_over(DTYPE, BLOCK_N, BLOCK_M)
    rings = (k_ring, v_ring, q_ring, do_ring, p_ring, ds_ring)
    scorer = (
        work_ring,
        q_segment_ids_ptr,
        kv_segment_ids_ptr,
        q_positions_ptr,
        kv_positions_ptr,
        ranges_ptr,
        q_offset,
        dk_ptr,
        stride_dkb,
        stride_dkh,
        stride_q_segment_ids_0,
        stride_q_segment_ids_1,
        stride_kv_segment_ids_0,
        stride_kv_segment_ids_1,
        stride_q_positions_b,
        stride_kv_positions_b,
        q_segment_ids_size_1,
        kv_segment_ids_size_1,
        stride_ranges_b,
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
        padding_id,
        batch,
    )
    summer = (
        work_ring,
        ranges_ptr,
        dv_ptr,
        stride_dvb,
        stride_dvh,
        stride_ranges_b,
        q_len,
        kv_len,
        num_heads,
        group_size,
        batch,
    )
    producer = (work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr)
    gl.warp_specialize(
        [
            (
                score,
                (
                    rings,
                    scorer,
                    stride_dks,
                    Q_OFFSET_PER_BATCH,
                    POSITIONS,
                    HARDWARE_TANH,
                    RAGGED,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_M,
                    BLOCK_N,
                    WITH_DQ,
                ),
            ),
            (
                accumulate,
                (
                    (k_ring, v_ring, do_ring, p_ring, ds_ring),
                    dq_sums_ptr,
                    summer,
                    stride_dvs,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                    WITH_DQ,
                ),
            ),
            (
                produce,
                (
                    (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring),
                    producer,
                    BLOCK_M,
                    BLOCK_N,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        # The registers of each thread. The first consumer gets what is left, as much as the second.
        worker_num_regs=[240, 24],
    )
