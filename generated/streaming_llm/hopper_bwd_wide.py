# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: streaming_llm: {mask: causal and (window(size) or prefix(sinks)), scalars: {size: {type: int, min: 1,
#     example: 256}, sinks: {type: int, min: 0, example: 4}}}
# template: hopper/bwd_wide.py.jinja
# hash: d9268a42687d0809
"""Gradients of `streaming_llm` on Hopper, as in `hopper_bwd`, where q or v have more than 128 columns.

    keep   q_idx >= kv_idx and (q_idx - kv_idx < size or kv_idx < sinks)
    q      [B, Hq, Sq, D]
    k      [B, Hkv, Skv, D]
    v      [B, Hkv, Skv, Dv]
    do     [B, Hq, Sq, Dv]
    lse    [B, Hq, Sq]  fp32, log of the softmax denominator
    delta  [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dk     [B, Hkv, Skv, D]
    dv     [B, Hkv, Skv, Dv]

Of lse and delta it takes what `streaming_llm_hopper_delta` leaves, padded to whole blocks of rows. The gradient
of q it adds to `dq_sums`, [B, Hq, blocks, 2, lines, 32], fp32, zeros at first, in the order of `in_fragments` and
without its factor.

A program takes one block of keys of one key head after the other. Sums of one of their gradients are half of a
warpgroup's registers, so that each of two has one. `score_tiles` computes probabilities and ds of each block of
queries, and keeps the sums of dk, whose weights are in its registers. Through shared memory it hands both over to
`sum_tiles`, which keeps the sums of dv, and with WITH_DQ multiplies ds by the keys and adds the product to `dq_sums`:
in any order, so that equal inputs may give other last bits. A warp, `produce_tiles`, copies the keys, and the rows of
each block of queries, to shared memory (TMA). Tiles of scores are transposed, keys by queries.

A ring is a tuple of tiles, their vectors of rows, and the barriers `full`, which a copy completes, and `empty`, on
which consumers arrive; of what is handed over it has no vectors.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._runtime.hopper_copies import async_load

LOG2E = gl.constexpr(1.4426950408889634)


@triton.constexpr_function
def product_layout(COLS):
    """How a warpgroup holds 64 rows of sums with COLS columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])


@gluon.jit
def describe_rows(
    ptr,
    batch,
    heads,
    length,
    stride_b,
    stride_h,
    stride_s,
    COLS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_COLS: gl.constexpr,
):
    """`[batch, heads, length, COLS]` in memory, of which tiles of ROWS rows are copied, with zeros beyond its edges.

    Nothing is copied of no rows, but the hardware knows no size of 0.
    """
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, BLOCK_COLS], DTYPE)
    # The strides of batch and head count units of 16 bytes.
    unit = gl.cast(128 // DTYPE.primitive_bitwidth, gl.int64)
    return tma.make_tensor_descriptor(
        ptr,
        [batch, heads, gl.maximum(length, 1), COLS],
        [stride_b * unit, stride_h * unit, stride_s, 1],
        [1, 1, ROWS, BLOCK_COLS],
        LAYOUT,
    )


@gluon.jit
def describe_vector(ptr, length, ROWS: gl.constexpr):
    """A vector of `length` numbers, of which ROWS are copied."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [length], [1], [ROWS], LAYOUT)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def make_places(desc, COUNT: gl.constexpr, READERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr):
    """Places for COUNT tiles of keys, each of which READERS warpgroups read, and their barriers."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, ROWS, BLOCK_COLS], desc.layout)
    return tiles, make_barriers(COUNT, 1), make_barriers(COUNT, READERS)


@gluon.jit
def make_ring(desc, vector_desc, COUNT: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr):
    """Places for COUNT tiles, which both warpgroups read."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, ROWS, BLOCK_COLS], desc.layout)
    vectors = gl.allocate_shared_memory(vector_desc.dtype, [COUNT, ROWS], vector_desc.layout)
    return tiles, vectors, make_barriers(COUNT, 1), make_barriers(COUNT, 2)


@gluon.jit
def send_keys(desc, batch_row, head, row, places, part, lap):
    """Copy a tile to its place, once that is free."""
    tiles, full, empty = places
    mbarrier.wait(empty.index(part), lap ^ 1)
    mbarrier.expect(full.index(part), desc.block_type.nbytes)
    async_load(desc, [batch_row, head, row, 0], full.index(part), tiles.index(part))


@gluon.jit
def send_rows(desc, vector_desc, batch_row, head, start, row, ring, ring_turn, STAGES: gl.constexpr):
    """Copy a tile and its vector to the ring's next places, once these are free."""
    tiles, vectors, full, empty = ring
    stage, lap = ring_turn % STAGES, ring_turn // STAGES
    mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes + vector_desc.block_type.nbytes)
    async_load(desc, [batch_row, head, start, 0], full.index(stage), tiles.index(stage))
    async_load(vector_desc, [row], full.index(stage), vectors.index(stage))


