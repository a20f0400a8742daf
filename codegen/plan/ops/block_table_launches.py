"""How an op makes its tables of blocks: the launches of the kernels that `block_tables` plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from codegen.analysis.schedule import Schedule
from codegen.plan.kernels.block_tables import ListsPlan
from codegen.plan.kernels.signature import CU_SEQLENS, TABLES
from codegen.plan.kernels.variant_reads import positions_read
from codegen.plan.ops.arguments import Argument
from codegen.plan.ops.launch_arguments import LaunchGroup, launch_groups
from codegen.plan.ops.parameters import Parameter, tensor
from codegen.spec.model import Variant

OFFSETS = ("row_offset", "row_offsets")
"""The query offset of a call: a number, and a tensor if it differs between batch rows or sequences."""


@dataclass(frozen=True, kw_only=True)
class ExtremesLaunch:
    """The launch of the kernel that reduces tensors to minima and maxima of parts, and the buffers it fills.

    The launch keeps the buffers in a list, `block_extremes`: first the buffers of values, then those of positions.
    """

    kernel: str
    args: Sequence[LaunchGroup]
    has_offset: bool
    loads: Sequence[str]
    of_queries: bool
    of_keys: bool
    positions: Sequence[str]
    buffers: Sequence[tuple[str, str, str]]  # name, number of parts, dtype
    position_buffers: Sequence[tuple[str, str, str]]  # name, number of parts, the argument without which it is None

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in (*self.buffers, *self.position_buffers)]

    @property
    def reads(self) -> frozenset[str]:
        """The names that the arguments read."""
        return _reads(self.args)

    @property
    def runs(self) -> list[tuple[str, str, int]]:
        """Number of parts, dtype, and how many buffers of values in a row have these two."""
        return [(*kind, len(list(same))) for kind, same in groupby((x[1], x[2]) for x in self.buffers)]

    @property
    def position_runs(self) -> list[tuple[str, str, int]]:
        """Number of parts, the argument of positions, and how many buffers of positions in a row have these two."""
        return [(*kind, len(list(same))) for kind, same in groupby((x[1], x[2]) for x in self.position_buffers)]


def _reads(args: Sequence[LaunchGroup]) -> frozenset[str]:
    return frozenset().union(*(group.names for group in args))


@dataclass(frozen=True, kw_only=True)
class ListsOp:
    """How the op makes its tables of blocks: the launches, and the arguments that the mask reads."""

    module: str
    ranges: bool
    tables: Sequence[str]
    extremes: ExtremesLaunch | None
    query_kernel: str
    key_kernel: str
    kernel_args: Sequence[LaunchGroup]
    loads: Sequence[str]
    per_batch: bool
    per_head: bool
    has_offset: bool
    shifted: bool
    packed: bool
    positions: Sequence[Parameter]
    arguments: Sequence[Argument]

    @property
    def by_batch(self) -> bool:
        """True if each batch row has its own tables, whatever the offset. Each packed sequence always does."""
        return self.per_batch or self.packed

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of the function that makes tables, after q, k and v: the arguments that its launches read."""
        others = [*map(tensor, CU_SEQLENS), *self.positions]
        reads, shifted = self.kernel_reads, self.shifted
        if self.extremes is not None:
            reads, shifted = reads | self.extremes.reads, shifted or self.extremes.has_offset
        own = [a.parameter for a in self.arguments]
        return [*(p for p in (*own, *others) if p.name in reads), *self._offset(shifted)]

    @property
    def kernel_reads(self) -> frozenset[str]:
        """The names that the arguments of its kernels read."""
        return _reads(self.kernel_args)

    @property
    def reads_offset(self) -> bool:
        """True if any of its kernels reads the query offset."""
        return self.shifted or (self.extremes is not None and self.extremes.has_offset)

    @property
    def reads_group_size(self) -> bool:
        """True if any of its kernels reads how many query heads a key head serves."""
        reads = self.kernel_reads if self.extremes is None else self.kernel_reads | self.extremes.reads
        return "group_size" in reads

    def _offset(self, used: bool) -> list[Parameter]:
        number, rows = OFFSETS
        by_row = [tensor(rows, optional=True)] if self.has_offset and (used or not self.by_batch) else []
        return [Parameter(number, "int"), *by_row] if used else by_row


def _extremes_launch(lists: ListsPlan) -> ExtremesLaunch | None:
    if lists.extremes is None:
        return None
    plan = lists.extremes
    launch = ExtremesLaunch(
        kernel=plan.kernel.name,
        args=[],
        has_offset="Q_OFFSET_PER_BATCH" in plan.kernel.constants,
        loads=plan.kernel.loadable,
        of_queries=bool(plan.queries),
        of_keys=bool(plan.keys),
        positions=plan.given,
        buffers=[
            (name, parts, value.dtype)
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
    return replace(launch, args=launch_groups(plan.kernel, launch.names))


def lists_op(variant: Variant, lists: ListsPlan | None, mask_arguments: Sequence[Argument]) -> ListsOp | None:
    if lists is None:
        return None
    extremes = _extremes_launch(lists)
    return ListsOp(
        module=lists.module,
        ranges=lists.schedule is Schedule.RANGES,
        tables=TABLES[lists.schedule],
        extremes=extremes,
        query_kernel=lists.query_lists.kernel.name,
        key_kernel=lists.key_lists.kernel.name,
        kernel_args=launch_groups(lists.query_lists.kernel, [] if extremes is None else extremes.names),
        loads=lists.query_lists.kernel.loadable,
        per_batch=lists.per_batch,
        per_head=lists.per_head,
        has_offset=lists.has_offset,
        shifted=lists.shifted,
        packed=lists.packed,
        positions=[tensor(name, optional=True) for name in positions_read(variant)] if lists.segmented else [],
        arguments=mask_arguments,
    )
