"""Adaptive pruning (arXiv:2504.06949): which keys a call leaves out, as their log-decay bounds their weight.

With U a bound of the scores of row i, and G the running sum of its head's log-decay, keys 0 to n - 1 have together at
most exp(U + G_i) (exp(-G_0) + ... + exp(-G_{n-1})) of the denominator. The key at the row's own position a, which it
surely attends to, has exp(s + G_i - G_a) of it. So their share is at most `prune` where

    log(exp(-G_0) + ... + exp(-G_{n-1})) <= log(prune) + s - U - G_a

which a binary search finds the largest n of, for any signs of g. U is `scale |q_i| max |k_j|`.

No framework is imported: `torch/pruning.py` and `jax/pruning.py` compute it.
"""

GROUP = 128
"""Rows that share their first key, and what the first key is a multiple of: tiles of keys then need no mask there."""

PRODUCT_ERROR = 2.0**-7
"""The rounding of a sum of products of 16-bit numbers, relative to the product of both norms, and more."""
