# SPDX-License-Identifier: Apache-2.0
"""Adaptive pruning (arXiv:2504.06949): which keys a call leaves out, as their log-decay bounds their weight.

Let U be a bound of the scores of row i, and G the running sum of its head's log-decay. Keys 0 to n - 1 together
contribute at most exp(U + G_i) (exp(-G_0) + ... + exp(-G_{n-1})) to the denominator. The key at the row's own position
a, which the row surely attends to, with score s, contributes exp(s + G_i - G_a). So the share of keys 0 to n - 1 is at
most `prune` if

    log(exp(-G_0) + ... + exp(-G_{n-1})) <= log(prune) + s - U - G_a

A binary search finds the largest such n, for any signs of g. U is `scale |q_i| max |k_j|`.

No framework is imported: `torch/pruning.py` and `jax/pruning.py` compute it.
"""

from typing import Any

GROUP = 128
"""Rows that share their first key, which is a multiple of the same number: tiles of keys then need no mask there."""

PRODUCT_ERROR = 2.0**-7
"""More than the rounding error of a sum of products of 16-bit numbers, relative to the product of both norms."""


def follow_rows(ids: Any, positions: Any, rows: Any, padding_id: int) -> Any:
    """Whether positions and rows have the same order inside each segment of a batch row, bool `[B]`.

    If so, the keys at positions before that of a row's first key are in rows before it, and may be left out.

    The ids, positions and rows of the keys are `[B, Skv]`, sorted by id and then by row. A call's positions rise by 1
    from one row to the next. Where other tokens interrupt a segment, they must go on to rise, by at most as many as
    the rows do.
    """
    same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != padding_id)
    rise = positions[:, 1:] - positions[:, :-1]
    return (~same | ((rise > 0) & (rise <= rows[:, 1:] - rows[:, :-1]))).all(1)
