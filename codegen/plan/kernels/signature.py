"""The argument lists of a variant's kernels: one list gives the kernel's signature and every launch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from codegen.analysis.call_modes import PADDING, Mode
from codegen.analysis.gradients import DISTANCE_SUMS, GradientKind, GradientTerm
from codegen.analysis.indexing import DECAY, TOKENS, exact_index
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, TensorSpec
from codegen.plan.code.host import HostCode, host, listed
from codegen.plan.kernels.kernel import ArgGroup, numbers, pointers
from codegen.plan.kernels.legend import legend
from codegen.plan.kernels.token_layout import token_layout
from codegen.plan.kernels.variant_reads import (
    grid_runs,
    positions_read,
    reads_pairs,
    reads_query_position,
    tensor_reads,
    uses_tanh,
)
from codegen.spec.model import Variant

TABLES = {Schedule.LISTS: ("spans", "block_list"), Schedule.RANGES: ("ranges",)}
"""Schedule -> the tables of the blocks that a program visits; the first has four numbers for each block of the pass."""

DROPOUT_ORIGIN = ("first_head", "all_heads", "row_origin", "key_origin")
"""Where the probabilities of a call lie in the whole call: dropout counts the heads, rows and keys of that."""


CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
PACKED_TABLES = ("block_seqs",)
"""Tables by which a program of a packed call finds its sequence; made for each pass."""


def tensor_strides(spec: TensorSpec) -> ArgGroup:
    """All strides of one of the variant's own tensors."""
    names = tuple(f"stride_{spec.name}_{axis}" for axis in range(len(spec.dims)))
    return ArgGroup(names=names, host=host("*{}.stride()", spec.name))


def clamped_axes(reads: Iterable[Load], is_inside: Callable[[str, int, Expr], bool]) -> dict[str, list[int]]:
    """Tensor -> axes whose size a kernel needs, to clamp an index. `is_inside(tensor, axis, index)`: it needs none."""
    found: dict[str, set[int]] = {}
    for load in reads:
        for axis, index in enumerate(load.indices):
            if not is_inside(load.tensor, axis, index):
                found.setdefault(load.tensor, set()).add(axis)
    return {name: sorted(axes) for name, axes in found.items()}


def axis_sizes(axes: Mapping[str, Sequence[int]]) -> list[ArgGroup]:
    """The sizes of axes of tensors."""
    return [
        ArgGroup(
            names=tuple(f"{name}_size_{axis}" for axis in clamped),
            host=listed(host(f"{{}}.shape[{axis}]", name) for axis in clamped),
            varies=True,
        )
        for name, clamped in axes.items()
    ]


def scalar_numbers(names: Iterable[str]) -> list[ArgGroup]:
    """The variant's own scalars, without the segment id of padding, which every segmented op has."""
    return [numbers(name, loadable=True) for name in names if name != PADDING.name]


