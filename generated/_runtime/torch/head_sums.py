# SPDX-License-Identifier: Apache-2.0
"""Sums over all axes but heads, by a kernel: a call can be replayed only if it does nothing but launch kernels."""

from torch import Tensor

from ..core.settings import INTERPRET
from .launching import active, launch

_BLOCK = 1024


def head_sums(parts: Tensor) -> Tensor:
    """The sums `[Hq]` of `[B, Hq, parts]` in float32, in a fixed order."""
    batch, num_heads, count = parts.shape
    runs_kernel = parts.is_cuda or INTERPRET or active.compiles is not None
    if not runs_kernel or parts.numel() == 0:
        return parts.sum((0, 2))
    from ..device.head_sums import head_sums as kernel

    sums = parts.new_empty((num_heads,))
    launch(kernel, (num_heads,), (parts, sums, num_heads, count, batch * count), BLOCK=_BLOCK)
    return sums
