# SPDX-License-Identifier: Apache-2.0
"""The steps of a block of query rows in Hopper's backwards: their products, and how warpgroups hand tiles over.

`rings` is the tuple of the rings of k, v, q and do. Tiles of scores are transposed, `[KEYS, BLOCK_M]`. In the fused
backward two warpgroups own half of the keys each and exchange ds; in the wide one, for more than 128 columns, one
warpgroup computes scores and dk, the other sums dv and dq.
"""
# Gluon has no starred tuples.
# ruff: noqa: RUF005

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

from .gl import (
    HeadRows,
    SequenceRows,
    as_operand,
    begin_product,
    begin_sums,
    count_pieces,
    parts_of,
    product_layout,
    wait_for_sums,
    whole_columns,
)
from .gl_backward import (
    add_sums,
    begin_sums_by_key,
    begin_sums_by_row,
    begin_with,
    dq_columns,
    in_fragments,
    of_lines,
    sums_layout,
)
from .gl_dropout import bit_layout, dropped_bits
from .gl_versions import ADDRESSES_ARE_HELD, async_add


@triton.constexpr_function
def keys_are_late(KEYS, COLS):
    """True if a backward reads a tile of KEYS keys of COLS columns at `late_zero`.

    With Triton 3.9 every backward does. With 3.6, where it was measured, a backward with tiles of 128 by 128 takes less
    time so or as much, one of 64 columns less or more, and a wide one up to 1.3 times as much.
    """
    return ADDRESSES_ARE_HELD or (KEYS == 128 and COLS == 128)


@gluon.jit
def late_zero(turn, LATE: gl.constexpr):
    """0, as the stage of a tile that stays in place over a loop. `turn` counts the loop's steps.

    A product reads each 16 columns of an operand through an address of its own. The compiler computes those that do not
    change ahead of the loop. If there are no registers for them, it loads each from local memory in each step. With
    LATE this is a number of which the compiler knows only that it follows from `turn`.
    """
    if LATE:
        return turn >> 30
    else:
        return 0


@gluon.jit
def keys_in_place(k_ring, turn):
    """The tile of keys, `[keys, columns]`, which stays in place over the loop whose steps `turn` counts."""
    LATE: gl.constexpr = keys_are_late(k_ring.tiles.shape[-2], k_ring.tiles.shape[-1])
    return k_ring.tile(late_zero(turn, LATE))


# ---------------------------------------------------------------------------------------------------- copies of a block


@gluon.jit
def send_rows(rings, head_row, batch_row, h, start_m, turn):
    """Copy the tiles of q and do from row `start_m` on, with lse and delta, which begin at block `head_row` of memory.

    `rings` is the tuple of the producer: descriptors of q, k, v, do, lse and delta, then the rings.
    """
    q_desc, _k_desc, _v_desc, do_desc, lse_desc, delta_desc, _k_ring, _v_ring, q_ring, do_ring = rings
    BLOCK_M: gl.constexpr = q_ring.vectors.shape[-1]
    first = (head_row * BLOCK_M + start_m).to(gl.int32)
    rows = HeadRows(batch_row, h.to(gl.int32))
    q_ring.send(q_desc, lse_desc, rows, start_m, first, turn)
    do_ring.send(do_desc, delta_desc, rows, start_m, first, turn)


@gluon.jit
def send_packed_rows(rings, head_row, q_end, q_len, h, start_m, turn):
    """`send_rows` for a packed sequence of `q_len` rows that ends ahead of row `q_end`."""
    q_desc, _k_desc, _v_desc, do_desc, lse_desc, delta_desc, _k_ring, _v_ring, q_ring, do_ring = rings
    BLOCK_M: gl.constexpr = q_ring.vectors.shape[-1]
    first = (head_row * BLOCK_M + start_m).to(gl.int32)
    rows = SequenceRows(q_end, q_len, h.to(gl.int32))
    q_ring.send(q_desc, lse_desc, rows, start_m, first, turn)
    do_ring.send(do_desc, delta_desc, rows, start_m, first, turn)


# --------------------------------------------------------------------------------------------- scores and dp of a block


