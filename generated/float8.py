# SPDX-License-Identifier: Apache-2.0
"""Tensors of float8_e4m3fn for forward calls on Hopper GPUs, with their scales, and a rotation that spreads outliers.

>>> import torch
>>> x = torch.tensor([[[[1.0, -2.0], [0.5, 0.25]]]])  # [B, H, S, D]
>>> x8, scale = quantize(x)
>>> x8.dtype, scale.shape
(torch.float8_e4m3fn, torch.Size([1, 1]))
>>> (x8.float() * scale[:, :, None, None]).tolist() == x.tolist()
True
"""

import torch
from torch import Tensor

from ._runtime.core.checks import LAYOUTS, check_int, fail

__all__ = ["hadamard", "quantize"]

_DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0
_LEAST_SCALE = 1e-12


def quantize(x: Tensor, *, cu_seqlens: Tensor | None = None, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn and the scales that restore it: `x` is about `x8 * scale`.

    Every head of every batch row or packed sequence has a scale, its largest absolute value over 448. Nothing waits
    for the GPU, and the results have no gradient.

    Args:
        x: floating-point `[B, H, S, D]`, in the layout "bshd" `[B, S, H, D]`, of packed sequences `[total, H, D]`.
        cu_seqlens: int32 or int64 `[n + 1]`, where the packed sequences of x begin and end. None without packing.
        layout: "bhsd" or "bshd", that of the call; ignored for packed sequences.

    Returns:
        float8_e4m3fn in the shape of x, and float32 `[B, H]`, or `[n, H]` of packed sequences.

    Raises:
        ArgumentError: x is no floating-point tensor or has another shape; the layout is unknown; cu_seqlens is no
            int32 or int64 `[n + 1]` on the device of x.

    A head of zeros has a tiny scale, so that nothing divides by 0.

    >>> sequences = torch.tensor([4.0, 8.0, 448.0]).reshape(3, 1, 1)
    >>> quantize(sequences, cu_seqlens=torch.tensor([0, 2, 3]))[1].flatten().tolist()
    [0.01785714365541935, 1.0]
    """
    if layout not in LAYOUTS:
        fail("quantize", "layout", " or ".join(map(repr, LAYOUTS)), repr(layout))
    expected = "floating-point [B, H, S, D]" if cu_seqlens is None else "floating-point [total, H, D] with cu_seqlens"
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        fail("quantize", "x", expected, getattr(x, "dtype", type(x).__name__))
    if x.dim() != (4 if cu_seqlens is None else 3):
        fail("quantize", "x", expected, list(x.shape))
    with torch.no_grad():
        if cu_seqlens is None:
            axis = 1 if layout == "bhsd" else 2
            rows = x.transpose(1, axis)
            # A maximum of no token is an error in torch: the column of zeros stands for it.
            largest = torch.nn.functional.pad(rows.float().abs().amax(3), (0, 1)).amax(2)
            scale = _scale_of(largest)
            return _divided(rows, scale[:, :, None, None]).transpose(1, axis), scale
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != x.device:
            got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
            fail("quantize", "cu_seqlens", f"int32 or int64 [n + 1] on {x.device}", got)
        lengths = cu_seqlens.diff()
        largest = torch.segment_reduce(x.float().abs().amax(2), "max", lengths=lengths.long(), initial=0.0, unsafe=True)
        scale = _scale_of(largest)
        each = scale.repeat_interleave(lengths, 0, output_size=x.shape[0])
        return _divided(x, each[:, :, None]), scale


def _scale_of(largest: Tensor) -> Tensor:
    return (largest.float() / _LARGEST).clamp(min=_LEAST_SCALE)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(_DTYPE)


def hadamard(
    columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return an orthogonal matrix `[columns, columns]` that spreads an outlier of a row over all columns.

    It is a Hadamard matrix whose rows have random signs. Multiply q and k by the same matrix before `quantize`: their
    scores stay what they are, and the scale of a head is no longer set by one large element (QuIP, arXiv:2307.13304;
    FlashAttention-3, arXiv:2407.08608, section 3.3).

    Args:
        columns: the head dim of q and k, a power of two.
        seed: of the signs. dtype, device: of the matrix.

    Raises:
        ArgumentError: columns is not a power of two.

    >>> turn = hadamard(64)
    >>> torch.allclose(turn @ turn.mT, torch.eye(64), atol=1e-6)
    True
    >>> spread = torch.eye(64)[0] @ turn
    >>> spread.abs().max().item()
    0.125
    """
    check_int("hadamard", "columns", columns, 1)
    if columns & (columns - 1):
        fail("hadamard", "columns", "a power of two", columns)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < columns:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    signs = torch.randint(0, 2, (columns, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    turn: Tensor = (matrix * signs / columns**0.5).to(device=device, dtype=dtype)
    return turn
