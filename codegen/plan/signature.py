"""The argument lists of a variant's kernels: one list gives the kernel's signature and every launch of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from codegen.analysis.call_modes import PADDING, Mode
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.analysis.indexing import DECAY, TOKENS, exact_index
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, TensorSpec
from codegen.ir.printers import FormulaPrinter
from codegen.plan.kernel import ArgGroup
from codegen.spec.model import Variant
from codegen.util.text import legend_row

SHAPES = {
    "q": "[B, Hq, Sq, D]",
    "k": "[B, Hkv, Skv, D]",
    "v": "[B, Hkv, Skv, Dv]",
    "o": "[B, Hq, Sq, Dv]",
    "do": "[B, Hq, Sq, Dv]",
    "dq": "[B, Hq, Sq, D]",
    "dk": "[B, Hkv, Skv, D]",
    "dv": "[B, Hkv, Skv, Dv]",
    "lse": "[B, Hq, Sq]  fp32, log of the softmax denominator",
    "dlse": "[B, Hq, Sq]  fp32, gradient of lse",
    "delta": "[B, Hq, Sq]  fp32, sum(o * do) - dlse",
    "sink": "[Hq]  fp32, logit in the denominator only",
    "dsink": "[B, Hq, blocks]  fp32, partial sums",
    "decay": "[B, Hq, P]  fp32, cumulative log-decay times log2(e)",
    "spans": "[B, H, blocks, 4]  int32, first, partial end, full begin and end of a block's list",
    "q_positions": "[B, Sq]  int32, or None: by row",
    "kv_positions": "[B, Skv]  int32, or None: by row",
    "block_list": "[entries]  int16 or int32, lists of the blocks to visit",
    "ranges": "[B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks",
}


PACKED_SHAPES = {
    "q": "[total_q, Hq, D]",
    "k": "[total_k, Hkv, D]",
    "v": "[total_k, Hkv, Dv]",
    "o": "[total_q, Hq, Dv]",
    "do": "[total_q, Hq, Dv]",
    "dq": "[total_q, Hq, D]",
    "dk": "[total_k, Hkv, D]",
    "dv": "[total_k, Hkv, Dv]",
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
TABLES = {Schedule.LISTS: ("spans", "block_list"), Schedule.RANGES: ("ranges",)}
"""What a pass reads its blocks from, by schedule; the first has four numbers for each block of the pass."""


CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
PACKED_TABLES = ("block_seqs",)
"""What tells a program of packed sequences which one is its own: made for each pass, as its other tables are."""


def table_pointers(tables: Sequence[str]) -> ArgGroup:
    return ArgGroup(names=tuple(f"{table}_ptr" for table in tables), host=", ".join(tables))


def reads_query_position(variant: Variant, mode: Mode) -> bool:
    """Whether a kernel needs the position of a query, and so the query offset."""
    parts = [e for e in (variant.mask, variant.score) if e is not None]
    named = any({"q_idx", "q_row"} & expr.names(e) for e in parts)
    return variant.decay or named or reads_packed_queries(variant, tensor_reads(variant), mode)


def reads_packed_queries(variant: Variant, reads: Sequence[Load], mode: Mode) -> bool:
    """Whether some of these elements lie as packed queries do: the query offset tells a position's row."""
    return mode is Mode.PACKED and any("q_idx" in variant.tensors[load.tensor].dims for load in reads)


def positions_read(variant: Variant) -> tuple[str, ...]:
    """The positions that a variant's expressions read."""
    read = frozenset().union(*(expr.names(e) for e in (variant.mask, variant.score) if e is not None))
    return tuple(f"{axis}_positions" for axis in ("q", "kv") if f"{axis}_idx" in read)


def uses_tanh(variant: Variant) -> bool:
    """Whether the score calls tanh, for which some chips have an instruction."""
    return variant.score is not None and any(
        isinstance(node, expr.Op) and node.op == "tanh" for node in expr.walk(variant.score)
    )


def reads_pairs(variant: Variant) -> bool:
    """Whether some tensor is read per pair of a query and a key."""
    return any(expr.level(load) is Level.TILE for load in tensor_reads(variant))


def tensor_reads(variant: Variant) -> tuple[Load, ...]:
    """Every distinct element of the variant's own tensors that its expressions read."""
    return expr.loads(*(e for e in (variant.mask, variant.score) if e is not None))