@gluon.jit
def row_terms(q_ring, turn, block_term, SCORES: gl.constexpr):
    """The terms added to the product in a row's scores: `-lse / scale` and `block_term`, `[BLOCK_M]`."""
    row_term = q_ring.vectors.index(turn % q_ring.stages).load(gl.SliceLayout(0, SCORES))
    return row_term if block_term is None else row_term + block_term


@triton.constexpr_function
def begins_with_terms(DTYPE, COLS):
    """True if the accumulator of the scores begins with `row_terms`; if not, they are added to the product.

    Tensor cores cut off digits when they add to an accumulator. If it begins with `-lse`, all probabilities of scores
    in the thousands are too large: by 1e-3 with 64 columns, and by 4e-3 with 128. That is too much for weights of
    float16, which have 11 bits. For bfloat16 it is one unit of the last of 8 bits, and saves up to 8 % of the time.
    With wider tiles it would save nothing.
    """
    return gl.bfloat16 == DTYPE and COLS <= 128


@gluon.jit
def wait_for_scores(
    qk, q_tile, do_tile, rings, turn, block_term, SCORES: gl.constexpr, LINEAR: gl.constexpr, HEAD_DIM_V: gl.constexpr
):
    """Wait for `k q^T` of a block, but not for `v do^T`; if LINEAR, the result includes `row_terms`."""
    qk = warpgroup_mma_wait(len(parts_of(do_tile.shape[1], HEAD_DIM_V)), deps=(qk,))
    BEGINS: gl.constexpr = begins_with_terms(q_tile.dtype, q_tile.shape[1])
    if LINEAR and not BEGINS:
        qk = qk + row_terms(rings[2], turn, block_term, SCORES)[None, :]
    return qk


