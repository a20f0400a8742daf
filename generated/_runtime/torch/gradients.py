# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a variant's own tensors from the sums that kernels gather."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.distances import lag_axis


def reduce_gradient(total: Tensor, axes: str, num_kv_heads: int, length: int = 0) -> Tensor:
    """Sum `[B, Hq]` or `[B, Hq, Skv]` down to a tensor's axes, in its order: `b`, `h`, `k` (key heads), `s` (keys).

    The tensor's axis of keys has `length` elements. Beyond the last key its gradient is 0.
    """
    if length > total.shape[-1]:
        total = torch.nn.functional.pad(total, (0, length - total.shape[-1]))
    have = "bh" if total.dim() == 2 else "bhs"
    if "k" in axes:
        total = total.unflatten(1, (num_kv_heads, -1)).sum(2)
        have = have.replace("h", "k")
    drop = [i for i, axis in enumerate(have) if axis not in axes]
    if drop:
        total = total.sum(drop)
        have = "".join(axis for axis in have if axis in axes)
    return total.permute([have.index(axis) for axis in axes]).contiguous() if axes else total


def lag_grid(
    q: Tensor, k: Tensor, row_offset: int, row_offsets: Tensor | None, near_first: int | None, near_last: int | None
) -> Tensor:
    """The distances of the sums of a dense call, `[B or 1, 1, n]`; the first and the last are those of far blocks."""
    axis = lag_axis(q.shape[2], k.shape[2], row_offset if row_offsets is None else None, near_first, near_last)
    lags = torch.arange(-1, axis.size + 1, device=q.device).view(1, 1, -1) - axis.origin
    return lags + (row_offset if row_offsets is None else row_offsets.view(-1, 1, 1))


def lag_sums(pieces: Tensor, far: Tensor) -> Tensor:
    """The sums of ds by distance: those of pieces of blocks, between those of the far blocks on either side."""
    before, behind = far.sum(-1).split(1, dim=2)
    return torch.cat((before, pieces.sum(2), behind), dim=2)


def _index(index: Tensor | int, device: torch.device) -> Tensor:
    """An index as a tensor. A number is filled in on the device: no CUDA graph captures a copy from the host."""
    return index if isinstance(index, Tensor) else torch.full((), index, dtype=torch.int64, device=device)


_COPIES = 16
"""Sums are added to so many copies of a tensor, because torch adds sums for one element one after the other."""


def place_sums(sums: Tensor, shape: Sequence[int], places: Sequence[Tensor | int]) -> Tensor:
    """Add sums `[B, Hq, S]`, in a fixed order, to the elements of a tensor that `places` selects, an index per axis."""
    index = torch.broadcast_tensors(*(_index(i, sums.device).long() for i in places))
    # Sums that no index tells apart go to one element. They are added here, so that they need not be sorted.
    # Without an axis, which is one element, `numel` of the empty shape is 1.
    copy = torch.arange(index[0].shape[-1:].numel(), device=sums.device) % _COPIES
    copies = sums.new_zeros((_COPIES, *shape))
    return copies.index_put_((copy, *index), sums.sum_to_size(index[0].shape), accumulate=True).sum(0)


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """The sequence of each of `total` packed rows."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens[1:], rows, right=True)


def packed_row(index: Tensor | int, cu_seqlens: Tensor, seqs: Tensor, q_offset: int | Tensor | None = None) -> Tensor:
    """Where along an axis of packed tokens the kernels read element `index` of each of the sequences `seqs`.

    An axis of queries comes with its `q_offset`, by which positions and rows differ. A sequence without tokens reads
    element 0, because it must read one that exists; nothing is added to it.
    """
    start, end = cu_seqlens[seqs], cu_seqlens[seqs + 1]
    index = _index(index, start.device)
    if q_offset is not None:
        index = index.clamp(min=0) - (q_offset[seqs] if isinstance(q_offset, Tensor) else q_offset)
    row = start + torch.minimum(index.clamp(min=0), end - start - 1)
    return torch.where(start < end, row, 0)


def sums_by_sequence(sums: Tensor, block_seqs: Tensor, num_seqs: int) -> Tensor:
    """The sums `[1, Hq, entries]` of packed blocks, added up by sequence in a fixed order: `[n, Hq]`.

    Sums of blocks that belong to no sequence are zero. Each block may have more than one entry, side by side.
    """
    num_blocks = block_seqs.shape[0]
    sums = sums.view(*sums.shape[:2], num_blocks, sums.shape[2] // max(num_blocks, 1)).sum(3)
    total = sums.new_zeros((num_seqs, sums.shape[1]))
    return total.index_put_((block_seqs[:, 0].clamp(min=0).long(),), sums[0].T, accumulate=True)


def place_pairs(pairs: Tensor, shape: Sequence[int], axes: str, q_offset: int | Tensor) -> Tensor:
    """`[B, Hq, Sq, Skv]` as the gradient of a tensor of these axes, `bhqs` in some order, at its query positions."""
    batch, rows, keys = (axes.index(axis) for axis in "bqs")
    pairs = pairs.permute(["bhqs".index(axis) for axis in axes])
    if isinstance(q_offset, int) and q_offset == 0 and pairs.shape == shape:
        return pairs.contiguous()
    total = pairs.new_zeros(shape)
    b = torch.arange(shape[batch], device=pairs.device)[:, None]
    shift = q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset
    q_idx = (torch.arange(pairs.shape[rows], device=pairs.device) + shift).clamp(0, shape[rows] - 1)
    met = total.narrow(keys, 0, pairs.shape[keys]).movedim((batch, rows), (0, 1))
    met.index_put_((b, q_idx), pairs.movedim((batch, rows), (0, 1)), accumulate=True)
    return total