@gluon.jit
def receive_tile(ring, ring_turn, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Tile `ring_turn` of a ring, once it is there."""
    tiles, _vectors, full, _empty = ring
    mbarrier.wait(full.index(ring_turn % STAGES), (ring_turn // STAGES) & 1)
    return tiles.index(ring_turn % STAGES).reshape([ROWS, COLS])


@gluon.jit
def make_hand_over(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Places for two tiles, which one warpgroup writes and the other reads."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, COLS], LAYOUT)
    return tiles, make_barriers(2, 1), make_barriers(2, 1)


@gluon.jit
def hand_over(weights, ring, ring_turn):
    """Give the other warpgroup the tile of block `ring_turn`."""
    tiles, full, empty = ring
    place, lap = ring_turn & 1, (ring_turn >> 1) & 1
    mbarrier.wait(empty.index(place), lap ^ 1)
    tiles.index(place).store(weights)
    fence_async_shared()
    mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def take_over(ring, ring_turn):
    """The tile of block `ring_turn`, once it is there."""
    mbarrier.wait(ring[1].index(ring_turn & 1), (ring_turn >> 1) & 1)
    return ring[0].index(ring_turn & 1)


@gluon.jit
def columns_before(end, LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """Of each row the columns ahead of `end`, as a bit for each that a thread has, in order.

    Of 8 columns four threads have two each, one after the other: all of a row that a thread has are in one word.
    """
    col = gl.arange(0, COLS, layout=LAYOUT)
    own_end = end[:, None] - (col & 6)[None, :]
    count = gl.minimum(gl.maximum((own_end >> 3) * 2 + gl.minimum(own_end & 7, 2), 0), 32)
    # All 32 bits are a shift by 32, which is none.
    return (1 << (count & 31)) - 1 - (count >> 5)


@gluon.jit
def at_columns(run_bits, LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """The bit of each column: an instruction for each, however many comparisons are in the words."""
    col = gl.arange(0, COLS, layout=LAYOUT)
    return (run_bits & (1 << ((col >> 3) * 2 + (col & 1)))[None, :]) != 0


@gluon.jit
def begin_with(vector, KEYS: gl.constexpr, SCORES: gl.constexpr):
    """What the sums of a product begin with: a vector of rows for all keys."""
    none = gl.zeros([KEYS, vector.shape[0]], gl.float32, SCORES)
    tile = gl.broadcast(vector[None, :], none)[0]
    # Each number in its register here, and not by a copy between two products, for which the first would be waited for.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], gl.float32, is_pure=False, pack=1)


@gluon.jit
def begin_block(
    k_tile,
    v_tile,
    q_ring,
    do_ring,
    ring_turn,
    SCORES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`k q^T - lse / scale` of block `ring_turn`, and `v do^T - delta`, while the first is exponentiated.

    Both differences are free: sums begin with what is subtracted.
    """
    KEYS: gl.constexpr = k_tile.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage = ring_turn % STAGES
    q_tile = receive_tile(q_ring, ring_turn, BLOCK_M, BLOCK_D, STAGES)
    do_tile = receive_tile(do_ring, ring_turn, BLOCK_M, BLOCK_DV, STAGES)
    qk = begin_with(q_ring[1].index(stage).load(ROW), KEYS, SCORES)
    dp = begin_with(do_ring[1].index(stage).load(ROW), KEYS, SCORES)
    qk = warpgroup_mma(k_tile, q_tile.permute((1, 0)), qk, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), dp, is_async=True)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    return qk, dp, q_tile, do_tile


