# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/jax_launch.py.jinja
# hash: 42501852633c7aff
"""Launches of the kernels of `relative_bias`, packed sequences, in JAX."""

from jax import Array

from ..._runtime.core.configs import PASSES, Tile, Tiles, block_columns
from ..._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from ..._runtime.core.options import CallOptions
from ..._runtime.core.schedules import pass_table
from ..._runtime.jax.kernels import call_tiles, is_nvidia, launch, multiprocessors
from ..._runtime.jax.schedule import block_sequences, work_counter
from ..._runtime.jax.tensor import FP32, Tensor, aligned, empty_like_layout, unit_strides
from .. import packed as kernels


def tiles_of(q: Tensor, v: Tensor, cu_seqlens_q: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    length = max(v.shape[2] // max(cu_seqlens_q.shape[0] - 1, 1), min(v.shape[2], 1))
    return call_tiles("relative_bias", "packed", q, v, length, options)


def _tables(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    tile: Tile,
    by_keys: bool,
) -> list[Tensor]:
    """The tables of a pass: of block_seqs; `by_keys` that of blocks of keys."""
    block = tile.block_n if by_keys else tile.block_m
    block_seqs = block_sequences(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2], block, by_keys)
    return [block_seqs]


def make_tables(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: CallOptions, backward: bool
) -> list[Tensor]:
    """The tables of each pass, in the order of PASSES; `backward=False` leaves out those of its passes."""
    tiles = tiles_of(q, v, cu_seqlens_q, options)
    pass_names = PASSES if backward else PASSES[:1]
    made: dict[tuple[int, int, bool], list[Tensor]] = {}
    block_tables: list[Tensor] = []
    for pass_name in pass_names:
        tile, by_keys = tiles[pass_name], pass_name == "dkdv"
        blocks = (tile.block_m, tile.block_n, by_keys)
        if blocks not in made:
            made[blocks] = _tables(q, k, cu_seqlens_q, cu_seqlens_k, tile, by_keys)
        block_tables += made[blocks]
    return block_tables


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    batch, num_heads, q_len, head_dim = q.shape
    head_dim_v = v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, cu_seqlens_q, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = aligned(q), aligned(k), aligned(v)
    (block_seqs,) = pass_table(block_tables, "fwd", 1) or _tables(q, k, cu_seqlens_q, cu_seqlens_k, tile, False)
    arguments = (
        q,
        k,
        v,
        bias,
        block_seqs,
        q_offset,
        o,
        lse,
        *unit_strides(q)[1:],
        *unit_strides(k)[1:],
        *unit_strides(v)[1:],
        *o.stride()[1:3],
        *bias.stride(),
        bias.shape[1],
        q_len,
        num_heads,
        group_size,
        scale,
    )
    if tile.family == "hopper":
        launch(
            kernels.hopper_fwd.relative_bias_packed_hopper_fwd,
            (min(block_seqs.shape[0] * num_heads, multiprocessors(q)),),
            *arguments,
            work_counter(q),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            PTX=is_nvidia(q),
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
            kernels.fwd.relative_bias_packed_fwd,
            (block_seqs.shape[0] * num_heads,),
            *arguments,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            PTX=is_nvidia(q),
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
    bias: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | Array]:
    """Launch the backward: dq, which finds delta, then dk and dv."""
    num_heads, q_len, head_dim = q.shape[1:]
    num_kv_heads, head_dim_v = k.shape[1], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, cu_seqlens_q, options)
    tile = tiles["dkdv"]
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    (block_seqs,) = pass_table(block_tables, "dq", 1) or _tables(q, k, cu_seqlens_q, cu_seqlens_k, tiles["dq"], False)
    (key_block_seqs,) = pass_table(block_tables, "dkdv", 1) or _tables(
        q, k, cu_seqlens_q, cu_seqlens_k, tiles["dkdv"], True
    )
    if tile.family == "hopper":
        row_seqs = block_sequences(cu_seqlens_q, cu_seqlens_k, q_len, k.shape[2], tile.block_m, False)
    dbias_atomic = q.new_zeros(bias.shape if grad_bias else (0,) * bias.dim(), dtype=FP32)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0:
        launch(
            kernels.bwd_dq.relative_bias_packed_bwd_dq,
            (block_seqs.shape[0] * num_heads,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            bias,
            block_seqs,
            q_offset,
            delta,
            dq,
            dbias_atomic,
            *unit_strides(q)[1:],
            *unit_strides(k)[1:],
            *unit_strides(v)[1:],
            *unit_strides(do)[1:],
            *unit_strides(o)[1:],
            *dq.stride()[1:3],
            *bias.stride(),
            bias.shape[1],
            *dbias_atomic.stride(),
            q_len,
            num_heads,
            group_size,
            scale,
            HAS_DLSE=dlse is not None,
            GRAD_BIAS=grad_bias,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            PTX=is_nvidia(q),
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
        # Each sequence has whole blocks of rows: so many at most.
        num_row_blocks = q_len // tile.block_m + cu_seqlens_q.shape[0] - 1
        row_lse = q.new_empty((num_heads, num_row_blocks * tile.block_m), dtype=FP32)
        row_delta = q.new_empty(row_lse.shape, dtype=FP32)
        dq_sums = q.new_empty((0,), dtype=FP32)
        if dq.numel() > 0:
            launch(
                kernels.hopper_delta.relative_bias_packed_hopper_delta,
                (row_seqs.shape[0] * num_heads,),
                o,
                do,
                lse,
                dlse,
                row_seqs,
                delta,
                row_lse,
                row_delta,
                *unit_strides(o)[1:],
                *unit_strides(do)[1:],
                q_len,
                num_row_blocks,
                row_seqs.shape[0],
                HAS_DLSE=dlse is not None,
                WITH_DQ=False,
                HEAD_DIM_V=head_dim_v,
                BLOCK_DV=tile_columns(head_dim_v),
                BLOCK_M=tile.block_m,
                num_warps=4,
            )
        if dk.numel() > 0:
            is_wide = tile.block_n == WIDE_KEYS
            bwd_kernel = (
                kernels.hopper_bwd_wide.relative_bias_packed_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.relative_bias_packed_hopper_bwd
            )
            launch(
                bwd_kernel,
                (min(key_block_seqs.shape[0] * num_kv_heads, multiprocessors(q)),),
                q,
                k,
                v,
                do,
                row_lse,
                row_delta,
                bias,
                key_block_seqs,
                q_offset,
                dk,
                dv,
                *unit_strides(q)[1:],
                *unit_strides(k)[1:],
                *unit_strides(v)[1:],
                *unit_strides(do)[1:],
                *dk.stride()[1:3],
                *dv.stride()[1:3],
                *bias.stride(),
                bias.shape[1],
                q_len,
                num_heads,
                group_size,
                scale,
                dq_sums,
                cu_seqlens_q.shape[0] - 1,
                work_counter(q),
                WITH_DQ=False,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
                PTX=is_nvidia(q),
                HEAD_DIM=head_dim,
                HEAD_DIM_V=head_dim_v,
                BLOCK_D=tile_columns(head_dim),
                BLOCK_DV=tile_columns(head_dim_v),
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                STAGES=tile.num_stages,
                num_warps=HOPPER_WARPS,
            )
    elif dk.numel() > 0:
        launch(
            kernels.bwd_dkdv.relative_bias_packed_bwd_dkdv,
            (key_block_seqs.shape[0] * num_kv_heads,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            bias,
            key_block_seqs,
            q_offset,
            dk,
            dv,
            *unit_strides(q)[1:],
            *unit_strides(k)[1:],
            *unit_strides(v)[1:],
            *unit_strides(do)[1:],
            *dk.stride()[1:3],
            *dv.stride()[1:3],
            *bias.stride(),
            bias.shape[1],
            q_len,
            num_heads,
            group_size,
            scale,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            PTX=is_nvidia(q),
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tiles["dkdv"].block_m,
            BLOCK_N=tiles["dkdv"].block_n,
            num_warps=tiles["dkdv"].num_warps,
            num_stages=tiles["dkdv"].num_stages,
        )
    dbias = dbias_atomic.value().astype(bias.dtype) if grad_bias else bias.new_empty(0)
    return dq, dk, dv, dbias
