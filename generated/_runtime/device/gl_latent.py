# SPDX-License-Identifier: Apache-2.0
"""Device functions of Hopper's forward of latent attention, whose values are the first columns of its keys.

The sums over wide values do not fit the registers of one warpgroup. So two warpgroups compute the same 64 rows, half of
the columns of o each. Warpgroup 0 computes the scores of the even blocks of keys, and warpgroup 1 those of the odd
ones, so that one multiplies while the other takes its exponentials, as in FlashMLA
(https://github.com/deepseek-ai/FlashMLA). Each needs the weights of both. A warpgroup stores its weights in place of
the columns of their keys that belong to no value, which it alone has read.
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

from .gl import make_barriers
from .gl_forward import ROWS
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
def load_queries(tile, q_ptr, starts, is_row, FIRST_COL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Fill a tile with the columns from FIRST_COL on of the rows that begin at `starts`.

    The rows of a tile are heads of one or more tokens, which TMA would have to copy one token at a time.
    """
    COLS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = query_layout(COLS)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    col = FIRST_COL + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    mask = gl.convert_layout(is_row, ROW)[:, None] & (col < HEAD_DIM)[None, :]
    tile.store(gl.load(q_ptr + gl.convert_layout(starts, ROW)[:, None] + col[None, :], mask=mask, other=0.0))


# ---------------------------------------------------------------------------------------------------------------- keys


@aggregate
class LatentRing:
    """Blocks of keys in two stages, one for each warpgroup. A block has three parts: two halves of the values, and the
    other columns.

    Each part is released by the warpgroup that reads it last: `left` by warpgroup 0, `right` by warpgroup 1, `rest` by
    the one that reads the weights there.
    """

    left: PagedRing
    right: PagedRing
    rest: PagedRing

    @gluon.jit
    def values(self, PART: gl.constexpr):
        """The half of the values whose columns of o warpgroup PART computes."""
        return self.left.ring if PART == 0 else self.right.ring

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
    return LatentRing(left, right, make_paged_ring(desc, page_rows, KEYS, REST, 2, 1, 1))


@gluon.jit
def compute_scores(queries, ring, turn, SCORES: gl.constexpr):
    """`q k^T` of a block of keys, part by part as they arrive."""
    left, right, rest = ring.left.ring, ring.right.ring, ring.rest.ring
    # It is 0, but the compiler does not know. Otherwise it would compute the addresses that the products take ahead of
    # the loop, keep all 36 of them, and spill them.
    only = turn >> 30
    qk = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    tile = left.receive(turn).permute((1, 0))
    qk = warpgroup_mma(queries[0].index(only), tile, qk, use_acc=False, is_async=True)
    tile = rest.receive(turn).permute((1, 0))
    qk = warpgroup_mma(queries[2].index(only), tile, qk, is_async=True)
    tile = right.receive(turn).permute((1, 0))
    qk = warpgroup_mma(queries[1].index(only), tile, qk, is_async=True)
    return warpgroup_mma_wait(0, deps=(qk,))


# ------------------------------------------------------------------------------------------------- the two warpgroups


@aggregate
class Exchange:
    """What the two warpgroups tell each other: maxima and sums of their rows, and when their weights are stored."""

    maxima: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    has_queries: gl.shared_memory_descriptor
    has_maxima: gl.shared_memory_descriptor
    has_weights: gl.shared_memory_descriptor
    has_sums: gl.shared_memory_descriptor

    @gluon.jit
    def share_queries(self):
        """Say that this warpgroup has filled its part of the queries."""
        fence_async_shared()
        mbarrier.arrive(self.has_queries.index(0), count=1)

    @gluon.jit
    def share_maxima(self, row_max, PART: gl.constexpr):
        self.maxima.index(PART).store(row_max)
        mbarrier.arrive(self.has_maxima.index(PART), count=1)

    @gluon.jit
    def other_maxima(self, turn, PART: gl.constexpr, ROW: gl.constexpr):
        """The maxima of warpgroup PART after its block of this turn."""
        mbarrier.wait(self.has_maxima.index(PART), turn & 1)
        return self.maxima.index(PART).load(ROW)

    @gluon.jit
    def share_weights(self, ring, weights, PART: gl.constexpr):
        ring.rest.ring.tile(PART).store(weights)
        fence_async_shared()
        mbarrier.arrive(self.has_weights.index(PART), count=1)

    @gluon.jit
    def join_sums(self, row_sum, q_turn, PART: gl.constexpr, ROW: gl.constexpr):
        """The sums of the blocks of both warpgroups."""
        self.sums.index(PART).store(row_sum)
        mbarrier.arrive(self.has_sums.index(PART), count=1)
        mbarrier.wait(self.has_sums.index(1 - PART), q_turn & 1)
        return row_sum + self.sums.index(1 - PART).load(ROW)


@gluon.jit
def make_exchange():
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], LAYOUT)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], LAYOUT)
    of_two = make_barriers(1, 2)
    return Exchange(maxima, sums, of_two, make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1))


@gluon.jit
def begin_others(acc, exchange, ring, turn, PART: gl.constexpr):
    """Issue `acc += p v` of the other warpgroup's block of this turn, for the columns of warpgroup PART."""
    values = ring.values(PART)
    mbarrier.wait(exchange.has_weights.index(1 - PART), turn & 1)
    # The weights are there, so the keys are: this wait says so to the hardware.
    tile = values.receive(2 * turn + 1 - PART)
    return warpgroup_mma(ring.rest.ring.tile(1 - PART), tile, acc, is_async=True)


@gluon.jit
def end_others(acc, ring, turn, PART: gl.constexpr):
    """Wait for the product of `begin_others`, and release what it read."""
    values = ring.values(PART)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    values.release(2 * turn + 1 - PART)
    ring.rest.ring.release(2 * turn + 1 - PART)
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
def store_half(ptr, tile, starts, is_row, FIRST_COL: gl.constexpr, SUMS: gl.constexpr):
    """Write half of the columns of the rows that begin at `starts`."""
    SUM: gl.constexpr = gl.SliceLayout(1, SUMS)
    col = FIRST_COL + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, SUMS))
    ptrs = ptr + gl.convert_layout(starts, SUM)[:, None] + col[None, :]
    gl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=gl.convert_layout(is_row, SUM)[:, None])
