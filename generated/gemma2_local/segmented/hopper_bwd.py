# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: hopper/bwd.py.jinja
# hash: 38ec4e769fb2c994
"""Gradients of `gemma2_local`, with segment ids on Hopper with respect to k and v, and with WITH_DQ to q.

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

`lse_ptr` and `delta_ptr` are not the `lse` and `delta` above, but what `gemma2_local_segmented_hopper_delta`
makes of them: `row_lse` and `row_delta`, negative and padded to whole blocks of rows. `row_delta` is added to the
product `dp` of a block (`issue_products`). The gradient of q is added to `dq_sums`, [B, Hq, blocks, 2, lines,
32], fp32, zeros at first, in the order of `in_fragments` and before the factor `scale`.

A program computes one block of keys of one key head after the other, for all query heads that share it. If HEAD_GROUPS
is more than 1, these are split into that many groups, and a program computes the block for one of them. `dk` and `dv`
are then float32 and have a head for each group: `Hkv * HEAD_GROUPS` in place of Hkv.

A warp, `produce`, copies the keys, and the rows of each block of queries, to shared memory (TMA). The gradient of q is
added to `dq_sums` in any order, so that its last bits may differ between equal calls. `templates/hopper/README.md` has
a picture.

For up to 128 columns of q and v, two warpgroups run `consume`. Each owns half of the keys, and sums their dk and dv
over the query heads. With WITH_DQ the warpgroups exchange ds through shared memory: each step also multiplies ds of the
block before by the keys, and a separate warp, `add_dq`, adds the product to `dq_sums`.

For more columns of q or v there is `gemma2_local_segmented_hopper_bwd_wide`: the accumulator of dk or of dv then
fills half of a warpgroup's registers, so each of the two warpgroups holds one of them. `score` computes
probabilities and ds of each block of queries, and sums dk. It hands probabilities and ds through shared memory to
`accumulate`, which sums dv, and with WITH_DQ multiplies ds by the keys and adds the product to `dq_sums`.

Tensors of the call say how many rows a block visits, so work is scheduled dynamically: a producer warp
takes the next work item from a counter in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.gl import (
    HeadRows,
    Ring,
    as_operand,
    begin_sums,
    make_barriers,
    make_ring,
    make_work_ring,
    no_sums,
    product_layout,
)
from ..._runtime.device.gl_backward import (
    describe_input,
    describe_parts,
    describe_vector,
    make_exchange,
    make_hand_over,
    make_row_ring,
    store_second,
    store_through,
    store_tile,
)
from ..._runtime.device.gl_backward_steps import (
    add_block,
    add_tiles,
    begin_block,
    begin_exchange,
    drain_dq,
    end_block,
    end_wide_block,
    send_rows,
)
from ..._runtime.device.gl_math import clamp_index, tanh
from ..._runtime.device.gl_versions import concat


@gluon.jit
def visited_rows(b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of query rows see the keys from `start_n` on, with a mask and without, and where they begin."""
    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + b * stride_ranges_b + start_n // BLOCK_N * 4
    row_begin, full_begin = gl.load(block_range) * BLOCK_M, gl.load(block_range + 1) * BLOCK_M
    full_end, row_end = gl.load(block_range + 2) * BLOCK_M, gl.load(block_range + 3) * BLOCK_M
    gap = full_end - full_begin
    num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
    num_full = (full_end - full_begin) // BLOCK_M
    return row_begin, full_begin, gap, num_partial, num_full


