# SPDX-License-Identifier: Apache-2.0
"""The kernels that find the runs of equal segment ids in each batch row, and lay out the blocks of these runs."""

import triton
import triton.language as tl

from .block_seqs import LSE_START, NUM_BLOCKS, RECORD
from .tl_block_seqs import load_sequence, store_records
from .tl_rows import load_dq_rows, store_dq_rows

LEAST_ID = tl.constexpr(-(2**31))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["length", "padding_id", "room"])
def find_runs(
    q_ids_ptr,
    kv_ids_ptr,
    runs_ptr,
    counts_ptr,
    stride_q_ids_b,
    stride_q_ids_s,
    stride_kv_ids_b,
    stride_kv_ids_s,
    length,
    padding_id,
    room,
    CHUNK: tl.constexpr,
):
    """Find the runs of tokens with one id in each batch row.

        q_ids, kv_ids  [B, S]  int32
        runs           [B, room, 2]  int32, first token of each run; whether it is padding
        counts         [B]  int32, the number of runs; 0 where the row is not in order

    A row is in order if queries and keys have the same ids, each segment is one run, ids other than the padding id rise
    from run to run, and there is room for its runs.
    """
    row = tl.program_id(0).to(tl.int64)
    q_ids, kv_ids = q_ids_ptr + row * stride_q_ids_b, kv_ids_ptr + row * stride_kv_ids_b
    count, num_wrong, largest = 0, 0, LEAST_ID
    for chunk_first in range(0, length, CHUNK):
        tokens = chunk_first + tl.arange(0, CHUNK)
        inside = tokens < length
        token_offs = tokens.to(tl.int64)
        ids = tl.load(q_ids + token_offs * stride_q_ids_s, mask=inside, other=padding_id)
        key_ids = tl.load(kv_ids + token_offs * stride_kv_ids_s, mask=inside, other=padding_id)
        has_former = inside & (tokens > 0)
        former = tl.load(q_ids + (token_offs - 1) * stride_q_ids_s, mask=has_former, other=padding_id)
        is_first = inside & ((tokens == 0) | (ids != former))
        is_padding = ids == padding_id
        # The largest id ahead of each token.
        ahead = tl.associative_scan(tl.where(former == padding_id, LEAST_ID, former), 0, larger)
        ahead = tl.maximum(ahead, largest)
        is_wrong = inside & ((ids != key_ids) | (is_first & ~is_padding & (ids <= ahead)))
        num_wrong += tl.sum(is_wrong.to(tl.int32), 0)
        places = count + tl.cumsum(is_first.to(tl.int32), 0) - 1
        records = runs_ptr + (row * room + places) * 2
        tl.store(records, tokens, mask=is_first & (places < room))
        tl.store(records + 1, is_padding.to(tl.int32), mask=is_first & (places < room))
        count += tl.sum(is_first.to(tl.int32), 0)
        largest = tl.maximum(largest, tl.max(tl.where(is_padding, LEAST_ID, ids), 0))
    tl.store(counts_ptr + row, tl.where((num_wrong > 0) | (count > room), 0, count))


@triton.jit
def load_runs(runs_ptr, counts_ptr, slots, inside, length, room):
    """First token, number of tokens, and number of tokens that attend, of the runs in `slots`; none if not `inside`."""
    row, nth = slots // room, slots % room
    count = tl.load(counts_ptr + row, mask=inside, other=0)
    exists = inside & (nth < count)
    start = tl.load(runs_ptr + slots * 2, mask=exists, other=0)
    is_padding = tl.load(runs_ptr + slots * 2 + 1, mask=exists, other=1)
    end = tl.load(runs_ptr + slots * 2 + 2, mask=exists & (nth + 1 < count), other=length)
    num_rows = tl.where(exists, end - start, 0)
    return start, num_rows, tl.where(is_padding != 0, 0, num_rows)


