"""The plan of a variant's op in one framework: arguments, launches, gradients, reference. `source` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.analysis.band_widths import band_width
from codegen.analysis.call_modes import KEY_IDS, KEY_LENGTHS, PADDING, QUERY_IDS, Mode, packed_dims
from codegen.analysis.gradients import atomic_modes
from codegen.analysis.grids import RunLength
from codegen.analysis.mask_ranges import ONE
from codegen.analysis.token_order import ByRow, by_row
from codegen.ir import expr
from codegen.ir.expr import Var
from codegen.plan import kernel_files
from codegen.plan.code.host import HostCode, host, listed, names_of, sum_of_scalars
from codegen.plan.kernels.kernel import KernelPlan
from codegen.plan.kernels.signature import CU_SEQLENS, DROPOUT_ORIGIN, PACKED_TABLES
from codegen.plan.kernels.token_layout import InMode
from codegen.plan.kernels.variant_reads import (
    grid_runs,
    positions_read,
    reads_pairs,
    reads_query_position,
    tile_runs,
    uses_tanh,
)
from codegen.plan.ops.arguments import Argument, mask_arguments, own_arguments
from codegen.plan.ops.block_table_launches import OFFSETS, ListsOp, lists_op
from codegen.plan.ops.frameworks import Framework
from codegen.plan.ops.gradients import Buffer, Grid, OwnGradients
from codegen.plan.ops.launch_arguments import LaunchGroup, launch_groups
from codegen.plan.ops.parameters import Parameter, names, tensor
from codegen.plan.ops.references import ReferenceText, formula_of, may_regroup, reference_text
from codegen.plan.variant import VariantPlan
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised

TOKEN_IDS = (QUERY_IDS.name, KEY_IDS.name, KEY_LENGTHS.name)
"""Tensors that every op has in a segmented call, beside the variant's own."""

_OF_HEAD_GROUPS = {"dk": "head_groups.dk", "dv": "head_groups.dv", "group_size": "head_groups.size"}
"""What a backward of keys gets of the groups into which the launches split query heads that share a key head."""

_PADDED_ROWS = {"lse": "row_lse", "delta": "row_delta"}
"""The vectors of rows of Hopper's backward are padded to whole blocks."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The positional arguments of each launch, in the order of the kernel's signature."""

    fwd: Sequence[LaunchGroup]
    fwd_fp8: Sequence[LaunchGroup]
    dq: Sequence[LaunchGroup]
    dkdv: Sequence[LaunchGroup]
    distances: Sequence[LaunchGroup]
    hopper_bwd: Sequence[LaunchGroup]
    split_keys: Sequence[LaunchGroup]
    split_rows: Sequence[LaunchGroup]
    row_inputs: Sequence[HostCode]
    row_numbers: Sequence[HostCode]