def clamped_axes(tensors: Mapping[str, TensorSpec], reads: Sequence[Load], mode: Mode) -> dict[str, list[int]]:
    """Tensor -> axes whose size a kernel needs, to clamp an index that may leave them."""
    found: dict[str, set[int]] = {}
    for load in reads:
        for axis, index in enumerate(load.indices):
            packed = mode is Mode.PACKED and tensors[load.tensor].dims[axis] in TOKENS
            if not packed and not exact_index(tensors, load.tensor, axis, index):
                found.setdefault(load.tensor, set()).add(axis)
    return {name: sorted(axes) for name, axes in found.items()}


def _strides(letter: str, axes: str) -> ArgGroup:
    slices = {"bhs": "[:3]", "hs": "[1:3]"}
    return ArgGroup(names=tuple(f"stride_{letter}{axis}" for axis in axes), host=f"*{letter}.stride(){slices[axes]}")


def _own_strides(spec: TensorSpec) -> ArgGroup:
    """All strides of one of the variant's own tensors."""
    names = tuple(f"stride_{spec.name}_{axis}" for axis in range(len(spec.dims)))
    return ArgGroup(names=names, host=f"*{spec.name}.stride()")


def _sizes(axes: Mapping[str, Sequence[int]]) -> list[ArgGroup]:
    """Sizes of the axes whose index is clamped."""
    return [
        ArgGroup(
            names=tuple(f"{name}_size_{axis}" for axis in clamped),
            host=", ".join(f"{name}.shape[{axis}]" for axis in clamped),
            varies=True,
        )
        for name, clamped in axes.items()
    ]


def _scalars(names: Iterable[str]) -> list[ArgGroup]:
    """The variant's own; the id of padding is every segmented op's."""
    own = (name for name in names if name != PADDING.name)
    return [ArgGroup(names=(name,), host=name, varies=True, loadable=True) for name in own]


