"""The legend of a kernel: its symbols with their shapes, and the variant's formulas, as the body of its docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import FAR_SUMS, GradientKind, GradientTerm
from codegen.ir.expr import TensorSpec
from codegen.ir.printers import FormulaPrinter
from codegen.plan.kernels.kernel import ArgGroup
from codegen.spec.model import Variant
from codegen.util.text import legend_row

SHAPES = {
    "q": "[B, Hq, Sq, D]",
    "k": "[B, Hkv, Skv, D]",
    "v": "[B, Hkv, Skv, Dv]",
    "columns": "[B, Hkv, Dv, v_columns], v transposed",
    "q_scale": "[B, Hq]  fp32, what q is times",
    "k_scale": "[B, Hkv]  fp32, what k is times",
    "v_scale": "[B, Hkv]  fp32, what v is times",
    "o": "[B, Hq, Sq, Dv]",
    "do": "[B, Hq, Sq, Dv]",
    "dq": "[B, Hq, Sq, D]",
    "dk": "[B, Hkv, Skv, D]",
    "dv": "[B, Hkv, Skv, Dv]",
    "dkv": "dk with SUMS_DK, otherwise dv",
    "lse": "[B, Hq, Sq]  fp32, log of the softmax denominator",
    "dlse": "[B, Hq, Sq]  fp32, gradient of lse",
    "delta": "[B, Hq, Sq]  fp32, sum(o * do) - dlse",
    "sink": "[Hq]  fp32, logit in the denominator only",
    "dsink": "[B, Hq, blocks]  fp32, partial sums",
    "decay": "[B, Hq, P]  fp32, cumulative log-decay times log2(e)",
    "spans": "[B, H, blocks, 4]  int32, first, partial end, full begin and end of a block's list",
    "q_positions": "[B, Sq]  int32, or None: by row",
    "kv_positions": "[B, Skv]  int32, or None: by row",
    FAR_SUMS: "[B, Hq, 2, far_parts]  fp32, sums of ds before and behind the distances of num_lags, in parts",
    "run_rows": "[entries, 8]  int32, or None: the blocks of rows of runs of tokens, which the packed kernels compute",
    "block_list": "[entries]  int16 or int32, lists of the blocks to visit",
    "ranges": "[B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks",
}


PACKED_SHAPES = {
    "q": "[total_q, Hq, D]",
    "k": "[total_k, Hkv, D]",
    "v": "[total_k, Hkv, Dv]",
    "columns": "[Hkv, Dv, v_columns], v transposed: sequence b from column (its first row // 16 + b) * 16 on",
    "q_scale": "[n, Hq]  fp32, what q is times",
    "k_scale": "[n, Hkv]  fp32, what k is times",
    "v_scale": "[n, Hkv]  fp32, what v is times",
    "o": "[total_q, Hq, Dv]",
    "do": "[total_q, Hq, Dv]",
    "dq": "[total_q, Hq, D]",
    "dk": "[total_k, Hkv, D]",
    "dv": "[total_k, Hkv, Dv]",
    "dkv": "dk with SUMS_DK, otherwise dv",
    "lse": "[Hq, total_q]  fp32, log of the softmax denominator",
    "dlse": "[Hq, total_q]  fp32, gradient of lse",
    "delta": "[Hq, total_q]  fp32, sum(o * do) - dlse",
    "decay": "[Hq, total_k]  fp32, cumulative log-decay of each sequence times log2(e)",
    "dsink": "[Hq, entries]  fp32, partial sums",
    "cu_seqlens_q": "[n + 1]  int32, where the sequences of queries begin",
    "cu_seqlens_k": "[n + 1]  int32, where those of keys begin",
    "block_seqs": "[entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length "
    "of its queries, and of its keys; how many blocks there are",
    "spans": "[H, entries, 4]  int32, first, partial end, full begin and end of a block's list",
    "ranges": "[H, entries, 4]  int32, first visited, first full, end of full and end of visited blocks",
}


PAGED_SHAPES = {
    "q": "[B, Hq, Sq, D], or [total_q, Hq, D] of packed sequences",
    "k": "[pages, page size, Hkv, D]",
    "v": "[pages, page size, Hkv, Dv]",
    "k_scale": "[Hkv] or [pages, page size, Hkv], what keys in the cache are times, or None: 1",
    "v_scale": "the same of values, or a number",
    "o": "as q, with Dv",
    "lse": "[B, Hq, Sq] or [Hq, total_q]  fp32, log of the softmax denominator",
    "sink": SHAPES["sink"],
    "cu_seqlens_q": "[B + 1]  int32, where the packed sequences of queries begin",
    "page_table": "[B, most pages]  int32, or with page_starts [all pages]: the pages of each sequence, in order; none "
    "where a page is a batch row",
    "page_starts": "[B + 1]  int32, where the pages of each sequence begin in page_table",
    "kv_lengths": "[B]  int32, keys of each sequence; none where each has most_keys",
    "records": "[entries, 16]  int32, a part each: sequence, start and length of its queries, first row of the tile, "
    "first and last key of the part with gaps taken out, where its sums go (-1: it is all), its number, keys of the "
    "sequence, keys of a split",
    "tiles": "[tiles, 8]  int32, each tile of several parts: sequence, start and length of its queries, first row, "
    "first part, number of parts, splits of a part",
    "block_seqs": "[entries, 8]  int32, the prompt of each block of rows: its number; first entry; start and length of "
    "its queries; 0; its keys; how many blocks there are",
    "counts": "[2]  int32, how many parts and how many tiles there are",
    "partial_o": "[entries, Hkv, rows, Dv]  fp32, sums of values of each part",
    "partial_sums": "[entries, Hkv, rows, 2]  fp32, maximum of logits and sum of their exponentials of each part",
}


def paged_legend(written: Variant, tensors: Mapping[str, TensorSpec], args: Sequence[ArgGroup]) -> str:
    """The legend of kernels of paged calls, with formulas as `written`; `tensors` have the dims of such calls."""
    return _rows(replace(written, tensors=dict(tensors)), args, PAGED_SHAPES)


def legend(variant: Variant, mode: Mode, args: Sequence[ArgGroup], terms: Sequence[GradientTerm] = ()) -> str:
    """The symbols of kernels with these arguments, and the variant's formulas, as the body of a docstring."""
    shapes = SHAPES | PACKED_SHAPES if mode is Mode.PACKED else SHAPES
    return _rows(variant, args, shapes | {t.accumulator: _buffer_text(variant, mode, t) for t in terms})


