# SPDX-License-Identifier: Apache-2.0
"""Prompts on paged caches in Hopper's family: which calls they are, their blocks, and how their tensors are copied.

No framework is imported.
"""

from collections.abc import Sequence
from typing import Any

from ..archs import HOPPER_FAMILY
from ..kernels import TRAITS
from .checks import fail
from .configs import next_power_of_2
from .families import forward_refusal, has_split_tile, tile_columns
from .launches import Backend, Tensor
from .options import own_forward_tile
from .paged import CacheCall
from .paged_tiles import PROMPTS
from .row_classes import FEW_ROWS, RowClass
from .tiles import HOPPER, PORTABLE, HopperTile

LEAST_PAGE = 16
"""Least slots of a page with which copies by TMA keep up with the MMAs: one copy takes one page at most."""

PAGE_FACTOR = 8
"""Page sizes must be a multiple of this number: TMA swizzles 8 rows at a time."""

MOST_ROWS = 2**30
"""Rows that a descriptor of a packed tensor counts."""

Strides = Sequence[int]
"""Strides of a tensor's batch rows or pages, heads, and rows."""


def copied_strides(strides: Strides, x: Tensor) -> tuple[int, int]:
    """The strides of heads, in units of 16 bytes, and of rows, as kernels of Hopper's family take them."""
    _, head, row = strides
    return head // (16 // x.element_size()), row


def rows_apart(strides: Strides) -> int:
    """The distance between two batch rows, or two pages, in rows."""
    return strides[0] // strides[2]


def is_copied(strides: Strides, count: int, itemsize: int) -> bool:
    """Whether TMA can copy rows of a tensor with so many batch rows or pages, as if it were one packed sequence."""
    units = all(stride * itemsize % 16 == 0 for stride in strides)
    outer, _, row = strides
    return units and row > 0 and outer % row == 0 and 0 <= outer // row * count < MOST_ROWS


def hopper_tile(op: str, call: CacheCall, arch: str, dtypes: Sequence[str], *, copied: bool) -> HopperTile | None:
    """The tile of a call's prompts in Hopper's family, None if they run the portable family.

    Args:
        dtypes: of q, k and v. copied: whether TMA can copy them.
    """
    asked, own = call.family == HOPPER, dict(call.config).get(PROMPTS)
    # A tile that a call asks for is one of the portable kernels, unless it asks for this family too.
    if call.page_table is None or call.family == PORTABLE or (own is not None and not asked):
        return None
    head_dims = call.q.shape[-1], call.v.shape[-1]
    reason = _refusal(op, call, arch, dtypes, head_dims, copied=copied)
    if reason and asked:
        fail(op, "family", f"None or {PORTABLE!r} in this call on paged caches: {reason}", repr(call.family))
    if reason or not (asked or suits_hopper(op, arch, dtypes[0], head_dims)):
        return None
    tile = tile_of(head_dims)
    return tile if own is None else own_forward_tile(op, PROMPTS, own.tile, tile.block_m, f"in the family '{HOPPER}'")


def tile_of(head_dims: tuple[int, int]) -> HopperTile:
    """The default tile of prompts with heads of q and v of so many columns."""
    if has_split_tile(head_dims):
        return HOPPER_FAMILY.wide_forward_tile
    return HOPPER_FAMILY.forward_tiles[max(map(tile_columns, head_dims))]


def suits_hopper(op: str, arch: str, dtype: str, head_dims: tuple[int, int]) -> bool:
    """Whether long prompts run Hopper's family as a rule, on pages that its copies take.

    Measured on an H200 at head dims 64, 128 and 256, Hopper's kernel is faster for every variant that has one, and at
    320 to 512 for a causal mask: the portable kernel looks up the page of each row in a table before it loads the row.
    """
    return TRAITS[op].hopper_reads_pages and not forward_refusal(arch, dtype, head_dims, 1)


def _refusal(
    op: str, call: CacheCall, arch: str, dtypes: Sequence[str], head_dims: tuple[int, int], *, copied: bool
) -> str:
    """Why prompts of a call cannot run Hopper's family; empty if they can."""
    if not TRAITS[op].hopper_reads_pages:
        return "the mask or a tensor of this variant has no kernel of that family on pages"
    if len(set(dtypes)) > 1:
        return f"its caches have the dtype of q, {dtypes[0]}, not {' and '.join(dict.fromkeys(dtypes[1:]))}"
    if call.k_scale is not None or call.value_scale is not None:
        return "its caches have no scales"
    if call.page_size < LEAST_PAGE or call.page_size % PAGE_FACTOR:
        sizes = f"{LEAST_PAGE} keys and more, a multiple of {PAGE_FACTOR}"
        return f"its copies take pages of {sizes}, not of {call.page_size}"
    if not copied:
        return "its copies take strides and pointers of 16 bytes, and batch rows and pages a whole number of rows apart"
    return forward_refusal(arch, dtypes[0], head_dims, 1)


def hopper_rows(family: object, group: int, num_heads: int, processors: int, head_dims: tuple[int, int]) -> int:
    """Rows from which on a sequence runs Hopper's family: as many as make its blocks alone occupy `least_part` of the
    chip.

    For sequences of fewer rows the portable family splits the keys. If the call asks for Hopper's family, all prompts
    run it.
    """
    if family == HOPPER:
        return FEW_ROWS + 1
    (part, whole), block_m = least_part(head_dims), tile_of(head_dims).block_m
    return group * max(processors * part * block_m // (whole * num_heads), block_m)


def least_part(head_dims: tuple[int, int]) -> tuple[int, int]:
    """The part of a chip, as a fraction, that the blocks of a prompt must occupy for Hopper's kernels to be faster than
    portable ones, which split the keys.

    Measured on an H200, where portable kernels on whole chips take 1.6 times as long, and 2.5 times beyond 256 columns.
    """
    return (3, 10) if has_split_tile(head_dims) else (1, 2)


def place_prompts(backend: Backend, prompt_blocks: Any, call: CacheCall, rows: RowClass, block_seqs: Tensor) -> None:
    """Lay out the blocks of the prompts of a class, by the kernel `prompt_blocks`."""
    backend.launch(
        prompt_blocks,
        (call.num_seqs,),
        (call.cu_seqlens_q, call.kv_lengths, block_seqs, call.q_rows, call.num_seqs, call.most_keys),
        PACKED=call.packed,
        FIRST_ROWS=rows.first_rows,
        GROUP=call.group,
        BLOCK_M=rows.tile.block_m,
        CHUNK=min(1024, next_power_of_2(max(call.num_seqs, 16))),
        num_warps=4,
    )
