# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: host/launch.py.jinja
# hash: 9ee5989e1796c9f1
"""The launches of `padding`, for every framework: the kernels and their arguments."""

from .. import padding as kernels
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
    length: Tensor,
    scale: float,
    options: CallOptions,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "padding", "dense", q, v, options)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((batch, num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q, k, v = map(backend.aligned, (q, k, v))
    programs = cdiv(q_len, tile.block_m) * num_heads * batch
    arguments = (
        (q, k, v, length, o, lse),
        (*unit_strides(q, k, v), *strides(o), *length.stride()),
        (q_len, kv_len, num_heads, group_size, scale),
    )
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.padding_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, length, o, lse),
            (*unit_strides(q, k), *strides(o), *length.stride()),
            (q_len, kv_len, columns.shape[3], num_heads, group_size, scale),
            (batch,),
            RAGGED=kv_len % tile.block_n != 0,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.padding_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.padding_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (batch,),
            RAGGED=kv_len % tile.block_n != 0,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.padding_fwd,
            (programs,),
            *arguments,
            RAGGED=kv_len % tile.block_n != 0,
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
    length: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel or one by one."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "padding", "dense", q, v, options)
    tile = tiles["dkdv"]
    on_hopper = tiles["dq"].family == "hopper"
    # Beyond 256 columns each gradient has a launch of its own.
    is_split = tile.family == "hopper" and has_split_tile((head_dim, head_dim_v))
    fused = on_hopper and not is_split
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    if dq.numel() > 0 and not on_hopper:
        backend.launch(
            kernels.portable.padding_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            (o, dlse, q, k, v, do, lse, length, delta, dq),
            (*unit_strides(q, k, v, do, o), *strides(dq), *length.stride()),
            (q_len, kv_len, num_heads, group_size, scale),
            HAS_DLSE=dlse is not None,
            RAGGED=kv_len % tiles["dq"].block_n != 0,
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
                kernels.portable.padding_hopper_delta,
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
                    kernels.hopper_split.padding_hopper_split_keys,
                    (
                        min(
                            cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                            backend.multiprocessors(q),
                        ),
                    ),
                    (q, k, v, do, row_lse, row_delta, length, dkv),
                    (*unit_strides(q, k, v, do), *strides(dkv), *length.stride()),
                    (q_len, kv_len, num_heads, head_groups.size, scale),
                    (batch, backend.work_counter(q)),
                    HEAD_GROUPS=head_groups.number,
                    SUMS_DK=sums_dk,
                    RAGGED=kv_len % tile.block_n != 0,
                    **tile_constants(tile, head_dim, head_dim_v),
                )
            if dq.numel() > 0 and on_hopper:
                backend.launch_hopper(
                    kernels.hopper_split.padding_hopper_split_rows,
                    (min(cdiv(q_len, tiles["dq"].block_m) * num_heads * batch, backend.multiprocessors(q)),),
                    (q, k, v, do, row_lse, row_delta, length, dq),
                    (*unit_strides(q, k, v, do), *strides(dq), *length.stride()),
                    (q_len, kv_len, num_heads, group_size, scale),
                    (batch,),
                    RAGGED=kv_len % tiles["dq"].block_n != 0,
                    **tile_constants(tiles["dq"], head_dim, head_dim_v),
                )
        elif dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.padding_hopper_bwd_wide if is_wide else kernels.hopper_bwd.padding_hopper_bwd,
                (
                    min(
                        cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                        backend.multiprocessors(q),
                    ),
                ),
                (q, k, v, do, row_lse, row_delta, length, head_groups.dk, head_groups.dv),
                (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *length.stride()),
                (q_len, kv_len, num_heads, head_groups.size, scale),
                (dq_sums, batch, backend.work_counter(q)),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                RAGGED=kv_len % tile.block_n != 0,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.portable.padding_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                (dq_sums, dq, *strides(dq), q_len, num_heads, scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.padding_bwd_dkdv,
            (cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,),
            (q, k, v, do, lse, delta, length, head_groups.dk, head_groups.dv),
            (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *length.stride()),
            (q_len, kv_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            RAGGED=q_len % tile.block_m != 0,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv
