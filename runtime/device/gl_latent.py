"""Device functions of Hopper's forward of latent attention, whose values are the first columns of its keys.

The sums over wide values do not fit the registers of one warpgroup. So two warpgroups compute the same 64 rows, half of
the columns of o each. Warpgroup 0 computes the scores of the even blocks of keys, and warpgroup 1 those of the odd
ones, so that one multiplies while the other takes its exponentials, as in FlashMLA
(https://github.com/deepseek-ai/FlashMLA). Each needs the weights of both. A warpgroup stores its weights in place of
the columns of their keys that belong to no value, which it alone has read.

`gl_latent_bytes` fills the same tiles from caches of 8-bit floats. Their products are computed in float16.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gl import Ring, make_barriers
from .gl_forward import ROWS, make_rows
from .gl_pages import PagedRing, make_paged_ring
from .gl_versions import aggregate

# Keys of a block.
KEYS = gl.constexpr(64)

# The columns of a tile for those of a key that belong to no value: the weights that take their place are [ROWS, KEYS].
REST = gl.constexpr(64)


@gluon.jit
def load_record(records_ptr, item, num_kv_heads):
    """The work item of a number: key head and sequence; start and length of the queries; first row of the tile; first
    and last key; where its sums go, -1 if it has all keys; keys of the sequence."""
    record = records_ptr + item // num_kv_heads * 16
    hkv = (item % num_kv_heads).to(gl.int64)
    b, q_start = gl.load(record).to(gl.int64), gl.load(record + 1).to(gl.int64)
    q_len, start_row = gl.load(record + 2), gl.load(record + 3)
    keys_begin, keys_end = gl.load(record + 4), gl.load(record + 5)
    part, kv_len = gl.load(record + 6).to(gl.int64), gl.load(record + 8)
    return hkv, b, q_start, q_len, start_row, keys_begin, keys_end, part, kv_len


# ------------------------------------------------------------------------------------------------------------- queries


@triton.constexpr_function
def query_layout(COLS):
    """The layout in which a warpgroup loads COLS columns of queries: 16 bytes a thread."""
    lanes = min(COLS // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def make_queries(DTYPE: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for COLS columns of the rows of a work item."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [1, ROWS, COLS], LAYOUT)


@gluon.jit
def load_columns(q_ptr, starts, is_row, COLS: gl.constexpr, FIRST_COL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """COLS columns from FIRST_COL on of the rows that begin at `starts`, in `query_layout`.

    The rows of a tile are heads of one or more tokens, which TMA would have to copy one token at a time.
    """
    LAYOUT: gl.constexpr = query_layout(COLS)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    col = FIRST_COL + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    mask = gl.convert_layout(is_row, ROW)[:, None] & (col < HEAD_DIM)[None, :]
    return gl.load(q_ptr + gl.convert_layout(starts, ROW)[:, None] + col[None, :], mask=mask, other=0.0)


@gluon.jit
def load_queries(tile, q_ptr, starts, is_row, units, FIRST_COL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Fill a tile with the columns from FIRST_COL on of the rows that begin at `starts`, each divided by its unit if
    the tile has another dtype."""
    columns = load_columns(q_ptr, starts, is_row, tile.shape[1], FIRST_COL, HEAD_DIM)
    if tile.dtype != q_ptr.dtype.element_ty:
        units = gl.convert_layout(units, gl.SliceLayout(1, query_layout(tile.shape[1])))
        columns = (columns.to(gl.float32) / units[:, None]).to(tile.dtype)
    tile.store(columns)


@gluon.jit
def largest_elements(q_ptr, starts, is_row, PART: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """The largest absolute value of each row among the columns that warpgroup PART loads, `[ROWS]`."""
    HALF: gl.constexpr = HEAD_DIM_V // 2
    ROW: gl.constexpr = gl.SliceLayout(1, query_layout(HALF))
    columns = load_columns(q_ptr, starts, is_row, HALF, PART * HALF, HEAD_DIM)
    largest = gl.max(gl.abs(columns.to(gl.float32)), 1)
    if PART == 1:
        rest = load_columns(q_ptr, starts, is_row, REST, HEAD_DIM_V, HEAD_DIM)
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(rest.to(gl.float32)), 1), ROW))
    return largest


@gluon.jit
def score_factors(qk_scale, units):
    """The factor of each row by which scores become logits times log2(e). It is above 0, because 0 times the score -inf
    of a key that is not kept would be NaN."""
    return gl.maximum(qk_scale * units, 1e-37)


# ---------------------------------------------------------------------------------------------------------------- keys