@gluon.jit
def in_fragments(tile, COLS: gl.constexpr):
    """64 rows of sums as lines of 32 numbers, of which each thread has 4 neighbours: a matter of naming its registers.

    So they are stored 16 bytes at a time without conflicts, and the order is the same for every tile that is added.
    """
    parts = gl.permute(gl.reshape(tile, [4, 2, 8, COLS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(parts, [2 * COLS, 32])


@gluon.jit
def end_block(
    ds,
    dk,
    q_tile,
    ds_ring,
    q_ring,
    do_ring,
    ring_turn,
    K_WEIGHTS: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Add block `ring_turn` to dk, and with WITH_DQ hand over its ds."""
    stage = ring_turn % STAGES
    dk = warpgroup_mma(gl.convert_layout(ds, K_WEIGHTS), q_tile, dk, is_async=True)
    mbarrier.arrive(do_ring[3].index(stage), count=1)
    if WITH_DQ:
        hand_over(ds, ds_ring, ring_turn)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    # For both: the other warpgroup does not read it.
    mbarrier.arrive(q_ring[3].index(stage), count=2)
    return dk


@gluon.jit
def add_sums(ptr, sums):
    """Add 64 rows of 64 sums to memory, 16 bytes a thread."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat = gl.convert_layout(gl.reshape(in_fragments(sums, 64), [4096]), FLAT)
    # Triton's own atomics ask for what was there before.
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0;",
        "=r,l,l,l,l,r,r,r,r",
        [ptr + gl.arange(0, 4096, layout=FLAT), flat.to(gl.int32, bitcast=True)],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def add_block(
    dv,
    dq_part,
    k_tile,
    p_ring,
    ds_ring,
    do_ring,
    ring_turn,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    """Add block `ring_turn` to dv, and with WITH_DQ what it adds to dq to memory."""
    do_tile = receive_tile(do_ring, ring_turn, BLOCK_M, BLOCK_DV, STAGES)
    dv = warpgroup_mma(take_over(p_ring, ring_turn), do_tile, dv, is_async=True)
    if WITH_DQ:
        ds_tile = take_over(ds_ring, ring_turn).permute((1, 0))
        none = gl.zeros([BLOCK_M, 64], gl.float32, product_layout(64))
        # 64 columns at a time: these are added while the next are multiplied. Those that pad a tile stay zero.
        PARTS: gl.constexpr = (HEAD_DIM + 63) // 64
        dq = warpgroup_mma(ds_tile, k_tile.slice(0, 64, dim=1), none, use_acc=False, is_async=True)
        dv, dq = warpgroup_mma_wait(0, deps=(dv, dq))
        mbarrier.arrive(do_ring[3].index(ring_turn % STAGES), count=1)
        mbarrier.arrive(p_ring[2].index(ring_turn & 1), count=1)
        for part in gl.static_range(1, PARTS):
            next_dq = warpgroup_mma(ds_tile, k_tile.slice(part * 64, 64, dim=1), none, use_acc=False, is_async=True)
            add_sums(dq_part + (part - 1) * (BLOCK_M * 64), dq)
            dq = warpgroup_mma_wait(0, deps=(next_dq,))
        mbarrier.arrive(ds_ring[2].index(ring_turn & 1), count=1)
        add_sums(dq_part + (PARTS - 1) * (BLOCK_M * 64), dq)
    else:
        dv = warpgroup_mma_wait(0, deps=(dv,))
        mbarrier.arrive(do_ring[3].index(ring_turn % STAGES), count=1)
        mbarrier.arrive(p_ring[2].index(ring_turn & 1), count=1)
    return dv


@gluon.jit
def store_tile(ptr, tile, start, length, stride_row, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Write `tile` over the rows from `start` on of a `[length, COLS]` matrix, nothing beyond its edges."""
    row = start + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + (row.to(gl.int64) * stride_row)[:, None] + col[None, :]
    gl.store(ptrs, tile, mask=(row < length)[:, None] & (col < COLS)[None, :])


@gluon.jit
def produce_tiles(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    k_ring,
    v_ring,
    q_ring,
    do_ring,
    q_offset,
    size,
    sinks,
    q_len,
    kv_len,
    num_heads,
    group_size,
    batch,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    for own_work in range(gl.program_id(0), num_key_blocks * num_kv_heads * batch, gl.num_programs(0)):
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        batch_row = b.to(gl.int32)
        send_keys(k_desc, batch_row, hkv.to(gl.int32), start_n, k_ring, 0, k_lap)
        send_keys(v_desc, batch_row, hkv.to(gl.int32), start_n, v_ring, 0, k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.maximum(gl.minimum(kv_last + size - q_shift, q_len), gl.where(kv_first < sinks, q_len, 0))
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = (
            gl.maximum(gl.minimum(kv_first + size - q_shift, q_len), gl.where(kv_last < sinks, q_len, 0))
            // BLOCK_M
            * BLOCK_M
        )
        full_end = gl.maximum(full_end, full_begin)
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M

        for member in range(group_size):
            h = hkv * group_size + member
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                first_row = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                send_rows(q_desc, lse_desc, batch_row, h.to(gl.int32), start_m, first_row, q_ring, q_turn, STAGES)
                send_rows(do_desc, delta_desc, batch_row, h.to(gl.int32), start_m, first_row, do_ring, q_turn, STAGES)
                q_turn += 1
            for nth in range(num_full):
                # Of heads that share keys the last rows first: all programs have these, and so meet them at a time.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                first_row = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                send_rows(q_desc, lse_desc, batch_row, h.to(gl.int32), start_m, first_row, q_ring, q_turn, STAGES)
                send_rows(do_desc, delta_desc, batch_row, h.to(gl.int32), start_m, first_row, do_ring, q_turn, STAGES)
                q_turn += 1
        k_lap ^= 1


@gluon.jit
def sum_tiles(
    dq_sums_ptr,
    k_ring,
    v_ring,
    do_ring,
    p_ring,
    ds_ring,
    q_offset,
    size,
    sinks,
    dv_ptr,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    q_len,
    kv_len,
    num_heads,
    group_size,
    batch,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    DTYPE: gl.constexpr = k_ring[0].dtype
    KEYS: gl.constexpr = BLOCK_N
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    k_tile = k_ring[0].index(0).reshape([BLOCK_N, BLOCK_D])
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    for own_work in range(gl.program_id(0), num_key_blocks * num_kv_heads * batch, gl.num_programs(0)):
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, SUMS)
        mbarrier.wait(k_ring[1].index(0), k_lap)
        mbarrier.wait(v_ring[1].index(0), k_lap)
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.maximum(gl.minimum(kv_last + size - q_shift, q_len), gl.where(kv_first < sinks, q_len, 0))
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = (
            gl.maximum(gl.minimum(kv_first + size - q_shift, q_len), gl.where(kv_last < sinks, q_len, 0))
            // BLOCK_M
            * BLOCK_M
        )
        full_end = gl.maximum(full_end, full_begin)
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
                dv = add_block(
                    dv, dq_part, k_tile, p_ring, ds_ring, do_ring, q_turn, HEAD_DIM, BLOCK_M, BLOCK_DV, STAGES, WITH_DQ
                )
                q_turn += 1
            for nth in range(num_full):
                # Of heads that share keys the last rows first: all programs have these, and so meet them at a time.
                row_turn = gl.where(group_size > 1, num_full - 1 - nth, nth)
                start_m = full_begin + row_turn * BLOCK_M
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                dq_part = dq_sums_ptr + row_block * (BLOCK_M * BLOCK_D)
                dv = add_block(
                    dv, dq_part, k_tile, p_ring, ds_ring, do_ring, q_turn, HEAD_DIM, BLOCK_M, BLOCK_DV, STAGES, WITH_DQ
                )
                q_turn += 1
        mbarrier.arrive(k_ring[2].index(0), count=1)
        mbarrier.arrive(v_ring[2].index(0), count=1)
        dv_start = dv_ptr + b * stride_dvb + hkv * stride_dvh
        store_tile(dv_start, dv.to(DTYPE), start_n, kv_len, stride_dvs, HEAD_DIM_V, SUMS)
        k_lap ^= 1


@gluon.jit
def score_tiles(
    k_ring,
    v_ring,
    q_ring,
    do_ring,
    p_ring,
    ds_ring,
    q_offset,
    size,
    sinks,
    dk_ptr,
    stride_dkb,
    stride_dkh,
    stride_dks,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    batch,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    DTYPE: gl.constexpr = k_ring[0].dtype
    KEYS: gl.constexpr = BLOCK_N
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUMS: gl.constexpr = product_layout(BLOCK_D)
    K_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    k_tile = k_ring[0].index(0).reshape([BLOCK_N, BLOCK_D])
    v_tile = v_ring[0].index(0).reshape([BLOCK_N, BLOCK_DV])
    qk_scale = scale * LOG2E
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    for own_work in range(gl.program_id(0), num_key_blocks * num_kv_heads * batch, gl.num_programs(0)):
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        kv_idx = start_n + gl.arange(0, KEYS, layout=KEY)
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, SUMS)
        mbarrier.wait(k_ring[1].index(0), k_lap)
        mbarrier.wait(v_ring[1].index(0), k_lap)
        kv_first = start_n
        kv_last = gl.minimum(start_n + BLOCK_N, kv_len) - 1
        row_begin = gl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
        row_end = gl.maximum(gl.minimum(kv_last + size - q_shift, q_len), gl.where(kv_first < sinks, q_len, 0))
        # Blocks from full_begin to full_end need no mask.
        full_begin = gl.cdiv(gl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
        full_begin = gl.minimum(full_begin, gl.cdiv(gl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
        full_end = (
            gl.maximum(gl.minimum(kv_first + size - q_shift, q_len), gl.where(kv_last < sinks, q_len, 0))
            // BLOCK_M
            * BLOCK_M
        )
        full_end = gl.maximum(full_end, full_begin)
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(row_end - gap - row_begin, BLOCK_M), 0)
        num_full = (full_end - full_begin) // BLOCK_M

        for _ in range(group_size):
            for nth in range(num_partial):
                start_m = row_begin + nth * BLOCK_M
                start_m = gl.where(start_m < full_begin, start_m, start_m + gap)
                qk, dp, q_tile, _do_tile = begin_block(
                    k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES
                )
                # Always so: else the compiler would compute this ahead of the products and keep it in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = rows + q_shift
                    run_first = kv_idx - q_shift
                    if RAGGED:
                        run_first = gl.where(kv_idx < kv_len, run_first, start_m + BLOCK_M)
                    run_bits = ~columns_before(run_first - start_m, ROW, BLOCK_M)
                    keep = at_columns(run_bits, ROW, BLOCK_M) & (
                        (q_idx[None, :] - kv_idx[:, None] < size) | (kv_idx < sinks)[:, None]
                    )
                    qk = gl.where(keep, qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)
                hand_over(p.to(DTYPE), p_ring, q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp
                dk = end_block(ds.to(DTYPE), dk, q_tile, ds_ring, q_ring, do_ring, q_turn, K_WEIGHTS, STAGES, WITH_DQ)
                q_turn += 1
            for _ in range(num_full):
                qk, dp, q_tile, _do_tile = begin_block(
                    k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES
                )
                if RAGGED and start_n + BLOCK_N > kv_len:
                    qk = gl.where((kv_idx < kv_len)[:, None], qk, float("-inf"))
                p = gl.exp2(qk * qk_scale)
                hand_over(p.to(DTYPE), p_ring, q_turn)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * dp
                dk = end_block(ds.to(DTYPE), dk, q_tile, ds_ring, q_ring, do_ring, q_turn, K_WEIGHTS, STAGES, WITH_DQ)
                q_turn += 1
        mbarrier.arrive(k_ring[2].index(0), count=1)
        mbarrier.arrive(v_ring[2].index(0), count=1)
        dk_start = dk_ptr + b * stride_dkb + hkv * stride_dkh
        store_tile(dk_start, (dk * scale).to(DTYPE), start_n, kv_len, stride_dks, HEAD_DIM, SUMS)
        k_lap ^= 1


@gluon.jit(do_not_specialize=["q_offset", "size", "sinks", "q_len", "kv_len", "num_heads", "group_size", "batch"])
def streaming_llm_hopper_bwd_wide(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_offset,
    size,
    sinks,
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
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    dq_sums_ptr,
    batch,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    SCALARS_LOADED: gl.constexpr,
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
    size = gl.load(size) if SCALARS_LOADED else size
    sinks = gl.load(sinks) if SCALARS_LOADED else sinks
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    num_kv_heads = num_heads // group_size
    num_rows = batch * num_heads * gl.maximum(gl.cdiv(q_len, BLOCK_M), 1) * BLOCK_M
    q_desc = describe_rows(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_rows(
        k_ptr, batch, num_kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D
    )
    v_desc = describe_rows(
        v_ptr, batch, num_kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, BLOCK_DV
    )
    do_desc = describe_rows(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_places(k_desc, 1, 2, BLOCK_N, BLOCK_D)
    v_ring = make_places(v_desc, 1, 2, BLOCK_N, BLOCK_DV)
    q_ring = make_ring(q_desc, lse_desc, STAGES, BLOCK_M, BLOCK_D)
    do_ring = make_ring(do_desc, delta_desc, STAGES, BLOCK_M, BLOCK_DV)
    p_ring, ds_ring = make_hand_over(DTYPE, BLOCK_N, BLOCK_M), make_hand_over(DTYPE, BLOCK_N, BLOCK_M)
    gl.warp_specialize(
        [
            (
                score_tiles,
                (
                    k_ring,
                    v_ring,
                    q_ring,
                    do_ring,
                    p_ring,
                    ds_ring,
                    q_offset,
                    size,
                    sinks,
                    dk_ptr,
                    stride_dkb,
                    stride_dkh,
                    stride_dks,
                    q_len,
                    kv_len,
                    num_heads,
                    group_size,
                    scale,
                    batch,
                    Q_OFFSET_PER_BATCH,
                    RAGGED,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    WITH_DQ,
                ),
            ),
            (
                sum_tiles,
                (
                    dq_sums_ptr,
                    k_ring,
                    v_ring,
                    do_ring,
                    p_ring,
                    ds_ring,
                    q_offset,
                    size,
                    sinks,
                    dv_ptr,
                    stride_dvb,
                    stride_dvh,
                    stride_dvs,
                    q_len,
                    kv_len,
                    num_heads,
                    group_size,
                    batch,
                    Q_OFFSET_PER_BATCH,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    WITH_DQ,
                ),
            ),
            (
                produce_tiles,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    lse_desc,
                    delta_desc,
                    k_ring,
                    v_ring,
                    q_ring,
                    do_ring,
                    q_offset,
                    size,
                    sinks,
                    q_len,
                    kv_len,
                    num_heads,
                    group_size,
                    batch,
                    Q_OFFSET_PER_BATCH,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        # Of each thread: the first consumer gets what is left, as many as the second.
        worker_num_regs=[240, 24],
    )
