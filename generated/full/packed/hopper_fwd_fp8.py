# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: hopper/fwd.py.jinja
# hash: a133258444131ac6
"""Forward of `full`, packed sequences on Hopper: `o = softmax(score) v`.

    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    columns     [Hkv, Dv, v_columns], v transposed: sequence b from column (its first row // 16 + b) * 16 on
    q_scale     [n, Hq]  fp32, what q is times
    k_scale     [n, Hkv]  fp32, what k is times
    v_scale     [n, Hkv]  fp32, what v is times
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    o           [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator

A program computes one block of query rows after the other. Its warps run side by side: `produce_rows` schedules the
work and copies queries to shared memory (TMA), `produce_keys` copies the keys and values of each visited block, and
each warpgroup of `consume` computes 64 of the rows. While the tensor cores add up the values of one block, a
warpgroup takes the exponentials of the next (arXiv:2407.08608). The last values of a block of rows are added while the
first scores of the next block of rows are computed. This is the online softmax of arXiv:2205.14135: `row_max` is the
largest score so far, or up to 8 less, and `row_sums` has the sums of exponentials relative to it. Scores are kept times
log2(e), so that each exponential is one `exp2`. `templates/hopper/README.md` has a picture.

Sequences have any lengths, so work is scheduled dynamically: a producer warp takes the next work item from a
counter in memory. Tiles are clipped at the ends of a sequence, so that none holds rows of another.

q, k and v are float8_e4m3fn, to be multiplied by `q_scale`, `k_scale` and `v_scale`, which have one number for each
head. v is passed transposed, as `columns`, with its keys in the order in which threads hold the weights:
`_runtime/device/gl_fp8.py` says why. Weights are rounded to float8_e4m3fn as well, and `row_max` is 4 to 8 below the
largest score so far.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.gl import (
    LN2,
    LOG2E,
    SequenceRows,
    describe_packed_rows,
    load_sequence,
    make_ring,
    make_work_ring,
)
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
    UNIT,
    SequenceColumns,
    begin_block,
    begin_pv,
    describe_packed_columns,
    no_sums,
    pack_words,
    product_layout,
    raise_maximum,
    rescale,
    unpack_words,
)
from ..._runtime.device.gl_versions import aggregate, concat


@aggregate
class Work:
    """One block of query rows, as `produce_rows` publishes it; `h` is -1 after the last block."""

    item: gl.tensor
    h: gl.tensor
    b: gl.tensor
    block: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    lse_start: gl.tensor
    num_masked: gl.tensor
    num_plain: gl.tensor


@gluon.jit
def visited_keys(kv_len, BLOCK_N: gl.constexpr):
    """How many blocks of keys the rows from `start_m` on visit, with a mask and without, and where they begin."""
    # Blocks before full_end need no mask.
    full_end = kv_len // BLOCK_N * BLOCK_N
    num_partial = gl.maximum(gl.cdiv(kv_len - full_end, BLOCK_N), 0)
    num_full = full_end // BLOCK_N
    # Rows that attend to nothing visit block 0, and their mask keeps none of its keys.
    num_partial = gl.where(num_partial + num_full == 0, 1, num_partial)
    # The first block always takes the loop with the mask.
    num_masked = gl.maximum(num_partial, 1)
    return full_end, num_partial, num_full, num_masked


@gluon.jit
def produce_rows(arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Publish each work item, and copy its queries."""
    q_desc, q_ring, work_ring, block_seqs_ptr, num_heads, work_counter_ptr = arguments
    PARTS: gl.constexpr = BLOCK_M // ROWS
    q_turn = 0
    # A work item is a block of rows of one head. After its first item, a program takes the next one that is not taken.
    num_items = gl.load(block_seqs_ptr + NUM_BLOCKS) * num_heads
    item = gl.program_id(0)
    while item < num_items:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        b, first_entry, q_start, q_len, _kv_start, kv_len, lse_start = load_sequence(block_seqs_ptr, item // num_heads)
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        block = sequence_item % num_blocks
        h = (sequence_item // num_blocks).to(gl.int64)
        start_m = block * BLOCK_M
        _full_end, num_partial, num_full, num_masked = visited_keys(kv_len, BLOCK_N)
        num_plain = num_full - (num_masked - num_partial)
        work_ring.publish(q_turn, (item, h, b, block, q_start, q_len, kv_len, lse_start, num_masked, num_plain))
        q_head, q_end = h.to(gl.int32), q_start.to(gl.int32) + q_len
        q_rows = SequenceRows(q_end, q_len, q_head)
        for part in gl.static_range(PARTS):
            q_ring.send(q_desc, q_rows, start_m + part * ROWS, PARTS * q_turn + part)
        q_turn += 1
        item = gl.num_programs(0) + gl.atomic_add(work_counter_ptr, 1, sem="relaxed")
    work_ring.publish(q_turn, (-1, -1, -1, -1, -1, -1, -1, -1, -1, -1))


@gluon.jit
def produce_keys(arguments, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys and values of each block that the rows of a work item visit."""
    k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, num_heads, group_size = arguments
    kv_turn = 0
    # The values follow their keys by one turn. The first turn takes values from behind the last key, which are zeros.
    v_rows, v_start = SequenceColumns(gl.cast(0, gl.int32), gl.cast(0, gl.int32), gl.cast(0, gl.int32)), 0
    work_turn = 0
    item = Work(*work_ring.receive(work_turn, 1)).item
    while item >= 0:
        # As in the portable kernel: the blocks of a sequence follow each other, and long sequences come first.
        b, first_entry, _q_start, q_len, kv_start, kv_len, _lse_start = load_sequence(block_seqs_ptr, item // num_heads)
        sequence_item = item - first_entry * num_heads
        num_blocks = gl.cdiv(q_len, BLOCK_M)
        h = (sequence_item // num_blocks).to(gl.int64)
        hkv = h // group_size
        full_end, num_partial, num_full, num_masked = visited_keys(kv_len, BLOCK_N)
        kv_head, k_end = hkv.to(gl.int32), kv_start.to(gl.int32) + kv_len
        kv_rows = SequenceRows(k_end, kv_len, kv_head)
        # Each sequence is padded to whole units of columns.
        num_units = gl.cdiv(kv_len, UNIT)
        kv_columns = SequenceColumns((kv_start // UNIT + b).to(gl.int32) + num_units, num_units, kv_head)
        for nth in range(num_masked):
            start_n = full_end + nth * BLOCK_N
            start_n = gl.where(num_partial > 0, start_n, 0)
            kv_ring.send(k_desc, v_desc, kv_rows, start_n, v_rows, v_start, kv_turn, BLOCK_N)
            v_rows, v_start = kv_columns, start_n
            kv_turn += 1
        for nth in range(num_masked - num_partial, num_full):
            start_n = nth * BLOCK_N
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
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Compute the rows of warpgroup PART of each work item."""
    q_ring, kv_ring, work_ring, pointers, strides, numbers = arguments
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr = pointers
    (stride_oh,) = strides
    q_total, num_heads, group_size, scale = numbers
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    SUMS: gl.constexpr = product_layout(BLOCK_DV)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    LANES: gl.constexpr = lane_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
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
    o_start, o_row, o_len = gl.cast(0, gl.int64), 0, 0
    work = Work(*work_ring.receive(q_turn, 4))
    while work.h >= 0:
        h = work.h.to(gl.int64)
        b = work.b.to(gl.int64)
        q_start = work.q_start.to(gl.int64)
        q_len = work.q_len
        kv_len = work.kv_len
        lse_start = work.lse_start
        # Computed here, so that the compiler knows that it is a multiple of BLOCK_M.
        start_m = work.block * BLOCK_M
        rows = start_m + PART * ROWS + gl.arange(0, ROWS, layout=ROW)
        kv_head = b * (num_heads // group_size) + h // group_size
        head_scale = scale * gl.load(q_scale_ptr + b * num_heads + h) * gl.load(k_scale_ptr + kv_head)
        qk_scale = head_scale * LOG2E

        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # [ROWS]
        row_sums = gl.zeros([ROWS, 4], gl.float32, LANES)  # [ROWS, 4]

        q_stage = PARTS * (q_turn % Q_BLOCKS) + PART
        mbarrier.wait(q_ring.full.index(q_stage), (q_turn // Q_BLOCKS) & 1)
        q_tile = q_ring.tile(q_stage)  # [ROWS, BLOCK_D]
        for nth in range(work.num_masked):
            start_n = kv_ring.block(kv_turn) * BLOCK_N
            kv_idx = start_n + gl.arange(0, BLOCK_N, layout=KEY)
            qk, acc = begin_block(q_tile, p_words, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS)
            qk = gl.where((kv_idx < kv_len)[None, :], qk, float("-inf"))
            max_new, alpha = raise_maximum(row_max, gl.max(qk, 1) * qk_scale)
            # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
            max_ref = gl.where(max_new == float("-inf"), 0.0, max_new)
            p = gl.exp2(qk * qk_scale - max_ref[:, None])  # [ROWS, BLOCK_N]
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
                    o_len,
                    stride_os,
                    HEAD_DIM_V,
                )
                acc = no_sums(BLOCK_DV)
            else:
                acc = rescale(acc, alpha)
            kv_turn += 1

        for _ in range(work.num_plain):
            qk, acc = begin_block(q_tile, p_words, acc, kv_ring, kv_turn, SCORES, WEIGHTS, PART, PARTS)
            max_new, alpha = raise_maximum(row_max, gl.max(qk, 1) * qk_scale)
            p = gl.exp2(qk * qk_scale - max_new[:, None])  # [ROWS, BLOCK_N]
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
        gl.store(lse_ptr + h * q_total + lse_start + rows, lse, mask=rows < q_len)
        # The epilogue of these rows runs beside the first block of the next rows.
        inv_sum = gl.convert_layout(gl.load(v_scale_ptr + kv_head) / row_sum, gl.SliceLayout(1, SUMS))
        o_start, o_row = q_start * stride_os + h * stride_oh, start_m + PART * ROWS
        o_len = q_len
        q_turn += 1
        work = Work(*work_ring.receive(q_turn, 4))

    acc = begin_pv(unpack_words(p_words, DTYPE, WEIGHTS), acc, kv_ring.v, kv_turn)
    acc = end_pv(acc, kv_ring.v, kv_turn)
    store_rows(
        o_ptr + o_start, (acc[0] * inv_sum[:, None]).to(o_ptr.dtype.element_ty), o_row, o_len, stride_os, HEAD_DIM_V
    )


@gluon.jit(do_not_specialize=["q_total", "v_columns", "num_heads", "group_size"])
def full_packed_hopper_fwd_fp8(
    q_ptr,
    k_ptr,
    columns_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_seqs_ptr,
    o_ptr,
    lse_ptr,
    stride_qh,
    stride_qs: gl.constexpr,
    stride_kh,
    stride_ks: gl.constexpr,
    stride_oh,
    stride_os: gl.constexpr,
    q_total,
    v_columns,
    num_heads,
    group_size,
    scale,
    work_counter_ptr,
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
    q_desc = describe_packed_rows(q_ptr, num_heads, stride_qh, stride_qs, HEAD_DIM, ROWS, BLOCK_D)
    k_desc = describe_packed_rows(k_ptr, kv_heads, stride_kh, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_desc = describe_packed_columns(columns_ptr, kv_heads, v_columns, HEAD_DIM_V, BLOCK_DV, BLOCK_N)
    q_ring = make_ring(q_desc, PARTS * query_stages(BLOCK_D), 1, 1)
    kv_ring = make_key_ring(k_desc, v_desc, STAGES, PARTS)
    work_ring = make_work_ring(10, PARTS + 1)
    consumer = (
        q_ring,
        kv_ring,
        work_ring,
        (q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr),
        (stride_oh,),
        (q_total, num_heads, group_size, scale),
    )
    CONSTANTS: gl.constexpr = (stride_os, HEAD_DIM_V, BLOCK_DV, BLOCK_M, BLOCK_N)
    rows = (q_desc, q_ring, work_ring, block_seqs_ptr, num_heads, work_counter_ptr)
    keys = (k_desc, v_desc, kv_ring, work_ring, block_seqs_ptr, num_heads, group_size)
    # The registers of each thread. The first consumer gets what is left, which is as much as the others have.
    gl.warp_specialize(
        [
            (consume, concat((consumer, 0), CONSTANTS)),
            (consume, concat((consumer, 1), CONSTANTS)),
            (produce_rows, (rows, BLOCK_M, BLOCK_N)),
            (produce_keys, (keys, BLOCK_M, BLOCK_N)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[240, 24, 24],
    )