def _rows(variant: Variant, args: Sequence[ArgGroup], shapes: Mapping[str, str]) -> str:
    formula = FormulaPrinter()
    rows = []
    if variant.mask is not None:
        rows.append(("keep", formula.text(variant.mask)))
    if variant.score is not None:
        rows.append(("score", formula.text(variant.score)))
    if variant.dropout and any("threshold" in group.names for group in args):
        rows.append(("drop", "word < threshold, a random word of seed, first_head + b * all_heads + h, row and key;"))
        rows.append(("", "rows are counted from row_origin and q_offset, rounded down to 16, on, keys from key_origin"))
    named = [name for group in args for name in group.names]
    pointed = dict.fromkeys(name for name in named if name.endswith("_ptr") or name in shapes)
    for symbol in (name.removesuffix("_ptr") for name in pointed):
        if symbol in variant.tensors:
            spec = variant.tensors[symbol]
            rows.append((symbol, f"[{', '.join(map(str, spec.dims))}]  {spec.dtype}"))
        else:
            rows.append((symbol, shapes[symbol]))
    width = max(len(symbol) for symbol, _ in rows)
    return "\n".join(legend_row(symbol, text, width) for symbol, text in rows)


def _buffer_text(variant: Variant, mode: Mode, term: GradientTerm) -> str:
    if term.by_distance:
        return "[B, Hq, pieces, num_lags]  fp32, sums of ds by q_idx - kv_idx, in pieces to be added up"
    if term.atomic:
        return f"[{', '.join(map(str, variant.tensors[term.tensor].dims))}]  fp32, added to with atomics"
    kinds = (GradientKind.HEAD, GradientKind.ROW, GradientKind.COLUMN, GradientKind.PAIR)
    packed = ("Hq, entries", "Hq, total_q", "Hq, total_k", "Hq, total_q, total_k")
    dense = ("B, Hq, blocks", "B, Hq, Sq", "B, Hq, Skv", "B, Hq, Sq, Skv")
    axes = dict(zip(kinds, packed if mode is Mode.PACKED else dense, strict=True))
    return f"[{axes[term.kind]}]  fp32" + (", partial sums" if term.summed else "")
