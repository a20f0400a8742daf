# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: hopper/fwd.py.jinja
# hash: ce36e07cb787aaf1
"""Forward of `band_softcap`, with segment ids on Hopper: `o = softmax(score) v`.

    keep            q_idx - kv_idx <= before and kv_idx - q_idx <= after and q_segment_ids[b, rows] == kv_segment_ids[b,
                    cols] and kv_segment_ids[b, cols] != padding_id
    score           cap * tanh(score / cap)
    q               [B, Hq, Sq, D]
    k               [B, Hkv, Skv, D]
    columns         [B, Hkv, Dv, v_columns], v transposed
    q_scale         [B, Hq]  fp32, what q is times
    k_scale         [B, Hkv]  fp32, what k is times
    v_scale         [B, Hkv]  fp32, what v is times
    q_segment_ids   [b, q_row]  int32
    kv_segment_ids  [b, k_row]  int32
    q_positions     [B, Sq]  int32, or None: by row
    kv_positions    [B, Skv]  int32, or None: by row
    ranges          [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks
    o               [B, Hq, Sq, Dv]
    lse             [B, Hq, Sq]  fp32, log of the softmax denominator

A program computes one block of query rows after the other. Its warps run side by side: `produce_rows` schedules the
work and copies queries to shared memory (TMA), `produce_keys` copies the keys and values of each visited block, and
each warpgroup of `consume` computes 64 of the rows. While the tensor cores add up the values of one block, a
warpgroup takes the exponentials of the next (arXiv:2407.08608). The last values of a block of rows are added while the
first scores of the next block of rows are computed. This is the online softmax of arXiv:2205.14135: `row_max` is the
largest score so far, or up to 8 less, and `row_sums` has the sums of exponentials relative to it. Scores are kept times
log2(e), so that each exponential is one `exp2`. `templates/hopper/README.md` has a picture.

Tensors of the call say how many keys a block visits, so work is scheduled dynamically: a producer warp
takes the next work item from a counter in memory.

q, k and v are float8_e4m3fn, to be multiplied by `q_scale`, `k_scale` and `v_scale`, which have one number for each
head. v is passed transposed, as `columns`, with its keys in the order in which threads hold the weights:
`_runtime/device/gl_fp8.py` says why. Weights are rounded to float8_e4m3fn as well, and `row_max` is 4 to 8 below the
largest score so far.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..._runtime.device.gl import LN2, HeadRows, describe_rows, make_ring, make_work_ring
from ..._runtime.device.gl_forward import (
    ROWS,
    add_lanes,
    change_turns,
    end_pv,
    lane_layout,
    make_key_ring,
    query_stages,
    store_rows,
)
from ..._runtime.device.gl_fp8 import (
    HeadColumns,
    begin_block,
    begin_pv,
    describe_columns,
    no_sums,
    pack_words,
    product_layout,
    raise_maximum,
    rescale,
    unpack_words,
)
from ..._runtime.device.gl_math import clamp_index, tanh
from ..._runtime.device.gl_versions import aggregate, concat


@aggregate
class Work:
    """One block of query rows, as `produce_rows` publishes it; `h` is -1 after the last block."""

    item: gl.tensor
    h: gl.tensor
    b: gl.tensor
    block: gl.tensor
    q_shift: gl.tensor
    num_masked: gl.tensor
    num_plain: gl.tensor


@gluon.jit
def visited_keys(b, ranges_ptr, start_m, stride_ranges_b, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many blocks of keys the rows from `start_m` on visit, with a mask and without, and where they begin."""
    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + b * stride_ranges_b + start_m // BLOCK_M * 4
    kv_begin, full_begin = gl.load(block_range) * BLOCK_N, gl.load(block_range + 1) * BLOCK_N
    full_end, kv_end = gl.load(block_range + 2) * BLOCK_N, gl.load(block_range + 3) * BLOCK_N
    gap = full_end - full_begin
    num_partial = gl.maximum(gl.cdiv(kv_end - gap - kv_begin, BLOCK_N), 0)
    num_full = (full_end - full_begin) // BLOCK_N
    # Rows that attend to nothing visit block 0, and their mask keeps none of its keys.
    num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
    # The first block always takes the loop with the mask.
    num_masked = gl.maximum(num_partial, 1)
    return kv_begin, full_begin, gap, num_partial, num_full, num_masked


