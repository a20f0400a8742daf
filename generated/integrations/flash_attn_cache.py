# SPDX-License-Identifier: Apache-2.0
"""`flash_attn.flash_attn_with_kvcache`: append to a cache, and attend to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import paging
from .._runtime.core.checks import check_flag, check_int, fail
from .._runtime.torch.dispatch import values_are_checked
from .flash_attn_interface import Window, no_key_as_inf
from .flash_calls import Chosen, chosen

__all__ = ["flash_attn_with_kvcache"]

_TITLE = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to cached keys, the last query aligned with the last key. It has no gradient.

    Args:
        q: `[B, Sq, Hq, D]`.
        k_cache: `[rows, capacity, Hkv, D]`, or with `block_table` `[pages, page size, Hkv, D]` of any page size.
        v_cache: the same of values.
        k: new keys `[B, n, Hkv, D]`, written to the cache, in place, from position `cache_seqlens` of a sequence on.
        v: the same of values.
        rotary_cos: `[positions, rotary dim / 2]`, at least as many positions as the cache: new keys are rotated by
            their positions before they are written. Query i is rotated as the new key i if the call is causal or has
            a window, else every query by position `cache_seqlens`.
        rotary_sin: the same.
        cache_seqlens: keys of each sequence before the new ones, integers `[B]` or one for all; by default the
            capacity.
        cache_batch_idx: integers `[B]`, the cache's row of each sequence; by default the first B rows in order.
        cache_leftpad: integers `[B]`, the place in its row of the cache where each sequence begins. Positions count
            from there. Keys are then read one by one, which is slow.
        block_table: integers `[B, most pages]`, the pages of each sequence in order.
        softmax_scale: by default `D ** -0.5`.
        causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: columns 0 and 1, 2 and 3 are rotated together; else 0 and rotary dim / 2, and so on.
        num_splits: the number of parts that keys are split into; with 0 the op decides by a sequence's length.
        return_softmax_lse: also return the logs of the softmax denominators, float32 `[B, Hq, Sq]`.

    Returns:
        o `[B, Sq, Hq, D]`, or `(o, lse)`. A row without any key has o = 0, lse = +inf.

    Raises:
        ArgumentError: an argument of the wrong shape or value, two that exclude each other, or a q that requires grad.
        NotRenderedError: no variant computes the call; the message has the entry to add.
    """
    _check(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    )
    window_size = _within_cache(window_size, k_cache, block_table)
    found = chosen(
        _TITLE,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        heads=q.shape[2],
        batch=q.shape[0],
    )
    num_splits = check_int(_TITLE, "num_splits", num_splits, 0)
    check_flag(_TITLE, "rotary_interleaved", rotary_interleaved)
    check_flag(_TITLE, "return_softmax_lse", return_softmax_lse)
    cache = _cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table)
    cache.check_values(0 if k is None else k.shape[1], cache_leftpad)
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            steps = causal or any(size >= 0 for size in window_size)
            q, k = _rotated(cache, q, k, rotary_cos, rotary_sin, steps=steps, interleaved=rotary_interleaved)
        cache = cache.with_tokens(k, v)
    if cache_leftpad is not None:
        cache = cache.from_places(_integers("cache_leftpad", cache_leftpad, q))
    return _attended(found, q, cache, softmax_scale, num_splits, return_softmax_lse)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Cache:
    """Caches in pages `[pages, page size, Hkv, D]`: without a block table, each row of the cache is one page.

    table: `[B, pages of a sequence]`. lengths: int32 `[B]`, keys of each sequence.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.k.shape[1]

    def check_values(self, more: int, first: Any) -> None:
        """Check values that wait for no device, before the cache changes. `more`: the number of new keys."""
        _check_within("cache_seqlens", self.lengths, 0, self.capacity - more)
        if first is not None:
            _check_within("cache_leftpad", _integers("cache_leftpad", first, self.lengths), 0, self.lengths)

    def with_tokens(self, k: Tensor, v: Tensor) -> "_Cache":
        """The cache once k and v `[B, n, Hkv, D]` have been written, in place."""
        positions = self.lengths[:, None] + torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
        slots = paging.slots(self.table, positions, self.k.shape[1]).flatten()
        paging.append(k.detach().flatten(0, 1), v.detach().flatten(0, 1), self.k, self.v, slots)
        return _Cache(k=self.k, v=self.v, table=self.table, lengths=self.lengths + k.shape[1])

    def from_places(self, first: Tensor) -> "_Cache":
        """The cache without the places before `first` in each row, as a cache with pages of one token."""
        size = self.k.shape[1]
        for name, x in (("k_cache", self.k), ("v_cache", self.v)):
            if x.stride(0) != size * x.stride(1):
                fail(_TITLE, name, "rows that follow each other in memory, beside cache_leftpad", list(x.stride()))
        places = first[:, None] + torch.arange(size, dtype=torch.int32, device=first.device)
        table = self.table * size + places.clamp(max=size - 1)
        k, v = (x.flatten(0, 1)[:, None] for x in (self.k, self.v))
        return _Cache(k=k, v=v, table=table, lengths=self.lengths - first)


def _cache(q: Tensor, k: Tensor, v: Tensor, lengths: Any, rows: Tensor | None, table: Tensor | None) -> _Cache:
    if table is None:
        own = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        if rows is not None:
            own = _integers("cache_batch_idx", rows, q)
            _check_within("cache_batch_idx", own, 0, k.shape[0] - 1)
        table = own[:, None]
    capacity = table.shape[1] * k.shape[1]
    if isinstance(lengths, Tensor):
        lengths = _integers("cache_seqlens", lengths, q)
    else:
        length = capacity if lengths is None else check_int(_TITLE, "cache_seqlens", lengths, 0)
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    return _Cache(k=k, v=v, table=table.to(torch.int32), lengths=lengths)


def _within_cache(window: Window, k: Tensor, table: Tensor | None) -> Window:
    """The window, without bounds that are as large as the cache, which flash_attn takes for none."""
    capacity = k.shape[1] if table is None else k.shape[1] * table.shape[1]
    if not isinstance(window, tuple | list):
        return window  # The choice of the variant refuses it.
    return tuple(-1 if type(x) is int and x >= capacity else x for x in window)  # type: ignore[return-value]


def _attended(
    found: Chosen, q: Tensor, cache: _Cache, scale: float | None, num_splits: int, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    splits = None if num_splits == 0 else 1 if num_splits == 1 else -(-cache.capacity // num_splits)
    o, lse = found.op(
        q,
        cache.k,
        cache.v,
        **found.arguments,
        page_table=cache.table,
        kv_lengths=cache.lengths,
        layout="bshd",
        scale=scale,
        splits=splits,
        return_lse=True,
    )
    return (o, no_key_as_inf(lse)) if return_lse else o


def _rotated(
    cache: _Cache, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, steps: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """q and k after rotary embedding (arXiv:2104.09864); `steps`: the position rises from query to query."""
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        expected = f"[at least {cache.capacity}, at most {q.shape[3] // 2}]: positions, half of the rotary dim"
        if not isinstance(x, Tensor):
            fail(_TITLE, name, f"a tensor {expected}", type(x).__name__)
        if x.dim() != 2 or x.shape[0] < cache.capacity or 2 * x.shape[1] > q.shape[3]:
            fail(_TITLE, name, expected, list(x.shape))
    if sin.shape[1] != cos.shape[1]:
        fail(_TITLE, "rotary_sin", f"{cos.shape[1]} columns, those of rotary_cos", list(sin.shape))
    if steps and q.shape[1] > k.shape[1]:
        _check_positions(cache, cos, q.shape[1])
    first = cache.lengths[:, None].long()
    steps_q = torch.arange(q.shape[1], device=q.device) if steps else torch.zeros(1, dtype=torch.int64, device=q.device)
    steps_k = torch.arange(k.shape[1], device=q.device)
    return tuple(
        _turned(x, cos[first + step], sin[first + step], interleaved=interleaved)
        for x, step in ((q, steps_q), (k, steps_k))
    )  # type: ignore[return-value]


def _check_positions(cache: _Cache, cos: Tensor, queries: int) -> None:
    """Check that each query has a position in rotary_cos; of cache lengths on a GPU, the smallest possible only."""
    longest = int(cache.lengths.max()) if len(cache.lengths) and values_are_checked(cache.lengths) else 0
    if longest + queries > cos.shape[0]:
        expected = f"at least {longest + queries} positions, as each query is rotated by its own"
        fail(_TITLE, "rotary_cos", expected, list(cos.shape))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x `[B, S, H, D]`, its first columns rotated by cos and sin `[B, S or 1, rotary dim / 2]`, in float32."""
    cos, sin = cos.float()[:, :, None], sin.float()[:, :, None]
    width = 2 * cos.shape[-1]
    turned = x[..., :width].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)


