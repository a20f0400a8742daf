# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: hopper/bwd.py.jinja
# hash: c48ecd80151c7bde
"""Gradients of `window`, packed sequences on Hopper with respect to k and v, and with WITH_DQ to q.

    keep        q_idx >= kv_idx and q_idx - kv_idx < size
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

lse and delta come from `window_packed_hopper_delta`, padded to whole blocks of rows. The gradient of q is added
to `dq_sums`, [Hq, blocks, 2, lines, 32], fp32, zeros at first, in the order of `in_fragments` and without its
factor.

A program takes one block of keys of one key head after the other. Each of two warpgroups, `consume`, owns half of
the keys, and sums their dk and dv over all query heads that share the key head. A warp, `produce`, copies the keys,
and the rows of each block of queries, to shared memory (TMA). With WITH_DQ each step also multiplies ds of the
block before, which the warpgroups exchange through shared memory, by the keys; a warp of its own, `add_dq`, adds
that to `dq_sums`, in any order, so that equal inputs may give other last bits. `templates/hopper/README.md` has a
picture.

Sequences have any lengths, so work is scheduled dynamically: a producer warp takes the next work item from a
counter in memory. Tiles are clipped at the ends of a sequence, so that none holds rows of another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..._runtime.device.gl import (
    LOG2E,
    Ring,
    SequenceRows,
    at_columns,
    columns_before,
    describe_packed_rows,
    make_barriers,
    make_ring,
    make_work_ring,
    product_layout,
)
from ..._runtime.device.gl_backward import (
    begin_with,
    describe_lines,
    describe_vector,
    in_fragments,
    make_exchange,
    make_row_ring,
    store_through,
)
from ..._runtime.device.gl_versions import async_add


@gluon.jit
def produce(rings, arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each work item, and the rows of each block of queries that sees them."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring = rings
    work_ring, block_seqs_ptr, q_offset, size, q_total, num_heads, group_size, num_seqs, work_counter_ptr = arguments
    num_kv_heads = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn, k_lap = 0, 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    num_items = gl.load(block_seqs_ptr + 6) * num_kv_heads
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        record = block_seqs_ptr + item // num_kv_heads * 8
        b = gl.load(record).to(gl.int64)
        first_entry = gl.load(record + 1)
        q_start = gl.load(record + 2).to(gl.int64)
        q_len = gl.load(record + 3)
        kv_start = gl.load(record + 4).to(gl.int64)
        kv_len = gl.load(record + 5)
        sequence_item = item - first_entry * num_kv_heads
        num_key_blocks = gl.cdiv(kv_len, BLOCK_N)
        hkv = (sequence_item // num_key_blocks).to(gl.int64)
        start_n = (sequence_item % num_key_blocks) * BLOCK_N
        # Each sequence has whole blocks of rows: where `window_packed_hopper_delta` puts them.
        row_first = q_start // BLOCK_M + b
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        q_end, k_end = q_start.to(gl.int32) + q_len, kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, hkv.to(gl.int32))
        k_ring.fill(k_desc, kv_rows, start_n, 0, k_lap)
        for part in gl.static_range(2):
            v_ring.fill(v_desc, kv_rows, start_n + part * (BLOCK_N // 2), part, k_lap)
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.minimum(kv_last + size - q_shift, q_len)
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = gl.minimum(kv_first + size - q_shift, q_len) // BLOCK_M * BLOCK_M
        full_end = gl.maximum(full_end, full_begin)
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for member in range(group_size):
            h = hkv * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                first = ((h * num_row_blocks + row_first) * BLOCK_M + start_m).to(gl.int32)
                rows = SequenceRows(q_end, q_len, h.to(gl.int32))
                q_ring.send(q_desc, lse_desc, rows, start_m, first, q_turn)
                do_ring.send(do_desc, delta_desc, rows, start_m, first, q_turn)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                first = ((h * num_row_blocks + row_first) * BLOCK_M + start_m).to(gl.int32)
                rows = SequenceRows(q_end, q_len, h.to(gl.int32))
                q_ring.send(q_desc, lse_desc, rows, start_m, first, q_turn)
                do_ring.send(do_desc, delta_desc, rows, start_m, first, q_turn)
                q_turn += 1
        k_lap ^= 1
        item = work_ring.fetch(work_counter_ptr, work_turn)
        work_turn += 1


@gluon.jit
def consume(
    rings,
    exchange,
    arguments,
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
    PART: gl.constexpr,
):
    """dk and dv of half of the keys of each work item, and half of what each block of rows adds to dq."""
    k_ring, v_ring, q_ring, do_ring = rings
    work_ring, block_seqs_ptr, q_offset, size, dk_ptr, dv_ptr, stride_dkh, stride_dvh, num_heads, group_size, scale = (
        arguments
    )
    DTYPE: gl.constexpr = k_ring.tiles.dtype
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    K_SUMS: gl.constexpr = product_layout(BLOCK_D)
    V_SUMS: gl.constexpr = product_layout(BLOCK_DV)
    K_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_SUMS, k_width=2)
    V_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_SUMS, k_width=2)
    k_block = k_ring.tile(0)  # [BLOCK_N, BLOCK_D]
    k_tile = k_block.slice(PART * KEYS, KEYS)  # [KEYS, BLOCK_D]
    v_tile = v_ring.tile(PART)  # [KEYS, BLOCK_DV]
    # A warpgroup's part of dq has 64 rows: half of the block's, or all of 64 and half of the columns.
    k_part = k_block.slice(PART * (BLOCK_D // 2), BLOCK_D // 2, dim=1) if BLOCK_M == 64 else k_block
    if WITH_DQ:
        ds_ring, dq_ring = exchange
        # Pipeline prologue: the block before the first has ds = 0.
        ds_ring.tiles.index(0).slice(PART * KEYS, KEYS).store(gl.zeros([KEYS, BLOCK_M], DTYPE, SCORES))
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(0), count=1)
    qk_scale = scale * LOG2E
    num_kv_heads = num_heads // group_size
    q_turn, k_lap = 0, 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    num_items = gl.load(block_seqs_ptr + 6) * num_kv_heads
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        record = block_seqs_ptr + item // num_kv_heads * 8
        b = gl.load(record).to(gl.int64)
        first_entry = gl.load(record + 1)
        q_len = gl.load(record + 3)
        kv_start = gl.load(record + 4).to(gl.int64)
        kv_len = gl.load(record + 5)
        sequence_item = item - first_entry * num_kv_heads
        num_key_blocks = gl.cdiv(kv_len, BLOCK_N)
        hkv = (sequence_item // num_key_blocks).to(gl.int64)
        start_n = (sequence_item % num_key_blocks) * BLOCK_N
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + PART * KEYS + gl.arange(0, KEYS, layout=KEY)
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, K_SUMS)  # [KEYS, BLOCK_D]
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, V_SUMS)  # [KEYS, BLOCK_DV]
        mbarrier.wait(k_ring.full.index(0), k_lap)
        mbarrier.wait(v_ring.full.index(PART), k_lap)
        first_turn = q_turn
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.minimum(kv_last + size - q_shift, q_len)
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = gl.minimum(kv_first + size - q_shift, q_len) // BLOCK_M * BLOCK_M
        full_end = gl.maximum(full_end, full_begin)
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                qk, dp, q_tile, do_tile = begin_block(k_tile, v_tile, q_ring, do_ring, q_turn, SCORES)
                # Always true: otherwise this is computed ahead of the products and kept in registers.
                if start_m < q_len:
                    run_first = kv_idx - q_shift
                    run_end = size + kv_idx - q_shift
                    run_end = gl.where(kv_idx < kv_len, run_end, start_m)
                    run_bits = columns_before(run_end - start_m, ROW, BLOCK_M) & ~columns_before(
                        run_first - start_m, ROW, BLOCK_M
                    )
                    keep = at_columns(run_bits, ROW, BLOCK_M)
                    qk = gl.where(keep, qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), V_WEIGHTS), do_tile, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE),
                    dk,
                    dv,
                    k_part,
                    q_tile,
                    exchange,
                    q_ring,
                    do_ring,
                    q_turn,
                    q_turn > first_turn,
                    K_WEIGHTS,
                    BLOCK_M,
                    BLOCK_D,
                    WITH_DQ,
                    PART,
                )
                q_turn += 1
            for _ in range(num_full):
                qk, dp, q_tile, do_tile = begin_block(k_tile, v_tile, q_ring, do_ring, q_turn, SCORES)
                if start_n + BLOCK_N > kv_len:
                    qk = gl.where((kv_idx < kv_len)[:, None], qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)  # [KEYS, BLOCK_M]
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), V_WEIGHTS), do_tile, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = p * dp  # [KEYS, BLOCK_M]
                dk, dv = end_block(
                    ds.to(DTYPE),
                    dk,
                    dv,
                    k_part,
                    q_tile,
                    exchange,
                    q_ring,
                    do_ring,
                    q_turn,
                    q_turn > first_turn,
                    K_WEIGHTS,
                    BLOCK_M,
                    BLOCK_D,
                    WITH_DQ,
                    PART,
                )
                q_turn += 1

        if WITH_DQ:
            # Pipeline epilogue: dq of the last block.
            dq = warpgroup_mma_wait(0, deps=(begin_dq(k_part, ds_ring, q_turn, BLOCK_M, BLOCK_D, PART),))
            if q_turn > first_turn:
                store_dq(dq, dq_ring, q_turn - 1, PART)
                fence_async_shared()
                mbarrier.arrive(dq_ring.full.index(PART), count=1)
        mbarrier.arrive(k_ring.empty.index(0), count=1)
        own_start = start_n + PART * KEYS
        # Through the shared memory of v, whose last reader this was.
        store_through(
            dv_ptr + kv_start * stride_dvs + hkv * stride_dvh,
            dv.to(DTYPE),
            v_tile,
            own_start,
            kv_len,
            stride_dvs,
            HEAD_DIM_V,
            V_SUMS,
        )
        store_through(
            dk_ptr + kv_start * stride_dks + hkv * stride_dkh,
            (dk * scale).to(DTYPE),
            v_tile,
            own_start,
            kv_len,
            stride_dks,
            HEAD_DIM,
            K_SUMS,
        )
        fence_async_shared()
        mbarrier.arrive(v_ring.empty.index(PART), count=1)
        k_lap ^= 1
        item = work_ring.receive(work_turn, 4)[0]
        work_turn += 1


@gluon.jit
def add_dq(
    dq_desc,
    dq_ring,
    arguments,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Add what each block of keys contributes to dq to memory."""
    work_ring, block_seqs_ptr, q_offset, size, q_total, num_heads, group_size, num_seqs = arguments
    # Of the fp32 tiles as they lie in shared memory: a line is what the 32 banks hold.
    LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
    num_kv_heads = num_heads // group_size
    num_row_blocks = q_total // BLOCK_M + num_seqs
    q_turn = 0
    # A work item is a block of keys of one key head. After its first, a program takes the next that no other has taken.
    num_items = gl.load(block_seqs_ptr + 6) * num_kv_heads
    item, work_turn = gl.program_id(0), 0
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        record = block_seqs_ptr + item // num_kv_heads * 8
        b = gl.load(record).to(gl.int64)
        first_entry = gl.load(record + 1)
        q_start = gl.load(record + 2).to(gl.int64)
        q_len = gl.load(record + 3)
        kv_len = gl.load(record + 5)
        sequence_item = item - first_entry * num_kv_heads
        num_key_blocks = gl.cdiv(kv_len, BLOCK_N)
        hkv = (sequence_item // num_key_blocks).to(gl.int64)
        start_n = (sequence_item % num_key_blocks) * BLOCK_N
        # Each sequence has whole blocks of rows: where `window_packed_hopper_delta` puts them.
        row_first = q_start // BLOCK_M + b
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.minimum(kv_last + size - q_shift, q_len)
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = gl.minimum(kv_first + size - q_shift, q_len) // BLOCK_M * BLOCK_M
        full_end = gl.maximum(full_end, full_begin)
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M
        for member in range(group_size):
            h = hkv * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                for part in gl.static_range(2):
                    mbarrier.wait(dq_ring.full.index(part), q_turn & 1)
                    async_add(dq_desc, [((2 * row_block + part) * LINES).to(gl.int32), 0], dq_ring.tiles.index(part))
                    tma.store_wait(0)
                    mbarrier.arrive(dq_ring.empty.index(part), count=1)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                row_block = h * num_row_blocks + row_first + start_m // BLOCK_M
                for part in gl.static_range(2):
                    mbarrier.wait(dq_ring.full.index(part), q_turn & 1)
                    async_add(dq_desc, [((2 * row_block + part) * LINES).to(gl.int32), 0], dq_ring.tiles.index(part))
                    tma.store_wait(0)
                    mbarrier.arrive(dq_ring.empty.index(part), count=1)
                q_turn += 1
        item = work_ring.receive(work_turn, 1)[0]
        work_turn += 1


@gluon.jit
def begin_block(
    k_tile,
    v_tile,
    q_ring,
    do_ring,
    turn,
    SCORES: gl.constexpr,
):
    """Issue `k q^T - lse / scale` and `v do^T - delta` of a block, [KEYS, BLOCK_M], and wait for the first.

    Both differences cost nothing: accumulators begin with what is subtracted.
    """
    KEYS: gl.constexpr = k_tile.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage = turn % q_ring.stages
    q_tile = q_ring.receive(turn)  # [BLOCK_M, BLOCK_D]
    do_tile = do_ring.receive(turn)  # [BLOCK_M, BLOCK_DV]
    qk = begin_with(q_ring.vectors.index(stage).load(ROW), KEYS, SCORES)
    dp = begin_with(do_ring.vectors.index(stage).load(ROW), KEYS, SCORES)
    qk = warpgroup_mma(k_tile, q_tile.permute((1, 0)), qk, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), dp, is_async=True)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    return qk, dp, q_tile, do_tile


