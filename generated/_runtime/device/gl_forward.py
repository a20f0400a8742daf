# SPDX-License-Identifier: Apache-2.0
"""What Hopper's forwards share: the ring of keys and values, the online softmax, and the two products of a block.

A consumer warpgroup owns 64 query rows. It holds their scores as accumulators of `q k^T`, and the sums over the
values as accumulators of `p v`, which runs one block behind: while the tensor cores add up the values of one block,
the warpgroup takes the exponentials of the next (FlashAttention-3, arXiv:2407.08608).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .gl import (
    Ring,
    begin_product,
    begin_sums,
    get_number,
    make_numbers,
    make_ring,
    product_layout,
    put_number,
    store_layout,
    wait_for_sums,
)
from .gl_versions import aggregate

# The query rows of each consumer warpgroup.
ROWS = gl.constexpr(64)

# PTX for the two rows of a thread: outputs 0 to 3 are the results of `raise_maximum`, inputs 4 to 7 its arguments.
# 0f41000000 is 8.0, and 0f3F800000 is 1.0.
RAISE = gl.constexpr("""{
.reg .pred p, q, any;
.reg .f32 a, b;
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
sub.f32 a, $4, $6;
sub.f32 b, $5, $7;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
@p mov.b32 $0, $6;
@q mov.b32 $1, $7;
@p mov.b32 $2, a;
@q mov.b32 $3, b;
DONE:
}""")


@triton.constexpr_function
def query_stages(COLS):
    """Blocks of queries in shared memory: the current one and, where there is room, the next."""
    return 2 if COLS <= 128 else 1


@triton.constexpr_function
def lane_layout():
    """A partial sum for each of the four threads that hold a row of scores."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@aggregate
