# SPDX-License-Identifier: Apache-2.0
# Gluon has no starred tuples.
# ruff: noqa: RUF005
"""Device functions that fill the ring of latent attention's keys from a cache of 8-bit floats.

Tensor cores of Hopper multiply 8-bit floats by 8-bit floats alone, and queries have 16 bits. So the producer is a
warpgroup that loads keys to registers and stores them as float16: every 8-bit float is also a float16 number. It loads
a block in chunks of 64 columns, several chunks ahead, as words of four columns: a loop that carried single bytes would
split and join every word.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gl import SWIZZLE_COLS, Ring, make_barriers
from .gl_forward import make_rows
from .gl_latent import KEYS, REST, LatentRing
from .gl_versions import aggregate, reinterpret

# The chunks that are loaded before they are needed: 4 KB each.
AHEAD = gl.constexpr(4)


@triton.constexpr_function
def chunk_layout():
    """The layout of 64 keys and 64 columns in 16 words: 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@triton.constexpr_function
def piece_layout():
    """The layout of a converted chunk: the same threads have the same columns."""
    return gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])


@triton.constexpr_function
def chunk_column(i, HEAD_DIM_V):
    """The first column of chunk `i` of a block: in the order in which scores need its parts.

    >>> [chunk_column(i, 256) for i in range(5)]
    [0, 64, 256, 128, 192]
    """
    half = HEAD_DIM_V // 2 // 64
    return 64 * i if i < half else HEAD_DIM_V if i == half else 64 * (i - 1)


@gluon.jit
def as_words(ptr):
    """A pointer to 8-bit floats, cast to a pointer to words of four."""
    return ptr.to(gl.pointer_type(gl.int32), bitcast=True)


# The four numbers of a word as float16: of float8_e4m3fn, and of float8_e5m2, which is the upper byte of a float16.
FROM_E4M3 = gl.constexpr(
    "{.reg .b16 a, b; .reg .b32 t, u; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b; "
    "mov.b32 {$0, $1}, t; mov.b32 {$2, $3}, u;}"
)
FROM_E5M2 = gl.constexpr(
    "{.reg .b32 t, u; prmt.b32 t, $4, 0, 0x1404; prmt.b32 u, $4, 0, 0x3424; mov.b32 {$0, $1}, t; mov.b32 {$2, $3}, u;}"
)


