"""The families of kernels: the portable one runs on every chip; that of Hopper, written in Gluon, on sm_90 alone."""

from .archs import HOPPER_FORWARD
from .kernels import FUSED_BACKWARDS, KERNEL_HASHES, LINEAR, LONG_RUNS
from .tuned import Tile

PORTABLE, HOPPER = FAMILIES = ("portable", "hopper")
HOPPER_WARPS = 4
"""Warps that a kernel of Hopper's is launched with: those of one warpgroup, which specialises the others."""


class HopperTile(Tile):
    """A tile of Hopper's family: `num_warps` are those of two warpgroups, which share its rows.

    There are `num_stages` places for keys and as many for values.
    """

    __slots__ = ()

    @property
    def family(self) -> str:
        return HOPPER


# Columns of a tile, those of q and k or of v, whichever are more -> the backward's tile: its queries, and its keys,
# which two warpgroups share.
_BACKWARD = {64: HopperTile(128, 128, 8, 2), 128: HopperTile(64, 128, 8, 2)}
# Where a score is more than the product scaled, it takes the registers of half of the queries.
_SCORED_BACKWARD = _BACKWARD | {64: HopperTile(64, 128, 8, 2)}


# The modes of calls in which the forward was measured: in others a call has to ask for it.
_MEASURED = frozenset({"dense"})


def tile_columns(head_dim: int) -> int:
    """The columns of a tile of Hopper's: a power of two, and at least what one copy swizzles."""
    return max(1 << (head_dim - 1).bit_length(), 64)


def hopper_tile(op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> HopperTile | str:
    """The tile of a call's forward in Hopper's family; where that cannot run it, the reason.

    Args:
        head_dims: of q and of v. length: how many keys a sequence has.
    """
    reason = _refusal("hopper_fwd", op, mode, arch, dtype, head_dims, length)
    return reason or HopperTile(*HOPPER_FORWARD[max(tile_columns(head_dim) for head_dim in head_dims)])


def backward_tiles(
    op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int
) -> dict[str, HopperTile]:
    """The tiles of a call's backward in Hopper's family by pass: of both where one kernel computes all, of none where
    the portable kernels have to."""
    tiles = _BACKWARD if op in LINEAR else _SCORED_BACKWARD
    tile = tiles.get(max(tile_columns(head_dim) for head_dim in head_dims))
    if tile is None or _refusal("hopper_bwd", op, mode, arch, dtype, head_dims, length):
        return {}
    return dict.fromkeys(("dkdv", "dq") if op in FUSED_BACKWARDS else ("dkdv",), tile)


def _refusal(kernel: str, op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> str:
    """Why a kernel of Hopper's family cannot run a call; empty where it can."""
    if arch != "sm_90":
        return f"its kernels run on sm_90, not on {arch}"
    if kernel not in KERNEL_HASHES.get(op, {}).get(mode, {}):
        return f"{op} has no kernel of it for {mode} calls"
    if dtype == "float32":
        return "its kernels take float16 and bfloat16, not float32"
    if any(4 * head_dim < 3 * tile_columns(head_dim) for head_dim in head_dims):
        # What pads a tile to a power of two is computed like the rest; the portable kernels take two parts.
        return f"of head_dims {head_dims} less than three quarters would fill a tile's columns"
    if length == 0:
        return "a copy by TMA needs at least one key"
    return ""


def is_faster(op: str, mode: str, head_dims: tuple[int, int]) -> bool:
    """Whether Hopper's forward is the faster one as a rule, by what was measured: for long runs and wide tiles."""
    return mode in _MEASURED and op in LONG_RUNS and max(tile_columns(head_dim) for head_dim in head_dims) >= 128
