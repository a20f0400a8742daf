# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: host/torch_launch.py.jinja
# hash: 240788c3d714b5b0
"""Launches of the kernels of `forgetting`, with their gradients, as PyTorch operators."""

from typing import Any

import torch
from torch import Tensor

from .. import forgetting as kernels
from .._runtime.core.configs import Tiles, block_columns, cdiv
from .._runtime.core.families import HOPPER_WARPS, WIDE_KEYS, tile_columns
from .._runtime.core.options import CallOptions
from .._runtime.torch.operators import namespace_of, register_operator
from .._runtime.torch.plain import plain_backward, plain_forward
from .._runtime.torch.replay import apply, launch, launch_hopper, replayed
from .._runtime.torch.schedule import work_counter
from .._runtime.torch.support import (
    FP32,
    aligned,
    call_tiles,
    empty_like_layout,
    launches_directly,
    multiprocessors,
    unit_strides,
)
from .._runtime.torch.transforms import (
    batched,
    differentiates_backward,
    refuse_second_derivative,
)
from .torch_reference import reference

NAME = "forgetting"
NAMESPACE = namespace_of(__name__.rsplit(".", 2)[0])


# What torch.func.vmap makes one call of: for each tensor the axis of batch rows, where it has one.
FOLDED_AXES = {
    "q": 0,
    "k": 0,
    "v": 0,
    "o": 0,
    "do": 0,
    "lse": 0,
    "dlse": 0,
    "decay": 0,
    "row_offsets": 0,
    "g": 0,
}


