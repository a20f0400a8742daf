# SPDX-License-Identifier: Apache-2.0
"""The kernel that lays out the blocks of prompts on paged caches for Hopper's forward."""

import triton
import triton.language as tl

from .block_seqs import NUM_BLOCKS
from .tl_block_seqs import store_records


@triton.jit
def _prompt_blocks(
    cu_seqlens_q_ptr,
    seqs,
    num_seqs,
    q_rows,
    PACKED: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Start and length of the queries of sequences, and the number of their blocks: 0 if the rows are too few."""
    is_seq = seqs < num_seqs
    if PACKED:
        start = tl.load(cu_seqlens_q_ptr + seqs, mask=is_seq, other=0)
        length = tl.load(cu_seqlens_q_ptr + seqs + 1, mask=is_seq, other=0) - start
    else:
        start = seqs * 0
        length = start + q_rows
    return start, length, tl.where(is_seq & (length * GROUP >= FIRST_ROWS), tl.cdiv(length, BLOCK_M), 0)


@triton.jit(do_not_specialize=["q_rows", "num_seqs", "most_keys"])
def prompt_blocks(
    cu_seqlens_q_ptr,
    kv_lengths_ptr,
    block_seqs_ptr,
    q_rows,
    num_seqs,
    most_keys,
    PACKED: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lay out the blocks of all prompts one after the other, those of sequences with the most keys first.

        cu_seqlens_q  [B + 1]  int32, where the packed sequences of queries begin
        kv_lengths    [B]  int32, keys of each sequence, clamped to most_keys
        block_seqs    [entries, RECORD]  int32, the sequence of each block; keys lie in pages, so their start is 0

    Program s writes the blocks of sequence s. Sequences of fewer than FIRST_ROWS rows, tokens times GROUP, have none:
    other kernels compute them.
    """
    seq = tl.program_id(0)
    kv_len = tl.maximum(tl.minimum(tl.load(kv_lengths_ptr + seq), most_keys), 0)
    first_entry, num_blocks = 0, 0
    for chunk_first in range(0, num_seqs, CHUNK):
        seqs = chunk_first + tl.arange(0, CHUNK)
        _, _, blocks = _prompt_blocks(cu_seqlens_q_ptr, seqs, num_seqs, q_rows, PACKED, FIRST_ROWS, GROUP, BLOCK_M)
        keys = tl.load(kv_lengths_ptr + seqs, mask=seqs < num_seqs, other=0)
        keys = tl.maximum(tl.minimum(keys, most_keys), 0)
        earlier = (keys > kv_len) | ((keys == kv_len) & (seqs < seq))
        first_entry += tl.sum(tl.where(earlier, blocks, 0), 0)
        num_blocks += tl.sum(blocks, 0)
    # The forward reads the first entry even if there is no block at all.
    tl.store(block_seqs_ptr + NUM_BLOCKS, num_blocks, mask=seq == 0)
    q_start, q_len, own_blocks = _prompt_blocks(
        cu_seqlens_q_ptr, seq, num_seqs, q_rows, PACKED, FIRST_ROWS, GROUP, BLOCK_M
    )
    for chunk_first in range(0, own_blocks, CHUNK):
        entries = chunk_first + tl.arange(0, CHUNK)
        store_records(
            block_seqs_ptr, first_entry + entries, entries < own_blocks,
            seq, first_entry, q_start, q_len, 0, kv_len, num_blocks,
        )  # fmt: skip
