"""Device functions of kernels on paged caches, and the kernel that merges the splits of a sequence.

A cache has the axes page, slot, key head and column. A tile of rows holds the query heads that share a key head, so
that each row needs an offset of its own.
"""

# ruff: noqa: RUF005
# Triton has no starred tuples.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..core.paged import WHOLE_ROW as PAGE_OF_A_WHOLE_ROW
from .column_pairs import as_pairs, join_pairs, unpack_pairs
from .tl import LN2, dot_rows

WHOLE_ROW = tl.constexpr(PAGE_OF_A_WHOLE_ROW)

FOLDED = tl.constexpr(8)
"""The number of splits that are folded in their order, by the program that takes them or by `merge_splits`."""

WAVES = tl.constexpr(2)
"""A program takes several splits only if the batch still has work for so many programs, one after the other, on each
multiprocessor."""


@triton.constexpr_function
def num_parts(COLS, BLOCK_COLS):
    """The number of parts of the tile of a matrix of COLS columns: all but the last have BLOCK_COLS columns."""
    return max(triton.cdiv(COLS, BLOCK_COLS), 1)


@triton.constexpr_function
def part_width(COLS, BLOCK_COLS, i):
    """The width of part `i`."""
    rest = COLS - i * BLOCK_COLS
    return BLOCK_COLS if i == 0 or rest >= BLOCK_COLS else max(triton.next_power_of_2(rest), 16)


