# SPDX-License-Identifier: Apache-2.0
"""The kernels that find where the segments of a batch lie one behind the other, and lay out their blocks of rows."""

import triton
import triton.language as tl

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

    A row is in order if queries and keys have the same ids, each segment is one run, ids rise from run to run but for
    those of padding, and there is room for its runs.
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
    """First token, number of tokens and number of keys of the runs of some slots; what is not `inside` has none."""
    row, nth = slots // room, slots % room
    count = tl.load(counts_ptr + row, mask=inside, other=0)
    exists = inside & (nth < count)
    start = tl.load(runs_ptr + slots * 2, mask=exists, other=0)
    is_padding = tl.load(runs_ptr + slots * 2 + 1, mask=exists, other=1)
    end = tl.load(runs_ptr + slots * 2 + 2, mask=exists & (nth + 1 < count), other=length)
    num_rows = tl.where(exists, end - start, 0)
    return start, num_rows, tl.where(is_padding != 0, 0, num_rows)


@triton.jit(do_not_specialize=["batch", "room", "length", "q_batch_rows", "kv_batch_rows", "num_heads"])
def lay_out_runs(
    runs_ptr,
    counts_ptr,
    block_seqs_ptr,
    batch,
    room,
    length,
    q_batch_rows,
    kv_batch_rows,
    num_heads,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lay out the blocks of query rows of all runs one after the other, those of the longest runs first.

        runs, counts  as of `find_runs`
        block_seqs    [entries, 8]  int32, as of packed sequences: batch row, the run's first entry, q_start, q_len,
                      kv_start, kv_len, how many blocks there are in all; the run's first row in lse of its head 0

    Program s places slot s of `runs`. Where a batch row is not in order there are no blocks at all. Starts count rows
    in memory: those of batch rows are q_batch_rows and kv_batch_rows apart.
    """
    slot = tl.program_id(0)
    num_wrong = 0
    for chunk_first in range(0, batch, CHUNK):
        rows = chunk_first + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + rows, mask=rows < batch, other=1)
        num_wrong += tl.sum((counts == 0).to(tl.int32), 0)
    b, nth = slot // room, slot % room
    count = tl.load(counts_ptr + b)
    if num_wrong > 0:
        if slot == 0:
            tl.store(block_seqs_ptr + 6, 0)
    elif nth < count:
        start, num_rows, num_keys = load_runs(runs_ptr, counts_ptr, slot, True, length, room)
        num_slots = batch * room
        first_entry, num_blocks = 0, 0
        for chunk_first in range(0, num_slots, CHUNK):
            slots = chunk_first + tl.arange(0, CHUNK)
            _, their_rows, their_keys = load_runs(runs_ptr, counts_ptr, slots, slots < num_slots, length, room)
            blocks = (their_rows + BLOCK - 1) // BLOCK
            earlier = (their_keys > num_keys) | ((their_keys == num_keys) & (slots < slot))
            first_entry += tl.sum(tl.where(earlier, blocks, 0), 0)
            num_blocks += tl.sum(blocks, 0)
        own_blocks = (num_rows + BLOCK - 1) // BLOCK
        for chunk_first in range(0, own_blocks, CHUNK):
            entries = chunk_first + tl.arange(0, CHUNK)
            inside = entries < own_blocks
            records = block_seqs_ptr + (first_entry + entries) * 8
            zeros = tl.zeros_like(entries)
            tl.store(records, b + zeros, mask=inside)
            tl.store(records + 1, first_entry + zeros, mask=inside)
            tl.store(records + 2, b * q_batch_rows + start + zeros, mask=inside)
            tl.store(records + 3, num_rows + zeros, mask=inside)
            tl.store(records + 4, b * kv_batch_rows + start + zeros, mask=inside)
            tl.store(records + 5, num_keys + zeros, mask=inside)
            tl.store(records + 6, num_blocks + zeros, mask=inside)
            tl.store(records + 7, b * num_heads * length + start + zeros, mask=inside)
