"""What templates see of a kernel: frozen text and names, no decisions left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from codegen.bounds import BoundsText
from codegen.expr import Expr, Load


class GradientKind(StrEnum):
    """How the gradient of one tensor element is gathered without atomics."""

    HEAD = "head"  # one sum per query head, from the dq kernel
    ROW = "row"  # row sums, from the dq kernel
    COLUMN = "col"  # column sums, from the dkdv kernel


@dataclass(frozen=True, kw_only=True)
class GradientTerm:
    """The gradient through one read of a tensor: `local` is d score / d element, `axis` the positional one."""

    tensor: str
    kind: GradientKind
    local: Expr
    load: Load
    axis: int | None

    @property
    def accumulator(self) -> str:
        suffix = {GradientKind.HEAD: "heads", GradientKind.ROW: "rows", GradientKind.COLUMN: "cols"}
        return f"d{self.tensor}_{suffix[self.kind]}"

    @property
    def buffer(self) -> str:
        return f"{self.accumulator}_ptr"

    @property
    def size(self) -> str:
        return f"{self.tensor}_size_{self.axis}"

    @property
    def per_row(self) -> bool:
        return self.kind is not GradientKind.HEAD


@dataclass(frozen=True, kw_only=True)
class GradientText:
    """A gradient term inside one loop body: `accumulator += sum(text)`."""

    accumulator: str
    text: str


@dataclass(frozen=True, kw_only=True)
class BlockText:
    """The part of a loop body that depends on the variant."""

    statements: Sequence[str]
    logit: str
    keep: str
    dscore: str
    gradients: Sequence[GradientText]
    reads_key_index: bool
    reads_query_index: bool


@dataclass(frozen=True, kw_only=True)
class ArgGroup:
    """Kernel parameters that are passed together: their names, and the host expression that gives them.

    `type`: Triton's, where it must not follow from the value.
    """

    names: tuple[str, ...]
    host: str
    varies: bool = False
    type: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """One kernel: its name, arguments and variant-dependent text."""

    name: str
    args: Sequence[ArgGroup]
    constants: Sequence[str]
    legend: str = ""
    also: str = ""
    linear: bool = True
    longest_first: bool = False
    helpers: frozenset[str] = frozenset()
    prologue: Sequence[str] = ()
    head_prologue: Sequence[str] = ()
    bounds: BoundsText | None = None
    bounds_per_head: bool = False
    full: BlockText | None = None
    partial: BlockText | None = None
    gradients: Sequence[GradientTerm] = ()
    reads_query_index: bool = False
    reads_key_index: bool = False

    @property
    def has_offset(self) -> bool:
        """Whether positions matter to the kernel, so that it takes a query offset."""
        return "Q_OFFSET_PER_BATCH" in self.constants

    @property
    def tile(self) -> str:
        """The name of the score tile: a purely scaled score stays the raw product and is scaled inside the exp2."""
        return "qk" if self.linear else "logit"

    @property
    def compiled(self) -> list[str]:
        """Arguments compiled in: the strides between rows. They depend on layout and head count, not on lengths, and as
        literals they leave the tiles' addresses to the instructions' immediate fields."""
        return [name for group in self.args for name in group.names if re.fullmatch(r"stride_\w+s", name)]

    @property
    def types(self) -> dict[str, str]:
        """Argument -> its annotation, of those that have one."""
        typed = {name: group.type for group in self.args if group.type for name in group.names}
        return typed | dict.fromkeys(self.compiled, "tl.constexpr")

    @property
    def varying(self) -> list[str]:
        """Arguments that must not be specialised on: they change from call to call, and nothing is gained."""
        return [name for group in self.args if group.varies for name in group.names]
