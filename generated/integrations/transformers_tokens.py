# SPDX-License-Identifier: Apache-2.0
"""The arguments of an op that say which tokens of a call from transformers form a sequence, and which are padding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._runtime.core.checks import fail
from .._runtime.core.options import known_lengths
from .transformers_masks import TITLE, AttentionMask
from .transformers_sharing import identity

PADDING_ID = -1


def sequences(
    mask: AttentionMask | None, query: Tensor, key: Tensor, given: Mapping[str, Any], *, is_causal: bool
) -> dict[str, Any]:
    """The op's arguments that say which tokens form a sequence; empty if each row is one sequence without padding.

    A call has packed sequences if it has `cu_seq_lens_q`, or if it has as many queries as keys and its mask has packed
    sequences, or, in a causal call, `position_ids` that restart. With more keys than queries such positions are
    refused. The 2-D mask of the model marks padding. The host waits for the device at most once per forward, to see
    whether there is more than one sequence or any padding. It does not wait in decoding, in a trace or in a CUDA graph:
    there, calls are computed as if there were several sequences and padding.
    """
    cu_seqlens = given.get("cu_seq_lens_q")
    padding = None if mask is None else mask.padding
    same_length = query.shape[2] == key.shape[2]
    ids: Tensor | None = None
    if cu_seqlens is not None:
        if padding is None:
            cu_seqlens_k = given.get("cu_seq_lens_k")
            begins = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens if cu_seqlens_k is None else cu_seqlens_k}
            return begins | known_lengths(given.get("max_length_q"), given.get("max_length_k"))
        check_same_length(query, key, "beside a mask of padding")
        ids = _ids_of_rows(cu_seqlens, query)
    elif is_causal and same_length:
        ids = _packed_ids(mask, query, given.get("position_ids"))
    elif same_length and mask is not None:
        ids = mask.packed
    elif is_causal and query.shape[2] > 1 and _may_wait(query):
        _check_continues(mask, query, given.get("position_ids"))
    waits = same_length and query.shape[2] > 1 and _may_wait(query)
    if padding is not None and waits and bool(padding.all()):
        padding = None
    if ids is not None and waits and cu_seqlens is None and not bool((ids != ids[:, :1]).any()):
        ids = None
    return _segments(ids, padding, query, key)


def chunk_positions(mask: AttentionMask, query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Positions from the first token of each sequence, where its first chunk begins; empty if one begins at key 0."""
    ids = arguments.get("q_segment_ids")
    place: Any = None
    if not torch.compiler.is_compiling():
        place = ("positions", query.device, query.shape[2], key.shape[2], identity(ids), mask.versions())
        if place in mask.cache:
            known: dict[str, Tensor] = mask.cache[place][0]
            return known
    found: dict[str, Tensor] = {}
    rows = torch.arange(query.shape[2], device=query.device) + mask.q_offset
    keys = torch.arange(key.shape[2], device=query.device) + mask.kv_offset
    if mask.left_padding is not None:
        left = mask.left_padding.to(query.device)[:, None]
        found = {"q_positions": (rows - left).to(torch.int32), "kv_positions": (keys - left).to(torch.int32)}
    elif ids is not None and query.shape[2] == key.shape[2]:
        begins = torch.diff(ids, prepend=ids[:, :1] - 1) != 0
        positions = (rows - torch.where(begins, rows, 0).cummax(-1).values).to(torch.int32)
        found = {"q_positions": positions, "kv_positions": positions}
    elif mask.chunk is not None and mask.kv_offset % mask.chunk:
        # The cache has dropped a part of a chunk, so that its first key begins no chunk.
        places = {"q_positions": rows, "kv_positions": keys}
        found = {name: x.to(torch.int32).expand(query.shape[0], -1) for name, x in places.items()}
    if place is not None:
        # The ids are kept, so that no other tensor gets their identity.
        mask.cache[place] = found, ids
    return found


def check_same_length(query: Tensor, key: Tensor, where: str) -> None:
    """Refuse packed sequences with more keys than queries where segment ids would have to align them."""
    if query.shape[2] != key.shape[2]:
        got = f"{query.shape[2]} queries and {key.shape[2]} keys"
        fail(TITLE, "cu_seq_lens_q", f"as many queries as keys {where}", got)


def packed_row(x: Tensor) -> Tensor:
    """`[B, H, S, D]` as one row of packed tokens, `[B * S, H, D]`; a view if B is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def segment_ids(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The sequences of a packed call as segment ids of a dense call, for ops that read a tensor of each token."""
    q_ids = _ids_of_rows(cu_seqlens_q, query)
    kv_ids = q_ids if cu_seqlens_k is cu_seqlens_q else _ids_of_rows(cu_seqlens_k, key)
    return {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "padding_id": PADDING_ID}


def _ids_of_rows(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """The index of the sequence of each token of `[B, H, S, D]`, whose rows are packed one after another."""
    rows = torch.arange(x.shape[0] * x.shape[2], device=x.device, dtype=cu_seqlens.dtype)
    ends = cu_seqlens[1:].to(x.device).contiguous()
    return torch.searchsorted(ends, rows, right=True, out_int32=True).view(x.shape[0], x.shape[2])


def _packed_ids(mask: AttentionMask | None, query: Tensor, position_ids: Any) -> Tensor | None:
    """The index of each token's sequence: a sequence begins where a position does not continue the one before."""
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] != query.shape[2] or position_ids.dim() != 2:
        return None if mask is None else mask.packed
    positions = position_ids.to(query.device).expand(query.shape[0], -1)
    if mask is None or mask.padding is None:
        begins = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    else:
        # Positions of padding have no meaning: a sequence begins where a token that is not padding has position 0.
        begins = (positions == 0) & mask.padding.to(query.device)
    return begins.cumsum(-1).to(torch.int32)


def _check_continues(mask: AttentionMask | None, query: Tensor, position_ids: Any) -> None:
    """Refuse positions that restart in a call whose cache has more keys than the call has queries.

    Nothing says which sequences the other keys are of.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != query.shape[2]:
        return
    restarts = position_ids[:, 1:] == 0
    if mask is not None and mask.padding is not None:
        # Positions of padding have no meaning, and a sequence may begin behind padding.
        places = torch.arange(query.shape[2], device=query.device) + mask.q_offset - mask.kv_offset
        padding = mask.padding.to(query.device)
        is_real = padding[:, places.clamp(0, padding.shape[1] - 1)]
        restarts = restarts.to(query.device) & is_real[:, :-1] & is_real[:, 1:]
    if bool(restarts.any()):
        expected = "positions that go on where the cache has more keys than the call: pack with use_cache=False"
        fail(TITLE, "position_ids", expected, "positions that restart")


def _segments(ids: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> dict[str, Any]:
    if ids is None and padding is None:
        return {}
    batch, device = query.shape[0], query.device
    q_ids = torch.zeros(batch, query.shape[2], dtype=torch.int32, device=device) if ids is None else ids
    kv_ids = q_ids
    if padding is not None:
        padding = padding.to(device)
        if (missing := key.shape[2] - padding.shape[1]) > 0:
            padding = torch.nn.functional.pad(padding, (missing, 0), value=True)
        kv_ids = torch.where(padding[:, : key.shape[2]], 0 if ids is None else ids, PADDING_ID).to(torch.int32)
        kv_ids = kv_ids.expand(batch, -1)
    return {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "padding_id": PADDING_ID}


def _may_wait(x: Tensor) -> bool:
    """Whether the host may read a tensor of this device now."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
