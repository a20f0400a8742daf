# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: host/paged_launch.py.jinja
# hash: 21488ecad6a16fb5
"""Launches of the kernels of `band_softcap` on paged caches."""

from ..._runtime.core.families import has_split_tile
from ..._runtime.core.launches import Backend, Tensor, tile_constants
from ..._runtime.core.paged import CacheCall, merge
from ..._runtime.core.prompts import copied_strides, place_prompts, rows_apart
from ..._runtime.core.tiles import HOPPER
from ..._runtime.device.paged import merge_splits
from ..._runtime.device.prompts import prompt_blocks
from .. import paged as kernels
from .portable import band_softcap_paged_fwd, band_softcap_paged_plan


def plan(backend: Backend, call: CacheCall, before: int, after: int) -> list[Tensor]:
    """Split the keys of each sequence. Returned are the tables of each class of rows."""
    found: list[Tensor] = []
    for rows in call.classes:
        records, tiles, counts = tables = call.tables(backend, rows)
        if rows.tile.family == HOPPER:
            place_prompts(backend, prompt_blocks, call, rows, records)
            found += tables
            continue
        backend.launch(
            band_softcap_paged_plan,
            (call.num_seqs * rows.planners,),
            (
                call.cu_seqlens_q,
                call.kv_lengths,
                call.offset,
                before,
                after,
                records,
                tiles,
                counts,
                call.q_rows,
                call.num_seqs,
                call.most_keys,
                rows.most_splits,
                rows.least_keys,
            ),
            Q_AT_END=call.at_end,
            Q_OFFSET_PER_BATCH=call.row_offsets is not None,
            SCALARS_LOADED=backend.is_loaded(before, after),
            PACKED=call.packed,
            BALANCED=call.balanced,
            PLANNERS=rows.planners,
            FIRST_ROWS=rows.first_rows,
            LAST_ROWS=rows.last_rows,
            GROUP=call.group,
            FOLDS=rows.folds,
            BLOCK_M=rows.tile.block_m,
            BLOCK_N=rows.tile.block_n,
            num_warps=1,
        )
        found += tables
    return found


def forward(
    backend: Backend, call: CacheCall, tables: list[Tensor], before: int, after: int, cap: float
) -> tuple[Tensor, Tensor]:
    """o and lse of a call, whose splits are in the tables of `plan`."""
    q, k, v = call.q, call.k, call.v
    o, lse = call.results(backend)
    pairs = call.column_pairs(backend)
    shares_values = call.shares_values(backend, pairs)
    for number, rows in enumerate(call.classes):
        records, tiles, counts = tables[3 * number : 3 * number + 3]
        if rows.tile.family == HOPPER:
            backend.launch_hopper(
                kernels.hopper_fwd.band_softcap_paged_hopper_fwd_wide
                if has_split_tile((q.shape[-1], v.shape[-1]))
                else kernels.hopper_fwd.band_softcap_paged_hopper_fwd,
                (min(records.shape[0] * q.shape[1], backend.multiprocessors(q)),),
                (
                    q,
                    k,
                    v,
                    call.page_table,
                    call.page_starts,
                    records,
                    call.offset,
                    before,
                    after,
                    cap,
                    o,
                    lse,
                    *copied_strides(call.query_strides(q), q),
                    *copied_strides(call.cache_strides(k), k),
                    *copied_strides(call.cache_strides(v), v),
                    *call.query_strides(o),
                    *call.lse_strides(lse),
                    rows_apart(call.query_strides(q)),
                    rows_apart(call.cache_strides(k)),
                    rows_apart(call.cache_strides(v)),
                    call.table_stride,
                    call.q.shape[1],
                    call.group,
                    call.scale,
                    backend.work_counter(q),
                ),
                Q_AT_END=call.at_end,
                Q_OFFSET_PER_BATCH=call.row_offsets is not None,
                SCALARS_LOADED=backend.is_loaded(before, after, cap),
                HARDWARE_TANH=backend.has_tanh_instruction(q),
                FLAT_TABLE=call.page_starts is not None,
                PAGE_SIZE=call.page_size,
                **tile_constants(rows.tile, q.shape[-1], v.shape[-1]),
            )
            continue
        partial_o, partial_sums = call.partials(backend, rows)
        backend.launch(
            band_softcap_paged_fwd,
            (call.programs(backend, rows.num_entries * call.num_kv_heads),),
            (
                q,
                k,
                v,
                call.k_scale,
                call.value_scale,
                call.page_table,
                call.page_starts,
                records,
                counts,
                call.offset,
                before,
                after,
                cap,
                o,
                lse,
                partial_o,
                partial_sums,
                *call.query_strides(q),
                *call.cache_strides(k),
                *call.cache_strides(v),
                *call.query_strides(o),
                *call.lse_strides(lse),
                call.table_stride,
                call.num_kv_heads,
                rows.partial_rows,
                call.scale,
            ),
            Q_AT_END=call.at_end,
            Q_OFFSET_PER_BATCH=call.row_offsets is not None,
            SCALARS_LOADED=backend.is_loaded(before, after, cap),
            HARDWARE_TANH=backend.has_tanh_instruction(q),
            K_SCALE=call.scale_kind(call.k_scale),
            V_SCALE=call.scale_kind(call.value_scale),
            PAIRS=pairs,
            SHARED_KV=shares_values,
            FLAT_TABLE=call.page_starts is not None,
            PAGE_SIZE=call.page_size,
            GROUP=call.group,
            FOLDS=rows.folds,
            OVERLAPS=rows.splits and backend.overlaps(q),
            FULL_BLOCKS=rows.has_prompts,
            **call.constants(rows, shares_values=shares_values),
            **call.limits(backend, rows),
        )
        if rows.splits:
            merge(backend, merge_splits, call, rows, (partial_o, partial_sums, tiles, counts, o, lse))
    return o, lse
