"""The first keys of pruned calls of PyTorch, as `core/pruning.py` derives them, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.checks import FLOAT_DTYPES, at_least, check_prune
from ..core.fp8 import check_unpruned
from ..core.pruning import GROUP, PRODUCT_ERROR, follow_rows
from ..core.sequences import check_alone
from .dtypes import autocast_inputs
from .inputs import check_inputs, check_tensor, query_offset
from .sequences import check_packed, check_tokens, packed_offset


def first_keys(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    prune: float,
    scale: float | None = None,
    layout: str = "bhsd",
    q_offset: int | str | Tensor = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    padding_id: int = -1,
) -> Tensor:
    """The position of the first key that each query attends to: int32 `[B, Hq, P]` by `q_idx`; packed `[Hq, total_q]`.

    The arguments are the op's. All keys before that one have together at most `prune` of the row's denominator.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype, device or value.
    """
    log_share = math.log(check_prune(op, prune))
    check_unpruned(op, prune, getattr(q, "dtype", ""))
    with torch.no_grad():
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            check_alone(op, layout, padding_id, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths)
            begins, kv_begins = check_packed(op, q, k, v, scale, cu_seqlens_q, cu_seqlens_k)
            q, k, v = autocast_inputs(q, k, v)
            row_offset, row_offsets = packed_offset(op, q_offset, q, begins, kv_begins)
            g = check_tensor(op, "g", g, (k.shape[0], q.shape[1]), FLOAT_DTYPES, q)
            offsets = row_offset if row_offsets is None else row_offsets
            return _packed(q, k, g, log_share, scale, begins, kv_begins, offsets)
        check_inputs(op, q, k, v, scale, layout)
        q, k, v = autocast_inputs(q, k, v)
        if layout == "bshd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        tokens = check_tokens(
            op, q, k, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths, padding_id, q_offset
        )
        row_offset, row_offsets = query_offset(op, q_offset, q, k, kv_lengths)
        size = max(row_offset + q.shape[2], k.shape[2])
        g = check_tensor(op, "g", g, (q.shape[0], at_least(size), q.shape[1]), FLOAT_DTYPES, q)
        return _dense(q, k, g, log_share, scale, row_offset, row_offsets, tokens, int(padding_id))


def _dense(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    log_share: float,
    scale: float | None,
    row_offset: int,
    row_offsets: Tensor | None,
    tokens: Any,
    padding_id: int,
) -> Tensor:
    q_len, kv_len = q.shape[2], k.shape[2]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros((*q.shape[:2], max(g.shape[1], 1)), dtype=torch.int32, device=q.device)
    rows = torch.arange(q_len, device=q.device)
    own = (rows + row_offset)[None] if row_offsets is None else rows + row_offsets[:, None]  # [B or 1, Sq]
    at, is_key = own.clamp(0, kv_len - 1), (own >= 0) & (own < kv_len)
    total = _running_sum(g.transpose(1, 2))  # [B, Hq, P]
    aligned = row_offsets is None and row_offset == 0 and q_len == kv_len
    own_keys = k if aligned else torch.take_along_dim(k, at[:, None, :, None], 2)
    limit = _limits(q, own_keys, k, scale, torch.take_along_dim(total, at[:, None], 2), log_share)
    limit = torch.where(is_key[:, None], limit, -math.inf)
    if tokens is not None:
        own_ids = torch.take_along_dim(tokens.kv_segment_ids, at, 1)
        limit = torch.where((own_ids == tokens.q_segment_ids)[:, None], limit, -math.inf)
        # Rows of padding attend to nothing.
        limit = torch.where((tokens.q_segment_ids == padding_id)[:, None], math.inf, limit)
    pad = -q_len % GROUP
    groups = torch.nn.functional.pad(limit, (0, pad), value=math.inf).unflatten(-1, (-1, GROUP)).amin(-1)
    found = _search(total[..., :kv_len], groups).repeat_interleave(GROUP, -1)[..., :q_len]  # [B, Hq, Sq]
    if tokens is not None and tokens.kv_positions is not None:
        # Positions rise by 1 from row to row of a segment.
        positions = torch.take_along_dim(tokens.kv_positions, at, 1)
        order = tokens.kv_segment_ids.argsort(dim=1, stable=True)
        ids, by_id = (torch.take_along_dim(x, order, 1) for x in (tokens.kv_segment_ids, tokens.kv_positions))
        follows = follow_rows(ids, by_id, order, padding_id)[:, None, None]
        found = torch.where(follows, found + (positions - at)[:, None], tokens.kv_positions.amin(1)[:, None, None])
    elif row_offsets is not None or row_offset != 0:
        # The result is indexed by position: at `p` is row `p - offset`, or the nearest row.
        by_position = torch.arange(g.shape[1], device=q.device)[None]
        shift = row_offset if row_offsets is None else row_offsets[:, None]
        found = torch.take_along_dim(found, (by_position - shift).clamp(0, q_len - 1)[:, None], 2)
    return found.to(torch.int32)


def _packed(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    log_share: float,
    scale: float | None,
    begins: Tensor,
    kv_begins: Tensor,
    offset: int | Tensor,
) -> Tensor:
    total_q, total_k = q.shape[0], k.shape[0]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros((q.shape[1], total_q), dtype=torch.int32, device=q.device)
    rows = torch.arange(total_q, dtype=torch.int32, device=q.device)
    # An empty sequence has no rows. Rows after the last sequence belong to none.
    sequence = (torch.searchsorted(begins, rows, right=True) - 1).clamp(0, max(begins.shape[0] - 2, 0))
    row = rows - begins[sequence]
    start, end = kv_begins[sequence], kv_begins[sequence + 1]
    own = start + row + (offset[sequence] if isinstance(offset, Tensor) else offset)
    at, is_key = own.clamp(0, total_k - 1), (own >= start) & (own < end)
    total = _running_sum(g.mT)  # [Hq, total_k]
    by_head, own_keys = q.transpose(0, 1), k.transpose(0, 1).index_select(1, at)
    limit = _limits(by_head, own_keys, k.transpose(0, 1), scale, total.index_select(1, at), log_share)
    limit = torch.where(is_key, limit, -math.inf)
    group = begins[sequence] // GROUP + sequence + row // GROUP
    most = total_q // GROUP + begins.shape[0]
    groups = limit.new_full((q.shape[1], most), math.inf)
    groups = groups.scatter_reduce(1, group.to(torch.int64).expand(limit.shape), limit, "amin")
    found = _search(total, groups).index_select(1, group) - start
    return (found.clamp(min=0) // GROUP * GROUP).to(torch.int32)


def _running_sum(g: Tensor) -> Tensor:
    """The running sum of g along its last axis, float64, in two steps, which are more parallel than a single one."""
    length = g.shape[-1]
    parts = torch.nn.functional.pad(g.double(), (0, -length % GROUP)).unflatten(-1, (-1, GROUP)).cumsum(-1)
    ends = parts[..., -1].cumsum(-1)
    total: Tensor = (parts + (ends - parts[..., -1])[..., None]).flatten(-2)[..., :length]
    return total


def _limits(q: Tensor, own_keys: Tensor, k: Tensor, scale: float | None, own_total: Tensor, log_share: float) -> Tensor:
    """For each row the log of what the sum over the keys that are left out may be at most: `[..., Hq, Sq]`, float64.

    q is `[..., Hq, Sq, D]`, k `[..., Hkv, Skv, D]`, `own_keys` `[..., Hkv, Sq, D]`.
    """
    factor = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    sign = -1.0 if scale is not None and scale < 0 else 1.0
    heads = (k.shape[-3], q.shape[-3] // k.shape[-3])
    q_norm = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32).unflatten(-2, heads)
    k_norm = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1)[..., None, None]
    own_score = (q.unflatten(-3, heads) * own_keys.unsqueeze(-3)).sum(-1, dtype=torch.float32)
    most = q_norm * k_norm
    limit = factor * (sign * own_score - (1 + PRODUCT_ERROR) * most)
    limit = torch.where(torch.isfinite(limit), limit, -math.inf).flatten(-3, -2)
    return limit.double() + log_share - own_total


def _search(total: Tensor, limits: Tensor) -> Tensor:
    """How many keys, a multiple of GROUP, may be left out under each limit; `total` is the running sum over keys."""
    whole = total.shape[-1] // GROUP
    parts = -total[..., : whole * GROUP].unflatten(-1, (whole, GROUP))
    sums = torch.logcumsumexp(parts.logsumexp(-1), -1)
    # NaN gives no bound: no key may be left out because of it.
    sums = torch.where(torch.isnan(sums), math.inf, sums)
    limits = torch.where(torch.isnan(limits), -math.inf, limits)
    found: Tensor = torch.searchsorted(sums.contiguous(), limits.contiguous(), right=True) * GROUP
    return found
