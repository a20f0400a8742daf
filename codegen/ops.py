"""What the op templates print: arguments, checks, launches, gradients and the reference of a variant."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from codegen import expr, op_gradients
from codegen.blocks import Schedule
from codegen.emit import exact_index
from codegen.expr import Level, Var, level
from codegen.lists import ListsPlan
from codegen.model import GradientTerm, KernelPlan
from codegen.modes import Mode
from codegen.op_gradients import Buffer, Grid
from codegen.plan import VariantPlan
from codegen.printers import ROWS, ArrayPrinter, FormulaPrinter, torch_printer
from codegen.signature import (
    CU_SEQLENS,
    PACKED_TABLES,
    TABLES,
    positions_read,
    reads_pairs,
    reads_query_position,
    tensor_reads,
    uses_tanh,
)
from codegen.spec import ArchSpec, PassConfigs, ScalarSpec, Variant
from codegen.text import docstring


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One of the variant's own arguments: a tensor, the sink, the log-decay, or a scalar.

    `shape` is Python source for a tuple of expected sizes, an entry `at_least(n)` where longer is fine, `packed_shape`
    the same in a packed call; `limits` are further arguments of a scalar's check; `doc` is its line in the op's
    docstring. Of a `trained` one the backward is told whether a call wants the gradient. Each pair of a query and a key
    may have an index of its own into one of the `tile_axes`.
    """

    name: str
    kind: str  # tensor | scalar
    annotation: str
    dims: tuple[str | int, ...] = ()
    shape: str = ""
    packed_shape: str = ""
    dtypes: str = ""
    limits: str = ""
    trained: bool = False
    tile_axes: tuple[int, ...] = ()
    doc: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.kind == "tensor"

    @property
    def required(self) -> str:
        """The annotation where the argument is there."""
        return self.annotation.split(" ")[0]

    @property
    def check(self) -> str:
        """The statement that checks it in a dense call."""
        return self._check(self.shape, self.tile_axes)

    @property
    def packed_check(self) -> str:
        """That of a packed call."""
        kept = packed_axes(self.dims)
        return self._check(self.packed_shape, tuple(kept.index(axis) for axis in self.tile_axes if axis in kept))

    def _check(self, shape: str, tile_axes: tuple[int, ...]) -> str:
        if self.is_tensor:
            narrow = f", tile_axes={tile_axes}" if tile_axes else ""
            return f'{self.name} = check_tensor(NAME, "{self.name}", {self.name}, {shape}, {self.dtypes}, q{narrow})'
        return f'{self.name} = check_{self.required}(NAME, "{self.name}", {self.name}{self.limits})'

    @property
    def of_sequence(self) -> str:
        """What the reference of one packed `sequence` gets for it."""
        if not _has_position(self.dims):
            return self.name
        return f"sequence.own({', '.join([self.name, *(_quoted(d) for d in self.dims)])})"


def _has_position(dims: Sequence[str | int]) -> bool:
    return any(dim in _POSITIONS for dim in dims)


def packed_axes(dims: Sequence[str | int]) -> list[int]:
    """The axes a tensor keeps in a packed call: beside an axis of positions there is none of batch rows."""
    return [axis for axis, dim in enumerate(dims) if not (dim == "b" and _has_position(dims))]


def _quoted(dim: str | int) -> str:
    return f'"{dim}"' if isinstance(dim, str) else str(dim)


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The positional arguments of each launch, in the order of the kernel's signature."""

    fwd: str
    dq: str
    dkdv: str


@dataclass(frozen=True, kw_only=True)
class ExtremesLaunch:
    """The launch of the kernel that reduces tensors to the extremes of parts, and the buffers it fills."""

    kernel: str
    args: str
    has_offset: bool
    of_queries: bool
    of_keys: bool
    positions: Sequence[str]
    buffers: Sequence[tuple[str, str, str]]  # name, number of parts, dtype
    position_buffers: Sequence[tuple[str, str, str]]  # name, number of parts, None without this argument

    @property
    def names(self) -> str:
        return ", ".join(name for name, *_ in (*self.buffers, *self.position_buffers))


