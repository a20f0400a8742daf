# SPDX-License-Identifier: Apache-2.0
"""Translates a call of attention from transformers into a call of an op: which variant, and with which arguments.

The layers of one forward repeat their calls: the first layer makes a plan, which the others find with their mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import torch as ops
from .._runtime.archs import MAX_HEAD_DIM, MIN_HEAD_DIM
from .._runtime.core.checks import fail
from .entries import Attention, constant
from .transformers_masks import TITLE, AttentionMask
from .transformers_mixed import ONE, mixed
from .transformers_plans import CHOSEN_KEYS, MOST_KEPT, VECTORS, KeptPlan, Plan, sides_of
from .transformers_sharing import autocast_dtype, cache_of, identity, schedule
from .transformers_tokens import check_same_length, chunk_positions, packed_row, segment_ids, sequences
from .variants import Found, find


def planned(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask | None,
    dropout: float,
    given: Mapping[str, Any],
) -> Plan:
    """The plan of a call: the plan of an earlier layer of this forward if it serves the call, or else a new plan.

    Raises:
        ArgumentError: an argument that cannot be served, such as a mask of four axes; it says what to do.
        NotRenderedError: the package has no variant for the call; the message has the entry to add.
    """
    mask = checked(mask, key, given)
    cache = cache_of(mask, given.get("cu_seq_lens_q"))
    if cache is None:
        return _plan(module, query, key, value, mask, dropout, given)
    kept: list[KeptPlan] = cache.setdefault("plans", []) if mask is None else mask.plans
    for each in kept:
        if each.serves(module, query, key, value, dropout, given):
            return each.plan
    plan = _plan(module, query, key, value, mask, dropout, given)
    kept.insert(0, KeptPlan(plan, module, query, key, value, mask, dropout, given))
    del kept[MOST_KEPT:]
    return plan


def checked(mask: Any, key: Tensor, given: Mapping[str, Any]) -> AttentionMask | None:
    """The mask, after checks that it is an `AttentionMask` of this call or None, and that the call asks for no weights
    and for no keys that the model has chosen."""
    if given.get("output_attentions"):
        fail(TITLE, "output_attentions", "False: the weights are never in memory. Use 'eager' to see them", True)
    for name in CHOSEN_KEYS:
        if given.get(name) is not None:
            expected = "None: a query sees all keys of its mask, not those that an indexer chooses. Use 'eager' there"
            fail(TITLE, name, expected, "indices of keys")
    if mask is not None and not isinstance(mask, AttentionMask):
        if (layers := mixed()) is not None:
            fail(TITLE, "attn_implementation", ONE, layers)
        got = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}" if isinstance(mask, Tensor) else mask
        fail(
            TITLE,
            "attention_mask",
            "a mask [batch, length] of padding, or none: packed sequences are given by position_ids or cu_seq_lens_q, "
            "and another mask is a variant of its own, register(name, op=..., tensors=...)",
            got,
        )
    # A mask without bounds is no mask for transformers, which then compares no lengths.
    if mask is not None and mask.is_bounded and key.shape[2] > mask.kv_length:
        expected = f"a mask of all {key.shape[2]} keys of the call: use 'eager' for a model that appends keys to it"
        fail(TITLE, "attention_mask", expected, f"one of {mask.kv_length} keys")
    return mask


# ------------------------------------------------------------------------------------------------------ what is wanted


def wanted_of(
    module: Any,
    query: Tensor,
    value: Tensor,
    mask: AttentionMask | None,
    dropout: float,
    given: Mapping[str, Any],
) -> Attention:
    """The attention that a call computes."""
    if (head_dim := max(query.shape[-1], value.shape[-1])) > MAX_HEAD_DIM:
        fail(TITLE, "head_dim", f"{MAX_HEAD_DIM} at most: use 'sdpa' for this model", head_dim)
    if (head_dim := min(query.shape[-1], value.shape[-1])) < MIN_HEAD_DIM:
        fail(TITLE, "head_dim", f"{MIN_HEAD_DIM} at least: use 'sdpa' for this model", head_dim)
    before = after = chunk = None
    if mask is not None:
        before, after, chunk = mask.before, mask.after, mask.chunk
    else:
        is_causal, window = sides_of(module, given)
        after = 0 if is_causal else None
        if window is not None:
            before = window - (1 if is_causal else 0)
            after = after if is_causal else before
    cap = given.get("softcap")
    return Attention(
        before=before,
        after=after,
        chunk=chunk,
        images=mask is not None and mask.image is not None,
        cap=constant(cap) if cap else None,
        sink=given.get("s_aux") is not None,
        bias=given.get("position_bias") is not None,
        dropout=constant(dropout) != 0,
    )


def resolved(wanted: Attention) -> Found:
    """The variant for a call."""
    if not torch.compiler.is_compiling():
        return find(wanted)
    name, scalars, image, bias, sides = _resolved_while_tracing(
        wanted.before, wanted.after, wanted.chunk, wanted.images, wanted.cap, wanted.sink, wanted.bias, wanted.dropout
    )
    return Found(name=name, scalars=dict(scalars), image=image, bias=bias, sides=dict(sides))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolved_while_tracing(
    before: int | None,
    after: int | None,
    chunk: int | None,
    images: bool,
    cap: float | None,
    sink: bool,
    bias: bool,
    dropout: bool,
) -> tuple[str, tuple[tuple[str, int | float], ...], str | None, str | None, tuple[tuple[str, str], ...]]:
    """The result of `find` as constants of a trace, which cannot read the file that `find` reads."""
    found = find(
        Attention(
            before=before, after=after, chunk=chunk, images=images, cap=cap, sink=sink, bias=bias, dropout=dropout
        )
    )
    return found.name, tuple(found.scalars.items()), found.image, found.bias, tuple(found.sides.items())


# ------------------------------------------------------------------------------------------------------ what is called


def _plan(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask | None,
    dropout: float,
    given: Mapping[str, Any],
) -> Plan:
    wanted = wanted_of(module, query, value, mask, dropout, given)
    found = resolved(wanted)
    op = getattr(ops, found.name)
    arguments = arguments_of(found, wanted, mask, query, key, dropout, given)
    dtype = common_dtype(query, key, value)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    arguments = with_schedule(op, module, mask, query, key, value, arguments)
    return Plan(op, arguments, dtype, sink=wanted.sink, bias=found.bias, dropout=wanted.dropout)


def arguments_of(
    found: Found,
    wanted: Attention,
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    dropout: float,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of an op, without its schedule and without the arguments that differ between layers."""
    arguments: dict[str, Any] = dict(found.scalars)
    if found.image is not None and mask is not None:
        arguments[found.image] = mask.image
    if wanted.dropout:
        arguments["dropout_p"] = dropout
    is_causal = wanted.after == 0
    arguments |= tokens_of(mask, query, key, given, is_causal=is_causal, needs_rows=bool(found.image or found.bias))
    return arguments | positions_of(mask, query, key, found, wanted, arguments, is_causal=is_causal)


