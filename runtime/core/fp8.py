"""Calls of float8_e4m3fn: the checks of their scales, their tiles, and values as their kernels read them. No framework
is imported."""

import math
from typing import Any

from ..archs import HOPPER_FAMILY
from ..kernels import TRAITS
from .checks import fail
from .families import INTERPRETER, tile_columns
from .options import CallOptions, own_forward_tile
from .tiles import PORTABLE, HopperTile

FP8 = "float8_e4m3fn"

SCALES = ("q_scale", "k_scale", "v_scale")
"""Factors of q, k and v of 8 bits: float32 `[B, H]`, or `[n, H]` for n packed sequences."""

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""

LEAST_SCALE = 1e-12
"""The scale of a head of zeros, so that nothing is divided by 0."""

_TILES = {
    64: HopperTile(128, 128, 8, 3),
    128: HopperTile(128, 128, 8, 2),
    256: HopperTile(128, 128, 8, 2),
}
"""Tiles by the columns of the wider tile of a call, that of q and k or that of v."""

_BLOCK_N = 128


def check_no_scales(op: str, dtype: str, **scales: Any) -> None:
    """Refuse scales beside q, k and v of 16 bits or more."""
    for name, scale in scales.items():
        if scale is not None:
            fail(
                op,
                name,
                f"None without page_table or q, k and v of {FP8}",
                f"{type(scale).__name__} beside q of {dtype}",
            )


def scale_text(rows: int, heads: int, where: str = "") -> str:
    """The valid forms of a scale, for error messages. `where`: the scale's device."""
    return f"a number, floats [{heads}] or [{rows}, {heads}]{where}, as q is {FP8}"


def check_ends_of_scale(op: str, name: str, least: float, most: float) -> None:
    """Check the least and the largest element of a scale: kernels find the largest score of a row before they multiply
    by scales."""
    for end in (least, most):
        if not 0 <= end < math.inf:
            fail(op, name, "finite elements of at least 0", end)


def check_takes_fp8(op: str) -> None:
    """Refuse a call of an op that has no kernel for 8-bit q, k and v."""
    if not TRAITS[op].takes_fp8:
        fail(op, "q", "dtype float16, bfloat16 or float32, as the op has dropout", FP8)


def check_head_dims(op: str, **head_dims: int) -> None:
    """Refuse 8-bit q, k and v that are wider than the widest tile."""
    for name, head_dim in head_dims.items():
        if head_dim > max(_TILES):
            fail(op, name, f"a head_dim of at most {max(_TILES)}, as q is {FP8}", head_dim)


def check_unpruned(op: str, prune: object, dtype: object) -> None:
    """Refuse to prune a call of 8 bits: how large its scores are depends on its scales."""
    if str(dtype).endswith(FP8):
        fail(op, "prune", f"None where q, k and v are {FP8}", prune)


def check_kernel(op: str, arch: str) -> None:
    """Refuse a call of 8 bits if the op or the architecture has no kernel for it."""
    check_takes_fp8(op)
    if arch not in (HOPPER_FAMILY.arch, INTERPRETER):
        expected = f"dtype float16, bfloat16 or float32: those of {FP8} run on {HOPPER_FAMILY.arch} alone"
        fail(op, "q", expected, f"{FP8} on {arch}")


def fp8_tile(op: str, arch: str, head_dims: tuple[int, int], options: CallOptions) -> HopperTile:
    """The tile of a call's forward, the only pass of a call of 8 bits."""
    check_kernel(op, arch)
    if options.family == PORTABLE:
        fail(op, "family", f"None or 'hopper' where q, k and v are {FP8}", repr(PORTABLE))
    own = options.tile("fwd")
    if own is None:
        return _TILES[max(map(tile_columns, head_dims))]
    return own_forward_tile(op, "fwd", own, 128, f"where q, k and v are {FP8}")


def output_dtype(backend: Any, scales: Any) -> Any:
    """The dtype of o if it differs from that of q: bfloat16 in a call with scales; else None."""
    return None if scales is None else backend.BF16


def value_columns(backend: Any, v: Any, cu_seqlens: Any = None) -> Any:
    """Values `[B, Hkv, Skv, Dv]` as Hopper's kernels of float8_e4m3fn read them: `[B, Hkv, Dv, columns]`.

    `cu_seqlens`: of packed sequences, which are one batch row. Each sequence takes whole units of columns.
    """
    from ..device.gl_fp8 import UNIT
    from ..device.value_columns import value_columns as kernel

    batch, num_heads, kv_len, head_dim = v.shape
    num_seqs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    unit = UNIT.value
    count = (-(-kv_len // unit) if cu_seqlens is None else kv_len // unit + num_seqs) * unit
    columns = v.new_empty((batch, num_heads, head_dim, count))
    backend.launch(
        kernel,
        (-(-count // _BLOCK_N) * num_heads * batch,),
        (v, v if cu_seqlens is None else cu_seqlens, columns),
        (*v.stride()[:3], kv_len, count, num_heads, num_seqs),
        PACKED=cu_seqlens is not None,
        HEAD_DIM=head_dim,
        BLOCK_D=tile_columns(head_dim),
        BLOCK_N=_BLOCK_N,
        num_warps=8,
    )
    return columns