@dataclass(frozen=True, kw_only=True)
class ListsOp:
    """How the op makes its tables of blocks: launches, and which of its arguments the mask reads."""

    module: str
    ranges: bool
    tables: Sequence[str]
    extremes: ExtremesLaunch | None
    query_kernel: str
    key_kernel: str
    kernel_args: str
    per_batch: bool
    per_head: bool
    has_offset: bool
    reads_queries: bool
    packed: bool
    positions: Sequence[str]
    arguments: Sequence[Argument]

    @property
    def by_batch(self) -> bool:
        """Whether tables are made for each batch row, whatever the offset; packed sequences always have their own."""
        return self.per_batch or self.packed

    @property
    def parameters(self) -> list[str]:
        """Parameters of the function that makes a pass' table, behind q and k."""
        return _own_parameters(self.kernel_args, self.arguments, self.positions, self._offset(self.reads_queries))

    @property
    def extreme_parameters(self) -> list[str]:
        """Those of the function that reduces tensors."""
        assert self.extremes is not None
        used = [*(f"{name}: Tensor" for name in CU_SEQLENS), *self.positions]
        return _own_parameters(self.extremes.args, self.arguments, used, self._offset(self.extremes.has_offset))

    def _offset(self, used: bool) -> list[str]:
        rows = ["row_offsets: Tensor | None"] if self.has_offset and (used or not self.by_batch) else []
        return ["row_offset: int", *rows] if used else rows

    @property
    def values(self) -> list[str]:
        return [_name(p) for p in self.parameters]

    @property
    def extreme_values(self) -> list[str]:
        return [_name(p) for p in self.extreme_parameters]


