# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true, prune: true}
# template: host/launch.py.jinja
# hash: 1d36f7384c8fc1cd
"""The launches of `forgetting`, for every framework: the kernels and their arguments."""

from .. import forgetting as kernels
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


def fill_decay(backend: Backend, g: Tensor, decay: Tensor) -> None:
    """Launch the running sum of the log-decay, `[B, Hq, S]`."""
    batch, num_heads, _ = decay.shape
    backend.launch(
        kernels.decay.forgetting_decay_cumsum,
        (batch * num_heads,),
        (g, decay, *g.stride(), g.shape[1], num_heads),
        BLOCK=1024,
    )


def forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    row_offsets: Tensor | None,
    row_offset: int,
    scale: float,
    options: CallOptions,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "forgetting", "dense", q, v, options)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((batch, num_heads, q_len), dtype=backend.FP32)
    decay = q.new_empty((batch, num_heads, g.shape[1]), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse, decay
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    fill_decay(backend, g, decay)
    programs = cdiv(q_len, tile.block_m) * num_heads * batch
    arguments = (
        (q, k, v, decay, q_offset, o, lse),
        (*unit_strides(q, k, v), *strides(o), *decay.stride()[:2], decay.shape[2]),
        (q_len, kv_len, num_heads, group_size, scale),
    )
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.forgetting_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, decay, q_offset, o, lse),
            (*unit_strides(q, k), *strides(o), *decay.stride()[:2], decay.shape[2]),
            (q_len, kv_len, columns.shape[3], num_heads, group_size, scale),
            (batch,),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.forgetting_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.forgetting_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (batch,),
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.forgetting_fwd,
            (programs,),
            *arguments,
            RAGGED=kv_len % tile.block_n != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    return o, lse, decay


def backward(
    backend: Backend,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    decay: Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel.

    After dq, dk and dv it returns the results from which the gradients of g are computed: dg.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "forgetting", "dense", q, v, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    ddecay_rows = q.new_zeros((batch, num_heads, q_len), dtype=backend.FP32)
    ddecay_cols = q.new_empty((batch, num_heads, kv_len), dtype=backend.FP32)
    dg = g.new_empty(g.shape)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if dq.numel() > 0 and not fused:
        backend.launch(
            kernels.portable.forgetting_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            (o, dlse, q, k, v, do, lse, decay, q_offset, delta, dq, ddecay_rows),
            (*unit_strides(q, k, v, do, o), *strides(dq), *decay.stride()[:2], decay.shape[2]),
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
                kernels.portable.forgetting_hopper_delta,
                (num_blocks * num_heads * batch,),
                (o, do, lse, dlse, decay, q_offset, delta, row_lse, row_delta),
                (*unit_strides(o, do), *decay.stride()[:2], decay.shape[2], q_len, num_heads, scale),
                Q_OFFSET_PER_BATCH=row_offsets is not None,
                HAS_DLSE=dlse is not None,
                WITH_DQ=fused,
                **delta_constants(tile, head_dim_v),
            )
        if dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.forgetting_hopper_bwd_wide if is_wide else kernels.hopper_bwd.forgetting_hopper_bwd,
                (
                    min(
                        cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,
                        backend.multiprocessors(q),
                    ),
                ),
                (q, k, v, do, row_lse, row_delta, decay, q_offset, ddecay_rows, head_groups.dk, head_groups.dv),
                (ddecay_cols,),
                (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *decay.stride()[:2]),
                (decay.shape[2],),
                (q_len, kv_len, num_heads, head_groups.size, scale),
                (dq_sums, batch, backend.work_counter(q)) if is_wide else (dq_sums, batch),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                RAGGED=kv_len % tile.block_n != 0,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.portable.forgetting_hopper_dq_rows,
                (2 * num_blocks * num_heads * batch,),
                (dq_sums, dq, *strides(dq), q_len, num_heads, scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.forgetting_bwd_dkdv,
            (cdiv(kv_len, tile.block_n) * num_kv_heads * batch * head_groups.number,),
            (q, k, v, do, lse, delta, decay, q_offset, head_groups.dk, head_groups.dv, ddecay_cols),
            (*unit_strides(q, k, v, do), *strides(head_groups.dk, head_groups.dv), *decay.stride()[:2]),
            (decay.shape[2],),
            (q_len, kv_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            RAGGED=q_len % tile.block_m != 0,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    if dg.numel() > 0:
        backend.launch(
            kernels.decay.forgetting_decay_grad,
            (batch * num_heads,),
            (ddecay_rows, ddecay_cols, q_offset, dg, *dg.stride(), g.shape[1], q_len, kv_len, num_heads),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            BLOCK=1024,
        )
    return dq, dk, dv, dg
