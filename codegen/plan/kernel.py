"""What templates see of a kernel: frozen text and names, no decisions left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.analysis.call_modes import InMode, Mode
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.plan.loop_bounds import BoundsText
from codegen.util.text import words


@dataclass(frozen=True, kw_only=True)
class GradientText:
    """A gradient term inside one loop body: `text` is the gradient of each pair; `place`, of a term with atomics, its
    offset in the buffer; `scattered` the same pair by pair, of a term along diagonals where positions may be any."""

    term: GradientTerm
    text: str
    place: str
    scattered: str = ""


@dataclass(frozen=True, kw_only=True)
class LimitsText:
    """A run of positions, from `first` on and ahead of `end`, for each row or key for which `own` holds: vectors, or
    numbers where they are so for all, as `first_is_vector` and `end_is_vector` say; empty where there is no limit."""

    first: str
    end: str
    own: str
    first_is_vector: bool
    end_is_vector: bool

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.first, self.end, self.own) if text]


@dataclass(frozen=True, kw_only=True)
class BlockText:
    """The part of a loop body that depends on the variant.

    `limits`: the run of positions along the loop that a mask leaves, and `same`: the part of it that compares segments,
    where a kernel finds one or the other apart from the rest of it, which is `keep`.
    """

    statements: Sequence[str]
    logit: str
    keep: str
    same: str
    dscore: str
    gradients: Sequence[GradientText]
    limits: LimitsText | None = None

    @property
    def texts(self) -> list[str]:
        """All of it."""
        limits = [] if self.limits is None else self.limits.texts
        own = (part.text for part in self.gradients)
        return [*self.statements, self.logit, self.keep, self.same, *limits, self.dscore, *own]


@dataclass(frozen=True, kw_only=True)
class ArgGroup:
    """Kernel parameters that are passed together: their names, and the host expression that gives them.

    `type`: Triton's, where it must not follow from the value. `loadable`: may also be a pointer to the number.
    """

    names: tuple[str, ...]
    host: str
    varies: bool = False
    type: str = ""
    loadable: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelPlan(InMode):
    """One kernel: its name, arguments and variant-dependent text.

    `row_term`, `key_term` and `block_term`: what the logits of a row share, those of a key, and all of a block, where a
    kernel adds that apart from the rest. `sums_by_products`: sums of ds over rows and keys are products with ones. They
    are of what feeds dq and dk, and so only where that is ds itself: where the score's derivative is 1.
    `orders_work`: programs of Hopper's take those blocks first that visit the most others.
    """

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
    row_term: str = ""
    key_term: str = ""
    block_term: str = ""
    gradients: Sequence[GradientTerm] = ()
    sums_by_products: bool = False
    orders_work: bool = False
    mode: Mode = Mode.DENSE

    @property
    def ragged(self) -> str:
        """Whether the last block may be cut: packed sequences end anywhere, else the call knows."""
        return "True" if self.packed else "RAGGED"

    @property
    def key(self) -> str:
        """The vector of keys as they lie in memory."""
        return "cols" if self.segmented else "kv_idx"

    @property
    def shares_work(self) -> bool:
        """Whether programs of Hopper's take one block after the other as they are free: where the call's tensors say
        how many others a block visits, not its place, and where blocks are taken in an order."""
        by_tables = any(name in ("ranges_ptr", "spans_ptr") for group in self.args for name in group.names)
        return self.packed or by_tables or self.orders_work or (self._bounds_are_loaded and not self.longest_first)

    @property
    def _bounds_are_loaded(self) -> bool:
        """Whether numbers from memory bound what a block visits, such as the lengths of batch rows."""
        lines = [line.partition(" = ") for line in (*self.prologue, *self.head_prologue)]
        loaded = {name for name, _, value in lines if "tl.load(" in value}
        return self.bounds is not None and bool(loaded & words(" ".join(self.bounds.statements)))

    @property
    def flags(self) -> dict[str, str]:
        """Constants that say which gradients a call wants, and the op's parameter for each."""
        return {t.flag: t.flag.lower() for t in self.gradients if t.flag}

    @property
    def row_sums(self) -> list[GradientTerm]:
        """The terms that a kernel of keys gathers as sums of rows."""
        return [t for t in self.gradients if self.sums_by_products and t.kind is GradientKind.ROW and t.is_sum]

    @property
    def row_adds(self) -> list[GradientTerm]:
        """The other sums of rows of such a kernel: of ds ahead of the score's derivative, in float32."""
        return [t for t in self.gradients if not self.sums_by_products and t.kind is GradientKind.ROW]

    @property
    def column_sums(self) -> list[GradientTerm]:
        """The terms that are sums of ds, and gathered as products, too."""
        return [t for t in self.gradients if self.sums_by_products and t.kind is GradientKind.COLUMN and t.is_sum]

    @property
    def stores(self) -> list[GradientTerm]:
        """The terms that are stored after the loop."""
        return [t for t in self.gradients if t.summed]

    @property
    def atomic(self) -> str:
        """The tensors whose gradients are added with atomics, as text; empty if none is."""
        return " and ".join(dict.fromkeys(t.tensor for t in self.gradients if t.atomic))

    @property
    def inputs(self) -> list[ArgGroup]:
        """The arguments that are pointers, or may be."""
        return [g for g in self.args if g.loadable or any(n.endswith("_ptr") or n == "q_offset" for n in g.names)]

    @property
    def numbers(self) -> list[ArgGroup]:
        """The other arguments."""
        return [group for group in self.args if group not in self.inputs]

    @property
    def has_offset(self) -> bool:
        """Whether positions matter to the kernel, so that it takes a query offset."""
        return "Q_OFFSET_PER_BATCH" in self.constants

    @property
    def has_positions(self) -> bool:
        """Whether it reads positions that a segmented call may give."""
        return "POSITIONS" in self.constants

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
    def loadable(self) -> list[str]:
        """Numbers that the kernel loads where SCALARS_LOADED: then they are pointers."""
        return [name for group in self.args if group.loadable for name in group.names]

    @property
    def varying(self) -> list[str]:
        """Arguments that must not be specialised on: they change from call to call, and nothing is gained."""
        return [name for group in self.args if group.varies for name in group.names]
