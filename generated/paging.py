# SPDX-License-Identifier: Apache-2.0
"""Key and value caches in pages: functions that a server needs around the paged calls of the ops.

A cache is an array `[pages, page size, Hkv, D]`. Its slot `page * page_size + place` holds one token. All functions
work on torch tensors and JAX arrays. Importing this module imports neither library.

>>> import torch
>>> pool = Pool(pages=8, page_size=4)
>>> pool.extend("a", 6), pool.extend("b", 1)
([0, 1, 2, 3, 4, 5], [8])
>>> pool.page_table(["a", "b"]), pool.lengths(["a", "b"])
([[0, 1], [2, -1]], [6, 1])
>>> table, positions = torch.tensor(pool.page_table(["a", "b"])), torch.tensor([5, 0])
>>> slots(table, positions, page_size=4).tolist()
[5, 8]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from ._runtime.core.checks import check_int, check_layout, fail
from ._runtime.core.page_pool import Pool
from ._runtime.core.paged_calls import PAGE_LAYOUTS, check_page_layout

__all__ = ["Pool", "append", "append_decay", "merge", "slots"]

# An lse of 16 bits would change the weights by up to some percent: its error is that of their logarithms.
_LSE_DTYPES = ("float32", "float64")
_O_DTYPES = ("float16", "bfloat16", *_LSE_DTYPES)


def append(
    k: Any,
    v: Any | None,
    k_cache: Any,
    v_cache: Any | None,
    slots: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    page_layout: str = "pshd",
) -> tuple[Any, ...]:
    """Write the keys and values of new tokens to their slots.

    Args:
        k: `[tokens, Hkv, D]`. It may be a view of a cache: all tokens are read before one is written.
        v: `[tokens, Hkv, Dv]`; None, beside a `v_cache` of None, for values inside keys (latent attention).
        k_cache: `[pages, page size, Hkv, D]`, any strides. If it has another dtype, keys are cast to it.
        v_cache: `[pages, page size, Hkv, Dv]`, or None. In torch it may be a view of the first columns of `k_cache`:
            then v is that of k, `v_scale` that of keys, and keys alone are written.
        slots: integers `[tokens]`; -1 is skipped. No two are the same.
        k_scale: the scale of the keys in the cache, a number or floats `[Hkv]` above 0: keys are divided by it. Or
            float32 `[pages, page size, Hkv]` with a cache of 8-bit floats: each token and head gets a scale that maps
            its largest value to the largest value of the cache's dtype. The scales are written to this array.
        v_scale: the same for values.
        page_layout: `"pshd"` for caches as above, or `"phsd"` for caches `[pages, Hkv, page size, D]`.

    Returns:
        The caches, None for a `v_cache` of None, then those of `k_scale` and `v_scale` to which scales were written. In
        torch they are the tensors that were given, changed in place. In JAX they are new arrays, which take over the
        memory of the given arrays if the enclosing jitted call donates them.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype or device.
    """
    of_values = {"v": v, "v_cache": v_cache}
    if v is None or v_cache is None:
        for name, x in (*of_values.items(), ("v_scale", v_scale)):
            if x is not None:
                fail("append", name, "None, because v or v_cache is None", type(x).__name__)
        of_values = {}
    arrays = {"k": k, "k_cache": k_cache, **of_values, "slots": slots}
    _check_framework("append", arrays)
    check_page_layout("append", page_layout)
    _check_ranks(arrays)
    # In torch these are views. In JAX they are only shapes, because transposing an array would copy it.
    keys, values = _in_order(k_cache, page_layout), None if v_cache is None else _in_order(v_cache, page_layout)
    _check_new(k, v, keys, values, slots)
    for name, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        if x is not None and x.dtype.itemsize == 1 and getattr(scale, "ndim", 0) == 3:
            # What one cache holds in units of its scales, moved within it: dividing by new scales would change it.
            expected = f"None beside {name} of 8-bit numbers, whose scales you move yourself"
            fail("append", f"{name}_scale", expected, f"an array {list(scale.shape)}")
    if _framework(k) == "torch":
        from ._runtime.torch.paging import append as torch_append

        _, _, *scales = torch_append(k, v, keys, values, slots, k_scale, v_scale)
        return k_cache, v_cache, *scales
    from ._runtime.jax.paging import append as jax_append

    return jax_append(k, v, k_cache, v_cache, slots, k_scale, v_scale, page_layout)


def append_decay(
    g: Any,
    g_cache: Any,
    g_base: Any,
    *,
    page_table: Any,
    kv_lengths: Any,
    page_starts: Any = None,
    cu_seqlens: Any = None,
) -> tuple[Any, Any]:
    """Continue the running sums of a log-decay, such as that of forgetting attention (arXiv:2503.02130).

    The sums restart with each sequence, so that sequences that begin with the same tokens can share pages. The base of
    a page is the sum before its first token. The cache holds the difference of each token's sum from this base, so that
    differences between nearby sums stay precise in sequences of any length. Nothing waits for the device.

    Args:
        g: log-decays of the new tokens, natural log, `[B, n, Hq]`, or `[tokens, Hq]` with `cu_seqlens`.
        g_cache: float32 `[pages, page size, Hq]`, any strides; paged calls of the op take it as `g`.
        g_base: float32 `[pages, Hq]`, any strides.
        page_table: integers `[B, most pages]`, the pages of each sequence in order, as the op takes it.
        kv_lengths: integers `[B]`, the number of keys of each sequence, including the new ones. New tokens whose
            position would be negative are skipped.
        page_starts: integers `[B + 1]`, where each sequence's pages begin in a flat `page_table` `[all pages]`.
        cu_seqlens: integers `[B + 1]`, where the new tokens of each sequence begin.

    Returns:
        `g_cache` and `g_base`. In torch they are the tensors that were given, changed in place. In JAX they are new
        arrays, which take over the memory of the given arrays if the enclosing jitted call donates them.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype or device.
    """
    _check_framework("append_decay", {"g": g, "g_cache": g_cache, "g_base": g_base})
    if _framework(g) == "torch":
        from ._runtime.torch.paged_decay import append_decay as torch_append

        return torch_append(g, g_cache, g_base, page_table, kv_lengths, page_starts, cu_seqlens)
    from ._runtime.jax.paged_decay import append_decay as jax_append

    return jax_append(g, g_cache, g_base, page_table, kv_lengths, page_starts, cu_seqlens)


def slots(page_table: Any, positions: Any, page_size: int) -> Any:
    """The slots of tokens.

    Args:
        page_table: integers `[B, most pages]`, the pages of each sequence in order.
        positions: integers `[B]` or `[B, n]`, positions in the sequences.
        page_size: tokens of a page.

    Returns:
        Integers of the shape of `positions`; -1 where a position or its page is negative, or the table has no page for
        the position.

    Raises:
        ArgumentError: an argument of the wrong shape or value.
    """
    page_size = check_int("slots", "page_size", page_size, 1)
    given = {"page_table": page_table, "positions": positions}
    _check_framework("slots", given)
    for name, x in given.items():
        _check_integers("slots", name, x)
    if page_table.ndim != 2:
        fail("slots", "page_table", "2 dimensions [B, most pages]", list(page_table.shape))
    if positions.ndim not in (1, 2) or positions.shape[0] != page_table.shape[0]:
        fail(
            "slots", "positions", f"shape [{page_table.shape[0]}] or [{page_table.shape[0]}, n]", list(positions.shape)
        )
    library = _library(page_table)
    page_table, positions = (
        x if str(x.dtype).removeprefix("torch.") == "int64" else _as_int32(x) for x in given.values()
    )
    if page_table.shape[1] == 0:
        return library.full_like(positions, -1)
    where = positions if positions.ndim == 2 else positions[:, None]
    last = page_table.shape[1] - 1
    place = library.clip(where // page_size, 0, last)
    rows = library.arange(page_table.shape[0], **_beside(page_table))[:, None]
    page = page_table[rows, place]
    found = page * page_size + where % page_size
    outside = (where < 0) | (page < 0) | (where // page_size > last)
    found = library.where(outside, -1, found)
    return found if positions.ndim == 2 else found[:, 0]


def merge(parts: Iterable[tuple[Any, Any]], *, layout: str | None = None) -> tuple[Any, Any]:
    """Join the results of calls on disjoint keys, such as a shared prefix and the keys after it.

    Args:
        parts: o and lse of each call, in the order in which they are summed: o as the op returns it, lse natural logs
            float32 `[B, Hq, Sq]`, or `[Hq, total_q]` with a packed o `[total_q, Hq, Dv]`. An lse rounded to 16 bits is
            refused, as it would change the weights by up to some percent; float64 is taken.
        layout: of an o with four axes: `"bhsd"` or `"bshd"`. The default is that of the framework's ops: `"bhsd"` in
            torch, `"bshd"` in JAX.

    Returns:
        o, in the dtype of the first o, and lse, of all keys together. A row without any key has o = 0, lse = -inf. If
        the variant has a sink, only one part may include it.

    Raises:
        ArgumentError: there is no part, a part is no pair of arrays of floats, or shapes differ.
    """
    if not isinstance(parts, Iterable):
        fail("merge", "parts", "pairs (o, lse)", type(parts).__name__)
    found = list(parts)
    if not found:
        fail("merge", "parts", "at least one pair (o, lse)", "none")
    for part in found:
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            fail("merge", "parts", "pairs (o, lse)", type(part).__name__)
    first_o, first_lse = found[0]
    for o, lse in found:
        _check_framework("merge", {"parts": first_o, "o": o, "lse": lse})
        for name, x, dtypes in (("o", o, _O_DTYPES), ("lse", lse, _LSE_DTYPES)):
            if str(x.dtype).removeprefix("torch.") not in dtypes:
                fail("merge", name, f"dtype {', '.join(dtypes[:-1])} or {dtypes[-1]}", x.dtype)
            if _framework(x) == "torch" and x.device != first_o.device:
                fail("merge", name, f"device {first_o.device}, that of the first o", x.device)
    layout = ("bhsd" if _framework(first_lse) == "torch" else "bshd") if layout is None else layout
    check_layout("merge", layout)
    for o, lse in found:
        if tuple(o.shape) != tuple(first_o.shape) or tuple(lse.shape) != tuple(first_lse.shape):
            fail(
                "merge",
                "parts",
                f"o {list(first_o.shape)} and lse {list(first_lse.shape)}, as the first",
                f"o {list(o.shape)} and lse {list(lse.shape)}",
            )
    swapped = first_o.ndim == 3 or layout == "bshd"
    rows = tuple(first_lse.shape)
    rows = (*rows[:-2], rows[-1], rows[-2]) if swapped else rows
    if tuple(first_o.shape[:-1]) != rows:
        fail(
            "merge",
            "parts",
            f"o [{', '.join(map(str, rows))}, Dv] beside lse {list(first_lse.shape)}",
            f"o {list(first_o.shape)}",
        )
    library = _library(first_lse)
    most = first_lse
    for _, lse in found[1:]:
        most = library.maximum(most, lse)
    # Where no part has a key the maximum is -inf, and -inf minus -inf is NaN.
    least = library.where(most == -float("inf"), library.zeros_like(most), most)
    weights = [library.exp(lse - least) for _, lse in found]
    total = sum(weights[1:], weights[0])
    divisor = library.where(total == 0, library.ones_like(total), total)
    o = sum(_by_row(weight / divisor, swapped) * part for weight, (part, _) in zip(weights, found, strict=True))
    lse = least + library.log(divisor)
    lse = library.where(total == 0, most, lse)
    return _as_dtype(o, first_o), lse


# ------------------------------------------------------------------------------------------------------------- arrays


def _framework(x: Any) -> str:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return ""


def _library(x: Any) -> Any:
    if _framework(x) == "torch":
        return sys.modules["torch"]
    # This import is hidden from type checkers, because the module also works without JAX.
    return import_module("jax.numpy")


def _beside(x: Any) -> dict[str, Any]:
    return {"device": x.device} if _framework(x) == "torch" else {}


def _by_row(weight: Any, swapped: bool) -> Any:
    """A weight of each head and row in a shape that broadcasts to o."""
    if swapped:
        weight = weight.swapaxes(-1, -2) if _framework(weight) == "jax" else weight.transpose(-1, -2)
    return weight[..., None]


def _as_dtype(x: Any, like: Any) -> Any:
    return x.to(like.dtype) if _framework(x) == "torch" else x.astype(like.dtype)


def _as_int32(x: Any) -> Any:
    return x.int() if _framework(x) == "torch" else x.astype("int32")


def _check_framework(function: str, arrays: Mapping[str, Any]) -> None:
    """Check that all are arrays of one framework."""
    framework = _framework(next(iter(arrays.values())))
    for name, x in arrays.items():
        if not framework or _framework(x) != framework:
            fail(function, name, "a torch.Tensor or jax.Array, as the others", type(x).__name__)
        if framework == "torch":
            from ._runtime.torch.dtypes import check_strided

            check_strided(function, name, x)


def _in_order(x: Any, page_layout: str) -> Any:
    """A cache with the axes page, slot, key head and column."""
    axes = PAGE_LAYOUTS[page_layout]
    if _framework(x) == "torch":
        return x.permute(*axes)
    shape = tuple(x.shape[axis] for axis in axes)
    return import_module("jax").ShapeDtypeStruct(shape, x.dtype)


def _check_ranks(arrays: Mapping[str, Any]) -> None:
    ranks = {"k": 3, "v": 3, "k_cache": 4, "v_cache": 4, "slots": 1}
    for name, x in arrays.items():
        if x.ndim != ranks[name]:
            fail("append", name, f"{ranks[name]} dimensions", f"{x.ndim}: {list(x.shape)}")


def _check_new(k: Any, v: Any | None, k_cache: Any, v_cache: Any | None, slots: Any) -> None:
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None or cache is None:
            continue
        for each, array in ((name, x), (f"{name}_cache", cache)):
            if "float" not in str(array.dtype):
                fail("append", each, "a dtype of floats", array.dtype)
        if tuple(x.shape[1:]) != tuple(cache.shape[2:]):
            fail(
                "append", f"{name}_cache", f"heads and columns {list(x.shape[1:])}, those of {name}", list(cache.shape)
            )
    if v_cache is not None and tuple(k_cache.shape[:2]) != tuple(v_cache.shape[:2]):
        fail(
            "append", "v_cache", f"pages and page size {list(k_cache.shape[:2])}, those of k_cache", list(v_cache.shape)
        )
    for name, x in (("v", v), ("slots", slots)):
        if x is not None and x.shape[0] != k.shape[0]:
            fail("append", name, f"{k.shape[0]} tokens, as many as k has", x.shape[0])
    _check_integers("append", "slots", slots)


def _check_integers(function: str, name: str, x: Any) -> None:
    if not str(x.dtype).removeprefix("torch.").startswith(("int", "uint")):
        fail(function, name, "a dtype of integers", x.dtype)
