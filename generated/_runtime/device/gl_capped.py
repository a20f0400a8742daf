# SPDX-License-Identifier: Apache-2.0
"""Device functions for forwards of bounded scores: sums without a maximum, and a `tanh` that two units share.

The special function unit takes 16 numbers a clock and multiprocessor. An exponential and a `tanh` for each score keep
it busy for twice as long as causal attention's exponentials do. So the FMA pipe computes POLYNOMIALS of each eight
numbers of a thread as `x (c0 + z (c1 + z (c2 + z c3)))`, with z = x^2. Up to |x| = 5/8 their relative error is below
2^-18. `tanh.approx`, whose relative error is 2^-11, computes the other numbers. It computes all numbers if, in any
thread of the warp, a number that a polynomial would compute is beyond 5/8.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gl_math import tanh

# How many of each eight numbers of a thread polynomials compute.
POLYNOMIALS = gl.constexpr(6)

# c0 to c3 minimise the largest relative error for |x| up to the square root of MOST_SQUARE.
COEFFICIENTS = gl.constexpr((0.999997089946996, -0.33309231541167084, 0.13015458704539967, -0.0400295075259283))
MOST_SQUARE = gl.constexpr(0.390625)


@triton.constexpr_function
def exponential_ptx(COUNT, FACTOR, OFFSET, POLYNOMIALS, COEFFICIENTS, MOST_SQUARE):
    """PTX for the COUNT numbers of a thread: `2 ** (FACTOR * tanh(inner * x) + OFFSET)`.

    The coefficients of the polynomials include `inner` and FACTOR. The squares are compared as integers, because one
    instruction takes the maximum of three: no square is negative, and a NaN is then larger than every number.
    """
    own = [i for i in range(COUNT) if i * POLYNOMIALS % 8 < POLYNOMIALS]
    inner = f"${2 * COUNT}"

    def by_unit(i):
        lines = [f"mul.f32 y, ${i}, {inner};", "tanh.approx.f32 y, y;", f"fma.rn.f32 y, y, {FACTOR}, {OFFSET};"]
        return [*lines, f"ex2.approx.ftz.f32 ${i}, y;"]

    def by_polynomial(i):
        lines = [f"fma.rn.f32 y, c3, z{i}, c2;", f"fma.rn.f32 y, y, z{i}, c1;", f"fma.rn.f32 y, y, z{i}, c0;"]
        return [*lines, f"fma.rn.f32 y, ${i}, y, {OFFSET};", f"ex2.approx.ftz.f32 ${i}, y;"]

    near = [line for i in range(COUNT) for line in (by_polynomial(i) if i in own else by_unit(i))]
    far = [line for i in range(COUNT) for line in by_unit(i)]
    lines = [".reg .pred far;", ".reg .b32 y, s, c0, c1, c2, c3, most;", *(f".reg .b32 z{i};" for i in own)]
    lines += [f"mul.f32 s, {inner}, {inner};", f"mul.f32 c0, {inner}, {FACTOR * COEFFICIENTS[0]};"]
    for n in (1, 2, 3):
        lines += [f"mul.f32 c{n}, c{n - 1}, s;", f"mul.f32 c{n}, c{n}, {COEFFICIENTS[n] / COEFFICIENTS[n - 1]};"]
    lines += [f"mul.f32 z{i}, ${i}, ${i};" for i in own]
    lines += ["mov.b32 most, z0;", *(f"max.s32 most, most, z{i};" for i in own[1:])]
    lines += ["mul.f32 most, most, s;", f"setp.gtu.f32 far, most, {MOST_SQUARE};"]
    lines += ["vote.sync.any.pred far, far, 0xFFFFFFFF;"]
    lines += ["@far bra.uni FAR;", *near, "bra.uni DONE;", "FAR:", *far, "DONE:"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def exponential_operands(COUNT):
    """The constraints of `exponential_ptx`: results in place of the numbers, then `inner` for each of them."""
    return ",".join(["=f"] * COUNT + [str(i) for i in range(COUNT)] + ["f"] * COUNT)


@gluon.jit
def exp2_of_tanh(x, inner, HARDWARE: gl.constexpr, FACTOR: gl.constexpr, OFFSET: gl.constexpr):
    """`2 ** (FACTOR * tanh(inner * x) + OFFSET)` of a warpgroup's accumulator `x`, for a number `inner`.

    The PTX includes the exponentials, so that they run beside the polynomials. It is not pure: the vote among the
    threads of a warp must not move to another branch.
    """
    if HARDWARE:
        COUNT: gl.constexpr = x.shape[0] * x.shape[1] // 128
        PTX: gl.constexpr = exponential_ptx(COUNT, FACTOR, OFFSET, POLYNOMIALS, COEFFICIENTS, MOST_SQUARE)
        OPERANDS: gl.constexpr = exponential_operands(COUNT)
        return gl.inline_asm_elementwise(PTX, OPERANDS, [x, inner], gl.float32, is_pure=False, pack=COUNT)
    else:
        return gl.exp2(FACTOR * tanh(inner * x, HARDWARE) + OFFSET)


@gluon.jit
def add_columns(row_sums, p, LANES: gl.constexpr):
    """`row_sums + p`: each thread adds up the columns that it holds, and the end of a work item joins them."""
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    return row_sums + gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), LANES, assert_trivial=True)