def _integers(name: str, x: Any, q: Tensor) -> Tensor:
    """A tensor with an integer for each sequence, as int32."""
    expected = f"integers [{q.shape[0]}] on {q.device}"
    if not isinstance(x, Tensor):
        fail(_TITLE, name, expected, type(x).__name__)
    wrong = x.dtype.is_floating_point or x.dtype == torch.bool or x.shape != q.shape[:1] or x.device != q.device
    if wrong:
        fail(_TITLE, name, expected, f"{x.dtype} {list(x.shape)} on {x.device}")
    return x.to(torch.int32)


def _check_within(name: str, x: Tensor, least: int, most: int | Tensor) -> None:
    """Check values that are known and on the host; otherwise the call would wait for the device."""
    if not values_are_checked(x):
        return
    outside = (x < least) | (x > most)
    if outside.any():
        row = int(outside.nonzero()[0, 0])
        end = int(most[row]) if isinstance(most, Tensor) else most
        fail(_TITLE, name, f"{least} to {end}", f"{int(x[row])} at {row}")


def _check(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    lengths: Any,
    rows: Any,
    left: Any,
    table: Any,
) -> None:
    """Check which arguments may be given together; the op checks the arguments that it gets."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is None and name in ("k", "v"):
            continue
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            fail(_TITLE, name, "a tensor of 4 axes, [B, S, H, D]", got)
        if torch.is_grad_enabled() and x.requires_grad:
            fail(_TITLE, name, "a tensor without gradient: call it under torch.no_grad()", "one that requires grad")
    if (k is None) != (v is None):
        fail(_TITLE, "v" if v is None else "k", "given with the other of k and v, or neither", None)
    if k is not None and lengths is None:
        fail(_TITLE, "cache_seqlens", "given beside k: where new keys are written", None)
    for name, x, x_cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None:
            continue
        expected = [q.shape[0], k.shape[1], *x_cache.shape[2:]]
        if list(x.shape) != expected:
            fail(
                _TITLE,
                name,
                f"shape {expected}: the batch of q, one length for k and v, the cache's heads",
                list(x.shape),
            )
    if (cos is None) != (sin is None):
        fail(_TITLE, "rotary_sin" if sin is None else "rotary_cos", "given with the other, or neither", None)
    if cos is not None and k is None:
        fail(_TITLE, "rotary_cos", "None without k: it rotates new keys", "a tensor")
    if table is not None:
        if not isinstance(table, Tensor) or table.dim() != 2 or table.is_floating_point():
            got = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
            fail(_TITLE, "block_table", "integers [B, most pages]", got)
        for name, x in (("cache_batch_idx", rows), ("cache_leftpad", left)):
            if x is not None:
                fail(_TITLE, name, "None beside block_table", "a tensor")
    elif rows is None and k_cache.shape[0] < q.shape[0]:
        text = f"at least {q.shape[0]} rows, as many as q, without cache_batch_idx"
        fail(_TITLE, "k_cache", text, list(k_cache.shape))
