# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true, prune: true}
# template: host/launch.py.jinja
# hash: 5ac9e21613751f37
"""The launches of `forgetting`, packed sequences, for every framework: the kernels and their arguments."""

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
    tiles = tiles_of(backend, "forgetting", "packed", q, v, options, cu_seqlens_q)

    def make(tile: Tile, by_keys: bool) -> list[Tensor]:
        block = tile.block_n if by_keys else tile.block_m
        block_seqs = backend.block_sequences(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2], block, by_keys)
        return [block_seqs]

    return tables_of(tiles, passes, make)


def fill_decay(backend: Backend, g: Tensor, cu_seqlens_k: Tensor, decay: Tensor) -> None:
    """Launch the running sum of the log-decay, `[B, Hq, S]`, which begins anew at each sequence."""
    num_heads = decay.shape[1]
    backend.launch(
        kernels.decay.forgetting_packed_decay_cumsum,
        ((cu_seqlens_k.shape[0] - 1) * num_heads,),
        (g, cu_seqlens_k, decay, *g.stride(), g.shape[0], num_heads),
        BLOCK=1024,
    )


def forward(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward. `scales`: the scales of q, k and v of float8_e4m3fn; o is then bfloat16."""
    batch, num_heads, q_len, head_dim = q.shape
    head_dim_v = v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(backend, "forgetting", "packed", q, v, options, cu_seqlens_q)["fwd"]
    o = backend.empty_like_layout(q, head_dim_v, output_dtype(backend, scales))
    lse = q.new_empty((num_heads, q_len), dtype=backend.FP32)
    decay = q.new_empty((batch, num_heads, g.shape[0]), dtype=backend.FP32)
    if o.numel() == 0:
        return o, lse, decay
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = map(backend.aligned, (q, k, v))
    (block_seqs,) = block_tables[:1] or make_tables(backend, q, k, v, cu_seqlens_q, cu_seqlens_k, options, ("fwd",))
    fill_decay(backend, g, cu_seqlens_k, decay)
    programs = block_seqs.shape[0] * num_heads
    arguments = (
        (q, k, v, decay, block_seqs, q_offset, o, lse),
        (*packed_unit_strides(q, k, v), *packed_strides(o), decay.stride(1)),
        (q_len, num_heads, group_size, scale),
    )
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if scales is not None:
        q_scale, k_scale, v_scale = scales
        columns = value_columns(backend, v, cu_seqlens_k)
        backend.launch_hopper(
            kernels.hopper_fwd_fp8.forgetting_packed_hopper_fwd_fp8,
            (min(programs, backend.multiprocessors(q)),),
            (q, k, columns, q_scale, k_scale, v_scale, decay, block_seqs, q_offset, o, lse),
            (*packed_unit_strides(q, k), *packed_strides(o), decay.stride(1)),
            (q_len, columns.shape[3], num_heads, group_size, scale),
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    elif tile.family == "hopper":
        backend.launch_hopper(
            kernels.hopper_fwd.forgetting_packed_hopper_fwd_wide
            if has_split_tile((head_dim, head_dim_v))
            else kernels.hopper_fwd.forgetting_packed_hopper_fwd,
            (min(programs, backend.multiprocessors(q)),),
            *arguments,
            (backend.work_counter(q),),
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    else:
        backend.launch(
            kernels.portable.forgetting_packed_fwd,
            (programs,),
            *arguments,
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
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offsets: Tensor | None,
    o: Tensor,
    lse: Tensor,
    decay: Tensor,
    row_offset: int,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, ...]:
    """Launch the backward: dq and delta, then dk and dv; or first delta, then all three in one kernel.

    After dq, dk and dv it returns the results from which the gradients of g are computed: dg.
    """
    num_heads, q_len, head_dim = q.shape[1:]
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(backend, "forgetting", "packed", q, v, options, cu_seqlens_q)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    delta = lse.new_empty(lse.shape)
    dq, dk, dv = empty_gradients(backend, q, k, v, options)
    num_seqs = cu_seqlens_q.shape[0] - 1
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
    ddecay_rows = q.new_zeros((1, num_heads, q_len), dtype=backend.FP32)
    ddecay_cols = q.new_empty((1, num_heads, kv_len), dtype=backend.FP32)
    dg = g.new_empty(g.shape)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = map(backend.aligned, (q, k, v, o, do))
    head_groups = split_heads(backend, q, dk, dv, tile.block_n)
    constants = {"Q_OFFSET_PER_BATCH": row_offsets is not None}
    if dq.numel() > 0 and not fused:
        backend.launch(
            kernels.portable.forgetting_packed_bwd_dq,
            (block_seqs.shape[0] * num_heads,),
            (o, dlse, q, k, v, do, lse, decay, block_seqs, q_offset, delta, dq, ddecay_rows),
            (*packed_unit_strides(q, k, v, do, o), *packed_strides(dq), decay.stride(1)),
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
                kernels.portable.forgetting_packed_hopper_delta,
                (row_seqs.shape[0] * num_heads,),
                (o, do, lse, dlse, row_seqs, decay, q_offset, delta, row_lse, row_delta),
                (*packed_unit_strides(o, do), decay.stride(1), q_len, num_row_blocks, row_seqs.shape[0], scale),
                Q_OFFSET_PER_BATCH=row_offsets is not None,
                HAS_DLSE=dlse is not None,
                WITH_DQ=fused,
                **delta_constants(tile, head_dim_v),
            )
        if dk.numel() > 0:
            is_wide = has_wide_tile((head_dim, head_dim_v))
            backend.launch_hopper(
                kernels.hopper_bwd.forgetting_packed_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.forgetting_packed_hopper_bwd,
                (min(key_block_seqs.shape[0] * num_kv_heads * head_groups.number, backend.multiprocessors(q)),),
                (q, k, v, do, row_lse, row_delta, decay, key_block_seqs, q_offset, ddecay_rows, head_groups.dk),
                (head_groups.dv, ddecay_cols),
                (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv), decay.stride(1)),
                (q_len, kv_len, num_heads, head_groups.size, scale),
                (dq_sums, cu_seqlens_q.shape[0] - 1, backend.work_counter(q)),
                WITH_DQ=fused,
                HEAD_GROUPS=head_groups.number,
                **constants,
                **tile_constants(tile, head_dim, head_dim_v),
            )
        if fused and dq.numel() > 0:
            backend.launch(
                kernels.portable.forgetting_packed_hopper_dq_rows,
                (2 * row_seqs.shape[0] * num_heads,),
                (dq_sums, row_seqs, dq, *packed_strides(dq), num_row_blocks, row_seqs.shape[0], scale),
                **dq_rows_constants(tile, head_dim),
            )
    elif dk.numel() > 0:
        backend.launch(
            kernels.portable.forgetting_packed_bwd_dkdv,
            (key_block_seqs.shape[0] * num_kv_heads * head_groups.number,),
            (q, k, v, do, lse, delta, decay, key_block_seqs, q_offset, head_groups.dk, head_groups.dv),
            (ddecay_cols,),
            (*packed_unit_strides(q, k, v, do), *packed_strides(head_groups.dk, head_groups.dv), decay.stride(1)),
            (q_len, kv_len, num_heads, head_groups.size, scale),
            HEAD_GROUPS=head_groups.number,
            **constants,
            **tile_constants(tile, head_dim, head_dim_v),
        )
    head_groups.add_up(backend, dk, dv)
    if dg.numel() > 0:
        backend.launch(
            kernels.decay.forgetting_packed_decay_grad,
            (num_seqs * num_heads,),
            (ddecay_rows, ddecay_cols, cu_seqlens_q, cu_seqlens_k, q_offset, dg),
            (*dg.stride(), q_len, kv_len, num_heads),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            BLOCK=1024,
        )
    return dq, dk, dv, dg
