"""`generated.float8` for PyTorch: tensors of 8 bits with their scales, and rotations."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.fp8 import LARGEST, LEAST_SCALE
from .dtypes import FP8_DTYPE
from .sequences import begins_of


def quantize(x: Tensor, cu_seqlens: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    """x, which is checked, as 8-bit floats, and its scales."""
    with torch.no_grad():
        if cu_seqlens is None:
            axis = 1 if layout == "bhsd" else 2
            rows = x.transpose(1, axis)
            # torch raises an error for a maximum over no tokens. A column of zeros avoids it.
            largest = torch.nn.functional.pad(rows.float().abs().amax(3), (0, 1)).amax(2)
            scale = _scale_of(largest)
            return _divided(rows, scale[:, :, None, None]).transpose(1, axis), scale
        lengths = begins_of("quantize", "cu_seqlens", cu_seqlens, "x", x).diff()
        largest = torch.segment_reduce(x.float().abs().amax(2), "max", lengths=lengths.long(), initial=0.0, unsafe=True)
        scale = _scale_of(largest)
        each = scale.repeat_interleave(lengths, 0, output_size=x.shape[0])
        return _divided(x, each[:, :, None]), scale


def _scale_of(largest: Tensor) -> Tensor:
    return (largest.float() / LARGEST).clamp(min=LEAST_SCALE)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8_DTYPE)


def hadamard(columns: int, seed: int, like: Tensor | None, dtype: Any, device: Any) -> Tensor:
    """A Hadamard matrix with random signs, whose other arguments are checked."""
    if like is not None:
        dtype, device = like.dtype if dtype is None else dtype, like.device if device is None else device
    dtype = torch.float32 if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        fail("hadamard", "dtype", "a torch.dtype of floats, as `like` is no array of JAX", repr(dtype))
    if not dtype.is_floating_point:
        fail("hadamard", "dtype", "a dtype of floats", dtype)
    # Computed on the CPU, whatever torch's default device is: equal numbers everywhere.
    on_cpu: Any = {"dtype": torch.float64, "device": "cpu"}
    matrix = torch.ones(1, 1, **on_cpu)
    while len(matrix) < columns:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], **on_cpu), matrix)
    signs = torch.randint(0, 2, (columns, 1), generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * 2 - 1
    turn: Tensor = (matrix * signs / columns**0.5).to(device=device, dtype=dtype)
    return turn
