# SPDX-License-Identifier: Apache-2.0
"""Packed sequences, and batches with segment ids, positions and lengths: checks, and how references loop over them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import PACKED, check_padding_id, fail, shown
from ..core.sequences import ByRow, TokenRows, breaks_rule, check_begins, fail_order, refuse_nested
from .dispatch import launches_directly, values_are_checked
from .dtypes import as_integers, is_integer
from .inputs import check_offset_word, check_qkv, offset_number, offset_tensor, readable


class Tokens(NamedTuple):
    """Segment ids and positions of a call's queries and keys, int32 `[B, Sq]` and `[B, Skv]`, the last stride 1 or 0.

    Ids are always there: if none were given, they are all the same. Keys beyond the length of a batch row have
    `padding_id`. Positions are None if they are the indices of rows.
    """

    q_segment_ids: Tensor
    kv_segment_ids: Tensor
    q_positions: Tensor | None
    kv_positions: Tensor | None

    @property
    def kind(self) -> str:
        """The kind of calls a schedule is made for."""
        return "of rows with segment ids" if self.q_positions is None else "of rows with positions"


def check_packed(
    op: str, q: Any, k: Any, v: Any, scale: object, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a packed call, q, k and v `[total, H, D]`; returns where sequences of q and k begin.

    The values are read only on the CPU and in debug mode: elsewhere that would wait for the device.
    """
    check_qkv(op, q, k, v, scale, PACKED)
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            got = f"None for q of {q.shape[0]} rows and k of {k.shape[0]}"
            fail(op, "cu_seqlens_k", "an integer tensor [n + 1] where q and k differ in length", got)
        cu_seqlens_q = begins_of(op, "cu_seqlens_q", cu_seqlens_q, "q", q)
        return cu_seqlens_q, cu_seqlens_q
    cu_seqlens_q = begins_of(op, "cu_seqlens_q", cu_seqlens_q, "q", q)
    cu_seqlens_k = begins_of(op, "cu_seqlens_k", cu_seqlens_k, "k", k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"{cu_seqlens_q.shape[0]} elements, as many as cu_seqlens_q"
        fail(op, "cu_seqlens_k", expected, cu_seqlens_k.shape[0])
    return cu_seqlens_q, cu_seqlens_k


def begins_of(op: str, name: str, cu_seqlens: Any, packed: str, x: Tensor) -> Tensor:
    """Where the sequences of `x` begin, and as the last element the length of `x`, checked."""
    expected = f"an integer tensor [n + 1] on {x.device}"
    if not isinstance(cu_seqlens, Tensor):
        fail(op, name, expected, type(cu_seqlens).__name__)
    refuse_nested(op, name, cu_seqlens)
    fits = is_integer(cu_seqlens.dtype) and cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0
    if not fits or cu_seqlens.device != x.device:
        fail(op, name, expected, f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}")
    begins = as_integers(op, name, cu_seqlens)
    if values_are_checked(begins):
        check_begins(op, name, begins.tolist(), packed, x.shape[0])
    return begins.contiguous()


def packed_offset(
    op: str, q_offset: Any, q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[int, Tensor | None]:
    """The offset as (number, None) or (0, one int32 per sequence). `"end"` aligns the last query with the last key."""
    if isinstance(q_offset, Tensor) and q_offset.dim() > 0:
        return 0, offset_tensor(op, q_offset, cu_seqlens_q.shape[0] - 1, q.device)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        return (0, None) if cu_seqlens_k is cu_seqlens_q else (0, (cu_seqlens_k - cu_seqlens_q).diff())
    return offset_number(op, q_offset), None


def check_tokens(
    op: str,
    q: Tensor,
    k: Tensor,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    q_positions: Any,
    kv_positions: Any,
    kv_lengths: Any,
    padding_id: Any,
    q_offset: Any,
) -> Tokens | None:
    """Check the segment ids, positions and lengths of a call, if any; q and k are `[B, H, S, D]`.

    Nothing waits for the device.
    """
    padding_id = check_padding_id(op, padding_id)
    by_ids = q_segment_ids is not None or kv_segment_ids is not None or kv_lengths is not None
    if not by_ids and q_positions is None and kv_positions is None:
        return None
    q_ids, kv_ids = _pair(op, "q_segment_ids", q_segment_ids, "kv_segment_ids", kv_segment_ids, q, k)
    q_positions, kv_positions = _pair(op, "q_positions", q_positions, "kv_positions", kv_positions, q, k)
    if q_positions is not None and not (type(q_offset) is int and q_offset == 0):
        got = type(q_offset).__name__ if isinstance(q_offset, Tensor) else shown(q_offset)
        fail(op, "q_offset", "0 beside q_positions, which say where queries are", got)
    batch = q.shape[0]
    if q_ids is None or kv_ids is None:
        same = torch.full((1, 1), int(padding_id == 0), dtype=torch.int32, device=q.device)
        q_ids, kv_ids = same.expand(batch, q.shape[2]), same.expand(batch, k.shape[2])
    if kv_lengths is not None:
        lengths = int32_of(op, "kv_lengths", kv_lengths, (batch,), q.device)
        inside = torch.arange(k.shape[2], dtype=torch.int32, device=q.device) < lengths[:, None]
        kv_ids = torch.where(inside, kv_ids, padding_id)
    return Tokens(q_ids, kv_ids, q_positions, kv_positions)


def check_order(op: str, tokens: Tokens | None, padding_id: int, by_row: ByRow) -> None:
    """Check the rule for positions, unless reading them would wait for a device."""
    if tokens is None or tokens.q_positions is None:
        return
    if launches_directly(tokens.q_positions) and values_are_checked(tokens.q_positions):
        fail_order(op, by_row, positions_break_rule(tokens, padding_id, by_row).tolist())


def marked(o: Tensor, lse: Tensor, tokens: Tokens | None, padding_id: int, by_row: ByRow) -> tuple[Tensor, Tensor]:
    """o and lse of a reference that is traced: NaN in batch rows whose positions break the rule of the op."""
    if tokens is None or tokens.q_positions is None or launches_directly(tokens.q_positions):
        return o, lse
    factor = torch.where(positions_break_rule(tokens, padding_id, by_row), float("nan"), 1.0)
    return o * factor.view(-1, 1, 1, 1).to(o.dtype), lse * factor.view(-1, 1, 1).to(lse.dtype)


def positions_break_rule(tokens: Tokens, padding_id: int, by_row: ByRow) -> Tensor:
    """Booleans `[B]`: true where the positions of a batch row break the rule of the op."""

    def rows_of(ids: Tensor, positions: Tensor | None) -> TokenRows:
        return TokenRows(ids, positions, torch.arange(ids.shape[1], device=ids.device))

    queries = rows_of(tokens.q_segment_ids, tokens.q_positions)
    broken: Tensor = breaks_rule(queries, rows_of(tokens.kv_segment_ids, tokens.kv_positions), padding_id, by_row)
    return broken


def key_lengths(k: Tensor, kv_lengths: Tensor | None) -> Tensor:
    """How many keys each batch row has, int32 `[B]`; k is `[B, H, S, D]`, the lengths are checked."""
    if kv_lengths is not None:
        return kv_lengths.to(torch.int32)
    return torch.full((1,), k.shape[2], dtype=torch.int32, device=k.device).expand(k.shape[0])


def _pair(
    op: str, q_name: str, of_queries: Any, kv_name: str, of_keys: Any, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Ids or positions of queries and of keys, checked; those of queries serve both if they are given alone."""
    q_shape, kv_shape = (q.shape[0], q.shape[2]), (k.shape[0], k.shape[2])
    if of_queries is None:
        if of_keys is not None:
            fail(op, q_name, f"an integer tensor {list(q_shape)} beside {kv_name}", None)
        return None, None
    queries = int32_of(op, q_name, of_queries, q_shape, q.device)
    if of_keys is None:
        if q_shape != kv_shape:
            fail(op, kv_name, f"an integer tensor {list(kv_shape)} where q and k differ in length", None)
        return queries, queries
    return queries, int32_of(op, kv_name, of_keys, kv_shape, q.device)


def int32_of(op: str, name: str, x: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of integers of this shape, checked, as int32, its last stride 1."""
    expected = f"an integer tensor {list(shape)} on {device}"
    if not isinstance(x, Tensor):
        fail(op, name, expected, type(x).__name__)
    refuse_nested(op, name, x)
    if not is_integer(x.dtype) or x.shape != shape or x.device != device:
        fail(op, name, expected, f"{x.dtype} {list(x.shape)} on {x.device}")
    cast = as_integers(op, name, x)
    return cast if cast.stride(-1) == 1 else cast.contiguous()


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """One sequence of a packed call: its number, its rows of q and of k, the position of its first query."""

    number: int
    q_rows: slice
    kv_rows: slice
    q_offset: int

    def own(self, x: Tensor, *dims: str | int) -> Tensor:
        """A variant's own tensor of these dims as the dense call of this sequence reads it; only `x` is packed.

        Read at a clamped `index`, it has there row `index` of the keys, or row `max(index, 0) - q_offset` of the
        queries, or the nearest row of the sequence. Its dim `b` has one element.
        """
        for axis, dim in enumerate(d for d in dims if d != "b"):
            if dim == "kv_idx":
                x = _rows(x, axis, self.kv_rows, 0)
            elif dim == "q_idx":
                x = _rows(x, axis, self.q_rows, self.q_offset)
        return x.unsqueeze(dims.index("b")) if "b" in dims else x


def _rows(x: Tensor, axis: int, rows: slice, offset: int) -> Tensor:
    """A tensor that has at each index i from 0 on row `i - offset` of the given `rows`, or the nearest of them."""
    begin, length = rows.start, rows.stop - rows.start
    if length == 0:
        # No pair of query and key reads it, but a clamped index must find an element.
        return readable(x.narrow(axis, 0, 0))
    index = torch.arange(max(offset + length, 1), device=x.device) - offset
    return x.index_select(axis, index.clamp(0, length - 1) + begin)


def packed_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, q_offset: int | str | Tensor
) -> Iterator[PackedSequence]:
    """The sequences of a packed call, in order."""
    q_begins = cu_seqlens_q.tolist()
    kv_begins = q_begins if cu_seqlens_k is None else cu_seqlens_k.tolist()
    offsets = q_offset.tolist() if isinstance(q_offset, Tensor) else [q_offset] * (len(q_begins) - 1)
    for number, offset in enumerate(offsets):
        q_rows = slice(q_begins[number], q_begins[number + 1])
        kv_rows = slice(kv_begins[number], kv_begins[number + 1])
        end = kv_rows.stop - kv_rows.start - (q_rows.stop - q_rows.start)
        yield PackedSequence(
            number=number, q_rows=q_rows, kv_rows=kv_rows, q_offset=end if isinstance(offset, str) else offset
        )
