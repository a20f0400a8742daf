# SPDX-License-Identifier: Apache-2.0
"""The caches of a log-decay's running sum: their checks, the log-decays that the reference reads, and `append_decay`.

A sum G runs from the first token of a sequence. For each page `g_base` has G before the page's first token, rounded to
float32. For each token `g_cache` has the difference between G and that number. So G has the digits of two float32
numbers, and a difference of two sums those of one.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import fail
from ..core.paged import CacheCall
from ..core.paged_calls import check_lengths, most_keys
from ..core.paged_decay import (
    APPEND,
    BASE,
    LOCAL,
    check_decay_cache,
    check_first_sizes,
    check_new_decays,
    check_pages,
    decay_cache_shapes,
    decay_shapes_to_append,
    launch_sums,
)
from ..core.sequences import refuse_nested
from ..core.settings import INTERPRET, require_triton
from . import backend
from .dispatch import launches_directly, values_are_checked
from .dtypes import as_integers, is_integer
from .operators import register_writer
from .paged import Gathered
from .sequences import begins_of
from .strides import check_apart
from .transforms import refuse_tangents


def check_decay_caches(op: str, call: CacheCall, g: Any, g_base: Any) -> None:
    """Check the caches of a paged call."""
    given = {LOCAL: g, BASE: g_base}
    for name, shape in decay_cache_shapes(call).items():
        _check_cache(op, name, given[name], shape, call.q.device)


def check_without_base(op: str, g_base: Any) -> None:
    """Refuse bases in a call that is not paged."""
    if g_base is not None:
        fail(op, "g_base", "None without page_table", type(g_base).__name__)


def _check_cache(op: str, name: str, x: Any, shape: tuple[int, ...], device: torch.device) -> None:
    refuse_nested(op, name, x)
    is_tensor = isinstance(x, Tensor)
    fits = is_tensor and x.dtype == torch.float32 and x.device == device
    got = f"{x.dtype} {list(x.shape)} on {x.device}" if is_tensor else "nothing" if x is None else type(x).__name__
    check_decay_cache(op, name, x.shape if is_tensor else None, shape, fits=fits, where=f" on {device}", got=got)
    refuse_tangents(op, **{name: x})
    if torch.is_grad_enabled() and x.requires_grad:
        fail(op, name, "a tensor without gradient in a paged call; packed calls have one", "one that requires grad")


def log_decays(packed: Gathered, g: Tensor, g_base: Tensor) -> tuple[Tensor, Tensor]:
    """The log-decays of the gathered keys, float64 `[total_k, Hq]`, and which keys have sums that are finite.

    The running sums of the log-decays are what the caches hold, and 0 for other keys: a page that no query sees may
    hold NaN, which a running sum would carry on to all later keys.
    """
    total = g_base[packed.page].double() + g[packed.page, packed.slot].double()
    is_finite = total.isfinite()
    total = total.where(is_finite, 0.0)
    before = total.roll(1, 0)
    starts = packed.cu_seqlens_k[:-1].long()
    before[starts[starts < len(total)]] = 0
    return total - before, is_finite.all(1)


# -------------------------------------------------------------------------------------------------------------- append


def append_decay(
    g: Tensor,
    g_cache: Tensor,
    g_base: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    page_starts: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Continue the running sums of sequences, in place. The caller has checked that g and the caches are tensors."""
    needed = {"page_table": page_table, "kv_lengths": kv_lengths}
    others = {"page_starts": page_starts, "cu_seqlens": cu_seqlens}
    for name, x in {**needed, **others}.items():
        if not isinstance(x, Tensor) and (x is not None or name in needed):
            fail(APPEND, name, f"an integer tensor on {g.device}", type(x).__name__)
        refuse_nested(APPEND, name, x)
    passed = (g, g_cache, g_base, page_table, kv_lengths, page_starts, cu_seqlens)
    (_append if launches_directly(*passed) else _append_operator)(*passed)
    return g_cache, g_base


