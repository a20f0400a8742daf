# SPDX-License-Identifier: Apache-2.0
"""The families of kernels: the portable one runs on every chip; that of Hopper, written in Gluon, on sm_90 alone."""

from collections.abc import Mapping

from ..archs import (
    HOPPER_ALIKE_FROM,
    HOPPER_BACKWARD,
    HOPPER_FORWARD,
    HOPPER_LONG_FORWARD,
    HOPPER_LONG_FROM,
    SCORED_ROWS,
)
from ..kernels import (
    ALIKE_ROWS,
    BANDS,
    CHEAP_SCORES,
    FUSED_BACKWARDS,
    KERNEL_HASHES,
    LINEAR,
    LONG_RUNS,
    RUNS,
    SEGMENTED_RUNS,
)
from .tuned import HOPPER, HOPPER_DKDV, PORTABLE, Tile

FAMILIES = (PORTABLE, HOPPER)
INTERPRETER = "the CPU"
"""What stands for the architecture where there is no chip: of kernels in Triton's interpreter, and of references."""

HOPPER_WARPS = 4
"""Warps that a kernel of Hopper's is launched with: those of one warpgroup, which specialises the others."""

FORWARD, BACKWARD = "hopper_fwd", "hopper_bwd"
"""Its kernels, by their names among the hashes."""

_WIDE_BACKWARD, _DELTA = "hopper_bwd_wide", "hopper_delta"

GAIN = 0.99
"""What was measured overrules the rule where it takes less than this part of the time: the rest is noise."""


class HopperTile(Tile):
    """A tile of Hopper's family: `num_warps` are those of the warpgroups that share its rows, or its keys.

    There are `num_stages` places for keys and as many for values.
    """

    __slots__ = ()

    @property
    def family(self) -> str:
        return HOPPER


WIDE_KEYS = 64
"""Keys of the tiles of the backward's kernel for more than 128 columns, in which both warpgroups have all of them."""

# Keys of a sequence from which on a forward at 64 columns, and any packed call, are the faster ones of this family;
# and such a forward of rows that all visit the same keys.
_NARROW_FROM = _PACKED_FROM = 1024
_NARROW_ALIKE_FROM = 512
# Keys of a sequence, by columns of a tile, from which on one kernel for all gradients is the faster backward.
_FUSED_FROM = {64: 2048, 128: 1024, 256: 1024}


def tile_columns(head_dim: int) -> int:
    """The columns of a tile of Hopper's: a power of two, and at least what one copy swizzles."""
    return max(1 << (head_dim - 1).bit_length(), 64)


def _widest(head_dims: tuple[int, int]) -> int:
    """The columns of the wider tile of a call: of q and k, or of v."""
    return max(tile_columns(head_dim) for head_dim in head_dims)