@gluon.jit
def produce(
    rings, arguments, V_PARTS: gl.constexpr, HEAD_GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    _q_desc, k_desc, v_desc, _do_desc, _lse_desc, _delta_desc, k_ring, v_ring, _q_ring, _do_ring = rings
    work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr = arguments
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_head_groups * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        hkv = head_group // HEAD_GROUPS
        batch_row = b.to(gl.int32)
        kv_rows = HeadRows(batch_row, hkv.to(gl.int32))
        k_ring.fill(k_desc, kv_rows, start_n, 0, k_lap)
        for part in gl.static_range(V_PARTS):
            v_ring.fill(v_desc, kv_rows, start_n + part * (BLOCK_N // V_PARTS), part, k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                head_row = (b * num_heads + h) * num_blocks
                send_rows(rings, head_row, batch_row, h, start_m, q_turn)
                q_turn += 1
            for nth in range(num_full):
                row_turn = nth
                if V_PARTS == 1:
                    # If heads share keys, the wide backward takes the last rows first: all programs visit them, and
                    # find them in the cache.
                    row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                head_row = (b * num_heads + h) * num_blocks
                send_rows(rings, head_row, batch_row, h, start_m, q_turn)
                q_turn += 1
        k_lap ^= 1
        item = work_ring.fetch(work_counter_ptr, work_turn)
        work_turn += 1


@gluon.jit
def consume(
    rings,
    exchange,
    arguments,
    PART: gl.constexpr,
    stride_dks: gl.constexpr,
    stride_dvs: gl.constexpr,
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
    WITH_DQ: gl.constexpr,
):
    """Compute dk and dv of half of the keys of each work item, and half of its contribution to each block of dq."""
    k_ring, v_ring, q_ring, _do_ring = rings
    work_ring, pointers, strides, numbers = arguments
    q_segment_ids_ptr, kv_segment_ids_ptr, q_positions_ptr, kv_positions_ptr, ranges_ptr, q_offset, dk_ptr, dv_ptr = (
        pointers
    )
    (
        stride_dkb,
        stride_dkh,
        stride_dvb,
        stride_dvh,
        stride_q_segment_ids_0,
        stride_q_segment_ids_1,
        stride_kv_segment_ids_0,
        stride_kv_segment_ids_1,
        stride_q_positions_b,
        stride_kv_positions_b,
        stride_ranges_b,
    ) = strides
    q_segment_ids_size_1, kv_segment_ids_size_1, q_len, kv_len, num_heads, group_size, scale, padding_id, batch = (
        numbers
    )
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN_ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    v_tile = v_ring.tile(PART)  # [KEYS, BLOCK_DV]
    if WITH_DQ:
        begin_exchange(exchange, PART)
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_head_groups * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        cols = start_n + PART * KEYS + gl.arange(0, KEYS, layout=KEY)
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
        dk = no_sums(BLOCK_D, HEAD_DIM)
        dv = no_sums(BLOCK_DV, HEAD_DIM_V)
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(PART), k_lap)
        first_turn = q_turn
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M, BLOCK_N
        )
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
                qk, dp, q_tile, do_tile = begin_block(rings, q_turn, None, PART, SCORES, False, HEAD_DIM, HEAD_DIM_V)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = qk
                # Always true. Without the branch this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift
                    logit = 72.13475204444816 * tanh_val
                    keep = (q_idx[None, :] >= kv_idx[:, None]) & (q_idx[None, :] - kv_idx[:, None] < 4096)
                    # Rows beyond the last one are zeros, and the score of zeros may be inf.
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
                dv = begin_sums(as_operand(p.to(DTYPE), dv[0]), do_tile, dv)
                p_dscore = p * (1.0 - tanh_val * tanh_val)  # [KEYS, BLOCK_M]
                dp = warpgroup_mma_wait(len(dv), deps=(dp,))
                ds = p_dscore * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE), (dk, dv), q_tile, rings, exchange, q_turn, first_turn, WITH_DQ, HEAD_DIM, PART
                )
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                qk, dp, q_tile, do_tile = begin_block(rings, q_turn, None, PART, SCORES, False, HEAD_DIM, HEAD_DIM_V)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = 72.13475204444816 * tanh_val
                if RAGGED and start_n + BLOCK_N > kv_len:
                    logit = gl.where((cols < kv_len)[:, None], logit, float("-inf"))
                lse = q_ring.vectors.index(q_turn % q_ring.stages).load(ROW)  # [BLOCK_M]
                p = gl.exp2(logit - lse[None, :])  # [KEYS, BLOCK_M]
                dv = begin_sums(as_operand(p.to(DTYPE), dv[0]), do_tile, dv)
                p_dscore = p * (1.0 - tanh_val * tanh_val)  # [KEYS, BLOCK_M]
                dp = warpgroup_mma_wait(len(dv), deps=(dp,))
                ds = p_dscore * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE), (dk, dv), q_tile, rings, exchange, q_turn, first_turn, WITH_DQ, HEAD_DIM, PART
                )
                q_turn += 1

        if WITH_DQ:
            drain_dq(k_ring, exchange, q_turn, first_turn, HEAD_DIM, BLOCK_M, PART)
        mbarrier.arrive(k_ring.empty.index(0), count=1)
        own_start = start_n + PART * KEYS
        # Layouts are converted through the shared memory of v, which is not read any more.
        dv_start = dv_ptr + b * stride_dvb + head_group * stride_dvh
        store_through(dv_start, dv[0], v_tile, own_start, kv_len, stride_dvs, HEAD_DIM_V)
        store_second(dv_start, dv, 1.0, own_start, kv_len, stride_dvs, HEAD_DIM_V)
        dk_start = dk_ptr + b * stride_dkb + head_group * stride_dkh
        store_through(dk_start, dk[0] * scale, v_tile, own_start, kv_len, stride_dks, HEAD_DIM)
        store_second(dk_start, dk, scale, own_start, kv_len, stride_dks, HEAD_DIM)
        fence_async_shared()
        mbarrier.arrive(v_ring.empty.index(PART), count=1)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def add_dq(dq_descs, dq_ring, arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Add what each block of keys contributes to dq to memory."""
    work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch = arguments
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn = 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_head_groups * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                add_tiles(dq_descs, dq_ring, row_block, q_turn)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                add_tiles(dq_descs, dq_ring, row_block, q_turn)
                q_turn += 1
        item = work_ring.receive(work_turn, 1)[0]
        work_turn += 1


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
def gemma2_local_segmented_hopper_bwd(
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
    run_keys_ptr,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
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
    kv_heads = num_heads // (group_size * HEAD_GROUPS)
    num_rows = batch * num_heads * gl.maximum(gl.cdiv(q_len, BLOCK_M), 1) * BLOCK_M
    q_desc = describe_input(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_input(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_input(
        v_ptr, batch, kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N // 2, BLOCK_DV
    )
    do_desc = describe_input(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 2, 1, 1)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    if run_keys_ptr is not None:
        # If the table of runs has blocks, the packed kernel has computed the call.
        batch = gl.where(gl.load(run_keys_ptr + NUM_BLOCKS) > 0, 0, batch)
    work_ring = make_work_ring(1, 3 if WITH_DQ else 2)
    inputs = (k_ring, v_ring, q_ring, do_ring)
    rings = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring)
    producer = (work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr)
    consumer = (
        work_ring,
        (
            q_segment_ids_ptr,
            kv_segment_ids_ptr,
            q_positions_ptr,
            kv_positions_ptr,
            ranges_ptr,
            q_offset,
            dk_ptr,
            dv_ptr,
        ),
        (
            stride_dkb,
            stride_dkh,
            stride_dvb,
            stride_dvh,
            stride_q_segment_ids_0,
            stride_q_segment_ids_1,
            stride_kv_segment_ids_0,
            stride_kv_segment_ids_1,
            stride_q_positions_b,
            stride_kv_positions_b,
            stride_ranges_b,
        ),
        (q_segment_ids_size_1, kv_segment_ids_size_1, q_len, kv_len, num_heads, group_size, scale, padding_id, batch),
    )
    CONSTANTS: gl.constexpr = (
        stride_dks,
        stride_dvs,
        Q_OFFSET_PER_BATCH,
        POSITIONS,
        HARDWARE_TANH,
        RAGGED,
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_D,
        BLOCK_DV,
        BLOCK_M,
        BLOCK_N,
        WITH_DQ,
    )
    if WITH_DQ:
        LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
        dq_descs = describe_parts(dq_sums_ptr, num_rows * (BLOCK_D // 32), BLOCK_M, BLOCK_D, HEAD_DIM)
        ds_ring = make_exchange(DTYPE, BLOCK_N, BLOCK_M)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, LINES, 32], dq_descs[0].layout)
        dq_ring = Ring(dq_tiles, make_barriers(2, 1), make_barriers(2, 1), 2, 1)
        exchange = (ds_ring, dq_ring)
        adder = (work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch)
        gl.warp_specialize(
            [
                (consume, concat((inputs, exchange, consumer, 0), CONSTANTS)),
                (consume, concat((inputs, exchange, consumer, 1), CONSTANTS)),
                (produce, (rings, producer, 2, HEAD_GROUPS, BLOCK_M, BLOCK_N)),
                (add_dq, (dq_descs, dq_ring, adder, BLOCK_M, BLOCK_N)),
            ],
            worker_num_warps=[4, 1, 1],
            # The registers of each thread. The first consumer gets what is left, as much as the second.
            worker_num_regs=[240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, concat((inputs, None, consumer, 0), CONSTANTS)),
                (consume, concat((inputs, None, consumer, 1), CONSTANTS)),
                (produce, (rings, producer, 2, HEAD_GROUPS, BLOCK_M, BLOCK_N)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )


@gluon.jit
def score(
    rings,
    hand_over,
    arguments,
    stride_dks: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    POSITIONS: gl.constexpr,
    HARDWARE_TANH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Compute probabilities, ds and dk of each work item."""
    k_ring, v_ring, q_ring, _do_ring = rings
    p_ring = hand_over[0]
    work_ring, pointers, strides, numbers = arguments
    q_segment_ids_ptr, kv_segment_ids_ptr, q_positions_ptr, kv_positions_ptr, ranges_ptr, q_offset, dk_ptr = pointers
    (
        stride_dkb,
        stride_dkh,
        stride_q_segment_ids_0,
        stride_q_segment_ids_1,
        stride_kv_segment_ids_0,
        stride_kv_segment_ids_1,
        stride_q_positions_b,
        stride_kv_positions_b,
        stride_ranges_b,
    ) = strides
    q_segment_ids_size_1, kv_segment_ids_size_1, q_len, kv_len, num_heads, group_size, scale, padding_id, batch = (
        numbers
    )
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN_ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SUMS: gl.constexpr = product_layout(BLOCK_D)
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_head_groups * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
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
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M, BLOCK_N
        )
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
                qk, dp, q_tile, _do_tile = begin_block(rings, q_turn, None, 0, SCORES, False, HEAD_DIM, HEAD_DIM_V)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = qk
                # Always true. Without the branch this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift
                    logit = 72.13475204444816 * tanh_val
                    keep = (q_idx[None, :] >= kv_idx[:, None]) & (q_idx[None, :] - kv_idx[:, None] < 4096)
                    # Rows beyond the last one are zeros, and the score of zeros may be inf.
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
                p_dscore = p * (1.0 - tanh_val * tanh_val)  # [KEYS, BLOCK_M]
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p_dscore * dp  # [KEYS, BLOCK_M]
                dk = end_wide_block(ds.to(DTYPE), (dk,), q_tile, rings, hand_over, q_turn, WITH_DQ)
                q_turn += 1
            for nth in range(num_full):
                # If heads share keys, the last rows come first: all programs visit them, and find them in the cache.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                qk, dp, q_tile, _do_tile = begin_block(rings, q_turn, None, 0, SCORES, False, HEAD_DIM, HEAD_DIM_V)
                tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
                logit = 72.13475204444816 * tanh_val
                if RAGGED and start_n + BLOCK_N > kv_len:
                    logit = gl.where((cols < kv_len)[:, None], logit, float("-inf"))
                lse = q_ring.vectors.index(q_turn % q_ring.stages).load(ROW)  # [BLOCK_M]
                p = gl.exp2(logit - lse[None, :])  # [KEYS, BLOCK_M]
                p_ring.put(p.to(DTYPE), q_turn)
                p_dscore = p * (1.0 - tanh_val * tanh_val)  # [KEYS, BLOCK_M]
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p_dscore * dp  # [KEYS, BLOCK_M]
                dk = end_wide_block(ds.to(DTYPE), (dk,), q_tile, rings, hand_over, q_turn, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dk_start = dk_ptr + b * stride_dkb + head_group * stride_dkh
        store_tile(dk_start, dk * scale, start_n, kv_len, stride_dks, HEAD_DIM, SUMS)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def accumulate(
    rings,
    hand_over,
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
    """Compute dv of each work item, and its contribution to dq."""
    k_ring, v_ring, _q_ring, _do_ring = rings
    work_ring, pointers, strides, numbers = arguments
    ranges_ptr, dv_ptr = pointers
    stride_dvb, stride_dvh, stride_ranges_b = strides
    q_len, kv_len, num_heads, group_size, batch = numbers
    KEYS: gl.constexpr = BLOCK_N
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    num_head_groups, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    item, work_turn = gl.program_id(0), 0
    while item < num_key_blocks * num_head_groups * batch:
        head = item // num_key_blocks
        start_n = (item % num_key_blocks) * BLOCK_N
        b = (head // num_head_groups).to(gl.int64)
        head_group = (head % num_head_groups).to(gl.int64)
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, SUMS)  # [KEYS, BLOCK_DV]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(0), k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            b, ranges_ptr, start_n, stride_ranges_b, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, rings, hand_over, q_turn, HEAD_DIM, WITH_DQ)
                q_turn += 1
            for nth in range(num_full):
                # If heads share keys, the last rows come first: all programs visit them, and find them in the cache.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, rings, hand_over, q_turn, HEAD_DIM, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dv_start = dv_ptr + b * stride_dvb + head_group * stride_dvh
        store_tile(dv_start, dv, start_n, kv_len, stride_dvs, HEAD_DIM_V, SUMS)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


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
    run_keys_ptr,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
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
    kv_heads = num_heads // (group_size * HEAD_GROUPS)
    num_rows = batch * num_heads * gl.maximum(gl.cdiv(q_len, BLOCK_M), 1) * BLOCK_M
    q_desc = describe_input(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_input(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_input(
        v_ptr, batch, kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, BLOCK_DV
    )
    do_desc = describe_input(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 1, 1, 2)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    if run_keys_ptr is not None:
        # If the table of runs has blocks, the packed kernel has computed the call.
        batch = gl.where(gl.load(run_keys_ptr + NUM_BLOCKS) > 0, 0, batch)
    work_ring = make_work_ring(1, 2)
    p_ring, ds_ring = make_hand_over(DTYPE, BLOCK_N, BLOCK_M), make_hand_over(DTYPE, BLOCK_N, BLOCK_M)
    hand_over = (p_ring, ds_ring)
    inputs = (k_ring, v_ring, q_ring, do_ring)
    rings = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring)
    scorer = (
        work_ring,
        (q_segment_ids_ptr, kv_segment_ids_ptr, q_positions_ptr, kv_positions_ptr, ranges_ptr, q_offset, dk_ptr),
        (
            stride_dkb,
            stride_dkh,
            stride_q_segment_ids_0,
            stride_q_segment_ids_1,
            stride_kv_segment_ids_0,
            stride_kv_segment_ids_1,
            stride_q_positions_b,
            stride_kv_positions_b,
            stride_ranges_b,
        ),
        (q_segment_ids_size_1, kv_segment_ids_size_1, q_len, kv_len, num_heads, group_size, scale, padding_id, batch),
    )
    summer = (
        work_ring,
        (ranges_ptr, dv_ptr),
        (stride_dvb, stride_dvh, stride_ranges_b),
        (q_len, kv_len, num_heads, group_size, batch),
    )
    producer = (work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, num_heads, group_size, batch, work_counter_ptr)
    gl.warp_specialize(
        [
            (
                score,
                (
                    inputs,
                    hand_over,
                    scorer,
                    stride_dks,
                    Q_OFFSET_PER_BATCH,
                    POSITIONS,
                    HARDWARE_TANH,
                    RAGGED,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_D,
                    BLOCK_M,
                    BLOCK_N,
                    WITH_DQ,
                ),
            ),
            (
                accumulate,
                (
                    inputs,
                    hand_over,
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
            (produce, (rings, producer, 1, HEAD_GROUPS, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 1],
        # The registers of each thread. The first consumer gets what is left, as much as the second.
        worker_num_regs=[240, 24],
    )
