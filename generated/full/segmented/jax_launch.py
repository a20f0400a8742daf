# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: full: {}
# template: host/jax_launch.py.jinja
# hash: 5d22e8fac387c560
"""Launches of the kernels of `full`, with segment ids, in JAX."""

from ..._runtime.core.configs import PASSES, Tile, Tiles, block_columns, cdiv, next_power_of_2
from ..._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from ..._runtime.core.options import CallOptions
from ..._runtime.core.schedules import POSITIONS, SEGMENTS, least_block, pass_table
from ..._runtime.jax.kernels import call_tiles, launch, multiprocessors
from ..._runtime.jax.schedule import work_counter
from ..._runtime.jax.tensor import FP32, INT32, Tensor, aligned, empty_like_layout, row_stride, unit_strides
from .. import segmented as kernels


def tiles_of(q: Tensor, v: Tensor, q_segment_ids: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    # How many segments a row has only the device knows. One id for all, with a stride of 0, is one segment.
    length = max(v.shape[2] // (SEGMENTS if q_segment_ids.stride(1) else 1), min(v.shape[2], 1))
    return call_tiles("full", "segmented", q, v, length, options)


def _extremes(
    q: Tensor, k: Tensor, q_segment_ids: Tensor, kv_segment_ids: Tensor, padding_id: int, part: int
) -> tuple[Tensor | None, ...]:
    """The smallest and the largest of each value that the mask compares, over parts of so many positions."""
    list_batch = q.shape[0]
    list_heads = 1

    q_len = q.shape[2]
    q_parts = cdiv(q_len, part)
    kv_len = k.shape[2]
    kv_parts = cdiv(kv_len, part)
    q_segment_ids_q_min = q.new_empty((list_batch, list_heads, q_parts), dtype=INT32)
    q_segment_ids_q_max = q.new_empty((list_batch, list_heads, q_parts), dtype=INT32)
    kv_segment_ids_kv_min = q.new_empty((list_batch, list_heads, kv_parts), dtype=INT32)
    kv_segment_ids_kv_max = q.new_empty((list_batch, list_heads, kv_parts), dtype=INT32)
    kv_segment_ids_kv_2_min = q.new_empty((list_batch, list_heads, kv_parts), dtype=INT32)
    kv_segment_ids_kv_2_max = q.new_empty((list_batch, list_heads, kv_parts), dtype=INT32)
    parts = POSITIONS // part
    programs = cdiv(q_parts, parts) + cdiv(kv_parts, parts)
    launch(
        kernels.block_ranges.full_segmented_extremes,
        (list_batch * list_heads * programs,),
        q_segment_ids,
        kv_segment_ids,
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        *q_segment_ids.stride(),
        *kv_segment_ids.stride(),
        q_segment_ids.shape[1],
        kv_segment_ids.shape[1],
        q_len,
        kv_len,
        list_heads,
        padding_id,
        PART=part,
        PARTS=parts,
    )
    return (
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
    )


def _tables(
    q: Tensor,
    k: Tensor,
    block_extremes: tuple[Tensor | None, ...],
    part: int,
    tile: Tile,
    by_keys: bool,
) -> list[Tensor]:
    """The tables of a pass: of ranges; `by_keys` that of blocks of keys."""
    list_batch = q.shape[0]
    list_heads = 1

    (
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
    ) = block_extremes
    q_len, kv_len = q.shape[2], k.shape[2]
    num_rows, num_keys = cdiv(q_len, tile.block_m), cdiv(kv_len, tile.block_n)
    own_blocks, other_blocks = (num_keys, num_rows) if by_keys else (num_rows, num_keys)
    table_kernel = (
        kernels.block_ranges.full_segmented_key_ranges if by_keys else kernels.block_ranges.full_segmented_query_ranges
    )
    ranges = q.new_empty((list_batch, list_heads, own_blocks, 4), dtype=INT32)
    launch(
        table_kernel,
        (list_batch * list_heads * own_blocks,),
        q_segment_ids_q_min,
        q_segment_ids_q_max,
        kv_segment_ids_kv_min,
        kv_segment_ids_kv_max,
        kv_segment_ids_kv_2_min,
        kv_segment_ids_kv_2_max,
        ranges,
        q_len,
        kv_len,
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
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    options: CallOptions,
    backward: bool,
) -> list[Tensor]:
    """The tables of each pass, in the order of PASSES; `backward=False` leaves out those of its passes."""
    tiles = tiles_of(q, v, q_segment_ids, options)
    pass_names = PASSES if backward else PASSES[:1]
    part = least_block(*(tiles[pass_name] for pass_name in pass_names))
    block_extremes = _extremes(q, k, q_segment_ids, kv_segment_ids, padding_id, part)
    made: dict[tuple[int, int, bool], list[Tensor]] = {}
    block_tables: list[Tensor] = []
    for pass_name in pass_names:
        tile, by_keys = tiles[pass_name], pass_name == "dkdv"
        blocks = (tile.block_m, tile.block_n, by_keys)
        if blocks not in made:
            made[blocks] = _tables(q, k, block_extremes, part, tile, by_keys)
        block_tables += made[blocks]
    return block_tables


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    padding_id: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, q_segment_ids, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=FP32)
    if o.numel() == 0:
        return o, lse
    q, k, v = aligned(q), aligned(k), aligned(v)
    part = least_block(tile)
    block_extremes = () if block_tables else _extremes(q, k, q_segment_ids, kv_segment_ids, padding_id, part)
    (ranges,) = pass_table(block_tables, "fwd", 1) or _tables(q, k, block_extremes, part, tile, False)
    arguments = (
        q,
        k,
        v,
        q_segment_ids,
        kv_segment_ids,
        ranges,
        o,
        lse,
        *unit_strides(q),
        *unit_strides(k),
        *unit_strides(v),
        *o.stride()[:3],
        *q_segment_ids.stride(),
        *kv_segment_ids.stride(),
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
        launch(
            kernels.hopper_fwd.full_segmented_hopper_fwd,
            (min(cdiv(q_len, tile.block_m) * num_heads * batch, multiprocessors(q)),),
            *arguments,
            batch,
            work_counter(q),
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
            kernels.fwd.full_segmented_fwd,
            (cdiv(q_len, tile.block_m) * num_heads * batch,),
            *arguments,
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
    return o, lse


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    o: Tensor,
    lse: Tensor,
    padding_id: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward: dq, which finds delta, then dk and dv; or all in one, after delta."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, q_segment_ids, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    part = least_block(tiles["dq"], tiles["dkdv"])
    block_extremes = (
        () if pass_table(block_tables, "dq", 1) else _extremes(q, k, q_segment_ids, kv_segment_ids, padding_id, part)
    )
    if not fused:
        (ranges,) = pass_table(block_tables, "dq", 1) or _tables(q, k, block_extremes, part, tiles["dq"], False)
    (key_ranges,) = pass_table(block_tables, "dkdv", 1) or _tables(q, k, block_extremes, part, tiles["dkdv"], True)
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0 and not fused:
        launch(
            kernels.bwd_dq.full_segmented_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            q_segment_ids,
            kv_segment_ids,
            ranges,
            delta,
            dq,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *unit_strides(o),
            *dq.stride()[:3],
            *q_segment_ids.stride(),
            *kv_segment_ids.stride(),
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
                kernels.hopper_delta.full_hopper_delta,
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
                kernels.hopper_bwd_wide.full_segmented_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.full_segmented_hopper_bwd
            )
            launch(
                bwd_kernel,
                (min(cdiv(kv_len, tile.block_n) * num_kv_heads * batch, multiprocessors(q)),),
                q,
                k,
                v,
                do,
                row_lse,
                row_delta,
                q_segment_ids,
                kv_segment_ids,
                key_ranges,
                dk,
                dv,
                *unit_strides(q),
                *unit_strides(k),
                *unit_strides(v),
                *unit_strides(do),
                *dk.stride()[:3],
                *dv.stride()[:3],
                *q_segment_ids.stride(),
                *kv_segment_ids.stride(),
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
                kernels.hopper_delta.full_hopper_dq_rows,
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
            kernels.bwd_dkdv.full_segmented_bwd_dkdv,
            (cdiv(kv_len, tiles["dkdv"].block_n) * num_kv_heads * batch,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            q_segment_ids,
            kv_segment_ids,
            key_ranges,
            dk,
            dv,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *dk.stride()[:3],
            *dv.stride()[:3],
            *q_segment_ids.stride(),
            *kv_segment_ids.stride(),
            q_segment_ids.shape[1],
            kv_segment_ids.shape[1],
            row_stride(key_ranges),
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            padding_id,
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