def _append(
    g: Tensor,
    g_cache: Tensor,
    g_base: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    page_starts: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    packed, device = cu_seqlens is not None, g.device
    got = f"{g.dtype} {list(g.shape)}"
    check_new_decays(g.shape, packed=packed, is_float=g.dtype.is_floating_point, got=got)
    given = {"g_cache": g_cache, "g_base": g_base}
    for name, shape in decay_shapes_to_append(g.shape, g_cache.shape).items():
        _check_cache(APPEND, name, given[name], shape, device)
        check_apart(APPEND, name, given[name])
    kv_lengths = _int32(kv_lengths, "kv_lengths", 1, device)
    num_seqs = kv_lengths.shape[0]
    page_table = _int32(page_table, "page_table", 2 if page_starts is None else 1, device)
    if page_starts is not None:
        page_starts = _int32(page_starts, "page_starts", 1, device)
    starts, begins = (None if x is None else x.shape for x in (page_starts, cu_seqlens))
    check_first_sizes(num_seqs, g.shape, page_table.shape, starts, begins)
    if values_are_checked(kv_lengths):
        most = most_keys(APPEND, num_seqs, g_cache.shape[1], page_table.shape, starts)
        first = None if page_starts is None else page_starts.tolist()
        check_lengths(APPEND, kv_lengths.clamp(min=0).tolist(), most, first, g_cache.shape[1])
    if cu_seqlens is not None:
        cu_seqlens = begins_of(APPEND, "cu_seqlens", cu_seqlens, "g", g)
    if g.numel() == 0:
        return
    if all(x is None or values_are_checked(x) for x in (page_table, kv_lengths, page_starts, cu_seqlens)):
        new = [g.shape[1] * b for b in range(num_seqs + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        first = None if page_starts is None else page_starts.tolist()
        check_pages(g_cache.shape[0], g_cache.shape[1], kv_lengths.tolist(), new, page_table.tolist(), first)
    rows = g.detach() if cu_seqlens is not None else g.detach().flatten(0, 1)
    if device.type == "cpu" and not INTERPRET:
        _assign(rows, g_cache, g_base, page_table, kv_lengths, page_starts, cu_seqlens)
        return
    require_triton(APPEND)
    from ..device.paged_decay import append_sums

    new_rows = 0 if packed else g.shape[1]
    launch_sums(backend, append_sums, rows, g_cache, g_base, page_table, page_starts, kv_lengths, cu_seqlens, new_rows)


_append_operator = register_writer(__name__, APPEND, _append, ("g_cache", "g_base"))


def _int32(x: Tensor, name: str, rank: int, device: torch.device) -> Tensor:
    if not is_integer(x.dtype) or x.dim() != rank or x.device != device:
        fail(APPEND, name, f"an integer tensor of {rank} dimensions on {device}", f"{x.dtype} {list(x.shape)}")
    return as_integers(APPEND, name, x).contiguous()


def _assign(
    g: Tensor,
    g_cache: Tensor,
    g_base: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    page_starts: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Do in torch what the kernel does, sequence by sequence."""
    size, num_seqs = g_cache.shape[1], len(kv_lengths)
    each = len(g) // num_seqs
    begins = [each * b for b in range(num_seqs + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    for b, length in enumerate(kv_lengths.tolist()):
        own = g[begins[b] : begins[b + 1]].double()
        if len(own) == 0:
            continue
        start = length - len(own)
        own, start = own[max(-start, 0) :], max(start, 0)
        pages = page_table[b] if page_starts is None else page_table[int(page_starts[b]) : int(page_starts[b + 1])]
        total = torch.zeros_like(g_base[0], dtype=torch.float64)
        if start > 0:
            page, slot = int(pages[(start - 1) // size]), (start - 1) % size
            # A negative page would count from the end. The kernel reads and writes nothing there.
            if page >= 0:
                total = g_base[page].double() + g_cache[page, slot].double()
        while len(own) > 0:
            page, slot = int(pages[start // size]), start % size
            new = min(size - slot, len(own))
            if page >= 0:
                if slot == 0:
                    g_base[page] = total.float()
                sums = total + own[:new].cumsum(0)
                g_cache[page, slot : slot + new] = (sums - g_base[page].double()).float()
                total = sums[-1]
            own, start = own[new:], start + new
