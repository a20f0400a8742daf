# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_mask: {mask: 'band(before, after) and keep[b, h, q_idx, kv_idx]', scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {keep: {dims: [b, h, q_idx, kv_idx], dtype:
#     bool, example: (31 * i2 + 17 * i3) % 3 != 0}}}
# template: host/launch.py.jinja
# hash: 06b6373ce5e1ad9e
"""The launches of `band_mask`, packed sequences, for every framework: the kernels and their arguments."""

from collections.abc import Sequence

from ..._runtime.core.configs import Tile
from ..._runtime.core.families import has_split_tile, has_wide_tile, tile_columns
from ..._runtime.core.fp8 import output_dtype, value_columns
from ..._runtime.core.head_groups import split_heads
from ..._runtime.core.launches import (
    Backend,
    Tensor,
    delta_constants,
    dq_rows_constants,
    empty_gradients,
    packed_strides,
    packed_unit_strides,
    tables_of,
    tile_constants,
    tiles_of,
)
from ..._runtime.core.options import CallOptions
from .. import packed as kernels


def make_tables(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: CallOptions,
    passes: Sequence[str],
) -> list[Tensor]:
    """The tables of `passes`, one pass after the other. Each pass has: block_seqs."""
    tiles = tiles_of(backend, "band_mask", "packed", q, v, options, cu_seqlens_q)

    def make(tile: Tile, by_keys: bool) -> list[Tensor]:
        block = tile.block_n if by_keys else tile.block_m
        block_seqs = backend.block_sequences(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2], block, by_keys)
        return [block_seqs]

    return tables_of(tiles, passes, make)


def forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keep: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    before: int | Tensor,
    after: int | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    num_heads, q_len, head_dim = q.shape[1:]
    head_dim_v = v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "band_mask", "packed", q, v, options, cu_seqlens_q)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    (block_seqs,) = block_tables[:1] or make_tables(backend, q, k, v, cu_seqlens_q, cu_seqlens_k, options, ("fwd",))
    programs = block_seqs.shape[0] * num_heads
    arguments = (
        (q, k, v, own_keep, block_seqs, q_offset, before, after, o, lse),
        (*packed_unit_strides(q, k, v), *packed_strides(o), *own_keep.stride()),
        (q_len, num_heads, group_size, scale),
    )
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(before, after),
        "PTX": backend.is_nvidia(q),
    }
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v, cu_seqlens_k)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.band_mask_packed_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, own_keep, block_seqs, q_offset, before, after, o, lse),
            (*packed_unit_strides(q, k), *packed_strides(o), *own_keep.stride()),
            (q_len, columns.shape[3], num_heads, group_size, scale),
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.band_mask_packed_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.band_mask_packed_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.band_mask_packed_fwd,
            (programs,),
            *arguments,
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
    own_keep: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    before: int | Tensor,
    after: int | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel or one by one."""
    num_heads, q_len, head_dim = q.shape[1:]
    num_kv_heads, head_dim_v = k.shape[1], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "band_mask", "packed", q, v, options, cu_seqlens_q)
    tile = tiles["dkdv"]
    on_hopper = tiles["dq"].family == "hopper"
    # Beyond 256 columns each gradient has a launch of its own.
    is_split = tile.family == "hopper" and has_split_tile((head_dim, head_dim_v))
    fused = on_hopper and not is_split
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    tables = block_tables[1:] or make_tables(
        backend, q, k, v, cu_seqlens_q, cu_seqlens_k, options, ("dkdv",) if fused else ("dkdv", "dq")
    )
    (key_block_seqs,) = tables[:1]
    if not fused:
        (block_seqs,) = tables[1:]
    if tile.family == "hopper":
        row_seqs = backend.block_sequences(cu_seqlens_q, cu_seqlens_k, q_len, k.shape[2], tile.block_m, False)
    if fused:
        block_seqs = row_seqs
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(before, after),
        "PTX": backend.is_nvidia(q),
    }
    if dq.numel() > 0 and not on_hopper:
        backend.launch(
            kernels.portable.band_mask_packed_bwd_dq,
            (block_seqs.shape[0] * num_heads,),
            (o, dlse, q, k, v, do, lse, own_keep, block_seqs, q_offset, before, after, delta, dq),
            (*packed_unit_strides(q, k, v, do, o), *packed_strides(dq), *own_keep.stride()),
            (q_len, num_heads, group_size, scale),
            HAS_DLSE=dlse is not None,
            **constants,
            **tile_constants(tiles["dq"], head_dim, head_dim_v),
        )
    if tile.family == "hopper":
        # The most blocks of rows that there can be, because each sequence has whole blocks.
        num_row_blocks = q_len // tile.block_m + cu_seqlens_q.shape[0] - 1
        row_lse = q.new_empty((num_heads, num_row_blocks * tile.block_m), dtype=backend.FP32)
        row_delta = q.new_empty(row_lse.shape, dtype=backend.FP32)
        sums_shape = (num_heads, num_row_blocks, tile.block_m * tile_columns(head_dim)) if fused else (0,)
        dq_sums = q.new_zeros(sums_shape, dtype=backend.FP32)
        if dq.numel() > 0:
            backend.launch(
                kernels.portable.band_mask_packed_hopper_delta,
                (row_seqs.shape[0] * num_heads,),
                (o, do, lse, dlse, row_seqs, delta, row_lse, row_delta),
                (*packed_unit_strides(o, do), q_len, num_row_blocks, row_seqs.shape[0], scale),
                HAS_DLSE=dlse is not None,
                WITH_DQ=on_hopper,
                **delta_constants(tile, head_dim_v),
            )
        if is_split:
            for sums_dk, dkv in ((False, head_groups.dv), (True, head_groups.dk)) if dk.numel() > 0 else ():
                backend.launch_hopper(
                    kernels.hopper_split.band_mask_packed_hopper_split_keys,
                    (min(key_block_seqs.shape[0] * num_kv_heads * head_groups.number, backend.multiprocessors(q)),),
                    (q, k, v, do, row_lse, row_delta, own_keep, key_block_seqs, q_offset, before, after, dkv),
                    (*packed_unit_strides(q, k, v, do), *packed_strides(dkv), *own_keep.stride()),
                    (q_len, num_heads, head_groups.size, scale),
                    (cu_seqlens_q.shape[0] - 1, backend.work_counter(q)),
                    HEAD_GROUPS=head_groups.number,
                    SUMS_DK=sums_dk,
                    **constants,
                    **tile_constants(tile, head_dim, head_dim_v),
                )
            if dq.numel() > 0 and on_hopper:
                backend.launch_hopper(
                    kernels.hopper_split.band_mask_packed_hopper_split_rows,
                    (min(block_seqs.shape[0] * num_heads, backend.multiprocessors(q)),),
                    (q, k, v, do, row_lse, row_delta, own_keep, block_seqs, q_offset, before, after, dq),
                    (*packed_unit_strides(q, k, v, do), *packed_strides(dq), *own_keep.stride()),
                    (q_len, num_heads, group_size, scale),
                    (cu_seqlens_q.shape[0] - 1, backend.work_counter(q)),
                    **constants,
                    **tile_constants(tiles["dq"], head_dim, head_dim_v),
                )
        elif dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.band_mask_packed_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.band_mask_packed_hopper_bwd,
                (min(key_block_seqs.shape[0] * num_kv_heads * head_groups.number, backend.multiprocessors(q)),),
                (q, k, v, do, row_lse, row_delta, own_keep, key_block_seqs, q_offset, before, after, head_groups.dk),
                (head_groups.dv,),
                (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv)),
                (*own_keep.stride(),),
                (q_len, num_heads, head_groups.size, scale),
                (dq_sums, cu_seqlens_q.shape[0] - 1, backend.work_counter(q)),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.portable.band_mask_packed_hopper_dq_rows,
                (2 * row_seqs.shape[0] * num_heads,),
                (dq_sums, row_seqs, dq, *packed_strides(dq), num_row_blocks, row_seqs.shape[0], scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.band_mask_packed_bwd_dkdv,
            (key_block_seqs.shape[0] * num_kv_heads * head_groups.number,),
            (q, k, v, do, lse, delta, own_keep, key_block_seqs, q_offset, before, after, head_groups.dk),
            (head_groups.dv,),
            (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv)),
            (*own_keep.stride(),),
            (q_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv
