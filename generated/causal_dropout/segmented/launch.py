# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/launch.py.jinja
# hash: ef725754ce4f71da
"""The launches of `causal_dropout`, with segment ids, for every framework: the kernels and their arguments."""

from collections.abc import Sequence

from ..._runtime.core.checks import keep_numbers
from ..._runtime.core.configs import Tile, cdiv, next_power_of_2
from ..._runtime.core.families import has_split_tile, has_wide_tile, tile_columns
from ..._runtime.core.head_groups import split_heads
from ..._runtime.core.launches import (
    Backend,
    Tensor,
    delta_constants,
    dq_rows_constants,
    empty_gradients,
    row_stride,
    strides,
    tables_of,
    tile_constants,
    tiles_of,
    unit_strides,
)
from ..._runtime.core.options import CallOptions
from ..._runtime.core.schedules import POSITIONS, least_block
from .. import segmented as kernels


def make_tables(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offset: int,
    row_offsets: Tensor | None,
    options: CallOptions,
    passes: Sequence[str],
) -> list[Tensor]:
    """The tables of `passes`, one pass after the other. Each pass has: ranges."""
    tiles = tiles_of(backend, "causal_dropout", "segmented", q, v, options, q_segment_ids)
    list_batch, list_heads = q.shape[0], 1
    q_len, kv_len = q.shape[2], k.shape[2]
    q_offset = row_offset if row_offsets is None else row_offsets
    # The smallest and the largest of each value that the mask compares, over parts of `part` positions.
    part = least_block(*(tiles[name] for name in passes))
    q_parts = cdiv(q_len, part)
    kv_parts = cdiv(kv_len, part)
    block_extremes: list[Tensor | None] = []
    block_extremes += [q.new_empty((list_batch, list_heads, q_parts), dtype=backend.INT32) for _ in range(2)]
    block_extremes += [q.new_empty((list_batch, list_heads, kv_parts), dtype=backend.INT32) for _ in range(4)]
    shape = (list_batch, list_heads, q_parts)
    block_extremes += [None if q_positions is None else q.new_empty(shape, dtype=backend.INT32) for _ in range(2)]
    shape = (list_batch, list_heads, kv_parts)
    block_extremes += [None if kv_positions is None else q.new_empty(shape, dtype=backend.INT32) for _ in range(2)]
    parts = POSITIONS // part
    programs = cdiv(q_parts, parts) + cdiv(kv_parts, parts)
    backend.launch(
        kernels.block_ranges.causal_dropout_segmented_extremes,
        (list_batch * list_heads * programs,),
        (q_segment_ids, kv_segment_ids, q_positions, kv_positions, q_offset, *block_extremes),
        (*q_segment_ids.stride(), *kv_segment_ids.stride(), q_segment_ids.shape[1], kv_segment_ids.shape[1]),
        (row_stride(q_positions), row_stride(kv_positions)),
        (q_len, kv_len, list_heads, padding_id),
        Q_OFFSET_PER_BATCH=row_offsets is not None,
        POSITIONS=q_positions is not None,
        PART=part,
        PARTS=parts,
    )

    def make(tile: Tile, by_keys: bool) -> list[Tensor]:
        num_rows, num_keys = cdiv(q_len, tile.block_m), cdiv(kv_len, tile.block_n)
        own_blocks, other_blocks = (num_keys, num_rows) if by_keys else (num_rows, num_keys)
        table_kernels = kernels.block_ranges
        table_kernel = (
            table_kernels.causal_dropout_segmented_key_ranges
            if by_keys
            else table_kernels.causal_dropout_segmented_query_ranges
        )
        ranges = q.new_empty((list_batch, list_heads, own_blocks, 4), dtype=backend.INT32)
        backend.launch(
            table_kernel,
            (list_batch * list_heads * own_blocks,),
            (*block_extremes, q_offset, ranges),
            (q_len, kv_len, list_heads),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            POSITIONS=block_extremes[-1] is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PART=part,
            CHUNK=min(256, next_power_of_2(max(other_blocks, 32))),
        )
        return [ranges]

    return tables_of(tiles, passes, make)


def forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offsets: Tensor | None,
    padding_id: int,
    dropout_p: float,
    seed: int | Tensor,
    first_head: int | Tensor,
    all_heads: int | Tensor,
    row_origin: int | Tensor,
    key_origin: int | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "causal_dropout", "segmented", q, v, options, q_segment_ids)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    threshold, keep_scale = keep_numbers(dropout_p)
    q, k, v = map(backend.aligned, (q, k, v))
    (ranges,) = block_tables[:1] or make_tables(
        backend,
        q,
        k,
        v,
        q_segment_ids,
        kv_segment_ids,
        padding_id,
        q_positions,
        kv_positions,
        row_offset,
        row_offsets,
        options,
        ("fwd",),
    )
    programs = cdiv(q_len, tile.block_m) * num_heads * batch
    arguments = (
        (q, k, v, q_segment_ids, kv_segment_ids, q_positions, kv_positions, ranges, q_offset, seed),
        (first_head, all_heads, row_origin, key_origin, o, lse),
        (*unit_strides(q, k, v), *strides(o), *q_segment_ids.stride(), *kv_segment_ids.stride()),
        (row_stride(q_positions), row_stride(kv_positions), q_segment_ids.shape[1], kv_segment_ids.shape[1]),
        (row_stride(ranges),),
        (q_len, kv_len, num_heads, group_size, scale, threshold, keep_scale, padding_id),
    )
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(seed, first_head, all_heads, row_origin, key_origin),
        "POSITIONS": q_positions is not None,
        "DROPOUT": threshold > 0,
    }
    if tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.causal_dropout_segmented_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.causal_dropout_segmented_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (batch, backend.work_counter(q)),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.causal_dropout_segmented_fwd,
            (programs,),
            *arguments,
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    if backend.ANSWERS_DISORDER and q_positions is not None and kv_positions is not None:
        backend.launch(
            kernels.token_order.mark_disorder,
            (batch,),
            (q_segment_ids, kv_segment_ids, q_positions, kv_positions, o, lse),
            (row_stride(q_segment_ids), q_segment_ids.stride(1), row_stride(kv_segment_ids), kv_segment_ids.stride(1)),
            (row_stride(q_positions), row_stride(kv_positions), *strides(o), q_len, kv_len, num_heads, padding_id),
            IN_ORDER=True,
            IN_STEP=False,
            AS_ROWS=False,
            HEAD_DIM_V=head_dim_v,
            BLOCK_DV=next_power_of_2(head_dim_v),
            BLOCK=1024,
        )
    return o, lse