class Signatures:
    """Argument groups of each kernel: inputs, outputs, strides, lengths, scalars.

    Pointers to inputs come before pointers to outputs, because XLA passes buffers in this order. So the query offset
    and the variant's own scalars, which may be numbers or pointers to numbers, come last among the inputs.
    """

    def __init__(self, variant: Variant, mode: Mode, terms: Sequence[GradientTerm], analysis: BlockAnalysis) -> None:
        self.variant = variant
        self.mode = mode
        self.layout = token_layout(mode)
        self.symbol = variant.name if mode is Mode.DENSE else f"{variant.name}_{mode.value}"
        self.terms = terms
        self.offset = reads_query_position(variant, mode)
        self.tables = TABLES.get(analysis.schedule, ())
        self.tables_per_head = analysis.tables_per_head

    def legend(self, args: Sequence[ArgGroup], terms: Sequence[GradientTerm] = ()) -> str:
        """The symbols of a kernel with these arguments, which gathers `terms`, for its docstring."""
        return legend(self.variant, self.mode, args, terms)

    def fwd(self) -> list[ArgGroup]:
        sink = [pointers("sink")] if self.variant.sink else []
        return [
            pointers("q", "k", "v"),
            *sink,
            *self._tensors(),
            *self._tables(),
            *self._loadable(),
            pointers("o", "lse"),
            *(self._unit_strides(x) for x in "qkv"),
            self.strides("o"),
            *self._tensor_strides(),
            *self._table_strides(),
            *self._numbers(),
        ]

    def dq(self) -> list[ArgGroup]:
        sink = [pointers("sink")] if self.variant.sink else []
        dsink = [ArgGroup(names=("dsink_ptr",), host=listed(("dsink_heads",)))] if self.variant.sink else []
        delta = pointers("delta")
        terms = self._gathered_in_dq
        groups = self._backward(("dq",), terms, inputs=("q", "k", "v", "do", "o"), first=[delta], sums=dsink)
        return [pointers("o", "dlse"), *sink, *groups]

    def split_rows(self) -> list[ArgGroup]:
        """Arguments of the kernel of dq that reads the delta of a kernel before it."""
        return self._backward(("dq",), (), inputs=("q", "k", "v", "do"), reads=[pointers("delta")])

    def dq_constants(self) -> list[str]:
        return ["HAS_DLSE", *_flags(self._gathered_in_dq), *self.constants()]

    def dkdv(self, terms: Sequence[GradientTerm]) -> list[ArgGroup]:
        """Arguments of a backward kernel of keys that gathers `terms`."""
        delta = pointers("delta")
        # The dq kernel fills sums of heads and rows before this one runs, so they come before its own outputs.
        of_dq = (GradientKind.HEAD, GradientKind.ROW)
        filled = dict.fromkeys(t.accumulator for t in terms if t.kind in of_dq)
        groups = self._backward(
            ("dk", "dv"),
            [t for t in terms if t.kind not in of_dq],
            inputs=("q", "k", "v", "do"),
            reads=[delta],
            first=[pointers(x) for x in filled],
        )
        # Tables for blocks of keys are made separately from the tables of dq.
        own = {name: f"key_{name}" for name in (*PACKED_TABLES, *self.tables)}
        return [replace(g, host=g.host.renamed(own)) for g in groups]

    def dkdv_constants(self, terms: Sequence[GradientTerm]) -> list[str]:
        return [*_flags(terms), "HEAD_GROUPS", *self.constants()]

    def row_terms(self, read: Set[str]) -> tuple[list[ArgGroup], list[str]]:
        """Arguments and constants of a kernel of query rows that reads these names."""
        wanted = {*read, *(["q_offset"] if "q_shift" in read else []), *(["group_size"] if "hkv" in read else [])}
        groups = [*self._tensors(), *self._loadable(), *self._tensor_strides()]
        groups.append(numbers("group_size"))
        if not self.layout.has_sequences:
            groups.append(numbers("kv_len"))
        groups = [group for group in self._with_read_positions(groups, read) if wanted & set(group.names)]
        offset = ["Q_OFFSET_PER_BATCH"] if "q_offset" in wanted else []
        loaded = ["SCALARS_LOADED"] if any(group.loadable for group in groups) else []
        return groups, [*offset, *loaded, *(["POSITIONS"] if "POSITIONS" in read else [])]

    def read_only(
        self, args: Sequence[ArgGroup], constants: Sequence[str], read: Set[str]
    ) -> tuple[list[ArgGroup], list[str]]:
        """A kernel's arguments and constants, without those of the variant's own that are not read, and without the
        dropout factor, which the kernel of the row terms applies."""
        own = [*self._tensors(), *self._tensor_strides()]
        offset = "q_shift" in read or self.variant.dropout
        kept = [g for g in args if (read & set(g.names) if g in own else offset or "q_offset" not in g.names)]
        kept = [g for g in kept if "keep_scale" not in g.names]
        unread = {*([] if offset else ["Q_OFFSET_PER_BATCH"]), *({"POSITIONS"} - read)}
        return self._with_read_positions(kept, read), [name for name in constants if name not in unread]

    def _with_read_positions(self, groups: Sequence[ArgGroup], read: Set[str]) -> list[ArgGroup]:
        """The same groups, with only the positions that are read."""
        names = [name for name in self.position_names if f"{name}_ptr" in read]
        every = [*self.positions(self.position_names), *self.position_strides(self.position_names)]
        kept = [*self.positions(names), *self.position_strides(names)]
        found: list[ArgGroup] = []
        for group in groups:
            found += [g for g in kept if set(g.names) <= set(group.names)] if group in every else [group]
        return found

    def distances(self, far_sums: Sequence[ArgGroup], far_limits: Sequence[ArgGroup]) -> list[ArgGroup]:
        """Arguments of the kernel that sums ds by distance, in dense calls; `far_sums` and `far_limits` are the
        arguments for far blocks, which it sums separately."""
        bands = ("first_band", "num_bands", "part_blocks", "num_parts")
        return [
            pointers("q", "k", "v", "do", "lse", "delta"),
            *self._tensors(),
            *self._loadable(),
            *far_sums,
            pointers(DISTANCE_SUMS),
            *(self._unit_strides(x) for x in ("q", "k", "v", "do")),
            *self._tensor_strides(),
            *self._numbers(),
            ArgGroup(names=bands, host=listed(f"bands.{name}" for name in bands), varies=True),
            ArgGroup(names=("num_lags", "lag_origin"), host=listed(("lags.size", "lags.origin")), varies=True),
            *far_limits,
            *([numbers("far_parts")] if far_sums else []),
        ]

    @property
    def _gathered_in_dq(self) -> list[GradientTerm]:
        """The terms that the dq kernel gathers."""
        return [t for t in self.terms if t.in_dq]

    def constants(self) -> list[str]:
        offset = ["Q_OFFSET_PER_BATCH"] if self.offset else []
        ptx = ["PTX"] if reads_pairs(self.variant) else []
        grid = ["GRID_RUN"] if grid_runs(self.variant, self.mode) else []
        tanh = ["HARDWARE_TANH"] if uses_tanh(self.variant) else []
        dropout = ["DROPOUT"] if self.variant.dropout else []
        loaded = ["SCALARS_LOADED"] if any(group.loadable for group in self._loadable()) else []
        sizes = ["HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N"]
        positions = ["POSITIONS"] if self.position_names else []
        ragged = ["RAGGED"] if not self.layout.has_sequences else []
        return [*offset, *loaded, *positions, *grid, *ptx, *tanh, *dropout, *ragged, *sizes]

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
            pointers("q", "k", "v", "do", "lse"),
            *reads,
            *self._tensors(),
            *self._tables(),
            *self._loadable(),
            *first,
            *(pointers(x) for x in (*outputs, *buffers)),
            *sums,
            *(self._unit_strides(x) for x in inputs),
            *(self.strides(x) for x in outputs),
            *self._tensor_strides(),
            *self._table_strides(),
            *self._buffer_strides(terms),
            *self._numbers(column_sums=any(t.kind is GradientKind.COLUMN for t in terms)),
        ]

    def strides(self, letter: str) -> ArgGroup:
        """Strides of a `[B, H, S, D]` tensor but the last, which is 1; packed sequences are one batch row."""
        return self._row_strides(letter, self.layout.strides(letter))

    def _unit_strides(self, letter: str) -> ArgGroup:
        """Strides of an input whose rows are aligned: those of batch and head in units of 16 bytes."""
        return self._row_strides(letter, self.layout.unit_strides(letter))

    def _row_strides(self, letter: str, passed: HostCode) -> ArgGroup:
        names = tuple(f"stride_{letter}{axis}" for axis in self.layout.axes)
        return ArgGroup(names=names, host=passed, row_strides=names[-1:])

    def _tables(self) -> list[ArgGroup]:
        """Tables by which a program finds its sequence, its block and the blocks it visits."""
        tables = [pointers(*self.tables)] if self.tables else []
        return [*self.sequences(), *tables]

    def sequences(self) -> list[ArgGroup]:
        """Tables by which a program of a packed call finds its sequence."""
        if not self.layout.has_sequences:
            return []
        return [pointers(*PACKED_TABLES)]

    def _table_strides(self) -> list[ArgGroup]:
        if not self.tables:
            return []
        rows = self.tables[0]
        axes = [*(["b"] if not self.layout.has_sequences else []), *(["h"] if self.tables_per_head else [])]
        # A table shared by all batch rows, or all heads, has a single entry on that axis.
        head_axis = 0 if self.layout.has_sequences else 1
        strides = {"b": host("row_stride({})", rows), "h": host(f"{{}}.stride({head_axis})", rows)}
        names = tuple(f"stride_{rows}_{axis}" for axis in axes)
        return [ArgGroup(names=names, host=listed(strides[a] for a in axes), varies=True)] if axes else []

    def _buffer_strides(self, terms: Sequence[GradientTerm]) -> list[ArgGroup]:
        """Strides of the buffers of whole tensors, which atomics add to."""
        dims = {t.accumulator: len(t.load.indices) for t in terms if t.atomic}
        return [
            ArgGroup(names=tuple(f"stride_{name}_{axis}" for axis in range(n)), host=host("*{}.stride()", name))
            for name, n in dims.items()
        ]

    def _all_tensors(self) -> dict[str, TensorSpec]:
        return {**self.variant.tensors, **({"decay": DECAY} if self.variant.decay else {})}

    def _tensors(self) -> list[ArgGroup]:
        return [
            *(pointers(name) for name in self._all_tensors()),
            *self.positions(self.position_names),
        ]

    @property
    def position_names(self) -> tuple[str, ...]:
        """The positions that a segmented call may give and the variant reads."""
        return positions_read(self.variant) if self.layout.gives_positions else ()

    def positions(self, names: Sequence[str]) -> list[ArgGroup]:
        """The positions of a segmented call's tokens; None if positions are rows and columns."""
        return [pointers(*names)] if names else []

    def position_strides(self, names: Sequence[str]) -> list[ArgGroup]:
        strides = tuple(f"stride_{name}_b" for name in names)
        passed = listed(host("row_stride({})", name) for name in names)
        return [ArgGroup(names=strides, host=passed)] if names else []

    def _tensor_strides(self) -> list[ArgGroup]:
        groups = [tensor_strides(spec) for spec in self.variant.tensors.values() if spec.dims]
        packed = self.layout.has_sequences
        if self.variant.decay and packed:
            groups.append(ArgGroup(names=("stride_decay_0",), host=host("{}.stride(1)", "decay")))
        elif self.variant.decay:
            groups.append(ArgGroup(names=("stride_decay_0", "stride_decay_1"), host=host("*{}.stride()[:2]", "decay")))
        axes = clamped_axes(tensor_reads(self.variant), self._is_inside)
        if self.variant.decay and not packed:
            axes["decay"] = [2]
        return [*groups, *self.position_strides(self.position_names), *axis_sizes(axes)]

    def _is_inside(self, tensor: str, axis: int, index: Expr) -> bool:
        """True if an index stays inside its axis, or is clamped to its sequence."""
        packed = self.layout.has_sequences and self.variant.tensors[tensor].dims[axis] in TOKENS
        return packed or exact_index(self.variant.tensors, tensor, axis, index)

    def own_tensors(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The variant's tensors that some expressions read."""
        read = {load.tensor for load in expr.loads(*roots)}
        return [pointers(name) for name in self.variant.tensors if name in read]

    def own_strides(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The strides and sizes of the variant's tensors that some expressions read."""
        reads = expr.loads(*roots)
        read = {load.tensor for load in reads}
        groups = [tensor_strides(spec) for name, spec in self.variant.tensors.items() if name in read and spec.dims]
        return [*groups, *axis_sizes(clamped_axes(reads, self._is_inside))]

    def own_scalars(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The variant's scalars that some expressions read."""
        read = expr.names(*roots)
        return scalar_numbers(name for name in self.variant.scalars if name in read)

    def padding(self, roots: Sequence[Expr]) -> list[ArgGroup]:
        """The segment id of padding, if some expressions read it."""
        read = expr.names(*roots)
        return [numbers(PADDING.name)] if PADDING.name in read else []

    def _numbers(self, *, column_sums: bool = False) -> list[ArgGroup]:
        lengths = numbers("q_len", "kv_len")
        if self.layout.has_sequences:
            totals = ("q_total", "kv_total") if column_sums else ("q_total",)
            lengths = ArgGroup(names=totals, host=listed(("q_len", "kv_len")[: len(totals)]), varies=True)
        groups = [
            lengths,
            numbers("num_heads", "group_size"),
        ]
        groups.append(ArgGroup(names=("scale",), host=listed(("scale",))))
        if self.variant.dropout:
            # Triton would give small and large values different types and compile the kernel for each.
            groups.append(numbers("threshold", dtype="uint32"))
            groups.append(ArgGroup(names=("keep_scale",), host=listed(("keep_scale",))))
        if self.layout.gives_positions:
            groups.append(numbers(PADDING.name))
        return groups

    def _loadable(self) -> list[ArgGroup]:
        """The numbers of a call that may also be passed as a pointer."""
        groups = [numbers("q_offset")] if self.offset else []
        if self.variant.dropout:
            groups.append(numbers("seed", dtype="uint64", loadable=True))
            groups.append(numbers(*DROPOUT_ORIGIN, loadable=True))
        return [*groups, *scalar_numbers(self.variant.scalars)]


def _flags(terms: Sequence[GradientTerm]) -> list[str]:
    return list(dict.fromkeys(t.flag for t in terms if t.flag))