@aggregate
class LatentRing:
    """Blocks of keys in two stages, one for each warpgroup. A block has three parts: two halves of the values, and the
    other columns.

    Each part is released by the warpgroup that reads it last: `left` by warpgroup 0, `right` by warpgroup 1, `rest` by
    the one that reads the weights there. Tokens of an 8-bit cache may have `scales` of their own, `[4, KEYS]`: of the
    keys in both stages, then of the values. They come with `rest`. `converted`: a warpgroup stores the keys, not TMA.
    """

    left: Ring
    right: Ring
    rest: Ring
    scales: gl.shared_memory_descriptor
    converted: gl.constexpr

    @gluon.jit
    def receive(self, part, turn):
        """Wait for a part of the block of `turn`.

        Products read what a warpgroup has stored only after a fence. In the producer, the fence would also wait for all
        loads that have begun. So the reader has it.
        """
        tile = part.receive(turn)
        if self.converted:
            fence_async_shared()
        return tile

    @gluon.jit
    def values(self, PART: gl.constexpr):
        """The half of the values whose columns of o warpgroup PART computes."""
        return self.left if PART == 0 else self.right


@aggregate
class PagedLatentRing:
    """The producer's side of a `LatentRing`, which fills it from pages."""

    left: PagedRing
    right: PagedRing
    rest: PagedRing

    @gluon.jit
    def read(self):
        """The `LatentRing` that consumers read."""
        CONVERTED: gl.constexpr = False
        return LatentRing(self.left.ring, self.right.ring, self.rest.ring, make_rows(4), CONVERTED)

    @gluon.jit
    def send(self, desc, rows, start_n, turn, HEAD_DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr):
        """Copy the block of keys that begins at `start_n`, each part as soon as its place is free."""
        page = rows.page(start_n, PAGE_SIZE)
        self.left.send(desc, rows, start_n, page, turn, PAGE_SIZE)
        self.rest.send(desc, rows, start_n, page, turn, PAGE_SIZE, HEAD_DIM_V)
        self.right.send(desc, rows, start_n, page, turn, PAGE_SIZE, HEAD_DIM_V // 2)


@gluon.jit
def make_latent_ring(desc, page_rows, HEAD_DIM_V: gl.constexpr):
    left = make_paged_ring(desc, page_rows, KEYS, HEAD_DIM_V // 2, 2, 1, 1)
    right = make_paged_ring(desc, page_rows, KEYS, HEAD_DIM_V // 2, 2, 1, 1)
    return PagedLatentRing(left, right, make_paged_ring(desc, page_rows, KEYS, REST, 2, 1, 1))


@gluon.jit
def compute_scores(queries, ring, turn, PART: gl.constexpr, K_SCALE: gl.constexpr, SCORES: gl.constexpr):
    """`q k^T` of a block of keys of warpgroup PART, part by part as they arrive."""
    # It is 0, but the compiler does not know. Otherwise it would compute the addresses that the products take ahead of
    # the loop, keep all 36 of them, and spill them.
    only = turn >> 30
    qk = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    tile = ring.receive(ring.left, turn).permute((1, 0))
    qk = warpgroup_mma(queries[0].index(only), tile, qk, use_acc=False, is_async=True)
    tile = ring.receive(ring.rest, turn).permute((1, 0))
    qk = warpgroup_mma(queries[2].index(only), tile, qk, is_async=True)
    tile = ring.receive(ring.right, turn).permute((1, 0))
    qk = warpgroup_mma(queries[1].index(only), tile, qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    if K_SCALE == "token":
        qk *= ring.scales.index(PART).load(gl.SliceLayout(0, SCORES))[None, :]
    return qk


# ------------------------------------------------------------------------------------------------- the two warpgroups


@aggregate
class Exchange:
    """What the two warpgroups tell each other: maxima and sums of their rows, and when their weights are stored; of an
    8-bit cache also the largest elements of queries, and the units of the sums of values."""

    maxima: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    largest: gl.shared_memory_descriptor
    units: gl.shared_memory_descriptor
    has_largest: gl.shared_memory_descriptor
    has_queries: gl.shared_memory_descriptor
    has_maxima: gl.shared_memory_descriptor
    has_weights: gl.shared_memory_descriptor
    has_sums: gl.shared_memory_descriptor

    @gluon.jit
    def query_units(self, largest, q_turn, PART: gl.constexpr, ROW: gl.constexpr):
        """The unit of each row of queries: the power of two of its largest element, 1 if all are 0, `[ROWS]`.

        Products with an 8-bit cache are computed in float16, which has fewer exponents than bfloat16. So each row is
        divided by its unit.
        """
        self.largest.index(PART).store(largest)
        mbarrier.arrive(self.has_largest.index(PART), count=1)
        mbarrier.wait(self.has_largest.index(1 - PART), q_turn & 1)
        largest = gl.maximum(gl.convert_layout(largest, ROW), self.largest.index(1 - PART).load(ROW))
        unit = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        return gl.where(unit == 0.0, 1.0, unit)

    @gluon.jit
    def share_queries(self):
        """Say that this warpgroup has filled its part of the queries."""
        fence_async_shared()
        mbarrier.arrive(self.has_queries.index(0), count=1)

    @gluon.jit
    def share_maxima(self, row_max, v_unit, PART: gl.constexpr, V_SCALE: gl.constexpr):
        """Tell the maxima after the block of warpgroup PART, and the unit of the sums of values."""
        self.maxima.index(PART).store(row_max)
        if V_SCALE == "token":
            self.units.index(PART).store(gl.full([1], 0.0, gl.float32, number_layout()) + v_unit)
        mbarrier.arrive(self.has_maxima.index(PART), count=1)

    @gluon.jit
    def other_maxima(self, turn, PART: gl.constexpr, ROW: gl.constexpr):
        """The maxima of warpgroup PART after its block of this turn."""
        mbarrier.wait(self.has_maxima.index(PART), turn & 1)
        return self.maxima.index(PART).load(ROW)

    @gluon.jit
    def other_unit(self, v_unit, PART: gl.constexpr, V_SCALE: gl.constexpr):
        """The unit that came with the maxima of warpgroup PART."""
        return gl.max(self.units.index(PART).load(number_layout()), 0) if V_SCALE == "token" else v_unit

    @gluon.jit
    def share_weights(self, ring, weights, PART: gl.constexpr):
        ring.rest.tile(PART).store(weights)
        fence_async_shared()
        mbarrier.arrive(self.has_weights.index(PART), count=1)

    @gluon.jit
    def join_sums(self, row_sum, q_turn, PART: gl.constexpr, ROW: gl.constexpr):
        """The sums of the blocks of both warpgroups."""
        self.sums.index(PART).store(row_sum)
        mbarrier.arrive(self.has_sums.index(PART), count=1)
        mbarrier.wait(self.has_sums.index(1 - PART), q_turn & 1)
        return row_sum + self.sums.index(1 - PART).load(ROW)


@triton.constexpr_function
def number_layout():
    """The layout of one number that all threads of a warpgroup hold."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def make_exchange():
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    units = gl.allocate_shared_memory(gl.float32, [2, 1], LAYOUT)
    has_largest, has_queries = make_barriers(2, 1), make_barriers(1, 2)
    has_maxima, has_weights, has_sums = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1)
    return Exchange(
        make_rows(2), make_rows(2), make_rows(2), units, has_largest, has_queries, has_maxima, has_weights, has_sums
    )


@gluon.jit
def begin_others(acc, exchange, ring, turn, PART: gl.constexpr):
    """Issue `acc += p v` of the other warpgroup's block of this turn, for the columns of warpgroup PART."""
    values = ring.values(PART)
    mbarrier.wait(exchange.has_weights.index(1 - PART), turn & 1)
    # The weights are there, so the keys are: this wait says so to the hardware.
    tile = ring.receive(values, 2 * turn + 1 - PART)
    return warpgroup_mma(ring.rest.tile(1 - PART), tile, acc, is_async=True)


@gluon.jit
def end_others(acc, ring, turn, PART: gl.constexpr):
    """Wait for the product of `begin_others`, and release what it read."""
    values = ring.values(PART)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.release(2 * turn + 1 - PART)
    ring.rest.release(2 * turn + 1 - PART)
    return acc


@gluon.jit
def begin_own(acc, weights, ring, PART: gl.constexpr):
    """Issue `acc += p v` of the warpgroup's own block of this turn, for its columns."""
    values = ring.values(PART)
    return warpgroup_mma(weights, values.tile(PART), acc, is_async=True)


@gluon.jit
def end_own(acc, ring, turn, PART: gl.constexpr):
    """Wait for the product of `begin_own`, and release its values."""
    values = ring.values(PART)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.release(2 * turn + PART)
    return acc


@gluon.jit
def rescaling(before, after):
    """The factor that makes sums relative to one maximum relative to another; 1 while both are -inf."""
    return gl.where(before == after, 1.0, gl.exp2(before - after))


@gluon.jit
def raise_unit(v_unit, ring, PART: gl.constexpr, V_SCALE: gl.constexpr, KEY: gl.constexpr):
    """The unit of the sums of values with the block of warpgroup PART: the largest scale so far, if tokens have scales
    of their own. A weight times a small scale does not fit into 16 bits."""
    if V_SCALE == "token":
        return gl.maximum(v_unit, gl.max(ring.scales.index(2 + PART).load(KEY), 0))
    else:
        return v_unit


@gluon.jit
def in_units(alpha, before, after, V_SCALE: gl.constexpr):
    """The factor of sums of values whose unit changes, too."""
    return alpha * (before / after) if V_SCALE == "token" else alpha


@gluon.jit
def scale_weights(p, ring, v_unit, PART: gl.constexpr, V_SCALE: gl.constexpr, KEY: gl.constexpr):
    """Weights times the scales of their values, in the unit of the sums."""
    if V_SCALE == "token":
        return p * (ring.scales.index(2 + PART).load(KEY) * (1.0 / v_unit))[None, :]
    else:
        return p


@gluon.jit
def store_half(ptr, tile, starts, is_row, FIRST_COL: gl.constexpr, SUMS: gl.constexpr):
    """Write half of the columns of the rows that begin at `starts`."""
    SUM: gl.constexpr = gl.SliceLayout(1, SUMS)
    col = FIRST_COL + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, SUMS))
    ptrs = ptr + gl.convert_layout(starts, SUM)[:, None] + col[None, :]
    gl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=gl.convert_layout(is_row, SUM)[:, None])