class Attention(torch.autograd.Function):
    """o and lse from `[B, H, S, D]` tensors, with the gradient of every tensor that has one."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        row_offset: int,
        row_offsets: Tensor | None,
        scale: float,
        options: CallOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _forward if launches_directly(q) else _forward_op
        return run(q, k, v, g, row_offset, row_offsets, scale, options)

    @staticmethod
    def setup_context(ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        o, lse, decay = _outputs
        q, k, v, g, row_offset, row_offsets, scale, options = _inputs
        ctx.save_for_backward(q, k, v, g, decay, o, lse, row_offsets)
        ctx.numbers = (row_offset, scale, options)
        ctx.mark_non_differentiable(decay)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        q, k, v, g, decay, o, lse, row_offsets = ctx.saved_tensors
        row_offset, scale, options = ctx.numbers
        do = torch.zeros_like(o) if do is None else do
        run: Any = _backward if launches_directly(q) else _backward_op
        if differentiates_backward():
            run = _differentiable_backward
        dq, dk, dv, dg = run(do, dlse, q, k, v, g, decay, o, lse, row_offset, row_offsets, scale, options)
        return dq, dk, dv, dg, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return batched(Attention, _forward, ("o", "lse", "decay"), FOLDED_AXES, info, in_dims, args)


class AttentionGradients(torch.autograd.Function):
    """The gradients of `Attention`, which have none of their own."""

    @staticmethod
    def forward(do: Tensor, dlse: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = _backward if launches_directly(q) else _backward_op
        return run(do, dlse, q, *args)

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _outputs: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor | None) -> Any:
        refuse_second_derivative("forgetting")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = ("q", "k", "v", "g")
        return batched(AttentionGradients, _backward, results, FOLDED_AXES, info, in_dims, args)


def _differentiable_backward(*args: Any) -> Any:
    return apply(AttentionGradients, *args)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, row_offset: int, row_offsets: Tensor | None, scale: float, *_: object
) -> Any:
    """o and lse as plain mathematics, of the parameters of `_forward`."""
    return reference(
        q, k, v, g=g, q_offset=row_offset if row_offsets is None else row_offsets, scale=scale, return_lse=True
    )


def tiles_of(q: Tensor, v: Tensor, options: CallOptions) -> Tiles:
    """The tiles of each pass."""
    length = v.shape[2]
    return call_tiles("forgetting", "dense", q, v, length, options)


@replayed
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward."""
    if options.plain:
        if not q.is_meta:
            # Tiles and a family that the kernels would refuse are refused here, too.
            tiles_of(q, v, options)
        return plain_forward(
            _reference,
            _fake_forward(q, k, v, g, row_offset, row_offsets, scale, options),
            q,
            k,
            v,
            g,
            row_offset,
            row_offsets,
            scale,
            options,
        )
    batch, num_heads, q_len, head_dim = q.shape
    kv_len, head_dim_v = k.shape[2], v.shape[3]
    group_size = num_heads // k.shape[1]
    tile = tiles_of(q, v, options)["fwd"]
    o = empty_like_layout(q, head_dim_v)
    lse = q.new_empty((batch, num_heads, q_len), dtype=FP32)
    decay = q.new_empty((batch, num_heads, g.shape[1]), dtype=FP32)
    if o.numel() == 0:
        return o, lse, decay
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v = aligned(q), aligned(k), aligned(v)
    launch(
        kernels.decay.forgetting_decay_cumsum,
        (batch * num_heads,),
        g,
        decay,
        *g.stride(),
        g.shape[1],
        num_heads,
        BLOCK=1024,
    )
    arguments = (
        q,
        k,
        v,
        decay,
        q_offset,
        o,
        lse,
        *unit_strides(q),
        *unit_strides(k),
        *unit_strides(v),
        *o.stride()[:3],
        *decay.stride()[:2],
        decay.shape[2],
        q_len,
        kv_len,
        num_heads,
        group_size,
        scale,
    )
    if tile.family == "hopper":
        launch_hopper(
            kernels.hopper_fwd.forgetting_hopper_fwd,
            (min(cdiv(q_len, tile.block_m) * num_heads * batch, multiprocessors(q)),),
            *arguments,
            batch,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
            kernels.fwd.forgetting_fwd,
            (cdiv(q_len, tile.block_m) * num_heads * batch,),
            *arguments,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
    return o, lse, decay


@replayed
def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    decay: Tensor,
    o: Tensor,
    lse: Tensor,
    row_offset: int,
    row_offsets: Tensor | None,
    scale: float,
    options: CallOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward: dq, which finds delta, then dk and dv; or all in one, after delta."""
    if options.plain:
        return plain_backward(
            _reference,
            _fake_backward(do, dlse, q, k, v, g, decay, o, lse, row_offset, row_offsets, scale, options),
            do,
            dlse,
            (0, 1, 2, 3),
            q,
            k,
            v,
            g,
            row_offset,
            row_offsets,
            scale,
            options,
        )
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size = num_heads // num_kv_heads
    tiles = tiles_of(q, v, options)
    tile = tiles["dkdv"]
    fused = tiles["dq"].family == "hopper"
    dlse = None if dlse is None else dlse.contiguous()
    delta = lse.new_empty(lse.shape)
    dq = empty_like_layout(q, head_dim)
    dk = empty_like_layout(k, head_dim)
    dv = empty_like_layout(v, head_dim_v)
    ddecay_rows = q.new_zeros((batch, num_heads, q_len), dtype=FP32)
    ddecay_cols = q.new_empty((batch, num_heads, kv_len), dtype=FP32)
    dg = g.new_empty(g.shape)
    q_offset = row_offset if row_offsets is None else row_offsets
    q, k, v, o, do = aligned(q), aligned(k), aligned(v), aligned(o), aligned(do)
    if dq.numel() > 0 and not fused:
        launch(
            kernels.bwd_dq.forgetting_bwd_dq,
            (cdiv(q_len, tiles["dq"].block_m) * num_heads * batch,),
            o,
            dlse,
            q,
            k,
            v,
            do,
            lse,
            decay,
            q_offset,
            delta,
            dq,
            ddecay_rows,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *unit_strides(o),
            *dq.stride()[:3],
            *decay.stride()[:2],
            decay.shape[2],
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            HAS_DLSE=dlse is not None,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
                kernels.hopper_delta.forgetting_hopper_delta,
                (num_blocks * num_heads * batch,),
                o,
                do,
                lse,
                dlse,
                decay,
                q_offset,
                delta,
                row_lse,
                row_delta,
                *unit_strides(o),
                *unit_strides(do),
                *decay.stride()[:2],
                decay.shape[2],
                q_len,
                num_heads,
                scale,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
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
                kernels.hopper_bwd_wide.forgetting_hopper_bwd_wide
                if is_wide
                else kernels.hopper_bwd.forgetting_hopper_bwd
            )
            launch_hopper(
                bwd_kernel,
                (min(cdiv(kv_len, tile.block_n) * num_kv_heads * batch, multiprocessors(q)),),
                q,
                k,
                v,
                do,
                row_lse,
                row_delta,
                decay,
                q_offset,
                ddecay_rows,
                dk,
                dv,
                ddecay_cols,
                *unit_strides(q),
                *unit_strides(k),
                *unit_strides(v),
                *unit_strides(do),
                *dk.stride()[:3],
                *dv.stride()[:3],
                *decay.stride()[:2],
                decay.shape[2],
                q_len,
                kv_len,
                num_heads,
                group_size,
                scale,
                dq_sums,
                *((batch, work_counter(q)) if is_wide else (batch,)),
                WITH_DQ=fused,
                Q_OFFSET_PER_BATCH=row_offsets is not None,
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
                kernels.hopper_delta.forgetting_hopper_dq_rows,
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
            kernels.bwd_dkdv.forgetting_bwd_dkdv,
            (cdiv(kv_len, tiles["dkdv"].block_n) * num_kv_heads * batch,),
            q,
            k,
            v,
            do,
            lse,
            delta,
            decay,
            q_offset,
            dk,
            dv,
            ddecay_cols,
            *unit_strides(q),
            *unit_strides(k),
            *unit_strides(v),
            *unit_strides(do),
            *dk.stride()[:3],
            *dv.stride()[:3],
            *decay.stride()[:2],
            decay.shape[2],
            q_len,
            kv_len,
            num_heads,
            group_size,
            scale,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
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
    if dg.numel() > 0:
        launch(
            kernels.decay.forgetting_decay_grad,
            (batch * num_heads,),
            ddecay_rows,
            ddecay_cols,
            q_offset,
            dg,
            *dg.stride(),
            g.shape[1],
            q_len,
            kv_len,
            num_heads,
            Q_OFFSET_PER_BATCH=row_offsets is not None,
            BLOCK=1024,
        )
    return dq, dk, dv, dg


def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, g: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    o = empty_like_layout(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=FP32)
    decay = q.new_empty((q.shape[0], q.shape[1], g.shape[1]), dtype=FP32)
    return o, lse, decay


def _fake_backward(
    _do: Tensor, _dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk = empty_like_layout(q, q.shape[3]), empty_like_layout(k, k.shape[3])
    dv = empty_like_layout(v, v.shape[3])
    return dq, dk, dv, torch.empty_like(g)


# What torch.compile, torch.export and fake tensors see in place of the launches.
_forward_op = register_operator(f"{NAMESPACE}::{NAME}_fwd", _forward, _fake_forward)
_backward_op = register_operator(f"{NAMESPACE}::{NAME}_bwd", _backward, _fake_backward)
