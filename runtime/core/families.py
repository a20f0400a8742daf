"""The families of kernels: the portable family runs on every chip, Hopper's family, written in Gluon, only on sm_90."""

from collections.abc import Mapping

from ..archs import HOPPER_FAMILY
from ..kernels import KERNEL_HASHES, TRAITS
from .tiles import HOPPER, NO_SIZES, PORTABLE, MaskSizes
from .tiles import HopperTile as HopperTile
from .tiles import Tile as Tile
from .tuned import HOPPER_DKDV

FAMILIES = (PORTABLE, HOPPER)
INTERPRETER = "the CPU"
"""Takes the place of the architecture if there is no chip: for kernels in Triton's interpreter, and for references."""

HOPPER_WARPS = HOPPER_FAMILY.launch_warps
"""Warps that a kernel of Hopper's family is launched with: one warpgroup, which starts the others."""

FORWARD, BACKWARD = "hopper_fwd", "hopper_bwd"
"""Names of the kernels of Hopper's family among the hashes."""

_WIDE_FORWARD, _WIDE_BACKWARD, _DELTA = "hopper_fwd_wide", "hopper_bwd_wide", "hopper_delta"
_SPLIT = ("hopper_split_keys", "hopper_split_rows")

_RUNS = "runs_"
"""Prefix of the kernels of packed calls that compute the runs of segmented calls."""

GAIN = 0.99
"""Other kernels overrule the rule if they take less than this part of the time of the rule's kernels: a smaller
difference is noise."""


def tile_columns(head_dim: int) -> int:
    """Columns of a tile of Hopper's family: a power of two, and at least the 64 that one TMA copy swizzles."""
    return max(1 << (head_dim - 1).bit_length(), 64)


def _widest(head_dims: tuple[int, int]) -> int:
    """Columns of the wider tile of a call: those of q and k, or those of v."""
    return max(tile_columns(head_dim) for head_dim in head_dims)


def has_wide_tile(head_dims: tuple[int, int]) -> bool:
    """Whether the accumulators of dk and dv are so wide that one warpgroup holds dk and the other dv: the backward then
    has a kernel of its own."""
    return _widest(head_dims) > 128


def has_split_tile(head_dims: tuple[int, int]) -> bool:
    """Whether a tile is so wide that two warpgroups share its columns: the forward then has a kernel of its own, and in
    the backward each gradient."""
    return _widest(head_dims) not in HOPPER_FAMILY.forward_tiles


