# SPDX-License-Identifier: Apache-2.0
"""Checks of packed sequences, and of segment ids, positions and lengths of a batch, in JAX."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.checks import PACKED, check_padding_id, fail, shown
from ..core.options import call_mode
from ..core.sequences import TOKEN_ARGUMENTS, ByRow, TokenRows, breaks_rule, check_begins, fail_order
from .support import (
    as_integers,
    check_offset_word,
    check_qkv,
    host_number,
    int32_array,
    is_array,
    is_integer,
    offset_array,
    offset_number,
    values_are_checked,
)


@dataclass(frozen=True, eq=False)
class SequenceArguments:
    """The arguments of the op that describe sequences and tokens, by their names, unchecked."""

    q_offset: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    q_positions: Any
    kv_positions: Any
    kv_lengths: Any
    padding_id: Any

    @property
    def of_tokens(self) -> tuple[Any, ...]:
        """The arguments that TOKEN_ARGUMENTS names, in that order."""
        return tuple(getattr(self, name) for name in TOKEN_ARGUMENTS)

    @property
    def mode(self) -> str:
        """The mode of the call."""
        return call_mode(self.cu_seqlens_q, self.of_tokens)


class Tokens(NamedTuple):
    """The segment ids and positions of queries and keys, int32 `[B, Sq]` and `[B, Skv]`, and lengths.

    Ids are always arrays: if the call gave none, one id for all tokens, `[1, 1]`. Keys after a row's length have
    `padding_id`. Positions are None if they equal row numbers. Lengths are int32 `[B]`, or `[1]` for all rows.
    """

    q_segment_ids: jax.Array
    kv_segment_ids: jax.Array
    q_positions: jax.Array | None
    kv_positions: jax.Array | None
    kv_lengths: jax.Array

    @property
    def kind(self) -> str:
        """The kind of calls a schedule is made for."""
        return "of rows with segment ids" if self.q_positions is None else "of rows with positions"


def check_packed(
    op: str, q: Any, k: Any, v: Any, scale: object, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> tuple[jax.Array, jax.Array]:
    """Check the arguments of a packed call, q, k and v `[total, H, D]`. Returns cu_seqlens_q and cu_seqlens_k.

    Their values are read only if they are known, and are on the host or in debug mode.
    """
    check_qkv(op, q, k, v, scale, PACKED)
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            got = f"None for q of {q.shape[0]} rows and k of {k.shape[0]}"
            fail(op, "cu_seqlens_k", "an integer array [n + 1] where q and k differ in length", got)
        cu_seqlens_q = begins_of(op, "cu_seqlens_q", cu_seqlens_q, "q", q)
        return cu_seqlens_q, cu_seqlens_q
    cu_seqlens_q = begins_of(op, "cu_seqlens_q", cu_seqlens_q, "q", q)
    cu_seqlens_k = begins_of(op, "cu_seqlens_k", cu_seqlens_k, "k", k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"{cu_seqlens_q.shape[0]} elements, as many as cu_seqlens_q"
        fail(op, "cu_seqlens_k", expected, cu_seqlens_k.shape[0])
    return cu_seqlens_q, cu_seqlens_k


def begins_of(op: str, name: str, cu_seqlens: Any, packed: str, x: jax.Array) -> jax.Array:
    """The cu_seqlens of `x`, checked: where its sequences begin, and its length at the end."""
    if not is_array(cu_seqlens):
        fail(op, name, "an integer array [n + 1]", type(cu_seqlens).__name__)
    if not is_integer(cu_seqlens.dtype) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        fail(op, name, "an integer array [n + 1]", f"{cu_seqlens.dtype.name} {list(cu_seqlens.shape)}")
    if values_are_checked(cu_seqlens):
        check_begins(op, name, cu_seqlens.tolist(), packed, x.shape[0])
    return as_integers(op, name, cu_seqlens)


def packed_offset(
    op: str, q_offset: Any, cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array
) -> tuple[int, jax.Array | None]:
    """The offset as (number, None) or (0, one int32 per sequence). `"end"` aligns the last query with the last key."""
    if is_array(q_offset):
        return 0, offset_array(op, q_offset, cu_seqlens_q.shape[0] - 1)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        return (0, None) if cu_seqlens_k is cu_seqlens_q else (0, jnp.diff(cu_seqlens_k - cu_seqlens_q))
    return offset_number(op, q_offset), None


def check_tokens(
    op: str, batch: int, q_len: int, kv_len: int, given: SequenceArguments, kv_lengths: jax.Array | None
) -> Tokens | None:
    """Check the token arguments of a call; None if it has none. `kv_lengths` is int32 `[B]` already."""
    padding_id = check_padding_id(op, host_number(op, "padding_id", given.padding_id))
    if all(x is None for x in given.of_tokens):
        return None
    q_offset, shapes = given.q_offset, ((batch, q_len), (batch, kv_len))
    q_ids, kv_ids = _pair(op, "q_segment_ids", given.q_segment_ids, "kv_segment_ids", given.kv_segment_ids, *shapes)
    q_positions, kv_positions = _pair(op, "q_positions", given.q_positions, "kv_positions", given.kv_positions, *shapes)
    if q_positions is not None and (is_array(q_offset) or isinstance(q_offset, bool) or q_offset != 0):
        got = type(q_offset).__name__ if is_array(q_offset) else shown(q_offset)
        fail(op, "q_offset", "0 beside q_positions, which say where queries are", got)
    if q_ids is None or kv_ids is None:
        q_ids = kv_ids = jnp.full((1, 1), int(padding_id == 0), jnp.int32)
    lengths = jnp.full(1, kv_len, jnp.int32)
    if kv_lengths is not None:
        lengths = kv_lengths
        kv_ids = jnp.where(jnp.arange(kv_len, dtype=jnp.int32)[None] < lengths[:, None], kv_ids, padding_id)
    return Tokens(q_ids, kv_ids, q_positions, kv_positions, lengths)


def check_order(
    op: str, tokens: Tokens | None, batch: int, q_len: int, kv_len: int, padding_id: int, by_row: ByRow | None
) -> jax.Array | None:
    """Check the rule for positions; None if there is nothing more to check.

    If the values are not known, or are on a device, the result is 1 for each batch row that keeps the rule, and NaN for
    each batch row that breaks it.
    """
    if tokens is None or tokens.q_positions is None or tokens.kv_positions is None or by_row is None:
        return None
    q_ids, q_positions = (jnp.broadcast_to(x, (batch, q_len)) for x in (tokens.q_segment_ids, tokens.q_positions))
    kv_ids, kv_positions = (jnp.broadcast_to(x, (batch, kv_len)) for x in (tokens.kv_segment_ids, tokens.kv_positions))
    queries = TokenRows(q_ids, q_positions, jnp.arange(q_len))
    wrong = breaks_rule(queries, TokenRows(kv_ids, kv_positions, jnp.arange(kv_len)), padding_id, by_row)
    if values_are_checked(wrong):
        fail_order(op, by_row, wrong.tolist())
        return None
    return jnp.where(wrong, jnp.nan, 1.0)


def _pair(
    op: str,
    q_name: str,
    of_queries: Any,
    kv_name: str,
    of_keys: Any,
    q_shape: tuple[int, int],
    kv_shape: tuple[int, int],
) -> tuple[jax.Array | None, jax.Array | None]:
    """An argument for queries and its counterpart for keys, checked. If only the first is given, it serves both."""
    if of_queries is None:
        if of_keys is not None:
            fail(op, q_name, f"an integer array {list(q_shape)} beside {kv_name}", None)
        return None, None
    queries = int32_array(op, q_name, of_queries, q_shape)
    if of_keys is None:
        if q_shape != kv_shape:
            fail(op, kv_name, f"an integer array {list(kv_shape)} where q and k differ in length", None)
        return queries, queries
    return queries, int32_array(op, kv_name, of_keys, kv_shape)
