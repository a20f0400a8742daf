# SPDX-License-Identifier: Apache-2.0
"""Dropout in Hopper's kernels: the warps that hold scores draw the random words of `runtime/torch/philox.py` for them.

One Philox counter decides 16 scores: those of rows r and r + 8 and of the keys k, k + 1, k + 8, k + 9, k + 16, k + 17,
k + 24 and k + 25. In a forward one thread holds all of them. In a backward, whose tiles are transposed, a warp draws
bits in the order of the forward, and `movmatrix` transposes them.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def counter_layout(COUNT):
    """COUNT counters for each thread of a warpgroup.

    The axes are the lines of 8 that each warp has, counters of a thread, and the four threads that share a line.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i, 0] for i in range(COUNT.bit_length() - 1)],
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[32, COUNT, 4],
    )


@gluon.jit
def counter_lines(COUNT: gl.constexpr):
    """The index of each counter along the lines."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, counter_layout(COUNT)))
    return gl.arange(0, 32, layout=LAYOUT)[:, None][:, :, None]


@gluon.jit
def counter_turns(COUNT: gl.constexpr):
    """The index of each counter among those of its thread."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, counter_layout(COUNT)))
    return gl.arange(0, COUNT, layout=LAYOUT)[:, None][None, :, :]


@gluon.jit
def counter_threads(COUNT: gl.constexpr):
    """The index of each counter among the threads that share a line."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, counter_layout(COUNT)))
    threads = gl.arange(0, 4, layout=LAYOUT)
    # Not pure, or the compiler would compute all columns of a thread ahead of the loop and keep them in registers.
    threads = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [threads], gl.int32, is_pure=False, pack=1)
    return threads[None, :][None, :, :]


@triton.constexpr_function
def product_with(FACTOR):
    """PTX of a 64-bit product: one instruction instead of one for each 32-bit word of it."""
    return f"{{.reg .b64 t; mul.wide.u32 t, $2, {FACTOR}; mov.b64 {{$0, $1}}, t;}}"


@gluon.jit
def wide_product(x, FACTOR: gl.constexpr):
    """The lower and the upper word of `x * FACTOR`."""
    PRODUCT: gl.constexpr = product_with(FACTOR)
    return gl.inline_asm_elementwise(PRODUCT, "=r,=r,r", [x], (gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def philox(seed, c0, c1, c2):
    """The four words of each counter `(c0, c1, c2, 0)`, as `triton.language.philox` gives them in 7 rounds.

    A word of the counter may depend on lines alone or on columns alone: operations that do not need both are then done
    once for each line or column.
    """
    # Not pure, or the compiler would compute the keys of all rounds ahead of the loop and keep them in registers.
    k0, k1 = gl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=r,=r,l", [seed], (gl.int32, gl.int32), is_pure=False, pack=1
    )
    c3 = c2 ^ c2
    for _ in gl.static_range(7):
        lower_0, upper_0 = wide_product(c0, 0xD2511F53)
        lower_2, upper_2 = wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = upper_2 ^ c1 ^ k0, lower_2, upper_0 ^ c3 ^ k1, lower_0
        # The same as adding 0x9E3779B9 and 0xBB67AE85.
        k0 -= 0x61C88647
        k1 -= 0x4498517B
    return c0, c1, c2, c3


@gluon.jit
def below(word, limit, least, GREATER: gl.constexpr):
    """`least + GREATER` where the unsigned `word` is below `limit`, else `least`."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.u32 p, $1, $2; selp.b32 $0, $3, $4, p;}",
        "=r,r,r,r,r", [word, limit, least + GREATER, least], gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def kept_pair(FAR):
    """PTX of a mask of two 16-bit halves, set for each of two neighbours whose byte is not below its half of a limit.

    Bytes are compared as float16: the bits of integers up to 256 are subnormal float16 numbers, in the same order.
    """
    return f"{{.reg .b32 t; prmt.b32 t, $1, 0, {0x4341 if FAR else 0x4240}; set.ge.u32.f16x2 $0, t, $2;}}"


@gluon.jit
def kept_pairs(words, limit, FAR: gl.constexpr):
    """Masks of pairs of neighbouring keys, from a word for each four keys: FAR selects the two that are 8 further."""
    KEPT: gl.constexpr = kept_pair(FAR)
    return gl.inline_asm_elementwise(KEPT, "=r,r,r", [words, limit], gl.int32, is_pure=True, pack=1)