@dataclass(frozen=True, kw_only=True)
class OpPlan(InMode):
    """The op of a variant in one framework and one mode of calls."""

    framework: Framework
    name: str
    symbol: str
    arguments: Sequence[Argument]
    buffers: Sequence[Buffer]
    gradients: Mapping[str, HostCode]  # tensor argument -> its gradient
    grids: Sequence[Grid]
    placed: Sequence[str]
    launches: Launches
    mask_arguments: Sequence[Argument]
    mask_only: Sequence[str]  # tensors without a gradient, as only the mask reads them
    has_offset: bool
    loadable: Sequence[str]  # numbers that the kernels also take by pointer
    band_keys: HostCode | None  # keys of the band that a row sees, if the call gives its width
    grid_runs: HostCode | None  # lengths of the runs of positions that share elements of grids
    tile_runs: HostCode | None  # lengths of the runs of positions whose blocks the mask chooses
    uses_tanh: bool
    reads_pairs: bool
    decay: bool
    dropout: bool
    fuses_backward: bool  # one kernel may compute the whole backward
    shares_work: bool  # Hopper's programs fetch work from a counter, in the forward or the backward
    positions: Sequence[str]
    formula: str
    reference: ReferenceText
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
        """True if the op reads the number of keys of a batch row, which only a segmented call gives."""
        return "kv_len" in self.reference.index_names or any(a.name == KEY_LENGTHS.name for a in self.tensors)

    @property
    def reference_ignores(self) -> list[str]:
        """Parameters of the plain reference that its mathematics does not read."""
        reads = self.reference.index_names
        read = {
            "q_offset": self.has_offset,
            "q_positions": bool(reads & {"q_idx", "kv_idx"}),
            "kv_positions": "kv_idx" in reads,
            "first_batch": "b" in reads or self.dropout,
        }
        return [name for name, is_read in read.items() if not is_read]

    @property
    def options(self) -> list[Parameter]:
        """Parameters that every pass takes: tensors, numbers, and the tables of blocks."""
        tables = [Parameter("block_tables", "list[Tensor]")] if self.tables else []
        return [*self.option_tensors, *self.numbers, *tables]

    @property
    def option_tensors(self) -> list[Parameter]:
        """The tensors that say where tokens lie."""
        positions = [tensor(name, optional=True) for name in self.given_positions]
        offsets = [tensor("row_offsets", optional=True)] if self.has_offset else []
        return [*self._cu_seqlens, *positions, *offsets]

    @property
    def numbers(self) -> list[Parameter]:
        """The numbers that every pass takes."""
        words = [Parameter(name, "int | Tensor") for name in ("seed", *DROPOUT_ORIGIN)]
        dropout = [Parameter("dropout_p", "float"), *words] if self.dropout else []
        offset = [Parameter("row_offset", "int")] if self.has_offset else []
        last = [Parameter("scale", "float"), Parameter("options", "CallOptions")]
        return [*(a.parameter for a in self.scalars), *dropout, *offset, *last]

    @property
    def given_positions(self) -> Sequence[str]:
        """The positions that a pass takes: those that kernels read, or both if the forward checks their order."""
        return ("q_positions", "kv_positions") if self.marks_disorder else self.positions

    @property
    def marks_disorder(self) -> bool:
        """True if the forward checks the order of given positions. In JAX the code around the forward does."""
        return self.by_row is not None and self.layout.gives_positions

    @property
    def unread_positions(self) -> list[str]:
        """The given positions that no kernel of the backward reads."""
        return [name for name in self.given_positions if name not in self.positions]

    @property
    def tables(self) -> list[str]:
        """The tables of a pass, made by other kernels: which blocks its programs own and visit."""
        return [
            *(PACKED_TABLES if self.layout.has_sequences else ()),
            *(self.lists.tables if self.lists is not None else ()),
        ]

    @property
    def table_parameters(self) -> list[Parameter]:
        """Parameters of the function that makes the tables of passes, behind q, k and v."""
        found = dict.fromkeys([*self._cu_seqlens, *(self.lists.parameters if self.lists is not None else ())])
        if self.tiles_tokens:
            found |= {tensor(self.tiles_tokens): None}
        return sorted(found, key=lambda p: (p.name in OFFSETS, p.name in CU_SEQLENS))

    @property
    def table_values(self) -> list[str]:
        return names(self.table_parameters)

    @property
    def tiles_tokens(self) -> str:
        """The argument from which the length of a sequence is estimated, to choose tiles."""
        return "cu_seqlens_q" if self.layout.has_sequences else "q_segment_ids" if self.layout.gives_positions else ""

    @property
    def _cu_seqlens(self) -> list[Parameter]:
        return [tensor(name) for name in CU_SEQLENS] if self.layout.has_sequences else []

    @property
    def takes_row_strides(self) -> bool:
        """True if launches pass the strides between batch rows of tables, ids or positions."""
        return self.layout.gives_positions or (self.lists is not None and not self.layout.has_sequences)

    @property
    def counts_sequences(self) -> bool:
        """True if the backward needs the number of packed sequences."""
        return self.layout.has_sequences and self.decay

    @property
    def uses_kv_len(self) -> bool:
        """True if the backward needs the number of keys; in a packed call few kernels need the total."""
        launched = frozenset().union(*(group.names for group in (*self.launches.dq, *self.launches.dkdv)))
        return (
            not self.layout.has_sequences
            or self.decay
            or "kv_len" in launched | names_of(b.allocate for b in self.buffers)
        )

    @property
    def gradient_reads(self) -> frozenset[str]:
        """The variables and functions that the gradients of the variant's own tensors read."""
        return names_of([*self.gradients.values(), *(grid.source for grid in self.grids)])

    @property
    def counts_head_parts(self) -> bool:
        """True if the number of partial sums per head depends on the family of the backward."""
        return any("head_parts" in b.allocate.names for b in self.buffers)

    @property
    def sums(self) -> list[str]:
        """What the backward's launch returns behind dq, dk and dv: buffers, and the tables that place their sums."""
        tables = [name for name in ("block_seqs", "head_seqs") if name in self.gradient_reads]
        sinks = [name for name in ("dsink_heads",) if name in self.gradient_reads]
        kept = [b.name for b in self.buffers if b.name in self.gradient_reads]
        return [*kept, *sinks, *(["dg"] if self.decay else []), *tables]

    @property
    def computes_gradients(self) -> bool:
        """True if the gradients of the variant's own tensors are computed from `sums`; else they are the `sums`."""
        return [source.text for source in self.gradients.values()] != self.sums

    @property
    def forward_parameters(self) -> list[Parameter]:
        """Parameters of the forward: q, k, v, the variant's own tensors, what every pass takes."""
        return [*map(tensor, ("q", "k", "v", *(a.name for a in self.tensors))), *self.options]

    @property
    def gradient_parameters(self) -> list[Parameter]:
        """Parameters of the backward."""
        tensors = map(tensor, ("q", "k", "v", *(a.name for a in self.tensors)))
        results = map(tensor, ("o", "lse", *(["decay"] if self.decay else [])))
        last = [Parameter("block_tables", "list[Tensor]")] if self.tables else []
        last += [Parameter(a.flag, "bool") for a in self.tensors if a.trained]
        first = [tensor("do"), tensor("dlse", optional=True)]
        return [*first, *tensors, *self.option_tensors, *results, *self.numbers, *last]

    @property
    def own_names(self) -> list[str]:
        """The arguments that only some variants have."""
        dropout = ["dropout_p", "seed", "dropout_origin"] if self.dropout else []
        return [*(a.name for a in self.arguments), *dropout]

    @property
    def parameter_names(self) -> list[str]:
        """The parameters of the forward."""
        return names(self.forward_parameters)

    @property
    def undeclared(self) -> dict[str, str]:
        """The float tensors without a gradient, and why they have none."""
        return {a.name: a.no_gradient for a in self.tensors if a.no_gradient}

    @property
    def reads_batch(self) -> bool:
        """True if mask or score of the reference read the batch row or sequence."""
        return "b" in self.reference.reads

    @property
    def tensor_dims(self) -> dict[str, tuple[str | int, ...]]:
        """The dims of the variant's own tensors in calls of this mode."""
        return {
            a.name: packed_dims(a.dims) if self.layout.has_sequences else a.dims
            for a in self.tensors
            if a.name not in TOKEN_IDS
        }

    @property
    def own_numbers(self) -> list[str]:
        """Scalars of the variant, and of dropout."""
        own = [a.name for a in self.scalars if a.name != PADDING.name]
        return [*own, *(["dropout_p", "seed", *DROPOUT_ORIGIN] if self.dropout else [])]

    @property
    def flag_of(self) -> dict[str, str]:
        """Trained tensor -> the parameter that says whether a call wants its gradient."""
        return {a.name: a.flag for a in self.tensors if a.trained}