@gluon.jit
def produce_rows(arguments, Q_OFFSET_PER_BATCH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Publish each work item, and copy its queries."""
    q_desc, q_ring, work_ring, ranges_ptr, q_offset, stride_ranges_b, q_len, num_heads, batch, work_counter_ptr = (
        arguments
    )
    PARTS: gl.constexpr = BLOCK_M // ROWS
    q_turn = 0
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    # A work item is a block of rows of one head. After its first item, a program takes the next one that is not taken.
    num_items = num_blocks * num_heads * batch
    item = gl.program_id(0)
    while item < num_items:
        head, block = item // num_blocks, item % num_blocks
        b = (head // num_heads).to(gl.int64)
        h = (head % num_heads).to(gl.int64)
        start_m = block * BLOCK_M
        q_shift = gl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
        _kv_begin, _full_begin, _gap, num_partial, num_full, num_masked = visited_keys(
            b, ranges_ptr, start_m, stride_ranges_b, BLOCK_M, BLOCK_N
        )
        num_plain = num_full - (num_masked - num_partial)
        work_ring.publish(q_turn, (item, h, b, block, q_shift, num_masked, num_plain))
        q_rows = HeadRows(b.to(gl.int32), h.to(gl.int32))
        for part in gl.static_range(PARTS):
            q_ring.send(q_desc, q_rows, start_m + part * ROWS, PARTS * q_turn + part)
        q_turn += 1
        item = gl.num_programs(0) + gl.atomic_add(work_counter_ptr, 1, sem="relaxed")
    work_ring.publish(q_turn, (-1, -1, -1, -1, -1, -1, -1))


@gluon.jit
def produce_keys(arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each block that the rows of a work item visit."""
    k_desc, v_desc, kv_ring, work_ring, ranges_ptr, stride_ranges_b, q_len, kv_len, v_columns, num_heads, group_size = (
        arguments
    )
    kv_turn = 0
    # The values follow their keys by one turn. The first turn takes values from behind the last key, which are zeros.
    v_rows, v_start = HeadColumns(gl.cast(0, gl.int32), gl.cast(0, gl.int32)), v_columns
    num_blocks = gl.cdiv(q_len, BLOCK_M)
    work_turn = 0
    item = Work(*work_ring.receive(work_turn, 1)).item
    while item >= 0:
        head, block = item // num_blocks, item % num_blocks
        b = (head // num_heads).to(gl.int64)
        h = (head % num_heads).to(gl.int64)
        hkv = h // group_size
        start_m = block * BLOCK_M
        kv_begin, full_begin, gap, num_partial, num_full, num_masked = visited_keys(
            b, ranges_ptr, start_m, stride_ranges_b, BLOCK_M, BLOCK_N
        )
        kv_rows = HeadRows(b.to(gl.int32), hkv.to(gl.int32))
        kv_columns = HeadColumns(b.to(gl.int32), hkv.to(gl.int32))
        for nth in range(num_masked):
            start_n = kv_begin + nth * BLOCK_N
            start_n = gl.where(start_n < full_begin, start_n, start_n + gap)
            start_n = gl.where(start_n < kv_len, start_n, 0)
            if num_partial == 0:
                start_n = full_begin
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            v_rows, v_start = kv_columns, start_n
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            start_n = full_begin + nth * BLOCK_N
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            v_rows, v_start = kv_columns, start_n
            kv_turn += 1
        work_turn += 1
        item = Work(*work_ring.receive(work_turn, 1)).item
    kv_ring.v.send(v_desc, v_rows, v_start, kv_turn)


@gluon.jit
def consume(
    arguments,
    PART: gl.constexpr,
    stride_os: gl.constexpr,
    POSITIONS: gl.constexpr,
    HARDWARE_TANH: gl.constexpr,
    RAGGED: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute the rows of warpgroup PART of each work item."""
    q_ring, kv_ring, work_ring, pointers, strides, numbers = arguments
    (
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        q_segment_ids_ptr,
        kv_segment_ids_ptr,
        q_positions_ptr,
        kv_positions_ptr,
        o_ptr,
        lse_ptr,
    ) = pointers
    (
        stride_ob,
        stride_oh,
        stride_q_segment_ids_0,
        stride_q_segment_ids_1,
        stride_kv_segment_ids_0,
        stride_kv_segment_ids_1,
        stride_q_positions_b,
        stride_kv_positions_b,
    ) = strides
    (
        before,
        after,
        cap,
        q_segment_ids_size_1,
        kv_segment_ids_size_1,
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
        padding_id,
    ) = numbers
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    OWN_KEY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = BLOCK_M // ROWS
    Q_BLOCKS: gl.constexpr = q_ring.stages // PARTS
    kv_turn, q_turn = 0, 0
    if PART == PARTS - 1:
        change_turns("arrive", 0)
    # Pipeline prologue: a dummy block of rows with P = 0, so that the first product with values adds nothing.
    p_words = pack_words(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))  # [ROWS, BLOCK_N // 4]
    acc = no_sums(BLOCK_DV)
    inv_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SUMS))
    # The results of the dummy block are not stored: its rows lie behind the last one.
    o_start, o_row = gl.cast(0, gl.int64), q_len
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        b = work.b.to(gl.int64)
        q_shift = work.q_shift
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + PART * ROWS + gl.arange(0, ROWS, layout=ROW)
        q_idx = (
            gl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=rows < q_len, other=0)
            if POSITIONS
            else rows + q_shift
        )
        q_segment_ids_q = gl.load(
            q_segment_ids_ptr
            + b * stride_q_segment_ids_0
            + clamp_index(rows, q_segment_ids_size_1).to(gl.int64) * stride_q_segment_ids_1
        )
        kv_head = b * (num_heads // group_size) + h // group_size
        head_scale = scale * gl.load(q_scale_ptr + b * num_heads + h) * gl.load(k_scale_ptr + kv_head)

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # [ROWS]
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)  # [ROWS, 4]

        q_stage = PARTS * (q_turn % Q_BLOCKS) + PART
        mbarrier.wait(q_ring.full.index(q_stage), (q_turn // Q_BLOCKS) & 1)
        q_tile = q_ring.tile(q_stage)  # [ROWS, BLOCK_D]
        for nth in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            cols = start_n + gl.arange(0, BLOCK_N, layout=KEY)
            own_col = start_n + gl.arange(0, BLOCK_N, layout=OWN_KEY)
            own_key = (
                gl.load(kv_positions_ptr + b * stride_kv_positions_b + own_col, mask=own_col < kv_len, other=0)
                if POSITIONS
                else own_col
            )
            own_segment = gl.load(
                kv_segment_ids_ptr
                + b * stride_kv_segment_ids_0
                + clamp_index(own_col, kv_segment_ids_size_1).to(gl.int64) * stride_kv_segment_ids_1
            )
            qk, acc = begin_block(q_tile, p_words, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS)
            logit = qk
            # Always true. Without the branch the mask is computed ahead of the product and kept in registers.
            if start_m < q_len:
                logit = 1.4426950408889634 * cap * tanh(head_scale * qk / cap, HARDWARE_TANH)
                kv_idx = gl.convert_layout(own_key, KEY) if POSITIONS else cols
                keep = (q_idx[:, None] - kv_idx[None, :] <= before) & (kv_idx[None, :] - q_idx[:, None] <= after)
                if RAGGED:
                    keep = keep & (cols < kv_len)[None, :]
                logit = gl.where(keep, logit, float("-inf"))
                kv_segment_ids_kv = gl.convert_layout(own_segment, KEY)
                logit = gl.where(
                    (q_segment_ids_q[:, None] == kv_segment_ids_kv[None, :])
                    & (kv_segment_ids_kv != padding_id)[None, :],
                    logit,
                    float("-inf"),
                )
            max_new, alpha = raise_maximum(row_max, gl.max(logit, 1))
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(logit - max_ref[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_words = pack_words(p)
            row_max = max_new
            acc = end_pv(acc, kv_ring.v, kv_turn)
            if nth == 0:
                # Epilogue of the previous rows: this product has added their last values.
                store_rows(
                    o_ptr + o_start,
                    (acc[0] * inv_sum[:, None]).to(o_ptr.dtype.element_ty),
                    o_row,
                    q_len,
                    stride_os,
                    HEAD_DIM_V,
                )
                acc = no_sums(BLOCK_DV)
            else:
                acc = rescale(acc, alpha)
            kv_turn += 1

        for _ in range(work.num_plain):
            qk, acc = begin_block(q_tile, p_words, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS)
            logit = 1.4426950408889634 * cap * tanh(head_scale * qk / cap, HARDWARE_TANH)
            max_new, alpha = raise_maximum(row_max, gl.max(logit, 1))
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(logit - max_ref[:, None])  # [ROWS, BLOCK_N]
            row_sums = add_lanes(row_sums, alpha, p, LANES)
            p_words = pack_words(p)
            row_max = max_new
            acc = end_pv(acc, kv_ring.v, kv_turn)
            acc = rescale(acc, alpha)
            kv_turn += 1

        mbarrier.arrive(q_ring.empty.index(q_stage), count=1)
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), ROW)
        # A row without any key gives o = 0 and lse = -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN2  # [ROWS]
        gl.store(lse_ptr + (b * num_heads + h) * q_len + rows, lse, mask=rows < q_len)
        # The epilogue of these rows runs beside the first block of the next rows.
        inv_sum = gl.convert_layout(gl.load(v_scale_ptr + kv_head) / row_sum, gl.SliceLayout(1, SUMS))
        o_start, o_row = b * stride_ob + h * stride_oh, start_m + PART * ROWS
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))

    acc = begin_pv(unpack_words(p_words, DTYPE, WEIGHTS), acc, kv_ring.v, kv_turn)
    acc = end_pv(acc, kv_ring.v, kv_turn)
    store_rows(
        o_ptr + o_start, (acc[0] * inv_sum[:, None]).to(o_ptr.dtype.element_ty), o_row, q_len, stride_os, HEAD_DIM_V
    )


@gluon.jit(
    do_not_specialize=[
        "q_offset",
        "before",
        "after",
        "cap",
        "q_segment_ids_size_1",
        "kv_segment_ids_size_1",
        "stride_ranges_b",
        "q_len",
        "kv_len",
        "v_columns",
        "num_heads",
        "group_size",
        "padding_id",
        "batch",
    ]
)
def band_softcap_segmented_hopper_fwd_fp8(
    q_ptr,
    k_ptr,
    columns_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    before,
    after,
    cap,
    o_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_ob,
    stride_oh,
    stride_os: gl.constexpr,
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
    v_columns,
    num_heads,
    group_size,
    scale,
    padding_id,
    batch,
    work_counter_ptr,
    Q_OFFSET_PER_BATCH: gl.constexpr,
    SCALARS_LOADED: gl.constexpr,
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
):
    before = gl.load(before) if SCALARS_LOADED else before
    after = gl.load(after) if SCALARS_LOADED else after
    cap = gl.load(cap) if SCALARS_LOADED else cap
    kv_heads = num_heads // group_size
    PARTS: gl.constexpr = BLOCK_M // ROWS
    q_desc = describe_rows(q_ptr, batch, num_heads, q_len, stride_qb, stride_qh, stride_qs, HEAD_DIM, ROWS, BLOCK_D)
    k_desc = describe_rows(k_ptr, batch, kv_heads, kv_len, stride_kb, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_columns(columns_ptr, batch, kv_heads, v_columns, HEAD_DIM_V, BLOCK_DV, BLOCK_N)
    q_ring = make_ring(q_desc, PARTS * query_stages(BLOCK_D), 1, 1)
    kv_ring = make_key_ring(k_desc, v_desc, STAGES, PARTS)
    work_ring = make_work_ring(7, PARTS + 1)
    consumer = (
        q_ring,
        kv_ring,
        work_ring,
        (
            q_scale_ptr,
            k_scale_ptr,
            v_scale_ptr,
            q_segment_ids_ptr,
            kv_segment_ids_ptr,
            q_positions_ptr,
            kv_positions_ptr,
            o_ptr,
            lse_ptr,
        ),
        (
            stride_ob,
            stride_oh,
            stride_q_segment_ids_0,
            stride_q_segment_ids_1,
            stride_kv_segment_ids_0,
            stride_kv_segment_ids_1,
            stride_q_positions_b,
            stride_kv_positions_b,
        ),
        (
            before,
            after,
            cap,
            q_segment_ids_size_1,
            kv_segment_ids_size_1,
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            padding_id,
        ),
    )
    CONSTANTS: gl.constexpr = (stride_os, POSITIONS, HARDWARE_TANH, RAGGED, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N)
    rows = (q_desc, q_ring, work_ring, ranges_ptr, q_offset, stride_ranges_b, q_len, num_heads, batch, work_counter_ptr)
    keys = (
        k_desc,
        v_desc,
        kv_ring,
        work_ring,
        ranges_ptr,
        stride_ranges_b,
        q_len,
        kv_len,
        v_columns,
        num_heads,
        group_size,
    )
    # The registers of each thread. The first consumer gets what is left, which is as much as the others have.
    if PARTS == 3:
        gl.warp_specialize(
            [
                (consume, concat((consumer, 0), CONSTANTS)),
                (consume, concat((consumer, 1), CONSTANTS)),
                (consume, concat((consumer, 2), CONSTANTS)),
                (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
                (produce_keys, (keys, BLOCK_M, BLOCK_N)),
            ],
            worker_num_warps=[4, 4, 1, 1],
            worker_num_regs=[160, 160, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, concat((consumer, 0), CONSTANTS)),
                (consume, concat((consumer, 1), CONSTANTS)),
                (produce_rows, (rows, Q_OFFSET_PER_BATCH, BLOCK_M, BLOCK_N)),
                (produce_keys, (keys, BLOCK_M, BLOCK_N)),
            ],
            worker_num_warps=[4, 1, 1],
            worker_num_regs=[240, 24, 24],
        )