@gluon.jit
def to_halves(words, MANTISSA: gl.constexpr):
    """Words `[KEYS, n]` of four 8-bit floats as float16 `[KEYS, 4 n]`."""
    CONVERT: gl.constexpr = FROM_E4M3 if MANTISSA == 3 else FROM_E5M2
    a, b, c, d = gl.inline_asm_elementwise(
        CONVERT, "=h,=h,=h,=h,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


@gluon.jit
def head_scale(scale, head, KIND: gl.constexpr):
    """The scale by which a head's numbers in a cache are multiplied: 1 if there is none, or one for each token."""
    if KIND == "number":
        return gl.cast(scale, gl.float32)
    elif KIND == "head":
        return gl.load(scale + head).to(gl.float32)
    else:
        return gl.cast(1.0, gl.float32)


@gluon.jit
def value_unit(scale, head, KIND: gl.constexpr):
    """The first unit of the sums of values: their scale, or close to 0 if each token has a scale of its own."""
    return gl.cast(1e-30, gl.float32) if KIND == "token" else head_scale(scale, head, KIND)


@aggregate
class ByteRows:
    """The keys of one head of a sequence whose page table begins at `pages`, in a cache of 8-bit floats.

    `base`: the first word of head `head` of `num_heads`. Slots are `stride` words apart, and pages `page_rows` slots.
    Keys before `first` and from `end` on are not read: zeros take their place.
    """

    base: gl.tensor
    head: gl.tensor
    num_heads: gl.tensor
    pages: gl.tensor
    page_rows: gl.tensor
    stride: gl.tensor
    first: gl.tensor
    end: gl.tensor

    @gluon.jit
    def keys(self, start_n):
        return start_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, chunk_layout()))

    @gluon.jit
    def are_read(self, start_n):
        key = self.keys(start_n)
        return (key >= self.first) & (key < self.end)

    @gluon.jit
    def load_pages(self, start_n, PAGE_SIZE: gl.constexpr):
        """The page of each key of a block; page 0 of those that are not read."""
        return gl.load(self.pages + self.keys(start_n) // PAGE_SIZE, mask=self.are_read(start_n), other=0)

    @gluon.jit
    def offsets(self, start_n, pages, PAGE_SIZE: gl.constexpr):
        """Where the keys of a block begin, in words from `base`."""
        slots = pages.to(gl.int64) * self.page_rows + self.keys(start_n) % PAGE_SIZE
        return slots * self.stride

    @gluon.jit
    def load_chunk(self, start_n, offsets, i: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr):
        """Chunk `i` of the block that begins at `start_n`."""
        FIRST_COL: gl.constexpr = chunk_column(i, HEAD_DIM_V)
        col = FIRST_COL // 4 + gl.arange(0, SWIZZLE_COLS // 4, layout=gl.SliceLayout(0, chunk_layout()))
        mask = self.are_read(start_n)[:, None]
        if FIRST_COL + SWIZZLE_COLS > HEAD_DIM:
            mask = mask & (col < HEAD_DIM // 4)[None, :]
        return gl.load(self.base + offsets[:, None] + col[None, :], mask=mask, other=0)

    @gluon.jit
    def load_scales(self, scale, start_n, pages, KIND: gl.constexpr, PAGE_SIZE: gl.constexpr):
        """The scales of the tokens of a block; 0 of those that are not read, and if tokens have none of their own."""
        found = gl.zeros([KEYS], gl.float32, gl.SliceLayout(1, chunk_layout()))
        if KIND == "token":
            slots = pages.to(gl.int64) * PAGE_SIZE + self.keys(start_n) % PAGE_SIZE
            places = slots * self.num_heads + self.head
            found = gl.load(scale + places, mask=self.are_read(start_n), other=0.0).to(gl.float32)
        return found


@aggregate
class ByteRing:
    """The producer's side of a `LatentRing`, which fills it with converted keys. The pieces of each part are the memory
    of its tiles, in columns of 64."""

    ring: LatentRing
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    mantissa: gl.constexpr

    @gluon.jit
    def read(self):
        """The `LatentRing` that consumers read."""
        return self.ring

    @gluon.jit
    def fill(
        self, rows, scales, keys_begin, keys_end, turn, K_SCALE: gl.constexpr, V_SCALE: gl.constexpr,
        PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    ):  # fmt: skip
        """Store the blocks of a split, an even number of them; returned is the next turn.

        While a chunk is stored, the chunk AHEAD chunks later is being loaded. Page numbers are loaded a block earlier.
        """
        CHUNKS: gl.constexpr = HEAD_DIM_V // SWIZZLE_COLS + 1
        HALF: gl.constexpr = CHUNKS // 2
        k_scale, v_scale = scales
        pages = rows.load_pages(keys_begin, PAGE_SIZE)
        offsets = rows.offsets(keys_begin, pages, PAGE_SIZE)
        k_scales = rows.load_scales(k_scale, keys_begin, pages, K_SCALE, PAGE_SIZE)
        v_scales = rows.load_scales(v_scale, keys_begin, pages, V_SCALE, PAGE_SIZE)
        pages = rows.load_pages(keys_begin + KEYS, PAGE_SIZE)
        loading = ()
        for i in gl.static_range(AHEAD):
            loading = loading + (rows.load_chunk(keys_begin, offsets, i, HEAD_DIM, HEAD_DIM_V),)  # type: ignore[assignment]
        last = keys_begin + gl.cdiv(keys_end - keys_begin, 2 * KEYS) * (2 * KEYS)
        for start_n in range(keys_begin, last, KEYS):
            next_n = start_n + KEYS
            stage, phase = turn % 2, (turn // 2) & 1
            for i in gl.static_range(CHUNKS):
                if i + AHEAD == CHUNKS:
                    offsets, next_pages = rows.offsets(next_n, pages, PAGE_SIZE), pages
                    pages = rows.load_pages(next_n + KEYS, PAGE_SIZE)
                words = loading[0]  # type: ignore[misc]  # it has AHEAD elements
                if i + AHEAD < CHUNKS:
                    new = rows.load_chunk(start_n, offsets, i + AHEAD, HEAD_DIM, HEAD_DIM_V)
                else:
                    new = rows.load_chunk(next_n, offsets, i + AHEAD - CHUNKS, HEAD_DIM, HEAD_DIM_V)
                loading = loading[1:] + (new,)  # type: ignore[assignment]
                halves = to_halves(words, self.mantissa)
                if i < HALF:
                    put_piece(self.ring.left, self.left, halves, stage, phase, i, HALF)
                elif i == HALF:
                    # `left` was released after the scales of the block before it had been read.
                    if K_SCALE == "token":
                        self.ring.scales.index(stage).store(k_scales)
                    if V_SCALE == "token":
                        self.ring.scales.index(2 + stage).store(v_scales)
                    put_piece(self.ring.rest, self.rest, halves, stage, phase, 0, 1)
                else:
                    put_piece(self.ring.right, self.right, halves, stage, phase, i - HALF - 1, HALF)
            k_scales = rows.load_scales(k_scale, next_n, next_pages, K_SCALE, PAGE_SIZE)
            v_scales = rows.load_scales(v_scale, next_n, next_pages, V_SCALE, PAGE_SIZE)
            turn += 1
        return turn


@gluon.jit
def put_piece(ring, pieces, halves, stage, phase, i: gl.constexpr, COUNT: gl.constexpr):
    """Store piece `i` of the COUNT pieces of a tile: the first when its place is free. The last one says that the tile
    is there."""
    if i == 0:
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    pieces.index(stage * COUNT + i).store(gl.convert_layout(halves, piece_layout(), assert_trivial=True))
    if i + 1 == COUNT:
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def make_part(COLS: gl.constexpr):
    """A ring buffer of two tiles `[KEYS, COLS]`, and the same memory in pieces of 64 columns."""
    PIECE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, SWIZZLE_COLS], gl.float16)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], gl.float16)
    pieces = gl.allocate_shared_memory(gl.float16, [2 * (COLS // SWIZZLE_COLS), KEYS, SWIZZLE_COLS], PIECE)
    tiles = reinterpret(pieces, gl.float16, [2, KEYS, COLS], TILE)
    return Ring(tiles, make_barriers(2, 1), make_barriers(2, 1), 2, 1), pieces


@gluon.jit
def make_byte_ring(DTYPE: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """A ring for keys of an 8-bit DTYPE."""
    left, left_pieces = make_part(HEAD_DIM_V // 2)
    right, right_pieces = make_part(HEAD_DIM_V // 2)
    rest, rest_pieces = make_part(REST)
    CONVERTED: gl.constexpr = True
    ring = LatentRing(left, right, rest, make_rows(4), CONVERTED)
    MANTISSA: gl.constexpr = DTYPE.fp_mantissa_width
    return ByteRing(ring, left_pieces, right_pieces, rest_pieces, MANTISSA)