def _read_by_score(variant: Variant) -> set[str]:
    return set() if variant.score is None else {load.tensor for load in expr.loads(variant.score)}


def _groups_if_any(kernel: KernelPlan | None, renamed: Mapping[str, str]) -> Sequence[LaunchGroup]:
    """The arguments of a kernel that only some variants have."""
    return [] if kernel is None else launch_groups(kernel, renamed=renamed)


def op_plan(planned: VariantPlan, framework: Framework) -> OpPlan:
    """The plan of a variant's op in a framework."""
    variant = planned.variant
    reference = reference_text(variant, planned.mode, framework)
    arguments = own_arguments(variant, atomic_modes(symbolised(planned.written)))
    of_mask = mask_arguments(variant, arguments)
    fuses_backward = kernel_files.fuses_backward(planned)
    kernels = (planned.hopper_fwd, planned.hopper_bwd, planned.hopper_bwd_wide)
    own = OwnGradients(
        variant=variant, terms=planned.terms, mode=planned.mode, framework=framework, in_keys=fuses_backward
    )
    return OpPlan(
        framework=framework,
        arguments=arguments,
        name=variant.name,
        symbol=planned.symbol,
        mode=planned.mode,
        buffers=own.buffers(),
        gradients=own.gradients(),
        grids=own.grids(),
        placed=own.placed(),
        launches=Launches(
            fwd=launch_groups(planned.fwd),
            fwd_fp8=[] if planned.hopper_fwd_fp8 is None else launch_groups(planned.hopper_fwd_fp8),
            dq=launch_groups(planned.dq),
            dkdv=launch_groups(planned.dkdv, renamed=_OF_HEAD_GROUPS),
            distances=[] if planned.distances is None else launch_groups(planned.distances),
            hopper_bwd=launch_groups(planned.hopper_bwd, renamed=_OF_HEAD_GROUPS | _PADDED_ROWS),
            split_keys=_groups_if_any(planned.hopper_split_keys, _OF_HEAD_GROUPS | _PADDED_ROWS),
            split_rows=_groups_if_any(planned.hopper_split_rows, _PADDED_ROWS),
            row_inputs=[group.host for group in planned.hopper_delta.inputs],
            row_numbers=[group.host for group in planned.hopper_delta.numbers],
        ),
        mask_arguments=of_mask,
        mask_only=[name for name in variant.tensors if name not in _read_by_score(variant)],
        has_offset=reads_query_position(variant, planned.mode),
        loadable=planned.fwd.loadable,
        band_keys=_band_keys(planned),
        grid_runs=_lengths(grid_runs(variant, planned.mode)),
        tile_runs=_lengths(tile_runs(symbolised(planned.written))),
        uses_tanh=uses_tanh(variant),
        reads_pairs=reads_pairs(variant),
        decay=variant.decay,
        dropout=variant.dropout,
        fuses_backward=fuses_backward,
        shares_work=any(kernel.shares_work for kernel in kernels),
        positions=positions_read(variant) if planned.mode is Mode.SEGMENTED else (),
        formula=formula_of(variant),
        reference=reference,
        lists=lists_op(variant, planned.lists, of_mask),
        by_row=by_row(planned.written),
        splits_batch=may_regroup(variant, "b"),
        splits_heads=may_regroup(variant, "h", "hkv"),
    )


def _lengths(lengths: Sequence[RunLength]) -> HostCode | None:
    """Source of some numbers, literals and scalars; None for none."""
    sources = [each.name if isinstance(each, Var) else str(int(each.value)) for each in lengths]
    return listed(sources) if sources else None


def _band_keys(planned: VariantPlan) -> HostCode | None:
    """Source of how many keys of a band a row sees, if a dense call gives the width; None for a width in memory."""
    width = band_width(planned.analysis, planned.variant.scalars) if planned.mode is Mode.DENSE else None
    factors = {term.name: factor for term, factor in (width or {}).items() if isinstance(term, Var)}
    if not factors:
        return None
    keys = sum_of_scalars(factors, (width or {}).get(ONE, 0))
    return host("None if backend.is_loaded({}) else {}", listed(factors), keys)