class Signatures:
    """Argument groups of each kernel: inputs, outputs, strides, lengths, scalars.

    Pointers to inputs come before those to outputs, as XLA hands out buffers. So what may be a number or a pointer to
    one, the query offset and the variant's own scalars, ends the inputs.
    """

    def __init__(self, variant: Variant, mode: Mode, terms: Sequence[GradientTerm], analysis: BlockAnalysis) -> None:
        self.variant = variant
        self.mode = mode
        self.symbol = variant.name if mode is Mode.DENSE else f"{variant.name}_{mode.value}"
        self.terms = terms
        self.offset = reads_query_position(variant, mode)
        self.tables = TABLES.get(analysis.schedule, ())
        self.tables_per_head = analysis.tables_per_head

    def fwd(self) -> list[ArgGroup]:
        sink = [ArgGroup(names=("sink_ptr",), host="sink")] if self.variant.sink else []
        return [
            ArgGroup(names=("q_ptr", "k_ptr", "v_ptr"), host="q, k, v"),
            *sink,
            *self._tensors(),
            *self._tables(),
            *self._loadable(),
            ArgGroup(names=("o_ptr", "lse_ptr"), host="o, lse"),
            *(self._unit_strides(x) for x in "qkv"),
            self._strides("o"),
            *self._tensor_strides(),
            *self._table_strides(),
            *self._numbers(),
        ]

    def dq(self) -> list[ArgGroup]:
        sink = [ArgGroup(names=("sink_ptr",), host="sink")] if self.variant.sink else []
        dsink = [ArgGroup(names=("dsink_ptr",), host="dsink_heads")] if self.variant.sink else []
        delta = ArgGroup(names=("delta_ptr",), host="delta")
        terms = self._gathered_in_dq
        groups = self._backward(("dq",), terms, inputs=("q", "k", "v", "do", "o"), first=[delta], sums=dsink)
        return [ArgGroup(names=("o_ptr", "dlse_ptr"), host="o, dlse"), *sink, *groups]

    def dq_constants(self) -> list[str]:
        return ["HAS_DLSE", *_flags(self._gathered_in_dq), *self.constants()]

    def dkdv(self, terms: Sequence[GradientTerm]) -> list[ArgGroup]:
        """Of a kernel that gathers `terms`."""
        delta = ArgGroup(names=("delta_ptr",), host="delta")
        # Where dq has a kernel of its own, that has filled sums of heads and rows: so these are before its own.
        of_dq = (GradientKind.HEAD, GradientKind.ROW)
        filled = dict.fromkeys(t.accumulator for t in terms if t.kind in of_dq)
        groups = self._backward(
            ("dk", "dv"),
            [t for t in terms if t.kind not in of_dq],
            inputs=("q", "k", "v", "do"),
            reads=[delta],
            first=[ArgGroup(names=(f"{x}_ptr",), host=x) for x in filled],
        )
        # Its tables are others than those of dq.
        tables = "|".join((*PACKED_TABLES, *self.tables))
        return [replace(g, host=re.sub(rf"\b({tables})\b", r"key_\1", g.host)) for g in groups] if tables else groups

    def dkdv_constants(self, terms: Sequence[GradientTerm]) -> list[str]:
        return [*_flags(terms), *self.constants()]

    def row_terms(self, read: Set[str]) -> tuple[list[ArgGroup], list[str]]:
        """What a kernel of rows that reads these names takes for them, and its constants."""
        wanted = {*read, *(["q_offset"] if "q_shift" in read else []), *(["group_size"] if "hkv" in read else [])}
        groups = [*self._tensors(), *self._loadable(), *self._tensor_strides()]
        groups.append(ArgGroup(names=("group_size",), host="group_size", varies=True))
        if self.mode is not Mode.PACKED:
            groups.append(ArgGroup(names=("kv_len",), host="kv_len", varies=True))
        groups = [group for group in self._with_read_positions(groups, read) if wanted & set(group.names)]
        offset = ["Q_OFFSET_PER_BATCH"] if "q_offset" in wanted else []
        loaded = ["SCALARS_LOADED"] if any(group.loadable for group in groups) else []
        return groups, [*offset, *loaded, *(["POSITIONS"] if "POSITIONS" in read else [])]

    def read_only(
        self, args: Sequence[ArgGroup], constants: Sequence[str], read: Set[str]
    ) -> tuple[list[ArgGroup], list[str]]:
        """A kernel's arguments and constants without those of the variant's own that are not read by these names, and
        without what the kernel of a row's terms has done."""
        own = [*self._tensors(), *self._tensor_strides()]
        offset = "q_shift" in read
        kept = [g for g in args if (read & set(g.names) if g in own else offset or "q_offset" not in g.names)]
        kept = [g for g in kept if "keep_scale" not in g.names]
        unread = {*([] if offset else ["Q_OFFSET_PER_BATCH"]), *({"POSITIONS"} - read)}
        return self._with_read_positions(kept, read), [name for name in constants if name not in unread]

    def _with_read_positions(self, groups: Sequence[ArgGroup], read: Set[str]) -> list[ArgGroup]:
        """The same with those positions alone that are read."""
        names = [name for name in self.position_names if f"{name}_ptr" in read]
        every = [*self.positions(self.position_names), *self.position_strides(self.position_names)]
        kept = [*self.positions(names), *self.position_strides(names)]
        found: list[ArgGroup] = []
        for group in groups:
            found += [g for g in kept if set(g.names) <= set(group.names)] if group in every else [group]
        return found

    @property
    def _gathered_in_dq(self) -> list[GradientTerm]:
        """All terms but the column sums, which dkdv gathers."""
        return [t for t in self.terms if t.kind is not GradientKind.COLUMN]

    def constants(self) -> list[str]:
        offset = ["Q_OFFSET_PER_BATCH"] if self.offset else []
        ptx = ["PTX"] if reads_pairs(self.variant) else []
        tanh = ["HARDWARE_TANH"] if uses_tanh(self.variant) else []
        dropout = ["DROPOUT"] if self.variant.dropout else []
        loaded = ["SCALARS_LOADED"] if any(group.loadable for group in self._loadable()) else []
        sizes = ["HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N"]
        positions = ["POSITIONS"] if self.position_names else []
        ragged = ["RAGGED"] if self.mode is not Mode.PACKED else []
        return [*offset, *loaded, *positions, *ptx, *tanh, *dropout, *ragged, *sizes]

    def _backward(
        self,
        outputs: tuple[str, ...],
        terms: Sequence[GradientTerm],
        *,
        inputs: tuple[str, ...],
        reads: Sequence[ArgGroup] = (),
        first: Sequence[ArgGroup] = (),
        sums: Sequence[ArgGroup] = (),
    ) -> list[ArgGroup]:
        """Arguments of a backward kernel; `reads` are further inputs, `first` and `sums` further outputs."""
        buffers = dict.fromkeys(t.accumulator for t in terms)
        return [
            ArgGroup(names=("q_ptr", "k_ptr", "v_ptr", "do_ptr", "lse_ptr"), host="q, k, v, do, lse"),
            *reads,
            *self._tensors(),
            *self._tables(),
            *self._loadable(),
            *first,
            *(ArgGroup(names=(f"{x}_ptr",), host=x) for x in (*outputs, *buffers)),
            *sums,
            *(self._unit_strides(x) for x in inputs),
            *(self._strides(x) for x in outputs),
            *self._tensor_strides(),
            *self._table_strides(),
            *self._buffer_strides(terms),
            *self._numbers(column_sums=any(t.kind is GradientKind.COLUMN for t in terms)),
        ]

    def _strides(self, letter: str) -> ArgGroup:
        """Strides of a `[B, H, S, D]` tensor but the last, which is 1; packed sequences are one batch row."""
        return _strides(letter, self._axes)

    def _unit_strides(self, letter: str) -> ArgGroup:
        """Strides of an input whose rows are aligned: those of batch and head in units of 16 bytes."""
        names = tuple(f"stride_{letter}{axis}" for axis in self._axes)
        return ArgGroup(names=names, host=f"*unit_strides({letter})" + "[1:]" * (self._axes == "hs"))

    @property
    def _axes(self) -> str:
        return "hs" if self.mode is Mode.PACKED else "bhs"

    def _tables(self) -> list[ArgGroup]:
        """What tells a program its block and the blocks it visits."""
        tables = [table_pointers(self.tables)] if self.tables else []
        return [*self.sequences(), *tables]

    def sequences(self) -> list[ArgGroup]:
        """What tells a program of packed sequences which one is its own."""
        if self.mode is not Mode.PACKED:
            return []
        return [table_pointers(PACKED_TABLES)]

    def _table_strides(self) -> list[ArgGroup]:
        if not self.tables:
            return []
        rows = self.tables[0]
        axes = [*(["b"] if self.mode is not Mode.PACKED else []), *(["h"] if self.tables_per_head else [])]
        # A table that serves all batch rows, or all heads, has one.
        strides = {"b": f"row_stride({rows})", "h": f"{rows}.stride({0 if self.mode is Mode.PACKED else 1})"}
        names = tuple(f"stride_{rows}_{axis}" for axis in axes)
        return [ArgGroup(names=names, host=", ".join(strides[a] for a in axes), varies=True)] if axes else []

    def _buffer_strides(self, terms: Sequence[GradientTerm]) -> list[ArgGroup]:
        """Strides of the buffers of whole tensors, which atomics add to."""
        dims = {t.accumulator: len(t.load.indices) for t in terms if t.atomic}
        return [
            ArgGroup(names=tuple(f"stride_{name}_{axis}" for axis in range(n)), host=f"*{name}.stride()")
            for name, n in dims.items()
        ]

    def _all_tensors(self) -> dict[str, TensorSpec]:
        return {**self.variant.tensors, **({"decay": DECAY} if self.variant.decay else {})}

    def _tensors(self) -> list[ArgGroup]:
        return [
            *(ArgGroup(names=(f"{name}_ptr",), host=name) for name in self._all_tensors()),
            *self.positions(self.position_names),
        ]

    @property
    def position_names(self) -> tuple[str, ...]:
        """The positions that a segmented call may give and the variant reads."""
        return positions_read(self.variant) if self.mode is Mode.SEGMENTED else ()

    def positions(self, names: Sequence[str]) -> list[ArgGroup]:
        """The positions of a segmented call's tokens, None where they lie by position."""
        return [table_pointers(names)] if names else []

    def position_strides(self, names: Sequence[str]) -> list[ArgGroup]:
        strides = tuple(f"stride_{name}_b" for name in names)
        host = ", ".join(f"row_stride({name})" for name in names)
        return [ArgGroup(names=strides, host=host)] if names else []

    def _tensor_strides(self) -> list[ArgGroup]:
        groups = [_own_strides(spec) for spec in self.variant.tensors.values() if spec.dims]
        packed = self.mode is Mode.PACKED
        if self.variant.decay and packed:
            groups.append(ArgGroup(names=("stride_decay_0",), host="decay.stride(1)"))
        elif self.variant.decay:
            groups.append(ArgGroup(names=("stride_decay_0", "stride_decay_1"), host="*decay.stride()[:2]"))
        axes = clamped_axes(self.variant.tensors, tensor_reads(self.variant), self.mode)
        if self.variant.decay and not packed:
            axes["decay"] = [2]
        return [*groups, *self.position_strides(self.position_names), *_sizes(axes)]

    def own_tensors(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The variant's tensors that some expressions read."""
        read = {load.tensor for load in expr.loads(*roots)}
        return [ArgGroup(names=(f"{name}_ptr",), host=name) for name in self.variant.tensors if name in read]

    def own_strides(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """Their strides and sizes."""
        reads = expr.loads(*roots)
        read = {load.tensor for load in reads}
        groups = [_own_strides(spec) for name, spec in self.variant.tensors.items() if name in read and spec.dims]
        return [*groups, *_sizes(clamped_axes(self.variant.tensors, reads, self.mode))]

    def own_scalars(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The variant's scalars that some expressions read."""
        read = frozenset().union(*map(expr.names, roots))
        return _scalars(name for name in self.variant.scalars if name in read)

    def padding(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The segment id of padding, where some expressions read it."""
        read = frozenset().union(*map(expr.names, roots))
        return [ArgGroup(names=(PADDING.name,), host=PADDING.name, varies=True)] if PADDING.name in read else []

    def _numbers(self, *, column_sums: bool = False) -> list[ArgGroup]:
        lengths = ArgGroup(names=("q_len", "kv_len"), host="q_len, kv_len", varies=True)
        if self.mode is Mode.PACKED:
            totals = ("q_total", "kv_total") if column_sums else ("q_total",)
            lengths = ArgGroup(names=totals, host=", ".join(("q_len", "kv_len")[: len(totals)]), varies=True)
        groups = [
            lengths,
            ArgGroup(names=("num_heads", "group_size"), host="num_heads, group_size", varies=True),
        ]
        groups.append(ArgGroup(names=("scale",), host="scale"))
        if self.variant.dropout:
            # Small and large numbers would otherwise be of two types, and the kernel compiled for each.
            groups.append(ArgGroup(names=("threshold",), host="threshold", varies=True, type="tl.uint32"))
            groups.append(ArgGroup(names=("keep_scale",), host="keep_scale"))
        if self.mode is Mode.SEGMENTED:
            groups.append(ArgGroup(names=(PADDING.name,), host=PADDING.name, varies=True))
        return groups

    def _loadable(self) -> list[ArgGroup]:
        """The numbers of a call that may also be given by pointer."""
        groups = [ArgGroup(names=("q_offset",), host="q_offset", varies=True)] if self.offset else []
        if self.variant.dropout:
            groups.append(ArgGroup(names=("seed",), host="seed", varies=True, type="tl.uint64", loadable=True))
        return [*groups, *_scalars(self.variant.scalars)]


def _flags(terms: Sequence[GradientTerm]) -> list[str]:
    return list(dict.fromkeys(t.flag for t in terms if t.flag))


def legend(variant: Variant, mode: Mode, args: Sequence[ArgGroup], terms: Sequence[GradientTerm] = ()) -> str:
    """The symbols of a kernel with their shapes, and the variant's formulas, as the body of a docstring."""
    formula = FormulaPrinter()
    rows = []
    if variant.mask is not None:
        rows.append(("keep", formula.text(variant.mask)))
    if variant.score is not None:
        rows.append(("score", formula.text(variant.score)))
    if variant.dropout and any("threshold" in group.names for group in args):
        rows.append(("drop", "word < threshold, a random word of seed, b * Hq + h, row and key"))
    shapes = SHAPES | PACKED_SHAPES if mode is Mode.PACKED else SHAPES
    buffers = {t.accumulator: _buffer_text(variant, mode, t) for t in terms}
    for group in args:
        for name in group.names:
            if not name.endswith("_ptr"):
                continue
            symbol = name.removesuffix("_ptr")
            if symbol in variant.tensors:
                spec = variant.tensors[symbol]
                rows.append((symbol, f"[{', '.join(map(str, spec.dims))}]  {spec.dtype}"))
            elif symbol in buffers:
                rows.append((symbol, buffers[symbol]))
            else:
                rows.append((symbol, shapes[symbol]))
    width = max(len(symbol) for symbol, _ in rows)
    return "\n".join(legend_row(symbol, text, width) for symbol, text in rows)


def _buffer_text(variant: Variant, mode: Mode, term: GradientTerm) -> str:
    if term.atomic:
        return f"[{', '.join(map(str, variant.tensors[term.tensor].dims))}]  fp32, added to with atomics"
    kinds = (GradientKind.HEAD, GradientKind.ROW, GradientKind.COLUMN, GradientKind.PAIR)
    packed = ("Hq, entries", "Hq, total_q", "Hq, total_k", "Hq, total_q, total_k")
    dense = ("B, Hq, blocks", "B, Hq, Sq", "B, Hq, Skv", "B, Hq, Sq, Skv")
    axes = dict(zip(kinds, packed if mode is Mode.PACKED else dense, strict=True))
    return f"[{axes[term.kind]}]  fp32" + (", partial sums" if term.summed else "")
