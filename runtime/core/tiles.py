"""The tile of a kernel, and the records that `_runtime/archs.py` and `_runtime/kernels.py` consist of: tiles, and the
facts that decide between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PORTABLE, HOPPER = "portable", "hopper"
"""The families of kernels."""


class Tile(NamedTuple):
    """Block sizes and launch options of one kernel of the portable family."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def family(self) -> str:
        """The family of the kernel."""
        return PORTABLE


class PagedTile(NamedTuple):
    """Block sizes, launch options and splits of a kernel on paged caches.

    `keys_per_split`: no split of a sequence has fewer keys, rounded up to whole blocks.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    keys_per_split: int

    @property
    def tile(self) -> Tile:
        """The block sizes and launch options, without the splits."""
        return Tile(*self[:4])


class HopperTile(Tile):
    """A tile of Hopper's family. `num_warps` counts the warps of the warpgroups that share its rows, or its keys; each
    of the ring buffers of keys and values has `num_stages` stages.
    """

    __slots__ = ()

    @property
    def family(self) -> str:
        return HOPPER


class MaskSizes(NamedTuple):
    """Sizes in a mask that a call gives, and that its kernels and tiles depend on. None stands for those of the
    variant's examples.

    Attributes:
        band_keys: keys of the band that a row sees.
        run_unit: the largest power of two that divides the runs of positions whose blocks a tensor of the mask chooses;
            0 if one of them is no positive number.
    """

    band_keys: int | None = None
    run_unit: int | None = None


NO_SIZES = MaskSizes()

Passes = Mapping[str, Mapping[int, Tile]]
"""Pass -> largest head_dim served -> tile."""

PagedPasses = Mapping[str, Mapping[int, PagedTile]]
"""As `Passes`, for kernels on paged caches."""


@dataclass(frozen=True, kw_only=True)
class ArchTiles:
    """Default tiles of an architecture.

    `half`, `float32`: for inputs of these dtypes. `short`: for 16-bit inputs of short sequences, by the longest
    sequence served. `paged_half`, `paged_float32`: for kernels on paged caches, by the dtype of queries.
    """

    half: Passes
    float32: Passes
    short: Mapping[int, Passes]
    paged_half: PagedPasses
    paged_float32: PagedPasses


@dataclass(frozen=True, kw_only=True)
class HopperFamily:
    """Tiles of Hopper's family, and the lengths from which it is faster than the portable family.

    Every key of a mapping is the number of columns of a tile: those of q and k or those of v, whichever are more. Every
    length is a number of keys. "Alike": all rows attend to the same keys.

    Attributes:
        arch: the only chip that runs these kernels.
        launch_warps: warps that a kernel is launched with: one warpgroup, which starts the others.
        least_head_dim: the smallest head_dim.
        long_forward_tile: of long dense calls at 64 columns, if products compute whole scores and every query
            attends to one key range that starts at key 0.
        mixed_forward_tile: if q and k have 129 to 192 columns, and v at most 128.
        wide_forward_tile: of the forward of more columns than `forward_tiles` have, up to `most_columns`.
        least_half: the smallest head_dim of what is added up in two halves there.
        split_tiles: of the backward of so many columns, by pass: each gradient has a launch of its own.
        scored_rows: most rows of a backward tile, unless the score is the scaled product or, in a dense call, a capped
            one.
        narrow_forward_from: length from which on the forward at 64 columns is the faster one.
        packed_forward_from: average length from which on the forward of packed calls is the faster one.
        fused_backward_from: length from which on one kernel for all gradients is faster than a portable dq beside it.
        packed_fused_backward_from: the same for packed sequences, by their average length.
        mixed_backward_from: length from which the backward is the faster one if the wider of k and v has 129 to 192
            columns, and the other at most 128.
    """

    arch: str
    launch_warps: int
    least_head_dim: int
    forward_tiles: Mapping[int, HopperTile]
    long_forward_tile: HopperTile
    mixed_forward_tile: HopperTile
    wide_forward_tile: HopperTile
    most_columns: int
    least_half: int
    long_forward_from: int
    long_forward_from_if_alike: int
    backward_tiles: Mapping[int, HopperTile]
    split_tiles: Mapping[str, HopperTile]
    distance_tiles: Mapping[int, HopperTile]
    scored_rows: int
    narrow_forward_from: int
    narrow_forward_from_if_alike: int
    narrow_forward_from_if_overlapped: int
    packed_forward_from: Mapping[int, int]
    fused_backward_from: Mapping[int, int]
    packed_fused_backward_from: Mapping[int, int]
    mixed_backward_from: int


@dataclass(frozen=True, kw_only=True)
class VariantTraits:
    """What the generator derived from a variant's mask, score and gradients.

    Attributes:
        score_is_scaled_product: the score is the scaled product of query and key: no score expression, no dropout.
        products_add_terms: the score is the scaled product and a term of each key, such as a log-decay, which Hopper's
            forward adds by products; no dropout.
        score_is_capped: the score is a number times the tanh of a multiple of the product, and nothing else has a
            gradient.
        score_is_cheap: the score expression calls no function and reads nothing per key or pair; no dropout.
        score_is_overlapped: Hopper's forward computes a costly score beside its exponentials: a cap or a dropout.
        keys_start_at_zero: every query attends to one contiguous key range that starts at key 0.
        rows_are_alike: all rows attend to the same keys, so the mask cuts no tile.
        keys_are_runs: a row attends to contiguous key ranges, which no list of blocks describes.
        bands_are_bits: a row's keys are a band that follows from distances alone, which Hopper's forward masks by the
            bits of a word.
        band_keys: keys of the band that a row sees, with the examples of scalars that it depends on; None if no number
            of keys limits what a row sees.
        large_stages: most stages of default tiles of 128 by 128 with more than 64 columns, if elements are read for
            pairs of a query and a key, which takes shared memory.
        run_unit: if a tensor of the mask chooses blocks, runs of queries by runs of keys: the largest power of two that
            divides the runs, with the examples of scalars; 0 if none does.
        run_lengths: the lengths of these runs, numbers and names of scalars.
        fused_modes: modes of calls in which one kernel of Hopper's family can compute dq, dk and dv.
        atomic_modes: modes of calls in which a gradient is added with atomics, in any order.
        hopper_reads_pages: prompts on paged caches have a kernel of Hopper's family.
        hopper_reads_latents: latent attention on paged caches has a kernel of Hopper's family.
        splits_gradients: Hopper's family has a backward for more than 256 columns.
        takes_fp8: calls of float8_e4m3fn have a kernel of Hopper's family.
    """

    score_is_scaled_product: bool
    products_add_terms: bool
    score_is_capped: bool
    score_is_cheap: bool
    score_is_overlapped: bool
    keys_start_at_zero: bool
    rows_are_alike: bool
    keys_are_runs: bool
    bands_are_bits: bool
    band_keys: int | None
    large_stages: int | None
    run_unit: int
    run_lengths: tuple[int | str, ...]
    fused_modes: tuple[str, ...]
    atomic_modes: tuple[str, ...]
    hopper_reads_pages: bool
    hopper_reads_latents: bool
    splits_gradients: bool
    takes_fp8: bool

    @property
    def suits_long_tile(self) -> bool:
        """Whether long dense calls at 64 columns run with the family's `long_forward_tile`."""
        return (self.score_is_scaled_product or self.products_add_terms) and self.keys_start_at_zero
