# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/launch.py.jinja
# hash: 5762e7dae74da5e2
"""The launches of `document`, for every framework: the kernels and their arguments."""

from collections.abc import Sequence

from .. import document as kernels
from .._runtime.core.configs import Tile, cdiv, next_power_of_2
from .._runtime.core.families import has_split_tile, has_wide_tile, tile_columns
from .._runtime.core.fp8 import output_dtype, value_columns
from .._runtime.core.head_groups import split_heads
from .._runtime.core.launches import (
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
from .._runtime.core.options import CallOptions
from .._runtime.core.schedules import POSITIONS, least_block


def make_tables(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    options: CallOptions,
    passes: Sequence[str],
) -> list[Tensor]:
    """The tables of `passes`, one pass after the other. Each pass has: ranges."""
    tiles = tiles_of(backend, "document", "dense", q, v, options)
    list_batch, list_heads = q.shape[0], 1
    q_len, kv_len = q.shape[2], k.shape[2]
    q_offset = row_offset if row_offsets is None else row_offsets
    # The smallest and the largest of each value that the mask compares, over parts of `part` positions.
    part = least_block(*(tiles[name] for name in passes))
    q_parts = cdiv(q_len, part)
    kv_parts = cdiv(kv_len, part)
    block_extremes: list[Tensor] = []
    block_extremes += [q.new_empty((list_batch, list_heads, q_parts), dtype=backend.INT32) for _ in range(2)]
    block_extremes += [q.new_empty((list_batch, list_heads, kv_parts), dtype=backend.INT32) for _ in range(2)]
    parts = POSITIONS // part
    programs = cdiv(q_parts, parts) + cdiv(kv_parts, parts)
    backend.launch(
        kernels.block_ranges.document_extremes,
        (list_batch * list_heads * programs,),
        (doc, q_offset, *block_extremes),
        (*doc.stride(), doc.shape[1]),
        (q_len, kv_len, list_heads),
        Q_OFFSET_PER_BATCH=row_offsets is not None,
        PART=part,
        PARTS=parts,
    )

    def make(tile: Tile, by_keys: bool) -> list[Tensor]:
        num_rows, num_keys = cdiv(q_len, tile.block_m), cdiv(kv_len, tile.block_n)
        own_blocks, other_blocks = (num_keys, num_rows) if by_keys else (num_rows, num_keys)
        table_kernels = kernels.block_ranges
        table_kernel = table_kernels.document_key_ranges if by_keys else table_kernels.document_query_ranges
        ranges = q.new_empty((list_batch, list_heads, own_blocks, 4), dtype=backend.INT32)
        backend.launch(
            table_kernel,
            (list_batch * list_heads * own_blocks,),
            (*block_extremes, q_offset, ranges),
            (q_len, kv_len, list_heads),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
    doc: Tensor,
    row_offsets: Tensor | None,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "document", "dense", q, v, options)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((batch, num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    (ranges,) = block_tables[:1] or make_tables(backend, q, k, v, doc, row_offset, row_offsets, options, ("fwd",))
    programs = cdiv(q_len, tile.block_m) * num_heads * batch
    arguments = (
        (q, k, v, doc, ranges, q_offset, o, lse),
        (*unit_strides(q, k, v), *strides(o), *doc.stride(), doc.shape[1], row_stride(ranges)),
        (q_len, kv_len, num_heads, group_size, scale),
    )
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.document_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, doc, ranges, q_offset, o, lse),
            (*unit_strides(q, k), *strides(o), *doc.stride(), doc.shape[1], row_stride(ranges)),
            (q_len, kv_len, columns.shape[3], num_heads, group_size, scale),
            (batch, backend.work_counter(q)),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.document_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.document_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (batch, backend.work_counter(q)),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.document_fwd,
            (programs,),
            *arguments,
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    return o, lse


def backward(
    backend: Backend,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc: Tensor,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel or one by one."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "document", "dense", q, v, options)
    tile = tiles["dkdv"]
    on_hopper = tiles["dq"].family == "hopper"
    # Beyond 256 columns each gradient has a launch of its own.
    is_split = tile.family == "hopper" and has_split_tile((head_dim, head_dim_v))
    fused = on_hopper and not is_split
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    tables = block_tables[1:] or make_tables(
        backend, q, k, v, doc, row_offset, row_offsets, options, ("dkdv",) if fused else ("dkdv", "dq")
    )
    (key_ranges,) = tables[:1]
    if not fused:
        (ranges,) = tables[1:]
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if dq.numel() > 0 and not on_hopper:
        backend.launch(
            kernels.portable.document_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            (o, dlse, q, k, v, do, lse, doc, ranges, q_offset, delta, dq),
            (*unit_strides(q, k, v, do, o), *strides(dq), *doc.stride(), doc.shape[1], row_stride(ranges)),
            (q_len, kv_len, num_heads, group_size, scale),
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
                kernels.portable.document_hopper_delta,
                (num_blocks * num_heads * batch,),
                (o, do, lse, dlse, delta, row_lse, row_delta),
                (*unit_strides(o, do), q_len, num_heads, scale),
                HAS_DLSE=dlse is not None,
                WITH_DQ=on_hopper,
                **delta_constants(tile, head_dim_v),
            )
        if is_split:
            for sums_dk, dkv in ((False, head_groups.dv), (True, head_groups.dk)) if dk.numel() > 0 else ():
                backend.launch_hopper(
                    kernels.hopper_split.document_hopper_split_keys,
                    (
                        min(
                            cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                            backend.multiprocessors(q),
                        ),
                    ),
                    (q, k, v, do, row_lse, row_delta, doc, key_ranges, q_offset, dkv),
                    (*unit_strides(q, k, v, do), *strides(dkv), *doc.stride(), doc.shape[1], row_stride(key_ranges)),
                    (q_len, kv_len, num_heads, head_groups.size, scale),
                    (batch, backend.work_counter(q)),
                    HEAD_GROUPS=head_groups.number,
                    SUMS_DK=sums_dk,
                    RAGGED=kv_len % tile.block_n != 0,
                    **constants,
                    **tile_constants(tile, head_dim, head_dim_v),
                )
            if dq.numel() > 0 and on_hopper:
                backend.launch_hopper(
                    kernels.hopper_split.document_hopper_split_rows,
                    (min(cdiv(q_len, tiles["dq"].block_m) * num_heads * batch, backend.multiprocessors(q)),),
                    (q, k, v, do, row_lse, row_delta, doc, ranges, q_offset, dq),
                    (*unit_strides(q, k, v, do), *strides(dq), *doc.stride(), doc.shape[1], row_stride(ranges)),
                    (q_len, kv_len, num_heads, group_size, scale),
                    (batch, backend.work_counter(q)),
                    RAGGED=kv_len % tiles["dq"].block_n != 0,
                    **constants,
                    **tile_constants(tiles["dq"], head_dim, head_dim_v),
                )
        elif dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.document_hopper_bwd_wide if is_wide else kernels.hopper_bwd.document_hopper_bwd,
                (
                    min(
                        cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                        backend.multiprocessors(q),
                    ),
                ),
                (q, k, v, do, row_lse, row_delta, doc, key_ranges, q_offset, head_groups.dk, head_groups.dv),
                (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *doc.stride(), doc.shape[1]),
                (row_stride(key_ranges),),
                (q_len, kv_len, num_heads, head_groups.size, scale),
                (dq_sums, batch, backend.work_counter(q)),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                RAGGED=kv_len % tile.block_n != 0,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.portable.document_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                (dq_sums, dq, *strides(dq), q_len, num_heads, scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.document_bwd_dkdv,
            (cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,),
            (q, k, v, do, lse, delta, doc, key_ranges, q_offset, head_groups.dk, head_groups.dv),
            (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *doc.stride(), doc.shape[1]),
            (row_stride(key_ranges),),
            (q_len, kv_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            RAGGED=q_len % tile.block_m != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv
