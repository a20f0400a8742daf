"""The table in which each program of a packed call finds the sequence that it computes."""

import triton
import triton.language as tl

from ..device.block_seqs import RECORD, SEQUENCE
from ..device.tl_block_seqs import store_records


@triton.jit
def sequence(cu_seqlens_ptr, seqs, inside):
    """The begins and lengths of sequences; 0 and 0 for those that are not `inside`."""
    start = tl.load(cu_seqlens_ptr + seqs, mask=inside, other=0)
    return start, tl.load(cu_seqlens_ptr + seqs + 1, mask=inside, other=0) - start


# Without `debug` the assertions would not be compiled.
@triton.jit(do_not_specialize=["num_seqs", "q_total", "kv_total", "num_entries"], debug=True)
def packed_blocks(
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    block_seqs_ptr,
    num_seqs,
    q_total,
    kv_total,
    num_entries,
    BY_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lay out the blocks of all sequences one after the other, those of sequences with the longest loops first.

        cu_seqlens_q, cu_seqlens_k  [n + 1]  int32, where the sequences of queries and of keys begin
        block_seqs                  [entries, RECORD]  int32, the sequence of each block

    The queries are cut into blocks, or BY_KEYS the keys; a program of attention then loops over the other axis. Program
    s of this kernel writes the entries of sequence s. Entries that are left over have the sequence -1. If a sequence
    has no token on an axis, its begin there is 0, a place that can be read.
    """
    seq = tl.program_id(0)
    q_start, q_len = sequence(cu_seqlens_q_ptr, seq, True)
    kv_start, kv_len = sequence(cu_seqlens_k_ptr, seq, True)
    tl.device_assert((q_len >= 0) & (kv_len >= 0), "cu_seqlens must not decrease")
    tl.device_assert((seq > 0) | ((q_start == 0) & (kv_start == 0)), "cu_seqlens must start at 0")
    ends = (q_start + q_len == q_total) & (kv_start + kv_len == kv_total)
    tl.device_assert((seq < num_seqs - 1) | ends, "cu_seqlens must end at the number of tokens")
    own, loop = (kv_len, q_len) if BY_KEYS else (q_len, kv_len)
    first_entry = 0
    num_blocks = 0
    for chunk_first in range(0, num_seqs, CHUNK):
        seqs = chunk_first + tl.arange(0, CHUNK)
        _, q_lens = sequence(cu_seqlens_q_ptr, seqs, seqs < num_seqs)
        _, kv_lens = sequence(cu_seqlens_k_ptr, seqs, seqs < num_seqs)
        lens, loops = (kv_lens, q_lens) if BY_KEYS else (q_lens, kv_lens)
        blocks = (lens + BLOCK - 1) // BLOCK
        earlier = (loops > loop) | ((loops == loop) & (seqs < seq))
        first_entry += tl.sum(tl.where(earlier, blocks, 0), 0)
        num_blocks += tl.sum(blocks, 0)
    own_blocks = (own + BLOCK - 1) // BLOCK
    for chunk_first in range(0, own_blocks, CHUNK):
        entries = chunk_first + tl.arange(0, CHUNK)
        q_first, kv_first = tl.where(q_len > 0, q_start, 0), tl.where(kv_len > 0, kv_start, 0)
        store_records(
            block_seqs_ptr, first_entry + entries, entries < own_blocks,
            seq, first_entry, q_first, q_len, kv_first, kv_len, num_blocks, q_first,
        )  # fmt: skip
    # No more entries are left over than there are sequences.
    if num_blocks + seq < num_entries:
        tl.store(block_seqs_ptr + (num_blocks + seq) * RECORD + SEQUENCE, -1)
