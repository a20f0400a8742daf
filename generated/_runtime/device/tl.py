# SPDX-License-Identifier: Apache-2.0
"""Device functions that Triton kernels share: tiles of matrices, dropout, blocks that kernels visit, and sums along
diagonals.

A tile is a tuple of one or two parts. The first part has BLOCK_COLS columns, a power of two; a second part has the
columns after them if the matrix has more than BLOCK_COLS.
"""

import triton
import triton.language as tl

from .tl_math import clamp_index

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def second_width(REST):
    """The width of a tile's second part, for REST columns: a power of two, and at least 16 as an MMA requires."""
    return max(triton.next_power_of_2(REST), 16)


@triton.jit
def load_columns(
    ptr,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    # The start moves a 64-bit scalar; the tile of offsets stays 32-bit and the same in every iteration.
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    ptrs = ptr + tl.cast(start, tl.int64) * stride_row + (row * stride_row + col)
    if BOUNDED:
        mask = start + row < length
        if COLS < BLOCK_COLS:
            mask = mask & (col < COLS)
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        if COLS < BLOCK_COLS:
            return tl.load(ptrs, mask=col < COLS, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def load_tile(
    ptr,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """The tile of rows `start` to `start + ROWS` of a `[length, COLS]` matrix.

    Columns beyond the matrix are zero, and so are rows beyond it if BOUNDED. Without BOUNDED all rows must exist.
    """
    first = load_columns(ptr, start, length, stride_row, ROWS, COLS, BLOCK_COLS, BOUNDED)
    if COLS <= BLOCK_COLS:
        return (first,)
    else:
        REST: tl.constexpr = COLS - BLOCK_COLS
        rest = load_columns(ptr + BLOCK_COLS, start, length, stride_row, ROWS, REST, second_width(REST), BOUNDED)
        return first, rest


@triton.jit
def store_tile(
    ptr,
    tile,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Store `tile` to rows `start` to `start + ROWS` of a `[length, COLS]` matrix, within its edges only."""
    row = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(len(tile)):
        col = i * BLOCK_COLS + tl.arange(0, tile[i].shape[1])[None, :]
        ptrs = ptr + tl.cast(start, tl.int64) * stride_row + (row * stride_row + col)
        tl.store(ptrs, tile[i].to(ptr.dtype.element_ty), mask=(start + row < length) & (col < COLS))


@triton.jit
def load_vector(ptr, offs, length, other, BOUNDED: tl.constexpr):
    """Elements `offs` of a vector of `length`; `other` beyond its end if BOUNDED."""
    if BOUNDED:
        return tl.load(ptr + offs, mask=offs < length, other=other)
    else:
        return tl.load(ptr + offs)


@triton.jit
def load_rows(ptr, rows, length, stride_row, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Rows `rows` of a `[length, COLS]` matrix as fp32 [ROWS, BLOCK_COLS], zero beyond its edges."""
    cols = tl.arange(0, BLOCK_COLS)
    ptrs = ptr + (rows.to(tl.int64) * stride_row)[:, None] + cols[None, :]
    return tl.load(ptrs, mask=(rows < length)[:, None] & (cols < COLS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def row_sum(ptr, first, end, BLOCK: tl.constexpr):
    """The sum of elements `first` to `end` of a vector."""
    total = 0.0
    for start in range(first, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(ptr + rows, mask=rows < end, other=0.0), 0)
    return total


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """An fp32 accumulator of ROWS rows, with the parts of a tile of COLS columns."""
    first = tl.zeros([ROWS, BLOCK_COLS], tl.float32)
    if COLS <= BLOCK_COLS:
        return (first,)
    else:
        return first, tl.zeros([ROWS, second_width(COLS - BLOCK_COLS)], tl.float32)


@triton.jit
def dot_rows(a_tile, b_tile, acc=None):
    """`acc + a_tile @ b_tile.T`: the product of each row of one tile with each row of the other."""
    for i in tl.static_range(len(a_tile)):
        acc = tl.dot(a_tile[i], tl.trans(b_tile[i]), acc, input_precision="ieee")
    return acc


@triton.jit
def add_dot(acc, weights, tile, alpha=None):
    """`acc + weights @ tile`, part by part; the rows of `acc` are first multiplied by `alpha` if it is given."""
    weights = weights.to(tile[0].dtype)
    if alpha is not None:
        acc = [part * alpha[:, None] for part in acc]
    first = tl.dot(weights, tile[0], acc[0], input_precision="ieee")
    if len(tile) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, tile[1], acc[1], input_precision="ieee")


@triton.jit
def row_products(a_tile, b_tile):
    """The product of each row of one tile with the same row of the other."""
    sums = tl.sum(a_tile[0].to(tl.float32) * b_tile[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(a_tile)):
        sums += tl.sum(a_tile[i].to(tl.float32) * b_tile[i].to(tl.float32), 1)
    return sums


@triton.jit
def dropout_mask(
    seed,
    threshold,
    head,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """True for the probabilities of a tile that dropout sets to zero: their random word is below `threshold`.

    The tile is [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] if TRANSPOSED. The word depends on seed, head, row and key
    alone, so that all kernels drop the same probabilities. `_runtime/torch/philox.py` computes it in torch.
    """
    # One Philox call gives the upper bytes of 16 words, and by their exclusive or the lower bytes of all of them. In an
    # accumulator of an MMA one thread holds all 16 pairs, or four of them if TRANSPOSED, so the compiler computes the
    # call once for them. Blocks start at multiples of 16 rows and keys, so the index inside the tile selects the byte.
    if TRANSPOSED:
        row = tl.arange(0, BLOCK_M)[None, :]
        key = tl.arange(0, BLOCK_N)[:, None]
    else:
        row = tl.arange(0, BLOCK_M)[:, None]
        key = tl.arange(0, BLOCK_N)[None, :]
    row_group = (start_m >> 1) + ((row >> 4 << 3) | (row & 7))
    if BLOCK_N >= 32:
        key_group = (start_n >> 3) + ((key >> 5 << 2) | (key >> 1 & 3))
        far_key = (key & 16) != 0
    else:
        key_group = (start_n >> 5 << 2) + (key >> 1 & 3)
        far_key = (start_n & 16) != 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, key_group, row_group, head.to(tl.int32), 0, 7)
    far_row = (row & 8) != 0
    word = tl.where(far_key, tl.where(far_row, word_3, word_2), tl.where(far_row, word_1, word_0))
    byte = word >> ((key & 1) << 4 | key & 8).to(tl.uint32)
    return (byte << 24 | (word_0 ^ word_1 ^ word_2 ^ word_3) >> 8) < threshold


@triton.jit
def grid_extremes(
    grid, own_first, own_last, own_size, own_stride, others_first, others_last, others_size, others_stride
):
    """The smallest and the largest element of each of several parts of a tensor. A NaN makes both NaN.

    All parts begin and end at the same indices of one axis, two numbers or vectors of one element, and each at its own
    of another, two vectors.
    """
    own_first, own_last = clamp_index(own_first, own_size), clamp_index(own_last, own_size)
    if own_first.type.is_block():
        own_first, own_last = tl.min(own_first, 0), tl.max(own_last, 0)
    others_last = clamp_index(others_last, others_size)
    others_first = tl.minimum(clamp_index(others_first, others_size), others_last)
    others_most = tl.max(others_last - others_first, 0) + 1
    row = grid + own_first.to(tl.int64) * own_stride
    least = as_number(tl.load(row + others_first.to(tl.int64) * others_stride))
    most = least
    for _own in range(own_first, own_last + 1):
        for i in range(others_most):
            index = tl.minimum(others_first + i, others_last)
            element = as_number(tl.load(row + index.to(tl.int64) * others_stride))
            least = tl.minimum(least, element, propagate_nan=tl.PropagateNan.ALL)
            most = tl.maximum(most, element, propagate_nan=tl.PropagateNan.ALL)
        row += own_stride
    return least, most


@triton.jit
def as_number(element):
    """A float as float32, an integer or bool as int64: the difference of two integers may exceed 32 bits."""
    return element.to(tl.float32) if element.dtype.is_floating() else element.to(tl.int64)


@triton.jit
def store_range(ranges_ptr, table_row, visited_begin, visited_end, full_begin, full_end, num_others):
    """Write the range of a row of blocks; `full_begin` is `num_others` without a full block.

    Then the run of full blocks begins and ends where the range begins; a row that visits none has four zeros.
    """
    visited_begin = tl.minimum(visited_begin, visited_end)
    has_full = full_begin < num_others
    block_range = ranges_ptr + table_row * 4
    tl.store(block_range, visited_begin)
    tl.store(block_range + 1, tl.where(has_full, full_begin, visited_begin))
    tl.store(block_range + 2, tl.where(has_full, full_end, visited_begin))
    tl.store(block_range + 3, visited_end)


@triton.jit
def diagonal_sums(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sums of a tile along its diagonals, and row - column of each: two vectors of 2 * max(ROWS, COLS).

    A diagonal may have two entries. An entry may have no element, and a sum of 0.
    """
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    # Rotating row r by r columns moves each diagonal into one column. In a band of COLS rows, elements that wrap around
    # belong to another diagonal than elements that do not: row - column is larger by COLS.
    rotated = tl.gather(tile, (row + col) % COLS, 1)
    DEPTH: tl.constexpr = ROWS if ROWS < COLS else COLS
    BANDS: tl.constexpr = ROWS // DEPTH
    wraps = row % DEPTH + col >= COLS
    inner = tl.sum(tl.reshape(tl.where(wraps, 0.0, rotated), [BANDS, DEPTH, COLS]), 1)
    outer = tl.sum(tl.reshape(tl.where(wraps, rotated, 0.0), [BANDS, DEPTH, COLS]), 1)
    lag = tl.arange(0, BANDS)[:, None] * DEPTH - col
    sums = tl.reshape(tl.join(inner, outer), [2 * BANDS * COLS])
    return sums, tl.reshape(tl.join(lag, lag + COLS), [2 * BANDS * COLS])


@triton.jit
def add_diagonals(ptr, offs, sums):
    """Add each sum to the element at its offset, with atomics."""
    # Far from the diagonal all clamped offsets are equal. Then one atomic adds the total, because thousands of programs
    # add to that element.
    same = tl.min(offs, 0) == tl.max(offs, 0)
    first = tl.arange(0, sums.shape[0]) == 0
    sums = tl.where(same, tl.where(first, tl.sum(sums, 0), 0.0), sums)
    tl.atomic_add(ptr + offs, sums, mask=sums != 0.0, sem="relaxed")


@triton.jit
def store_diagonals(ptr, tile, first, num_lags, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store the sums of a tile along its diagonals at `first` + row - column. ROWS must be at least COLS.

    Sums of `diagonal_sums` from different bands of COLS rows, and both of one diagonal, go to lines of their own, of
    `num_lags` elements: 2 * ROWS // COLS lines.
    """
    sums, lag = diagonal_sums(tile, ROWS, COLS)
    entry = tl.arange(0, 2 * ROWS)
    line = entry // (2 * COLS) * 2 + entry % 2
    tl.store(ptr + line * num_lags + (first + lag), sums)
