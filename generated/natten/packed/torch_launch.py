# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: host/torch_launch.py.jinja
# hash: 6cbe2cf35e895149
"""Launches of the kernels of `natten`, packed sequences, with their gradients, as PyTorch operators."""

from typing import Any

import torch
from torch import Tensor

from ..._runtime.core.configs import PASSES, Tile, Tiles, block_columns, cdiv, next_power_of_2
from ..._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from ..._runtime.core.options import CallOptions
from ..._runtime.core.schedules import pass_table
from ..._runtime.torch.operators import namespace_of, register_operator
from ..._runtime.torch.plain import plain_backward, plain_forward
from ..._runtime.torch.replay import apply, launch, launch_hopper, replayed
from ..._runtime.torch.schedule import block_sequences, list_blocks, work_counter
from ..._runtime.torch.support import (
    FP32,
    aligned,
    batch_row,
    call_tiles,
    empty_like_layout,
    launches_directly,
    multiprocessors,
    packed_rows,
    unit_strides,
)
from ..._runtime.torch.transforms import (
    batched,
    differentiates_backward,
    refuse_second_derivative,
)
from .. import packed as kernels
from ..torch_reference import packed_reference

NAME = "natten_packed"
NAMESPACE = namespace_of(__name__.rsplit(".", 3)[0])


# What torch.func.vmap makes one call of: for each tensor the axis of packed tokens or of sequences, where it has one.
FOLDED_AXES = {
    "q": 0,
    "k": 0,
    "v": 0,
    "o": 0,
    "do": 0,
    "lse": 1,
    "dlse": 1,
    "cu_seqlens_q": 0,
    "cu_seqlens_k": 0,
    "row_offsets": 0,
}


