# SPDX-License-Identifier: Apache-2.0
"""Calls on paged caches: their checks, what their kernels take, and the reference."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import paged_calls
from ..core.checks import check_int, check_layout, check_scale, fail
from ..core.options import check_family
from ..core.paged import CacheCall
from ..core.paged_calls import check_beside_pages as check_beside_pages
from ..core.paged_calls import (
    check_cache_dtype,
    check_cache_shapes,
    check_lengths,
    check_longest,
    check_sequences,
    fail_pages,
    is_empty,
    lies_in_pages,
    most_keys,
    most_queries,
    own_shape,
)
from ..core.paged_calls import check_without_pages as check_without_pages
from ..core.paged_calls import paged_schedule as paged_schedule
from ..core.paged_calls import plan_tables as plan_tables
from ..core.paged_calls import refuse_pages as refuse_pages
from ..core.paged_tiles import checked_paged_config
from ..core.sequences import refuse_nested
from ..core.settings import INTERPRET
from .cache_values import FP8_DTYPES, dequantised
from .devices import multiprocessors, paged_call_tiles
from .dispatch import runs_reference, values_are_checked
from .dtypes import FLOAT_DTYPES, as_integers, check_strided, is_autocast, is_integer
from .inputs import check_offset_word, check_tensor, offset_number, offset_tensor, positive_scale
from .prompts import converts_cache, tile_of_prompts
from .sequences import begins_of
from .strides import STRIDE_LIMIT
from .transforms import refuse_tangents


def autocast_queries(q: Any, k: Any, v: Any) -> Any:
    """q, under autocast in the dtype of the caches k and v: caches are read in place, so they are not cast.

    Beside caches of 8-bit floats, q is cast to autocast's dtype.
    """
    # The first condition alone decides most calls of a decoding loop.
    if getattr(q, "dtype", None) is getattr(k, "dtype", None):
        return q
    if not all(isinstance(x, Tensor) for x in (q, k, v)) or not is_autocast(q) or q.dtype not in FLOAT_DTYPES:
        return q
    wide = [x.dtype for x in (k, v) if x.dtype in FLOAT_DTYPES]
    return q.to(wide[0] if wide else torch.get_autocast_dtype(q.device.type))


def check_caches(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    scale: object,
    layout: str,
    q_offset: Any,
    page_table: Any,
    page_starts: Any,
    kv_lengths: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    splits: object,
    config: object = None,
    family: object = None,
) -> CacheCall:
    """Check the arguments of a call on paged caches."""
    check_layout(op, layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(op, name, x)
        if torch.is_grad_enabled() and x.requires_grad:
            fail(op, name, "a tensor without gradient in a paged call; packed calls have one", "one that requires grad")
    refuse_tangents(op, q=q, k=k, v=v)
    packed = cu_seqlens_q is not None
    check_cache_shapes(op, q.shape, k.shape, v.shape, packed=packed, layout=layout)
    _check_caches(op, q, k, v)
    if layout == "bshd" and not packed:
        q = q.transpose(1, 2)
    if scale is not None:
        check_scale(op, scale)
    if kv_lengths is None:
        fail(op, "kv_lengths", "an integer tensor [B] beside page_table", None)
    kv_lengths = _integers(op, "kv_lengths", kv_lengths, 1, k.device, "[B]")
    num_seqs = kv_lengths.shape[0]
    if packed:
        cu_seqlens_q = begins_of(op, "cu_seqlens_q", cu_seqlens_q, "q", q)
        check_sequences(op, num_seqs, None, cu_seqlens_q.shape[0])
    else:
        check_sequences(op, num_seqs, q.shape[0], None)
    page_table, page_starts, capacity = _check_pages(op, k, page_table, page_starts, num_seqs)
    most = q.shape[0] if packed else q.shape[2]
    if max_seqlen_q is not None:
        longest = check_int(op, "max_seqlen_q", max_seqlen_q, 1)
        # A trace would make the comparison a condition of its dynamic sizes.
        total = q.shape[0] if packed and not torch.compiler.is_compiling() else 0
        check_longest(op, longest, _most_queries(most, cu_seqlens_q), num_seqs, total)
        most = min(most, longest) if packed else most
    if values_are_checked(kv_lengths):
        starts = None if page_starts is None else page_starts.tolist()
        check_lengths(op, kv_lengths.tolist(), capacity, starts, k.shape[1])
    row_offset, row_offsets = _offset(op, q_offset, q, num_seqs)
    q, factor = positive_scale(q, scale)  # type: ignore[arg-type]
    if INTERPRET and q.dtype == torch.bfloat16:
        q, k, v = q.float(), *(x if x.element_size() == 1 else x.float() for x in (k, v))
    return cache_call(
        op, q, k, v, page_table, page_starts, kv_lengths, cu_seqlens_q, row_offset, row_offsets, factor,
        page_size=k.shape[1], most_keys=capacity, most_queries=most, splits=splits, config=config,
        family=check_family(op, family),
    )  # fmt: skip


def cache_call(op: str, *tensors: Any, config: object = None, **sizes: Any) -> CacheCall:
    """`paged_calls.cache_call`, without the classes of its sequences: what launches makes them."""
    return paged_calls.cache_call(op, *tensors, config=checked_paged_config(op, config), **sizes)


def with_classes(op: str, call: CacheCall) -> CacheCall:
    """A call with the classes of its sequences."""
    tiles = paged_call_tiles(op, call.q, call.k, call.group, call.config)
    hopper = tile_of_prompts(op, call)
    processors, converts = multiprocessors(call.q), converts_cache(op, call)
    return paged_calls.with_classes(call, processors, tiles, are_full=True, hopper_tile=hopper, converts=converts)


# -------------------------------------------------------------------------------------------------------------- checks


def _check_caches(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check dtypes, devices and strides."""
    if q.dtype not in FLOAT_DTYPES:
        fail(op, "q", "dtype float16, bfloat16 or float32", q.dtype)
    for name, x in (("k", k), ("v", v)):
        check_cache_dtype(op, name, x.dtype, q.dtype, FP8_DTYPES)
        if x.device != q.device:
            fail(op, name, f"device {q.device}, that of q", x.device)
        if x.stride(3) != 1:
            fail(op, name, "a last stride of 1: a cache is read in place", f"strides {list(x.stride())}")
        if x.shape[1] > 1 and x.stride(1) >= STRIDE_LIMIT:
            fail(op, name, f"keys of a page less than {STRIDE_LIMIT} elements apart", f"strides {list(x.stride())}")


