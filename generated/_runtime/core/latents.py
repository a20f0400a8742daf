# SPDX-License-Identifier: Apache-2.0
"""Latent attention on paged caches: which calls run the kernel of Hopper's family for it. No framework is imported."""

from collections.abc import Callable

from ..archs import HOPPER_FAMILY, NARROW_HEAD_DIM
from ..kernels import TRAITS
from .launches import Backend, Tensor
from .paged import CacheCall
from .prompts import LEAST_PAGE, PAGE_FACTOR, is_copied
from .row_classes import LATENT_KEYS, LATENT_ROWS, RowClass
from .tiles import PORTABLE

MOST_REST = 64
"""Most columns of a key that belong to no value: weights take their place in shared memory."""

VALUE_COLUMNS = (256, 512)
"""Columns of values that the kernel computes, half of them in each warpgroup."""


def converts_cache(op: str, call: CacheCall, arch: str, *, shares_values: bool, copied: bool) -> bool:
    """Whether sequences of more than 16 rows run the kernel on a cache of 8-bit floats, which it converts.

    Args:
        shares_values: whether values are the first columns of keys. copied: whether TMA could copy the keys; the kernel
            loads them, in pieces of 16 bytes.
    """
    has_kernel = arch == HOPPER_FAMILY.arch and TRAITS[op].hopper_reads_latents
    # Keys are loaded as words of four columns.
    is_small = (call.q.element_size(), call.k.element_size()) == (2, 1) and call.k.shape[-1] % 4 == 0
    return has_kernel and is_small and copied and _may_run(call, shares_values=shares_values)


def takes_prompts(op: str, call: CacheCall, begin_alike: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether long prompts run the kernel, although Hopper's forward of prompts takes their columns, too.

    On an H200 with 40 heads, keys of 288 columns and values of 256, and 128 to 1024 queries on 8192 keys, this kernel
    took 0.66 to 0.71 of the time.

    Args:
        begin_alike: whether values may be the first columns of keys. Values of as many columns as keys are not.
    """
    k, v = call.k, call.v
    if v.shape[-1] >= k.shape[-1] or call.family is not None or not TRAITS[op].hopper_reads_latents:
        return False
    return _may_run(call, shares_values=begin_alike(k, v))


def is_converted(call: CacheCall, rows: RowClass) -> bool:
    """Whether a class of rows runs the kernel on a cache of 8-bit floats: no other has so many rows of one."""
    return call.k.element_size() == 1 and rows.tile.block_m == LATENT_ROWS


def _may_run(call: CacheCall, *, shares_values: bool) -> bool:
    """Whether the kernel takes the columns of a call, on pages, unless the call asks for others."""
    # A tile that a call asks for is one of the portable kernel.
    asks_portable = call.family == PORTABLE or call.config
    head_dim, head_dim_v = call.q.shape[-1], call.v.shape[-1]
    fits = head_dim > NARROW_HEAD_DIM and head_dim_v in VALUE_COLUMNS and head_dim - head_dim_v <= MOST_REST
    return fits and shares_values and call.page_table is not None and not asks_portable


def runs_latent(backend: Backend, call: CacheCall, rows: RowClass, *, shares_values: bool) -> bool:
    """Whether a class of rows runs the kernel: if its values are the first columns of keys, which TMA can copy.

    The order of its sums differs from that of the portable kernel. So this reads nothing that depends on the batch.
    """
    q, k, tile = call.q, call.k, rows.tile
    if is_converted(call, rows):
        return True
    is_half = q.dtype == k.dtype and k.element_size() == 2 and call.k_scale is None and call.value_scale is None
    has_pages = call.page_size >= LEAST_PAGE and call.page_size % PAGE_FACTOR == 0
    if not (is_half and has_pages and _may_run(call, shares_values=shares_values)):
        return False
    fits_tile = (tile.block_m, tile.block_n) == (LATENT_ROWS, LATENT_KEYS) and not rows.folds
    return fits_tile and backend.copies_by_tma(k) and is_copied(call.cache_strides(k), k.shape[0], k.element_size())
