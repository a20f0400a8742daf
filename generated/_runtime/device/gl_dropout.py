# SPDX-License-Identifier: Apache-2.0
"""Dropout in Hopper's kernels: the random words of `runtime/torch/philox.py`, drawn where their scores are.

One counter gives four words, for four scores that are 8 lines and 8 columns apart in a tile of 64 lines: the same
thread holds all four. In a forward the lines are rows and the columns keys; in a backward, BY_KEYS, they are the
other way round.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def counter_layout(COLS):
    """One counter for each four scores of a tile of 64 lines and COLS columns, in the thread that holds the four.

    The axes are lines, groups of 8 columns, the four threads that share a line, and neighbours.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], *([0, 1 << i, 0, 0] for i in range(COLS.bit_length() - 5))],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[8, 0, 0, 0], [16, 0, 0, 0]],
        block_bases=[],
        shape=[32, COLS // 16, 4, 2],
    )


@gluon.jit
def counter_eights(COLS: gl.constexpr):
    """The index of each counter along the groups of 8 columns."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, gl.SliceLayout(3, counter_layout(COLS))))
    return gl.arange(0, COLS // 16, layout=LAYOUT)[:, None][None, :, :][:, :, :, None]


@gluon.jit
def counter_neighbours(COLS: gl.constexpr):
    """The index of each counter along the neighbours."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, counter_layout(COLS))))
    return gl.arange(0, 2, layout=LAYOUT)[None, :][None, :, :][None, :, :, :]


@triton.constexpr_function
def product_with(FACTOR):
    """PTX of a 64-bit product: one instruction, where two products of 32 bits are two."""
    return f"{{.reg .b64 t; mul.wide.u32 t, $2, {FACTOR}; mov.b64 {{$0, $1}}, t;}}"


@gluon.jit
def wide_product(x, FACTOR: gl.constexpr):
    """The lower and the upper word of `x * FACTOR`."""
    PRODUCT: gl.constexpr = product_with(FACTOR)
    return gl.inline_asm_elementwise(PRODUCT, "=r,=r,r", [x], (gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def philox(seed, c0, c1, c2):
    """The four words of each counter `(c0, c1, c2, 0)`, as `triton.language.philox` gives them.

    A part of the counter may be of lines or columns alone: what does not need both is computed once for each.
    """
    # Not pure, or the compiler would compute the keys of all rounds ahead of the loop and keep them in registers.
    k0, k1 = gl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=r,=r,l", [seed], (gl.int32, gl.int32), is_pure=False, pack=1
    )
    c3 = c2 ^ c2
    for _ in gl.static_range(10):
        lower_0, upper_0 = wide_product(c0, 0xD2511F53)
        lower_2, upper_2 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = upper_2 ^ c1 ^ k0, lower_2, upper_0 ^ c3 ^ k1, lower_0
        # The same as adding 0x9E3779B9 and 0xBB67AE85.
        k0 -= 0x61C88647
        k1 -= 0x4498517B
    return c0, c1, c2, c3


@gluon.jit
def dropout_words(seed, head_index, start_m, start_n, COLS: gl.constexpr, BY_KEYS: gl.constexpr):
    """The random words of a tile of 64 lines and COLS columns, four for each counter.

    They are of the counter's pair that is nearest to the start, of the pair 8 keys further, 8 rows further, and both.
    """
    LINE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, counter_layout(COLS))))
    THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, counter_layout(COLS))))
    first_line = start_n if BY_KEYS else start_m
    first_column = start_m if BY_KEYS else start_n
    lines = (first_line >> 1) + gl.arange(0, 32, layout=LINE)[:, None][:, :, None][:, :, :, None]
    threads = 2 * gl.arange(0, 4, layout=THREAD)
    # Not pure, or the compiler would compute all columns of a thread ahead of the loop and keep them in registers.
    threads = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [threads], gl.int32, is_pure=False, pack=1)
    columns = ((first_column >> 1) + threads)[None, :][None, :, :][:, :, :, None]
    columns += 8 * counter_eights(COLS) + counter_neighbours(COLS)
    if BY_KEYS:
        return philox(seed, lines, columns, head_index)
    else:
        return philox(seed, columns, lines, head_index)


@gluon.jit
def as_tile(near, far_line, far_column, far, SCORES: gl.constexpr, COLS: gl.constexpr):
    """What the counters hold, as the tile of their scores: this only renames registers."""
    # The last two axes are whether a score's line is 8 further than its counter's, and whether its column is.
    parts = gl.join(gl.join(near, far_line), gl.join(far_column, far))
    parts = gl.permute(gl.reshape(parts, [4, 8, COLS // 16, 8, 2, 2]), [0, 4, 1, 2, 5, 3])
    return gl.convert_layout(gl.reshape(parts, [64, COLS]), SCORES, assert_trivial=True)


@gluon.jit
def without_dropped(p, seed, threshold, head_index, start_m, start_n, SCORES: gl.constexpr, COLS: gl.constexpr):
    """Weights of a forward, [64, COLS], times 0 where they are dropped: the unit for products is less busy."""
    near, far_key, far_row, far = dropout_words(seed, head_index, start_m, start_n, COLS, False)
    words = as_tile(near, far_row, far_key, far, SCORES, COLS)
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.u32 p, $2, $3; mov.b32 $0, $1; @p mul.f32 $0, $0, 0f00000000;}",
        "=&f,f,r,r", [p, words, threshold], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def bit_layout(COLS):
    """Two words for each thread, one for each neighbour."""
    return gl.SliceLayout(1, counter_layout(COLS))


@gluon.jit
def dropped_bits(seed, threshold, head_index, start_m, start_n, COLS: gl.constexpr):
    """Which scores of a backward's tile are dropped, as bits of their thread: four for each counter, from bit 0 on.

    They are drawn ahead of the probabilities, which need them, as ds does.
    """
    near, far_key, far_row, far = dropout_words(seed, head_index, start_m, start_n, COLS, True)
    bits = gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.u32 p, $1, $5; selp.b32 $0, 1, 0, p; setp.lt.u32 p, $2, $5; @p or.b32 $0, $0, 2; "
        "setp.lt.u32 p, $3, $5; @p or.b32 $0, $0, 4; setp.lt.u32 p, $4, $5; @p or.b32 $0, $0, 8;}",
        "=&r,r,r,r,r,r", [near, far_key, far_row, far, threshold], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.sum(bits << (4 * counter_eights(COLS)), 1)


@gluon.jit
def with_signs(p, dropped, SCORES: gl.constexpr, COLS: gl.constexpr):
    """Probabilities of a backward, with a minus where they are dropped: predicates would take too many registers."""
    last = dropped[:, None, :, :] << (28 - 4 * counter_eights(COLS))
    signs = as_tile(last << 3, last << 2, last << 1, last, SCORES, COLS) & -0x80000000
    return (p.to(gl.int32, bitcast=True) ^ signs).to(gl.float32, bitcast=True)
