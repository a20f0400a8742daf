# SPDX-License-Identifier: Apache-2.0
"""The table that tells kernels of segmented calls where the tokens of a segment are, if they follow each other."""

import triton
import triton.language as tl

TOKENS = 64
"""Tokens of a record."""

SPARE = 2
"""Records behind the last token: blocks of rows may have so many more than there are tokens."""


@triton.jit(do_not_specialize=["length", "other_length", "padding_id"])
def segment_runs(
    ids_ptr,
    other_ids_ptr,
    runs_ptr,
    stride_b,
    stride_s,
    other_stride_b,
    other_stride_s,
    length,
    other_length,
    padding_id,
    CHUNK: tl.constexpr,
):
    """For each token, the run of tokens of its segment along the other axis.

        ids, other_ids  [B, S], [B, other S]  int32, segment ids of the tokens, and along the other axis
        runs            [B, cdiv(S, 64) + 2, 3, 64]  int32: first token of the run; its end; 1 where the runs of all 64
                        tokens are whole: no token in between is of another segment

    A program finds the runs of 64 tokens. Tokens that attend to nothing, such as padding, have the run from 0 to 0.
    """
    num_records = tl.cdiv(length, 64) + 2
    b = (tl.program_id(0) // num_records).to(tl.int64)
    tokens = tl.program_id(0) % num_records * 64 + tl.arange(0, 64)
    inside = tokens < length
    ids = tl.load(ids_ptr + b * stride_b + tokens * stride_s, mask=inside, other=padding_id)
    other_base = other_ids_ptr + b * other_stride_b
    first = tl.zeros([64], tl.int32)
    end = tl.zeros([64], tl.int32)
    are_whole = 1
    # One id after the other: most blocks of tokens have one, or two.
    asks = ids != padding_id
    while tl.max(asks.to(tl.int32), 0) > 0:
        own_id = tl.min(tl.where(asks, ids, 2147483647), 0)
        firsts = tl.full([CHUNK], 2147483647, tl.int32)
        ends = tl.zeros([CHUNK], tl.int32)
        counts = tl.zeros([CHUNK], tl.int32)
        for chunk_first in range(0, other_length, CHUNK):
            others = chunk_first + tl.arange(0, CHUNK)
            other_ids = tl.load(other_base + others * other_stride_s, mask=others < other_length, other=padding_id)
            same = other_ids == own_id
            firsts = tl.where(same, tl.minimum(firsts, others), firsts)
            ends = tl.where(same, others + 1, ends)
            counts += same.to(tl.int32)
        count = tl.sum(counts, 0)
        run_end = tl.max(ends, 0)
        run_first = tl.where(count > 0, tl.min(firsts, 0), 0)
        first = tl.where(ids == own_id, run_first, first)
        end = tl.where(ids == own_id, run_end, end)
        are_whole = are_whole & (count == run_end - run_first).to(tl.int32)
        asks = asks & (ids != own_id)
    record = runs_ptr + tl.program_id(0).to(tl.int64) * 192 + tl.arange(0, 64)
    tl.store(record, first)
    tl.store(record + 64, end)
    tl.store(record + 128, tl.zeros([64], tl.int32) + are_whole)