def common_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype | None:
    """The dtype to cast q, k and v to, or None if all have one dtype. PEFT and some models apply norms in float32."""
    if query.dtype == key.dtype == value.dtype:
        return None
    return autocast_dtype(query.device.type) or value.dtype


def tokens_of(
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    given: Mapping[str, Any],
    *,
    is_causal: bool,
    needs_rows: bool,
) -> dict[str, Any]:
    """The result of `sequences`, computed once per forward.

    With `needs_rows`, packed sequences become segment ids of a dense call, because the op's own tensors have the batch
    rows of that call.
    """
    cache = cache_of(mask, given.get("cu_seq_lens_q"))
    said = [given.get(name) for name in VECTORS]
    place: Any = None
    if cache is not None:
        sizes = (query.device, query.shape[0], query.shape[2], key.shape[2], is_causal, needs_rows)
        place = ("sequences", sizes, *(identity(x) for x in said), None if mask is None else mask.versions())
        if place in cache:
            known: dict[str, Any] = cache[place][0]
            return known
    found = sequences(mask, query, key, given, is_causal=is_causal)
    if "cu_seqlens_q" in found and needs_rows:
        check_same_length(query, key, "beside images, a bias or tensors of an op's own")
        found = segment_ids(found["cu_seqlens_q"], found["cu_seqlens_k"], query, key)
    if cache is not None:
        cache[place] = found, said
    return found