def _own_parameters(
    launched: str, arguments: Sequence[Argument], others: Sequence[str], offset: Sequence[str]
) -> list[str]:
    """The parameters of a function that makes a launch: of the variant's arguments and others those that it names."""
    named = set(re.findall(r"(?<![.\w])\w+", launched))  # not the attributes
    own = [f"{a.name}: {a.required}" for a in arguments]
    return [*(p for p in (*own, *others) if _name(p) in named), *offset]


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """The variant as its op sees it, in one mode of calls."""

    name: str
    symbol: str
    mode: Mode
    arguments: Sequence[Argument]
    buffers: Sequence[Buffer]
    gradients: Mapping[str, str]  # tensor argument -> source of its gradient
    grids: Sequence[Grid]
    placed: Sequence[str]
    launches: Launches
    mask_arguments: Sequence[Argument]
    has_offset: bool
    uses_tanh: bool
    reads_pairs: bool
    decay: bool
    dropout: bool
    positions: Sequence[str]
    formula: str
    reference_score: str
    reference_mask: str
    reference_reads: frozenset[str]
    lists: ListsOp | None

    @property
    def tensors(self) -> list[Argument]:
        return [a for a in self.arguments if a.is_tensor]

    @property
    def scalars(self) -> list[Argument]:
        return [a for a in self.arguments if not a.is_tensor]

    @property
    def reference_ignores(self) -> list[str]:
        """Parameters of the plain reference that its mathematics does not read."""
        reads = self.reference_reads
        read = {
            "q_offset": self.has_offset,
            "q_positions": bool(reads & {"q_idx", "kv_idx"}),
            "kv_positions": "kv_idx" in reads,
            "first_batch": "b" in reads or self.dropout,
        }
        return [name for name, is_read in read.items() if not is_read]

    @property
    def _numbers(self) -> list[str]:
        """Parameters that every pass takes after the tensors."""
        positions = [f"{name}: Tensor | None" for name in self.positions]
        offset = ["row_offset: int", "row_offsets: Tensor | None"] if self.has_offset else []
        dropout = ["dropout_p: float", "seed: int"] if self.dropout else []
        own = [f"{a.name}: {a.required}" for a in self.scalars]
        tables = ["block_tables: list[Tensor]"] if self.tables else []
        return [*own, *dropout, *self._cu_seqlens, *positions, *offset, "scale: float", "config_words: str", *tables]

    @property
    def packed(self) -> bool:
        return self.mode is Mode.PACKED

    @property
    def segmented(self) -> bool:
        return self.mode is Mode.SEGMENTED

    @property
    def tables(self) -> list[str]:
        """What tells the kernels of a pass their blocks, and those they visit, made by other kernels."""
        return [*(PACKED_TABLES if self.packed else ()), *(self.lists.tables if self.lists is not None else ())]

    def tables_text(self, prefix: str) -> str:
        """Their names as the target of an assignment."""
        names = [prefix + name for name in self.tables]
        return ", ".join(names) if len(names) > 1 else f"({names[0]},)"

    @property
    def table_parameters(self) -> list[str]:
        """Parameters of the function that makes the tables of a pass, behind q and k."""
        return [*self._cu_seqlens, *(self.lists.parameters if self.lists is not None else ())]

    @property
    def table_values(self) -> list[str]:
        return [_name(p) for p in self.table_parameters]

    @property
    def all_table_parameters(self) -> list[str]:
        """Parameters of the function that makes the tables of all passes, behind q, k and v."""
        extremes = self.lists.extreme_parameters if self.lists is not None and self.lists.extremes is not None else ()
        both = dict.fromkeys([*extremes, *self.table_parameters])
        return sorted(both, key=lambda p: (p.startswith("row_offset"), p.startswith("cu_seqlens")))

    @property
    def all_table_values(self) -> list[str]:
        return [_name(p) for p in self.all_table_parameters]

    @property
    def schedule_imports(self) -> list[str]:
        """What the launches import from the runtime's schedules."""
        lists = self.lists
        names = [
            *(["SEGMENTS"] if self.segmented else []),
            *(["POSITIONS"] if lists is not None and lists.extremes is not None else []),
            *(["block_sequences"] if self.packed else []),
            *(["least_block"] if lists is not None and lists.extremes is not None else []),
            *(["list_blocks"] if lists is not None and not lists.ranges else []),
        ]
        return sorted([*names, "pass_table"], key=lambda name: (name.islower(), name))

    @property
    def _cu_seqlens(self) -> list[str]:
        return [f"{name}: Tensor" for name in CU_SEQLENS] if self.packed else []

    @property
    def counts_sequences(self) -> bool:
        """Whether the backward names the number of packed sequences."""
        used = " ".join([*self.gradients.values(), *(grid.source for grid in self.grids)])
        return self.packed and (self.decay or "num_seqs" in used)

    @property
    def uses_kv_len(self) -> bool:
        """Whether the backward names the number of keys: of packed sequences few kernels need that of all."""
        sources = [*self.gradients.values(), *(g.source for g in self.grids), *(b.allocate for b in self.buffers)]
        used = re.search(r"\bkv_len\b", " ".join([self.launches.dq, self.launches.dkdv, *sources]))
        return not self.packed or self.decay or used is not None

    @property
    def saved_options(self) -> list[str]:
        """Those of the parameters that every pass takes which are tensors."""
        return [_name(p) for p in self._numbers if "Tensor" in p and "list" not in p]

    @property
    def _forward_parameters(self) -> list[str]:
        return [
            "q: Tensor",
            "k: Tensor",
            "v: Tensor",
            *(f"{a.name}: {a.required}" for a in self.tensors),
            *self._numbers,
        ]

    @property
    def _backward_parameters(self) -> list[str]:
        tensors = [f"{name}: Tensor" for name in (*self.saved, "o", "lse")]
        return ["do: Tensor", "dlse: Tensor | None", *tensors, *self._numbers, *(f"{n}: bool" for n in self.flags)]

    @property
    def parameters(self) -> str:
        """Parameters of the forward: q, k, v, the variant's own tensors and scalars, what every pass takes."""
        return ", ".join(self._forward_parameters)

    @property
    def backward_parameters(self) -> str:
        return ", ".join(self._backward_parameters)

    @property
    def fake_parameters(self) -> str:
        return _only(self._forward_parameters, {"q", "v", *(["g"] if self.decay else [])})

    @property
    def fake_backward_parameters(self) -> str:
        return _only(self._backward_parameters, {"q", "k", "v", *self.gradients, *self.flags})

    @property
    def tensor_values(self) -> str:
        return ", ".join(["q", "k", "v", *(a.name for a in self.tensors)])

    @property
    def number_values(self) -> str:
        """The arguments for what every pass takes after the tensors."""
        return ", ".join(_name(p) for p in self._numbers)

    @property
    def own_names(self) -> list[str]:
        """The arguments that only some variants have."""
        return [*(a.name for a in self.arguments), *(["dropout_p", "seed"] if self.dropout else [])]

    @property
    def own_keywords(self) -> str:
        return "".join(f"{name}={name}, " for name in self.own_names)

    @property
    def flags(self) -> dict[str, int]:
        """Whether a call wants the gradient of each trained tensor: the parameter, and the input of the forward."""
        return {f"grad_{a.name.lower()}": 3 + i for i, a in enumerate(self.tensors) if a.trained}

    @property
    def backward_numbers(self) -> str:
        """The arguments of the backward after the tensors."""
        return ", ".join([self.number_values, *self.flags])

    @property
    def fake_gradients(self) -> str:
        """Gradients of the variant's own tensors, for a trace: shapes without values."""
        return "".join(f", {self._fake_gradient(a)}" for a in self.tensors if a.name in self.gradients)

    @staticmethod
    def _fake_gradient(a: Argument) -> str:
        if not a.trained:
            return f"torch.empty_like({a.name})"
        return f"{a.name}.new_empty({a.name}.shape if grad_{a.name.lower()} else (0,))"

    @property
    def saved_numbers(self) -> str:
        """Those of them that are no tensors."""
        return ", ".join(_name(p) for p in self._numbers if "Tensor" not in p)

    @property
    def saved(self) -> list[str]:
        """Tensors that the backward needs besides o and lse."""
        return ["q", "k", "v", *(a.name for a in self.tensors), *(["decay"] if self.decay else [])]

    @property
    def gradient_names(self) -> list[str]:
        return ["dq", "dk", "dv", *(f"d{name}" for name in self.gradients)]

    @property
    def returned_gradients(self) -> str:
        """What autograd's backward returns: one entry per input of the forward, None where it has no gradient."""
        own = [self._returned(a) for a in self.tensors]
        return ", ".join(["dq", "dk", "dv", *own, *["None"] * len(self._numbers)])

    def _returned(self, a: Argument) -> str:
        if a.trained:
            return f"d{a.name} if grad_{a.name.lower()} else None"
        return f"d{a.name}" if a.name in self.gradients else "None"

    @property
    def forward_type(self) -> str:
        return f"tuple[{', '.join(['Tensor'] * (3 if self.decay else 2))}]"

    @property
    def backward_type(self) -> str:
        return f"tuple[{', '.join(['Tensor'] * len(self.gradient_names))}]"

    @property
    def reductions(self) -> list[str]:
        """The functions that make gradients of gathered sums."""
        used = " ".join(self.gradients.values())
        used += " ".join(grid.source for grid in self.grids)
        names = ("packed_row", "place_pairs", "place_sums", "reduce_gradient", "sequence_of_rows", "sums_by_sequence")
        return [name for name in names if name in used]

    @property
    def runtime_checks(self) -> list[str]:
        """What the op imports from the runtime's checks."""
        used = " ".join(text for a in self.arguments for text in (a.check, a.packed_check))
        own = [n for n in ("FLOAT_DTYPES", "at_least", "check_float", "check_int") if n in used]
        return sorted([*own, *(["check_dropout_p"] if self.dropout else [])])


