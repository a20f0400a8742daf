# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: hopper/bwd.py.jinja
# hash: 18c9daafc040c2d9
"""Gradients of `softcap`, with segment ids on Hopper with respect to k and v, and where it may be so to q.

    keep            q_idx >= kv_idx and q_segment_ids[b, rows] == kv_segment_ids[b, cols] and kv_segment_ids[b, cols] !=
                    padding_id
    score           20.0 * tanh(0.05 * score)
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

Of lse and delta it takes what `softcap_segmented_hopper_delta` leaves, padded to whole blocks of rows. The
gradient of q it adds to `dq_sums`, [B, Hq, blocks, 2, lines, 32], fp32, zeros at first, in the order of
`in_fragments` and without its factor.

A program takes one block of keys of one key head after the other, half of them for each of two warpgroups,
`consume_tiles`, which keep the sums of dk and dv over all query heads that share the key head. A warp, `produce_tiles`,
copies the keys, and the rows of each block of queries, to shared memory (TMA). Tiles of scores are transposed,
keys by queries: probabilities and ds feed the products that sum them up from registers. With WITH_DQ each step
also multiplies ds of the one before, exchanged through shared memory, by the keys, and a warp of its own, `add_tiles`,
adds the product to `dq_sums`: in any order, so that equal inputs may give other last bits.

A ring is a tuple of tiles, their vectors of rows, and the barriers `full`, which a copy completes, and `empty`, on
which consumers arrive.

Tensors of the call say how many rows a block visits, so the work is shared out as it is done: which block comes
next is asked of a counter in memory, by the warp that copies.
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

from ..._runtime.hopper_copies import async_add, async_load

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(x, HARDWARE: gl.constexpr):
    if HARDWARE:
        # One instruction, relative error 2**-11: less than what rounding a score to 16 bits costs.
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        far = 1.0 - 2.0 / (gl.exp2(2.8853900817779268 * x) + 1.0)
        # Near zero the difference above cancels; there a polynomial keeps float32's relative error (Cephes, tanhf).
        z = x * x
        poly = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        near = x + x * z * ((poly + 1.33314422036e-1) * z - 3.33332819422e-1)
        return gl.where(gl.abs(x) < 0.625, near, far)


@gluon.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return gl.maximum(gl.minimum(index, size - 1), 0)


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
def describe_lines(ptr, length, LINES: gl.constexpr):
    """`[length, 32]` in memory, of which tiles of LINES lines are added to."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, 32], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [length, 32], [32, 1], [LINES, 32], LAYOUT)


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
def take_work(counter_ptr, ring, ring_turn):
    """Take the next piece of work that no program has, and tell the others."""
    told_work, full, empty = ring
    stage = ring_turn % 2
    mbarrier.wait(empty.index(stage), ((ring_turn // 2) & 1) ^ 1)
    next_work = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    told_work.index(stage).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + next_work)
    mbarrier.arrive(full.index(stage), count=1)
    return next_work


@gluon.jit
def hear_work(ring, ring_turn, WARPS: gl.constexpr):
    """The next piece of work, once it is told."""
    told_work, full, empty = ring
    stage = ring_turn % 2
    mbarrier.wait(full.index(stage), (ring_turn // 2) & 1)
    next_work = gl.max(told_work.index(stage).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(empty.index(stage), count=1)
    return next_work


@gluon.jit
def receive_tile(ring, ring_turn, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Tile `ring_turn` of a ring, once it is there."""
    tiles, _vectors, full, _empty = ring
    mbarrier.wait(full.index(ring_turn % STAGES), (ring_turn // STAGES) & 1)
    return tiles.index(ring_turn % STAGES).reshape([ROWS, COLS])


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
    """`k q^T` of block `ring_turn`, and `v do^T - delta`, while the first is exponentiated.

    The difference is free: sums begin with what is subtracted.
    """
    KEYS: gl.constexpr = k_tile.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage = ring_turn % STAGES
    q_tile = receive_tile(q_ring, ring_turn, BLOCK_M, BLOCK_D, STAGES)
    do_tile = receive_tile(do_ring, ring_turn, BLOCK_M, BLOCK_DV, STAGES)
    dp = begin_with(do_ring[1].index(stage).load(ROW), KEYS, SCORES)
    none = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    qk = warpgroup_mma(k_tile, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
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
def begin_dq(k_part, ds_ring, ring_turn, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, PART: gl.constexpr):
    """Begin a warpgroup's part of what tile `ring_turn` of ds, which is block `ring_turn - 1`, adds to dq."""
    tiles, full, _empty = ds_ring
    COLS: gl.constexpr = BLOCK_D * BLOCK_M // 128
    mbarrier.wait(full.index(ring_turn & 1), (ring_turn >> 1) & 1)
    ds_tile = tiles.index(ring_turn & 1)
    ds_part = ds_tile if BLOCK_M == 64 else ds_tile.slice(PART * 64, 64, dim=1)
    none = gl.zeros([64, COLS], gl.float32, product_layout(COLS))
    return warpgroup_mma(ds_part.permute((1, 0)), k_part, none, use_acc=False, is_async=True)


@gluon.jit
def store_dq(dq, dq_ring, ring_turn, PART: gl.constexpr):
    """Put a part of dq where the warp that adds it will take it."""
    tiles, _full, empty = dq_ring
    mbarrier.wait(empty.index(PART), (ring_turn & 1) ^ 1)
    tiles.index(PART).store(in_fragments(dq, dq.shape[1]))


@gluon.jit
def end_block(
    ds,
    dk,
    dv,
    k_part,
    q_tile,
    ds_ring,
    dq_ring,
    q_ring,
    do_ring,
    ring_turn,
    has_before,
    K_WEIGHTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
    PART: gl.constexpr,
):
    """Add block `ring_turn` to dk, and with WITH_DQ the one before to dq.

    So a warpgroup need not wait for the other's ds of the same block, and either takes exponentials while the other
    multiplies. The first of a block of keys has none before it: the product is that of the block of keys before, again,
    and of no use.
    """
    stage = ring_turn % STAGES
    ds_weights = gl.convert_layout(ds, K_WEIGHTS)
    if WITH_DQ:
        KEYS: gl.constexpr = ds.shape[0]
        tiles, full, empty = ds_ring
        place, lap = (ring_turn + 1) & 1, (ring_turn + 1) >> 1
        mbarrier.wait(empty.index(place), (lap & 1) ^ 1)
        tiles.index(place).slice(PART * KEYS, KEYS).store(ds)
        dq = begin_dq(k_part, ds_ring, ring_turn, BLOCK_M, BLOCK_D, PART)
        dk = warpgroup_mma(ds_weights, q_tile, dk, is_async=True)
        # Fences wait until what was stored is there: here beside the products.
        fence_async_shared()
        mbarrier.arrive(full.index(place), count=1)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        mbarrier.arrive(do_ring[3].index(stage), count=1)
        mbarrier.arrive(empty.index(ring_turn & 1), count=1)
        if has_before:
            store_dq(dq, dq_ring, ring_turn - 1, PART)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_ring[3].index(stage), count=1)
        fence_async_shared()
        if has_before:
            mbarrier.arrive(dq_ring[1].index(PART), count=1)
    else:
        dk = warpgroup_mma(ds_weights, q_tile, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        mbarrier.arrive(do_ring[3].index(stage), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_ring[3].index(stage), count=1)
    return dk, dv


@triton.constexpr_function
def store_layout(COLS):
    """How a warpgroup stores rows: 16 bytes a thread, so that a warp's store fills the lines that it meets."""
    return gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])


@gluon.jit
def store_tile(ptr, tile, shared, start, length, stride_row, COLS: gl.constexpr, SUMS: gl.constexpr):
    """Write `tile` over the rows from `start` on of a `[length, COLS]` matrix, nothing beyond its edges.

    It changes its layout in `shared`, where that has the room.
    """
    FITS: gl.constexpr = shared.shape[1] == tile.shape[1]
    LAYOUT: gl.constexpr = store_layout(tile.shape[1]) if FITS else SUMS
    if FITS:
        shared.store(tile)
        tile = shared.load(LAYOUT)
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
    work_ring,
    ranges_ptr,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    batch,
    work_counter_ptr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A block of keys of one key head is a piece of work, after the first for whichever program is free.
    own_work, work_turn = gl.program_id(0), 0
    while own_work < num_key_blocks * num_kv_heads * batch:
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
        batch_row = b.to(gl.int32)
        send_keys(k_desc, batch_row, hkv.to(gl.int32), start_n, k_ring, 0, k_lap)
        for part in gl.static_range(2):
            send_keys(v_desc, batch_row, hkv.to(gl.int32), start_n + part * (BLOCK_N // 2), v_ring, part, k_lap)
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
                first_row = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                send_rows(q_desc, lse_desc, batch_row, h.to(gl.int32), start_m, first_row, q_ring, q_turn, STAGES)
                send_rows(do_desc, delta_desc, batch_row, h.to(gl.int32), start_m, first_row, do_ring, q_turn, STAGES)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                first_row = ((b * num_heads + h) * num_blocks * BLOCK_M + start_m).to(gl.int32)
                send_rows(q_desc, lse_desc, batch_row, h.to(gl.int32), start_m, first_row, q_ring, q_turn, STAGES)
                send_rows(do_desc, delta_desc, batch_row, h.to(gl.int32), start_m, first_row, do_ring, q_turn, STAGES)
                q_turn += 1
        k_lap ^= 1
        own_work = take_work(work_counter_ptr, work_ring, work_turn)
        work_turn += 1


@gluon.jit
def add_tiles(
    dq_desc,
    dq_ring,
    work_ring,
    ranges_ptr,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    batch,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    # Of the fp32 tiles as they lie in shared memory: a line is what the 32 banks hold.
    LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
    dq_tiles, dq_full, dq_empty = dq_ring
    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn = 0
    # A block of keys of one key head is a piece of work, after the first for whichever program is free.
    own_work, work_turn = gl.program_id(0), 0
    while own_work < num_key_blocks * num_kv_heads * batch:
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
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
                for part in gl.static_range(2):
                    mbarrier.wait(dq_full.index(part), q_turn & 1)
                    async_add(dq_desc, [((2 * row_block + part) * LINES).to(gl.int32), 0], dq_tiles.index(part))
                    tma.store_wait(0)
                    mbarrier.arrive(dq_empty.index(part), count=1)
                q_turn += 1
            for nth in range(num_full):
                start_m = full_begin + nth * BLOCK_M
                row_block = (b * num_heads + h) * num_blocks + start_m // BLOCK_M
                for part in gl.static_range(2):
                    mbarrier.wait(dq_full.index(part), q_turn & 1)
                    async_add(dq_desc, [((2 * row_block + part) * LINES).to(gl.int32), 0], dq_tiles.index(part))
                    tma.store_wait(0)
                    mbarrier.arrive(dq_empty.index(part), count=1)
                q_turn += 1
        own_work = hear_work(work_ring, work_turn, 1)
        work_turn += 1


@gluon.jit
def consume_tiles(
    k_ring,
    v_ring,
    q_ring,
    do_ring,
    ds_ring,
    dq_ring,
    work_ring,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    dk_ptr,
    dv_ptr,
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dvb,
    stride_dvh,
    stride_dvs,
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
    PART: gl.constexpr,
):
    DTYPE: gl.constexpr = k_ring[0].dtype
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN_ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    K_SUMS: gl.constexpr = product_layout(BLOCK_D)
    V_SUMS: gl.constexpr = product_layout(BLOCK_DV)
    K_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_SUMS, k_width=2)
    V_WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_SUMS, k_width=2)
    k_block = k_ring[0].index(0).reshape([BLOCK_N, BLOCK_D])
    k_tile = k_block.slice(PART * KEYS, KEYS)
    v_tile = v_ring[0].index(PART).reshape([KEYS, BLOCK_DV])
    # A warpgroup's part of dq has 64 rows: half of them, or all and half of the columns.
    k_part = k_block.slice(PART * (BLOCK_D // 2), BLOCK_D // 2, dim=1) if BLOCK_M == 64 else k_block
    if WITH_DQ:
        # Before the first block there is one of zeros.
        ds_ring[0].index(0).slice(PART * KEYS, KEYS).store(gl.zeros([KEYS, BLOCK_M], DTYPE, SCORES))
        fence_async_shared()
        mbarrier.arrive(ds_ring[1].index(0), count=1)

    num_kv_heads, num_key_blocks = num_heads // group_size, gl.cdiv(kv_len, BLOCK_N)
    q_turn, k_lap = 0, 0
    # A block of keys of one key head is a piece of work, after the first for whichever program is free.
    own_work, work_turn = gl.program_id(0), 0
    while own_work < num_key_blocks * num_kv_heads * batch:
        head = own_work // num_key_blocks
        start_n = (own_work % num_key_blocks) * BLOCK_N
        b = (head // num_kv_heads).to(gl.int64)
        hkv = (head % num_kv_heads).to(gl.int64)
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
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, K_SUMS)
        dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, V_SUMS)
        mbarrier.wait(k_ring[1].index(0), k_lap)
        mbarrier.wait(v_ring[1].index(PART), k_lap)
        first_turn = q_turn
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
                qk, dp, q_tile, do_tile = begin_block(
                    k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES
                )
                tanh_val = tanh(0.05 * scale * qk, HARDWARE_TANH)
                logit = qk
                # Always so: else the compiler would compute this ahead of the products and keep it in registers.
                if start_m < q_len:
                    rows = start_m + gl.arange(0, BLOCK_M, layout=ROW)
                    q_idx = gl.convert_layout(own_position, ROW) if POSITIONS else rows + q_shift
                    logit = 28.85390081777927 * tanh_val
                    keep = q_idx[None, :] >= kv_idx[:, None]
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
                lse = q_ring[1].index(q_turn % STAGES).load(ROW)
                p = gl.exp2(logit - lse[None, :])
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), V_WEIGHTS), do_tile, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = p * dp
                # The others have no gradient, masked or not.
                keep = p > 0.0
                ds = gl.where(keep, ds * (1.0 - tanh_val * tanh_val), 0.0)
                dk, dv = end_block(
                    ds.to(DTYPE),
                    dk,
                    dv,
                    k_part,
                    q_tile,
                    ds_ring,
                    dq_ring,
                    q_ring,
                    do_ring,
                    q_turn,
                    q_turn > first_turn,
                    K_WEIGHTS,
                    BLOCK_M,
                    BLOCK_D,
                    STAGES,
                    WITH_DQ,
                    PART,
                )
                q_turn += 1
            for _ in range(num_full):
                qk, dp, q_tile, do_tile = begin_block(
                    k_tile, v_tile, q_ring, do_ring, q_turn, SCORES, BLOCK_M, BLOCK_D, BLOCK_DV, STAGES
                )
                tanh_val = tanh(0.05 * scale * qk, HARDWARE_TANH)
                logit = 28.85390081777927 * tanh_val
                if RAGGED and start_n + BLOCK_N > kv_len:
                    logit = gl.where((cols < kv_len)[:, None], logit, float("-inf"))
                lse = q_ring[1].index(q_turn % STAGES).load(ROW)
                p = gl.exp2(logit - lse[None, :])
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), V_WEIGHTS), do_tile, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = p * dp
                ds = ds * (1.0 - tanh_val * tanh_val)
                if RAGGED:
                    ds = gl.where((cols < kv_len)[:, None], ds, 0.0)
                dk, dv = end_block(
                    ds.to(DTYPE),
                    dk,
                    dv,
                    k_part,
                    q_tile,
                    ds_ring,
                    dq_ring,
                    q_ring,
                    do_ring,
                    q_turn,
                    q_turn > first_turn,
                    K_WEIGHTS,
                    BLOCK_M,
                    BLOCK_D,
                    STAGES,
                    WITH_DQ,
                    PART,
                )
                q_turn += 1
        if WITH_DQ:
            # Of the last block.
            dq = warpgroup_mma_wait(0, deps=(begin_dq(k_part, ds_ring, q_turn, BLOCK_M, BLOCK_D, PART),))
            if q_turn > first_turn:
                store_dq(dq, dq_ring, q_turn - 1, PART)
                fence_async_shared()
                mbarrier.arrive(dq_ring[1].index(PART), count=1)
        mbarrier.arrive(k_ring[2].index(0), count=1)
        own_start = start_n + PART * KEYS
        # Through the place of v, whose last reader this was.
        store_tile(
            dv_ptr + b * stride_dvb + hkv * stride_dvh,
            dv.to(DTYPE),
            v_tile,
            own_start,
            kv_len,
            stride_dvs,
            HEAD_DIM_V,
            V_SUMS,
        )
        store_tile(
            dk_ptr + b * stride_dkb + hkv * stride_dkh,
            (dk * scale).to(DTYPE),
            v_tile,
            own_start,
            kv_len,
            stride_dks,
            HEAD_DIM,
            K_SUMS,
        )
        fence_async_shared()
        mbarrier.arrive(v_ring[2].index(PART), count=1)
        k_lap ^= 1
        own_work = hear_work(work_ring, work_turn, 4)
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
def softcap_segmented_hopper_bwd(
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
    q_desc = describe_rows(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D)
    k_desc = describe_rows(
        k_ptr, batch, num_kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D
    )
    v_desc = describe_rows(
        v_ptr, batch, num_kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N // 2, BLOCK_DV
    )
    do_desc = describe_rows(
        do_ptr, batch, num_heads, q_len, stride_dob, stride_doh, stride_dos, HEAD_DIM_V, BLOCK_M, BLOCK_DV
    )
    lse_desc, delta_desc = describe_vector(lse_ptr, num_rows, BLOCK_M), describe_vector(delta_ptr, num_rows, BLOCK_M)
    k_ring = make_places(k_desc, 1, 2, BLOCK_N, BLOCK_D)
    v_ring = make_places(v_desc, 2, 1, BLOCK_N // 2, BLOCK_DV)
    q_ring = make_ring(q_desc, lse_desc, STAGES, BLOCK_M, BLOCK_D)
    do_ring = make_ring(do_desc, delta_desc, STAGES, BLOCK_M, BLOCK_DV)
    work_ring = (
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        make_barriers(2, 1),
        make_barriers(2, 3 if WITH_DQ else 2),
    )
    if WITH_DQ:
        LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
        dq_desc = describe_lines(dq_sums_ptr, num_rows * (BLOCK_D // 32), LINES)
        ds_tiles = gl.allocate_shared_memory(
            DTYPE, [2, BLOCK_N, BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], DTYPE)
        )
        ds_ring = (ds_tiles, make_barriers(2, 2), make_barriers(2, 2))
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, LINES, 32], dq_desc.layout)
        dq_ring = (dq_tiles, make_barriers(2, 1), make_barriers(2, 1))
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        k_ring,
                        v_ring,
                        q_ring,
                        do_ring,
                        ds_ring,
                        dq_ring,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        q_positions_ptr,
                        kv_positions_ptr,
                        ranges_ptr,
                        q_offset,
                        dk_ptr,
                        dv_ptr,
                        stride_dkb,
                        stride_dkh,
                        stride_dks,
                        stride_dvb,
                        stride_dvh,
                        stride_dvs,
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
                        STAGES,
                        WITH_DQ,
                        0,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        k_ring,
                        v_ring,
                        q_ring,
                        do_ring,
                        ds_ring,
                        dq_ring,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        q_positions_ptr,
                        kv_positions_ptr,
                        ranges_ptr,
                        q_offset,
                        dk_ptr,
                        dv_ptr,
                        stride_dkb,
                        stride_dkh,
                        stride_dks,
                        stride_dvb,
                        stride_dvh,
                        stride_dvs,
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
                        STAGES,
                        WITH_DQ,
                        1,
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
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        kv_len,
                        num_heads,
                        group_size,
                        batch,
                        work_counter_ptr,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
                (
                    add_tiles,
                    (
                        dq_desc,
                        dq_ring,
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        kv_len,
                        num_heads,
                        group_size,
                        batch,
                        BLOCK_D,
                        BLOCK_M,
                        BLOCK_N,
                    ),
                ),
            ],
            worker_num_warps=[4, 1, 1],
            # Of each thread: the first consumer gets what is left, as many as the second.
            worker_num_regs=[240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        k_ring,
                        v_ring,
                        q_ring,
                        do_ring,
                        None,
                        None,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        q_positions_ptr,
                        kv_positions_ptr,
                        ranges_ptr,
                        q_offset,
                        dk_ptr,
                        dv_ptr,
                        stride_dkb,
                        stride_dkh,
                        stride_dks,
                        stride_dvb,
                        stride_dvh,
                        stride_dvs,
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
                        STAGES,
                        WITH_DQ,
                        0,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        k_ring,
                        v_ring,
                        q_ring,
                        do_ring,
                        None,
                        None,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        q_positions_ptr,
                        kv_positions_ptr,
                        ranges_ptr,
                        q_offset,
                        dk_ptr,
                        dv_ptr,
                        stride_dkb,
                        stride_dkh,
                        stride_dks,
                        stride_dvb,
                        stride_dvh,
                        stride_dvs,
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
                        STAGES,
                        WITH_DQ,
                        1,
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
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        kv_len,
                        num_heads,
                        group_size,
                        batch,
                        work_counter_ptr,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
