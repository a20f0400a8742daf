# SPDX-License-Identifier: Apache-2.0
"""Dense calls with few queries, whose keys are split over multiprocessors as in calls on paged caches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import check_padding_id, fail, shown
from ..core.paged import LEAST_DENSE_KEYS, WHOLE_ROW, CacheCall
from ..core.row_classes import FEW_ROWS
from ..core.schedules import Schedule
from .dispatch import runs_reference
from .dtypes import interpreter_dtype
from .inputs import check_offset_word, positive_scale, query_offset
from .paged import cache_call
from .sequences import int32_of

_DENSE_ALONE = (
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
    "config",
    "family",
)


def splits_keys(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Sequence[Any],
    others: Sequence[Any],
    schedule: Schedule | None,
    splits: object,
    *,
    by_query: bool,
) -> bool:
    """Whether a dense call splits its keys.

    Shapes decide this, not the values of `kv_lengths`, unless the call asks for it by `splits` or a plan.

    Args:
        q, k, v: `[B, H, S, D]`, checked.
        own: the variant's own arguments. others: arguments that only the dense kernels take, as in _DENSE_ALONE.
        by_query: whether one of the variant's own tensors has an element for each query: split calls read such a tensor
            by row, dense calls by position.
    """
    differentiates = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, *own))
    planned = isinstance(schedule, Schedule) and schedule.is_plan
    if planned or splits is not None:
        name, got = ("schedule", "a plan") if planned else ("splits", shown(splits))
        for other, x in zip(_DENSE_ALONE, others, strict=True):
            if x is not None:
                fail(op, name, f"None beside {other}", got)
        if differentiates:
            fail(op, name, "None where an input requires grad: split keys have no gradient", got)
        if by_query:
            expected = "None without page_table: a tensor of this variant has an element for each query"
            fail(op, name, expected, got)
        return True
    if differentiates or by_query or schedule is not None or any(x is not None for x in others):
        return False
    if not _holds(k.shape[2] >= LEAST_DENSE_KEYS) or not _holds(q.shape[2] * (q.shape[1] // k.shape[1]) <= FEW_ROWS):
        return False
    return not runs_reference(q) and _holds(q.numel() > 0) and not _is_transformed()


def check_dense_plan(
    op: str, page_starts: Any, cu_seqlens_q: Any, max_seqlen_q: Any, config: Any, family: Any, *, by_query: bool
) -> None:
    """Check that a plan is made for calls that can split dense keys."""
    given = {
        "page_starts": page_starts,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "config": config,
        "family": family,
    }
    for name, x in given.items():
        if x is not None:
            fail(op, name, "None without page_table", type(x).__name__)
    if by_query:
        fail(op, "page_table", "a table: a tensor of this variant has an element for each query", None)


def _holds(condition: Any) -> bool:
    """Whether a condition on sizes holds.

    In an exported program it must hold for all sizes that the program serves: otherwise that keeps the dense kernels.
    """
    if torch.compiler.is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def _is_transformed() -> bool:
    """Whether a transform of `torch.func` or a derivative in forward mode sees the call."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def split_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    q_offset: Any,
    kv_lengths: Any,
    padding_id: Any,
    splits: object,
) -> CacheCall:
    """A dense call as one on caches: a page is a batch row. q, k and v are `[B, H, S, D]`, checked."""
    check_padding_id(op, padding_id)
    batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    lengths = None
    if kv_lengths is not None:
        lengths = int32_of(op, "kv_lengths", kv_lengths, (batch,), q.device)
    row_offset: int | None
    if lengths is not None and isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        row_offset, row_offsets, lengths = None, None, lengths.clamp(0, kv_len)
    else:
        row_offset, row_offsets = query_offset(op, q_offset, q, k)
    q, factor = positive_scale(q, scale)
    q, k, v = interpreter_dtype(q, k, v)
    return cache_call(
        op, q, k.transpose(1, 2), v.transpose(1, 2), None, None, lengths, None, row_offset, row_offsets, factor,
        page_size=WHOLE_ROW, most_keys=kv_len, most_queries=q_len, splits=splits,
    )  # fmt: skip


def in_rows(x: Tensor, call: CacheCall, *dims: str | int) -> Tensor:
    """One of the variant's own tensors, checked, of these dims, as kernels read it: batch rows are pages.

    If the tensor has an element for each key, its axis of batch rows is put directly before that of keys.
    """
    if dims.count("kv_idx") != 1 or "q_idx" in dims:
        return x
    place = [dim for dim in dims if dim != "b"].index("kv_idx")
    if "b" in dims:
        return x.movedim(dims.index("b"), place)
    return x.unsqueeze(place).expand([*x.shape[:place], call.num_seqs, *x.shape[place:]])
