# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: hopper/fwd.py.jinja
# hash: c665d54a19a4b481
"""Forward of `full`, with segment ids on Hopper: `o = softmax(score) v`.

    keep            q_segment_ids[b, rows] == kv_segment_ids[b, cols] and kv_segment_ids[b, cols] != padding_id
    q               [B, Hq, Sq, D]
    k               [B, Hkv, Skv, D]
    v               [B, Hkv, Skv, Dv]
    q_segment_ids   [b, q_row]  int32
    kv_segment_ids  [b, k_row]  int32
    ranges          [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks
    o               [B, Hq, Sq, Dv]
    lse             [B, Hq, Sq]  fp32, log of the softmax denominator

A program takes one block of query rows after the other. Two warps copy to shared memory (TMA): `produce_rows` the
queries, with which it tells what there is to do, and `produce_keys` the keys and values of each block that they visit.
Two warpgroups, `consume_tiles`, have half of the rows each: while the tensor cores add up the values of one block,
they take the exponentials of the next (arXiv:2407.08608). Otherwise this is the online softmax of arXiv:2205.14135:
`row_max` is the largest score so far, or up to 8 less, `row_sums` the sums of exponentials relative to it, by the four
threads that share a row. Scores are kept times log2(e), so that each exponential is one `exp2`. What ends a block of
rows is done beside the first block of keys of the next one.

A ring is a tuple of tiles, their barriers `full`, which a copy completes, and `empty`, on which consumers arrive.

Tensors of the call say how many keys a block visits, so the work is shared out as it is done: which block comes
next is asked of a counter in memory, by the warp that copies.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Of a block, those of each warpgroup.
ROWS = gl.constexpr(64)
# What is written here for a thread's two rows: outputs 0 to 3 are the results of `raised`, inputs 4 to 7 its arguments.
# 0f41000000 is 8.0, and 0f3F800000 is 1.0.
RAISE = gl.constexpr("""{
.reg .pred p, q, any;
.reg .f32 a, b;
add.f32 a, $4, 0f41000000;
add.f32 b, $5, 0f41000000;
setp.gt.f32 p, $6, a;
setp.gt.f32 q, $7, b;
mov.b32 $0, $4;
mov.b32 $1, $5;
mov.b32 $2, 0f3F800000;
mov.b32 $3, 0f3F800000;
or.pred any, p, q;
vote.sync.any.pred any, any, 0xFFFFFFFF;
@!any bra.uni DONE;
sub.f32 a, $4, $6;
sub.f32 b, $5, $7;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
@p mov.b32 $0, $6;
@q mov.b32 $1, $7;
@p mov.b32 $2, a;
@q mov.b32 $3, b;
DONE:
}""")
# What consumers are told of a block of rows: so many numbers.
TOLD = gl.constexpr(6)
# The name that Triton 3.9 gives it, and the one of before.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return gl.maximum(gl.minimum(index, size - 1), 0)


@triton.constexpr_function
def query_blocks(COLS):
    """Blocks whose queries have a place: this one and, where shared memory has the room, the next."""
    return 2 if COLS <= 128 else 1


@triton.constexpr_function
def product_layout(COLS):
    """How a warpgroup holds 64 rows of sums with COLS columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])