def _name(parameter: str) -> str:
    return parameter.partition(":")[0]


def _only(parameters: Sequence[str], used: Collection[str]) -> str:
    """The parameters of a function that reads some of them: unused ones get an underscore, those at the end no name."""
    last = max(i for i, p in enumerate(parameters) if _name(p) in used)
    named = [p if _name(p) in used else f"_{p}" for p in parameters[: last + 1]]
    return ", ".join([*named, "*_: object"])


def _launch(kernel: KernelPlan) -> str:
    return ", ".join(group.host for group in kernel.args)


def op_plan(planned: VariantPlan) -> OpPlan:
    """Everything the torch op's templates need besides the kernels."""
    variant = planned.variant
    printer = torch_printer(
        lambda tensor, axis, index: _reference_exact(variant, tensor, axis, index),
        numbers=frozenset(variant.scalars),
        row_dims=lambda tensor, axis: variant.tensors[tensor].dims[axis] in _POSITIONS,
    )
    score, mask = _reference_score(variant, printer), _reference_mask(variant, printer)
    reads = frozenset(re.findall(r"\w+", f"{score} {mask}")) & {"b", "h", "hkv", *ROWS, *ROWS.values()}
    arguments = _arguments(variant, planned.terms)
    mask_arguments = _mask_arguments(variant, arguments)
    return OpPlan(
        arguments=arguments,
        name=variant.name,
        symbol=planned.symbol,
        mode=planned.mode,
        buffers=op_gradients.buffers(planned.terms, planned.mode),
        gradients=op_gradients.gradients(variant, planned.terms, planned.mode),
        grids=op_gradients.grids(planned.terms, planned.mode),
        placed=op_gradients.placed(planned.terms),
        launches=Launches(fwd=_launch(planned.fwd), dq=_launch(planned.dq), dkdv=_launch(planned.dkdv)),
        mask_arguments=mask_arguments,
        has_offset=reads_query_position(variant),
        uses_tanh=uses_tanh(variant),
        reads_pairs=reads_pairs(variant),
        decay=variant.decay,
        dropout=variant.dropout,
        positions=positions_read(variant) if planned.mode is Mode.SEGMENTED else (),
        formula=_formula(variant),
        reference_score=score,
        reference_mask=mask,
        reference_reads=reads | ({"b", "h", *ROWS.values()} if variant.decay else set()),
        lists=_lists_op(variant, planned.lists, mask_arguments),
    )


