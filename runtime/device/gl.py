# Gluon has no starred lists and tuples.
# ruff: noqa: RUF005
"""What Hopper's kernels share: layouts, ring buffers in shared memory, and tensor descriptors for TMA.

A producer warp copies tiles to the stages of a ring buffer, and consumer warpgroups read them. Turn `i` uses stage
`i % stages`. Two mbarriers guard each stage: `full` completes once the tile has arrived, `empty` once every reader has
released it. A wait names the parity of the phase that must be over, which changes with each lap over the ring.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .block_seqs import FIRST_ENTRY, KV_LEN, KV_START, LSE_START, Q_LEN, Q_START, RECORD, SEQUENCE
from .gl_pieces import GroupedTile, group_of, piece_groups, piece_slots
from .gl_versions import VIEWS_GROW, aggregate, async_load, reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# Columns of 16-bit elements that one copy by TMA swizzles: 128 bytes. A wider tile consists of such blocks of columns.
SWIZZLE_COLS = gl.constexpr(64)

# The virtual tensor of `describe_packed_rows` has MOST_ROWS rows, and MOST_COUNT steps along each axis that moves them.
# WRAP_BITS is a stride in bits: MOST_ROWS steps of it are 2**64 bytes.
MOST_ROWS = gl.constexpr(2**30)
MOST_COUNT = gl.constexpr(0x7FFF0000)
WRAP_BITS = gl.constexpr(2**37)


@triton.constexpr_function
def product_layout(COLS):
    """The layout of a warpgroup's accumulator of 64 rows and COLS columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])


@gluon.jit
def begin_product(left, right, sums, HEAD_DIM: gl.constexpr, USE_ACC: gl.constexpr):
    """Issue the product `left right^T` over the columns of a head, added to `sums` if USE_ACC.

    A tile's columns are a power of two, and those beyond HEAD_DIM hold zeros. The tensor cores sum 16 columns at a
    time: the product is issued in parts that together leave out what they can of the zeros.
    """
    PARTS: gl.constexpr = parts_of(left.shape[1], HEAD_DIM)
    for i in gl.static_range(len(PARTS)):
        own = left.slice(PARTS[i][0], PARTS[i][1], dim=1)
        other = right.slice(PARTS[i][0], PARTS[i][1], dim=1).permute((1, 0))
        sums = warpgroup_mma(own, other, sums, use_acc=USE_ACC or i > 0, is_async=True)
    return sums


@triton.constexpr_function
def parts_of(COLS, HEAD_DIM):
    """The parts of a tile of COLS columns that hold the columns of a head: of each its first column, and how many.

    >>> parts_of(256, 192), parts_of(128, 100), parts_of(128, 128)
    (((0, 128), (128, 64)), ((0, 64), (64, 32), (96, 16)), ((0, 128),))
    """
    found, first = [], 0
    while first < HEAD_DIM:
        columns = COLS
        while columns > 16 and first + columns > HEAD_DIM + 15:
            columns //= 2
        found.append((first, columns))
        first += columns
    return tuple(found)


@triton.constexpr_function
def piece_columns(COLS, HEAD_DIM):
    """Columns of the pieces in which a tile of up to 256 columns is stored: 64 if that saves the last 64 of 256."""
    return 64 if COLS == 256 and HEAD_DIM <= 192 else COLS


@triton.constexpr_function
def count_pieces(COLS, HEAD_DIM, WIDTH):
    """The pieces, of WIDTH columns each, of a tile of COLS columns that hold columns of a head.

    >>> count_pieces(512, 512, 64), count_pieces(512, 272, 64), count_pieces(512, 272, 128), count_pieces(256, 160, 64)
    (8, 5, 3, 3)
    """
    return len(range(0, min(COLS, HEAD_DIM), WIDTH))


@triton.constexpr_function
def whole_columns(COLS):
    """The smallest power of two that is at least COLS."""
    return 1 << (COLS - 1).bit_length()


