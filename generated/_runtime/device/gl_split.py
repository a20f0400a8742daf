# SPDX-License-Identifier: Apache-2.0
"""What Hopper's backwards for more than 256 columns share: a kernel for each of dq, dk and dv.

The sums of dk and dv of 64 keys would fill all registers of a multiprocessor. So each gradient has a launch of its own,
and the scores are computed again in each. A program holds 64 rows or keys in shared memory, and copies to it the other
side, 32 at a time. One warpgroup computes probabilities and ds of each block, and two warpgroups add up half of the
columns each.

    gradient  held    copied      handed over  added up
    dv        k       q, do       p            p do
    dk        k, v    q, do       ds           ds q
    dq        q, do   k, v        ds           ds k

The product with v or do takes 128 columns at a time, which are copied apart: whole tiles would not fit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .gl import Ring, make_barriers, make_numbers, make_ring, product_layout, put_number
from .gl_backward import HandOver, store_tile
from .gl_forward import KeyRing
from .gl_forward_wide import ADDERS, add_half
from .gl_versions import aggregate, async_load

# Columns of the pieces in which tiles are copied.
CHUNK = gl.constexpr(128)

# Pieces in shared memory of tiles that only scores read.
CHUNK_STAGES = gl.constexpr(3)


# -------------------------------------------------------------------------------------------------------------- copies


@gluon.jit
def send_chunks(ring, desc, rows, row, turn, COUNT: gl.constexpr):
    """Copy the tile of `turn` that begins at `row` in COUNT pieces, each to a stage of its own."""
    for i in gl.static_range(COUNT):
        stage, lap = (COUNT * turn + i) % ring.stages, (COUNT * turn + i) // ring.stages
        mbarrier.wait(ring.empty.index(stage), (lap & 1) ^ 1)
        mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
        async_load(desc, rows.coords(row, i * CHUNK), ring.full.index(stage), ring.tiles.index(stage))


@aggregate
class RowStream:
    """A ring of tiles of q, each with lse and delta of its rows."""

    ring: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor

    @gluon.jit
    def send(self, desc, lse_desc, delta_desc, rows, start, first, turn):
        """Copy the tile that begins at row `start` of its head, and the vectors from element `first` on."""
        ring = self.ring
        stage, lap = turn % ring.stages, turn // ring.stages
        full = ring.full.index(stage)
        mbarrier.wait(ring.empty.index(stage), (lap & 1) ^ 1)
        mbarrier.expect(full, ring.pieces * desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
        for i in gl.static_range(ring.pieces):
            async_load(desc, rows.coords(start, i * CHUNK), full, ring.piece(stage, i))
        async_load(lse_desc, [first], full, self.lse.index(stage))
        async_load(delta_desc, [first], full, self.delta.index(stage))


@gluon.jit
def make_row_stream(desc, vector_desc, STAGES: gl.constexpr, READERS: gl.constexpr, PIECES: gl.constexpr):
    """A stream that READERS warpgroups read."""
    ROWS: gl.constexpr = vector_desc.block_type.shape[0]
    lse = gl.allocate_shared_memory(vector_desc.dtype, [STAGES, ROWS], vector_desc.layout)
    delta = gl.allocate_shared_memory(vector_desc.dtype, [STAGES, ROWS], vector_desc.layout)
    return RowStream(make_ring(desc, STAGES, 1, READERS, PIECES), lse, delta)


@gluon.jit
def send_keys(kv_ring, k_desc, v_desc, rows, start_n, turn, V_PIECES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Copy the keys from `start_n` on, publish the number of their block, and copy their values in V_PIECES pieces."""
    k_ring = kv_ring.k
    stage, lap = turn % k_ring.stages, turn // k_ring.stages
    mbarrier.wait(k_ring.empty.index(stage), (lap & 1) ^ 1)
    put_number(kv_ring.blocks, stage, start_n // BLOCK_N)
    mbarrier.arrive(k_ring.full.index(stage), count=1)
    k_ring.send(k_desc, rows, start_n, turn)
    send_chunks(kv_ring.v, v_desc, rows, start_n, turn, V_PIECES)


@gluon.jit
def make_split_key_ring(k_desc, v_desc, STAGES: gl.constexpr, PIECES: gl.constexpr):
    """A ring of keys, which all warpgroups read, and one of pieces of values, which one reads.

    A turn of the keys has several of the values, those of the same block (`send_keys`).
    """
    k_ring = make_ring(k_desc, STAGES, 2, 1 + ADDERS, PIECES)
    return KeyRing(k_ring, make_ring(v_desc, CHUNK_STAGES, 1, 1), make_numbers(STAGES))


# ---------------------------------------------------------------------------------------------------- scores of a block


@gluon.jit
def wait_for_scores(qk):
    """Wait for the scores, but not for a piece of dp that was issued after them."""
    return warpgroup_mma_wait(1, deps=(qk,))


@gluon.jit
def begin_chunk(own, ring, turn, dp, i: gl.constexpr, COUNT: gl.constexpr):
    """Issue piece `i` of COUNT of dp: `own other^T` over CHUNK columns."""
    other = ring.receive(COUNT * turn + i)
    return warpgroup_mma(own.slice(i * CHUNK, CHUNK, dim=1), other.permute((1, 0)), dp, use_acc=i > 0, is_async=True)


@gluon.jit
def begin_dp(own, ring, turn, SCORES: gl.constexpr, COUNT: gl.constexpr):
    """Issue the first piece of dp, which has COUNT pieces."""
    OWN: gl.constexpr = own.shape[0]
    OTHER: gl.constexpr = ring.tiles.shape[-2]
    return begin_chunk(own, ring, turn, gl.zeros([OWN, OTHER], gl.float32, SCORES), 0, COUNT)


@gluon.jit
def end_dp(dp, p, own, ring, turn, COUNT: gl.constexpr):
    """Add the other pieces to dp, and release each as soon as it is read. Returned are dp and p."""
    for i in gl.static_range(1, COUNT):
        dp = begin_chunk(own, ring, turn, dp, i, COUNT)
        # A wait has to return something. The sums of the last piece are not there yet, so it returns p.
        p = warpgroup_mma_wait(1, deps=(p,))
        ring.release(COUNT * turn + i - 1)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ring.release(COUNT * turn + COUNT - 1)
    return dp, p


# ---------------------------------------------------------------------------------------------------------------- sums


@gluon.jit
def make_weights(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Room for two tiles of p or ds, `[ROWS, COLS]`, which ADDERS warpgroups read."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, COLS], LAYOUT)
    return HandOver(tiles, make_barriers(2, 1), make_barriers(2, ADDERS))


@gluon.jit
def add_weighted(acc, weights, ring, turn, PART: gl.constexpr):
    """Add the product of p or ds of `turn` with half PART of the columns of a copied tile to the sums."""
    acc = add_half(acc, weights.take(turn), ring.receive(turn), PART)
    ring.release(turn)
    weights.release(turn)
    return acc


@gluon.jit
def store_sums(
    ptr, acc, factor, start, length, stride_row, PART: gl.constexpr, COLS: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Write half PART of COLS columns, times a factor, to the rows from `start` on of a `[length, HEAD_DIM]` matrix."""
    FIRST: gl.constexpr = PART * (COLS // ADDERS)
    WIDTH: gl.constexpr = acc[0].shape[1]
    store_tile(ptr + FIRST, acc[0] * factor, start, length, stride_row, HEAD_DIM - FIRST, product_layout(WIDTH))
    if len(acc) == 2:
        REST: gl.constexpr = FIRST + WIDTH
        store_tile(
            ptr + REST, acc[1] * factor, start, length, stride_row, HEAD_DIM - REST, product_layout(acc[1].shape[1])
        )