def backward(
    backend: Backend,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    padding_id: int,
    dropout_p: float,
    seed: int | Tensor,
    first_head: int | Tensor,
    all_heads: int | Tensor,
    row_origin: int | Tensor,
    key_origin: int | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "causal_dropout", "segmented", q, v, options, q_segment_ids)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    tables = block_tables[1:] or make_tables(
        backend,
        q,
        k,
        v,
        q_segment_ids,
        kv_segment_ids,
        padding_id,
        q_positions,
        kv_positions,
        row_offset,
        row_offsets,
        options,
        ("dkdv",) if fused else ("dkdv", "dq"),
    )
    (key_ranges,) = tables[:1]
    if not fused:
        (ranges,) = tables[1:]
    q_offset = row_offset if row_offsets is None else row_offsets
    threshold, keep_scale = keep_numbers(dropout_p)
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(seed, first_head, all_heads, row_origin, key_origin),
        "POSITIONS": q_positions is not None,
        "DROPOUT": threshold > 0,
    }
    if dq.numel() > 0 and not fused:
        backend.launch(
            kernels.portable.causal_dropout_segmented_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            (o, dlse, q, k, v, do, lse, q_segment_ids, kv_segment_ids, q_positions, kv_positions, ranges),
            (q_offset, seed, first_head, all_heads, row_origin, key_origin, delta, dq),
            (*unit_strides(q, k, v, do, o), *strides(dq), *q_segment_ids.stride(), *kv_segment_ids.stride()),
            (row_stride(q_positions), row_stride(kv_positions), q_segment_ids.shape[1], kv_segment_ids.shape[1]),
            (row_stride(ranges),),
            (q_len, kv_len, num_heads, group_size, scale, threshold, keep_scale, padding_id),
            HAS_DLSE=dlse is not None,
            RAGGED=kv_len % tiles["dq"].block_n != 0,
            **constants,
            **tile_constants(tiles["dq"], head_dim, head_dim_v),
        )
    if tile.family == "hopper":
        num_blocks = cdiv(q_len, tile.block_m)
        row_lse = q.new_empty((batch, num_heads, num_blocks * tile.block_m), dtype=backend.FP32)
        row_delta = q.new_empty(row_lse.shape, dtype=backend.FP32)
        sums_shape = (batch, num_heads, num_blocks, tile.block_m * tile_columns(head_dim)) if fused else (0,)
        dq_sums = q.new_zeros(sums_shape, dtype=backend.FP32)
        if dq.numel() > 0:
            backend.launch(
                kernels.causal_dropout.portable.causal_dropout_hopper_delta,
                (num_blocks * num_heads * batch,),
                (o, do, lse, dlse, delta, row_lse, row_delta),
                (*unit_strides(o, do), q_len, num_heads, scale, keep_scale if threshold > 0 else 1.0),
                HAS_DLSE=dlse is not None,
                WITH_DQ=fused,
                **delta_constants(tile, head_dim_v),
            )
        if dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.causal_dropout_segmented_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.causal_dropout_segmented_hopper_bwd,
                (
                    min(
                        cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                        backend.multiprocessors(q),
                    ),
                ),
                (q, k, v, do, row_lse, row_delta, q_segment_ids, kv_segment_ids, q_positions, kv_positions),
                (key_ranges, q_offset, seed, first_head, all_heads, row_origin, key_origin, head_groups.dk),
                (head_groups.dv,),
                (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *q_segment_ids.stride()),
                (*kv_segment_ids.stride(), row_stride(q_positions), row_stride(kv_positions), q_segment_ids.shape[1]),
                (kv_segment_ids.shape[1], row_stride(key_ranges)),
                (q_len, kv_len, num_heads, head_groups.size, scale, threshold, padding_id),
                (dq_sums, batch, backend.work_counter(q)),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                RAGGED=kv_len % tile.block_n != 0,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.causal_dropout.portable.causal_dropout_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                (dq_sums, dq, *strides(dq), q_len, num_heads, scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.causal_dropout_segmented_bwd_dkdv,
            (cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,),
            (q, k, v, do, lse, delta, q_segment_ids, kv_segment_ids, q_positions, kv_positions, key_ranges),
            (q_offset, seed, first_head, all_heads, row_origin, key_origin, head_groups.dk, head_groups.dv),
            (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *q_segment_ids.stride()),
            (*kv_segment_ids.stride(), row_stride(q_positions), row_stride(kv_positions), q_segment_ids.shape[1]),
            (kv_segment_ids.shape[1], row_stride(key_ranges)),
            (q_len, kv_len, num_heads, head_groups.size, scale, threshold, keep_scale, padding_id),
            HEAD_GROUPS=head_groups.number,
            RAGGED=q_len % tile.block_m != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv
