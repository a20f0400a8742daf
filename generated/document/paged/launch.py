# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/paged_launch.py.jinja
# hash: 260af85f5166d0c0
"""Launches of the kernels of `document` on paged caches."""

from ..._runtime.core.launches import Backend, Tensor
from ..._runtime.core.paged import CacheCall, merge
from ..._runtime.device.paged import merge_splits
from .portable import document_paged_fwd, document_paged_plan


def plan(backend: Backend, call: CacheCall) -> list[Tensor]:
    """Split the keys of each sequence. Returned are the tables of each class of rows."""
    found: list[Tensor] = []
    for rows in call.classes:
        records, tiles, counts = tables = call.tables(backend, rows)
        backend.launch(
            document_paged_plan,
            (call.num_seqs * rows.planners,),
            (
                call.cu_seqlens_q,
                call.kv_lengths,
                call.offset,
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


def forward(backend: Backend, call: CacheCall, tables: list[Tensor], doc: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse of a call, whose splits are in the tables of `plan`."""
    q, k, v = call.q, call.k, call.v
    o, lse = call.results(backend)
    pairs = call.column_pairs(backend)
    shares_values = call.shares_values(backend, pairs)
    for number, rows in enumerate(call.classes):
        records, tiles, counts = tables[3 * number : 3 * number + 3]
        partial_o, partial_sums = call.partials(backend, rows)
        backend.launch(
            document_paged_fwd,
            (call.programs(backend, rows.num_entries * call.num_kv_heads),),
            (
                q,
                k,
                v,
                call.k_scale,
                call.value_scale,
                doc,
                call.page_table,
                call.page_starts,
                records,
                counts,
                call.offset,
                o,
                lse,
                partial_o,
                partial_sums,
                *call.query_strides(q),
                *call.cache_strides(k),
                *call.cache_strides(v),
                *call.query_strides(o),
                *call.lse_strides(lse),
                *doc.stride(),
                doc.shape[1],
                call.table_stride,
                call.num_kv_heads,
                rows.partial_rows,
                call.scale,
            ),
            Q_AT_END=call.at_end,
            Q_OFFSET_PER_BATCH=call.row_offsets is not None,
            K_SCALE=call.scale_kind(call.k_scale),
            V_SCALE=call.scale_kind(call.value_scale),
            PAIRS=pairs,
            SHARED_KV=shares_values,
            FLAT_TABLE=call.page_starts is not None,
            PAGE_SIZE=call.page_size,
            GROUP=call.group,
            FOLDS=rows.folds,
            OVERLAPS=rows.splits and backend.overlaps(q),
            **call.constants(rows, shares_values=shares_values),
            **call.limits(backend, rows),
        )
        if rows.splits:
            merge(backend, merge_splits, call, rows, (partial_o, partial_sums, tiles, counts, o, lse))
    return o, lse
