"""The table that tells the programs of packed sequences which sequence is theirs."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "total", "num_entries"], debug=True)
def packed_blocks(
    cu_seqlens_ptr,
    other_cu_seqlens_ptr,
    block_seqs_ptr,
    first_entries_ptr,
    num_seqs,
    total,
    num_entries,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lay out the blocks of all sequences one after the other, those of sequences with the longest loops first.

        cu_seqlens        [n + 1]  int32, where the sequences begin along the axis that is cut into blocks
        other_cu_seqlens  [n + 1]  int32, the same along the axis that a program loops over
        block_seqs        [entries]  int32, the sequence of each block; -1 in the entries that are left over
        first_entries     [n]  int32, the entry of each sequence's first block

    Program s places sequence s. Without `debug` the assertions would not be compiled.
    """
    seq = tl.program_id(0)
    start, end = tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1)
    tl.device_assert(start <= end, "cu_seqlens must not decrease")
    tl.device_assert((seq > 0) | (start == 0), "cu_seqlens must start at 0")
    tl.device_assert((seq < num_seqs - 1) | (end == total), "cu_seqlens must end at the number of tokens")
    loop = tl.load(other_cu_seqlens_ptr + seq + 1) - tl.load(other_cu_seqlens_ptr + seq)
    first = 0
    num_blocks = 0
    for chunk_first in range(0, num_seqs, CHUNK):
        seqs = chunk_first + tl.arange(0, CHUNK)
        inside = seqs < num_seqs
        ends = tl.load(cu_seqlens_ptr + seqs + 1, mask=inside, other=0)
        blocks = (ends - tl.load(cu_seqlens_ptr + seqs, mask=inside, other=0) + BLOCK - 1) // BLOCK
        other_ends = tl.load(other_cu_seqlens_ptr + seqs + 1, mask=inside, other=0)
        loops = other_ends - tl.load(other_cu_seqlens_ptr + seqs, mask=inside, other=0)
        earlier = (loops > loop) | ((loops == loop) & (seqs < seq))
        first += tl.sum(tl.where(earlier & inside, blocks, 0), 0)
        num_blocks += tl.sum(tl.where(inside, blocks, 0), 0)
    tl.store(first_entries_ptr + seq, first)
    own_blocks = (end - start + BLOCK - 1) // BLOCK
    for chunk_first in range(0, own_blocks, CHUNK):
        own = chunk_first + tl.arange(0, CHUNK)
        tl.store(block_seqs_ptr + first + own, seq + tl.zeros_like(own), mask=own < own_blocks)
    # No more entries are left over than there are sequences.
    if num_blocks + seq < num_entries:
        tl.store(block_seqs_ptr + num_blocks + seq, -1)