def _extremes_launch(lists: ListsPlan) -> ExtremesLaunch | None:
    if lists.extremes is None:
        return None
    plan = lists.extremes
    return ExtremesLaunch(
        kernel=plan.kernel.name,
        args=_launch(plan.kernel),
        has_offset="Q_OFFSET_PER_BATCH" in plan.kernel.constants,
        of_queries=bool(plan.queries),
        of_keys=bool(plan.keys),
        positions=plan.given,
        buffers=[
            (name, parts, f"torch.{value.dtype}")
            for values, parts in ((plan.queries, "q_parts"), (plan.keys, "kv_parts"))
            for value in values
            for name in (value.minimum, value.maximum)
            if name
        ],
        position_buffers=[
            (name, f"{axis}_parts", f"{axis}_positions")
            for axis, names in plan.positions.items()
            for name in filter(None, names)
        ],
    )


def _mask_arguments(variant: Variant, arguments: Sequence[Argument]) -> list[Argument]:
    """Those that decide which blocks are visited."""
    if variant.mask is None:
        return []
    read = expr.names(variant.mask) | {load.tensor for load in expr.loads(variant.mask)}
    return [a for a in arguments if a.name in read]


def _reference_exact(variant: Variant, tensor: str, axis: int, index: expr.Expr) -> bool:
    """Whether an index of the reference cannot leave its axis: what was packed has one batch row, whatever `b` is."""
    dims = variant.tensors[tensor].dims
    return exact_index(variant.tensors, tensor, axis, index) and axis in packed_axes(dims)


def _lists_op(variant: Variant, lists: ListsPlan | None, mask_arguments: Sequence[Argument]) -> ListsOp | None:
    if lists is None:
        return None
    return ListsOp(
        module=lists.module,
        ranges=lists.schedule is Schedule.RANGES,
        tables=TABLES[lists.schedule],
        extremes=_extremes_launch(lists),
        query_kernel=lists.query_lists.kernel.name,
        key_kernel=lists.key_lists.kernel.name,
        kernel_args=_launch(lists.query_lists.kernel),
        per_batch=lists.per_batch,
        per_head=lists.per_head,
        has_offset=lists.has_offset,
        reads_queries=lists.has_offset and lists.reads_queries,
        packed=lists.packed,
        positions=[f"{name}: Tensor | None" for name in positions_read(variant)] if lists.segmented else [],
        arguments=mask_arguments,
    )


