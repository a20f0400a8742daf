"""Tensors of float8_e4m3fn for forward calls on Hopper GPUs, with their scales, and a rotation that spreads outliers.

Both functions work on torch tensors and JAX arrays. Importing this module imports neither.

>>> import torch
>>> x = torch.tensor([[[[1.0, -2.0], [0.5, 0.25]]]])  # [B, H, S, D]
>>> x8, scale = quantize(x)
>>> x8.dtype, scale.shape
(torch.float8_e4m3fn, torch.Size([1, 1]))
>>> (x8.float() * scale[:, :, None, None]).tolist() == x.tolist()
True
"""

import sys
from typing import Any

from ._runtime.core.checks import check_int, check_layout, fail

__all__ = ["hadamard", "quantize"]

_DIMS = {"bhsd": "[B, H, S, D]", "bshd": "[B, S, H, D]"}
_ARRAY = "torch.Tensor or jax.Array"


def quantize(x: Any, *, cu_seqlens: Any = None, layout: str | None = None) -> tuple[Any, Any]:
    """Return x in float8_e4m3fn and the scales that restore it: `x` is about `x8 * scale`.

    Every head of every batch row or packed sequence has a scale: its largest absolute value divided by 448. Nothing
    waits for the GPU, and the results have no gradient. On the CPU tensors and JAX arrays of equal values give equal
    results.

    Args:
        x: floating-point `[B, H, S, D]`; `[B, S, H, D]` in the layout "bshd"; `[total, H, D]` for packed sequences.
        cu_seqlens: int32 or int64 `[n + 1]`, where the packed sequences of x begin and end. None without packing.
        layout: "bhsd" or "bshd", the layout of the call. The default is that of the framework's ops: "bhsd" in torch,
            "bshd" in JAX. Packed sequences ignore it.

    Returns:
        float8_e4m3fn in the shape of x, and float32 scales `[B, H]`, or `[n, H]` for packed sequences.

    Raises:
        ArgumentError: x is not a floating-point array or has another shape; the layout is unknown; cu_seqlens is not
            an int32 or int64 array `[n + 1]` of the same framework, in torch on the same device, or its values, which
            are checked on the CPU, do not rise from 0 to the rows of x.

    No scale is below 1e-12, so that nothing divides by 0.

    >>> import torch
    >>> sequences = torch.tensor([4.0, 8.0, 448.0]).reshape(3, 1, 1)
    >>> quantize(sequences, cu_seqlens=torch.tensor([0, 2, 3]))[1].flatten().tolist()
    [0.01785714365541935, 1.0]
    """
    framework = _framework(x)
    if layout is None:
        layout = "bshd" if framework == "jax" else "bhsd"
    check_layout("quantize", layout)
    dims = _DIMS[layout] if cu_seqlens is None else "[total, H, D] with cu_seqlens"
    expected = f"a floating-point {_ARRAY} {dims}"
    if not framework or not _dtype_name(x).startswith(("float", "bfloat")):
        fail("quantize", "x", expected, getattr(x, "dtype", type(x).__name__))
    if x.ndim != (4 if cu_seqlens is None else 3):
        fail("quantize", "x", expected, list(x.shape))
    if x.shape[-1] == 0:
        fail("quantize", "x", "at least one column", list(x.shape))
    if cu_seqlens is not None:
        _check_begins(framework, x, cu_seqlens)
    if framework == "torch":
        from ._runtime.torch.float8 import quantize as torch_quantize

        return torch_quantize(x, cu_seqlens, layout)
    from ._runtime.jax.float8 import quantize as jax_quantize

    return jax_quantize(x, cu_seqlens, layout)


def hadamard(columns: int, *, seed: int = 0, like: Any = None, dtype: Any = None, device: Any = None) -> Any:
    """Return an orthogonal matrix `[columns, columns]` that spreads an outlier of a row over all columns.

    It is a Hadamard matrix whose rows have random signs. Multiply q and k by the same matrix before `quantize`: the
    scores do not change, and the scale of a head is no longer set by one large element (QuIP, arXiv:2307.13304;
    FlashAttention-3, arXiv:2407.08608, section 3.3).

    Args:
        columns: the head dim of q and k, a power of two.
        seed: of the signs, from 0 to 2**30; equal seeds give equal matrices in both frameworks.
        like: a torch tensor or a JAX array, such as q. The matrix has its framework and dtype, and in torch its device.
            By default the matrix is a float32 tensor of torch.
        dtype: of the matrix, instead of that of `like`.
        device: of the matrix, instead of that of `like`.

    Raises:
        ArgumentError: columns is not a power of two, seed is out of range, `like` is no array, or the dtype has no
            floats.

    >>> import torch
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
    check_int("hadamard", "seed", seed, 0)
    framework = "torch" if like is None else _framework(like)
    if not framework:
        fail("hadamard", "like", f"None or a {_ARRAY}", type(like).__name__)
    if framework == "torch":
        from ._runtime.torch.float8 import hadamard as torch_hadamard

        return torch_hadamard(columns, seed, like, dtype, device)
    from ._runtime.jax.float8 import hadamard as jax_hadamard

    return jax_hadamard(columns, seed, like, dtype, device)


def _framework(x: Any) -> str:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return ""


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _check_begins(framework: str, x: Any, cu_seqlens: Any) -> None:
    in_torch = framework == "torch"
    expected = f"int32 or int64 [n + 1] on {x.device}" if in_torch else "an int32 or int64 jax.Array [n + 1]"
    if _framework(cu_seqlens) != framework:
        fail("quantize", "cu_seqlens", expected, type(cu_seqlens).__name__)
    fits = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] > 0 and _dtype_name(cu_seqlens) in ("int32", "int64")
    if not fits or (in_torch and cu_seqlens.device != x.device):
        where = f" on {cu_seqlens.device}" if in_torch else ""
        fail("quantize", "cu_seqlens", expected, f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}{where}")
