"""What the op templates print: arguments, checks, launches, gradients and the reference of a variant."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from codegen.analysis.call_modes import KEY_IDS, KEY_LENGTHS, PADDING, POSITIONAL, QUERY_IDS, InMode, Mode, packed_dims
from codegen.analysis.token_order import ByRow, by_row
from codegen.ir import expr
from codegen.plan import hopper, op_gradients
from codegen.plan.arguments import Argument, mask_arguments, own_arguments
from codegen.plan.block_table_launches import ListsOp, launch_arguments, lists_op, parameter_name
from codegen.plan.frameworks import Framework
from codegen.plan.op_gradients import Buffer, Grid
from codegen.plan.references import computes_with, formula_of, reference_text
from codegen.plan.signature import (
    CU_SEQLENS,
    PACKED_TABLES,
    positions_read,
    reads_pairs,
    reads_query_position,
    uses_tanh,
)
from codegen.plan.variant import VariantPlan
from codegen.spec.model import Variant
from codegen.spec.symbols import function_symbol

TOKEN_IDS = (QUERY_IDS.name, KEY_IDS.name, KEY_LENGTHS.name)
"""Tensors of a segmented variant that are every op's."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The positional arguments of each launch, in the order of the kernel's signature."""

    fwd: str
    dq: str
    dkdv: str
    hopper_bwd: str
    row_inputs: str
    row_numbers: str


@dataclass(frozen=True, kw_only=True)
class OpPlan(InMode):
    """The variant as its op sees it, in one mode of calls."""

    framework: Framework
    name: str
    symbol: str
    arguments: Sequence[Argument]
    buffers: Sequence[Buffer]
    gradients: Mapping[str, str]  # tensor argument -> source of its gradient
    grids: Sequence[Grid]
    placed: Sequence[str]
    launches: Launches
    mask_arguments: Sequence[Argument]
    mask_only: Sequence[str]  # tensors without a gradient, as only the mask reads them
    has_offset: bool
    loadable: Sequence[str]  # numbers that the kernels also take by pointer
    uses_tanh: bool
    reads_pairs: bool
    decay: bool
    dropout: bool
    fuses_backward: bool  # whether its backward may be one kernel
    shares_work: bool  # whether programs of Hopper's ask a counter for their work, in the forward or the backward
    positions: Sequence[str]
    formula: str
    reference_score: str
    reference_mask: str
    reference_reads: frozenset[str]
    lists: ListsOp | None
    by_row: ByRow | None
    splits_batch: bool
    splits_heads: bool

    @property
    def tensors(self) -> list[Argument]:
        return [a for a in self.arguments if a.is_tensor]

    @property
    def float_tensors(self) -> list[Argument]:
        return [a for a in self.tensors if a.is_float]

    @property
    def scalars(self) -> list[Argument]:
        return [a for a in self.arguments if not a.is_tensor]

    @property
    def reads_lengths(self) -> bool:
        """Whether it reads how many keys a batch row has, which only a segmented call gives."""
        return "kv_len" in self.reference_reads or any(a.name == KEY_LENGTHS.name for a in self.tensors)

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
        positions = [f"{name}: Tensor | None" for name in self.given_positions]
        offset = ["row_offset: int", "row_offsets: Tensor | None"] if self.has_offset else []
        dropout = ["dropout_p: float", f"seed: {self.framework.number('int')}"] if self.dropout else []
        own = [a.parameter(self.framework) for a in self.scalars]
        tables = ["block_tables: list[Tensor]"] if self.tables else []
        return [*own, *dropout, *self._cu_seqlens, *positions, *offset, "scale: float", "options: CallOptions", *tables]

    @property
    def given_positions(self) -> Sequence[str]:
        """The positions that a pass takes: those that kernels read, or both to see that they are in order."""
        return ("q_positions", "kv_positions") if self.marks_disorder else self.positions

    @property
    def marks_disorder(self) -> bool:
        """Whether the forward looks at positions as tensors hold them; in JAX what is around it does."""
        return self.by_row is not None and self.segmented and self.framework is Framework.TORCH

    @property
    def unread_positions(self) -> list[str]:
        """Those that no kernel of the backward reads."""
        return [name for name in self.given_positions if name not in self.positions]

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
        return [parameter_name(p) for p in self.table_parameters]

    @property
    def all_table_parameters(self) -> list[str]:
        """Parameters of the function that makes the tables of all passes, behind q, k and v."""
        extremes = self.lists.extreme_parameters if self.lists is not None and self.lists.extremes is not None else ()
        both = dict.fromkeys([*extremes, *self.table_parameters])
        return sorted(both, key=lambda p: (p.startswith("row_offset"), p.startswith("cu_seqlens")))

    @property
    def all_table_values(self) -> list[str]:
        return [parameter_name(p) for p in self.all_table_parameters]

    @property
    def schedule_imports(self) -> list[str]:
        """What the launches import from the runtime's schedules."""
        reduces = self.lists is not None and self.lists.extremes is not None
        names = [*(["SEGMENTS"] if self.segmented else []), *(["POSITIONS", "least_block"] if reduces else [])]
        return sorted([*names, "pass_table"], key=lambda name: (name.islower(), name))

    @property
    def table_makers(self) -> list[str]:
        """Those of the runtime's functions that launch kernels of its own, or allocate lists."""
        lists = ["list_blocks"] if self.lists is not None and not self.lists.ranges else []
        counter = ["work_counter"] if self.shares_work else []
        return [*(["block_sequences"] if self.packed else []), *lists, *counter]

    @property
    def tiles_tokens(self) -> str:
        """The argument from which the number of sequences is guessed."""
        return "cu_seqlens_q" if self.packed else "q_segment_ids" if self.segmented else ""

    @property
    def tiles_call(self) -> str:
        return f"tiles_of({', '.join(filter(None, ('q', 'v', self.tiles_tokens, 'options')))})"

    @property
    def launched_table_values(self) -> list[str]:
        """The first arguments of the function that makes the tables of a pass."""
        reduces = self.lists is not None and self.lists.extremes is not None
        return ["q", "k", *self.table_values, *(["block_extremes", "part"] if reduces else [])]

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
    def counts_head_parts(self) -> bool:
        """Whether how many sums a head has depends on the family of the backward."""
        return any("head_parts" in b.allocate for b in self.buffers)

    @property
    def saved_options(self) -> list[str]:
        """Those of the parameters that every pass takes which are tensors."""
        return [parameter_name(p) for p in self._numbers if "Tensor" in p and "list" not in p]

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
        return ", ".join(parameter_name(p) for p in self._numbers)

    @property
    def function(self) -> str:
        """What the op's module calls it."""
        return function_symbol(self.name)

    @property
    def keywords(self) -> str:
        """The arguments that callers know by another name, as keyword arguments of the decorator that says so."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.arguments if a.public)

    @property
    def mask_keywords(self) -> str:
        """Those of them that the op's schedule takes."""
        return ", ".join(f'{a.keyword}="{a.name}"' for a in self.mask_arguments if a.public)

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
        return {a.flag: 3 + i for i, a in enumerate(self.tensors) if a.trained}

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
        return f"{a.name}.new_empty({a.name}.shape if {a.flag} else (0,))"

    @property
    def saved_numbers(self) -> str:
        """Those of them that are no tensors."""
        return ", ".join(parameter_name(p) for p in self._numbers if "Tensor" not in p)

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
            return f"d{a.name} if {a.flag} else None"
        return f"d{a.name}" if a.name in self.gradients else "None"

    @property
    def forward_type(self) -> str:
        return f"tuple[{', '.join(['Tensor'] * (3 if self.decay else 2))}]"

    @property
    def backward_type(self) -> str:
        own = "Tensor" if self.framework is Framework.TORCH else "Tensor | Array"
        return f"tuple[{', '.join([*['Tensor'] * 3, *[own] * len(self.gradients)])}]"

    @property
    def uses_arrays(self) -> bool:
        """Whether the launches of JAX name its arrays."""
        return "jnp." in " ".join([*self.gradients.values(), *(grid.source for grid in self.grids)])

    @property
    def table_dtypes(self) -> list[str]:
        """What the launches of JAX import for the types of tables and extremes."""
        if self.lists is None:
            return []
        extremes = self.lists.extremes
        found = set() if extremes is None else {dtype for *_, dtype in extremes.buffers}
        narrow = self.lists.ranges or "int32" in found or (extremes is not None and extremes.position_buffers)
        return [*(["INT32"] if narrow else []), *(["wide_int"] if "int64" in found else [])]

    @property
    def parameter_names(self) -> list[str]:
        """The parameters of the forward."""
        return [parameter_name(p) for p in self._forward_parameters]

    @property
    def backward_parameter_names(self) -> list[str]:
        """The parameters of the backward."""
        return [parameter_name(p) for p in self._backward_parameters]

    @property
    def trained_places(self) -> str:
        """Source of the places among the arguments of the forward of the tensors whose gradients the backward gives."""
        places = {name: self.parameter_names.index(name) for name in ("q", "k", "v", *self.gradients)}
        flags = self.flag_of
        return ", ".join(f"{i} if {flags[name]} else None" if name in flags else str(i) for name, i in places.items())

    @property
    def reference_parameters(self) -> str:
        """The parameters of the forward, for the reference, which takes no notice of tiles and tables."""
        unread = {"options", "block_tables", *self.unread_positions}
        if not self.has_offset:
            unread |= {"row_offset", "row_offsets"}
        return _only(self._forward_parameters, set(self.parameter_names) - unread)

    @property
    def reference_values(self) -> str:
        """The arguments of the reference but `scale` and `return_lse`."""
        own = [a.name for a in self.arguments if a.name not in TOKEN_IDS and a.name != PADDING.name]
        dropout = ["dropout_p", "seed"] if self.dropout else []
        given = [name for name in TOKEN_IDS if name in self.parameter_names]
        tokens = [*given, PADDING.name] if self.segmented else list(CU_SEQLENS) if self.packed else []
        named = [f"{name}={name}" for name in (*own, *dropout, *tokens, *self.positions)]
        offset = ["q_offset=row_offset if row_offsets is None else row_offsets"] if self.has_offset else []
        return ", ".join(["q", "k", "v", *named, *offset])

    @property
    def folded_axes(self) -> dict[str, int | None]:
        """The axis that batch rows, packed tokens or sequences lie along, for each tensor that has one.

        Empty where rows must not be regrouped; None where tokens lie along two axes.
        """
        if not self.splits_batch:
            return {}
        rows = 1 if self.packed else 0
        found: dict[str, int | None] = {"q": 0, "k": 0, "v": 0, "o": 0, "do": 0, "lse": rows, "dlse": rows}
        if self.decay:
            found["decay"] = 2 if self.packed else 0
        found |= {parameter_name(p): 0 for p in self._numbers if "Tensor" in p and "list" not in p}
        if self.segmented:
            found |= {name: 0 for name in TOKEN_IDS if name in self.parameter_names}
        for name, dims in self.tensor_dims.items():
            tokens = [axis for axis, dim in enumerate(dims) if self.packed and dim in POSITIONAL]
            if tokens:
                found[name] = tokens[0] if len(tokens) == 1 else None
            elif "b" in dims:
                found[name] = dims.index("b")
        return found

    @property
    def integer_names(self) -> str:
        """Source of the names of its own tensors that the kernels read as int32."""
        return ", ".join(f'"{a.name}"' for a in self.tensors if a.dtypes == '("int32",)' and a.name not in TOKEN_IDS)

    @property
    def undeclared(self) -> dict[str, str]:
        """The float tensors without a gradient, and why they have none."""
        return {a.name: a.no_gradient for a in self.tensors if a.no_gradient}

    @property
    def reductions(self) -> list[str]:
        """The functions that make gradients of gathered sums."""
        used = " ".join(self.gradients.values())
        used += " ".join(grid.source for grid in self.grids)
        names = (
            "packed_row",
            "place_pairs",
            "place_sums",
            "reduce_gradient",
            "scalar_array",
            "sequence_of_rows",
            "sums_by_sequence",
        )
        return [name for name in names if name in used]

    @property
    def reads_batch(self) -> bool:
        """Whether mask or score of the reference name the batch row or sequence."""
        return re.search(r"\bb\b", f"{self.reference_score} {self.reference_mask}") is not None

    @property
    def scalar_checks(self) -> list[str]:
        """The functions that check its scalars."""
        return sorted({f"check_{a.required}" for a in self.scalars})

    @property
    def tensor_dims(self) -> dict[str, tuple[str | int, ...]]:
        """The dims of the variant's own tensors, as calls of this mode give them."""
        return {a.name: packed_dims(a.dims) if self.packed else a.dims for a in self.tensors if a.name not in TOKEN_IDS}

    @property
    def own_numbers(self) -> list[str]:
        """Scalars of the variant, and of dropout."""
        own = [a.name for a in self.scalars if a.name != PADDING.name]
        return [*own, *(["dropout_p", "seed"] if self.dropout else [])]

    @property
    def flag_of(self) -> dict[str, str]:
        """Trained tensor -> the parameter that says whether a call wants its gradient."""
        return {a.name: a.flag for a in self.tensors if a.trained}

    @property
    def runtime_checks(self) -> list[str]:
        """What the op imports from the runtime's checks."""
        used = " ".join(text for a in self.arguments for text in (a.check, a.packed_check))
        own = [
            n for n in ("FLOAT_DTYPES", "at_least", "check_float", "check_int", "computed", "size_of") if f"{n}" in used
        ]
        return sorted([*own, *(["check_dropout_p"] if self.dropout else [])])


