"""What a plan of calls over several GPUs must know about a variant: the keys that a block of queries visits, as numpy
source, and which of its tensors have which dims."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from codegen.analysis.intervals import Decision, decide
from codegen.analysis.ranges import Range
from codegen.analysis.schedule import Schedule
from codegen.analysis.shifts import is_shift_invariant, looks_back
from codegen.analysis.token_order import by_row
from codegen.ir.expr import Expr, Load, Op, Type, Var, loads, names, walk
from codegen.ir.printers import jnp_printer
from codegen.ir.printers.array import ArrayPrinter
from codegen.plan.ops.references import computes_with, may_regroup
from codegen.plan.variant import VariantPlan
from codegen.spec.dims import names_of

_UNKNOWN_TO_NUMPY = frozenset({"sigmoid", "erf", "relu"})


@dataclass(frozen=True, kw_only=True)
class WorkSource:
    """The work of a variant, printed.

    Attributes:
        ranges: first and end of the keys that a block visits, without overlap; () if a table gives them.
        may_visit: whether a block visits a block of keys; "" if `ranges` say it or every block is visited.
        values: source of each value whose extremes `may_visit` reads, and whether it has one element per query.
        tensors: dims of the variant's own tensors, by keyword. keywords: name in this source -> keyword of the op.
        untrained: those of them that hold floats and have no gradient.
        scalars: type of each of the variant's own scalars, and arguments of its check, by keyword.
        needs: keywords of the arguments that the source reads.
    """

    ranges: tuple[tuple[str, str], ...] = ()
    may_visit: str = ""
    values: tuple[tuple[str, bool], ...] = ()
    tensors: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    scalars: dict[str, tuple[str, dict[str, float | bool]]] = field(default_factory=dict)
    keywords: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    dropout: bool = False
    by_heads: bool = True
    by_batch: bool = False
    by_row: bool = False
    by_length: bool = False
    by_queries: bool = False
    sized_by_keys: bool = False
    shift_invariant: bool = False
    looks_back: bool = False

    @property
    def uses_numpy(self) -> bool:
        """True if the source calls numpy."""
        texts = [self.may_visit, *(text for text, _ in self.values), *(end for pair in self.ranges for end in pair)]
        return any("np." in text for text in texts)


def work_source(planned: VariantPlan) -> WorkSource:
    """The work of a variant; `planned`: its dense kernels."""
    variant, analysis = planned.variant, planned.analysis
    tensors: dict[str, tuple[str | int, ...]] = {
        variant.keywords.get(name, name): tensor.dims for name, tensor in variant.tensors.items()
    }
    if variant.sink:
        tensors["sink"] = ("h",)
    if variant.decay:
        tensors["g"] = ("b", "kv_idx", "h")
    sizes = names_of(tuple(variant.tensors.values()))
    base = WorkSource(
        tensors=tensors,
        untrained=tuple(
            variant.keywords.get(name, name)
            for name, tensor in variant.tensors.items()
            if tensor.element is Type.FLOAT and not tensor.grad
        ),
        scalars={
            variant.keywords.get(name, name): (scalar.type.value, scalar.limits)
            for name, scalar in variant.scalars.items()
        },
        dropout=variant.dropout,
        by_heads=may_regroup(variant, "h", "hkv"),
        by_batch=not may_regroup(variant, "b"),
        by_row=by_row(replace(planned.written, dropout=False)) is not None,
        by_length=computes_with(variant, "kv_len"),
        by_queries=computes_with(variant, "q_len") or "q_len" in sizes,
        sized_by_keys="kv_len" in sizes,
        shift_invariant=is_shift_invariant(planned.written),
        looks_back=looks_back(planned.written),
    )
    extremes: dict[str, str] = {}
    printer = _printer(extremes, frozenset(variant.scalars))
    if analysis.schedule is Schedule.CLOSED_FORM:
        other = analysis.keys.other
        found = [analysis.keys.main, *([] if other is None else [other])]
        read = [bound for each in found for bound in (each.first, each.end) if bound is not None]
        work = replace(base, ranges=tuple(_range(each, printer) for each in found))
    elif (decision := _decision(planned)) is not None and names(decision.may):
        read = [decision.may, *(extreme.value for extreme in decision.reads)]
        for i, extreme in enumerate(decision.reads):
            extremes[extreme.minimum.name], extremes[extreme.maximum.name] = f"at.least[{i}]", f"at.most[{i}]"
        values = tuple((printer.text(extreme.value), extreme.of_queries) for extreme in decision.reads)
        work = replace(base, may_visit=printer.text(decision.may), values=values)
    else:
        return base
    if any(isinstance(node, Op) and node.op in _UNKNOWN_TO_NUMPY for e in read for node in walk(e)):
        return base
    own = {*variant.tensors, *variant.scalars}
    reads = sorted({x.tensor for e in read for x in loads(e)} | {name for e in read for name in names(e) & own})
    keywords = {name: variant.keywords.get(name, name) for name in reads}
    renamed = {name: keyword for name, keyword in keywords.items() if name != keyword}
    return replace(work, keywords=renamed, needs=tuple(keywords.values()))


def _decision(planned: VariantPlan) -> Decision | None:
    """The decision of the kernels, but for grids: a plan counts a block that depends on one as visited."""
    decision = planned.analysis.decision
    if decision is None or not decision.grids or planned.variant.mask is None:
        return decision
    return decide(planned.variant.mask, grids=False)


def _range(found: Range, printer: ArrayPrinter) -> tuple[str, str]:
    first = "0" if found.first is None else printer.text(found.first)
    return first, "at.kv_len" if found.end is None else printer.text(found.end)


@dataclass
class _WorkPrinter(ArrayPrinter):
    """A printer whose variables and tensors are attributes of `at`."""

    extremes: dict[str, str] = field(default_factory=dict)

    def is_number(self, e: Expr) -> bool:  # noqa: ARG002  # numpy's functions take numbers as well
        return False

    def variable(self, e: Var) -> str:
        return self.extremes.get(e.name, f"at.{e.name}")

    def load(self, e: Load) -> str:
        return f"at.{e.tensor}[{', '.join(self.indices(e))}]" if e.indices else f"at.{e.tensor}"

    def _clamped(self, tensor: str, axis: int, index: Expr) -> str:
        return f"np.clip({self.text(index)}, 0, at.{tensor}.shape[{axis}] - 1)"


def _printer(extremes: dict[str, str], scalars: frozenset[str]) -> _WorkPrinter:
    known = jnp_printer(lambda *_: False)
    return _WorkPrinter(
        module="np",
        exact_dims=known.exact_dims,
        float_cast=lambda text: f"np.asarray({text}, np.float64)",
        int_cast=lambda text: f"np.asarray({text}).astype(np.int64)",
        extremes=extremes,
        scalars=scalars,
    )
