# SPDX-License-Identifier: Apache-2.0
"""Latent attention on paged caches: which calls run the kernel of Hopper's family for it. No framework is imported."""

from ..archs import NARROW_HEAD_DIM
from .launches import Backend
from .paged import CacheCall
from .prompts import LEAST_PAGE, PAGE_FACTOR, is_copied
from .row_classes import RowClass
from .tiles import PORTABLE

ROWS = 64
"""Rows of the kernel's tile."""

KEYS = 64
"""Keys of a block, and most columns of a key that belong to no value: weights take their place in shared memory."""

VALUE_COLUMNS = (256, 512)
"""Columns of values that the kernel computes, half of them in each warpgroup."""


def runs_latent(backend: Backend, call: CacheCall, rows: RowClass, *, shares_values: bool) -> bool:
    """Whether a class of rows runs the kernel: if its values are the first columns of keys, which TMA can copy.

    The order of its sums differs from that of the portable kernel. So this reads nothing that depends on the batch.
    """
    q, k, tile = call.q, call.k, rows.tile
    head_dim, head_dim_v = q.shape[-1], call.v.shape[-1]
    fits_columns = head_dim > NARROW_HEAD_DIM and head_dim_v in VALUE_COLUMNS and head_dim - head_dim_v <= KEYS
    is_half = q.dtype == k.dtype and k.element_size() == 2 and call.k_scale is None and call.value_scale is None
    has_pages = call.page_table is not None and call.page_size >= LEAST_PAGE and call.page_size % PAGE_FACTOR == 0
    # A tile that a call asks for is one of the portable kernel.
    asks_portable = call.family == PORTABLE or call.config
    if asks_portable or not (shares_values and fits_columns and is_half and has_pages):
        return False
    fits_tile = (tile.block_m, tile.block_n) == (ROWS, KEYS) and not rows.folds
    return fits_tile and backend.copies_by_tma(k) and is_copied(call.cache_strides(k), k.shape[0], k.element_size())
