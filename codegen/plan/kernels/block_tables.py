"""The kernels that make tables of blocks, ranges or lists, by interval arithmetic on each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from codegen.analysis.call_modes import Mode
from codegen.analysis.grids import GridRead
from codegen.analysis.intervals import Decision, Extreme
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import TRUE, Expr, Level
from codegen.ir.printers import FormulaPrinter
from codegen.plan.code.host import host, listed
from codegen.plan.code.lower import Lowering
from codegen.plan.code.statements import Assign, uses
from codegen.plan.code.tree import Code
from codegen.plan.kernels.block_extremes import (
    BlockExtreme,
    Reduction,
    block_extreme,
    extreme_dtype,
    extreme_pointers,
    reductions,
)
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan, numbers, pointers
from codegen.plan.kernels.legend import PACKED_SHAPES, SHAPES
from codegen.plan.kernels.signature import CU_SEQLENS, PACKED_TABLES, TABLES, Signatures
from codegen.plan.kernels.token_layout import InMode
from codegen.plan.kernels.variant_reads import reads_packed_queries
from codegen.spec.model import Variant
from codegen.util.text import legend_row

# The names by which a decision reads the positions of a block.
_QUERY_BOUNDS = frozenset(("q_first", "q_last"))
_KEY_BOUNDS = frozenset(("kv_first", "kv_last"))


_LENGTHS = {"q_len": host("{}.shape[2]", "q"), "kv_len": host("{}.shape[2]", "k")}


@dataclass(frozen=True, kw_only=True)
class ExtremesKernel:
    """The kernel that reduces every tensor value that the mask compares, over small parts of the queries and keys.

    `positions`: axis -> the names of the smallest and largest position of a part, for each axis whose positions a call
    may give and the decision reads. `given`: the arguments of positions that the kernel reads.
    """

    kernel: KernelPlan
    queries: Sequence[BlockExtreme]
    query_prologue: Sequence[Assign]
    keys: Sequence[BlockExtreme]
    key_prologue: Sequence[Assign]
    reads: frozenset[str]
    positions: Mapping[str, tuple[str, str]]
    given: Sequence[str]

    @property
    def shifted(self) -> bool:
        """True if the kernel needs the query offset."""
        return bool(self.reads & {"q_idx", "q_row", "q_shift"}) or "q" in self.positions


@dataclass(frozen=True, kw_only=True)
class ListKernel:
    """The kernel that decides, for each block of one axis, which blocks of the other axis it visits.

    `starts` names which of the starts of its sequence's queries and keys a packed program reads. `loaded` are the
    extremes of the program's own block, `gathered` those of the blocks of the other axis. `grids` computes the extremes
    of grids in a vector of blocks of the other axis, and `may` and `must` decide these blocks.
    """

    kernel: KernelPlan
    starts: Sequence[str]
    loaded: Sequence[Reduction]
    gathered: Sequence[Reduction]
    grids: Sequence[Assign]
    may: Code | None
    must: Code
    reads: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ListsPlan(InMode):
    """The kernels that make a variant's tables of blocks, and what its op allocates.

    `shifted`: the kernels that decide blocks need the query offset. `grids`: the tensors whose elements they read, as
    text.
    """

    schedule: Schedule
    extremes: ExtremesKernel | None
    query_lists: ListKernel
    key_lists: ListKernel
    legend: str
    per_batch: bool
    per_head: bool
    has_offset: bool
    shifted: bool
    decided: frozenset[str]
    grids: str

    @property
    def reads_queries(self) -> bool:
        """True if the decision reads the positions of a block's queries."""
        return bool(self.decided & _QUERY_BOUNDS)

    @property
    def reads_keys(self) -> bool:
        return bool(self.decided & _KEY_BOUNDS)

    @property
    def module(self) -> str:
        """The name of the file."""
        return f"block_{self.schedule}"

    @property
    def helpers(self) -> frozenset[str]:
        kernels = [x.kernel for x in (self.extremes, self.query_lists, self.key_lists) if x is not None]
        return frozenset().union(*(kernel.helpers for kernel in kernels))