def positions_of(
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    found: Found,
    wanted: Attention,
    arguments: Mapping[str, Any],
    *,
    is_causal: bool,
) -> dict[str, Any]:
    """The arguments that place the queries among the keys: new queries come after the keys of a cache."""
    if "cu_seqlens_q" in arguments:
        # Row totals are compared, not lengths, which are on the device: with as many keys as queries nothing is cached.
        reads_positions = (wanted.before, wanted.after, wanted.chunk) != (None, None, None)
        return {"q_offset": "end"} if reads_positions and query.shape[2] != key.shape[2] else {}
    offset: int | Tensor = 0
    if mask is not None:
        offset = mask.q_offset - mask.kv_offset
    elif is_causal:
        offset = key.shape[2] - query.shape[2]
        if query.shape[2] > 1 and offset:
            # The other keys may be before the queries, or the room of a static cache behind them.
            expected = (
                "one, which says where the queries are among the keys of a cache: pass attention_mask to the model"
            )
            fail(TITLE, "attention_mask", expected, f"none, and {query.shape[2]} queries of {key.shape[2]} keys")
    if mask is not None and mask.chunk is not None and (positions := chunk_positions(mask, query, key, arguments)):
        return positions
    if found.bias is not None:
        return _beside_a_bias(offset, query, key, found, wanted)
    if isinstance(offset, Tensor):
        return {"q_offset": offset.to(query.device, torch.int32).reshape(-1).expand(query.shape[0]).contiguous()}
    return {"q_offset": offset} if offset else {}


def _beside_a_bias(offset: int | Tensor, query: Tensor, key: Tensor, found: Found, wanted: Attention) -> dict[str, Any]:
    """The arguments that place the queries of a call with a bias. A bias is indexed by query rows, which `q_offset`
    would move; neither moved bounds nor positions do."""
    bounds = {name: x for name in ("before", "after") if (x := getattr(wanted, name)) is not None}
    is_known = not isinstance(offset, Tensor)
    if (not bounds and wanted.chunk is None) or (is_known and not offset):
        return {}
    if found.image is not None:
        expected = "none beside images and keys of a cache: use 'eager' there"
        fail(TITLE, "position_bias", expected, "a bias, images and a cache")
    # Bounds that are scalars of the op are the faster way, because calls with positions look for their blocks first.
    if is_known and wanted.chunk is None and all(name in found.sides for name in bounds):
        before = bounds.get("before")
        if before is None or before >= offset:
            moved = {"before": -offset, "after": offset}
            return {found.sides[name]: found.scalars[found.sides[name]] + moved[name] for name in bounds}
    begin = offset.to(query.device).reshape(-1, 1) if isinstance(offset, Tensor) else offset
    places = {
        "q_positions": torch.arange(query.shape[2], device=query.device) + begin,
        "kv_positions": torch.arange(key.shape[2], device=query.device),
    }
    return {name: x.to(torch.int32).expand(query.shape[0], -1) for name, x in places.items()}


def with_schedule(
    op: Callable[..., Any],
    module: Any,
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """The arguments; if the blocks depend on tensors, with the schedule that calls like this one share."""
    packed = "cu_seqlens_q" in arguments
    if not packed and "q_segment_ids" not in arguments and "q_positions" not in arguments:
        return arguments
    cache = cache_of(mask, arguments.get("cu_seqlens_q"))
    if cache is None:
        return arguments
    if packed:
        query, key, value = packed_row(query), packed_row(key), packed_row(value)
    return {**arguments, "schedule": schedule(op, cache, module, query, key, value, arguments)}