@gluon.jit
def issue_products(
    rings, turn, block_term, PART: gl.constexpr,
    SCORES: gl.constexpr, LINEAR: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Issue `k q^T` and `v do^T` of a block, `[KEYS, BLOCK_M]`; also returned are its tiles of q and do.

    PART: which KEYS of the tile of keys.

    Terms that are added to a product cost nothing if its accumulator begins with them. The second accumulator begins
    with `-delta`. If LINEAR, a score is the product times a factor: then the first accumulator begins with `-lse` and
    `block_term`, divided by that factor, if `begins_with_terms`. `block_term` may be None.
    """
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    k_ring, v_ring, q_ring, do_ring = rings
    KEYS: gl.constexpr = v_ring.tiles.shape[-2]
    k_tile = keys_in_place(k_ring, turn)
    k_tile = k_tile if k_tile.shape[0] == KEYS else k_tile.slice(PART * KEYS, KEYS)  # [KEYS, BLOCK_D]
    v_tile = v_ring.tile(PART + late_zero(turn, ADDRESSES_ARE_HELD))  # [KEYS, BLOCK_DV]
    stage = turn % q_ring.stages
    q_tile = q_ring.receive(turn)  # [BLOCK_M, BLOCK_D]
    do_tile = do_ring.receive(turn)  # [BLOCK_M, BLOCK_DV]
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BEGINS: gl.constexpr = LINEAR & begins_with_terms(q_tile.dtype, q_tile.shape[1])
    if BEGINS:
        qk = begin_with(row_terms(q_ring, turn, block_term, SCORES), KEYS, SCORES)
    else:
        qk = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    dp = begin_with(do_ring.vectors.index(stage).load(ROW), KEYS, SCORES)
    qk = begin_product(k_tile, q_tile, qk, HEAD_DIM, USE_ACC=BEGINS)
    dp = begin_product(v_tile, do_tile, dp, HEAD_DIM_V, USE_ACC=True)
    return qk, dp, q_tile, do_tile


@gluon.jit
def begin_block(
    rings, turn, block_term, PART: gl.constexpr,
    SCORES: gl.constexpr, LINEAR: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Issue both products of a block, and wait for the first."""
    qk, dp, q_tile, do_tile = issue_products(rings, turn, block_term, PART, SCORES, LINEAR, HEAD_DIM, HEAD_DIM_V)
    qk = wait_for_scores(qk, q_tile, do_tile, rings, turn, block_term, SCORES, LINEAR, HEAD_DIM_V)
    return qk, dp, q_tile, do_tile


@gluon.jit
def begin_dropped_block(
    rings, turn, block_term, seed, threshold, head_index, first_row, start_m, start_n, PART: gl.constexpr,
    SCORES: gl.constexpr, LINEAR: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """`begin_block`; with DROPOUT the random bits of the block are drawn while the products run.

    Dropout counts the rows from `first_row` on.
    """
    qk, dp, q_tile, do_tile = issue_products(rings, turn, block_term, PART, SCORES, LINEAR, HEAD_DIM, HEAD_DIM_V)
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    dropped = gl.zeros([32, BLOCK_M // 64, 4], gl.int32, bit_layout(BLOCK_M))
    if DROPOUT:
        dropped = dropped_bits(seed, threshold, head_index, first_row + start_m, start_n, BLOCK_M)
    qk = wait_for_scores(qk, q_tile, do_tile, rings, turn, block_term, SCORES, LINEAR, HEAD_DIM_V)
    return qk, dp, q_tile, do_tile, dropped


# --------------------------------------------------------------------------------------------------- the fused backward


@gluon.jit
def begin_exchange(exchange, PART: gl.constexpr):
    """Pipeline prologue: the block before the first has ds = 0."""
    ds_ring = exchange[0]
    KEYS: gl.constexpr = ds_ring.tiles.shape[-2] // 2
    BLOCK_M: gl.constexpr = ds_ring.tiles.shape[-1]
    none = gl.zeros([KEYS, BLOCK_M], ds_ring.tiles.dtype, product_layout(BLOCK_M))
    ds_ring.tiles.index(0).slice(PART * KEYS, KEYS).store(none)
    fence_async_shared()
    mbarrier.arrive(ds_ring.full.index(0), count=1)


@gluon.jit
def begin_dq(k_ring, exchange, turn, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, PART: gl.constexpr):
    """Issue a warpgroup's part of `ds k` with tile `turn` of the ring of ds, which holds ds of block `turn - 1`.

    A part has 64 rows: half of 128 rows and all columns, or all of 64 rows and half of the columns.
    """
    k_tile = keys_in_place(k_ring, turn)  # [BLOCK_N, BLOCK_D]
    BLOCK_D: gl.constexpr = k_tile.shape[1]
    COLS: gl.constexpr = dq_columns(BLOCK_M, BLOCK_D, HEAD_DIM, PART)
    k_part = k_tile.slice(PART * (BLOCK_D // 2), COLS, dim=1) if BLOCK_M == 64 else k_tile
    ds_ring = exchange[0]
    mbarrier.wait(ds_ring.full.index(turn & 1), (turn >> 1) & 1)
    ds_tile = ds_ring.tiles.index(turn & 1)  # [BLOCK_N, BLOCK_M]
    ds_part = ds_tile if BLOCK_M == 64 else ds_tile.slice(PART * 64, 64, dim=1)  # [BLOCK_N, 64]
    none = gl.zeros([64, COLS], gl.float32, product_layout(COLS))
    return warpgroup_mma(ds_part.permute((1, 0)), k_part, none, use_acc=False, is_async=True)


@gluon.jit
def begin_row_sums(exchange, turn, BLOCK_M: gl.constexpr, PART: gl.constexpr):
    """Issue the sums over keys of tile `turn` of ds.

    With BLOCK_M = 64 a warpgroup sums all rows over its 64 keys, with BLOCK_M = 128 it sums its 64 rows over all keys.
    """
    ds_tile = exchange[0].tiles.index(turn & 1)  # [BLOCK_N, BLOCK_M]
    own_part = ds_tile.slice(PART * 64, 64) if BLOCK_M == 64 else ds_tile.slice(PART * 64, 64, dim=1)
    return begin_sums_by_row(own_part.permute((1, 0)), exchange[2])


@gluon.jit
def first_lines(dq_ring, part: gl.constexpr, LINES: gl.constexpr):
    """The lines of a part of dq in shared memory that are not padding: a line has a number in each of the 32 banks."""
    tile = dq_ring.tiles.index(part)
    return tile if dq_ring.tiles.shape[-2] == LINES else tile.slice(0, LINES)


@gluon.jit
def store_dq(dq, exchange, turn, PART: gl.constexpr):
    """Hand a part of dq to the warp that adds it."""
    dq_ring = exchange[1]
    mbarrier.wait(dq_ring.empty.index(PART), (turn & 1) ^ 1)
    COLS: gl.constexpr = dq.shape[1]
    first_lines(dq_ring, PART, 2 * COLS).store(in_fragments(dq, COLS))


@gluon.jit
def store_row_sums(row_sums, exchange, PART: gl.constexpr):
    """Hand the sums of ds over keys of the same rows to the warp that adds dq."""
    exchange[1].vectors.index(PART).store(of_lines(row_sums, gl.SliceLayout(1, sums_layout())))


@gluon.jit
def end_block(
    ds, sums, q_tile, rings, exchange, turn, first_turn, WITH_DQ: gl.constexpr, HEAD_DIM: gl.constexpr,
    PART: gl.constexpr, ROW_SUMS: gl.constexpr = False, COLUMN_SUMS: gl.constexpr = False,
):  # fmt: skip
    """Add block `turn` to dk, and with WITH_DQ the block before to dq.

    Because dq is a block behind, a warpgroup need not wait for the other's ds of the same block, and one takes
    exponentials while the other multiplies. The first block of rows has no block before it: its product for dq takes
    the last ds of the previous block of keys, and is not used.

    Args:
        ds: `[KEYS, BLOCK_M]`, in the type of the keys.
        sums: dk and dv, each in parts, and with COLUMN_SUMS the sums of ds over rows; returned with the block added.
        exchange: the rings of ds and dq, and with ROW_SUMS or COLUMN_SUMS a matrix of ones, by which ds is summed.
            None without WITH_DQ.
        first_turn: the turn of the first block of rows.
    """
    KEYS: gl.constexpr = ds.shape[0]
    BLOCK_M: gl.constexpr = ds.shape[1]
    has_before = turn > first_turn
    k_ring, _v_ring, q_ring, do_ring = rings
    dk, dv = sums[0], sums[1]
    DK: gl.constexpr = len(dk)
    DV: gl.constexpr = len(dv)
    stage = turn % q_ring.stages
    ds_weights = as_operand(ds, dk[0])
    if COLUMN_SUMS:
        column_sums = sums[2]
    if WITH_DQ:
        ds_ring, dq_ring = exchange[0], exchange[1]
        next_stage, lap = (turn + 1) & 1, (turn + 1) >> 1
        mbarrier.wait(ds_ring.empty.index(next_stage), (lap & 1) ^ 1)
        ds_ring.tiles.index(next_stage).slice(PART * KEYS, KEYS).store(ds)
        dq = begin_dq(k_ring, exchange, turn, HEAD_DIM, BLOCK_M, PART)
        if ROW_SUMS:
            row_sums = begin_row_sums(exchange, turn, BLOCK_M, PART)
        dk = begin_sums(ds_weights, q_tile, dk)
        if COLUMN_SUMS:
            column_sums = begin_sums_by_key(ds, exchange[2], column_sums)
        # The fence waits for the stores: here that happens beside the products.
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(next_stage), count=1)
        LATER: gl.constexpr = DK + 1 if COLUMN_SUMS else DK
        if ROW_SUMS:
            done = warpgroup_mma_wait(LATER, deps=dv + (dq, row_sums))
            row_sums = done[DV + 1]
        else:
            done = warpgroup_mma_wait(LATER, deps=dv + (dq,))
        dv, dq = done[:DV], done[DV]
        do_ring.release(stage)
        mbarrier.arrive(ds_ring.empty.index(turn & 1), count=1)
        if has_before:
            store_dq(dq, exchange, turn - 1, PART)
            if ROW_SUMS:
                store_row_sums(row_sums, exchange, PART)
        if COLUMN_SUMS:
            done = warpgroup_mma_wait(0, deps=dk + (column_sums,))
            dk, column_sums = done[:DK], done[DK]
        else:
            dk = wait_for_sums(dk, 0)
        q_ring.release(stage)
        fence_async_shared()
        if has_before:
            mbarrier.arrive(dq_ring.full.index(PART), count=1)
    else:
        dk = begin_sums(ds_weights, q_tile, dk)
        dv = wait_for_sums(dv, DK)
        do_ring.release(stage)
        dk = wait_for_sums(dk, 0)
        q_ring.release(stage)
    if COLUMN_SUMS:
        return dk, dv, column_sums
    else:
        return dk, dv


@gluon.jit
def drain_dq(
    k_ring,
    exchange,
    turn,
    first_turn,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PART: gl.constexpr,
    ROW_SUMS: gl.constexpr = False,
):
    """Pipeline epilogue of a block of keys: dq of its last block of rows, `turn - 1`, if it has any."""
    dq = begin_dq(k_ring, exchange, turn, HEAD_DIM, BLOCK_M, PART)
    if ROW_SUMS:
        row_sums = begin_row_sums(exchange, turn, BLOCK_M, PART)
        dq, row_sums = warpgroup_mma_wait(0, deps=(dq, row_sums))
    else:
        dq = warpgroup_mma_wait(0, deps=(dq,))
    if turn > first_turn:
        store_dq(dq, exchange, turn - 1, PART)
        if ROW_SUMS:
            store_row_sums(row_sums, exchange, PART)
        fence_async_shared()
        mbarrier.arrive(exchange[1].full.index(PART), count=1)


@gluon.jit
def begin_addition(dq_descs, dq_ring, row_block, part: gl.constexpr):
    """Begin to add a warpgroup's part of dq of a block to memory. `dq_descs`: of both parts alike, or of each."""
    ALL_LINES: gl.constexpr = dq_ring.tiles.shape[-2]
    desc = dq_descs[part % len(dq_descs)]
    LINES: gl.constexpr = desc.block_type.shape[0]
    first_line = ((2 * row_block + part) * ALL_LINES).to(gl.int32)
    async_add(desc, [first_line, 0], first_lines(dq_ring, part, LINES))


@gluon.jit
def add_tiles(dq_descs, dq_ring, row_block, turn):
    """Add both warpgroups' parts of dq of a block to memory."""
    for part in gl.static_range(2):
        mbarrier.wait(dq_ring.full.index(part), turn & 1)
        begin_addition(dq_descs, dq_ring, row_block, part)
        tma.store_wait(0)
        mbarrier.arrive(dq_ring.empty.index(part), count=1)


# ---------------------------------------------------------------------------------------------------- the wide backward


@gluon.jit
def end_wide_block(ds, sums, q_tile, rings, hand_over, turn, WITH_DQ: gl.constexpr, COLUMN_SUMS: gl.constexpr = False):
    """Add block `turn` to dk, and with WITH_DQ hand over its ds.

    `sums` is the tuple of dk, and with COLUMN_SUMS the sums of ds over rows. `hand_over` is the tuple of the rings of
    probabilities and ds, and with COLUMN_SUMS a matrix of ones, by which ds is summed.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(q_tile.shape[1]), k_width=2)
    _k_ring, _v_ring, q_ring, do_ring = rings
    stage = turn % q_ring.stages
    dk = warpgroup_mma(gl.convert_layout(ds, WEIGHTS), q_tile, sums[0], is_async=True)
    do_ring.release(stage)
    if COLUMN_SUMS:
        column_sums = sums[1]
    if WITH_DQ:
        if COLUMN_SUMS:
            column_sums = begin_sums_by_key(ds, hand_over[2], column_sums)
        hand_over[1].put(ds, turn)
    if COLUMN_SUMS:
        dk, column_sums = warpgroup_mma_wait(0, deps=(dk, column_sums))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    # Release q for both warpgroups: the other one does not read it.
    q_ring.release(stage, 2)
    if COLUMN_SUMS:
        return dk, column_sums
    else:
        return dk


@triton.constexpr_function
def dq_part_columns(part, HEAD_DIM):
    """Columns of a part of dq in the wide backward: 64, or in the last part those that hold columns of a head.

    >>> [dq_part_columns(part, 160) for part in range(3)], dq_part_columns(2, 136), dq_part_columns(0, 40)
    ([64, 64, 32], 16, 64)
    """
    return min(max(whole_columns(HEAD_DIM - part * 64), 16), 64)


@gluon.jit
def begin_dq_part(ds_tile, k_tile, part: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue the product of ds, `[BLOCK_M, KEYS]`, with the columns of a part of the keys."""
    COLS: gl.constexpr = dq_part_columns(part, HEAD_DIM)
    ROWS: gl.constexpr = ds_tile.shape[0]
    none = gl.zeros([ROWS, COLS], gl.float32, product_layout(COLS))
    return warpgroup_mma(ds_tile, k_tile.slice(part * 64, COLS, dim=1), none, use_acc=False, is_async=True)


@gluon.jit
def begin_second_part(ds_tile, k_tile, HEAD_DIM: gl.constexpr, EARLY: gl.constexpr):
    """The tuple of the second part of dq, begun; empty unless EARLY."""
    if EARLY:
        return (begin_dq_part(ds_tile, k_tile, 1, HEAD_DIM),)
    else:
        return ()


@gluon.jit
def add_block(
    dv,
    dq_part,
    rings,
    hand_over,
    turn,
    HEAD_DIM: gl.constexpr,
    WITH_DQ: gl.constexpr,
    ROW_SUMS: gl.constexpr = False,
):
    """Add block `turn` to dv, and with WITH_DQ its product with the keys to dq in memory.

    `hand_over` is the tuple of the rings of probabilities and ds, and with ROW_SUMS a matrix of ones. Then the sums of
    ds over keys are returned, too: `[BLOCK_M, 8]`, each sum eight times.
    """
    do_ring, p_ring, ds_ring = rings[3], hand_over[0], hand_over[1]
    BLOCK_M: gl.constexpr = do_ring.tiles.shape[-2]
    if ROW_SUMS:
        row_sums = gl.zeros([BLOCK_M, 8], gl.float32, sums_layout())
    do_tile = do_ring.receive(turn)  # [BLOCK_M, BLOCK_DV]
    p_tile = p_ring.take(turn)
    if WITH_DQ:
        ds_tile = ds_ring.take(turn).permute((1, 0))  # [BLOCK_M, BLOCK_N]
        k_tile = keys_in_place(rings[0], turn)  # [BLOCK_N, BLOCK_D]
        # Up to 64 columns at a time: each part is added while the next is multiplied, and the first while dv is.
        PARTS: gl.constexpr = count_pieces(k_tile.shape[1], HEAD_DIM, 64)
        # With two or three parts, the second runs beside the first, too. With four, dv leaves no registers for it.
        EARLY: gl.constexpr = PARTS == 2 or PARTS == 3
        dq = begin_dq_part(ds_tile, k_tile, 0, HEAD_DIM)
        beside = begin_second_part(ds_tile, k_tile, HEAD_DIM, EARLY)
        dv = warpgroup_mma(p_tile, do_tile, dv, is_async=True)
        if ROW_SUMS:
            beside = beside + (begin_sums_by_row(ds_tile, hand_over[2]),)
        dq = warpgroup_mma_wait(1 + len(beside), deps=(dq,))
        add_sums(dq_part, dq)
        done = wait_for_sums((dv,) + beside, 0)
        dv = done[0]
        if ROW_SUMS:
            row_sums = done[len(beside)]
        do_ring.release(turn % do_ring.stages)
        p_ring.release(turn)
        if EARLY:
            dq = done[1]
        elif PARTS > 1:
            dq = warpgroup_mma_wait(0, deps=(begin_dq_part(ds_tile, k_tile, 1, HEAD_DIM),))
        for part in gl.static_range(2, PARTS):
            next_dq = begin_dq_part(ds_tile, k_tile, part, HEAD_DIM)
            add_sums(dq_part + (part - 1) * (BLOCK_M * 64), dq)
            dq = warpgroup_mma_wait(0, deps=(next_dq,))
        ds_ring.release(turn)
        if PARTS > 1:
            add_sums(dq_part + (PARTS - 1) * (BLOCK_M * 64), dq)
    else:
        dv = warpgroup_mma(p_tile, do_tile, dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        do_ring.release(turn % do_ring.stages)
        p_ring.release(turn)
    if ROW_SUMS:
        return dv, row_sums
    else:
        return dv
