"""The tiles and workloads of tuning kernels on paged caches: few tiles, which are compiled in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from codegen.arch.chips import CHIPS
from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.testing.paged_calls import PagedShape

GROUPS = (1, 4, 8)
"""Query heads per key head that tiles are tuned for; calls take the nearest."""

KV_HEADS = 8

KEYS_PER_SPLIT = (128, 256, 512, 1024)
"""The values of `keys_per_split` that are tried, with the fastest tile only: the two hardly depend on each other."""

# Keys of a block, warps, stages.
_LOOPS = {
    PagedPass.DECODE: (
        (64, 4, 3),
        (64, 4, 4),
        (32, 4, 5),
        (32, 4, 4),
        (128, 8, 3),
        (64, 8, 3),
        (128, 4, 2),
        (16, 4, 6),
    ),
    PagedPass.PAGED_FWD: ((64, 4, 3), (64, 4, 2), (32, 4, 3), (128, 4, 2), (64, 8, 3), (128, 8, 2), (32, 4, 4)),
}
_ROWS = {PagedPass.DECODE: (16,), PagedPass.PAGED_FWD: (64, 128)}


@dataclass(frozen=True, kw_only=True, order=True)
class PagedWorkload:
    """A timed call: `batch` sequences of `keys` keys each, of which the last `queries` tokens are new."""

    batch: int
    keys: int
    queries: int
    page_size: int

    def __str__(self) -> str:
        return f"B{self.batch} Q{self.queries} K{self.keys} P{self.page_size}"

    def shape(self, group: int, head_dim: int) -> PagedShape:
        """The sizes of the call."""
        return PagedShape(
            lengths=[self.keys] * self.batch,
            queries=self.queries,
            group=group,
            kv_heads=KV_HEADS,
            head_dim=head_dim,
            page_size=self.page_size,
        )


def workloads(pass_: PagedPass) -> tuple[PagedWorkload, ...]:
    """The workloads of a pass: batch sizes and lengths, on pages that hold whole blocks and on small pages."""
    if pass_ is PagedPass.PAGED_FWD:
        sizes = ((1, 2048, 2048, 64), (8, 512, 512, 64), (1, 32_768, 2048, 64), (8, 8192, 512, 16))
        return tuple(PagedWorkload(batch=b, keys=keys, queries=q, page_size=page) for b, keys, q, page in sizes)
    sizes_of_decode = [
        *((1, keys) for keys in (1024, 8192, 32_768, 131_072)),
        *((16, keys) for keys in (1024, 8192, 32_768)),
        *((64, keys) for keys in (1024, 8192)),
    ]
    found = [
        PagedWorkload(batch=batch, keys=keys, queries=1, page_size=16 if (batch, keys) in _ON_SMALL_PAGES else 64)
        for batch, keys in sizes_of_decode
    ]
    # A number of stages that gains a percent on large pages may halve the speed if each page has one key, or if there
    # are a few queries.
    found.append(PagedWorkload(batch=16, keys=8192, queries=1, page_size=1))
    return (*found, PagedWorkload(batch=16, keys=8192, queries=8, page_size=64))


_ON_SMALL_PAGES = {(1, 32_768), (16, 8192), (64, 1024)}


def tiles(arch: str, pass_: PagedPass, itemsize: int, head_dim: int, default: PagedTileConfig) -> list[PagedTileConfig]:
    """The tiles that are tried, the default first; those that clearly do not fit the chip are left out."""
    found = [default]
    for rows in _ROWS[pass_]:
        for block_n, num_warps, num_stages in _LOOPS[pass_]:
            tile = replace(default, block_m=rows, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
            held = (num_stages - 1) * block_n * 2 * head_dim * itemsize
            if held <= CHIPS[arch].shared_memory and tile not in found:
                found.append(tile)
    return found


def with_other_splits(tile: PagedTileConfig) -> Iterator[PagedTileConfig]:
    """The same tile with each other value of `keys_per_split`."""
    for keys in KEYS_PER_SPLIT:
        if keys != tile.keys_per_split:
            yield replace(tile, keys_per_split=keys)
