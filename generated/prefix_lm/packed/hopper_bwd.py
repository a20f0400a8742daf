# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: hopper/bwd.py.jinja
# hash: 2b07c31fcaddda32
"""Gradients of `prefix_lm`, packed sequences on Hopper with respect to k and v, and with WITH_DQ to q.

    keep        q_idx >= kv_idx or kv_idx < length
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    do          [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator
    delta       [Hq, total_q]  fp32, sum(o * do) - dlse
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    dk          [total_k, Hkv, D]
    dv          [total_k, Hkv, Dv]

`lse_ptr` and `delta_ptr` are not the `lse` and `delta` above, but what `prefix_lm_packed_hopper_delta` makes of
them: `row_lse` and `row_delta`, negative and padded to whole blocks of rows. They are added to the products of a
block: `row_lse`, in units of the product, to `qk` (`row_terms`), `row_delta` to `dp` (`issue_products`). The
gradient of q is added to `dq_sums`, [Hq, blocks, 2, lines, 32], fp32, zeros at first, in the order of
`in_fragments` and before the factor `scale`.

A program computes one block of keys of one key head after the other, for all query heads that share it. If HEAD_GROUPS
is more than 1, these are split into that many groups, and a program computes the block for one of them. `dk` and `dv`
are then float32 and have a head for each group: `Hkv * HEAD_GROUPS` in place of Hkv.

A warp, `produce`, copies the keys, and the rows of each block of queries, to shared memory (TMA). The gradient of q is
added to `dq_sums` in any order, so that its last bits may differ between equal calls. `templates/hopper/README.md` has
a picture.

For up to 128 columns of q and v, two warpgroups run `consume`. Each owns half of the keys, and sums their dk and dv
over the query heads. With WITH_DQ the warpgroups exchange ds through shared memory: each step also multiplies ds of the
block before by the keys, and a separate warp, `add_dq`, adds the product to `dq_sums`.

For more columns of q or v there is `prefix_lm_packed_hopper_bwd_wide`: the accumulator of dk or of dv then fills
half of a warpgroup's registers, so each of the two warpgroups holds one of them. `score` computes probabilities
and ds of each block of queries, and sums dk. It hands probabilities and ds through shared memory to `accumulate`,
which sums dv, and with WITH_DQ multiplies ds by the keys and adds the product to `dq_sums`.

Sequences have any lengths, so work is scheduled dynamically: a producer warp takes the next work item from a
counter in memory. Tiles are clipped at the ends of a sequence, so that none holds rows of another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.gl import (
    LOG2E,
    Ring,
    SequenceRows,
    as_operand,
    at_columns,
    begin_sums,
    columns_before,
    describe_packed_rows,
    make_barriers,
    make_ring,
    make_work_ring,
    no_sums,
    product_layout,
)
from ..._runtime.device.gl_backward import (
    describe_parts,
    describe_vector,
    locate_keys,
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
    send_packed_rows,
)
from ..._runtime.device.gl_versions import concat


@gluon.jit
def visited_rows(kv_len, length, q_len, q_shift, start_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of query rows see the keys from `start_n` on, with a mask and without, and where they begin."""
    kv_first = start_n
    kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = (
        gl.minimum(gl.maximum(kv_first - q_shift, 0), gl.where(kv_first < length, 0, q_len)) // BLOCK_M * BLOCK_M
    )
    # Blocks from full_begin to full_end need no mask.
    full_begin = (
        gl.cdiv(gl.maximum(gl.minimum(kv_last - q_shift, gl.where(kv_last < length, 0, q_len)), row_begin), BLOCK_M)
        * BLOCK_M
    )
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
    V_PARTS: gl.constexpr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    _q_desc, k_desc, v_desc, _do_desc, _lse_desc, _delta_desc, k_ring, v_ring, _q_ring, _do_ring = rings
    work_ring, pointers, numbers = arguments
    block_seqs_ptr, q_offset, work_counter_ptr = pointers
    length, q_total, num_heads, group_size, num_seqs = numbers
    num_head_groups = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, _first_entry, q_start, q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        # The first block of the sequence in lse and delta, whose sequences are padded to whole blocks of rows.
        row_first = q_start // BLOCK_M + b
        hkv = head_group // HEAD_GROUPS
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        q_end, k_end = q_start.to(gl.int32) + q_len, kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, hkv.to(gl.int32))
        k_ring.fill(k_desc, kv_rows, start_n, 0, k_lap)
        for part in gl.static_range(V_PARTS):
            v_ring.fill(v_desc, kv_rows, start_n + part * (BLOCK_N // V_PARTS), part, k_lap)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, length, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                head_row = h * num_row_blocks + row_first
                send_packed_rows(rings, head_row, q_end, q_len, h, start_m, q_turn)
                q_turn += 1
            for nth in range(num_full):
                row_turn = nth
                if V_PARTS == 1:
                    # If heads share keys, the wide backward takes the last rows first: all programs visit them, and
                    # find them in the cache.
                    row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                head_row = h * num_row_blocks + row_first
                send_packed_rows(rings, head_row, q_end, q_len, h, start_m, q_turn)
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
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Compute dk and dv of half of the keys of each work item, and half of its contribution to each block of dq."""
    k_ring, v_ring, _q_ring, _do_ring = rings
    work_ring, pointers, strides, numbers = arguments
    block_seqs_ptr, q_offset, dk_ptr, dv_ptr = pointers
    stride_dkh, stride_dvh = strides
    length, num_heads, group_size, scale = numbers
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    v_tile = v_ring.tile(PART)  # [KEYS, BLOCK_DV]
    if WITH_DQ:
        begin_exchange(exchange, PART)
    qk_scale = scale * LOG2E
    num_head_groups = num_heads // group_size
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, _first_entry, _q_start, q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + PART * KEYS + gl.arange(0, KEYS, layout=KEY)
        dk = no_sums(BLOCK_D, HEAD_DIM)
        dv = no_sums(BLOCK_DV, HEAD_DIM_V)
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(PART), k_lap)
        first_turn = q_turn
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, length, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                qk, dp, q_tile, do_tile = begin_block(rings, q_turn, None, PART, SCORES, True, HEAD_DIM, HEAD_DIM_V)
                # Always true. Without the branch this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    run_first = gl.where(kv_idx < length, -1073741824, kv_idx) - q_shift
                    run_first = gl.where(kv_idx < kv_len, run_first, start_m + BLOCK_M)
                    run_bits = ~columns_before(run_first - start_m, ROW, BLOCK_M)
                    keep = at_columns(run_bits, ROW, BLOCK_M)
                    qk = gl.where(keep, qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                dv = begin_sums(as_operand(p.to(DTYPE), dv[0]), do_tile, dv)
                dp = warpgroup_mma_wait(len(dv), deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE), (dk, dv), q_tile, rings, exchange, q_turn, first_turn, WITH_DQ, HEAD_DIM, PART
                )
                q_turn += 1
            for _ in range(num_full):
                qk, dp, q_tile, do_tile = begin_block(rings, q_turn, None, PART, SCORES, True, HEAD_DIM, HEAD_DIM_V)
                if start_n + BLOCK_N > kv_len:
                    qk = gl.where((kv_idx < kv_len)[:, None], qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                dv = begin_sums(as_operand(p.to(DTYPE), dv[0]), do_tile, dv)
                dp = warpgroup_mma_wait(len(dv), deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE), (dk, dv), q_tile, rings, exchange, q_turn, first_turn, WITH_DQ, HEAD_DIM, PART
                )
                q_turn += 1

        if WITH_DQ:
            drain_dq(k_ring, exchange, q_turn, first_turn, HEAD_DIM, BLOCK_M, PART)
        mbarrier.arrive(k_ring.empty.index(0), count=1)
        own_start = start_n + PART * KEYS
        # Layouts are converted through the shared memory of v, which is not read any more.
        dv_start = dv_ptr + kv_start * stride_dvs + head_group * stride_dvh
        store_through(dv_start, dv[0], v_tile, own_start, kv_len, stride_dvs, HEAD_DIM_V)
        store_second(dv_start, dv, 1.0, own_start, kv_len, stride_dvs, HEAD_DIM_V)
        dk_start = dk_ptr + kv_start * stride_dks + head_group * stride_dkh
        store_through(dk_start, dk[0] * scale, v_tile, own_start, kv_len, stride_dks, HEAD_DIM)
        store_second(dk_start, dk, scale, own_start, kv_len, stride_dks, HEAD_DIM)
        fence_async_shared()
        mbarrier.arrive(v_ring.empty.index(PART), count=1)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def add_dq(
    dq_descs, dq_ring, arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Add what each block of keys contributes to dq to memory."""
    work_ring, block_seqs_ptr, q_offset, length, q_total, num_heads, group_size, num_seqs = arguments
    num_head_groups = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn = 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, _first_entry, q_start, q_len, _kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        # The first block of the sequence in lse and delta, whose sequences are padded to whole blocks of rows.
        row_first = q_start // BLOCK_M + b
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, length, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                add_tiles(dq_descs, dq_ring, row_block, q_turn)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                add_tiles(dq_descs, dq_ring, row_block, q_turn)
                q_turn += 1
        item = work_ring.receive(work_turn, 1)[0]
        work_turn += 1


@gluon.jit(do_not_specialize=["q_offset", "length", "q_total", "num_heads", "group_size", "num_seqs"])
def prefix_lm_packed_hopper_bwd(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    q_offset,
    length,
    dk_ptr,
    dv_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dkh,
    stride_dks: gl.constexpr,
    stride_dvh,
    stride_dvs: gl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    dq_sums_ptr,
    num_seqs,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    SCALARS_LOADED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    length = gl.load(length) if SCALARS_LOADED else length
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    kv_heads = num_heads // (group_size * HEAD_GROUPS)
    # Each sequence is padded to whole blocks of rows: this is the largest possible number of rows.
    num_rows = num_heads * (q_total // BLOCK_M + num_seqs) * BLOCK_M
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N // 2, BLOCK_DV)
    do_desc = describe_packed_rows(do_ptr, num_heads, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 2, 1, 1)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    work_ring = make_work_ring(1, 3 if WITH_DQ else 2)
    inputs = (k_ring, v_ring, q_ring, do_ring)
    rings = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring)
    producer = (
        work_ring,
        (block_seqs_ptr, q_offset, work_counter_ptr),
        (length, q_total, num_heads, group_size, num_seqs),
    )
    consumer = (
        work_ring,
        (block_seqs_ptr, q_offset, dk_ptr, dv_ptr),
        (stride_dkh, stride_dvh),
        (length, num_heads, group_size, scale),
    )
    CONSTANTS: gl.constexpr = (
        stride_dks,
        stride_dvs,
        Q_OFFSET_PER_BATCH,
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
        adder = (work_ring, block_seqs_ptr, q_offset, length, q_total, num_heads, group_size, num_seqs)
        gl.warp_specialize(
            [
                (consume, concat((inputs, exchange, consumer, 0), CONSTANTS)),
                (consume, concat((inputs, exchange, consumer, 1), CONSTANTS)),
                (produce, (rings, producer, 2, HEAD_GROUPS, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
                (add_dq, (dq_descs, dq_ring, adder, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
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
                (produce, (rings, producer, 2, HEAD_GROUPS, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
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
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Compute probabilities, ds and dk of each work item."""
    k_ring, v_ring, _q_ring, _do_ring = rings
    p_ring = hand_over[0]
    work_ring, block_seqs_ptr, q_offset, length, dk_ptr, stride_dkh, num_heads, group_size, scale = arguments
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUMS: gl.constexpr = product_layout(BLOCK_D)
    qk_scale = scale * LOG2E
    num_head_groups = num_heads // group_size
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, _first_entry, _q_start, q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + gl.arange(0, KEYS, layout=KEY)
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, SUMS)  # [KEYS, BLOCK_D]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(0), k_lap)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, length, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                qk, dp, q_tile, _do_tile = begin_block(rings, q_turn, None, 0, SCORES, True, HEAD_DIM, HEAD_DIM_V)
                # Always true. Without the branch this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    run_first = gl.where(kv_idx < length, -1073741824, kv_idx) - q_shift
                    run_first = gl.where(kv_idx < kv_len, run_first, start_m + BLOCK_M)
                    run_bits = ~columns_before(run_first - start_m, ROW, BLOCK_M)
                    keep = at_columns(run_bits, ROW, BLOCK_M)
                    qk = gl.where(keep, qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                p_ring.put(p.to(DTYPE), q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk = end_wide_block(ds.to(DTYPE), (dk,), q_tile, rings, hand_over, q_turn, WITH_DQ)
                q_turn += 1
            for _ in range(num_full):
                qk, dp, q_tile, _do_tile = begin_block(rings, q_turn, None, 0, SCORES, True, HEAD_DIM, HEAD_DIM_V)
                if start_n + BLOCK_N > kv_len:
                    qk = gl.where((kv_idx < kv_len)[:, None], qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                p_ring.put(p.to(DTYPE), q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk = end_wide_block(ds.to(DTYPE), (dk,), q_tile, rings, hand_over, q_turn, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dk_start = dk_ptr + kv_start * stride_dks + head_group * stride_dkh
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
    Q_OFFSET_PER_BATCH: gl.constexpr,
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
    block_seqs_ptr, q_offset, dv_ptr = pointers
    (stride_dvh,) = strides
    length, q_total, num_heads, group_size, num_seqs = numbers
    KEYS: gl.constexpr = BLOCK_N
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    num_head_groups = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn, k_lap = 0, 0
    # A work item is a block of keys and a group of query heads. After its first, a program takes the next free one.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_head_groups
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        b, _first_entry, q_start, q_len, kv_start, kv_len, head_group, start_n = locate_keys(
            block_seqs_ptr, item, num_head_groups, BLOCK_N
        )
        # The first block of the sequence in lse and delta, whose sequences are padded to whole blocks of rows.
        row_first = q_start // BLOCK_M + b
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, SUMS)  # [KEYS, BLOCK_DV]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(0), k_lap)
        row_begin, full_begin, gap, num_partial, num_full = visited_rows(
            kv_len, length, q_len, q_shift, start_n, BLOCK_M, BLOCK_N
        )
        for member in range(group_size):
            h = head_group * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, rings, hand_over, q_turn, HEAD_DIM, WITH_DQ)
                q_turn += 1
            for nth in range(num_full):
                # If heads share keys, the last rows come first: all programs visit them, and find them in the cache.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(dv, dq_part, rings, hand_over, q_turn, HEAD_DIM, WITH_DQ)
                q_turn += 1

        mbarrier.arrive(k_ring.empty.index(0), count=1)
        mbarrier.arrive(v_ring.empty.index(0), count=1)
        dv_start = dv_ptr + kv_start * stride_dvs + head_group * stride_dvh
        store_tile(dv_start, dv, start_n, kv_len, stride_dvs, HEAD_DIM_V, SUMS)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit(do_not_specialize=["q_offset", "length", "q_total", "num_heads", "group_size", "num_seqs"])
def prefix_lm_packed_hopper_bwd_wide(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    q_offset,
    length,
    dk_ptr,
    dv_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_doh,
    stride_dos: gl.constexpr,
    stride_dkh,
    stride_dks: gl.constexpr,
    stride_dvh,
    stride_dvs: gl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    dq_sums_ptr,
    num_seqs,
    work_counter_ptr,
    HEAD_GROUPS: gl.constexpr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    SCALARS_LOADED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    length = gl.load(length) if SCALARS_LOADED else length
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    kv_heads = num_heads // (group_size * HEAD_GROUPS)
    # Each sequence is padded to whole blocks of rows: this is the largest possible number of rows.
    num_rows = num_heads * (q_total // BLOCK_M + num_seqs) * BLOCK_M
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_packed_rows(v_ptr, kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, BLOCK_DV)
    do_desc = describe_packed_rows(do_ptr, num_heads, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 1, 1, 2)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    work_ring = make_work_ring(1, 2)
    p_ring, ds_ring = make_hand_over(DTYPE, BLOCK_N, BLOCK_M), make_hand_over(DTYPE, BLOCK_N, BLOCK_M)
    hand_over = (p_ring, ds_ring)
    inputs = (k_ring, v_ring, q_ring, do_ring)
    rings = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring)
    scorer = (work_ring, block_seqs_ptr, q_offset, length, dk_ptr, stride_dkh, num_heads, group_size, scale)
    summer = (
        work_ring,
        (block_seqs_ptr, q_offset, dv_ptr),
        (stride_dvh,),
        (length, q_total, num_heads, group_size, num_seqs),
    )
    producer = (
        work_ring,
        (block_seqs_ptr, q_offset, work_counter_ptr),
        (length, q_total, num_heads, group_size, num_seqs),
    )
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
                    Q_OFFSET_PER_BATCH,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                    WITH_DQ,
                ),
            ),
            (produce, (rings, producer, 1, HEAD_GROUPS, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 1],
        # The registers of each thread. The first consumer gets what is left, as much as the second.
        worker_num_regs=[240, 24],
    )