@gluon.jit
def without_dropped(p_pairs, seed, threshold, head_index, start_m, start_n, SCORES: gl.constexpr, COLS: gl.constexpr):
    """Weights of a forward, two in a word, `[64, COLS // 2]`, with 0 where they are dropped."""
    COUNT: gl.constexpr = COLS // 32
    keys = (start_n >> 3) + 4 * counter_turns(COUNT) + counter_threads(COUNT)
    near, far_row, far_key, far = philox(seed, keys, (start_m >> 1) + counter_lines(COUNT), head_index)
    limit = below(near ^ far_row ^ far_key ^ far, threshold << 8, (threshold >> 24 & 0xFF) * 0x10001, 0x10001)
    near = gl.join(kept_pairs(near, limit, False), kept_pairs(near, limit, True))
    far_row = gl.join(kept_pairs(far_row, limit, False), kept_pairs(far_row, limit, True))
    far_key = gl.join(kept_pairs(far_key, limit, False), kept_pairs(far_key, limit, True))
    far = gl.join(kept_pairs(far, limit, False), kept_pairs(far, limit, True))
    kept = gl.join(gl.join(near, far_key), gl.join(far_row, far))
    # The axes are warps, lines, counters, threads; then whether a key is 8 further, whether it is 16 further, and
    # whether a row is 8 further.
    kept = gl.permute(gl.reshape(kept, [4, 8, COUNT, 4, 2, 2, 2]), [0, 6, 1, 2, 5, 4, 3])
    kept = gl.reshape(kept, [64, COLS // 2])
    # In the layout of the pairs: this only renames registers.
    kept = gl.convert_layout(gl.reshape(gl.join(kept, kept), [64, COLS]), SCORES, assert_trivial=True)
    kept, _ = gl.split(gl.reshape(kept, [64, COLS // 2, 2]))
    return p_pairs & kept


# ------------------------------------------------------------------------------------------------------- of a backward


@triton.constexpr_function
def turns_layout(COLS):
    """The counters of a backward: lines, words of bits, four counters of each word, the threads that share a line."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1, 0], [0, 0, 2, 0], *([0, 1 << i, 0, 0] for i in range(COLS.bit_length() - 7))],
        lane_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[8, 0, 0, 0], [16, 0, 0, 0]],
        block_bases=[],
        shape=[32, COLS // 64, 4, 4],
    )


@triton.constexpr_function
def bit_layout(COLS):
    """A word for each thread and 64 columns."""
    return gl.SliceLayout(2, turns_layout(COLS))


@gluon.jit
def bytes_below(words, limit, least):
    """The highest bit of each byte tells if the byte is below its limit: its byte of `least`, or that plus one.

    A byte is below a number if the byte's complement plus the number has a carry. `limit` has the lower 7 bits of each
    byte of `least`, or these bits plus one.
    """
    sums = (~words & 0x7F7F7F7F) + limit
    return (~words & least) | (~words & sums) | (least & sums)


@gluon.jit
def dropped_bits(seed, threshold, head_index, start_m, start_n, COLS: gl.constexpr):
    """Which scores of a backward's tile of 64 keys and COLS rows are dropped, as bits of their thread.

    A word has a half for each of two neighbouring rows. A half has a byte for each of two keys that are 8 apart. A byte
    has bit `7 - n` for the row `8 * n` further.
    """
    COUNT: gl.constexpr = COLS // 16
    line, turn = counter_lines(COUNT), counter_turns(COUNT)
    keys = (start_n >> 3) + ((line >> 4) << 2) + counter_threads(COUNT)
    near, far_row, far_key, far = philox(seed, keys, (start_m >> 1) + 8 * turn + (line & 7), head_index)
    least = ((threshold >> 24 & 0xFF) * 0x1010101).to(gl.int32)
    limit = below(near ^ far_row ^ far_key ^ far, threshold << 8, least & 0x7F7F7F7F, 0x1010101)
    # Two warps share the counters of 32 keys: each warp has 16 of these keys.
    own_far = (line & 8) != 0
    near, far_row = gl.where(own_far, far_key, near), gl.where(own_far, far, far_row)
    shift = 2 * (turn & 3)
    LAST: gl.constexpr = 0x1010101
    bits = (bytes_below(near, limit, least) >> shift) & (LAST << (7 - shift))
    bits |= (bytes_below(far_row, limit, least) >> (shift + 1)) & (LAST << (6 - shift))
    bits = gl.sum(gl.reshape(bits, [32, COUNT // 4, 4, 4]), 2)
    bits = gl.convert_layout(bits, bit_layout(COLS), assert_trivial=True)
    # So far the halves of a word are of two keys, and the lines of threads are of rows. This swaps them.
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [bits], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def as_tile(near, far_line, far_column, far, SCORES: gl.constexpr, COLS: gl.constexpr):
    """Numbers of pairs, `[32, COLS // 16, 4, 2]`, as the tile of their scores: this only renames registers."""
    # The last two axes are whether a score's line is 8 further, and whether its column is.
    parts = gl.join(gl.join(near, far_line), gl.join(far_column, far))
    parts = gl.permute(gl.reshape(parts, [4, 8, COLS // 16, 8, 2, 2]), [0, 4, 1, 2, 5, 3])
    return gl.convert_layout(gl.reshape(parts, [64, COLS]), SCORES, assert_trivial=True)


@gluon.jit
def dropped_signs(dropped, SCORES: gl.constexpr, COLS: gl.constexpr):
    """For each score a word of bits, and the selector of the byte in it whose sign is set if the score is dropped."""
    TURNS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, gl.SliceLayout(0, turns_layout(COLS))))
    shift = 2 * gl.arange(0, 4, layout=TURNS)[:, None][None, :, :][None, :, :, :]
    near = gl.reshape(dropped[:, :, None, :] << shift, [32, COLS // 16, 4])
    words = gl.join(near, near)
    words = as_tile(words, words, words << 1, words << 1, SCORES, COLS)
    # Neighbouring rows have the halves of a word, keys that are 8 apart have the bytes of a half.
    zero = gl.zeros_like(near)
    near_key, far_key = gl.join(zero + 0x8888, zero + 0xAAAA), gl.join(zero + 0x9999, zero + 0xBBBB)
    return words, as_tile(near_key, far_key, near_key, far_key, SCORES, COLS)


@gluon.jit
def kept_weights(p, signs):
    """Probabilities of a backward, with 0 where they are dropped; `signs` are those of `dropped_signs`."""
    words, selectors = signs
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; prmt.b32 t, $2, 0, $3; lop3.b32 $0, $1, t, t, 0x30;}",
        "=f,f,r,r", [p, words, selectors], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def kept_gradients(dp, minus_delta, signs):
    """The gradient of each score divided by its probability: `dp`, or `minus_delta` if the score is dropped."""
    words, selectors = signs
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; prmt.b32 t, $3, 0, $4; lop3.b32 $0, t, $2, $1, 0xCA;}",
        "=f,f,f,r,r", [dp, minus_delta, words, selectors], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