@triton.constexpr_function
def sum_parts(COLS, HEAD_DIM):
    """The parts in which a head's columns of o, dk or dv are summed up: the columns of each, one or two powers of two.

    >>> sum_parts(128, 128), sum_parts(128, 80), sum_parts(256, 192), sum_parts(256, 200)
    ((128,), (64, 16), (128, 64), (256,))
    """
    half = COLS // 2
    rest = max(16, 1 << (max(HEAD_DIM - half, 1) - 1).bit_length())
    return (COLS,) if rest >= half else (half, rest)


@gluon.jit
def no_sums(COLS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Sums of 64 rows that begin with 0: for each of `sum_parts` a tile `[64, columns]`."""
    FIRST: gl.constexpr = sum_parts(COLS, HEAD_DIM)[0]
    first = gl.zeros([64, FIRST], gl.float32, product_layout(FIRST))
    if FIRST == COLS:
        return (first,)
    else:
        REST: gl.constexpr = sum_parts(COLS, HEAD_DIM)[1]
        return first, gl.zeros([64, REST], gl.float32, product_layout(REST))


@gluon.jit
def as_operand(weights, part):
    """Weights of 64 rows in the registers from which a product is added to a part of sums."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(part.shape[1]), k_width=2)
    return gl.convert_layout(weights, LAYOUT)


@gluon.jit
def begin_sums(weights, tile, sums):
    """Issue `sums += weights tile`. `weights`: `as_operand` of the first part; `sums`: in `sum_parts`."""
    COLS: gl.constexpr = sums[0].shape[1]
    if len(sums) == 1:
        return (warpgroup_mma(weights, tile, sums[0], is_async=True),)
    else:
        REST: gl.constexpr = sums[1].shape[1]
        first = warpgroup_mma(weights, tile.slice(0, COLS, dim=1), sums[0], is_async=True)
        rest_tile = tile.slice(COLS, REST, dim=1)
        return first, warpgroup_mma(as_operand(weights, sums[1]), rest_tile, sums[1], is_async=True)


@gluon.jit
def wait_for_sums(sums, LATER: gl.constexpr):
    """Wait for all parts of sums, but not for the LATER products that were issued after them."""
    return (warpgroup_mma_wait(LATER, deps=sums),) if len(sums) == 1 else warpgroup_mma_wait(LATER, deps=sums)


@triton.constexpr_function
def store_layout(COLS):
    """The layout in which a warpgroup stores rows: 16 bytes a thread, so that a warp fills whole cache lines."""
    return gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers. A phase of each completes after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def make_numbers(COUNT: gl.constexpr):
    """Room for COUNT int32 in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def put_number(numbers, i, number):
    """Store a number; the caller is a single warp."""
    numbers.index(i).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + gl.cast(number, gl.int32))


@gluon.jit
def get_number(numbers, i, WARPS: gl.constexpr):
    """Load a number as a scalar; the caller has WARPS warps."""
    return gl.max(numbers.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def load_sequence(block_seqs_ptr, entry):
    """The sequence of a block of a packed call: its number and first entry; start and length of its queries, and of its
    keys; its first row in lse of head 0."""
    record = block_seqs_ptr + entry * RECORD
    b, first_entry = gl.load(record + SEQUENCE).to(gl.int64), gl.load(record + FIRST_ENTRY)
    q_start, q_len = gl.load(record + Q_START).to(gl.int64), gl.load(record + Q_LEN)
    kv_start, kv_len = gl.load(record + KV_START).to(gl.int64), gl.load(record + KV_LEN)
    return b, first_entry, q_start, q_len, kv_start, kv_len, gl.load(record + LSE_START)


@aggregate
class HeadRows:
    """The rows of one head of `[batch, heads, length, cols]`, as coordinates for TMA."""

    batch_row: gl.tensor
    head: gl.tensor

    @gluon.jit
    def coords(self, row, column):
        return self.batch_row, self.head, row, column


@aggregate
class SequenceRows:
    """The rows of one head of a packed sequence, as coordinates for a descriptor of `describe_packed_rows`.

    The sequence has `length` rows and ends ahead of row `end` in memory.
    """

    end: gl.tensor
    length: gl.tensor
    head: gl.tensor

    @gluon.jit
    def coords(self, row, column):
        return MOST_ROWS, self.end, self.head, MOST_ROWS - self.length + row, column


@gluon.jit
def describe_rows(
    ptr, batch, heads, length, stride_b, stride_h, stride_s,
    COLS: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
):  # fmt: skip
    """A descriptor of `[batch, heads, length, COLS]`, copied in tiles of ROWS rows, with zeros beyond the edges."""
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
def describe_packed_rows(
    ptr, heads, stride_h, stride_s, COLS: gl.constexpr, ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr
):
    """A descriptor of packed `[total, heads, COLS]`, in tiles of ROWS rows, with zeros beyond a sequence's edges.

    The hardware clips only at the end of an axis. So every sequence ends at row MOST_ROWS of a virtual axis, and two
    more axes move that end to the sequence's place in memory. MOST_ROWS steps along the first axis go back by MOST_ROWS
    rows, because their 64-bit addresses wrap around. One step along the second axis goes forward by one row: there are
    as many steps as rows ahead of the sequence's end.
    """
    DTYPE: gl.constexpr = ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, BLOCK_COLS], DTYPE)
    # The stride of heads counts units of 16 bytes.
    unit = gl.cast(128 // DTYPE.primitive_bitwidth, gl.int64)
    row_stride = gl.cast(stride_s, gl.int64)
    WRAP_STRIDE: gl.constexpr = WRAP_BITS // DTYPE.primitive_bitwidth
    return tma.make_tensor_descriptor(
        ptr,
        [MOST_COUNT, MOST_COUNT, heads, MOST_ROWS, COLS],
        [WRAP_STRIDE - row_stride, row_stride, stride_h * unit, row_stride, 1],
        [1, 1, 1, ROWS, BLOCK_COLS],
        LAYOUT,
    )


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of a descriptor, `[STAGES, 1, ..., ROWS, COLS]`."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, ARRIVALS: gl.constexpr, READERS: gl.constexpr, PIECES: gl.constexpr = 1):
    """A ring buffer for tiles, each of PIECES tiles of `desc`.

    ARRIVALS arrivals fill a stage, and READERS warpgroups release it.
    """
    tiles = allocate_tiles(desc, piece_slots(STAGES, PIECES))
    return Ring(tiles, make_barriers(STAGES, ARRIVALS), make_barriers(STAGES, READERS), STAGES, PIECES)


@aggregate
class Ring:
    """A ring buffer of tiles in shared memory. A tile is stored in `pieces` of columns, one after the other.

    If they are in several of `piece_groups`, the first group of all stages comes first in memory.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    pieces: gl.constexpr

    @gluon.jit
    def send(self, desc, rows, row, turn):
        """Copy the tile that begins at `row`, once its stage is empty."""
        COLS: gl.constexpr = self.tiles.shape[-1]
        stage, lap = turn % self.stages, turn // self.stages
        mbarrier.wait(self.empty.index(stage), (lap & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), self.pieces * desc.block_type.nbytes)
        for i in gl.static_range(self.pieces):
            start = rows.coords(row, i * COLS)
            async_load(desc, start, self.full.index(stage), self.piece(stage, i))

    @gluon.jit
    def fill(self, desc, rows, row, stage, phase):
        """Copy the tile that begins at `row` to `stage`. The caller counts turns: `phase` is the parity of the lap."""
        mbarrier.wait(self.empty.index(stage), phase ^ 1)
        mbarrier.expect(self.full.index(stage), desc.block_type.nbytes)
        async_load(desc, rows.coords(row, 0), self.full.index(stage), self.tiles.index(stage))

    @gluon.jit
    def receive(self, turn):
        """Wait for the tile of `turn`, `[ROWS, COLS]`."""
        mbarrier.wait(self.full.index(turn % self.stages), (turn // self.stages) & 1)
        return self.tile(turn % self.stages)

    @gluon.jit
    def piece(self, stage, i: gl.constexpr):
        """Piece `i` of the tile of a stage."""
        GROUPS: gl.constexpr = piece_groups(self.pieces)
        FIRST: gl.constexpr = GROUPS[group_of(GROUPS, i)][0]
        COUNT: gl.constexpr = GROUPS[group_of(GROUPS, i)][1]
        return self.tiles.index(stage * COUNT + (FIRST * (self.stages - 1) + i))

    @gluon.jit
    def tile(self, stage):
        """The tile of a stage as a matrix of a power of two of columns. Those behind the last piece are not its own."""
        ROWS: gl.constexpr = self.tiles.shape[-2]
        COLS: gl.constexpr = whole_columns(self.pieces * self.tiles.shape[-1])
        if self.pieces == 1:
            return self.tiles.index(stage).reshape([ROWS, COLS])
        elif VIEWS_GROW:
            LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], self.tiles.dtype)
            return reinterpret(self.tiles.index(stage * self.pieces), self.tiles.dtype, [ROWS, COLS], LAYOUT)
        else:
            GROUPS: gl.constexpr = piece_groups(self.pieces)
            if len(GROUPS) == 1:
                return self.group(stage, GROUPS[0])
            else:
                first, second = self.group(stage, GROUPS[0]), self.group(stage, GROUPS[1])
                groups = (first, second) if len(GROUPS) == 2 else (first, second, self.group(stage, GROUPS[2]))
                return GroupedTile(groups, self.tiles.dtype, (ROWS, COLS), self.pieces, self.tiles.shape[-1])

    @gluon.jit
    def group(self, stage, GROUP: gl.constexpr):
        """The pieces of one of `piece_groups` as a matrix."""
        ROWS: gl.constexpr = self.tiles.shape[-2]
        COLS: gl.constexpr = GROUP[1] * self.tiles.shape[-1]
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], self.tiles.dtype)
        groups = reinterpret(self.tiles, self.tiles.dtype, [self.tiles.shape[0] // GROUP[1], ROWS, COLS], LAYOUT)
        # The pieces before the group are a multiple of its own.
        return groups.index(stage + GROUP[0] // GROUP[1] * self.stages)

    @gluon.jit
    def release(self, turn):
        """Say that this warpgroup has read the tile of `turn`."""
        mbarrier.arrive(self.empty.index(turn % self.stages), count=1)


@aggregate
class WorkRing:
    """A ring buffer of two work descriptors, each of `size` numbers, from the warp that schedules to all others."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    size: gl.constexpr

    @gluon.jit
    def publish(self, turn, fields):
        """Send a work descriptor: a tuple of `size` numbers."""
        stage, lap = turn % 2, turn // 2
        mbarrier.wait(self.empty.index(stage), (lap & 1) ^ 1)
        for i in gl.static_range(self.size):
            put_number(self.numbers, stage * self.size + i, fields[i])
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def fetch(self, counter_ptr, turn):
        """Take the next work item that no program has taken, and publish its number."""
        stage = turn % 2
        mbarrier.wait(self.empty.index(stage), ((turn // 2) & 1) ^ 1)
        item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        put_number(self.numbers, stage, item)
        mbarrier.arrive(self.full.index(stage), count=1)
        return item

    @gluon.jit
    def fetch_longest_first(self, counter_ptr, turn, num_items, num_blocks, near_heads):
        """Take the next block in the order of `longest_first` that no program has taken, and publish its number."""
        stage = turn % 2
        mbarrier.wait(self.empty.index(stage), ((turn // 2) & 1) ^ 1)
        item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        item = longest_first(item, num_items, num_blocks, near_heads)
        put_number(self.numbers, stage, item)
        mbarrier.arrive(self.full.index(stage), count=1)
        return item

    @gluon.jit
    def receive(self, turn, WARPS: gl.constexpr):
        """Wait for the work descriptor of `turn`; every receiver has WARPS warps."""
        stage = turn % 2
        mbarrier.wait(self.full.index(stage), (turn // 2) & 1)
        fields = ()
        for i in gl.static_range(self.size):
            number = get_number(self.numbers, stage * self.size + i, WARPS)
            fields = fields + (number,)  # type: ignore[assignment]
        mbarrier.arrive(self.empty.index(stage), count=1)
        return fields


@gluon.jit
def make_work_ring(SIZE: gl.constexpr, READERS: gl.constexpr):
    """A ring of work descriptors of SIZE numbers, read by READERS partitions."""
    return WorkRing(make_numbers(2 * SIZE), make_barriers(2, 1), make_barriers(2, READERS), SIZE)


# Pairs of blocks are split only if programs would otherwise be idle in more than one of so many turns: programs that
# take single blocks read the keys of more heads at a time.
TURNS_PER_IDLE = gl.constexpr(24)


@gluon.jit
def count_items(num_blocks, num_heads):
    """The work items of a launch, pairs of blocks or single ones, and the heads whose blocks are taken one by one."""
    programs, pairs_of_head = gl.num_programs(0), gl.cdiv(num_blocks, 2)
    num_items, single_heads = pairs_of_head * num_heads, 0
    num_turns = gl.cdiv(num_items, programs)
    idle = num_turns * programs - num_items
    if idle * TURNS_PER_IDLE > num_turns * programs:
        # The pairs of the last turn, in which programs would be idle, and those of the turn before.
        single_heads = gl.minimum(gl.cdiv(2 * programs - idle, pairs_of_head), num_heads)
        num_items += single_heads * (num_blocks - pairs_of_head)
    return num_items, single_heads


@gluon.jit
def balanced_blocks(item, num_items, num_blocks, num_heads, single_heads):
    """The blocks of a work item: their head, the number of the first, and how many they are.

    Block 0 of each head takes longest, the last one least. A pair is a block from the start and the one as far from the
    end: all pairs take equally long. But if many programs would have no pair in the last turn, blocks of the last heads
    are taken one by one, the longest first, and every other turn goes through the programs from the last to the first.
    """
    pairs_of_head = gl.cdiv(num_blocks, 2)
    head, block = item // pairs_of_head, item % pairs_of_head
    # The middle one of an odd number of blocks is alone.
    num_taken = gl.where(2 * block + 1 < num_blocks, 2, 1)
    if single_heads > 0:
        programs, paired_heads = gl.num_programs(0), num_heads - single_heads
        # Not all programs have an item in the last turn: it is not turned around, and those before it alternate.
        turn, last_turn = item // programs, (num_items - 1) // programs
        place = gl.where((last_turn - turn) % 2 == 0, item, (2 * turn + 1) * programs - 1 - item)
        single = place - paired_heads * pairs_of_head
        is_pair = single < 0
        head = gl.where(is_pair, place // pairs_of_head, paired_heads + single % single_heads)
        block = gl.where(is_pair, place % pairs_of_head, single // single_heads)
        num_taken = gl.where(is_pair & (2 * block + 1 < num_blocks), 2, 1)
    return head, block, num_taken


@gluon.jit
def longest_first(turn, num_items, num_blocks, near_heads):
    """The block that is taken as number `turn`: of `near_heads` heads at a time the longest blocks come first.

    The shortest blocks are left for the end, so that no program is still busy long after all others have ended.
    """
    first_head = turn // (near_heads * num_blocks) * near_heads
    own_heads = gl.maximum(gl.minimum(num_items // num_blocks - first_head, near_heads), 1)
    place = turn - first_head * num_blocks
    item = (first_head + place % own_heads) * num_blocks + place // own_heads
    return gl.where(turn < num_items, item, num_items)


@gluon.jit
def columns_before(end, LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """For each row of an accumulator, a word of bits: which of the thread's columns, in order, are ahead of `end`.

    Of each 8 columns each of four threads holds two neighbours, so that the bits of a thread's columns fit one word if
    there are at most 128 columns.
    """
    col = gl.arange(0, COLS, layout=LAYOUT)
    own_end = end[:, None] - (col & 6)[None, :]
    count = gl.minimum(gl.maximum((own_end >> 3) * 2 + gl.minimum(own_end & 7, 2), 0), 32)
    # A count of 32 needs a shift by 32, which becomes a shift by 0: the last term then gives all 32 bits.
    return (1 << (count & 31)) - 1 - (count >> 5)


@gluon.jit
def at_columns(run_bits, LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """The bit of each column in its word: one instruction a column, however many comparisons made the words."""
    col = gl.arange(0, COLS, layout=LAYOUT)
    return (run_bits & (1 << ((col >> 3) * 2 + (col & 1)))[None, :]) != 0