@triton.jit
def load_pages(pages, start_n, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a block of keys: one number if a page holds whole blocks, else a number for each key.

    Beyond the last key it is the page of the last key, so that no unfilled entry of the table is read; page 0 if the
    sequence has no key, for it may have no entry. For dense keys `pages` is the batch row, which is their page.
    """
    if PAGE_SIZE == WHOLE_ROW:
        return pages
    elif PAGE_SIZE % BLOCK_N == 0:
        entry = tl.maximum(tl.minimum(start_n, kv_len - 1), 0) // PAGE_SIZE
        return tl.load(pages + entry, mask=kv_len > 0, other=0).to(tl.int64)
    else:
        kv_idx = tl.maximum(tl.minimum(start_n + tl.arange(0, BLOCK_N), kv_len - 1), 0)
        return tl.load(pages + kv_idx // PAGE_SIZE, mask=kv_len > 0, other=0).to(tl.int64)


@triton.jit
def page_of(pages, index, kv_len, PAGE_SIZE: tl.constexpr):
    """The page of a key, or of the nearest key that the sequence has; page 0 if the sequence has no key."""
    if PAGE_SIZE == WHOLE_ROW:
        return pages
    else:
        entry = tl.maximum(tl.minimum(index, kv_len - 1), 0) // PAGE_SIZE
        return tl.load(pages + entry, mask=kv_len > 0, other=0).to(tl.int64)


@triton.jit
def slot_of(index, kv_len, size, PAGE_SIZE: tl.constexpr):
    """The slot in its page of a key, or of the nearest key that the sequence has.

    For dense keys it is the nearest key that the tensor has, whose length is `size`.
    """
    last = size - 1 if PAGE_SIZE == WHOLE_ROW else kv_len - 1
    return tl.maximum(tl.minimum(index, last), 0) % PAGE_SIZE


@triton.jit
def _cache_columns(
    base,
    page,
    start_n,
    seen,
    stride_page,
    stride_slot,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    col = tl.arange(0, BLOCK_COLS)[None, :]
    mask = seen[:, None]
    if COLS < BLOCK_COLS:
        mask = mask & (col < COLS)
    if PAGE_SIZE % BLOCK_N == 0:
        # The page moves a 64-bit number; the tile of offsets stays 32-bit and the same in every iteration.
        first = tl.cast(start_n % PAGE_SIZE, tl.int64)
        row = tl.arange(0, BLOCK_N)[:, None]
        ptrs = base + (page * stride_page + first * stride_slot) + (row * stride_slot + col)
    else:
        slot = tl.cast((start_n + tl.arange(0, BLOCK_N)) % PAGE_SIZE, tl.int64)
        ptrs = base + (page * stride_page + slot * stride_slot)[:, None] + col
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_cache(
    base,
    page,
    start_n,
    seen,
    stride_page,
    stride_slot,
    DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The tile of keys or values from `start_n` on, in DTYPE; keys that are not `seen` are zero and not read.

    With PAIRS, which says how pairs of columns are converted, the tile has even and odd columns in float16.
    """
    # The columns in each loaded element: strides and columns are divided by it.
    STEP: tl.constexpr = 1 if PAIRS == "" else 2
    if PAIRS != "":
        MANTISSA: tl.constexpr = base.dtype.element_ty.fp_mantissa_width
        base = as_pairs(base)
        stride_page, stride_slot = stride_page // STEP, stride_slot // STEP
    parts = ()
    for i in tl.static_range(num_parts(COLS, BLOCK_COLS)):
        part = _cache_columns(
            base + i * (BLOCK_COLS // STEP),
            page,
            start_n,
            seen,
            stride_page,
            stride_slot,
            PAGE_SIZE,
            BLOCK_N,
            (COLS - i * BLOCK_COLS) // STEP,
            part_width(COLS, BLOCK_COLS, i) // STEP,
        )
        parts = parts + (unpack_pairs(part, MANTISSA, PAIRS == "ptx") if PAIRS != "" else (part.to(DTYPE),))
    return parts


@triton.jit
def first_columns(tile, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, PAIRS: tl.constexpr):
    """The tile of the first COLS columns of a matrix, which are whole parts of its tile."""
    parts = ()
    for i in tl.static_range(num_parts(COLS, BLOCK_COLS) * (1 if PAIRS == "" else 2)):
        parts = parts + (tile[i],)
    return parts


@triton.jit
def zero_sums(ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, PAIRS: tl.constexpr):
    """An fp32 accumulator of ROWS rows, with the parts of a tile of COLS columns of values."""
    parts = ()
    for i in tl.static_range(num_parts(COLS, BLOCK_COLS)):
        if PAIRS == "":
            parts = parts + (tl.zeros([ROWS, part_width(COLS, BLOCK_COLS, i)], tl.float32),)
        else:
            half = tl.zeros([ROWS, part_width(COLS, BLOCK_COLS, i) // 2], tl.float32)
            parts = parts + (half, half)
    return parts


@triton.jit
def dot_keys(q_tile, k_tile):
    """The product of each row with each key.

    An MMA waits for the one before it if both add to the same accumulator: so each part of wide rows has its own.
    """
    if len(q_tile) <= 2:
        return dot_rows(q_tile, k_tile)
    else:
        qk = tl.dot(q_tile[0], tl.trans(k_tile[0]), input_precision="ieee")
        ones = tl.full(qk.shape, 1.0, tl.float32)
        for i in tl.static_range(1, len(q_tile)):
            part = tl.dot(q_tile[i], tl.trans(k_tile[i]), input_precision="ieee")
            # From a plain sum Triton would make one chain of MMAs.
            qk = tl.fma(part, ones, qk)
        return qk


@triton.jit
def add_values(acc, weights, tile, alpha):
    """`acc * alpha + weights @ tile`, part by part."""
    weights = weights.to(tile[0].dtype)
    acc = [part * alpha[:, None] for part in acc]
    sums = ()
    for i in tl.static_range(len(tile)):
        sums = sums + (tl.dot(weights, tile[i], acc[i], input_precision="ieee"),)
    return sums


@triton.jit
def in_columns(acc, PAIRS: tl.constexpr):
    """A sum of values with its columns in order."""
    if PAIRS == "":
        return acc
    else:
        return join_pairs(acc)


@triton.jit
def head_scale(scale, head, KIND: tl.constexpr):
    """The scale of a key head in a cache: its numbers are times it. 1 if the cache has none, or one for each token."""
    if KIND == "number":
        return scale
    elif KIND == "head":
        return tl.load(scale + head).to(tl.float32)
    else:
        return 1.0


@triton.jit
def value_unit(scale, head, KIND: tl.constexpr):
    """The initial unit of a sum of values: their scale, or close to 0 if each token has a scale of its own."""
    if KIND == "token":
        return tl.full([], 1e-30, tl.float32)
    else:
        return head_scale(scale, head, KIND)


@triton.jit
def token_scales(scale, head, num_kv_heads, page, start_n, seen, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The scale of each key from `start_n` on; 0 and not read for keys that are not `seen`."""
    slot = page * PAGE_SIZE + (start_n + tl.arange(0, BLOCK_N)) % PAGE_SIZE
    return tl.load(scale + slot * num_kv_heads + head, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _head_columns(ptr, offsets, is_row, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    col = tl.arange(0, BLOCK_COLS)[None, :]
    return tl.load(ptr + offsets[:, None] + col, mask=is_row[:, None] & (col < COLS), other=0.0)


@triton.jit
def load_heads(ptr, offsets, is_row, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A tile of rows that begin at `offsets`; rows for which `is_row` is false are zero."""
    parts = ()
    for i in tl.static_range(num_parts(COLS, BLOCK_COLS)):
        part = _head_columns(
            ptr + i * BLOCK_COLS, offsets, is_row, COLS - i * BLOCK_COLS, part_width(COLS, BLOCK_COLS, i)
        )
        parts = parts + (part,)
    return parts


@triton.jit
def store_heads(ptr, tile, offsets, is_row, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Store a tile to rows that begin at `offsets`."""
    for i in tl.static_range(len(tile)):
        col = i * BLOCK_COLS + tl.arange(0, tile[i].shape[1])[None, :]
        value = tile[i].to(ptr.dtype.element_ty)
        tl.store(ptr + offsets[:, None] + col, value, mask=is_row[:, None] & (col < COLS))


@triton.jit
def join_sums(max_1, sum_1, max_2, sum_2):
    """The joint maximum and softmax sum of two parts, and the factor by which the sums of each are multiplied."""
    row_max = tl.maximum(max_1, max_2)
    # While neither has met a key the maximum is -inf, and -inf minus -inf is NaN.
    max_ref = tl.where(row_max == float("-inf"), 0.0, row_max)
    alpha_1, alpha_2 = tl.exp2(max_1 - max_ref), tl.exp2(max_2 - max_ref)
    return row_max, tl.fma(sum_1, alpha_1, sum_2 * alpha_2), alpha_1, alpha_2


@triton.jit
def join_columns(acc_1, alpha_1, acc_2, alpha_2):
    """The joint sums of values of two parts. `fma` fixes the rounding, so that every kernel gets the same bits."""
    return tl.fma(acc_1, alpha_1[:, None].broadcast_to(acc_1.shape), acc_2 * alpha_2[:, None])


@triton.jit
def join_parts(max_1, sum_1, acc_1, max_2, sum_2, acc_2):
    """Two parts of the keys of a tile as one: maxima and sums of its rows, and the sums of values."""
    row_max, row_sum, alpha_1, alpha_2 = join_sums(max_1, sum_1, max_2, sum_2)
    parts = ()
    for i in tl.static_range(len(acc_1)):
        parts = parts + (join_columns(acc_1[i], alpha_1, acc_2[i], alpha_2),)
    return row_max, row_sum, parts


@triton.jit(do_not_specialize=["num_kv_heads", "partial_rows"])
def merge_splits(
    partial_o_ptr,
    partial_sums_ptr,
    tiles_ptr,
    counts_ptr,
    o_ptr,
    lse_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lseb,
    stride_lseh,
    num_kv_heads,
    partial_rows,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Join the parts of each tile, in their order, so that equal inputs give equal bits.

    A program takes one row after the other. If a part is one split, FOLDED parts are folded first; else a part already
    has FOLDED splits. BLOCK_P of these folds are joined at a time. COLUMNS is the power of two that holds HEAD_DIM_V
    columns.
    """
    num_items = tl.load(counts_ptr + 1) * num_kv_heads * partial_rows
    col = tl.arange(0, COLUMNS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = item % partial_rows
        hkv = item // partial_rows % num_kv_heads
        record = tiles_ptr + item // (partial_rows * num_kv_heads) * 8
        b, q_start = tl.load(record).to(tl.int64), tl.load(record + 1).to(tl.int64)
        q_len, start_row = tl.load(record + 2), tl.load(record + 3)
        first_part, parts = tl.load(record + 4).to(tl.int64), tl.load(record + 5)
        together = FOLDED // tl.load(record + 6)
        if start_row + row < q_len * GROUP:
            row_max = tl.full([], float("-inf"), tl.float32)
            row_sum = tl.zeros([], tl.float32)
            acc = tl.zeros([COLUMNS], tl.float32)
            if OVERLAPS:
                # This kernel may start while the parts are still being computed.
                gdc_wait()
            for first in range(0, parts, BLOCK_P * together):
                # All loads come first: otherwise each fold would wait for its own load.
                maxima, sums, values = (), (), ()
                for member in tl.static_range(FOLDED):
                    nth = first + tl.arange(0, BLOCK_P) * together + member
                    is_part = (nth < parts) & (member < together)
                    part = ((first_part + nth) * num_kv_heads + hkv) * partial_rows + row
                    mask = is_part[:, None] & (col < HEAD_DIM_V)[None, :]
                    maxima = maxima + (tl.load(partial_sums_ptr + part * 2, mask=is_part, other=float("-inf")),)
                    sums = sums + (tl.load(partial_sums_ptr + part * 2 + 1, mask=is_part, other=0.0),)
                    columns = partial_o_ptr + part[:, None] * HEAD_DIM_V + col[None, :]
                    values = values + (tl.load(columns, mask=mask, other=0.0),)
                parts_max, parts_sum, parts_acc = maxima[0], sums[0], values[0]
                for member in tl.static_range(1, FOLDED):
                    parts_max, parts_sum, alpha_1, alpha_2 = join_sums(
                        parts_max, parts_sum, maxima[member], sums[member]
                    )
                    parts_acc = join_columns(parts_acc, alpha_1, values[member], alpha_2)
                max_new = tl.maximum(row_max, tl.max(parts_max, 0))
                max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
                weight, alpha = tl.exp2(parts_max - max_ref), tl.exp2(row_max - max_ref)
                row_sum = row_sum * alpha + tl.sum(parts_sum * weight, 0)
                acc = acc * alpha + tl.sum(parts_acc * weight[:, None], 0)
                row_max = max_new
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            token = q_start + (start_row + row) // GROUP
            h = tl.cast(hkv, tl.int64) * GROUP + (start_row + row) % GROUP
            o_row = o_ptr + b * stride_ob + token * stride_os + h * stride_oh
            tl.store(o_row + col, (acc / row_sum).to(o_ptr.dtype.element_ty), mask=col < HEAD_DIM_V)
            tl.store(lse_ptr + b * stride_lseb + h * stride_lseh + token, (row_max + tl.log2(row_sum)) * LN2)
