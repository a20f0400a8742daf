# SPDX-License-Identifier: Apache-2.0
"""Device functions of Hopper's forwards of float8_e4m3fn, in place of those in `gl_forward`: products of 8 bits.

Both operands of an 8-bit product must be contiguous along its summed axis. So values come as columns,
`[B, Hkv, Dv, keys]`, which `value_columns` transposes ahead of the kernel.

Of each 16 scores of a row a thread holds columns 2t, 2t + 1, 2t + 8 and 2t + 9, where t is its place among the four
threads that share a row. For an 8-bit operand it would have to hold columns 4t to 4t + 3. But a sum over keys does not
depend on their order: so no weight moves between threads, and `value_columns` puts each 16 keys in the order of the
weights (FlashAttention-3, arXiv:2407.08608, section 3.3).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .gl import MOST_COUNT, MOST_ROWS
from .gl_forward import ROWS, change_turns, rescale_part
from .gl_versions import aggregate

# The virtual tensor of `describe_packed_columns`, like that of rows in `gl`. COLUMN_WRAP_STRIDE is a stride in elements
# of 8 bits: MOST_WRAPS steps of it are 2**64 bytes. There are so many steps that the strides are below 2**40.
MOST_WRAPS = gl.constexpr(2**26)
COLUMN_WRAP_STRIDE = gl.constexpr(2**38)

# The columns of values of a sequence begin at a multiple of UNIT.
UNIT = gl.constexpr(16)

# PTX for the two rows of a thread, as in `gl_forward`, but a maximum rises to 4 below the score. 0f40800000 is 4.0.
RAISE = gl.constexpr("""{
.reg .pred p, q, any;
.reg .f32 a, b, c, d;
add.f32 a, $4, 0f41000000;
add.f32 b, $5, 0f41000000;
setp.gt.f32 p, $6, a;
setp.gt.f32 q, $7, b;
mov.b32 $0, $4;
mov.b32 $1, $5;
mov.b32 $2, 0f3F800000;
mov.b32 $3, 0f3F800000;
or.pred any, p, q;
vote.sync.any.pred any, any, 0xFFFFFFFF;
@!any bra.uni DONE;
sub.f32 c, $6, 0f40800000;
sub.f32 d, $7, 0f40800000;
sub.f32 a, $4, c;
sub.f32 b, $5, d;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
@p mov.b32 $0, c;
@q mov.b32 $1, d;
@p mov.b32 $2, a;
@q mov.b32 $3, b;
DONE:
}""")

# Four weights in a word.
PACK = gl.constexpr(
    "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b};}"
)

# A copy that the compiler does not undo: else it writes the next weights to registers that a product still reads.
COPY = gl.constexpr("{.reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {a, b};}")


@triton.constexpr_function
def product_layout(COLS):
    """The layout of a warpgroup's accumulator of 64 rows and COLS columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32])


@aggregate
class HeadColumns:
    """The columns of one head of `[batch, heads, rows, length]`, as coordinates for TMA."""

    batch_row: gl.tensor
    head: gl.tensor

    @gluon.jit
    def coords(self, column, row):
        return self.batch_row, self.head, row, column


@aggregate
class SequenceColumns:
    """The columns of one head of a packed sequence: `units` of UNIT columns that end ahead of unit `end` in memory."""

    end: gl.tensor
    units: gl.tensor
    head: gl.tensor

    @gluon.jit
    def coords(self, column, row):
        return MOST_WRAPS, self.end, self.head, row, MOST_ROWS - self.units * UNIT + column


