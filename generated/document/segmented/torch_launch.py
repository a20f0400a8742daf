# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/torch_launch.py.jinja
# hash: 1d6e2b92bb93df5c
"""Launches of the kernels of `document`, with segment ids, with their gradients, as PyTorch operators."""

from typing import Any

import torch
from torch import Tensor

from ..._runtime.core.configs import PASSES, Tile, Tiles, block_columns, cdiv, next_power_of_2
from ..._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from ..._runtime.core.options import CallOptions
from ..._runtime.core.schedules import POSITIONS, SEGMENTS, least_block, pass_table
from ..._runtime.torch.operators import namespace_of, register_operator
from ..._runtime.torch.plain import plain_backward, plain_forward
from ..._runtime.torch.replay import apply, launch, launch_hopper, replayed
from ..._runtime.torch.schedule import work_counter
from ..._runtime.torch.support import (
    FP32,
    aligned,
    call_tiles,
    empty_like_layout,
    launches_directly,
    multiprocessors,
    row_stride,
    unit_strides,
)
from ..._runtime.torch.transforms import (
    batched,
    differentiates_backward,
    refuse_second_derivative,
)
from .. import segmented as kernels
from ..torch_reference import reference

NAME = "document_segmented"
NAMESPACE = namespace_of(__name__.rsplit(".", 3)[0])


# What torch.func.vmap makes one call of: for each tensor the axis of batch rows, where it has one.
FOLDED_AXES = {
    "q": 0,
    "k": 0,
    "v": 0,
    "o": 0,
    "do": 0,
    "lse": 0,
    "dlse": 0,
    "q_positions": 0,
    "kv_positions": 0,
    "row_offsets": 0,
    "q_segment_ids": 0,
    "kv_segment_ids": 0,
    "doc": 0,
}


