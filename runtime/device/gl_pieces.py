"""Tiles of columns that are no power of two, in views of a power of two of columns each.

A tile of 192 columns is stored in three pieces of 64. A product reads a view of a power of two of columns. Triton
before 3.8 lets a view be larger than the pieces: its last columns are never read. Later versions refuse such a view,
so that these tiles have several, one for each group of pieces. Such a view is a part of the allocation, seen as groups
of that size.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gl_versions import VIEWS_GROW, aggregate


@triton.constexpr_function
def piece_groups(PIECES, GROW=VIEWS_GROW):
    """The pieces of a tile in groups, each of which has a view: of each group its first piece, and how many.

    GROW: whether a view may be larger than its pieces.

    >>> piece_groups(3, True), piece_groups(3, False), piece_groups(7, False), piece_groups(8, False)
    (((0, 3),), ((0, 2), (2, 1)), ((0, 4), (4, 2), (6, 1)), ((0, 8),))
    """
    if GROW:
        return ((0, PIECES),)
    found, first = [], 0
    while first < PIECES:
        count = 1 << (PIECES - first).bit_length() - 1
        found.append((first, count))
        first += count
    return tuple(found)


@triton.constexpr_function
def group_of(GROUPS, PIECE):
    """The number of the group that has a piece.

    >>> [group_of(((0, 4), (4, 2), (6, 1)), i) for i in range(7)]
    [0, 0, 0, 0, 1, 1, 2]
    """
    return max(i for i, group in enumerate(GROUPS) if group[0] <= PIECE)


@triton.constexpr_function
def piece_slots(STAGES, PIECES, GROW=VIEWS_GROW):
    """The pieces to allocate for STAGES tiles: so many that all of them can be seen as groups of each size.

    >>> piece_slots(2, 3, True), piece_slots(2, 3, False), piece_slots(1, 3, False), piece_slots(2, 5, False)
    (6, 6, 4, 12)
    """
    COUNT = piece_groups(PIECES, GROW)[0][1]
    return STAGES * PIECES if GROW else -(-STAGES * PIECES // COUNT) * COUNT


@aggregate
class GroupedTile:
    """A tile of `shape`, stored in `pieces` of `piece_cols` columns. `groups` has a view for each of `piece_groups`."""

    groups: gl.tuple
    dtype: gl.constexpr
    shape: gl.tuple
    pieces: gl.constexpr
    piece_cols: gl.constexpr

    @gluon.jit
    def slice(self, FIRST: gl.constexpr, COLS: gl.constexpr, dim: gl.constexpr):
        """COLS columns from FIRST on, all of one group."""
        GROUPS: gl.constexpr = piece_groups(self.pieces)
        GROUP: gl.constexpr = group_of(GROUPS, FIRST // self.piece_cols)
        return self.groups[GROUP].slice(FIRST - GROUPS[GROUP][0] * self.piece_cols, COLS, dim=dim)