class Attention(torch.autograd.Function):
    """o and lse from `[total, H, D]` tensors, with the gradient of every tensor that has one."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        row_offset: int,
        row_offsets: Tensor | None,
        scale: float,
        options: CallOptions,
        block_tables: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        run = _forward if launches_directly(q) else _forward_op
        return run(q, k, v, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, scale, options, block_tables)

    @staticmethod
    def setup_context(ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        o, lse = _outputs
        q, k, v, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, scale, options, block_tables = _inputs
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, row_offsets, *block_tables)
        ctx.numbers = (row_offset, scale, options)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, row_offsets, *block_tables = ctx.saved_tensors
        row_offset, scale, options = ctx.numbers
        do = torch.zeros_like(o) if do is None else do
        run: Any = _backward if launches_directly(q) else _backward_op
        if differentiates_backward():
            run = _differentiable_backward
        dq, dk, dv = run(
            do, dlse, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, scale, options, block_tables
        )
        return dq, dk, dv, None, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return batched(Attention, _forward, ("o", "lse"), FOLDED_AXES, info, in_dims, args)


class AttentionGradients(torch.autograd.Function):
    """The gradients of `Attention`, which have none of their own."""

    @staticmethod
    def forward(do: Tensor, dlse: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        run = _backward if launches_directly(q) else _backward_op
        return run(do, dlse, q, *args)

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor | None) -> Any:
        refuse_second_derivative("natten")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = ("q", "k", "v")
        return batched(AttentionGradients, _backward, results, FOLDED_AXES, info, in_dims, args)


def _differentiable_backward(*args: Any) -> Any:
    return apply(AttentionGradients, *args)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    *_: object,
) -> Any:
    """o and lse as plain mathematics, of the parameters of `_forward`."""
    return packed_reference(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_offset=row_offset if row_offsets is None else row_offsets,
        scale=scale,
        return_lse=True,
    )


def tiles_of(q: Tensor, v: Tensor, cu_seqlens_q: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    length = max(v.shape[2] // max(cu_seqlens_q.shape[0] - 1, 1), min(v.shape[2], 1))
    return call_tiles("natten", "packed", q, v, length, options)


def _tables(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    tile: Tile,
    by_keys: bool,
) -> list[Tensor]:
    """The tables of a pass: of block_seqs, spans, block_list; `by_keys` that of blocks of keys."""
    block = tile.block_n if by_keys else tile.block_m
    block_seqs = block_sequences(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2], block, by_keys)
    list_heads = 1

    q_offset = row_offset if row_offsets is None else row_offsets
    other_blocks = cdiv(q.shape[2], tile.block_m) if by_keys else cdiv(k.shape[2], tile.block_n)
    table_kernel = (
        kernels.block_lists.natten_packed_key_lists if by_keys else kernels.block_lists.natten_packed_query_lists
    )

    def launch_lists(spans: Tensor, block_list: Tensor, own_room: bool, fill_lists: bool) -> None:
        launch(
            table_kernel,
            (list_heads * block_seqs.shape[0],),
            block_seqs,
            q_offset,
            spans,
            block_list,
            other_blocks,
            list_heads,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            OWN_ROOM=own_room,
            FILL=fill_lists,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            CHUNK=min(256, next_power_of_2(max(other_blocks, 32))),
        )

    return [block_seqs, *list_blocks(launch_lists, (list_heads, block_seqs.shape[0]), other_blocks, q.device)]


def make_tables(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    options: CallOptions,
    backward: bool,
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
            made[blocks] = _tables(q, k, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, tile, by_keys)
        block_tables += made[blocks]
    return block_tables


@replayed
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launch the forward."""
    if options.plain:
        if not q.is_meta:
            # Tiles and a family that the kernels would refuse are refused here, too.
            tiles_of(batch_row(q), batch_row(v), cu_seqlens_q, options)
        return plain_forward(
            _reference,
            _fake_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, scale, options, block_tables),
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )
    q, k, v = batch_row(q), batch_row(k), batch_row(v)
    num_heads, q_len, head_dim = q.shape[1:]
    head_dim_v = v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, cu_seqlens_q, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((num_heads, q_len), dtype=FP32)
    if o.numel() == 0:
        return packed_rows(o), lse
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = aligned(q), aligned(k), aligned(v)
    block_seqs, spans, block_list = pass_table(block_tables, "fwd", 3) or _tables(
        q, k, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, tile, False
    )
    arguments = (
        q,
        k,
        v,
        block_seqs,
        spans,
        block_list,
        q_offset,
        o,
        lse,
        *unit_strides(q)[1:],
        *unit_strides(k)[1:],
        *unit_strides(v)[1:],
        *o.stride()[1:3],
        q_len,
        num_heads,
        group_size,
        scale,
    )
    if tile.family == "hopper":
        launch_hopper(
            kernels.hopper_fwd.natten_packed_hopper_fwd,
            (min(block_seqs.shape[0] * num_heads, multiprocessors(q)),),
            *arguments,
            work_counter(q),
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
            kernels.fwd.natten_packed_fwd,
            (block_seqs.shape[0] * num_heads,),
            *arguments,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return packed_rows(o), lse


@replayed
def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
    block_tables: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward: dq, which finds delta, then dk and dv; or all in one, after delta."""
    if options.plain:
        return plain_backward(
            _reference,
            _fake_backward(
                do,
                dlse,
                q,
                k,
                v,
                o,
                lse,
                cu_seqlens_q,
                cu_seqlens_k,
                row_offset,
                row_offsets,
                scale,
                options,
                block_tables,
            ),
            do,
            dlse,
            (0, 1, 2),
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            row_offset,
            row_offsets,
            scale,
            options,
            block_tables,
        )
    q, k, v, o, do = batch_row(q), batch_row(k), batch_row(v), batch_row(o), batch_row(do)
    num_heads, q_len, head_dim = q.shape[1:]
    num_kv_heads, head_dim_v = k.shape[1], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, cu_seqlens_q, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    dlse = None if dlse is None else dlse.contiguous()
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    if not fused:
        block_seqs, spans, block_list = pass_table(block_tables, "dq", 3) or _tables(
            q, k, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, tiles["dq"], False
        )
    key_block_seqs, key_spans, key_block_list = pass_table(block_tables, "dkdv", 3) or _tables(
        q, k, cu_seqlens_q, cu_seqlens_k, row_offset, row_offsets, tiles["dkdv"], True
    )
    if tile.family == "hopper":
        row_seqs = block_sequences(cu_seqlens_q, cu_seqlens_k, q_len, k.shape[2], tile.block_m, False)
    if fused:
        block_seqs = row_seqs
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0 and not fused:
        launch(
            kernels.bwd_dq.natten_packed_bwd_dq,
            (block_seqs.shape[0] * num_heads,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            block_seqs,
            spans,
            block_list,
            q_offset,
            delta,
            dq,
            *unit_strides(q)[1:],
            *unit_strides(k)[1:],
            *unit_strides(v)[1:],
            *unit_strides(do)[1:],
            *unit_strides(o)[1:],
            *dq.stride()[1:3],
            q_len,
            num_heads,
            group_size,
            scale,
            HAS_DLSE=dlse is not None,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
        dq_sums = q.new_zeros(
            (num_heads, num_row_blocks, tile.block_m * tile_columns(head_dim)) if fused else (0,), dtype=FP32
        )
        if dq.numel() > 0:
            launch(
                kernels.hopper_delta.natten_packed_hopper_delta,
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
                kernels.hopper_bwd_wide.natten_packed_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.natten_packed_hopper_bwd
            )
            launch_hopper(
                bwd_kernel,
                (min(key_block_seqs.shape[0] * num_kv_heads, multiprocessors(q)),),
                q,
                k,
                v,
                do,
                row_lse,
                row_delta,
                key_block_seqs,
                key_spans,
                key_block_list,
                q_offset,
                dk,
                dv,
                *unit_strides(q)[1:],
                *unit_strides(k)[1:],
                *unit_strides(v)[1:],
                *unit_strides(do)[1:],
                *dk.stride()[1:3],
                *dv.stride()[1:3],
                q_len,
                num_heads,
                group_size,
                scale,
                dq_sums,
                cu_seqlens_q.shape[0] - 1,
                work_counter(q),
                WITH_DQ=fused,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
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
                kernels.hopper_delta.natten_packed_hopper_dq_rows,
                (2 * row_seqs.shape[0] * num_heads,),
                dq_sums,
                row_seqs,
                dq,
                *dq.stride()[1:3],
                num_row_blocks,
                row_seqs.shape[0],
                scale,
                HEAD_DIM=head_dim,
                BLOCK_D=tile_columns(head_dim),
                BLOCK_M=tile.block_m,
                num_warps=4,
            )
    elif dk.numel() > 0:
        launch(
            kernels.bwd_dkdv.natten_packed_bwd_dkdv,
            (key_block_seqs.shape[0] * num_kv_heads,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            key_block_seqs,
            key_spans,
            key_block_list,
            q_offset,
            dk,
            dv,
            *unit_strides(q)[1:],
            *unit_strides(k)[1:],
            *unit_strides(v)[1:],
            *unit_strides(do)[1:],
            *dk.stride()[1:3],
            *dv.stride()[1:3],
            q_len,
            num_heads,
            group_size,
            scale,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_columns(head_dim),
            BLOCK_DV=block_columns(head_dim_v),
            BLOCK_M=tiles["dkdv"].block_m,
            BLOCK_N=tiles["dkdv"].block_n,
            num_warps=tiles["dkdv"].num_warps,
            num_stages=tiles["dkdv"].num_stages,
        )
    dq, dk, dv = packed_rows(dq), packed_rows(dk), packed_rows(dv)
    return dq, dk, dv


def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    q, v = batch_row(q), batch_row(v)
    o = empty_like_layout(q, v.shape[3])
    lse = q.new_empty(q.shape[1:3], dtype=FP32)
    return packed_rows(o), lse


def _fake_backward(
    _do: Tensor, _dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = batch_row(q), batch_row(k), batch_row(v)
    dq, dk = empty_like_layout(q, q.shape[3]), empty_like_layout(k, k.shape[3])
    dv = empty_like_layout(v, v.shape[3])
    return packed_rows(dq), packed_rows(dk), packed_rows(dv)


# What torch.compile, torch.export and fake tensors see in place of the launches.
_forward_op = register_operator(f"{NAMESPACE}::{NAME}_fwd", _forward, _fake_forward)
_backward_op = register_operator(f"{NAMESPACE}::{NAME}_bwd", _backward, _fake_backward)
