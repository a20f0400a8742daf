"""How the sequences of a call on paged caches fall into classes of rows, with a tile and a rule for splits each.

How a sequence is split follows from its own lengths, the chip and the heads alone, unless a call asks for another rule:
so a sequence's results have the same bits in any batch, on any pages. No framework is imported.
"""

from typing import NamedTuple

from ..archs import NARROW_HEAD_DIM
from .checks import fail, host_number, is_choice, shown
from .configs import cdiv
from .paged_tiles import PagedTiles
from .tiles import HOPPER, HopperTile, PagedTile, Tile

CLASSES = (16, 64, 2**26)
"""Largest number of rows of a sequence that counts as decoding, as having a few queries, or as a prompt. Rows are the
query heads of a key head times the tokens."""

PROMPT_KEYS = 16
"""Least number of keys of a prompt's split for each row of its tile."""

FEW_ROWS = CLASSES[-2]
"""A sequence of at most this many rows is no prompt."""

SPLITS_PER_PROCESSOR = 2
"""Splits per multiprocessor into which a sequence that is alone is cut, so that it occupies the chip."""

LATENT_ROWS, LATENT_KEYS = 64, 64
"""The tile of Hopper's kernel of latent attention."""

FOLDED = 8
"""Number of splits that are folded in their order, the same as in `runtime/device/paged.py`."""

NO_LIMIT = 2**20

MOST_PLANNERS = 32
"""Most programs that plan the tiles of a sequence."""

BALANCED = "balanced"
Splits = int | str | None


class RowClass(NamedTuple):
    """Sequences of a call that run with one tile: those of `first_rows` to `last_rows` rows.

    `most_splits` and `least_keys` are the rule for splits. `num_tiles` and `num_entries` bound the number of tiles and
    of splits, `partial_rows` the rows of a tile. `is_wide`: the head dims are larger than any outside paged calls.
    `planners` programs plan the tiles of each sequence.
    """

    first_rows: int
    last_rows: int
    tile: Tile
    most_splits: int
    least_keys: int
    num_tiles: int
    num_entries: int
    partial_rows: int
    is_wide: bool
    planners: int = 1

    @property
    def record_size(self) -> int:
        """Integers of a record in the first of the class's tables: of a split, or of a block of Hopper's family."""
        return 8 if self.tile.family == HOPPER else 16

    @property
    def has_prompts(self) -> bool:
        """Whether its sequences are prompts: all rows of a tile see most blocks of keys, which need no mask and have a
        loop of their own."""
        return self.last_rows > FEW_ROWS

    @property
    def splits(self) -> bool:
        """Whether some tile may have more than one split."""
        return self.num_entries > self.num_tiles

    @property
    def folds(self) -> bool:
        """Whether a program may take several splits. It needs registers for two sums: of all splits and of the last."""
        return not self.has_prompts and not (self.is_wide and self.tile.block_m > 16)


class PagedSizes(NamedTuple):
    """The sizes of a call that decide its classes.

    `most_keys`: keys that a sequence's pages can hold. `itemsize`, `kv_itemsize`: bytes of an element of q and of the
    caches. `are_alike`: each sequence has the most queries. `hopper_tile`: the tile of sequences of at least
    `hopper_rows` rows, if they run Hopper's family. `asks_decode`: the call gives the tile of sequences with few rows.
    `converts`: sequences of more than 16 rows run Hopper's kernel of latent attention on caches of 8-bit floats.
    """

    packed: bool
    num_seqs: int
    most_queries: int
    total_queries: int
    group: int
    num_kv_heads: int
    most_keys: int
    itemsize: int
    kv_itemsize: int
    head_dim: int
    processors: int
    tiles: PagedTiles
    are_alike: bool = False
    hopper_tile: HopperTile | None = None
    hopper_rows: int = 0
    asks_decode: bool = False
    converts: bool = False

    @property
    def is_wide(self) -> bool:
        """True for head dims that only paged calls have, such as those of latent attention."""
        return self.head_dim > NARROW_HEAD_DIM


def check_splits(op: str, splits: object) -> Splits:
    """The rule for splits of a call, checked."""
    splits = host_number(op, "splits", splits)
    whole = isinstance(splits, int) and not isinstance(splits, bool) and splits >= 1
    if splits is not None and not whole and not is_choice(splits, (BALANCED,)):
        fail(op, "splits", "None, 'balanced', 1 for no split, or an int of keys a split", shown(splits))
    found: Splits = splits  # type: ignore[assignment]
    return found


def row_classes(sizes: PagedSizes, splits: Splits) -> list[RowClass]:
    """The classes that a call's sequences may belong to.

    Packed sequences may have fewer queries than the most, unless they are alike.
    """
    most_rows = sizes.group * sizes.most_queries
    least_rows = sizes.group if sizes.packed and not sizes.are_alike else most_rows
    hopper_rows = CLASSES[-1] + 1 if sizes.hopper_tile is None else max(sizes.hopper_rows, FEW_ROWS + 1)
    found = []
    first_rows = 1
    for most in CLASSES:
        last_rows = min(most, hopper_rows - 1)
        if first_rows <= most_rows and least_rows <= last_rows and first_rows <= last_rows:
            found.append(_row_class(sizes, splits, first_rows, last_rows, _tile(sizes, last_rows)))
        first_rows = last_rows + 1
    if sizes.hopper_tile is not None and hopper_rows <= most_rows:
        found.append(_hopper_class(sizes, sizes.hopper_tile, hopper_rows))
    # The first class starts at one row, so that a sequence with fewer rows than the call says is computed, too.
    return [each._replace(first_rows=1) if number == 0 else each for number, each in enumerate(found)]