@triton.constexpr_function
def lane_layout():
    """A number for each of the four threads that hold a row of such sums."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@triton.constexpr_function
def store_layout(COLS):
    """How a warpgroup stores rows: 16 bytes a thread, so that a warp's store fills the lines that it meets."""
    return gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])


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
    """`[batch, heads, length, COLS]` in memory, of which tiles of ROWS rows are copied, with zeros beyond its edges."""
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, BLOCK_COLS], DTYPE)
    # The strides of batch and head count units of 16 bytes.
    unit = gl.cast(128 // DTYPE.primitive_bitwidth, gl.int64)
    return tma.make_tensor_descriptor(
        ptr,
        [batch, heads, length, COLS],
        [stride_b * unit, stride_h * unit, stride_s, 1],
        [1, 1, ROWS, BLOCK_COLS],
        LAYOUT,
    )


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def make_numbers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def make_ring(
    desc, COUNT: gl.constexpr, SENDS: gl.constexpr, READERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr
):
    """Places for COUNT tiles, each of which SENDS arrivals complete and READERS warpgroups read."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, ROWS, BLOCK_COLS], desc.layout)
    return tiles, make_barriers(COUNT, SENDS), make_barriers(COUNT, READERS)


@gluon.jit
def send_tile(desc, batch_row, head, row, ring, ring_turn, STAGES: gl.constexpr):
    """Copy a tile to the ring's next place, once that is free."""
    tiles, full, empty = ring
    stage, lap = ring_turn % STAGES, ring_turn // STAGES
    mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    async_load(desc, [batch_row, head, row, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def receive_tile(ring, ring_turn, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Tile `ring_turn` of a ring, once it is there."""
    tiles, full, _empty = ring
    mbarrier.wait(full.index(ring_turn % STAGES), (ring_turn // STAGES) & 1)
    return tiles.index(ring_turn % STAGES).reshape([ROWS, COLS])


@gluon.jit
def send_turn(
    k_desc,
    v_desc,
    batch_row,
    head,
    start_n,
    values,
    k_ring,
    v_ring,
    numbers,
    ring_turn,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy a block of keys, tell which it is, and copy the values of the one before."""
    stage, lap = ring_turn % STAGES, ring_turn // STAGES
    mbarrier.wait(k_ring[2].index(stage), (lap & 1) ^ 1)
    tell(numbers, stage, start_n // BLOCK_N)
    mbarrier.arrive(k_ring[1].index(stage), count=1)
    send_tile(k_desc, batch_row, head, start_n, k_ring, ring_turn, STAGES)
    send_tile(v_desc, values[0], values[1], values[2], v_ring, ring_turn, STAGES)


@gluon.jit
def hear_block(k_ring, numbers, ring_turn, STAGES: gl.constexpr):
    """Which block of keys `ring_turn` brings, once it is there."""
    mbarrier.wait(k_ring[1].index(ring_turn % STAGES), (ring_turn // STAGES) & 1)
    return hear(numbers, ring_turn % STAGES, 4)


@gluon.jit
def tell(numbers, i, number):
    numbers.index(i).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + gl.cast(number, gl.int32))


@gluon.jit
def hear(numbers, i, WARPS: gl.constexpr):
    return gl.max(numbers.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def tell_work(ring, ring_turn, own_work, h, b, block, num_masked, num_plain):
    """Tell the consumers where a block of rows is, and how many blocks of keys it visits; behind the last h is -1."""
    numbers, full, empty = ring
    stage, lap = ring_turn % 2, ring_turn // 2
    mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
    tell(numbers, stage * TOLD + 0, own_work)
    tell(numbers, stage * TOLD + 1, h)
    tell(numbers, stage * TOLD + 2, b)
    tell(numbers, stage * TOLD + 3, block)
    tell(numbers, stage * TOLD + 4, num_masked)
    tell(numbers, stage * TOLD + 5, num_plain)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def hear_work(ring, ring_turn, WARPS: gl.constexpr):
    """What `tell_work` tells."""
    numbers, full, empty = ring
    stage = ring_turn % 2
    mbarrier.wait(full.index(stage), (ring_turn // 2) & 1)
    own_work = hear(numbers, stage * TOLD + 0, WARPS)
    h = hear(numbers, stage * TOLD + 1, WARPS)
    b = hear(numbers, stage * TOLD + 2, WARPS)
    block = hear(numbers, stage * TOLD + 3, WARPS)
    num_masked = hear(numbers, stage * TOLD + 4, WARPS)
    num_plain = hear(numbers, stage * TOLD + 5, WARPS)
    mbarrier.arrive(empty.index(stage), count=1)
    return own_work, h, b, block, num_masked, num_plain


@gluon.jit
def raised(row_max, found):
    """What a row's weights are relative to from now on, and by what its sums so far are to be multiplied.

    That stays until a score is found that is more than 8 above, so that weights are at most 2**8. Most blocks then
    change it in no row of a warp, and sums are not multiplied. The branch also makes the compiler find the maxima of
    both rows of a thread beside each other, ahead of all exponentials.
    """
    return gl.inline_asm_elementwise(
        RAISE, "=&f,=&f,=&f,=&f,f,f,f,f", [row_max, found], (gl.float32, gl.float32), is_pure=False, pack=2
    )


@gluon.jit
def add_lanes(row_sums, alpha, p, LANES: gl.constexpr):
    """Each thread adds up its own weights of a row, relative to the new maximum: those of others come in at the end."""
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    sums = gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), LANES, assert_trivial=True)
    return row_sums * gl.convert_layout(alpha, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None] + sums


@gluon.jit
def as_pairs(p, DTYPE: gl.constexpr):
    """Weights of 16 bits, two neighbours in a word.

    A loop that carries single ones takes each word apart, and joins it again.
    """
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    TYPE: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    ROUND: gl.constexpr = "cvt.rn." + TYPE + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_pairs(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights as an operand of a product.

    Not pure, so that it stays ahead of products: among them it would make them wait for each other.
    """
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (gl.int16, gl.int16), is_pure=False, pack=1
    )
    tile = gl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
    return gl.convert_layout(gl.reshape(tile, [words.shape[0], words.shape[1] * 2]), LAYOUT, assert_trivial=True)


@triton.constexpr_function
def change_of_turns(HOW, PART):
    """Of the hardware's 16 barriers the last ones: the compiler takes the first."""
    return f"bar.{HOW} {15 - PART}, 256;"


@gluon.jit
def change_turns(HOW: gl.constexpr, PART: gl.constexpr):
    """Wait until it is a warpgroup's turn ("sync"), or say that it is ("arrive")."""
    CHANGE: gl.constexpr = change_of_turns(HOW, PART)
    threads = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(CHANGE, "=r,r", [threads], gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_sums(p_tile, acc, v_ring, ring_turn, BLOCK_N: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr):
    """Begin to add the values that come at `ring_turn`."""
    return warpgroup_mma(p_tile, receive_tile(v_ring, ring_turn, BLOCK_N, BLOCK_DV, STAGES), acc, is_async=True)


@gluon.jit
def begin_block(
    q_tile,
    p_pairs,
    acc,
    k_ring,
    v_ring,
    ring_turn,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The scores of a block, while the values of the one before are being added.

    Warpgroups begin their products in turn: one after the other they then take exponentials beside those of the next.
    """
    p_tile = from_pairs(p_pairs, q_tile.dtype, WEIGHTS)
    k_tile = receive_tile(k_ring, ring_turn, BLOCK_N, BLOCK_D, STAGES)
    change_turns("sync", PART)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    qk = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    acc = begin_sums(p_tile, acc, v_ring, ring_turn, BLOCK_N, BLOCK_DV, STAGES)
    change_turns("arrive", (PART + 1) % PARTS)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    mbarrier.arrive(k_ring[2].index(ring_turn % STAGES), count=1)
    return qk, acc


@gluon.jit
def end_sums(acc, v_ring, ring_turn, STAGES: gl.constexpr):
    """The sums, once the values that came at `ring_turn` are in them."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_ring[2].index(ring_turn % STAGES), count=1)
    return acc


@triton.constexpr_function
def scaling(COUNT):
    """Multiply a thread's COUNT sums, which are of two rows, in pairs: if alpha is 1 in all rows of the warp, none."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * COUNT + i};" for i in range(COUNT))
    return f"""{{
.reg .pred p, q;
setp.neu.f32 p, ${2 * COUNT}, 0f3F800000;
setp.neu.f32 q, ${2 * COUNT + 2}, 0f3F800000;
or.pred p, p, q;
vote.sync.any.pred p, p, 0xFFFFFFFF;
@!p bra.uni DONE;
{products}
DONE:
}}"""


@triton.constexpr_function
def scaling_operands(COUNT):
    """Sums, the same before, and alpha of each."""
    return ",".join(["=f"] * COUNT + [str(i) for i in range(COUNT)] + ["f"] * COUNT)


@gluon.jit
def rescaled(acc, alpha, SUMS: gl.constexpr):
    """The sums relative to what the weights now are."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    SCALE: gl.constexpr = scaling(COUNT)
    OPERANDS: gl.constexpr = scaling_operands(COUNT)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    return gl.inline_asm_elementwise(SCALE, OPERANDS, [acc, alpha], gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def store_columns(ptr, tile, start, length, stride_row, COLS: gl.constexpr):
    """Write `tile` over the rows from `start` on of a `[length, COLS]` matrix, nothing beyond its edges."""
    STORED: gl.constexpr = store_layout(tile.shape[1])
    tile = gl.convert_layout(tile, STORED)
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, STORED))
    # Not pure, or all addresses would be found ahead of the loop and kept.
    row = start + gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row], gl.int32, is_pure=False, pack=1)
    col = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, STORED))
    ptrs = ptr + (row.to(gl.int64) * stride_row)[:, None] + col[None, :]
    gl.store(ptrs, tile, mask=(row < length)[:, None] & (col < COLS)[None, :])


@gluon.jit
def store_rows(ptr, tile, start, length, stride_row, COLS: gl.constexpr):
    """The same for up to 256 columns: for more than 128 at a time shared memory has no room, through which they go."""
    if tile.shape[1] == 256:
        left, right = gl.split(gl.permute(gl.reshape(tile, [tile.shape[0], 2, 128]), [0, 2, 1]))
        store_columns(ptr, left, start, length, stride_row, COLS)
        store_columns(ptr + 128, right, start, length, stride_row, COLS - 128)
    else:
        store_columns(ptr, tile, start, length, stride_row, COLS)


@gluon.jit
def produce_rows(
    q_desc,
    q_ring,
    work_ring,
    ranges_ptr,
    stride_ranges_b,
    q_len,
    num_heads,
    batch,
    work_counter_ptr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    PARTS: gl.constexpr = BLOCK_M // ROWS
    Q_BLOCKS: gl.constexpr = query_blocks(BLOCK_D)
    q_turn = 0
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    # A block of rows of one head is a piece of work, after the first for whichever program is free.
    num_work = num_blocks * num_heads * batch
    own_work = gl.program_id(0)
    while own_work < num_work:
        head, block = own_work // num_blocks, own_work % num_blocks
        b = (head // num_heads).to(gl.int64)
        h = (head % num_heads).to(gl.int64)
        start_m = block * BLOCK_M

        # Of the blocks this one visits, those from full_begin to full_end need no mask.
        block_range = ranges_ptr + b * stride_ranges_b + start_m // BLOCK_M * 4
        kv_begin, full_begin = gl.load(block_range) * BLOCK_N, gl.load(block_range + 1) * BLOCK_N
        full_end, kv_end = gl.load(block_range + 2) * BLOCK_N, gl.load(block_range + 3) * BLOCK_N
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(kv_end - gap - kv_begin, BLOCK_N), 0)
        num_full = (full_end - full_begin) // BLOCK_N
        # Rows that attend to nothing visit block 0, of which their mask keeps nothing.
        num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
        # The first block is masked in any case.
        num_masked = gl.maximum(num_partial, 1)
        num_plain = num_full - (num_masked - num_partial)
        tell_work(work_ring, q_turn, own_work, h, b, block, num_masked, num_plain)
        batch_row, q_head = b.to(gl.int32), h.to(gl.int32)
        for part in gl.static_range(PARTS):
            send_tile(q_desc, batch_row, q_head, start_m + part * ROWS, q_ring, PARTS * q_turn + part, PARTS * Q_BLOCKS)
        q_turn += 1
        own_work = gl.num_programs(0) + gl.atomic_add(work_counter_ptr, 1, sem="relaxed")
    tell_work(work_ring, q_turn, -1, -1, -1, -1, -1, -1)


@gluon.jit
def produce_keys(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    key_blocks,
    work_ring,
    ranges_ptr,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    kv_turn = 0
    # Each turn brings the keys of a block and the values of the one before.
    # Before the first these are zeros, for they lie behind the last key.
    values = (0, 0, kv_len)
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    work_turn = 0
    own_work = hear_work(work_ring, work_turn, 1)[0]
    while own_work >= 0:
        head, block = own_work // num_blocks, own_work % num_blocks
        b = (head // num_heads).to(gl.int64)
        h = (head % num_heads).to(gl.int64)
        hkv = h // group_size
        start_m = block * BLOCK_M

        # Of the blocks this one visits, those from full_begin to full_end need no mask.
        block_range = ranges_ptr + b * stride_ranges_b + start_m // BLOCK_M * 4
        kv_begin, full_begin = gl.load(block_range) * BLOCK_N, gl.load(block_range + 1) * BLOCK_N
        full_end, kv_end = gl.load(block_range + 2) * BLOCK_N, gl.load(block_range + 3) * BLOCK_N
        gap = full_end - full_begin
        num_partial = gl.maximum(gl.cdiv(kv_end - gap - kv_begin, BLOCK_N), 0)
        num_full = (full_end - full_begin) // BLOCK_N
        # Rows that attend to nothing visit block 0, of which their mask keeps nothing.
        num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
        # The first block is masked in any case.
        num_masked = gl.maximum(num_partial, 1)
        batch_row, kv_head = b.to(gl.int32), hkv.to(gl.int32)
        for nth in range(num_masked):
            start_n = kv_begin + nth * BLOCK_N
            start_n = gl.where(start_n < full_begin, start_n, start_n + gap)
            start_n = gl.where(start_n < kv_len, start_n, 0)
            if num_partial == 0:
                start_n = full_begin
            send_turn(
                k_desc,
                v_desc,
                batch_row,
                kv_head,
                start_n,
                values,
                k_ring,
                v_ring,
                key_blocks,
                kv_turn,
                BLOCK_N,
                STAGES,
            )
            values = (batch_row, kv_head, start_n)
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            start_n = full_begin + nth * BLOCK_N
            send_turn(
                k_desc,
                v_desc,
                batch_row,
                kv_head,
                start_n,
                values,
                k_ring,
                v_ring,
                key_blocks,
                kv_turn,
                BLOCK_N,
                STAGES,
            )
            values = (batch_row, kv_head, start_n)
            kv_turn += 1
        work_turn += 1
        own_work = hear_work(work_ring, work_turn, 1)[0]
    send_tile(v_desc, values[0], values[1], values[2], v_ring, kv_turn, STAGES)


@gluon.jit
def consume_tiles(
    q_ring,
    k_ring,
    v_ring,
    key_blocks,
    work_ring,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    o_ptr,
    lse_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    q_len,
    kv_len,
    num_heads,
    scale,
    padding_id,
    RAGGED: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ring[0].dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    OWN_KEY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = BLOCK_M // ROWS
    Q_BLOCKS: gl.constexpr = query_blocks(BLOCK_D)
    qk_scale = scale * LOG2E
    kv_turn, q_turn = 0, 0
    if PART == PARTS - 1:
        change_turns("arrive", 0)
    # Before the first block of rows there is one of no row, with a block of weights of 0 left to add.
    p_pairs = as_pairs(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES), DTYPE)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, SUMS)
    inv_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SUMS))
    o_start, o_row = gl.cast(0, gl.int64), q_len
    _work, h, b, block, num_masked, num_plain = hear_work(work_ring, q_turn, 4)
    while h >= 0:
        h = h.to(gl.int64)
        b = b.to(gl.int64)
        # The compiler must know what this is a multiple of.
        start_m = block * BLOCK_M
        rows = start_m + PART * ROWS + gl.arange(0, ROWS, layout=ROW)
        q_segment_ids_q = gl.load(
            q_segment_ids_ptr
            + b * stride_q_segment_ids_0
            + clamp_index(rows, q_segment_ids_size_1).to(gl.int64) * stride_q_segment_ids_1
        )

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)

        q_place = PARTS * (q_turn % Q_BLOCKS) + PART
        mbarrier.wait(q_ring[1].index(q_place), (q_turn // Q_BLOCKS) & 1)
        q_tile = q_ring[0].index(q_place).reshape([ROWS, BLOCK_D])
        # Beside the first block the last values of the rows before are added.
        for nth in range(num_masked):
            start_n = hear_block(k_ring, key_blocks, kv_turn, STAGES) * BLOCK_N
            cols = start_n + gl.arange(0, BLOCK_N, layout=KEY)
            own_col = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            own_segment = gl.load(
                kv_segment_ids_ptr
                + b * stride_kv_segment_ids_0
                + clamp_index(own_col, kv_segment_ids_size_1).to(gl.int64) * stride_kv_segment_ids_1
            )
            qk, acc = begin_block(
                q_tile,
                p_pairs,
                acc,
                k_ring,
                v_ring,
                kv_turn,
                PART,
                PARTS,
                SCORES,
                WEIGHTS,
                ROWS,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                STAGES,
            )
            # Always so: else the compiler would find the mask ahead of the product, and keep it as bits.
            if start_m < q_len:
                kv_segment_ids_kv = gl.convert_layout(own_segment, KEY)
                keep = (q_segment_ids_q[:, None] == kv_segment_ids_kv[None, :]) & (kv_segment_ids_kv != padding_id)[
                    None, :
                ]
                if RAGGED:
                    keep = keep & (cols < kv_len)[None, :]
                qk = gl.where(keep, qk, float("-inf"))
            max_new, alpha = raised(row_max, gl.max(qk, 1) * qk_scale)
            # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(qk * qk_scale - max_ref[:, None])
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = as_pairs(p, DTYPE)
            row_max = max_new
            acc = end_sums(acc, v_ring, kv_turn, STAGES)
            if nth == 0:
                # These were of the rows before.
                store_rows(o_ptr + o_start, (acc * inv_sum[:, None]).to(DTYPE), o_row, q_len, stride_os, HEAD_DIM_V)
                acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, SUMS)
            else:
                acc = rescaled(acc, alpha, SUMS)
            kv_turn += 1

        for _ in range(num_plain):
            qk, acc = begin_block(
                q_tile,
                p_pairs,
                acc,
                k_ring,
                v_ring,
                kv_turn,
                PART,
                PARTS,
                SCORES,
                WEIGHTS,
                ROWS,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                STAGES,
            )
            max_new, alpha = raised(row_max, gl.max(qk, 1) * qk_scale)
            p = gl.exp2(qk * qk_scale - max_new[:, None])
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_pairs = as_pairs(p, DTYPE)
            row_max = max_new
            acc = end_sums(acc, v_ring, kv_turn, STAGES)
            acc = rescaled(acc, alpha, SUMS)
            kv_turn += 1

        mbarrier.arrive(q_ring[2].index(q_place), count=1)
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), ROW)
        # A row without any key gives o = 0 and lse = -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN2
        gl.store(lse_ptr + (b * num_heads + h) * q_len + rows, lse, mask=rows < q_len)
        # What is left to do for these rows is done beside the first block of the next ones.
        inv_sum = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, SUMS))
        o_start, o_row = b * stride_ob + h * stride_oh, start_m + PART * ROWS
        q_turn += 1
        _work, h, b, block, num_masked, num_plain = hear_work(work_ring, q_turn, 4)

    acc = begin_sums(from_pairs(p_pairs, DTYPE, WEIGHTS), acc, v_ring, kv_turn, BLOCK_N, BLOCK_DV, STAGES)
    acc = end_sums(acc, v_ring, kv_turn, STAGES)
    store_rows(o_ptr + o_start, (acc * inv_sum[:, None]).to(DTYPE), o_row, q_len, stride_os, HEAD_DIM_V)


@gluon.jit(
    do_not_specialize=[
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
def full_segmented_hopper_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    ranges_ptr,
    o_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_vb,
    stride_vh,
    stride_vs: gl.constexpr,
    stride_ob,
    stride_oh,
    stride_os: gl.constexpr,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
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
    work_counter_ptr,
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
    PARTS: gl.constexpr = BLOCK_M // ROWS
    q_desc = describe_rows(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, ROWS, BLOCK_D)
    k_desc = describe_rows(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_rows(
        v_ptr, batch, kv_heads, kv_len, stride_vb, stride_vh, stride_vs, HEAD_DIM_V, BLOCK_N, BLOCK_DV
    )
    q_ring = make_ring(q_desc, PARTS * query_blocks(BLOCK_D), 1, 1, ROWS, BLOCK_D)
    # A block of keys comes with its number.
    k_ring = make_ring(k_desc, STAGES, 2, PARTS, BLOCK_N, BLOCK_D)
    v_ring = make_ring(v_desc, STAGES, 1, PARTS, BLOCK_N, BLOCK_DV)
    key_blocks, work_ring = (
        make_numbers(STAGES),
        (make_numbers(2 * TOLD), make_barriers(2, 1), make_barriers(2, PARTS + 1)),
    )
    # Registers are those of each thread: the first consumer gets what is left, as many as the others.
    if PARTS == 3:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ring,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        o_ptr,
                        lse_ptr,
                        stride_ob,
                        stride_oh,
                        stride_os,
                        stride_q_segment_ids_0,
                        stride_q_segment_ids_1,
                        stride_kv_segment_ids_0,
                        stride_kv_segment_ids_1,
                        q_segment_ids_size_1,
                        kv_segment_ids_size_1,
                        q_len,
                        kv_len,
                        num_heads,
                        scale,
                        padding_id,
                        RAGGED,
                        HEAD_DIM_V,
                        BLOCK_D,
                        BLOCK_DV,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                        0,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        q_ring,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        o_ptr,
                        lse_ptr,
                        stride_ob,
                        stride_oh,
                        stride_os,
                        stride_q_segment_ids_0,
                        stride_q_segment_ids_1,
                        stride_kv_segment_ids_0,
                        stride_kv_segment_ids_1,
                        q_segment_ids_size_1,
                        kv_segment_ids_size_1,
                        q_len,
                        kv_len,
                        num_heads,
                        scale,
                        padding_id,
                        RAGGED,
                        HEAD_DIM_V,
                        BLOCK_D,
                        BLOCK_DV,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                        1,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        q_ring,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        o_ptr,
                        lse_ptr,
                        stride_ob,
                        stride_oh,
                        stride_os,
                        stride_q_segment_ids_0,
                        stride_q_segment_ids_1,
                        stride_kv_segment_ids_0,
                        stride_kv_segment_ids_1,
                        q_segment_ids_size_1,
                        kv_segment_ids_size_1,
                        q_len,
                        kv_len,
                        num_heads,
                        scale,
                        padding_id,
                        RAGGED,
                        HEAD_DIM_V,
                        BLOCK_D,
                        BLOCK_DV,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                        2,
                    ),
                ),
                (
                    produce_rows,
                    (
                        q_desc,
                        q_ring,
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        num_heads,
                        batch,
                        work_counter_ptr,
                        BLOCK_D,
                        BLOCK_M,
                        BLOCK_N,
                    ),
                ),
                (
                    produce_keys,
                    (
                        k_desc,
                        v_desc,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        kv_len,
                        num_heads,
                        group_size,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
            ],
            worker_num_warps=[4, 4, 1, 1],
            worker_num_regs=[160, 160, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ring,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        o_ptr,
                        lse_ptr,
                        stride_ob,
                        stride_oh,
                        stride_os,
                        stride_q_segment_ids_0,
                        stride_q_segment_ids_1,
                        stride_kv_segment_ids_0,
                        stride_kv_segment_ids_1,
                        q_segment_ids_size_1,
                        kv_segment_ids_size_1,
                        q_len,
                        kv_len,
                        num_heads,
                        scale,
                        padding_id,
                        RAGGED,
                        HEAD_DIM_V,
                        BLOCK_D,
                        BLOCK_DV,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                        0,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        q_ring,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        q_segment_ids_ptr,
                        kv_segment_ids_ptr,
                        o_ptr,
                        lse_ptr,
                        stride_ob,
                        stride_oh,
                        stride_os,
                        stride_q_segment_ids_0,
                        stride_q_segment_ids_1,
                        stride_kv_segment_ids_0,
                        stride_kv_segment_ids_1,
                        q_segment_ids_size_1,
                        kv_segment_ids_size_1,
                        q_len,
                        kv_len,
                        num_heads,
                        scale,
                        padding_id,
                        RAGGED,
                        HEAD_DIM_V,
                        BLOCK_D,
                        BLOCK_DV,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                        1,
                    ),
                ),
                (
                    produce_rows,
                    (
                        q_desc,
                        q_ring,
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        num_heads,
                        batch,
                        work_counter_ptr,
                        BLOCK_D,
                        BLOCK_M,
                        BLOCK_N,
                    ),
                ),
                (
                    produce_keys,
                    (
                        k_desc,
                        v_desc,
                        k_ring,
                        v_ring,
                        key_blocks,
                        work_ring,
                        ranges_ptr,
                        stride_ranges_b,
                        q_len,
                        kv_len,
                        num_heads,
                        group_size,
                        BLOCK_M,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
            ],
            worker_num_warps=[4, 1, 1],
            worker_num_regs=[240, 24, 24],
        )
