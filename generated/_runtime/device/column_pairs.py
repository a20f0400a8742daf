# SPDX-License-Identifier: Apache-2.0
"""Tiles of 8-bit floats that are read two columns at a time, as 16-bit numbers.

An MMA reads its second operand as pairs of rows. For 16-bit elements one instruction loads eight such pairs from shared
memory; for 8-bit elements there is no such instruction. So a pair of columns is loaded as one 16-bit element, and its
bytes become two float16 tiles: one of the columns 0, 2, 4, ..., the other of the columns 1, 3, 5, .... Every float8 is
also a float16 number, so nothing is rounded.

Such a tile is a tuple: the even and the odd columns of the first part, then the even and the odd columns of the next.
"""

# ruff: noqa: RUF005
# Triton has no starred tuples.

import triton
import triton.language as tl


@triton.jit
def as_pairs(ptr):
    """A pointer to 8-bit floats, cast to a pointer to pairs of them."""
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def unpack_pairs(pairs, MANTISSA: tl.constexpr, PTX: tl.constexpr):
    """The low and the high bytes of 16-bit numbers as float16. MANTISSA is 2 for float8_e5m2, 3 for float8_e4m3fn."""
    if MANTISSA == 2:
        # The upper byte of a float16 has the format of float8_e5m2.
        if PTX:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
                "=r,=r,r",
                [pairs],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return (pairs << 8).to(tl.float16, bitcast=True), (pairs & -256).to(tl.float16, bitcast=True)
    elif PTX:
        # Triton converts element by element, which takes twice as many instructions.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _from_e4m3(pairs & 255), _from_e4m3((pairs >> 8) & 255)


@triton.jit
def _from_e4m3(byte):
    # The exponent of float8_e4m3fn has bias 7, that of float16 has bias 15: the factor is 2**8.
    bits = ((byte & 127) << 7) | ((byte & 128) << 8)
    return tl.where((byte & 127) == 127, float("nan"), bits.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)


@triton.jit
def split_columns(tile):
    """The even and the odd columns of each part of a tile of 16-bit floats, as float16, and the unit of each row.

    Each row is divided by its unit, a power of two, because float16 has fewer exponents than bfloat16.
    """
    largest = tl.max(tl.abs(tile[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(tile)):
        largest = tl.maximum(largest, tl.max(tl.abs(tile[i].to(tl.float32)), 1))
    # The power of two of the row's largest element; 1 if all elements are 0.
    unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where(unit == 0.0, 1.0, unit)
    parts = ()
    for i in tl.static_range(len(tile)):
        part = (tile[i].to(tl.float32) / unit[:, None]).to(tl.float16)
        parts = parts + tl.split(tl.reshape(part, [part.shape[0], part.shape[1] // 2, 2]))
    return parts, unit


@triton.jit
def join_pairs(tile):
    """The inverse of `split_columns` for sums: each part with its columns in order."""
    parts = ()
    for i in tl.static_range(len(tile) // 2):
        parts = parts + (tl.interleave(tile[2 * i], tile[2 * i + 1]),)  # type: ignore[assignment]  # it grows
    return parts
