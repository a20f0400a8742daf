# SPDX-License-Identifier: Apache-2.0
"""Decides which prompts of a call on paged caches run kernels of Hopper's family."""

from torch import Tensor

from ..core import latents
from ..core.checks import fail
from ..core.paged import CacheCall
from ..core.prompts import hopper_tile, is_copied
from ..core.tiles import HOPPER, PORTABLE, HopperTile
from .devices import arch_of
from .strides import begin_alike, may_begin_alike


def tile_of_prompts(op: str, call: CacheCall) -> HopperTile | None:
    """The tile of the call's long prompts in Hopper's family; None if they run the portable family, or the kernel of
    latent attention.

    It depends only on properties that fake tensors have, too, so that a traced plan has the same tables as its call.
    """
    if latents.takes_prompts(op, call, may_begin_alike):
        return None
    q, caches = call.q, (call.k, call.v)
    copied = _is_copied(q, call.query_strides(q), 1 if call.packed else q.shape[0])
    copied = copied and all(_is_copied(x, call.cache_strides(x), x.shape[0]) for x in caches)
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, *caches)]
    return hopper_tile(op, call, arch_of(q), dtypes, copied=copied)


def converts_cache(op: str, call: CacheCall) -> bool:
    """Whether a call runs Hopper's kernel of latent attention on a cache of 8-bit floats.

    It depends only on properties that fake tensors have, too: of values, strides say whether they may be columns of k.
    """
    k = call.k
    if k.element_size() != 1:
        return False  # as most calls: the rest would cost each of them time
    copied = _is_copied(k, call.cache_strides(k), k.shape[0])
    shares_values = may_begin_alike(k, call.v)
    return latents.converts_cache(op, call, arch_of(call.q), shares_values=shares_values, copied=copied)


def check_pointers(op: str, call: CacheCall) -> None:
    """Check that memory which torch did not allocate begins where Hopper's kernels can read it, and that values which
    look like the first columns of keys are these columns."""
    is_converted = any(latents.is_converted(call, rows) for rows in call.classes)
    if is_converted and not begin_alike(call.k, call.v):
        fail(op, "v", f"the first columns of k, or family={PORTABLE!r}", "columns of other memory with k's strides")
    if not is_converted and not any(rows.tile.family == HOPPER for rows in call.classes):
        return
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.data_ptr() % 16:
            fail(op, name, f"memory at a multiple of 16 bytes, or family={PORTABLE!r}", hex(x.data_ptr()))


def _is_copied(x: Tensor, strides: tuple[int, ...], count: int) -> bool:
    itemsize = x.element_size()
    starts = x.storage_offset() * itemsize % 16 == 0
    return starts and x.stride(-1) == 1 and is_copied(strides, count, itemsize)
