# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: host/launch.py.jinja
# hash: dd7a7a95f1467081
"""The launches of `band_softcap`, for every framework: the kernels and their arguments."""

from .. import band_softcap as kernels
from .._runtime.core.configs import cdiv
from .._runtime.core.families import has_split_tile, has_wide_tile, tile_columns
from .._runtime.core.fp8 import output_dtype, value_columns
from .._runtime.core.head_groups import split_heads
from .._runtime.core.launches import (
    Backend,
    Tensor,
    delta_constants,
    dq_rows_constants,
    empty_gradients,
    strides,
    tile_constants,
    tiles_of,
    unit_strides,
)
from .._runtime.core.options import CallOptions


def forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_offsets: Tensor | None,
    before: int | Tensor,
    after: int | Tensor,
    cap: float | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(
        backend,
        "band_softcap",
        "dense",
        q,
        v,
        options,
        band_keys=None if backend.is_loaded(after, before) else after + before + 1,
    )["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((batch, num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    programs = cdiv(q_len, tile.block_m) * num_heads * batch
    arguments = (
        (q, k, v, q_offset, before, after, cap, o, lse),
        (*unit_strides(q, k, v), *strides(o)),
        (q_len, kv_len, num_heads, group_size, scale),
    )
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(before, after, cap),
        "HARDWARE_TANH": backend.has_tanh_instruction(q),
    }
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.band_softcap_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, q_offset, before, after, cap, o, lse),
            (*unit_strides(q, k), *strides(o)),
            (q_len, kv_len, columns.shape[3], num_heads, group_size, scale),
            (batch, backend.work_counter(q)),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.band_softcap_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.band_softcap_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (batch, backend.work_counter(q)),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.band_softcap_fwd,
            (programs,),
            *arguments,
            PTX=backend.is_nvidia(q),
            NARROW=not backend.is_loaded(after, before) and after + before <= 255,
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
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    before: int | Tensor,
    after: int | Tensor,
    cap: float | Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(
        backend,
        "band_softcap",
        "dense",
        q,
        v,
        options,
        band_keys=None if backend.is_loaded(after, before) else after + before + 1,
    )
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {
        "Q_OFFSET_PER_BATCH": row_offsets is not None,
        "SCALARS_LOADED": backend.is_loaded(before, after, cap),
        "HARDWARE_TANH": backend.has_tanh_instruction(q),
    }
    if dq.numel() > 0 and not fused:
        backend.launch(
            kernels.portable.band_softcap_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            (o, dlse, q, k, v, do, lse, q_offset, before, after, cap, delta, dq),
            (*unit_strides(q, k, v, do, o), *strides(dq)),
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
                kernels.portable.band_softcap_hopper_delta,
                (num_blocks * num_heads * batch,),
                (o, do, lse, dlse, delta, row_lse, row_delta),
                (*unit_strides(o, do), q_len, num_heads),
                HAS_DLSE=dlse is not None,
                WITH_DQ=fused,
                **delta_constants(tile, head_dim_v),
            )
        if dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.band_softcap_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.band_softcap_hopper_bwd,
                (
                    min(
                        cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                        backend.multiprocessors(q),
                    ),
                ),
                (q, k, v, do, row_lse, row_delta, q_offset, before, after, cap, head_groups.dk, head_groups.dv),
                (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv)),
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
                kernels.portable.band_softcap_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                (dq_sums, dq, *strides(dq), q_len, num_heads, scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.band_softcap_bwd_dkdv,
            (cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,),
            (q, k, v, do, lse, delta, q_offset, before, after, cap, head_groups.dk, head_groups.dv),
            (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv)),
            (q_len, kv_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            RAGGED=q_len % tile.block_m != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv
