"""Terms of scores that all rows of a key share, such as a log-decay or a bias, added by the tensor cores.

`q k^T` gets 16 columns more, as many as one product sums at least: ones in place of q, and in place of k the term of
each key as the sum of three bfloat16, which have the 24 digits of a float32. They are multiplied after the columns of
q and k, because each later product would round the sum to the digits of a large term. The warp that copies keys
computes them. So the warpgroups that take exponentials neither read the terms nor add them score by score.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from .gl import make_barriers
from .gl_forward import ROWS
from .gl_versions import aggregate

COLS = gl.constexpr(16)


@triton.constexpr_function
def term_layout(BLOCK_N):
    """The layout in which one warp has the columns of a block of terms: each thread has whole rows."""
    return gl.BlockedLayout([BLOCK_N // 32, 16], [32, 1], [1, 1], [1, 0])


@triton.constexpr_function
def operand_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)


@aggregate
class KeyTerms:
    """The terms of each block of keys in a ring of keys, and the ones that they are multiplied by."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, term, k_ring, turn):
        """Store the terms of a block, `[BLOCK_N]` float32. The ring has room for the keys of `turn`."""
        BLOCK_N: gl.constexpr = self.tiles.shape[1]
        LAYOUT: gl.constexpr = term_layout(BLOCK_N)
        stage = turn % k_ring.stages
        first = term.to(gl.bfloat16)
        rest = term - first.to(gl.float32)
        # Infinite terms have no rest: it would be NaN.
        rest = gl.where(gl.abs(term) < float("inf"), rest, 0.0)
        second = rest.to(gl.bfloat16)
        third = (rest - second.to(gl.float32)).to(gl.bfloat16)
        col = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        tile = gl.zeros([BLOCK_N, COLS], gl.bfloat16, LAYOUT)
        tile = gl.where(col == 0, first[:, None], tile)
        tile = gl.where(col == 1, second[:, None], tile)
        tile = gl.where(col == 2, third[:, None], tile)
        self.tiles.index(stage).store(tile)
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def add(self, scores, stages: gl.constexpr, turn):
        """Issue the product that adds the terms of `turn` to the scores."""
        mbarrier.wait(self.full.index(turn % stages), (turn // stages) & 1)
        tile = self.tiles.index(turn % stages).permute((1, 0))
        return warpgroup_mma(self.ones, tile, scores, use_acc=True, is_async=True)


@gluon.jit
def make_key_terms(BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Room for the terms of STAGES blocks of keys; the caller has four warps."""
    LAYOUT: gl.constexpr = operand_layout()
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, COLS], LAYOUT)
    ones = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, COLS], LAYOUT).index(0)
    ones.store(gl.full([ROWS, COLS], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
    fence_async_shared()
    return KeyTerms(tiles, make_barriers(STAGES, 1), ones)