def _reference_mask(variant: Variant, printer: ArrayPrinter) -> str:
    if variant.mask is None:
        return ""
    text = printer.text(variant.mask)
    return f"torch.tensor({text}, device=q.device)" if printer.is_number(variant.mask) else text


def _reference_score(variant: Variant, printer: ArrayPrinter) -> str:
    if variant.score is None:
        return ""
    text = printer.text(variant.score)
    # One that does not read the product has not its shape, and no path for zero gradients of q and k.
    return text if expr.SCORE in expr.names(variant.score) else f"0.0 * score + ({text})"


def _formula(variant: Variant) -> str:
    """The mathematics of the variant, as lines of a docstring."""
    formula = FormulaPrinter()
    lines = ["score = scale * q @ k^T"]
    if variant.score is not None:
        lines.append(f"score = {formula.text(variant.score)}")
    if variant.decay:
        lines.append("score = score + G[q_idx] - G[kv_idx], G the cumulative sum of g along the sequence")
    if variant.mask is not None:
        lines.append(f"keep = {formula.text(variant.mask)}")
    total = "(sum(exp(score)) + exp(sink))" if variant.sink else "sum(exp(score))"
    lines.append(f"o = dropout(exp(score) / {total}) @ v" if variant.dropout else f"o = exp(score) @ v / {total}")
    return "\n".join(docstring(line, indent=8, hanging=12) for line in lines)


_SIZES = {"b": "q.shape[0]", "h": "q.shape[1]", "hkv": "k.shape[1]"}
_POSITIONS = {"q_idx": "row_offset + q.shape[2]", "kv_idx": "k.shape[2]"}
_FURTHEST = f"max({', '.join(_POSITIONS.values())})"
# The same in a packed call, where q and k are `[total, H, D]`.
_PACKED_SIZES = _SIZES | {"b": "cu_seqlens_q.shape[0] - 1", "q_idx": "q.shape[0]", "kv_idx": "k.shape[0]"}
_TOTALS = {"q_idx": "total_q", "kv_idx": "total_k"}


def _arguments(variant: Variant, terms: Sequence[GradientTerm]) -> list[Argument]:
    atomic = {t.tensor for t in terms if t.atomic}
    found = []
    for spec in variant.tensors.values():
        sizes = [_axis_size(variant, spec.name, axis, dim) for axis, dim in enumerate(spec.dims)]
        dims = ", ".join(str(d) for d in spec.dims)
        packed = f", packed `[{_packed_text(spec.dims)}]`" if _has_position(spec.dims) else ""
        example = f", such as `{FormulaPrinter().text(spec.example)}`" if spec.example is not None else ""
        trained = "; differentiable" if spec.grad else ""
        if spec.name in atomic:
            trained += ", its gradient added with fp32 atomics, in any order: not deterministic"
        found.append(
            Argument(
                name=spec.name,
                kind="tensor",
                annotation="Tensor | None",
                dims=spec.dims,
                shape=_tuple(sizes),
                packed_shape=_packed_shape(spec.dims),
                dtypes=f'("{spec.dtype}",)',
                trained=spec.grad,
                tile_axes=_tile_axes(variant, spec.name),
                doc=f"{spec.dtype} `[{dims}]`{packed}{example}{trained}.",
            )
        )
    if variant.decay:
        doc = (
            "log-decay `[B, P, Hq]`, packed `[total_k, Hq]`, natural log, any float dtype; P covers all rows and the "
            "offset; differentiable."
        )
        shape = f"(q.shape[0], at_least({_FURTHEST}), q.shape[1])"
        found.append(_float_argument("g", ("b", "kv_idx", "h"), shape, doc))
    if variant.sink:
        doc = "`[Hq]`, any float dtype: a logit per query head in the softmax denominator only; differentiable."
        found.append(_float_argument("sink", ("h",), "(q.shape[1],)", doc))
    for scalar in variant.scalars.values():
        kind = scalar.type.value
        limits = "".join(
            f", {name}={value!r}"
            for name, value in (("minimum", scalar.minimum), ("maximum", scalar.maximum))
            if value is not None
        )
        doc = f"{kind}{_range_text(scalar)}."
        found.append(Argument(name=scalar.name, kind="scalar", annotation=f"{kind} | None", limits=limits, doc=doc))
    return found