def _hopper_class(sizes: PagedSizes, tile: HopperTile, first_rows: int) -> RowClass:
    """Prompts whose programs compute tokens of one query head, and all their keys."""
    of_one, of_all = cdiv(sizes.most_queries, tile.block_m), sizes.total_queries // tile.block_m + sizes.num_seqs
    num_tiles = max(min(sizes.num_seqs * of_one, of_all), 1)
    return RowClass(
        first_rows=first_rows,
        last_rows=CLASSES[-1],
        tile=tile,
        most_splits=1,
        least_keys=0,
        num_tiles=num_tiles,
        num_entries=num_tiles,
        partial_rows=0,
        is_wide=False,
    )


def _most_rows(sizes: PagedSizes) -> int:
    """The rows of the largest tile of the portable kernels that works."""
    if sizes.kv_itemsize == 1:
        # With 64 rows Triton 3.6 multiplies by `wgmma` on Hopper, and then reads converted 8-bit floats wrongly.
        return 32
    # Accumulators of wide float32 rows fill the registers.
    return 16 if sizes.is_wide and sizes.itemsize == 4 else CLASSES[-1]


def _is_large(sizes: PagedSizes, block_m: int) -> bool:
    """Whether a tile has more than 16 wide rows: their sums fill the registers of a program."""
    return sizes.is_wide and block_m > 16


def _tile(sizes: PagedSizes, last_rows: int) -> PagedTile:
    """The tile of sequences with at most `last_rows` rows."""
    tile, most = sizes.tiles.prompts, _most_rows(sizes)
    if sizes.converts and last_rows > CLASSES[0]:
        return tile._replace(block_m=LATENT_ROWS, block_n=LATENT_KEYS)
    if last_rows <= FEW_ROWS:
        # One tile holds all rows of such a sequence, so that its keys are read once.
        tile = sizes.tiles.decode
        block_m = max(tile.block_m, last_rows)
        if _is_large(sizes, block_m):
            # The tile of prompts, if it has as many rows, was chosen for them. Their sums need eight warps.
            prompts = sizes.tiles.prompts
            tile = prompts if prompts.block_m == block_m and not sizes.asks_decode else tile
            tile = tile._replace(num_warps=max(tile.num_warps, 8))
        tile = tile._replace(block_m=block_m)
    elif most < FEW_ROWS < tile.block_m:
        # The tile gets fewer rows below, and so it needs fewer warps.
        tile = tile._replace(num_warps=min(tile.num_warps, 4))
    return tile._replace(block_m=min(tile.block_m, most))


def _row_class(sizes: PagedSizes, splits: Splits, first_rows: int, last_rows: int, tile: PagedTile) -> RowClass:
    block_m, block_n = tile.block_m, tile.block_n
    least, splits_per_processor = tile.keys_per_split, SPLITS_PER_PROCESSOR
    if last_rows > FEW_ROWS or (_is_large(sizes, block_m) and not sizes.asks_decode):
        # The partial sums of a tile's rows, which are merged later, are as large as many keys.
        least = max(least, PROMPT_KEYS * block_m)
    if _is_large(sizes, block_m):
        # A program fills a multiprocessor.
        splits_per_processor = 1
    most = cdiv(splits_per_processor * sizes.processors, sizes.num_kv_heads)
    # Splits are folded in groups of FOLDED.
    most = most // FOLDED * FOLDED or most
    if isinstance(splits, int):
        most, least = (1, least) if splits == 1 else (NO_LIMIT, splits)
    # A split begins where a block does.
    least = cdiv(least, block_n) * block_n
    rows = min(sizes.group * sizes.most_queries, last_rows)
    # Sequences share no tile, so each may end in a tile that is not full.
    of_one, of_all = cdiv(max(rows, 1), block_m), sizes.group * sizes.total_queries // block_m + sizes.num_seqs
    num_tiles = max(min(sizes.num_seqs * of_one, of_all), 1)
    of_tile = cdiv(max(sizes.most_keys, 1), least)
    if splits == BALANCED:
        num_entries = num_tiles * of_tile
    else:
        num_entries = num_tiles + min(num_tiles * (min(of_tile, most) - 1), sizes.num_seqs * most)
    return RowClass(
        first_rows=first_rows,
        last_rows=last_rows,
        tile=tile.tile,
        most_splits=most,
        least_keys=least,
        num_tiles=num_tiles,
        num_entries=num_entries,
        partial_rows=min(block_m, rows),
        is_wide=sizes.is_wide,
        planners=min(of_one, MOST_PLANNERS),
    )