@triton.jit(do_not_specialize=["batch", "room", "most_runs", "length", "q_batch_rows", "kv_batch_rows", "num_heads"])
def lay_out_runs(
    runs_ptr,
    counts_ptr,
    block_seqs_ptr,
    batch,
    room,
    most_runs,
    length,
    q_batch_rows,
    kv_batch_rows,
    num_heads,
    BY_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lay out the blocks of query rows, or with BY_KEYS of keys, of all runs in sequence, the longest runs first.

        runs, counts  as of `find_runs`
        block_seqs    [entries, RECORD]  int32, the run of each block as a sequence, whose number is its batch row

    Program s writes the blocks of the run in slot s of `runs`. If any batch row is not in order, or has more runs than
    `most_runs`, there are no blocks at all. Starts count rows in memory: batch rows are q_batch_rows and kv_batch_rows
    apart.

    Rows of padding have no keys; with BY_KEYS, keys of padding have no rows. With BY_KEYS a number replaces the batch
    row: the packed backward finds a run's first block of ROW_BLOCK rows at `q_start // ROW_BLOCK` plus that number.
    These blocks of rows are in the order of the table that is made without BY_KEYS.
    """
    slot = tl.program_id(0)
    num_wrong = 0
    for chunk_first in range(0, batch, CHUNK):
        rows = chunk_first + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + rows, mask=rows < batch, other=1)
        num_wrong += tl.sum(((counts == 0) | (counts > most_runs)).to(tl.int32), 0)
    b, nth = slot // room, slot % room
    count = tl.load(counts_ptr + b)
    if num_wrong > 0:
        if slot == 0:
            tl.store(block_seqs_ptr + NUM_BLOCKS, 0)
    elif nth < count:
        start, num_rows, num_keys = load_runs(runs_ptr, counts_ptr, slot, True, length, room)
        num_slots = batch * room
        first_entry, num_blocks, row_first = 0, 0, 0
        for chunk_first in range(0, num_slots, CHUNK):
            slots = chunk_first + tl.arange(0, CHUNK)
            _, their_rows, their_keys = load_runs(runs_ptr, counts_ptr, slots, slots < num_slots, length, room)
            blocks = (their_rows + BLOCK - 1) // BLOCK
            earlier = (their_keys > num_keys) | ((their_keys == num_keys) & (slots < slot))
            first_entry += tl.sum(tl.where(earlier, blocks, 0), 0)
            num_blocks += tl.sum(blocks, 0)
            if BY_KEYS:
                row_first += tl.sum(tl.where(earlier, (their_rows + ROW_BLOCK - 1) // ROW_BLOCK, 0), 0)
        q_start = b * q_batch_rows + start
        number = row_first - q_start // ROW_BLOCK if BY_KEYS else b
        q_len, kv_len = (num_keys, num_rows) if BY_KEYS else (num_rows, num_keys)
        own_blocks = (num_rows + BLOCK - 1) // BLOCK
        for chunk_first in range(0, own_blocks, CHUNK):
            entries = chunk_first + tl.arange(0, CHUNK)
            kv_start, lse_start = b * kv_batch_rows + start, b * num_heads * length + start
            store_records(
                block_seqs_ptr, first_entry + entries, entries < own_blocks,
                number, first_entry, q_start, q_len, kv_start, kv_len, num_blocks, lse_start,
            )  # fmt: skip


@triton.jit
def load_row_block(row_blocks_ptr, entry):
    """Of the run of a block: batch row, first block, q_start, number of rows, and first row in lse of head 0."""
    b, first_entry, q_start, num_rows = load_sequence(row_blocks_ptr, entry)
    return b, first_entry, q_start, num_rows, tl.load(row_blocks_ptr + entry * RECORD + LSE_START)


@triton.jit(do_not_specialize=["length", "num_heads", "num_entries"])
def pad_runs(
    row_lse_ptr,
    row_delta_ptr,
    row_blocks_ptr,
    key_blocks_ptr,
    run_lse_ptr,
    run_delta_ptr,
    length,
    num_heads,
    num_entries,
    LINEAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Copy lse and delta, padded to whole blocks of batch rows, to vectors padded to whole blocks of runs.

    row_lse, row_delta      [B, Hq, blocks * BLOCK_M]  fp32
    row_blocks, key_blocks  as of `lay_out_runs`
    run_lse, run_delta      [Hq, entries * BLOCK_M]  fp32; beyond the last row of a run lse is inf, or -inf if LINEAR,
                            and delta is 0
    """
    h, entry = (tl.program_id(0) // num_entries).to(tl.int64), tl.program_id(0) % num_entries
    if (tl.load(key_blocks_ptr + NUM_BLOCKS) > 0) & (entry < tl.load(row_blocks_ptr + NUM_BLOCKS)):
        b, first_entry, _q_start, num_rows, lse_start = load_row_block(row_blocks_ptr, entry)
        start = lse_start - b * num_heads * length
        rows = (entry - first_entry) * BLOCK_M + tl.arange(0, BLOCK_M)
        padded_length = (length + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        offs = (b * num_heads + h) * padded_length + start + rows
        beyond = float("-inf") if LINEAR else float("inf")
        lse = tl.load(row_lse_ptr + offs, mask=rows < num_rows, other=beyond)
        delta = tl.load(row_delta_ptr + offs, mask=rows < num_rows, other=0.0)
        run_offs = (h * num_entries + entry) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(run_lse_ptr + run_offs, lse)
        tl.store(run_delta_ptr + run_offs, delta)


@triton.jit(do_not_specialize=["batch", "length", "num_heads", "num_entries"])
def run_dq_rows(
    dq_sums_ptr,
    row_blocks_ptr,
    key_blocks_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs: tl.constexpr,
    batch,
    length,
    num_heads,
    num_entries,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write dq from the sums of Hopper's backward, as `hopper_dq_rows` does; by runs if there are blocks of keys.

    dq_sums  [Hq, entries, 2, lines, 32] by runs, else [B, Hq, blocks, 2, lines, 32]; fp32, gradient of q without its
             factor
    """
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    part, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    sums_ptr = dq_sums_ptr + tl.program_id(0).to(tl.int64) * (64 * PART_COLS)
    if tl.load(key_blocks_ptr + NUM_BLOCKS) > 0:
        h, entry = (tile // num_entries).to(tl.int64), tile % num_entries
        if entry < tl.load(row_blocks_ptr + NUM_BLOCKS):
            _b, first_entry, q_start, num_rows, _lse_start = load_row_block(row_blocks_ptr, entry)
            dq_tile = load_dq_rows(sums_ptr, scale, BLOCK_D, BLOCK_M)
            block = entry - first_entry
            store_dq_rows(
                dq_ptr,
                q_start,
                stride_dqs,
                h,
                stride_dqh,
                dq_tile,
                block,
                part,
                num_rows,
                stride_dqs,
                HEAD_DIM,
                BLOCK_M,
            )
    else:
        num_blocks = (length + BLOCK_M - 1) // BLOCK_M
        if tile < batch * num_heads * num_blocks:
            head, block = tile // num_blocks, tile % num_blocks
            b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
            dq_tile = load_dq_rows(sums_ptr, scale, BLOCK_D, BLOCK_M)
            store_dq_rows(
                dq_ptr, b, stride_dqb, h, stride_dqh, dq_tile, block, part, length, stride_dqs, HEAD_DIM, BLOCK_M
            )