@gluon.jit
def begin_dq(k_part, ds_ring, turn, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, PART: gl.constexpr):
    """Issue a warpgroup's part of `ds k`, of tile `turn` of ds, which is block `turn - 1`."""
    COLS: gl.constexpr = BLOCK_D * BLOCK_M // 128
    mbarrier.wait(ds_ring.full.index(turn & 1), (turn >> 1) & 1)
    ds_tile = ds_ring.tiles.index(turn & 1)  # [BLOCK_N, BLOCK_M]
    ds_part = ds_tile if BLOCK_M == 64 else ds_tile.slice(PART * 64, 64, dim=1)  # [BLOCK_N, 64]
    none = gl.zeros([64, COLS], gl.float32, product_layout(COLS))
    return warpgroup_mma(ds_part.permute((1, 0)), k_part, none, use_acc=False, is_async=True)


@gluon.jit
def store_dq(dq, dq_ring, turn, PART: gl.constexpr):
    """Hand a part of dq to the warp that adds it."""
    mbarrier.wait(dq_ring.empty.index(PART), (turn & 1) ^ 1)
    dq_ring.tiles.index(PART).store(in_fragments(dq, dq.shape[1]))


@gluon.jit
def end_block(
    ds,
    dk,
    dv,
    k_part,
    q_tile,
    exchange,
    q_ring,
    do_ring,
    turn,
    has_before,
    K_WEIGHTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WITH_DQ: gl.constexpr,
    PART: gl.constexpr,
):
    """Add block `turn` to dk, and with WITH_DQ the block before to dq.

    A warpgroup then need not wait for the other's ds of the same block, and one takes exponentials while the other
    multiplies. The first block of rows has none before it: its product is of no use, and repeats the last one of the
    block of keys before.
    """
    stage = turn % q_ring.stages
    ds_weights = gl.convert_layout(ds, K_WEIGHTS)
    if WITH_DQ:
        KEYS: gl.constexpr = ds.shape[0]
        ds_ring, dq_ring = exchange
        next_stage, lap = (turn + 1) & 1, (turn + 1) >> 1
        mbarrier.wait(ds_ring.empty.index(next_stage), (lap & 1) ^ 1)
        ds_ring.tiles.index(next_stage).slice(PART * KEYS, KEYS).store(ds)
        dq = begin_dq(k_part, ds_ring, turn, BLOCK_M, BLOCK_D, PART)
        dk = warpgroup_mma(ds_weights, q_tile, dk, is_async=True)
        # The fence waits for the stores: here that happens beside the products.
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(next_stage), count=1)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        do_ring.release(stage)
        mbarrier.arrive(ds_ring.empty.index(turn & 1), count=1)
        if has_before:
            store_dq(dq, dq_ring, turn - 1, PART)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        q_ring.release(stage)
        fence_async_shared()
        if has_before:
            mbarrier.arrive(dq_ring.full.index(PART), count=1)
    else:
        dk = warpgroup_mma(ds_weights, q_tile, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        do_ring.release(stage)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        q_ring.release(stage)
    return dk, dv


@gluon.jit(do_not_specialize=["q_offset", "size", "q_total", "num_heads", "group_size", "num_seqs"])
def window_packed_hopper_bwd(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    q_offset,
    size,
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
    size = gl.load(size) if SCALARS_LOADED else size
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    num_kv_heads = num_heads // group_size
    # Each sequence has whole blocks of rows: so many at most.
    num_rows = num_heads * (q_total // BLOCK_M + num_seqs) * BLOCK_M
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_packed_rows(k_ptr, num_kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_packed_rows(v_ptr, num_kv_heads, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N // 2, BLOCK_DV)
    do_desc = describe_packed_rows(do_ptr, num_heads, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_ring(k_desc, 1, 1, 2)
    v_ring = make_ring(v_desc, 2, 1, 1)
    q_ring = make_row_ring(q_desc, lse_desc, STAGES, BLOCK_M)
    do_ring = make_row_ring(do_desc, delta_desc, STAGES, BLOCK_M)
    work_ring = make_work_ring(1, 3 if WITH_DQ else 2)
    rings = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_ring, v_ring, q_ring, do_ring)
    producer = (work_ring, block_seqs_ptr, q_offset, size, q_total, num_heads, group_size, num_seqs, work_counter_ptr)
    consumer = (
        work_ring,
        block_seqs_ptr,
        q_offset,
        size,
        dk_ptr,
        dv_ptr,
        stride_dkh,
        stride_dvh,
        num_heads,
        group_size,
        scale,
    )
    if WITH_DQ:
        LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
        dq_desc = describe_lines(dq_sums_ptr, num_rows * (BLOCK_D // 32), LINES)
        ds_ring = make_exchange(DTYPE, BLOCK_N, BLOCK_M)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, LINES, 32], dq_desc.layout)
        dq_ring = Ring(dq_tiles, make_barriers(2, 1), make_barriers(2, 1), 2)
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        (k_ring, v_ring, q_ring, do_ring),
                        (ds_ring, dq_ring),
                        consumer,
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
                        0,
                    ),
                ),
                (
                    consume,
                    (
                        (k_ring, v_ring, q_ring, do_ring),
                        (ds_ring, dq_ring),
                        consumer,
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
                        1,
                    ),
                ),
                (produce, (rings, producer, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
                (
                    add_dq,
                    (
                        dq_desc,
                        dq_ring,
                        (work_ring, block_seqs_ptr, q_offset, size, q_total, num_heads, group_size, num_seqs),
                        Q_OFFSET_PER_BATCH,
                        BLOCK_D,
                        BLOCK_M,
                        BLOCK_N,
                    ),
                ),
            ],
            worker_num_warps=[4, 1, 1],
            # The registers of each thread. The first consumer gets what is left, as much as the second.
            worker_num_regs=[240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (
                        (k_ring, v_ring, q_ring, do_ring),
                        None,
                        consumer,
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
                        0,
                    ),
                ),
                (
                    consume,
                    (
                        (k_ring, v_ring, q_ring, do_ring),
                        None,
                        consumer,
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
                        1,
                    ),
                ),
                (produce, (rings, producer, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