def _only(parameters: Sequence[str], used: Collection[str]) -> str:
    """The parameters of a function that reads some of them: unused ones get an underscore, those at the end no name."""
    last = max(i for i, p in enumerate(parameters) if parameter_name(p) in used)
    named = [p if parameter_name(p) in used else f"_{p}" for p in parameters[: last + 1]]
    return ", ".join([*named, "*_: object"])


def _read_by_score(variant: Variant) -> set[str]:
    return set() if variant.score is None else {load.tensor for load in expr.loads(variant.score)}


def op_plan(planned: VariantPlan, framework: Framework) -> OpPlan:
    """Everything the templates of a framework's op need besides the kernels."""
    variant = planned.variant
    reference = reference_text(variant, planned.mode, framework)
    arguments = own_arguments(variant, planned.terms)
    of_mask = mask_arguments(variant, arguments)
    fuses_backward = hopper.fuses_backward(planned)
    kernels = (planned.hopper_fwd, planned.hopper_bwd, planned.hopper_bwd_wide)
    return OpPlan(
        framework=framework,
        arguments=arguments,
        name=variant.name,
        symbol=planned.symbol,
        mode=planned.mode,
        buffers=op_gradients.buffers(planned.terms, planned.mode, in_keys=fuses_backward),
        gradients=op_gradients.gradients(variant, planned.terms, planned.mode, framework, in_keys=fuses_backward),
        grids=op_gradients.grids(variant, planned.terms, planned.mode, framework),
        placed=op_gradients.placed(planned.terms),
        launches=Launches(
            fwd=launch_arguments(planned.fwd),
            dq=launch_arguments(planned.dq),
            dkdv=launch_arguments(planned.dkdv),
            # What it reads of rows is padded to whole blocks.
            hopper_bwd=re.sub(r"\b(lse|delta)\b", r"row_\1", launch_arguments(planned.hopper_bwd)),
            row_inputs="".join(f"{group.host}, " for group in planned.hopper_delta.inputs),
            row_numbers="".join(f"{group.host}, " for group in planned.hopper_delta.numbers),
        ),
        mask_arguments=of_mask,
        mask_only=[name for name in variant.tensors if name not in _read_by_score(variant)],
        has_offset=reads_query_position(variant, planned.mode),
        loadable=planned.fwd.loadable,
        uses_tanh=uses_tanh(variant),
        reads_pairs=reads_pairs(variant),
        decay=variant.decay,
        dropout=variant.dropout,
        fuses_backward=fuses_backward,
        shares_work=any(kernel.shares_work for kernel in kernels),
        positions=positions_read(variant) if planned.mode is Mode.SEGMENTED else (),
        formula=formula_of(variant),
        reference_score=reference.score,
        reference_mask=reference.mask,
        reference_reads=reference.reads,
        lists=lists_op(variant, planned.lists, of_mask, framework),
        by_row=by_row(planned.written),
        splits_batch=not computes_with(variant, "b"),
        splits_heads=not computes_with(variant, "h") and not computes_with(variant, "hkv"),
    )
