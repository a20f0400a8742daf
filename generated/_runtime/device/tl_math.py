# SPDX-License-Identifier: Apache-2.0
"""Functions of scores and positions that Triton lacks, or computes otherwise than torch, and loads of tensors that
scores read."""

import triton
import triton.language as tl


@triton.jit
def tanh(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        # One instruction of relative error 2**-11, which is less than rounding a score to 16 bits costs.
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        far = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
        # Near zero the difference above cancels; a polynomial keeps float32's relative error there (Cephes, tanhf).
        z = x * x
        poly = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        near = x + x * z * ((poly + 1.33314422036e-1) * z - 3.33332819422e-1)
        return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def floor_mod(a, b):
    """Python's remainder, which has the sign of the divisor; Triton's has the sign of the dividend."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floor_div(a, b):
    """Python's integer division, which rounds down; Triton's rounds toward zero."""
    return (a - floor_mod(a, b)) // b


@triton.jit
def floor_div_any(a, b):
    """`floor_div` of any integer, such as a tensor's element: `a` minus its remainder may lie below all of 32 bits."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), a // b - 1, a // b)


@triton.jit
def round_even(x):
    """Round to the nearest integer, and halves to the even one, as torch does; an infinity stays infinite."""
    low = tl.floor(x)
    rest = x - low
    is_odd = low - 2.0 * tl.floor(0.5 * low) == 1.0
    return tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), low + 1.0, low)


@triton.jit
def log1p(x):
    """log(1 + x) with float32's relative error near zero."""
    # A factor corrects for the rounding of 1 + x (Goldberg, 1991, theorem 4).
    y = 1.0 + x
    is_exact = (y == 1.0) | (tl.abs(y) == float("inf"))
    factor = x / tl.where(is_exact, 1.0, y - 1.0)
    return tl.where(y == 1.0, x, tl.log(y) * tl.where(is_exact, 1.0, factor))


@triton.jit
def tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def load_pairs(ptrs, PTX: tl.constexpr):
    """Load one element per query and key at the point of use."""
    # The compiler would pipeline a plain load of 4 or 8-byte elements through shared memory, with copies of 4 bytes per
    # instruction. It does not pipeline shorter elements.
    BITS: tl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth
    if PTX and BITS == 32:
        word = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [ptrs], dtype=tl.int32, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    elif PTX and BITS == 64:
        word = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [ptrs], dtype=tl.int64, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    else:
        return tl.load(ptrs)


FEW_RUNS = tl.constexpr(4)
"""If the columns of a tile lie in at most so many runs of a grid, an element is loaded for each row and run."""


@triton.jit
def load_grid(row_ptrs, positions, length, size, stride, RUN: tl.constexpr, PTX: tl.constexpr):
    """Load the elements of a grid for a tile: `row_ptrs[r]` is where those of row r begin, `positions[c] // length` the
    index of column c.

    Positions follow each other, up or down, and `length` is at least RUN, if RUN is not 0. So the columns share the
    elements of a few runs, which are loaded for each row, and not for each pair.
    """
    # The first and last of these runs may be cut.
    COUNT: tl.constexpr = (positions.shape[0] - 2) // max(RUN, 1) + 2
    if RUN > 0 and COUNT <= FEW_RUNS:
        first_run = floor_div(tl.min(positions, 0), length)
        from_first = positions - first_run * length
        first = clamp_index(first_run, size)
        elements = tl.load(row_ptrs + tl.cast(first, tl.int64) * stride)
        for nth in tl.static_range(1, COUNT):
            run = clamp_index(first_run + nth, size)
            of_run = tl.load(row_ptrs + tl.cast(run, tl.int64) * stride)
            elements = tl.where((from_first >= nth * length)[None, :], of_run, elements)
        return elements
    else:
        runs = clamp_index(floor_div(positions, length), size)
        return load_pairs(row_ptrs + runs.to(tl.int64)[None, :] * stride, PTX)


SELECT_OR_ZERO = tl.constexpr("{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }")
SELECT_OR_MINUS_INF = tl.constexpr("{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")


@triton.jit
def keep_range(x, distance, count, outside, PTX: tl.constexpr):
    """`x` where `0 <= distance < count`, else `outside`, which is -inf or 0. `count` is not negative."""
    # As integers without a sign, distances below 0 are larger than every count.
    if PTX:
        # The compiler would evaluate a mask ahead of the product that makes x, and pack its truth values into registers
        # and out of them again. A comparison inside of this instruction waits for x.
        select: tl.constexpr = SELECT_OR_ZERO if outside == 0.0 else SELECT_OR_MINUS_INF
        counts = tl.full([1, 1], count, tl.int32)
        return tl.inline_asm_elementwise(
            select, "=f,f,r,r", [x, distance, counts], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(distance.to(tl.uint32, bitcast=True) < tl.cast(count, tl.uint32), x, outside)


@triton.jit
def clamp_index(index, size):
    """The nearest index inside a tensor of `size` elements: a call's offsets may lead beyond its ends."""
    return tl.maximum(tl.minimum(index, size - 1), 0)