def _integers(
    op: str, name: str, x: Any, rank: int, device: torch.device, shape: str, *, strided: bool = False
) -> Tensor:
    """An int32 tensor; its rows may be apart in memory if it may be `strided`."""
    if not isinstance(x, Tensor):
        fail(op, name, f"an integer tensor {shape} on {device}", type(x).__name__)
    refuse_nested(op, name, x)
    if not is_integer(x.dtype) or x.dim() != rank or x.device != device:
        got = f"{x.dtype} {list(x.shape)} on {x.device}"
        fail(op, name, f"an integer tensor {shape} on {device}", got)
    found = as_integers(op, name, x)
    return found if strided and found.stride(-1) == 1 else found.contiguous()


def _most_queries(most: int, cu_seqlens_q: Tensor | None) -> int:
    """The queries of the longest sequence; 0 if only the device knows them."""
    if cu_seqlens_q is None:
        return most
    return most_queries(cu_seqlens_q.tolist()) if values_are_checked(cu_seqlens_q) else 0


def _check_pages(
    op: str, k: Tensor, page_table: Any, page_starts: Any, num_seqs: int
) -> tuple[Tensor, Tensor | None, int]:
    """The table and where each sequence's pages begin in it, checked, and the most keys that a sequence may have."""
    if page_starts is None:
        table = _integers(op, "page_table", page_table, 2, k.device, "[B, most pages]", strided=True)
        return table, None, most_keys(op, num_seqs, k.shape[1], table.shape, None)
    table = _integers(op, "page_table", page_table, 1, k.device, "[all pages] beside page_starts")
    starts = _integers(op, "page_starts", page_starts, 1, k.device, "[B + 1]")
    return table, starts, most_keys(op, num_seqs, k.shape[1], table.shape, starts.shape)


def _offset(op: str, q_offset: Any, q: Tensor, num_seqs: int) -> tuple[int | None, Tensor | None]:
    """The position of the first query, for all sequences or for each; None and None if it follows from lengths."""
    if q_offset is None or isinstance(q_offset, str):
        if q_offset is not None:
            check_offset_word(op, q_offset)
        return None, None
    if isinstance(q_offset, Tensor) and q_offset.dim() > 0:
        return 0, offset_tensor(op, q_offset, num_seqs, q.device)
    return offset_number(op, q_offset), None


def own_tensor(
    op: str, call: CacheCall, name: str, x: Any, dims: tuple[str | int, ...], dtypes: tuple[str, ...]
) -> Tensor:
    """One of the variant's own tensors, whose dims in a dense call these are, checked, with the axes kernels read."""
    shape = own_shape(call, dims)
    checked = check_tensor(op, name, x, shape.sizes, dtypes, call.q)
    if torch.is_grad_enabled() and checked.requires_grad:
        fail(op, name, "a tensor without gradient in a paged call; packed calls have one", "one that requires grad")
    if shape.batch_axis is not None:
        sizes = [-1] * len(dims)
        sizes[shape.batch_axis] = call.num_seqs
        return checked.unsqueeze(shape.batch_axis).expand(sizes)
    return checked


# ----------------------------------------------------------------------------------------------------------- reference


def computes_reference(call: CacheCall) -> bool:
    """Whether a call computes the plain reference, or has nothing for kernels to read."""
    return runs_reference(call.q) or is_empty(call)


