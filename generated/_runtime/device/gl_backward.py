# SPDX-License-Identifier: Apache-2.0
"""What Hopper's backwards share: rings of rows with their vectors, products that begin with a vector, and sums of ds.

Tiles of scores are transposed, keys by queries, so that the products for dv and dk take probabilities and ds as
operands straight from registers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from .gl import (
    Ring,
    allocate_tiles,
    balanced_blocks,
    count_items,
    describe_rows,
    load_sequence,
    longest_first,
    make_barriers,
    product_layout,
    store_layout,
    sum_parts,
)
from .gl_versions import aggregate, async_load

# The bytes of the L2 cache for the heads whose blocks are worked on at a time: q and do in 16 bits, sums of dq in 32.
NEAR_BYTES = gl.constexpr(2**25)

# Programs that work on the rows of one head at a time, if the blocks of several heads are ordered together.
SHARERS = gl.constexpr(16)


@gluon.jit
def describe_input(
    ptr, batch, heads, length, stride_b, stride_h, stride_s,
    COLS: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
):  # fmt: skip
    """`describe_rows` for a length that may be 0. No dim of a descriptor may be 0; of no rows, none is ever copied."""
    length = gl.maximum(length, 1)
    return describe_rows(ptr, batch, heads, length, stride_b, stride_h, stride_s, COLS, ROWS, BLOCK_COLS)


@gluon.jit
def describe_vector(ptr, length, ROWS: gl.constexpr):
    """A descriptor of a vector of `length` numbers, copied in parts of ROWS."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [length], [1], [ROWS], LAYOUT)


