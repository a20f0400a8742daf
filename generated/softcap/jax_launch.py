# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: host/jax_launch.py.jinja
# hash: 55bed9d8219d227b
"""Launches of the kernels of `softcap`, in JAX."""

from .. import softcap as kernels
from .._runtime.core.configs import Tiles, block_columns, cdiv
from .._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from .._runtime.core.options import CallOptions
from .._runtime.jax.kernels import call_tiles, has_tanh_instruction, launch, multiprocessors
from .._runtime.jax.schedule import work_counter
from .._runtime.jax.tensor import FP32, Tensor, aligned, empty_like_layout, unit_strides


def tiles_of(q: Tensor, v: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    length = v.shape[2]
    return call_tiles("softcap", "dense", q, v, length, options)


def forward(
    q: Tensor, k: Tensor, v: Tensor, row_offset: int, row_offsets: Tensor | None, scale: float, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = aligned(q), aligned(k), aligned(v)
    arguments = (
        q,
        k,
        v,
        q_offset,
        o,
        lse,
        *unit_strides(q),
        *unit_strides(k),
        *unit_strides(v),
        *o.stride()[:3],
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
    )
    if tile.family == "hopper":
        launch(
            kernels.hopper_fwd.softcap_hopper_fwd,
            (min(cdiv(q_len, tile.block_m) * num_heads * batch, multiprocessors(q)),),
            *arguments,
            batch,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HARDWARE_TANH=has_tanh_instruction(q),
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
            kernels.fwd.softcap_fwd,
            (cdiv(q_len, tile.block_m) * num_heads * batch,),
            *arguments,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HARDWARE_TANH=has_tanh_instruction(q),
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
    o: Tensor,
    lse: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward: dq, which finds delta, then dk and dv; or all in one, after delta."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0 and not fused:
        launch(
            kernels.bwd_dq.softcap_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            q_offset,
            delta,
            dq,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *unit_strides(o),
            *dq.stride()[:3],
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            HAS_DLSE=dlse is not None,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HARDWARE_TANH=has_tanh_instruction(q),
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
                kernels.hopper_delta.softcap_hopper_delta,
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
                kernels.hopper_bwd_wide.softcap_hopper_bwd_wide if is_wide else kernels.hopper_bwd.softcap_hopper_bwd
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
                q_offset,
                dk,
                dv,
                *unit_strides(q),
                *unit_strides(k),
                *unit_strides(v),
                *unit_strides(do),
                *dk.stride()[:3],
                *dv.stride()[:3],
                q_len,
                kv_len,
                num_heads,
                group_size,
                scale,
                dq_sums,
                *((batch, work_counter(q)) if is_wide else (batch,)),
                WITH_DQ=fused,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
                HARDWARE_TANH=has_tanh_instruction(q),
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
                kernels.hopper_delta.softcap_hopper_dq_rows,
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
            kernels.bwd_dkdv.softcap_bwd_dkdv,
            (cdiv(kv_len, tiles["dkdv"].block_n) * num_kv_heads * batch,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            q_offset,
            dk,
            dv,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *dk.stride()[:3],
            *dv.stride()[:3],
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HARDWARE_TANH=has_tanh_instruction(q),
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