class Gathered(NamedTuple):
    """The sequences of a call in the form of a packed call.

    `page` and `slot` are the places of the keys, `number` the pages as the table names them. Keys on pages beyond the
    cache are NaN.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    q_offset: int | Tensor
    page: Tensor
    slot: Tensor
    number: Tensor
    packed: bool

    def own(self, x: Tensor, *dims: str | int) -> Tensor:
        """One of the variant's own tensors, of these dims in a dense call, as the packed reference takes it."""
        if lies_in_pages(dims):
            axis = [d for d in dims if d != "b"].index("kv_idx")
            found = x.movedim((axis, axis + 1), (0, 1))[self.page, self.slot]
            return found.movedim(0, axis)
        if "q_idx" not in dims:
            return x
        rows = self._by_row(x, dims)
        return self._pairs(rows, dims) if "kv_idx" in dims else rows

    def _by_row(self, x: Tensor, dims: Sequence[str | int]) -> Tensor:
        """The tensor with one axis of packed query rows in place of its axes of batch rows and queries."""
        if self.packed:
            return x.select(dims.index("b"), 0) if "b" in dims else x
        if "b" not in dims:
            return torch.cat([x] * (len(self.cu_seqlens_q) - 1), dims.index("q_idx"))
        batch, queries = dims.index("b"), dims.index("q_idx")
        first = x.movedim((batch, queries), (0, 1)).flatten(0, 1)
        return first.movedim(0, queries - (batch < queries))

    def _pairs(self, x: Tensor, dims: Sequence[str | int]) -> Tensor:
        """The tensor with each sequence's columns moved to the packed keys of that sequence, and 0 elsewhere.

        The keys from the last column on read that one.
        """
        kept = [d for d in dims if d != "b"]
        rows, cols = kept.index("q_idx"), kept.index("kv_idx")
        x = x.movedim((rows, cols), (0, 1))
        found = x.new_zeros((x.shape[0], int(self.cu_seqlens_k[-1]), *x.shape[2:]))
        begins, ends = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for n in range(len(begins) - 1):
            columns = torch.arange(ends[n + 1] - ends[n], device=x.device).clamp(max=x.shape[1] - 1)
            found[begins[n] : begins[n + 1], ends[n] : ends[n + 1]] = x[begins[n] : begins[n + 1], columns]
        return found.movedim((0, 1), (rows, cols))


def gathered(call: CacheCall) -> Gathered:
    """The keys of all sequences, one sequence after the other, for the reference. It waits for the lengths."""
    assert call.page_table is not None
    assert call.kv_lengths is not None
    lengths = call.kv_lengths.long().clamp(0, call.most_keys)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    seq = torch.repeat_interleave(torch.arange(call.num_seqs, device=lengths.device), lengths)
    place = torch.arange(len(seq), device=lengths.device) - ends[seq]
    if call.page_starts is None:
        page = call.page_table.long()[seq, place // call.page_size]
    else:
        page = call.page_table.long()[call.page_starts.long()[seq] + place // call.page_size]
    # Entries of the table for pages that no query sees may have any value.
    number, page = page, page.clamp(0, call.k.shape[0] - 1)
    slot = place % call.page_size
    q, cu_seqlens_q = call.q, call.cu_seqlens_q
    if cu_seqlens_q is None:
        q = q.transpose(1, 2).flatten(0, 1)
        cu_seqlens_q = torch.arange(call.num_seqs + 1, device=q.device, dtype=torch.int32) * call.q.shape[2]
    keys = dequantised(call.k, call.k_scale, 1.0, page, slot)
    keys = keys.masked_fill((number != page)[:, None, None], float("nan"))
    values = dequantised(call.v, call.v_scale, call.v_factor, page, slot)
    offset = lengths.int() - cu_seqlens_q.diff() if call.at_end else call.offset
    return Gathered(q, keys, values, cu_seqlens_q, ends.int(), offset, page, slot, number, call.packed)


def check_pages(op: str, call: CacheCall, packed: Gathered, lse: Tensor) -> None:
    """Refuse pages beyond the cache on which a query sees keys: then a row of lse, `[Hq, total_q]`, is NaN."""
    beyond = packed.number != packed.page
    begins = zip(*(pairwise(x.tolist()) for x in (packed.cu_seqlens_q, packed.cu_seqlens_k)), strict=True)
    for number, (rows, keys) in enumerate(begins):
        pages = packed.number[slice(*keys)][beyond[slice(*keys)]]
        if len(pages) > 0 and lse[:, slice(*rows)].isnan().any():
            fail_pages(op, call.k.shape[0], pages.unique().tolist(), number)


def reference_results(call: CacheCall, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a packed reference in the shape of the call."""
    if call.packed:
        return o, lse
    batch, heads, queries = call.q.shape[:3]
    return o.view(batch, queries, heads, o.shape[-1]).transpose(1, 2), lse.view(heads, batch, queries).transpose(0, 1)