class KeyRing:
    """Ring buffers of keys and values, and the number of the block of keys in each stage.

    In the forwards, turn `i` brings the keys of the i-th visited block and the values of the one before it.
    """

    k: Ring
    v: Ring
    blocks: gl.shared_memory_descriptor

    @gluon.jit
    def send(self, k_desc, v_desc, rows, start_n, v_rows, v_start, turn, BLOCK_N: gl.constexpr):
        """Copy the keys from `start_n` on, publish the number of their block, and copy the values from `v_start` on."""
        stage, lap = turn % self.k.stages, turn // self.k.stages
        mbarrier.wait(self.k.empty.index(stage), (lap & 1) ^ 1)
        put_number(self.blocks, stage, start_n // BLOCK_N)
        mbarrier.arrive(self.k.full.index(stage), count=1)
        self.k.send(k_desc, rows, start_n, turn)
        self.v.send(v_desc, v_rows, v_start, turn)

    @gluon.jit
    def block(self, turn):
        """The number of the block of keys of `turn`, once it has arrived."""
        mbarrier.wait(self.k.full.index(turn % self.k.stages), (turn // self.k.stages) & 1)
        return get_number(self.blocks, turn % self.k.stages, 4)


@gluon.jit
def make_key_ring(
    k_desc, v_desc, STAGES: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr = 1, V_PIECES: gl.constexpr = 1
):
    """Rings for PARTS warpgroups. The number of a block arrives apart from its keys: two arrivals fill a stage.

    A tile of keys has PIECES tiles of `k_desc`, one of values V_PIECES of `v_desc`.
    """
    k_ring = make_ring(k_desc, STAGES, 2, PARTS, PIECES)
    v_ring = make_ring(v_desc, STAGES, 1, PARTS, V_PIECES)
    return KeyRing(k_ring, v_ring, make_numbers(STAGES))


@triton.constexpr_function
def turn_barrier(HOW, PART):
    """PTX for a named barrier of 256 threads: one of the last of 16, because the compiler takes the first ones."""
    return f"bar.{HOW} {15 - PART}, 256;"


@gluon.jit
def change_turns(HOW: gl.constexpr, PART: gl.constexpr):
    """Wait until it is the turn of warpgroup PART ("sync"), or say that it is ("arrive")."""
    CHANGE: gl.constexpr = turn_barrier(HOW, PART)
    threads = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(CHANGE, "=r,r", [threads], gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_pv(p_tile, acc, v_ring, turn):
    """Issue `acc += p v` with the values of `turn`."""
    return begin_sums(p_tile, v_ring.receive(turn), acc)


@gluon.jit
def end_pv(acc, v_ring, turn):
    """Wait for the products of `begin_pv`, and release their values."""
    acc = wait_for_sums(acc, 0)
    v_ring.release(turn)
    return acc


@gluon.jit
def begin_block(
    q_tile, p_pairs, acc, kv_ring, turn,
    SCORES: gl.constexpr, WEIGHTS: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, HEAD_DIM: gl.constexpr,
    key_terms=None,
):  # fmt: skip
    """Issue `q k^T` of a block and `p v` of the one before, and wait for the first. `key_terms` are added to the first.

    The warpgroups issue their products in turn, so that each takes its exponentials beside the products of the next.
    """
    BLOCK_N: gl.constexpr = kv_ring.k.tiles.shape[-2]
    p_tile = unpack_pairs(p_pairs, q_tile.dtype, WEIGHTS)
    k_tile = kv_ring.k.receive(turn)
    change_turns("sync", PART)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    qk = begin_product(q_tile, k_tile, no_scores, HEAD_DIM, USE_ACC=False)
    if key_terms is not None:
        qk = key_terms.add(qk, kv_ring.k.stages, turn)
    acc = begin_pv(p_tile, acc, kv_ring.v, turn)
    change_turns("arrive", (PART + 1) % PARTS)
    qk = warpgroup_mma_wait(len(acc), deps=(qk,))
    kv_ring.k.release(turn)
    return qk, acc


@gluon.jit
def raise_maximum(row_max, found):
    """The new reference maximum of each row, and alpha, by which its sums are to be multiplied.

    The maximum rises only for a score that is more than 8 above it, so that weights are at most 2**8. In most blocks it
    rises in no row of a warp, and the sums need no multiplication. The branch also makes the compiler reduce both rows
    of a thread side by side, ahead of all exponentials.
    """
    return gl.inline_asm_elementwise(
        RAISE, "=&f,=&f,=&f,=&f,f,f,f,f", [row_max, found], (gl.float32, gl.float32), is_pure=False, pack=2
    )


@gluon.jit
def add_lanes(row_sums, alpha, p, LANES: gl.constexpr):
    """`row_sums * alpha + p`: each thread adds up the columns that it holds, and the end of a work item joins them."""
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    sums = gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), LANES, assert_trivial=True)
    return row_sums * gl.convert_layout(alpha, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None] + sums


@gluon.jit
def pack_pairs(p, DTYPE: gl.constexpr):
    """Weights in 16 bits, two neighbours in a word: a loop that carried single ones would split and join every word."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    TYPE: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    ROUND: gl.constexpr = "cvt.rn." + TYPE + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights as an operand of a product.

    Not pure, so that it stays ahead of the products: between two of them it would make one wait for the other.
    """
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (gl.int16, gl.int16), is_pure=False, pack=1
    )
    tile = gl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
    return gl.convert_layout(gl.reshape(tile, [words.shape[0], words.shape[1] * 2]), LAYOUT, assert_trivial=True)


@triton.constexpr_function
def scaling(COUNT):
    """PTX that multiplies a thread's COUNT sums, of two rows, by alpha, unless alpha is 1 in all rows of the warp."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * COUNT + i};" for i in range(COUNT))
    return f"""{{
.reg .pred p, q;
setp.neu.f32 p, ${2 * COUNT}, 0f3F800000;
setp.neu.f32 q, ${2 * COUNT + 2}, 0f3F800000;
or.pred p, p, q;
vote.sync.any.pred p, p, 0xFFFFFFFF;
@!p bra.uni DONE;
{products}
DONE:
}}"""


@triton.constexpr_function
def scaling_operands(COUNT):
    """The constraints of `scaling`: the new sums, the sums before in the same registers, and alpha of each."""
    return ",".join(["=f"] * COUNT + [str(i) for i in range(COUNT)] + ["f"] * COUNT)


@gluon.jit
def rescale(acc, alpha):
    """The sums of all parts relative to the new maximum: `acc * alpha`."""
    if len(acc) == 1:
        return (rescale_part(acc[0], alpha, product_layout(acc[0].shape[1])),)
    else:
        first = rescale_part(acc[0], alpha, product_layout(acc[0].shape[1]))
        return first, rescale_part(acc[1], alpha, product_layout(acc[1].shape[1]))


@gluon.jit
def rescale_part(acc, alpha, SUMS: gl.constexpr):
    """The sums of one part, of layout SUMS, relative to the new maximum."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    SCALE: gl.constexpr = scaling(COUNT)
    OPERANDS: gl.constexpr = scaling_operands(COUNT)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    return gl.inline_asm_elementwise(SCALE, OPERANDS, [acc, alpha], gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def store_columns(ptr, tile, start, length, stride_row, COLS: gl.constexpr):
    """Write `tile` to the rows from `start` on of a `[length, COLS]` matrix, nothing beyond its edges."""
    STORED: gl.constexpr = store_layout(tile.shape[1])
    tile = gl.convert_layout(tile, STORED)
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, STORED))
    # Not pure, or the compiler would compute all addresses ahead of the loop and keep them in registers.
    row = start + gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row], gl.int32, is_pure=False, pack=1)
    col = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, STORED))
    ptrs = ptr + (row.to(gl.int64) * stride_row)[:, None] + col[None, :]
    gl.store(ptrs, tile, mask=(row < length)[:, None] & (col < COLS)[None, :])


@gluon.jit
def store_rows(ptr, tile, start, length, stride_row, COLS: gl.constexpr):
    """`store_columns` of up to 256 columns: shared memory has room to convert the layout of 128 at a time."""
    if tile.shape[1] == 256:
        left, right = gl.split(gl.permute(gl.reshape(tile, [tile.shape[0], 2, 128]), [0, 2, 1]))
        store_columns(ptr, left, start, length, stride_row, COLS)
        store_columns(ptr + 128, right, start, length, stride_row, COLS - 128)
    else:
        store_columns(ptr, tile, start, length, stride_row, COLS)


@gluon.jit
def store_rest(ptr, acc, factor, start, length, stride_row, COLS: gl.constexpr):
    """Store the second of the `sum_parts`, if there is one, times the factor of each row; as `store_rows`."""
    if len(acc) == 2:
        FIRST: gl.constexpr = acc[0].shape[1]
        LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(acc[1].shape[1]))
        factor = gl.convert_layout(factor, LAYOUT, assert_trivial=True)
        tile = (acc[1] * factor[:, None]).to(ptr.dtype.element_ty)
        store_columns(ptr + FIRST, tile, start, length, stride_row, COLS - FIRST)


@gluon.jit
def make_rows(COUNT: gl.constexpr):
    """Shared memory for COUNT rows of 64 float32: a number for each row or key of a tile."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