@gluon.jit
def describe_columns(ptr, batch, heads, length, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, COLS: gl.constexpr):
    """A descriptor of `[batch, heads, HEAD_DIM, length]`, in tiles of COLS columns, with zeros beyond the edges."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_D, COLS], ptr.dtype.element_ty)
    row = gl.cast(length, gl.int64)
    return tma.make_tensor_descriptor(
        ptr,
        [batch, heads, HEAD_DIM, length],
        [row * HEAD_DIM * heads, row * HEAD_DIM, row, 1],
        [1, 1, BLOCK_D, COLS],
        LAYOUT,
    )


@gluon.jit
def describe_packed_columns(ptr, heads, length, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, COLS: gl.constexpr):
    """A descriptor of `[heads, HEAD_DIM, length]`, packed columns, with zeros beyond a sequence's edges.

    Every sequence ends at column MOST_ROWS of a virtual axis. Two more axes move that end to its place in memory:
    MOST_WRAPS steps along the first axis go back by MOST_ROWS columns, and one step along the second goes forward by
    UNIT columns.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, BLOCK_D, COLS], ptr.dtype.element_ty)
    row = gl.cast(length, gl.int64)
    unit = gl.cast(UNIT, gl.int64)
    return tma.make_tensor_descriptor(
        ptr,
        [MOST_COUNT, MOST_COUNT, heads, HEAD_DIM, MOST_ROWS],
        [COLUMN_WRAP_STRIDE - unit, unit, row * HEAD_DIM, row, 1],
        [1, 1, 1, BLOCK_D, COLS],
        LAYOUT,
    )


@gluon.jit
def no_sums(COLS: gl.constexpr):
    """Sums over values that begin with 0, `[ROWS, COLS]`, in one part."""
    return (gl.zeros([ROWS, COLS], gl.float32, product_layout(COLS)),)


@gluon.jit
def rescale(acc, alpha):
    """The sums relative to the new maximum: `acc * alpha`."""
    return (rescale_part(acc[0], alpha, product_layout(acc[0].shape[1])),)


@gluon.jit
def begin_pv(p_tile, acc, v_ring, turn):
    """Issue `acc += p v` with the values of `turn`, which are columns."""
    return (warpgroup_mma(p_tile, v_ring.receive(turn).permute((1, 0)), acc[0], is_async=True),)


@gluon.jit
def begin_block(
    q_tile, p_words, acc, kv_ring, turn,
    SCORES: gl.constexpr, WEIGHTS: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Issue `q k^T` of a block and `p v` of the one before, and wait for the first; in turn, as in `gl_forward`."""
    BLOCK_N: gl.constexpr = kv_ring.k.tiles.shape[-2]
    p_tile = unpack_words(p_words, q_tile.dtype, WEIGHTS)
    k_tile = kv_ring.k.receive(turn)
    change_turns("sync", PART)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    qk = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    acc = begin_pv(p_tile, acc, kv_ring.v, turn)
    change_turns("arrive", (PART + 1) % PARTS)
    qk = warpgroup_mma_wait(1, deps=(qk,))
    kv_ring.k.release(turn)
    return qk, acc


@gluon.jit
def raise_maximum(row_max, found):
    """The new reference maximum of each row, and alpha, by which its sums are to be multiplied.

    The maximum rises only for a score that is more than 8 above it, and then to 4 below that score. So weights are at
    most 2**8; e4m3 holds up to 448. Weights of at most 2**-10 of the largest one seen lose digits.
    """
    return gl.inline_asm_elementwise(
        RAISE, "=&f,=&f,=&f,=&f,f,f,f,f", [row_max, found], (gl.float32, gl.float32), is_pure=False, pack=2
    )


@gluon.jit
def pack_words(p):
    """Weights in 8 bits, a thread's four in a word: of each 16 columns those at 2t, 2t + 1, 2t + 8 and 2t + 9."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 16, 2, 4, 2]))
    a, c = gl.split(gl.permute(even, [0, 1, 3, 2]))
    b, d = gl.split(gl.permute(odd, [0, 1, 3, 2]))
    words = gl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a, b, c, d], gl.int32, is_pure=True, pack=1)
    return gl.reshape(words, [p.shape[0], p.shape[1] // 4])


@gluon.jit
def unpack_words(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights as an operand of a product.

    From four equal words the copy makes the four bytes of the first. It is not pure, so that it stays ahead of the
    products.
    """
    twice = gl.join(words, words)
    tile = gl.inline_asm_elementwise(COPY, "=r,r,r,r,r", [gl.join(twice, twice)], gl.int8, is_pure=False, pack=4)
    tile = gl.reshape(tile, [words.shape[0], words.shape[1] * 4]).to(DTYPE, bitcast=True)
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True)