def hopper_tile(op: str, mode: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> HopperTile | str:
    """The tile of a call's forward in Hopper's family; where that cannot run it, the reason.

    Args:
        head_dims: of q and of v. length: how many keys a sequence has.
    """
    reason = refusal(arch, dtype, head_dims, length)
    if reason:
        return reason
    cols = _widest(head_dims)
    long_from = HOPPER_ALIKE_FROM if op in ALIKE_ROWS else HOPPER_LONG_FROM
    if mode == "dense" and cols == 64 and length >= long_from and op in LINEAR and op in LONG_RUNS:
        return HopperTile(*HOPPER_LONG_FORWARD)
    return HopperTile(*HOPPER_FORWARD[cols])


def backward_tiles(op: str, arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> dict[str, HopperTile]:
    """The tiles of a call's backward in Hopper's family by pass: of both where one kernel computes all, of none where
    the portable kernels have to."""
    if refusal(arch, dtype, head_dims, length):
        return {}
    tile = HopperTile(*HOPPER_BACKWARD[_widest(head_dims)])
    if op not in LINEAR:
        tile = HopperTile(min(tile.block_m, SCORED_ROWS), *tile[1:])
    return dict.fromkeys(("dkdv", "dq") if op in FUSED_BACKWARDS else ("dkdv",), tile)


def refusal(arch: str, dtype: str, head_dims: tuple[int, int], length: int) -> str:
    """Why kernels of Hopper's family cannot run a call; empty where they can."""
    if arch != "sm_90":
        return f"its kernels run on sm_90, not on {arch}"
    if dtype == "float32":
        return "its kernels take float16 and bfloat16, not float32"
    if any(4 * head_dim < 3 * tile_columns(head_dim) for head_dim in head_dims):
        # What pads a tile to a power of two is computed like the rest; the portable kernels take two parts.
        return f"of head_dims {head_dims} less than three quarters would fill a tile's columns"
    if length == 0:
        return "a copy by TMA needs at least one key"
    return ""


def is_faster(op: str, mode: str, head_dims: tuple[int, int], length: int) -> bool:
    """Whether Hopper's forward is the faster one as a rule, by what was measured.

    That is for long runs of keys, and in dense calls of 128 columns and more for short ones, too; at 64 columns, where
    a score costs as much as its products, for cheap ones. Segmented calls have short runs, and lengths of which some
    programs of the portable kernel get the long ones.
    """
    is_narrow = _widest(head_dims) == 64
    if mode == "segmented":
        return op in SEGMENTED_RUNS and (not is_narrow or (op in LINEAR and op in LONG_RUNS))
    if mode == "dense" and not is_narrow:
        return op in RUNS
    narrow_from = _NARROW_ALIKE_FROM if op in ALIKE_ROWS else _NARROW_FROM
    return _has_long_runs(op, mode, length) and (not is_narrow or (op in CHEAP_SCORES and length >= narrow_from))


def backward_is_faster(op: str, mode: str, head_dims: tuple[int, int], length: int) -> bool:
    """Whether Hopper's dk and dv are the faster ones as a rule, with a dq in the same kernel or beside them.

    That is for long runs of keys, and in dense calls for bands, as of segments they are, too. What pads 192 columns to
    256 costs as much as that gains.
    """
    widest = max(head_dims)
    has_runs = _has_long_runs(op, mode, length) or (mode != "packed" and op in BANDS)
    has_runs = has_runs and (mode != "segmented" or op in SEGMENTED_RUNS)
    return has_runs and (widest <= 128 or widest > 192)


def _has_long_runs(op: str, mode: str, length: int) -> bool:
    return op in LONG_RUNS and (mode != "packed" or length >= _PACKED_FROM)


def fusing_is_faster(head_dims: tuple[int, int], length: int) -> bool:
    """Whether dq in one kernel with dk and dv is as a rule faster than the portable one beside them.

    What it adds to is cleared and converted, which takes as long for short sequences as for long ones.
    """
    return length >= _FUSED_FROM[_widest(head_dims)]


def as_a_rule(pass_name: str, op: str, mode: str, head_dims: tuple[int, int], length: int) -> str:
    """Whose kernels a forward, `fwd`, or a whole backward, `bwd`, runs as a rule: one of CONTENDERS."""
    if pass_name == "fwd":
        return HOPPER if is_faster(op, mode, head_dims, length) else PORTABLE
    if not backward_is_faster(op, mode, head_dims, length):
        return PORTABLE
    return HOPPER if op in FUSED_BACKWARDS and fusing_is_faster(head_dims, length) else HOPPER_DKDV


def fastest(times: Mapping[str, float], ruled: str) -> str:
    """Which contender of those that have a time is taken: the fastest, or the rule's where that is as good as fast.

    >>> fastest({"portable": 1.0, "hopper": 1.005}, "hopper"), fastest({"portable": 1.0, "hopper": 1.1}, "hopper")
    ('hopper', 'portable')
    """
    best = min(times, key=lambda name: times[name])
    return ruled if ruled in times and times[best] > GAIN * times[ruled] else best


def contending_kernels(pass_name: str, op: str, mode: str, head_dims: tuple[int, int]) -> dict[str, str]:
    """The kernels of both families that a forward or backward has, with their hashes."""
    is_wide = HOPPER_BACKWARD[_widest(head_dims)][1] == WIDE_KEYS
    backward = ("dkdv", "dq", _WIDE_BACKWARD if is_wide else BACKWARD, _DELTA)
    names = ("fwd", FORWARD) if pass_name == "fwd" else backward
    return {name: code for name, code in KERNEL_HASHES[op][mode].items() if name in names}
