"""What Hopper's forwards for more than 256 columns share: weights in shared memory, and sums of half of the columns.

The sums over the values of 64 rows do not fit the registers of one warpgroup. So each of two warpgroups adds up half of
the columns of o, and a third one computes the weights that both need. It is one block of keys ahead: the tensor cores
compute scores and add up values at the same time.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gl import begin_product, make_barriers, make_numbers, make_ring, product_layout, whole_columns
from .gl_forward import ROWS, KeyRing, make_rows, rescale, store_columns, unpack_pairs
from .gl_versions import aggregate

# Warpgroups that add up values, and blocks of weights in shared memory.
ADDERS, WEIGHT_STAGES = gl.constexpr(2), gl.constexpr(2)


@gluon.jit
def make_wide_key_ring(k_desc, v_desc, STAGES: gl.constexpr, PIECES: gl.constexpr, V_PIECES: gl.constexpr):
    """Rings of keys, which one warpgroup reads, and of values, which ADDERS warpgroups read; as `make_key_ring`."""
    k_ring = make_ring(k_desc, STAGES, 2, 1, PIECES)
    v_ring = make_ring(v_desc, STAGES, 1, ADDERS, V_PIECES)
    return KeyRing(k_ring, v_ring, make_numbers(STAGES))


@gluon.jit
def begin_scores(own, other, SCORES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue `own other^T` of two tiles."""
    OWN: gl.constexpr = own.shape[0]
    OTHER: gl.constexpr = other.shape[0]
    return begin_product(own, other, gl.zeros([OWN, OTHER], gl.float32, SCORES), HEAD_DIM, USE_ACC=False)


