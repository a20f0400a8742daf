# SPDX-License-Identifier: Apache-2.0
"""The numbers of a record of `block_seqs`, the table in which a program of a packed call finds its sequence.

    block_seqs  [entries, RECORD]  int32

An entry is a block of query rows, or a block of keys. The first entries of the table have blocks, the entries of a
sequence follow each other, and sequences with the longest loops come first.
"""

from triton.language import constexpr

# The numbers of a record: the sequence, or -1 where an entry has no block; its first entry; start and length of its
# queries, and of its keys; how many blocks the table has; and the sequence's first row in lse of head 0.
SEQUENCE = constexpr(0)
FIRST_ENTRY = constexpr(1)
Q_START = constexpr(2)
Q_LEN = constexpr(3)
KV_START = constexpr(4)
KV_LEN = constexpr(5)
NUM_BLOCKS = constexpr(6)
LSE_START = constexpr(7)
RECORD = constexpr(8)
