# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/launch.py.jinja
# hash: a2d5648dedcc2bc1
"""The launches of `relative_bias`, packed sequences, for every framework: the kernels and their arguments."""

from collections.abc import Sequence

from ..._runtime.core.configs import Tile
from ..._runtime.core.families import has_split_tile, has_wide_tile
from ..._runtime.core.fp8 import output_dtype, value_columns
from ..._runtime.core.head_groups import split_heads
from ..._runtime.core.launches import (
    Backend,
    Tensor,
    delta_constants,
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
    tiles = tiles_of(backend, "relative_bias", "packed", q, v, options, cu_seqlens_q)

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
    bias: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    results: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward.

    `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16. `results`: the o and lse of a segmented
    call, if q, k and v are its tensors `[B, H, S, D]` and the blocks of the table are runs of its rows.
    """
    num_heads, q_len, head_dim = q.shape[1:]
    head_dim_v = v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "relative_bias", "packed", q, v, options, cu_seqlens_q)["fwd"]
    if results is not None:
        o, lse = results
    else:
        o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
        lse = q.new_empty((num_heads, q_len), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    (block_seqs,) = block_tables[:1] or make_tables(backend, q, k, v, cu_seqlens_q, cu_seqlens_k, options, ("fwd",))
    programs = block_seqs.shape[0] * num_heads
    arguments = (
        (q, k, v, bias, block_seqs, q_offset, o, lse),
        (*packed_unit_strides(q, k, v), *packed_strides(o), *bias.stride(), bias.shape[1]),
        (q_len, num_heads, group_size, scale),
    )
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None, "PTX": backend.is_nvidia(q)}
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v, cu_seqlens_k)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.relative_bias_packed_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, bias, block_seqs, q_offset, o, lse),
            (*packed_unit_strides(q, k), *packed_strides(o), *bias.stride(), bias.shape[1]),
            (q_len, columns.shape[3], num_heads, group_size, scale),
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.relative_bias_packed_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.relative_bias_packed_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.relative_bias_packed_fwd,
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
    bias: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    grad_bias: bool,
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv.

    After dq, dk and dv it returns the results from which the gradients of bias are computed: dbias_atomic.
    """
    num_heads, q_len, head_dim = q.shape[1:]
    num_kv_heads, head_dim_v = k.shape[1], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "relative_bias", "packed", q, v, options, cu_seqlens_q)
    tile = tiles["dkdv"]
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    tables = block_tables[1:] or make_tables(backend, q, k, v, cu_seqlens_q, cu_seqlens_k, options, ("dkdv", "dq"))
    (key_block_seqs,) = tables[:1]
    (block_seqs,) = tables[1:]
    if tile.family == "hopper":
        row_seqs = backend.block_sequences(cu_seqlens_q, cu_seqlens_k, q_len, k.shape[2], tile.block_m, False)
    dbias_atomic = q.new_zeros(bias.shape if grad_bias else (0,) * bias.dim(), dtype=backend.FP32)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None, "PTX": backend.is_nvidia(q)}
    if dq.numel() > 0:
        backend.launch(
            kernels.portable.relative_bias_packed_bwd_dq,
            (block_seqs.shape[0] * num_heads,),
            (o, dlse, q, k, v, do, lse, bias, block_seqs, q_offset, delta, dq, dbias_atomic),
            (*packed_unit_strides(q, k, v, do, o), *packed_strides(dq), *bias.stride(), bias.shape[1]),
            (*dbias_atomic.stride(),),
            (q_len, num_heads, group_size, scale),
            HAS_DLSE=dlse is not None,
            GRAD_BIAS=grad_bias,
            **constants,
            **tile_constants(tiles["dq"], head_dim, head_dim_v),
        )
    if tile.family == "hopper":
        # The most blocks of rows that there can be, because each sequence has whole blocks.
        num_row_blocks = q_len // tile.block_m + cu_seqlens_q.shape[0] - 1
        row_lse = q.new_empty((num_heads, num_row_blocks * tile.block_m), dtype=backend.FP32)
        row_delta = q.new_empty(row_lse.shape, dtype=backend.FP32)
        dq_sums = q.new_empty((0,), dtype=backend.FP32)
        if dq.numel() > 0:
            backend.launch(
                kernels.portable.relative_bias_packed_hopper_delta,
                (row_seqs.shape[0] * num_heads,),
                (o, do, lse, dlse, row_seqs, delta, row_lse, row_delta),
                (*packed_unit_strides(o, do), q_len, num_row_blocks, row_seqs.shape[0]),
                HAS_DLSE=dlse is not None,
                WITH_DQ=False,
                **delta_constants(tile, head_dim_v),
            )
        if dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.relative_bias_packed_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.relative_bias_packed_hopper_bwd,
                (min(key_block_seqs.shape[0] * num_kv_heads * head_groups.number, backend.multiprocessors(q)),),
                (q, k, v, do, row_lse, row_delta, bias, key_block_seqs, q_offset, head_groups.dk, head_groups.dv),
                (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv), *bias.stride()),
                (bias.shape[1],),
                (q_len, num_heads, head_groups.size, scale),
                (dq_sums, cu_seqlens_q.shape[0] - 1, backend.work_counter(q)),
                WITH_DQ=False,
                HEAD_GROUPS=head_groups.number,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.relative_bias_packed_bwd_dkdv,
            (key_block_seqs.shape[0] * num_kv_heads * head_groups.number,),
            (q, k, v, do, lse, delta, bias, key_block_seqs, q_offset, head_groups.dk, head_groups.dv),
            (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv), *bias.stride()),
            (bias.shape[1],),
            (q_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    return dq, dk, dv, dbias_atomic