@gluon.jit
def heads_in_cache(q_len, num_head_groups, batch, group_size, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr):
    """The number of groups of query heads, over all batch rows, whose blocks of keys are worked on at a time.

    Programs that begin together add to the rows of dq of these groups: as many as the cache has room for.
    """
    NEAR_ROWS: gl.constexpr = NEAR_BYTES // (6 * BLOCK_D + 2 * BLOCK_DV)
    near_heads = gl.maximum(NEAR_ROWS // gl.maximum(q_len, 1) // group_size, 1)
    return gl.minimum(near_heads, num_head_groups * batch)


@gluon.jit
def count_key_items(q_len, kv_len, num_key_blocks, num_heads):
    """The work items of a launch, and the heads whose blocks of keys are taken one by one; -1: all, in another order.

    More rows see an early block than a late one. If there are as many rows as keys, each pair of an early and a late
    block is seen by equally many rows. If the rows are only a part of the sequence, all of them see many of the blocks,
    so that no pairs take equally long: then an item is one block.
    """
    num_items, single_heads = count_items(num_key_blocks, num_heads)
    if q_len < kv_len:
        num_items, single_heads = num_key_blocks * num_heads, -1
    return num_items, single_heads


@gluon.jit
def locate_key_blocks(item, num_items, num_key_blocks, num_heads, single_heads):
    """The blocks of keys of a work item: as `balanced_blocks`, or one block if `single_heads` is -1.

    Then blocks are taken in the order of `longest_first`, of so many heads at a time that SHARERS programs read the
    rows of one head from the cache.
    """
    head, block, num_taken = balanced_blocks(item, num_items, num_key_blocks, num_heads, single_heads)
    if single_heads < 0:
        item = longest_first(item, num_items, num_key_blocks, gl.cdiv(gl.num_programs(0), SHARERS))
        head, block, num_taken = item // num_key_blocks, item % num_key_blocks, 1
    return head, block, num_taken


@gluon.jit
def first_blocks_first(turn, num_items, num_blocks):
    """The block of keys that is taken as number `turn`: first the first block of each head, then the others, head by
    head.

    All rows visit the first block, which has the attention sinks: if it were begun late, it alone would run at the end.
    """
    num_heads = num_items // num_blocks
    others = gl.maximum(num_blocks - 1, 1)
    other = turn - num_heads
    item = other // others * num_blocks + 1 + other % others
    item = gl.where(turn < num_heads, turn * num_blocks, item)
    return gl.where(turn < num_items, item, num_items)


@gluon.jit
def fetch_first_blocks_first(work_ring, counter_ptr, turn, num_items, num_blocks):
    """Take the next block in the order of `first_blocks_first` that no program has taken, and publish its number."""
    taken = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    item = first_blocks_first(taken, num_items, num_blocks)
    work_ring.publish(turn, (item,))
    return item


@triton.constexpr_function
def dq_columns(BLOCK_M, BLOCK_D, HEAD_DIM, PART):
    """Columns of a warpgroup's part of dq: all columns of half of 128 rows, or half of the columns of 64 rows.

    The second half leaves out columns that pad a head.

    >>> dq_columns(128, 64, 64, 1), dq_columns(64, 128, 128, 1), dq_columns(64, 128, 80, 0), dq_columns(64, 128, 80, 1)
    (64, 64, 64, 16)
    """
    if BLOCK_M == 128:
        return BLOCK_D
    return sum_parts(BLOCK_D, HEAD_DIM)[1] if PART == 1 and len(sum_parts(BLOCK_D, HEAD_DIM)) == 2 else BLOCK_D // 2


@gluon.jit
def describe_parts(ptr, length, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Descriptors of the sums of dq, `[length, 32]`, to which parts are added: of both parts alike, or of each.

    The second part has fewer lines if it leaves out columns that pad a head.
    """
    LINES: gl.constexpr = BLOCK_M * BLOCK_D // 64
    REST: gl.constexpr = 2 * dq_columns(BLOCK_M, BLOCK_D, HEAD_DIM, 1)
    if REST == LINES:
        return (describe_lines(ptr, length, LINES),)
    else:
        return describe_lines(ptr, length, LINES), describe_lines(ptr, length, REST)


@gluon.jit
def describe_lines(ptr, length, LINES: gl.constexpr):
    """A descriptor of `[length, 32]`, to which tiles of LINES lines are added."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, 32], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [length, 32], [32, 1], [LINES, 32], LAYOUT)


@gluon.jit
def locate_keys(block_seqs_ptr, item, num_head_groups, BLOCK_N: gl.constexpr):
    """The sequence, group of query heads and block of keys of work item `item` of a packed call.

    As in the portable kernel the blocks of a sequence follow each other, and long sequences come first. Returned are
    the sequence's number and its first entry; start and length of its queries, and of its keys; the group of
    query heads; and the first key of the block, counted from the start of the sequence.
    """
    b, first_entry, q_start, q_len, kv_start, kv_len, _ = load_sequence(block_seqs_ptr, item // num_head_groups)
    sequence_item = item - first_entry * num_head_groups
    num_key_blocks = gl.cdiv(kv_len, BLOCK_N)
    head_group = (sequence_item // num_key_blocks).to(gl.int64)
    start_n = (sequence_item % num_key_blocks) * BLOCK_N
    return b, first_entry, q_start, q_len, kv_start, kv_len, head_group, start_n


@aggregate
class RowRing:
    """A ring buffer of tiles of query rows, each with a vector that has a number for each row."""

    tiles: gl.shared_memory_descriptor
    vectors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def send(self, desc, vector_desc, rows, start, first, turn):
        """Copy the tile that begins at row `start` of its head, and the vector from its element `first` on."""
        stage, lap = turn % self.stages, turn // self.stages
        mbarrier.wait(self.empty.index(stage), (lap & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), desc.block_type.nbytes + vector_desc.block_type.nbytes)
        async_load(desc, rows.coords(start, 0), self.full.index(stage), self.tiles.index(stage))
        async_load(vector_desc, [first], self.full.index(stage), self.vectors.index(stage))

    @gluon.jit
    def receive(self, turn):
        """Wait for the tile of `turn`, `[ROWS, COLS]`, and its vector."""
        mbarrier.wait(self.full.index(turn % self.stages), (turn // self.stages) & 1)
        return self.tiles.index(turn % self.stages).reshape([self.tiles.shape[-2], self.tiles.shape[-1]])

    @gluon.jit
    def release(self, stage, COUNT: gl.constexpr = 1):
        """Say that COUNT warpgroups have read the tile and the vector of a stage."""
        mbarrier.arrive(self.empty.index(stage), count=COUNT)


@gluon.jit
def make_row_ring(desc, vector_desc, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """A ring for tiles of ROWS rows, which two warpgroups read."""
    tiles = allocate_tiles(desc, STAGES)
    vectors = gl.allocate_shared_memory(vector_desc.dtype, [STAGES, ROWS], vector_desc.layout)
    return RowRing(tiles, vectors, make_barriers(STAGES, 1), make_barriers(STAGES, 2), STAGES)


@aggregate
class HandOver:
    """Two tiles that one warpgroup writes and the other reads."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, tile, turn):
        """Give the other warpgroup the tile of `turn`."""
        stage, lap = turn & 1, (turn >> 1) & 1
        mbarrier.wait(self.empty.index(stage), lap ^ 1)
        self.tiles.index(stage).store(tile)
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def take(self, turn):
        """Wait for the tile of `turn`."""
        mbarrier.wait(self.full.index(turn & 1), (turn >> 1) & 1)
        return self.tiles.index(turn & 1)

    @gluon.jit
    def release(self, turn):
        """Say that the tile of `turn` has been read."""
        mbarrier.arrive(self.empty.index(turn & 1), count=1)


@gluon.jit
def make_hand_over(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Room for tiles of `[ROWS, COLS]`."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, COLS], LAYOUT)
    return HandOver(tiles, make_barriers(2, 1), make_barriers(2, 1))


@gluon.jit
def make_exchange(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A ring of two tiles of `[ROWS, COLS]`: each of two warpgroups writes half of a tile, and both read all of it."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, COLS], LAYOUT)
    return Ring(tiles, make_barriers(2, 2), make_barriers(2, 2), 2, 1)


@gluon.jit
def begin_with(vector, KEYS: gl.constexpr, SCORES: gl.constexpr):
    """The accumulator that a product begins with, `[KEYS, ROWS]`: for each key the `vector` of a number per row."""
    none = gl.zeros([KEYS, vector.shape[0]], gl.float32, SCORES)
    tile = gl.broadcast(vector[None, :], none)[0]
    # Move the tile to its registers here: a copy between two products would make the compiler wait for the first.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], gl.float32, is_pure=False, pack=1)


@gluon.jit
def in_fragments(tile, COLS: gl.constexpr):
    """64 rows of an accumulator as lines of 32 numbers, 4 neighbours to a thread: this only renames registers.

    Stores then take 16 bytes at a time without bank conflicts, and every tile that is added has the same order.
    """
    parts = gl.permute(gl.reshape(tile, [4, 2, 8, COLS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(parts, [2 * COLS, 32])


@gluon.jit
def add_sums(ptr, sums):
    """Add 64 rows of sums to memory, 16 bytes a thread."""
    COLS: gl.constexpr = sums.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat = gl.convert_layout(gl.reshape(in_fragments(sums, COLS), [64 * COLS]), FLAT)
    # Triton's own atomics return the value before, which costs a round trip.
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0;",
        "=r,l,l,l,l,r,r,r,r",
        [ptr + gl.arange(0, 64 * COLS, layout=FLAT), flat.to(gl.int32, bitcast=True)],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def add_rows(ptr, sums, num_rows, LAYOUT: gl.constexpr):
    """Add the sums of rows to memory, nothing beyond the last row."""
    row = gl.arange(0, sums.shape[0], layout=LAYOUT)
    gl.atomic_add(ptr + row, sums, mask=row < num_rows, sem="relaxed")


@gluon.jit
def make_ones(DTYPE: gl.constexpr, ROWS: gl.constexpr):
    """The matrix of ones by which the tensor cores sum ds over rows or keys, in shared memory, `[8, ROWS]`.

    They sum the same rounded ds that they multiply for dq and dk.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles = gl.allocate_shared_memory(DTYPE, [1, 8, ROWS], gl.NVMMASharedLayout.get_default_for([8, ROWS], DTYPE))
    tiles.index(0).store(gl.full([8, ROWS], 1.0, DTYPE, LAYOUT))
    fence_async_shared()
    return tiles.index(0)


@triton.constexpr_function
def sums_layout():
    """The layout of the sums of 64 lines. Each sum occurs eight times, because a product has at least 8 columns."""
    return product_layout(8)


@gluon.jit
def of_lines(sums, LINE: gl.constexpr):
    """The sum of each line, from the eight equal sums that the product gives."""
    return gl.convert_layout(gl.sum(sums, 1) * 0.125, LINE)


@gluon.jit
def begin_sums_by_row(ds, ones):
    """Issue the sums of ds of 64 rows over keys."""
    none = gl.zeros([64, 8], gl.float32, sums_layout())
    return warpgroup_mma(ds, ones.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def begin_sums_by_key(ds, ones, sums):
    """Issue the sums of ds of each key over rows, added to `sums`."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(), k_width=2)
    return warpgroup_mma(gl.convert_layout(ds, WEIGHTS), ones.permute((1, 0)), sums, is_async=True)


@gluon.jit
def store_tile(ptr, tile, start, length, stride_row, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Write `tile` to the rows from `start` on of a `[length, COLS]` matrix, nothing beyond its edges, in its dtype."""
    tile = tile.to(ptr.dtype.element_ty)
    row = start + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + (row.to(gl.int64) * stride_row)[:, None] + col[None, :]
    gl.store(ptrs, tile, mask=(row < length)[:, None] & (col < COLS)[None, :])


@gluon.jit
def store_through(ptr, tile, shared, start, length, stride_row, COLS: gl.constexpr):
    """`store_tile`, converted to `store_layout` through the tile `shared` if that has its columns and dtype."""
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    SUMS: gl.constexpr = product_layout(tile.shape[1])
    FITS: gl.constexpr = shared.shape[1] >= tile.shape[1] and shared.dtype == DTYPE
    LAYOUT: gl.constexpr = store_layout(tile.shape[1]) if FITS else SUMS
    if FITS:
        if shared.shape[1] > tile.shape[1]:
            shared = shared.slice(0, tile.shape[1], dim=1)
        shared.store(tile.to(DTYPE))
        tile = shared.load(LAYOUT)
    store_tile(ptr, tile, start, length, stride_row, COLS, LAYOUT)


@gluon.jit
def store_second(ptr, sums, factor, start, length, stride_row, COLS: gl.constexpr):
    """Store the second of the `sum_parts`, if there is one, times a factor; as `store_tile`."""
    if len(sums) == 2:
        FIRST: gl.constexpr = sums[0].shape[1]
        LAYOUT: gl.constexpr = product_layout(sums[1].shape[1])
        store_tile(ptr + FIRST, sums[1] * factor, start, length, stride_row, COLS - FIRST, LAYOUT)