def hopper_tile(op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> HopperTile | str:
    """The tile of a call's forward in Hopper's family, or the reason why that family cannot run the call.

    Args:
        head_dims: of q and of v. length: number of keys of a sequence.
    """
    traits, family = TRAITS[op], HOPPER_FAMILY
    reason = forward_refusal(arch, dtype, head_dims, length)
    if reason:
        return reason
    if has_split_tile(head_dims):
        return family.wide_forward_tile
    cols = _widest(head_dims)
    long_from = family.long_forward_from_if_alike if traits.rows_are_alike else family.long_forward_from
    if mode == "dense" and cols == 64 and length >= long_from and traits.suits_long_tile:
        return family.long_forward_tile
    head_dim, head_dim_v = head_dims
    # The terms of keys do not fit beside the mixed tile.
    if head_dim_v <= 128 < head_dim <= 192 and not traits.products_add_terms:
        return family.mixed_forward_tile
    return family.forward_tiles[cols]


def backward_tiles(
    op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int
) -> dict[str, HopperTile]:
    """The tiles of a call's backward in Hopper's family, by pass; empty if that family cannot run the call.

    There is a tile for dq beside that for dkdv only if one kernel computes all three gradients, or each has its own.
    """
    if backward_refusal(op, arch, dtype, head_dims, length):
        return {}
    if has_split_tile(head_dims):
        return dict(HOPPER_FAMILY.split_tiles)
    tile, traits = HOPPER_FAMILY.backward_tiles[_widest(head_dims)], TRAITS[op]
    if not traits.score_is_scaled_product and not (traits.score_is_capped and mode == "dense"):
        tile = tile._replace(block_m=min(tile.block_m, HOPPER_FAMILY.scored_rows))
    return dict.fromkeys(("dkdv", "dq") if mode in traits.fused_modes else ("dkdv",), tile)


def forward_refusal(arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> str:
    """Why kernels of Hopper's family cannot run the forward of a call; empty if they can."""
    reason = refusal(arch, dtype, head_dims, length, HOPPER_FAMILY.most_columns)
    return reason or _refusal_of_halves(head_dims, head_dims[1])


def backward_refusal(op: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> str:
    """Why kernels of Hopper's family cannot run the backward of a call; empty if they can."""
    reason = refusal(arch, dtype, head_dims, length, HOPPER_FAMILY.most_columns)
    reason = reason or _refusal_of_halves(head_dims, *head_dims)
    if not reason and has_split_tile(head_dims) and not TRAITS[op].splits_gradients:
        columns = max(HOPPER_FAMILY.forward_tiles)
        reason = f"beyond {columns} columns its backward serves no score but the scaled product, and no dropout"
    return reason


def refusal(
    arch: str, dtype: str, head_dims: tuple[int, int], length: int, most: int = max(HOPPER_FAMILY.forward_tiles)
) -> str:
    """Why kernels of Hopper's family cannot run a call; empty if they can. `most`: the largest head_dim they serve."""
    if arch != HOPPER_FAMILY.arch:
        return f"its kernels run on {HOPPER_FAMILY.arch}, not on {arch}"
    if dtype == "float32":
        return "its kernels take float16 and bfloat16, not float32"
    least = HOPPER_FAMILY.least_head_dim
    for head_dim in head_dims:
        if head_dim > most:
            return f"its tiles hold a head_dim of at most {most}, not {head_dim}"
        if head_dim < least:  # the portable kernels have narrower tiles
            return f"its tiles of {tile_columns(head_dim)} columns need a head_dim of at least {least}, not {head_dim}"
    if length == 0:
        return "a copy by TMA needs at least one key"
    return ""


def _refusal_of_halves(head_dims: tuple[int, int], *added_up: int) -> str:
    """Why two warpgroups cannot share the columns that are added up; empty if they can, or need not."""
    least = HOPPER_FAMILY.least_half
    if has_split_tile(head_dims) and min(added_up) < least:
        most = max(HOPPER_FAMILY.forward_tiles)
        return f"beside a head_dim above {most} it needs another one of at least {least}, not {min(added_up)}"
    return ""


LEAST_TILE = 32
"""Blocks of a mask that are shorter than this are not worth a tile of their own."""

WHOLE_RUN = 128
"""Hopper's tiles lie inside of runs of so many positions, whose blocks a tensor of the mask chooses: they have at most
as many rows and keys, but for the long tile, which serves only masks that leave each row the keys from key 0 on."""


def run_unit(op: str, sizes: MaskSizes = NO_SIZES) -> int:
    """The largest power of two that divides the runs of positions whose blocks a tensor of the mask chooses; 0 if none
    does."""
    return TRAITS[op].run_unit if sizes.run_unit is None else sizes.run_unit


def fits_runs(pass_name: str, tile: Tile, unit: int) -> Tile:
    """The tile of a pass, or a smaller one that lies inside of runs of positions of `unit` each.

    Each pair of a tile that lies across runs has to be masked, and some of them are computed in vain.

    >>> fits_runs("dq", Tile(128, 32, 8, 2), 64)
    Tile(block_m=64, block_n=32, num_warps=4, num_stages=2)
    """
    block_m, block_n = min(tile.block_m, unit), min(tile.block_n, unit)
    if unit < LEAST_TILE or (block_m, block_n) == tile[:2]:
        return tile
    # A warp computes at least 16 rows of a product: of o or dq, or of dk and dv.
    num_warps = min(tile.num_warps, (block_n if pass_name == "dkdv" else block_m) // 16)
    return Tile(block_m, block_n, num_warps, tile.num_stages)


def is_faster(op: str, mode: str, head_dims: tuple[int, int], length: int, unit: int = 0) -> bool:
    """True if measurements show that Hopper's forward is faster as a rule. `unit`: as in `run_unit`.

    Rows must attend to key ranges, or to blocks that are as long as tiles. In packed calls the sequences must have a
    least average length. At 64 columns the score costs as much as the products, so it must be cheap or overlapped; in
    dense calls of 64 columns the ranges must also begin at key 0 or be bands, and a sequence must have a least length.
    Beyond 256 columns it is faster in all calls: its tiles are as short as the portable ones.
    """
    traits, family = TRAITS[op], HOPPER_FAMILY
    columns = _widest(head_dims)
    if has_split_tile(head_dims):
        return True
    is_narrow = columns == 64
    has_keys = traits.keys_are_runs or unit >= WHOLE_RUN
    if not has_keys or (is_narrow and not traits.score_is_cheap and not traits.score_is_overlapped):
        return False
    if mode == "packed":
        return length >= family.packed_forward_from[columns]
    if mode == "segmented" or not is_narrow:
        return True
    least = family.narrow_forward_from_if_alike if traits.rows_are_alike else family.narrow_forward_from
    if not traits.score_is_cheap:
        least = family.narrow_forward_from_if_overlapped
    return (traits.keys_start_at_zero or traits.bands_are_bits or unit >= WHOLE_RUN) and length >= least


def backward_is_faster(op: str, mode: str, head_dims: tuple[int, int], length: int, unit: int = 0) -> bool:
    """True if Hopper's kernels for dk and dv are faster as a rule, with dq in the same kernel or in one of its own.

    Rows must attend to key ranges, or to blocks that are as long as tiles. In dense calls of 128 columns, lists may
    describe other blocks, unless these are known to be shorter. Sequences may be short, unless one of k and v has more
    than 128 columns and the other does not. Beyond 256 columns they are
    always the faster ones. `unit`: as in `run_unit`.
    """
    if has_split_tile(head_dims):
        return True
    narrow, wide = sorted(head_dims)
    if narrow <= 128 < wide <= 192 and length < HOPPER_FAMILY.mixed_backward_from:
        return False
    of_lists = mode == "dense" and _widest(head_dims) == 128 and unit < LEAST_TILE
    return TRAITS[op].keys_are_runs or unit >= WHOLE_RUN or of_lists


def fusing_is_faster(mode: str, head_dims: tuple[int, int], length: int) -> bool:
    """True if one kernel for dq, dk and dv is as a rule faster than a portable dq beside Hopper's dk and dv.

    The fused kernel clears and converts its sum of dq, which takes as long for short sequences as for long ones.
    """
    family = HOPPER_FAMILY
    if has_split_tile(head_dims):
        return True
    least = family.fused_backward_from if mode == "dense" else family.packed_fused_backward_from
    return length >= least[_widest(head_dims)]


def as_a_rule(
    pass_name: str, op: str, mode: str, head_dims: tuple[int, int], length: int, sizes: MaskSizes = NO_SIZES
) -> str:
    """The kernels that a forward (`fwd`) or a whole backward (`bwd`) runs as a rule: one of CONTENDERS.

    `sizes`: those that the call gives. A row of a causal sequence sees half of the keys on average, so a band counts as
    a sequence of twice its keys.
    """
    band_keys = TRAITS[op].band_keys if sizes.band_keys is None else sizes.band_keys
    unit = run_unit(op, sizes)
    if band_keys is not None:
        length = min(length, 2 * band_keys)
    if pass_name == "fwd":
        return HOPPER if is_faster(op, mode, head_dims, length, unit) else PORTABLE
    if not backward_is_faster(op, mode, head_dims, length, unit):
        return PORTABLE
    return HOPPER if mode in TRAITS[op].fused_modes and fusing_is_faster(mode, head_dims, length) else HOPPER_DKDV


def fastest(times: Mapping[str, float], ruled: str) -> str:
    """The contender to run, among those with a time: the fastest, or the rule's if the difference is noise.

    >>> fastest({"portable": 1.0, "hopper": 1.005}, "hopper"), fastest({"portable": 1.0, "hopper": 1.1}, "hopper")
    ('hopper', 'portable')
    """
    best = min(times, key=lambda name: times[name])
    return ruled if ruled in times and times[best] > GAIN * times[ruled] else best


def contending_kernels(pass_name: str, op: str, mode: str, head_dims: tuple[int, int]) -> dict[str, str]:
    """The kernels of both families that a forward or backward has, with their hashes."""
    names: tuple[str, ...]
    if pass_name == "fwd":
        names = ("fwd", _WIDE_FORWARD if has_split_tile(head_dims) else FORWARD)
    elif has_split_tile(head_dims):
        names = ("dkdv", "dq", *_SPLIT, _DELTA)
    else:
        names = ("dkdv", "dq", _WIDE_BACKWARD if has_wide_tile(head_dims) else BACKWARD, _DELTA)
    return {name: code for name, code in KERNEL_HASHES[op][mode].items() if name.removeprefix(_RUNS) in names}