def _range_text(scalar: ScalarSpec) -> str:
    low, high = scalar.minimum, scalar.maximum
    if low is not None and high is not None:
        text = f" from {low} to {high}"
    else:
        text = f", at least {low}" if low is not None else f", at most {high}" if high is not None else ""
    return text if scalar.example is None else f"{text}, such as {scalar.example}"


def _float_argument(name: str, dims: tuple[str | int, ...], shape: str, doc: str) -> Argument:
    return Argument(
        name=name,
        kind="tensor",
        annotation="Tensor | None",
        dims=dims,
        shape=shape,
        packed_shape=_packed_shape(dims),
        dtypes="FLOAT_DTYPES",
        doc=doc,
    )


def _tuple(sizes: Sequence[str]) -> str:
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _packed_shape(dims: Sequence[str | int]) -> str:
    """The sizes in a packed call; where positions index a named dim, only the device knows how far they reach."""
    kept = [dims[axis] for axis in packed_axes(dims)]
    return _tuple([str(d) if isinstance(d, int) else _PACKED_SIZES.get(d, "at_least(1)") for d in kept])


def _packed_text(dims: Sequence[str | int]) -> str:
    return ", ".join(str(_TOTALS.get(str(dims[axis]), dims[axis])) for axis in packed_axes(dims))


def _tile_axes(variant: Variant, tensor: str) -> tuple[int, ...]:
    indices = [load.indices for load in tensor_reads(variant) if load.tensor == tensor]
    return tuple(sorted({axis for of in indices for axis, index in enumerate(of) if level(index) is Level.TILE}))


def _axis_size(variant: Variant, tensor: str, axis: int, dim: str | int) -> str:
    """The size an axis must have: exact for heads and batch, at least the furthest position where one indexes it."""
    if isinstance(dim, int):
        return str(dim)
    if dim in _SIZES:
        return _SIZES[dim]
    needed = {_POSITIONS[dim]} if dim in _POSITIONS else set()
    for load in tensor_reads(variant):
        index = load.indices[axis] if load.tensor == tensor else None
        if isinstance(index, Var) and index.name in _POSITIONS:
            needed.add(_POSITIONS[index.name])
    if not needed:
        return "at_least(1)"
    size = needed.pop() if len(needed) == 1 else _FURTHEST
    # Positions of the call's own reach no further than the caller likes; a dim of positions has an element per row.
    return f"at_least({size})" if dim in _POSITIONS else f"at_least({size} if q_positions is None else 1)"


Rows = Sequence[tuple[str, Sequence[tuple[int, int, int, int, int]]]]
"""Pass -> rows."""


@dataclass(frozen=True, kw_only=True)
class ArchTable:
    """One architecture's default tiles as rows of `(largest head_dim, block_m, block_n, num_warps, num_stages)`.

    `short`: of sequences up to a length.
    """

    name: str
    half: Rows
    float32: Rows
    short: Sequence[tuple[int, Rows]]


def arch_tables(archs: Mapping[str, ArchSpec]) -> list[ArchTable]:
    """Default tiles by architecture, in a fixed order."""
    return [_arch_table(arch) for _, arch in sorted(archs.items())]


def _arch_table(arch: ArchSpec) -> ArchTable:
    def rows(configs: PassConfigs) -> Rows:
        return [
            (p.value, [(d, c.block_m, c.block_n, c.num_warps, c.num_stages) for d, c in sorted(by_dim.items())])
            for p, by_dim in sorted(configs.items())
        ]

    short = [(length, rows(configs)) for length, configs in sorted(arch.short.items())]
    return ArchTable(name=arch.name, half=rows(arch.half), float32=rows(arch.float32), short=short)