def lists_plan(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> ListsPlan | None:
    """The plan of the kernels that make a variant's tables; None if its schedule needs no tables."""
    decision, schedule = analysis.decision, analysis.schedule
    if schedule not in TABLES or decision is None or variant.mask is None:
        return None
    read = expr.names(variant.mask)
    decided = expr.names(decision.may, decision.must)
    grids = tuple(x for x in decision.grids if {x.minimum.name, x.maximum.name} & decided)
    decision = replace(decision, grids=grids)
    decided |= expr.names(*(end for x in grids for end in x.ends))
    reads = [x for x in decision.reads if {x.minimum.name, x.maximum.name} & decided]
    of_queries = [x for x in reads if x.of_queries]
    of_keys = [x for x in reads if not x.of_queries]
    loads = expr.loads(decision.may, decision.must, *(x.load for x in grids))
    uniform = reads_packed_queries(variant, loads, sign.mode)
    shifted = sign.offset and (bool(decided & _QUERY_BOUNDS) or uniform)
    builder = _Builder(variant, sign, schedule, decided, shifted=shifted)
    return ListsPlan(
        schedule=schedule,
        mode=sign.mode,
        extremes=builder.extremes(of_queries, of_keys),
        query_lists=builder.lists("query", of_queries, of_keys, decision),
        key_lists=builder.lists("key", of_keys, of_queries, decision),
        legend=_legend(variant, sign.mode, reads, schedule, decided),
        per_batch="b" in read,
        per_head=analysis.tables_per_head,
        has_offset=sign.offset,
        shifted=shifted,
        decided=decided,
        grids=" and ".join(f"`{name}`" for name in dict.fromkeys(x.load.tensor for x in grids)),
    )


class _Builder:
    def __init__(
        self, variant: Variant, sign: Signatures, schedule: Schedule, decided: Set[str], *, shifted: bool
    ) -> None:
        """`decided`: the names that the decision reads; `shifted`: whether it needs the query offset."""
        self.variant = variant
        self.sign = sign
        self.schedule = schedule
        self.decided = decided
        self.shifts = shifted
        self.offset = ["Q_OFFSET_PER_BATCH"] if sign.offset else []
        self.packed = sign.mode is Mode.PACKED
        axes = [axis for axis, bounds in (("q", _QUERY_BOUNDS), ("kv", _KEY_BOUNDS)) if decided & bounds]
        segmented = sign.mode is Mode.SEGMENTED
        self.positions = {a: self._position_extremes(a) for a in axes} if segmented else {}

    def extremes(self, of_queries: Sequence[Extreme], of_keys: Sequence[Extreme]) -> ExtremesKernel | None:
        reads = [*of_queries, *of_keys]
        if not reads:
            return None
        values = [x.value for x in reads]
        queries, keys = (
            Lowering(tensors=self.variant.tensors, query_axis=axis, mode=self.sign.mode) for axis in (0, 1)
        )
        query_extremes, key_extremes = (
            [
                block_extreme(x, code, extreme_dtype(self.variant, x), self.decided)
                for x, code in zip(found, lowering.own_shape([x.value for x in found]), strict=True)
            ]
            for lowering, found in ((queries, of_queries), (keys, of_keys))
        )
        axes = self._axes(reads)
        read = expr.names(*values) | {f"{axis}_idx" for axis in self.positions}
        codes = [x.value for x in (*query_extremes, *key_extremes)]
        read |= uses(codes, queries.prologue, keys.prologue) & {"q_shift"}
        shifted = bool(read & {"q_idx", "q_row", "q_shift"})
        positions = [name for name in self.sign.position_names if f"{name.partition('_')[0]}_idx" in read]
        args = [
            *self.sign.own_tensors(values),
            *self.sign.positions(positions),
            *([pointers(*CU_SEQLENS)] if self.packed else ()),
            *self._loadable(values, offset=shifted),
            *extreme_pointers(reads, self.decided),
            *self._position_pointers(),
            *self.sign.own_strides(values),
            *self.sign.position_strides(positions),
            *self._lengths(axes),
            *self._other_lengths(values, axes),
            *([numbers("num_seqs")] if self.packed else ()),
            *_heads(values, shifted=shifted, by_batch=not self.packed),
            *self.sign.padding(values),
        ]
        kernel = KernelPlan(
            name=f"{self.sign.symbol}_extremes",
            args=args,
            constants=[
                *(self.offset if shifted else []),
                *self._loads(values),
                *(["POSITIONS"] if positions else []),
                *(["SEARCH_STEPS"] if self.packed else []),
                "PART",
                "PARTS",
            ],
            helpers=frozenset(queries.helpers | keys.helpers),
        )
        return ExtremesKernel(
            kernel=kernel,
            queries=query_extremes,
            query_prologue=queries.prologue,
            keys=key_extremes,
            key_prologue=keys.prologue,
            reads=read,
            positions=self.positions,
            given=positions,
        )

    @staticmethod
    def _axes(reads: Sequence[Extreme]) -> list[str]:
        """The axes along which some values vary."""
        return sorted({"q" if x.of_queries else "kv" for x in reads}, reverse=True)

    def _lengths(self, axes: Sequence[str]) -> list[ArgGroup]:
        """The axes' lengths. A packed program reads them itself, and takes the number of parts of all sequences."""
        names = tuple(f"{axis}_{'parts' if self.packed else 'len'}" for axis in axes)
        return [numbers(*names)] if names else []

    def _other_lengths(self, values: Sequence[Expr], axes: Sequence[str]) -> list[ArgGroup]:
        """The lengths that values read of axes along which no value varies. A packed program reads them itself."""
        if self.packed:
            return []
        read = expr.names(*values)
        names = [name for name in expr.LENGTH_NAMES if name in read and name.removesuffix("_len") not in axes]
        return [ArgGroup(names=(name,), host=_LENGTHS[name], varies=True) for name in names]

    def _position_extremes(self, axis: str) -> tuple[str, str]:
        """The names of the smallest and largest position of a part; empty if the decision does not read them."""
        ends = ((f"{axis}_first", "min"), (f"{axis}_last", "max"))
        least, most = (f"{axis}_position_{extreme}" if end in self.decided else "" for end, extreme in ends)
        return least, most

    def _position_pointers(self) -> list[ArgGroup]:
        names = [name for of_axis in self.positions.values() for name in of_axis if name]
        return [pointers(*names)] if names else []

    def lists(self, axis: str, own: Sequence[Extreme], others: Sequence[Extreme], decision: Decision) -> ListKernel:
        may, must = decision.may, decision.must
        vectors = frozenset(v.name for x in (*own, *others) for v in (x.minimum, x.maximum))
        vectors |= frozenset(v.name for x in decision.grids for v in (x.minimum, x.maximum))
        lowering = Lowering(tensors=self.variant.tensors, query_axis=0, mode=self.sign.mode, vectors=vectors)
        may_code, must_code = lowering.own_shape([may, must])
        grids = [_grid_statement(x, axis, lowering) for x in decision.grids]
        roots = [may, must, *(x.load for x in decision.grids)]
        args = [
            *extreme_pointers(sorted((*own, *others), key=lambda x: not x.of_queries), self.decided),
            *self._position_pointers(),
            *self.sign.own_tensors(roots),
            *self.sign.sequences(),
            *self._loadable(roots, offset=self.shifts),
            pointers(*TABLES[self.schedule]),
            *self.sign.own_strides(roots),
            *self._lengths(self._axes((*own, *others)) if self.packed else ("q", "kv")),
            *(
                [ArgGroup(names=("num_others_most",), host=listed(("other_blocks",)), varies=True)]
                if self._fixed_room
                else ()
            ),
            *_heads(roots, shifted=self.shifts or self.packed),
            *self.sign.padding(roots),
        ]
        names = uses(may_code, must_code, grids, lowering.prologue)
        of_parts = {axis for axis in ("q", "kv") if any(x.of_queries == (axis == "q") for x in (*own, *others))}
        starts = [f"{axis}_start" for axis in ("q", "kv") if axis in of_parts or f"{axis}_start" in names]
        part = ["PART"] if own or others else []
        offset = self.offset if self.shifts else []
        room = ["OWN_ROOM", "FILL"] if self.schedule is Schedule.LISTS else []
        kernel = KernelPlan(
            name=f"{self.sign.symbol}_{axis}_{self.schedule}",
            args=args,
            constants=[
                *offset,
                *self._loads(roots),
                *(["POSITIONS"] if self.positions else []),
                *room,
                "BLOCK_M",
                "BLOCK_N",
                *part,
                "CHUNK",
            ],
            prologue=lowering.prologue,
            helpers=frozenset(lowering.helpers),
        )
        return ListKernel(
            kernel=kernel,
            starts=starts,
            loaded=reductions(self.variant, own, self.decided),
            gathered=reductions(self.variant, others, self.decided),
            grids=grids,
            may=None if may == TRUE else may_code,
            must=must_code,
            reads=expr.names(*roots),
        )

    @property
    def _fixed_room(self) -> bool:
        """True if every list has room for the longest list: packed sequences differ in their numbers of blocks."""
        return self.packed and self.schedule is Schedule.LISTS

    def _loadable(self, roots: Sequence[Expr], *, offset: bool) -> list[ArgGroup]:
        """The numbers of a call that may also be passed as a pointer."""
        shift = [numbers("q_offset")] if offset and self.offset else []
        return [*shift, *self.sign.own_scalars(roots)]

    def _loads(self, roots: Sequence[Expr]) -> list[str]:
        return ["SCALARS_LOADED"] if self.sign.own_scalars(roots) else []


def _grid_statement(x: GridRead, axis: str, lowering: Lowering) -> Assign:
    """The extremes of a grid in the program's own block along `axis`, and in each of several blocks of the other."""
    own, others = (x.queries, x.keys) if axis == "query" else (x.keys, x.queries)
    extremes = lowering.grid_extremes(x.load, own, others)
    return Assign(targets=(x.minimum.name, x.maximum.name), values=(extremes,), level=Level.UNIFORM)


def _heads(roots: Sequence[Expr], *, shifted: bool, by_batch: bool = True) -> list[ArgGroup]:
    """The arguments by which a program finds its batch row and head, if values or an offset per batch row need them.

    Without `by_batch`, the number of the program is that of its head.
    """
    read = expr.names(*roots)
    heads = ArgGroup(names=("num_heads",), host=listed(("list_heads",)), varies=True)
    group = numbers("group_size")
    wanted = by_batch and (shifted or bool(read & {"b", "h", "hkv"}))
    return [*([heads] if wanted else []), *([group] if "hkv" in read else [])]


def _legend(variant: Variant, mode: Mode, reads: Sequence[Extreme], schedule: Schedule, decided: Set[str]) -> str:
    assert variant.mask is not None
    formula = FormulaPrinter()
    rows = [("keep", formula.text(variant.mask))]
    for x in reads:
        kind = extreme_dtype(variant, x)
        rows.append((x.minimum.name, f"[B, H, parts]  {kind}, smallest {formula.text(x.value)} of each part"))
        rows.append((x.maximum.name, f"[B, H, parts]  {kind}, largest"))
    rows = [row for row in rows if row[0] == "keep" or row[0] in decided]
    packed = mode is Mode.PACKED
    cu_seqlens = CU_SEQLENS if reads else ()
    rows += [(x, PACKED_SHAPES[x]) for x in (*cu_seqlens, *PACKED_TABLES) if packed]
    rows += [(x, (SHAPES | PACKED_SHAPES if packed else SHAPES)[x]) for x in TABLES[schedule]]
    width = max(len(symbol) for symbol, _ in rows)
    return "\n".join(legend_row(symbol, text, width) for symbol, text in rows)