@gluon.jit
def compute_scores(q_tile, k_ring, turn, SCORES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """`q k^T` of the keys of `turn`, which it releases."""
    qk = warpgroup_mma_wait(0, deps=(begin_scores(q_tile, k_ring.receive(turn), SCORES, HEAD_DIM),))
    k_ring.release(turn)
    return qk


@gluon.jit
def add_half(acc, weights, tile, PART: gl.constexpr):
    """Add the product of weights with half PART of the columns of a tile to the sums, which are in `half_parts`."""
    FIRST: gl.constexpr = PART * (tile.shape[1] // ADDERS)
    COLS: gl.constexpr = acc[0].shape[1]
    if len(acc) == 1:
        left = warpgroup_mma(weights, tile.slice(FIRST, COLS, dim=1), acc[0], is_async=True)
        return (warpgroup_mma_wait(0, deps=(left,)),)
    else:
        REST: gl.constexpr = acc[1].shape[1]
        left = warpgroup_mma(weights, tile.slice(FIRST, COLS, dim=1), acc[0], is_async=True)
        right = warpgroup_mma(weights, tile.slice(FIRST + COLS, REST, dim=1), acc[1], is_async=True)
        return warpgroup_mma_wait(0, deps=(left, right))


@aggregate
class WeightRing:
    """A ring buffer of the weights of blocks of keys, from the warpgroup that computes them to those that add up.

    `factors`: by what the sums of each row are to be multiplied before a block is added. `inverses`: by what they are
    to be multiplied at the end of a work item.
    """

    tiles: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    inverses: gl.shared_memory_descriptor
    has_inverses: gl.shared_memory_descriptor
    no_inverses: gl.shared_memory_descriptor

    @gluon.jit
    def send(self, p_pairs, factors, turn, SCORES: gl.constexpr):
        """Hand over the weights of a block, as `pack_pairs` gives them."""
        stage = turn % WEIGHT_STAGES
        mbarrier.wait(self.empty.index(stage), ((turn // WEIGHT_STAGES) & 1) ^ 1)
        self.tiles.index(stage).store(unpack_pairs(p_pairs, self.tiles.dtype, SCORES))
        self.factors.index(stage).store(factors)
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def finish(self, inverses, q_turn):
        """Hand over the factors that end the work item number `q_turn`."""
        mbarrier.wait(self.no_inverses.index(0), (q_turn & 1) ^ 1)
        self.inverses.index(0).store(inverses)
        mbarrier.arrive(self.has_inverses.index(0), count=1)

    @gluon.jit
    def add_block(self, acc, v_ring, turn, PART: gl.constexpr):
        """Add the product of the weights of `turn` with half PART of the columns of their values to the sums.

        Values arrive one turn later than their keys.
        """
        stage = turn % WEIGHT_STAGES
        mbarrier.wait(self.full.index(stage), (turn // WEIGHT_STAGES) & 1)
        acc = rescale(acc, self.factors.index(stage).load(gl.SliceLayout(1, product_layout(acc[0].shape[1]))))
        acc = add_half(acc, self.tiles.index(stage), v_ring.receive(turn + 1), PART)
        v_ring.release(turn + 1)
        mbarrier.arrive(self.empty.index(stage), count=1)
        return acc

    @gluon.jit
    def store_half(
        self, ptr, acc, q_turn, start, length, stride_row,
        PART: gl.constexpr, BLOCK_DV: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    ):  # fmt: skip
        """Write half PART of the columns of o to the rows from `start` on of a `[length, HEAD_DIM_V]` matrix."""
        mbarrier.wait(self.has_inverses.index(0), q_turn & 1)
        COLS: gl.constexpr = acc[0].shape[1]
        FIRST: gl.constexpr = PART * (BLOCK_DV // ADDERS)
        inverses = self.inverses.index(0).load(gl.SliceLayout(1, product_layout(COLS)))
        mbarrier.arrive(self.no_inverses.index(0), count=1)
        tile = (acc[0] * inverses[:, None]).to(ptr.dtype.element_ty)
        store_columns(ptr + FIRST, tile, start, length, stride_row, HEAD_DIM_V - FIRST)
        if len(acc) == 2:
            LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(acc[1].shape[1]))
            rest = acc[1] * gl.convert_layout(inverses, LAYOUT, assert_trivial=True)[:, None]
            rest = rest.to(ptr.dtype.element_ty)
            store_columns(ptr + FIRST + COLS, rest, start, length, stride_row, HEAD_DIM_V - FIRST - COLS)


@gluon.jit
def make_weight_ring(DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Room for weights `[ROWS, BLOCK_N]` of WEIGHT_STAGES blocks of keys."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [WEIGHT_STAGES, ROWS, BLOCK_N], LAYOUT)
    full, empty = make_barriers(WEIGHT_STAGES, 1), make_barriers(WEIGHT_STAGES, ADDERS)
    has_inverses, no_inverses = make_barriers(1, 1), make_barriers(1, ADDERS)
    return WeightRing(tiles, make_rows(WEIGHT_STAGES), full, empty, make_rows(1), has_inverses, no_inverses)


@triton.constexpr_function
def half_parts(PART, COLS, HEAD_DIM):
    """The parts in which half PART of COLS columns is summed up: the columns of each, one or two powers of two.

    A part has at most 128 columns: to rescale more at once, ptxas needs more registers than the launch gives a thread.

    >>> half_parts(0, 512, 512), half_parts(1, 512, 320), half_parts(1, 512, 400), half_parts(1, 256, 192)
    ((128, 128), (64,), (128, 16), (64,))
    """
    half = COLS // 2
    columns = min(HEAD_DIM - PART * half, half)
    first = min(max(whole_columns(columns), 16), 128)
    return (first,) if columns <= first else (first, max(whole_columns(columns - first), 16))


@gluon.jit
def no_half_sums(PART: gl.constexpr, COLS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Sums of half PART that begin with 0: for each of `half_parts` a tile `[64, columns]`."""
    FIRST: gl.constexpr = half_parts(PART, COLS, HEAD_DIM)[0]
    first = gl.zeros([ROWS, FIRST], gl.float32, product_layout(FIRST))
    if len(half_parts(PART, COLS, HEAD_DIM)) == 1:
        return (first,)
    else:
        REST: gl.constexpr = half_parts(PART, COLS, HEAD_DIM)[1]
        return first, gl.zeros([ROWS, REST], gl.float32, product_layout(REST))
