"""The caches of a log-decay's running sum: what every framework checks and launches. No framework is imported."""

from collections.abc import Sequence
from typing import Any

from .checks import fail
from .configs import cdiv, next_power_of_2
from .launches import Backend, Tensor
from .paged import CacheCall

LOCAL, BASE = "g", "g_base"
"""Names of the caches: the difference of each token's sum from the base of its page, and the base of each page."""

APPEND = "append_decay"
"""The function that fills the caches. Error messages begin with its name."""

_HEADS = 8
"""Query heads of a program."""

_MOST_TOKENS = 256
"""Tokens that a program takes at once."""


def decay_cache_shapes(call: CacheCall) -> dict[str, tuple[int, ...]]:
    """The shapes of the caches of a paged call."""
    pages, size, heads = call.k.shape[0], call.k.shape[1], call.q.shape[1]
    return {LOCAL: (pages, size, heads), BASE: (pages, heads)}


def check_decay_cache(
    op: str, name: str, shape: Sequence[int] | None, wanted: Sequence[int], *, fits: bool, where: str, got: str
) -> None:
    """Check a cache. `shape`: None if the argument is no array. `fits`: whether dtype and device are right."""
    if shape is None or tuple(shape) != tuple(wanted) or not fits:
        fail(op, name, f"float32 {list(wanted)}{where}, as paging.append_decay fills it", got)


def check_new_decays(shape: Sequence[int], *, packed: bool, is_float: bool, got: str) -> None:
    """Check the log-decays of new tokens."""
    rank, dims = (2, "[tokens, Hq] beside cu_seqlens") if packed else (3, "[B, n, Hq]")
    if len(shape) != rank or not is_float:
        fail(APPEND, "g", f"floats {dims}", got)


def decay_shapes_to_append(g: Sequence[int], g_cache: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shapes that caches must have to append log-decays of the shape `g`."""
    heads = g[-1]
    if len(g_cache) != 3:
        fail(APPEND, "g_cache", f"float32 [pages, page size, {heads}]", list(g_cache))
    return {"g_cache": (*g_cache[:2], heads), "g_base": (g_cache[0], heads)}


def check_first_sizes(
    num_seqs: int,
    g: Sequence[int],
    page_table: Sequence[int],
    page_starts: Sequence[int] | None,
    cu_seqlens: Sequence[int] | None,
) -> None:
    """Check the shapes of the arguments that have an element or a row for each sequence."""
    for name, shape, count in (
        ("page_table", None if page_starts is not None else page_table, num_seqs),
        ("page_starts", page_starts, num_seqs + 1),
        ("cu_seqlens", cu_seqlens, num_seqs + 1),
        ("g", g if cu_seqlens is None else None, num_seqs),
    ):
        if shape is not None and shape[0] != count:
            fail(APPEND, name, f"{count} as its first size, for kv_lengths of {num_seqs}", list(shape))


def check_pages(
    num_pages: int,
    page_size: int,
    lengths: Sequence[int],
    begins: Sequence[int],
    page_table: Sequence[Any],
    page_starts: Sequence[int] | None,
) -> None:
    """Check the pages of the new tokens of each sequence, and of the token before them.

    `begins`: where the new tokens of each sequence begin. A negative page is allowed: nothing is written there.
    """
    tables = page_table if page_starts is None else [page_table[start:] for start in page_starts[:-1]]
    for number, (length, pages) in enumerate(zip(lengths, tables, strict=True)):
        new = begins[number + 1] - begins[number]
        used = pages[max(length - new - 1, 0) // page_size : cdiv(max(length, 0), page_size)] if new > 0 else ()
        if beyond := sorted({page for page in used if page >= num_pages}):
            expected = f"pages below {num_pages} for the tokens that are appended"
            fail(APPEND, "page_table", expected, f"{', '.join(map(str, beyond))} in sequence {number}")


def launch_sums(
    backend: Backend,
    kernel: Any,
    g: Tensor,
    g_cache: Tensor,
    g_base: Tensor,
    page_table: Tensor,
    page_starts: Tensor | None,
    kv_lengths: Tensor,
    cu_seqlens: Tensor | None,
    new_rows: int,
) -> None:
    """Continue the sums. `g` is `[tokens, Hq]`, with `new_rows` tokens of each sequence, 0 beside `cu_seqlens`."""
    tokens, heads = g.shape
    backend.launch(
        kernel,
        (kv_lengths.shape[0] * cdiv(heads, _HEADS),),
        (g, g_cache, g_base, page_table, page_starts, kv_lengths, cu_seqlens),
        (*g.stride(), *g_cache.stride(), *g_base.stride(), page_table.stride(0) if page_starts is None else 0),
        (heads, g_cache.shape[1], new_rows, g_cache.shape[0]),
        BLOCK=max(min(next_power_of_2(new_rows or tokens), _MOST_TOKENS), 2),
        HEADS=_HEADS,
        num_warps=4,
    )
