# SPDX-License-Identifier: Apache-2.0
"""Device functions that Hopper's forward of prompts on paged caches adds to `gl_forward`: keys and values in pages.

TMA copies a block of keys piece by piece: the rows of a piece lie in one page, and its 64 columns are as many as one
copy swizzles. A tile in shared memory consists of blocks of 64 columns, one after the other, so that the pieces in
their order form the tile.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gl import (
    MOST_ROWS,
    SWIZZLE_COLS,
    Ring,
    allocate_tiles,
    count_pieces,
    describe_packed_rows,
    make_barriers,
    make_numbers,
    put_number,
)
from .gl_forward import KeyRing
from .gl_forward_wide import ADDERS
from .gl_versions import aggregate, async_load, reinterpret


@triton.constexpr_function
def piece_rows(PAGE_SIZE, BLOCK_N):
    """The rows of a piece: the largest power of two that divides a page, and at most a block."""
    return min(PAGE_SIZE & -PAGE_SIZE, BLOCK_N)


@gluon.jit
def describe_pages(
    ptr, heads, stride_h, stride_s, COLS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """A descriptor of a cache, copied in pieces.

    Pages are a whole number of rows apart. So the whole cache is one sequence of rows, and the coordinates of
    `PageRows` present one page of it at a time to the hardware.
    """
    return describe_packed_rows(ptr, heads, stride_h, stride_s, COLS, piece_rows(PAGE_SIZE, BLOCK_N), SWIZZLE_COLS)


@aggregate
class PageRows:
    """The keys of one head of a sequence whose page table begins at `pages`.

    Keys from `end` on, and pieces that lie wholly before key `first`, are not copied: zeros take their place.
    """

    pages: gl.tensor
    head: gl.tensor
    first: gl.tensor
    end: gl.tensor

    @gluon.jit
    def page(self, key, PAGE_SIZE: gl.constexpr):
        """The page of a key, or of the nearest one that is copied."""
        nearest = gl.maximum(gl.minimum(key, self.end - 1), self.first)
        return gl.load(self.pages + nearest // PAGE_SIZE, mask=self.first < self.end, other=0)

    @gluon.jit
    def coords(self, page, page_rows, key, slot, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
        """TMA's coordinates, but for the column, of the piece that begins with `key`, in slot `slot` of page `page`.

        Pages begin `page_rows` rows apart. The last page of a sequence ends where the sequence ends.
        """
        length = gl.maximum(gl.minimum(self.end - (key - slot), PAGE_SIZE), 0)
        length = gl.where(key + ROWS <= self.first, 0, length)
        return page * page_rows + length, self.head, MOST_ROWS - length + slot


@aggregate
class PagedRing:
    """A ring buffer whose tiles are copied in `pieces`, which are the same memory. Pages are `page_rows` rows apart.

    The first `column_blocks` blocks of 64 columns of a tile are copied. Nothing reads the others.
    """

    ring: Ring
    pieces: gl.shared_memory_descriptor
    page_rows: gl.tensor
    column_blocks: gl.constexpr

    @gluon.jit
    def send(self, desc, rows, start_n, page, turn, PAGE_SIZE: gl.constexpr, FIRST_COL: gl.constexpr = 0):
        """Copy the block of keys that begins at `start_n`, on `page`, from column FIRST_COL on, once its stage is
        empty."""
        ring = self.ring
        stage, lap = turn % ring.stages, turn // ring.stages
        BLOCK_N: gl.constexpr = ring.tiles.shape[-2]
        ROWS: gl.constexpr = desc.block_type.shape[-2]
        COUNT: gl.constexpr = BLOCK_N // ROWS
        mbarrier.wait(ring.empty.index(stage), (lap & 1) ^ 1)
        full = ring.full.index(stage)
        mbarrier.expect(full, COUNT * self.column_blocks * desc.block_type.nbytes)
        first_piece = stage * (COUNT * (ring.tiles.shape[-1] // SWIZZLE_COLS))
        for i in gl.static_range(COUNT):
            key = start_n + i * ROWS
            # Page numbers are loaded one piece ahead: if those of all pieces were, the kernel would spill.
            next_page = rows.page(key + ROWS, PAGE_SIZE) if i + 1 < COUNT else page
            # A block of whole pages begins at the start of a page: then the compiler knows the slots.
            slot = i * ROWS % PAGE_SIZE if BLOCK_N % PAGE_SIZE == 0 else key % PAGE_SIZE
            end, head, row = rows.coords(page, self.page_rows, key, slot, PAGE_SIZE, ROWS)
            for c in gl.static_range(self.column_blocks):
                piece = self.pieces.index(first_piece + (c * COUNT + i))
                async_load(desc, (MOST_ROWS, end, head, row, FIRST_COL + c * SWIZZLE_COLS), full, piece)
            page = next_page


@gluon.jit
def make_paged_ring(
    desc, page_rows, BLOCK_N: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr, READERS: gl.constexpr, HEAD_DIM: gl.constexpr = None,
):  # fmt: skip
    """A ring buffer of tiles `[BLOCK_N, COLS]`, as `make_ring` makes one, copied in pieces of `desc`.

    HEAD_DIM columns of a head are in the tiles, COLS if it is None.
    """
    COLUMN_BLOCKS: gl.constexpr = count_pieces(COLS, COLS if HEAD_DIM is None else HEAD_DIM, SWIZZLE_COLS)
    COUNT: gl.constexpr = STAGES * (BLOCK_N // desc.block_type.shape[-2]) * (COLS // SWIZZLE_COLS)
    pieces = allocate_tiles(desc, COUNT)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, COLS], desc.dtype)
    tiles = reinterpret(pieces, desc.dtype, [STAGES, BLOCK_N, COLS], LAYOUT)
    ring = Ring(tiles, make_barriers(STAGES, ARRIVALS), make_barriers(STAGES, READERS), STAGES, 1)
    return PagedRing(ring, pieces, page_rows, COLUMN_BLOCKS)


@aggregate
class PagedKeyRing:
    """The producer's side of a `KeyRing`, which fills it from pages."""

    k: PagedRing
    v: PagedRing
    blocks: gl.shared_memory_descriptor

    @gluon.jit
    def send(
        self, k_desc, v_desc, rows, start_n, v_rows, v_start, turn, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr
    ):
        """As `KeyRing.send`, from pages.

        The number of the first page of keys is loaded ahead of the wait, which brings the other numbers into the cache.
        Those of the values' pages were loaded a turn ago.
        """
        k_page = rows.page(start_n, PAGE_SIZE)
        ring = self.k.ring
        stage, lap = turn % ring.stages, turn // ring.stages
        mbarrier.wait(ring.empty.index(stage), (lap & 1) ^ 1)
        put_number(self.blocks, stage, start_n // BLOCK_N)
        mbarrier.arrive(ring.full.index(stage), count=1)
        self.k.send(k_desc, rows, start_n, k_page, turn, PAGE_SIZE)
        self.send_values(v_desc, v_rows, v_start, turn, PAGE_SIZE)

    @gluon.jit
    def send_values(self, v_desc, v_rows, v_start, turn, PAGE_SIZE: gl.constexpr):
        """Copy the values of a block."""
        self.v.send(v_desc, v_rows, v_start, v_rows.page(v_start, PAGE_SIZE), turn, PAGE_SIZE)

    @gluon.jit
    def read(self):
        """The `KeyRing` that consumers read."""
        return KeyRing(self.k.ring, self.v.ring, self.blocks)


@gluon.jit
def make_paged_key_ring(
    k_desc, v_desc, k_page_rows, v_page_rows,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Rings for PARTS warpgroups, as `make_key_ring` makes them."""
    k_ring = make_paged_ring(k_desc, k_page_rows, BLOCK_N, BLOCK_D, STAGES, 2, PARTS, HEAD_DIM)
    v_ring = make_paged_ring(v_desc, v_page_rows, BLOCK_N, BLOCK_DV, STAGES, 1, PARTS, HEAD_DIM_V)
    return PagedKeyRing(k_ring, v_ring, make_numbers(STAGES))


@gluon.jit
def make_wide_paged_ring(
    k_desc, v_desc, k_page_rows, v_page_rows,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Rings of keys, which one warpgroup reads, and of values, which ADDERS warpgroups read."""
    k_ring = make_paged_ring(k_desc, k_page_rows, BLOCK_N, BLOCK_D, STAGES, 2, 1, HEAD_DIM)
    v_ring = make_paged_ring(v_desc, v_page_rows, BLOCK_N, BLOCK_DV, STAGES, 1, ADDERS, HEAD_DIM_V)
    return PagedKeyRing(k_ring, v_ring, make_numbers(STAGES))