class Attention(torch.autograd.Function):
    """o and lse from `[B, H, S, D]` tensors, with the gradient of every tensor that has one."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        doc: Tensor,
        q_segment_ids: Tensor,
        kv_segment_ids: Tensor,
        padding_id: int,
        q_positions: Tensor | None,
        kv_positions: Tensor | None,
        row_offset: int,
        row_offsets: Tensor | None,
        scale: float,
        options: CallOptions,
        block_tables: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        run = _forward if launches_directly(q) else _forward_op
        return run(
            q,
            k,
            v,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )

    @staticmethod
    def setup_context(ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        o, lse = _outputs
        (
            q,
            k,
            v,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        ) = _inputs
        ctx.save_for_backward(
            q, k, v, doc, q_segment_ids, kv_segment_ids, o, lse, q_positions, kv_positions, row_offsets, *block_tables
        )
        ctx.numbers = (padding_id, row_offset, scale, options)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, doc, q_segment_ids, kv_segment_ids, o, lse, q_positions, kv_positions, row_offsets, *block_tables = (
            ctx.saved_tensors
        )
        padding_id, row_offset, scale, options = ctx.numbers
        do = torch.zeros_like(o) if do is None else do
        run: Any = _backward if launches_directly(q) else _backward_op
        if differentiates_backward():
            run = _differentiable_backward
        dq, dk, dv = run(
            do,
            dlse,
            q,
            k,
            v,
            doc,
            q_segment_ids,
            kv_segment_ids,
            o,
            lse,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )
        return dq, dk, dv, None, None, None, None, None, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return batched(Attention, _forward, ("o", "lse"), FOLDED_AXES, info, in_dims, args)


class AttentionGradients(torch.autograd.Function):
    """The gradients of `Attention`, which have none of their own."""

    @staticmethod
    def forward(do: Tensor, dlse: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        run = _backward if launches_directly(q) else _backward_op
        return run(do, dlse, q, *args)

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor | None) -> Any:
        refuse_second_derivative("document")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = ("q", "k", "v")
        return batched(AttentionGradients, _backward, results, FOLDED_AXES, info, in_dims, args)


def _differentiable_backward(*args: Any) -> Any:
    return apply(AttentionGradients, *args)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    *_: object,
) -> Any:
    """o and lse as plain mathematics, of the parameters of `_forward`."""
    return reference(
        q,
        k,
        v,
        doc=doc,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        padding_id=padding_id,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_offset=row_offset if row_offsets is None else row_offsets,
        scale=scale,
        return_lse=True,
    )


def tiles_of(q: Tensor, v: Tensor, q_segment_ids: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    # How many segments a row has only the device knows. One id for all, with a stride of 0, is one segment.
    length = max(v.shape[2] // (SEGMENTS if q_segment_ids.stride(1) else 1), min(v.shape[2], 1))
    return call_tiles("document", "segmented", q, v, length, options)


def _extremes(
    q: Tensor,
    k: Tensor,
    doc: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    part: int,
) -> tuple[Tensor | None, ...]:
    """The smallest and the largest of each value that the mask compares, over parts of so many positions."""
    list_batch = q.shape[0]
    list_heads = 1

    q_offset = row_offset if row_offsets is None else row_offsets
    q_len = q.shape[2]
    q_parts = cdiv(q_len, part)
    kv_len = k.shape[2]
    kv_parts = cdiv(kv_len, part)
    doc_q_min = q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    doc_q_max = q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    q_segment_ids_q_min = q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    q_segment_ids_q_max = q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    doc_kv_min = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    doc_kv_max = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    kv_segment_ids_kv_min = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    kv_segment_ids_kv_max = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    kv_segment_ids_kv_2_min = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    kv_segment_ids_kv_2_max = q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    q_position_min = None if q_positions is None else q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    q_position_max = None if q_positions is None else q.new_empty((list_batch, list_heads, q_parts), dtype=torch.int32)
    kv_position_min = (
        None if kv_positions is None else q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    )
    kv_position_max = (
        None if kv_positions is None else q.new_empty((list_batch, list_heads, kv_parts), dtype=torch.int32)
    )
    parts = POSITIONS // part
    programs = cdiv(q_parts, parts) + cdiv(kv_parts, parts)
    launch(
        kernels.block_ranges.document_segmented_extremes,
        (list_batch * list_heads * programs,),
        doc,
        q_segment_ids,
        kv_segment_ids,
        q_positions,
        kv_positions,
        q_offset,
        doc_q_min,
        doc_q_max,
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        doc_kv_min,
        doc_kv_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        q_position_min,
        q_position_max,
        kv_position_min,
        kv_position_max,
        *doc.stride(),
        *q_segment_ids.stride(),
        *kv_segment_ids.stride(),
        doc.shape[1],
        q_segment_ids.shape[1],
        kv_segment_ids.shape[1],
        row_stride(q_positions),
        row_stride(kv_positions),
        q_len,
        kv_len,
        list_heads,
        padding_id,
        Q_OFFSET_PER_BATCH=row_offsets is not None,
        POSITIONS=q_positions is not None,
        PART=part,
        PARTS=parts,
    )
    return (
        doc_q_min,
        doc_q_max,
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        doc_kv_min,
        doc_kv_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        q_position_min,
        q_position_max,
        kv_position_min,
        kv_position_max,
    )


def _tables(
    q: Tensor,
    k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    block_extremes: tuple[Tensor | None, ...],
    part: int,
    tile: Tile,
    by_keys: bool,
) -> list[Tensor]:
    """The tables of a pass: of ranges; `by_keys` that of blocks of keys."""
    list_batch = q.shape[0]
    list_heads = 1

    q_offset = row_offset if row_offsets is None else row_offsets
    (
        doc_q_min,
        doc_q_max,
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        doc_kv_min,
        doc_kv_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        q_position_min,
        q_position_max,
        kv_position_min,
        kv_position_max,
    ) = block_extremes
    q_len, kv_len = q.shape[2], k.shape[2]
    num_rows, num_keys = cdiv(q_len, tile.block_m), cdiv(kv_len, tile.block_n)
    own_blocks, other_blocks = (num_keys, num_rows) if by_keys else (num_rows, num_keys)
    table_kernel = (
        kernels.block_ranges.document_segmented_key_ranges
        if by_keys
        else kernels.block_ranges.document_segmented_query_ranges
    )
    ranges = q.new_empty((list_batch, list_heads, own_blocks, 4), dtype=torch.int32)
    launch(
        table_kernel,
        (list_batch * list_heads * own_blocks,),
        doc_q_min,
        doc_q_max,
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        doc_kv_min,
        doc_kv_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        q_position_min,
        q_position_max,
        kv_position_min,
        kv_position_max,
        q_offset,
        ranges,
        q_len,
        kv_len,
        list_heads,
        Q_OFFSET_PER_BATCH=row_offsets is not None,
        POSITIONS=q_position_min is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PART=part,
        CHUNK=min(256, next_power_of_2(max(other_blocks, 32))),
    )
    return [ranges]


def make_tables(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    options: CallOptions,
    backward: bool,
) -> list[Tensor]:
    """The tables of each pass, in the order of PASSES; `backward=False` leaves out those of its passes."""
    tiles = tiles_of(q, v, q_segment_ids, options)
    pass_names = PASSES if backward else PASSES[:1]
    part = least_block(*(tiles[pass_name] for pass_name in pass_names))
    block_extremes = _extremes(
        q, k, doc, q_segment_ids, kv_segment_ids, padding_id, q_positions, kv_positions, row_offset, row_offsets, part
    )
    made: dict[tuple[int, int, bool], list[Tensor]] = {}
    block_tables: list[Tensor] = []
    for pass_name in pass_names:
        tile, by_keys = tiles[pass_name], pass_name == "dkdv"
        blocks = (tile.block_m, tile.block_n, by_keys)
        if blocks not in made:
            made[blocks] = _tables(q, k, row_offset, row_offsets, block_extremes, part, tile, by_keys)
        block_tables += made[blocks]
    return block_tables


@replayed
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    if options.plain:
        if not q.is_meta:
            # Tiles and a family that the kernels would refuse are refused here, too.
            tiles_of(q, v, q_segment_ids, options)
        return plain_forward(
            _reference,
            _fake_forward(
                q,
                k,
                v,
                doc,
                q_segment_ids,
                kv_segment_ids,
                padding_id,
                q_positions,
                kv_positions,
                row_offset,
                row_offsets,
                scale,
                options,
                block_tables,
            ),
            q,
            k,
            v,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, q_segment_ids, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = aligned(q), aligned(k), aligned(v)
    part = least_block(tile)
    block_extremes = (
        ()
        if block_tables
        else _extremes(
            q,
            k,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            part,
        )
    )
    (ranges,) = pass_table(block_tables, "fwd", 1) or _tables(
        q, k, row_offset, row_offsets, block_extremes, part, tile, False
    )
    arguments = (
        q,
        k,
        v,
        doc,
        q_segment_ids,
        kv_segment_ids,
        q_positions,
        kv_positions,
        ranges,
        q_offset,
        o,
        lse,
        *unit_strides(q),
        *unit_strides(k),
        *unit_strides(v),
        *o.stride()[:3],
        *doc.stride(),
        *q_segment_ids.stride(),
        *kv_segment_ids.stride(),
        row_stride(q_positions),
        row_stride(kv_positions),
        doc.shape[1],
        q_segment_ids.shape[1],
        kv_segment_ids.shape[1],
        row_stride(ranges),
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
        padding_id,
    )
    if tile.family == "hopper":
        launch_hopper(
            kernels.hopper_fwd.document_segmented_hopper_fwd,
            (min(cdiv(q_len, tile.block_m) * num_heads * batch, multiprocessors(q)),),
            *arguments,
            batch,
            work_counter(q),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            POSITIONS=q_positions is not None,
            RAGGED=kv_len % tile.block_n != 0,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=tile_columns(head_dim),
            BLOCK_DV=tile_columns(head_dim_v),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            num_warps=HOPPER_WARPS,
        )
    else:
        launch(
            kernels.fwd.document_segmented_fwd,
            (cdiv(q_len, tile.block_m) * num_heads * batch,),
            *arguments,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            POSITIONS=q_positions is not None,
            RAGGED=kv_len % tile.block_n != 0,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    if q_positions is not None and kv_positions is not None:
        launch(
            kernels.token_order.mark_disorder,
            (batch,),
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            o,
            lse,
            row_stride(q_segment_ids),
            q_segment_ids.stride(1),
            row_stride(kv_segment_ids),
            kv_segment_ids.stride(1),
            row_stride(q_positions),
            row_stride(kv_positions),
            *o.stride()[:3],
            q_len,
            kv_len,
            num_heads,
            padding_id,
            IN_ORDER=False,
            IN_STEP=True,
            AS_ROWS=False,
            HEAD_DIM_V=head_dim_v,
            BLOCK_DV=next_power_of_2(head_dim_v),
            BLOCK=1024,
        )
    return o, lse


@replayed
def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    o: Tensor,
    lse: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward: dq, which finds delta, then dk and dv; or all in one, after delta."""
    if options.plain:
        return plain_backward(
            _reference,
            _fake_backward(
                do,
                dlse,
                q,
                k,
                v,
                doc,
                q_segment_ids,
                kv_segment_ids,
                o,
                lse,
                padding_id,
                q_positions,
                kv_positions,
                row_offset,
                row_offsets,
                scale,
                options,
                block_tables,
            ),
            do,
            dlse,
            (0, 1, 2),
            q,
            k,
            v,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, q_segment_ids, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    dlse = None if dlse is None else dlse.contiguous()
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    part = least_block(tiles["dq"], tiles["dkdv"])
    block_extremes = (
        ()
        if pass_table(block_tables, "dq", 1)
        else _extremes(
            q,
            k,
            doc,
            q_segment_ids,
            kv_segment_ids,
            padding_id,
            q_positions,
            kv_positions,
            row_offset,
            row_offsets,
            part,
        )
    )
    if not fused:
        (ranges,) = pass_table(block_tables, "dq", 1) or _tables(
            q, k, row_offset, row_offsets, block_extremes, part, tiles["dq"], False
        )
    (key_ranges,) = pass_table(block_tables, "dkdv", 1) or _tables(
        q, k, row_offset, row_offsets, block_extremes, part, tiles["dkdv"], True
    )
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0 and not fused:
        launch(
            kernels.bwd_dq.document_segmented_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            doc,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            ranges,
            q_offset,
            delta,
            dq,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *unit_strides(o),
            *dq.stride()[:3],
            *doc.stride(),
            *q_segment_ids.stride(),
            *kv_segment_ids.stride(),
            row_stride(q_positions),
            row_stride(kv_positions),
            doc.shape[1],
            q_segment_ids.shape[1],
            kv_segment_ids.shape[1],
            row_stride(ranges),
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            padding_id,
            HAS_DLSE=dlse is not None,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            POSITIONS=q_positions is not None,
            RAGGED=kv_len % tiles["dq"].block_n != 0,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tiles["dq"].block_m,
            BLOCK_N=tiles["dq"].block_n,
            num_warps=tiles["dq"].num_warps,
            num_stages=tiles["dq"].num_stages,
        )
    if tile.family == "hopper":
        num_blocks = cdiv(q_len, tile.block_m)
        row_lse = q.new_empty((batch, num_heads, num_blocks * tile.block_m), dtype=FP32)
        row_delta = q.new_empty(row_lse.shape, dtype=FP32)
        dq_sums = q.new_zeros(
            (batch, num_heads, num_blocks, tile.block_m * tile_columns(head_dim)) if fused else (0,), dtype=FP32
        )
        if dq.numel() > 0:
            launch(
                kernels.hopper_delta.document_hopper_delta,
                (num_blocks * num_heads * batch,),
                o,
                do,
                lse,
                dlse,
                delta,
                row_lse,
                row_delta,
                *unit_strides(o),
                *unit_strides(do),
                q_len,
                num_heads,
                scale,
                HAS_DLSE=dlse is not None,
                WITH_DQ=fused,
                HEAD_DIM_V=head_dim_v,
                BLOCK_DV=tile_columns(head_dim_v),
                BLOCK_M=tile.block_m,
                num_warps=4,
            )
        if dk.numel() > 0:
            is_wide = tile.block_n == WIDE_KEYS
            bwd_kernel = (
                kernels.hopper_bwd_wide.document_segmented_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.document_segmented_hopper_bwd
            )
            launch_hopper(
                bwd_kernel,
                (min(cdiv(kv_len, tile.block_n) * num_kv_heads * batch, multiprocessors(q)),),
                q,
                k,
                v,
                do,
                row_lse,
                row_delta,
                doc,
                q_segment_ids,
                kv_segment_ids,
                q_positions,
                kv_positions,
                key_ranges,
                q_offset,
                dk,
                dv,
                *unit_strides(q),
                *unit_strides(k),
                *unit_strides(v),
                *unit_strides(do),
                *dk.stride()[:3],
                *dv.stride()[:3],
                *doc.stride(),
                *q_segment_ids.stride(),
                *kv_segment_ids.stride(),
                row_stride(q_positions),
                row_stride(kv_positions),
                doc.shape[1],
                q_segment_ids.shape[1],
                kv_segment_ids.shape[1],
                row_stride(key_ranges),
                q_len,
                kv_len,
                num_heads,
                group_size,
                scale,
                padding_id,
                dq_sums,
                batch,
                work_counter(q),
                WITH_DQ=fused,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
                POSITIONS=q_positions is not None,
                RAGGED=kv_len % tile.block_n != 0,
                HEAD_DIM=head_dim,
                HEAD_DIM_V=head_dim_v,
                BLOCK_D=tile_columns(head_dim),
                BLOCK_DV=tile_columns(head_dim_v),
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                STAGES=tile.num_stages,
                num_warps=HOPPER_WARPS,
            )
        if fused and dq.numel() > 0:
            launch(
                kernels.hopper_delta.document_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                dq_sums,
                dq,
                *dq.stride()[:3],
                q_len,
                num_heads,
                scale,
                HEAD_DIM=head_dim,
                BLOCK_D=tile_columns(head_dim),
                BLOCK_M=tile.block_m,
                num_warps=4,
            )
    elif dk.numel() > 0:
        launch(
            kernels.bwd_dkdv.document_segmented_bwd_dkdv,
            (cdiv(kv_len, tiles["dkdv"].block_n) * num_kv_heads * batch,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            doc,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            key_ranges,
            q_offset,
            dk,
            dv,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *dk.stride()[:3],
            *dv.stride()[:3],
            *doc.stride(),
            *q_segment_ids.stride(),
            *kv_segment_ids.stride(),
            row_stride(q_positions),
            row_stride(kv_positions),
            doc.shape[1],
            q_segment_ids.shape[1],
            kv_segment_ids.shape[1],
            row_stride(key_ranges),
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            padding_id,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            POSITIONS=q_positions is not None,
            RAGGED=q_len % tiles["dkdv"].block_m != 0,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tiles["dkdv"].block_m,
            BLOCK_N=tiles["dkdv"].block_n,
            num_warps=tiles["dkdv"].num_warps,
            num_stages=tiles["dkdv"].num_stages,
        )
    return dq, dk, dv


def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    o = empty_like_layout(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=FP32)
    return o, lse


def _fake_backward(
    _do: Tensor, _dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk = empty_like_layout(q, q.shape[3]), empty_like_layout(k, k.shape[3])
    dv = empty_like_layout(v, v.shape[3])
    return dq, dk, dv


# What torch.compile, torch.export and fake tensors see in place of the launches.
_forward_op = register_operator(f"{NAMESPACE}::{NAME}_fwd", _forward, _fake_forward)
_backward_op = register_operator(f"{NAMESPACE}::{NAME}_bwd", _backward, _fake_backward)
