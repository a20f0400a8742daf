"""How an op makes its tables of blocks: the launches of the kernels that `block_tables` plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.analysis.schedule import Schedule
from codegen.plan.arguments import Argument
from codegen.plan.block_tables import ListsPlan
from codegen.plan.frameworks import Framework
from codegen.plan.host_code import HostCode, listed
from codegen.plan.kernel import KernelPlan
from codegen.plan.parameters import Parameter, names, tensor
from codegen.plan.signature import CU_SEQLENS, TABLES
from codegen.plan.variant_reads import positions_read
from codegen.spec.model import Variant

OFFSETS = ("row_offset", "row_offsets")
"""The query offset of a call: a number, and a tensor if batch rows or sequences differ."""


def launch_arguments(kernel: KernelPlan) -> HostCode:
    """The arguments of a launch, in the order of the kernel's signature."""
    return listed(group.host for group in kernel.args)


@dataclass(frozen=True, kw_only=True)
class ExtremesLaunch:
    """The launch of the kernel that reduces tensors to minima and maxima of parts, and the buffers it fills."""

    kernel: str
    args: HostCode
    has_offset: bool
    loads: Sequence[str]
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
    """How the op makes its tables of blocks: the launches, and the arguments that the mask reads."""

    module: str
    ranges: bool
    tables: Sequence[str]
    extremes: ExtremesLaunch | None
    query_kernel: str
    key_kernel: str
    kernel_args: HostCode
    loads: Sequence[str]
    per_batch: bool
    per_head: bool
    has_offset: bool
    shifted: bool
    packed: bool
    positions: Sequence[Parameter]
    arguments: Sequence[Argument]
    framework: Framework

    @property
    def by_batch(self) -> bool:
        """True if each batch row has tables of its own, whatever the offset. Packed sequences always have."""
        return self.per_batch or self.packed

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of the function that makes a pass' table, behind q and k."""
        return self._parameters(self.kernel_args, self.positions, self._offset(self.shifted))

    @property
    def extreme_parameters(self) -> list[Parameter]:
        """Parameters of the function that reduces tensors, behind q and k."""
        assert self.extremes is not None
        others = [*map(tensor, CU_SEQLENS), *self.positions]
        return self._parameters(self.extremes.args, others, self._offset(self.extremes.has_offset))

    def _offset(self, used: bool) -> list[Parameter]:
        number, rows = OFFSETS
        by_row = [tensor(rows, optional=True)] if self.has_offset and (used or not self.by_batch) else []
        return [Parameter(number, "int"), *by_row] if used else by_row

    def _parameters(
        self, launched: HostCode, others: Sequence[Parameter], offset: Sequence[Parameter]
    ) -> list[Parameter]:
        """The parameters of a function that makes a launch: of the variant's arguments and others those it reads."""
        own = [a.parameter(self.framework) for a in self.arguments]
        return [*(p for p in (*own, *others) if p.name in launched.names), *offset]

    @property
    def values(self) -> list[str]:
        return names(self.parameters)

    @property
    def extreme_values(self) -> list[str]:
        return names(self.extreme_parameters)


def _extremes_launch(lists: ListsPlan) -> ExtremesLaunch | None:
    if lists.extremes is None:
        return None
    plan = lists.extremes
    return ExtremesLaunch(
        kernel=plan.kernel.name,
        args=launch_arguments(plan.kernel),
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


def lists_op(
    variant: Variant, lists: ListsPlan | None, mask_arguments: Sequence[Argument], framework: Framework
) -> ListsOp | None:
    if lists is None:
        return None
    return ListsOp(
        module=lists.module,
        ranges=lists.schedule is Schedule.RANGES,
        tables=TABLES[lists.schedule],
        extremes=_extremes_launch(lists),
        query_kernel=lists.query_lists.kernel.name,
        key_kernel=lists.key_lists.kernel.name,
        kernel_args=launch_arguments(lists.query_lists.kernel),
        loads=lists.query_lists.kernel.loadable,
        per_batch=lists.per_batch,
        per_head=lists.per_head,
        has_offset=lists.has_offset,
        shifted=lists.shifted,
        packed=lists.packed,
        positions=[tensor(name, optional=True) for name in positions_read(variant)] if lists.segmented else [],
        arguments=mask_arguments,
        framework=framework,
    )
