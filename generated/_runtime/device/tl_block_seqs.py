# SPDX-License-Identifier: Apache-2.0
"""Device functions of Triton kernels that read and write the records of `block_seqs`."""

import triton
import triton.language as tl

from .block_seqs import FIRST_ENTRY, KV_LEN, KV_START, LSE_START, NUM_BLOCKS, Q_LEN, Q_START, RECORD, SEQUENCE


@triton.jit
def load_sequence(block_seqs_ptr, entry):
    """The sequence of a block of rows: its number, its first entry, and start and length of its queries."""
    record = block_seqs_ptr + entry * RECORD
    b, first_entry = tl.load(record + SEQUENCE).to(tl.int64), tl.load(record + FIRST_ENTRY)
    return b, first_entry, tl.load(record + Q_START).to(tl.int64), tl.load(record + Q_LEN)


@triton.jit
def store_records(
    block_seqs_ptr, entries, mask, sequence, first_entry, q_start, q_len, kv_start, kv_len, num_blocks, lse_start=None
):
    """Store the record of a sequence at each of its `entries`."""
    records = block_seqs_ptr + entries * RECORD
    tl.store(records + SEQUENCE, sequence, mask=mask)
    tl.store(records + FIRST_ENTRY, first_entry, mask=mask)
    tl.store(records + Q_START, q_start, mask=mask)
    tl.store(records + Q_LEN, q_len, mask=mask)
    tl.store(records + KV_START, kv_start, mask=mask)
    tl.store(records + KV_LEN, kv_len, mask=mask)
    tl.store(records + NUM_BLOCKS, num_blocks, mask=mask)
    if lse_start is not None:
        tl.store(records + LSE_START, lse_start, mask=mask)
