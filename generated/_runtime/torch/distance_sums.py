# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table by head and distance, from sums of ds by distance."""

from torch import Tensor

from ..core.configs import cdiv
from ..core.distances import lag_axis
from .launching import launch

_BLOCK = 512


def distance_sums(
    pieces: Tensor,
    far: Tensor,
    q: Tensor,
    k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    near_first: int | None,
    near_last: int | None,
    size: int,
    sign: int,
    rest: int,
) -> Tensor:
    """The gradient `[Hq, size]` of a table that a query and key read at `sign * distance + rest`, clamped to the table.

    A kernel adds the sums of ds in a fixed order, because a call can be replayed only if it does nothing but launch
    kernels.
    """
    batch, num_heads, num_pieces, num_lags = pieces.shape
    if pieces.numel() == 0 or size == 0:
        return pieces.new_zeros((num_heads, size))
    from ..device.distance_sums import distance_sums as kernel

    axis = lag_axis(q.shape[2], k.shape[2], row_offset if row_offsets is None else None, near_first, near_last)
    sums = pieces.new_empty((num_heads, size))
    launch(
        kernel,
        (num_heads * cdiv(size, _BLOCK),),
        (pieces, far, row_offset if row_offsets is None else row_offsets, sums),
        (batch, num_heads, num_pieces, num_lags, axis.origin, far.shape[3], size, rest),
        SIGN=sign,
        OFFSET_PER_BATCH=row_offsets is not None,
        BLOCK=_BLOCK,
    )
    return sums
