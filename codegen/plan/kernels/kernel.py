"""The plan of a kernel: its arguments, typed statements and loop bounds, which a dialect prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.plan.code.host import HostCode, listed
from codegen.plan.code.loop_bounds import LoopBounds
from codegen.plan.code.statements import Assign, Part, defines, uses
from codegen.plan.code.tree import Code
from codegen.plan.kernels.token_layout import InMode


@dataclass(frozen=True, kw_only=True)
class BlockGradient:
    """A gradient term inside one loop body.

    `value` is the gradient of each pair. `offset` is the offset in the buffer of a term with atomics. `pair_offset` is
    the offset of each pair, for a term along diagonals if a call may give any positions.
    """

    term: GradientTerm
    value: Code
    offset: Code | None = None
    pair_offset: Code | None = None


@dataclass(frozen=True, kw_only=True)
class MaskRun:
    """A run of kept positions along the loop: `[first, end)` without `[gap_first, gap_end)`, for each row or key for
    which `own` holds.

    Each field is a vector, or a number if it is the same for all rows or keys, or None if there is no limit. `vectors`
    names the limits that are vectors.
    """

    first: Code | None
    end: Code | None
    own: Code | None
    gap_first: Code | None = None
    gap_end: Code | None = None
    vectors: frozenset[str] = frozenset()

    @property
    def parts(self) -> list[Code]:
        limits = (self.first, self.end, self.own, self.gap_first, self.gap_end)
        return [code for code in limits if code is not None]

    def limit(self, name: str, number: Callable[[Code], Code]) -> Code | None:
        """A limit as a vector; `number` makes a vector of a number."""
        value: Code | None = getattr(self, name)
        return value if value is None or name in self.vectors else number(value)


@dataclass(frozen=True, kw_only=True)
class MaskRange:
    """Pairs with `0 <= distance < count`: `distance` is a tile, `count` a number of at least 0."""

    distance: Code
    count: Code


@dataclass(frozen=True, kw_only=True)
class Block:
    """The part of a loop body that depends on the variant.

    `keep` is the mask. A kernel may split it: then `run` is the run of positions that the mask keeps, or `same` the
    part that compares segments, or `ranges` are the ranges of distances that it keeps, and `keep` is the rest of the
    mask. `dscore` is ds times the derivative of the score, None if the derivative is 1.
    """

    statements: Sequence[Assign]
    logit: Code
    keep: Code | None
    same: Code | None
    dscore: Code | None
    gradients: Sequence[BlockGradient]
    run: MaskRun | None = None
    ranges: Sequence[MaskRange] = ()

    @property
    def parts(self) -> list[Part]:
        """All statements and code, from which the names that they read are found."""
        run = [] if self.run is None else self.run.parts
        ranges = (code for part in self.ranges for code in (part.distance, part.count))
        own = (part.value for part in self.gradients)
        return [*self.statements, self.logit, self.keep, self.same, *run, *ranges, self.dscore, *own]


@dataclass(frozen=True, kw_only=True)
class FarBlocks:
    """Blocks so far from the diagonal that all pairs read the same elements by distance: the elements at the distance
    `near_first`, or at `near_last`. `before` and `behind` say on which sides there are such blocks.

    `logits`: side -> its logit less the row's lse; empty in a kernel that does not compute the scores of these blocks.
    """

    before: bool
    behind: bool
    logits: Mapping[str, Code] = field(default_factory=dict)

    @property
    def sides(self) -> list[str]:
        """The sides in the order of the rows."""
        return [name for name, known in (("before", self.before), ("behind", self.behind)) if known]


@dataclass(frozen=True, kw_only=True)
class ArgGroup:
    """Kernel parameters that are passed together: their names, and the host's source that gives them.

    `varies`: the number changes from call to call, so that no kernel is compiled for a single value. `dtype`: the
    element type, if it must not follow from the value. `loadable`: the argument may also be a pointer to the number.
    `row_strides`: the names that are strides between rows.
    """

    names: tuple[str, ...]
    host: HostCode
    varies: bool = False
    dtype: str = ""
    loadable: bool = False
    row_strides: tuple[str, ...] = ()


def pointers(*tensors: str) -> ArgGroup:
    """The pointers to tensors that the host knows by the same names."""
    return ArgGroup(names=tuple(f"{name}_ptr" for name in tensors), host=listed(tensors))


def numbers(*names: str, dtype: str = "", loadable: bool = False) -> ArgGroup:
    """Numbers of a call that the host knows by the same names."""
    return ArgGroup(names=names, host=listed(names), varies=True, dtype=dtype, loadable=loadable)


@dataclass(frozen=True, kw_only=True)
class KernelPlan(InMode):
    """One kernel: its name, arguments and variant-dependent code.

    `row_term`, `key_term` and `block_term`: parts of the logit that all keys of a row, all rows of a key, or all pairs
    of a block share, if a kernel adds them separately. `key_statements`: what `key_term` of a forward needs, of each
    block of keys. `key_term_is_finite`: it cannot be infinite. `sums_by_products`: sums of ds over rows and keys are
    products with ones. Such a product reads the operand that feeds dq and dk, so it is a sum of ds only if the score's
    derivative is 1. `orders_work`: Hopper's programs first take the blocks that visit the most other blocks.
    `starts_long`: all rows visit the first keys of a head, as attention sinks, and few rows the other keys; Hopper's
    programs take the first blocks of all heads first. `leaves_runs`: the kernel of packed calls computes a segmented
    call whose segments are runs of tokens. `fixed_reference`: what the bfloat16 weights of Hopper's forward are
    relative to, if the score is bounded; None if they are relative to running maxima. `dscore_is_bounded`: the score's
    derivative is finite whatever q and k are. `stores_delta`: a kernel that runs later reads delta. `far`: blocks whose
    pairs all read one element by distance, if there may be any. `narrow`: source of the condition that a band, whose
    width the call gives, is so narrow that one loop visits all blocks with the mask.
    """

    name: str
    args: Sequence[ArgGroup]
    constants: Sequence[str]
    legend: str = ""
    differentiated: str = ""
    linear: bool = True
    longest_first: bool = False
    helpers: frozenset[str] = frozenset()
    prologue: Sequence[Assign] = ()
    head_prologue: Sequence[Assign] = ()
    bounds: LoopBounds | None = None
    bounds_per_head: bool = False
    full: Block | None = None
    partial: Block | None = None
    row_term: Code | None = None
    key_term: Code | None = None
    key_statements: Sequence[Assign] = ()
    key_term_is_finite: bool = True
    block_term: Code | None = None
    gradients: Sequence[GradientTerm] = ()
    sums_by_products: bool = False
    orders_work: bool = False
    starts_long: bool = False
    leaves_runs: bool = False
    fixed_reference: float | None = None
    dscore_is_bounded: bool = False
    stores_delta: bool = False
    far: FarBlocks | None = None
    narrow: HostCode | None = None
    mode: Mode = Mode.DENSE

    @property
    def paged(self) -> bool:
        """True if keys and values lie in pages."""
        return False

    @property
    def shares_work(self) -> bool:
        """True if Hopper's programs fetch work from an atomic counter: if the work of a block depends on the call's
        tensors, if blocks at both ends of a sequence have less of it, or if they are taken in an order of their own."""
        loads_bounds = self._bounds_are_loaded and not self.longest_first
        return self.packed or self.reads_tables or self.is_band or bool(self.work_order) or loads_bounds

    @property
    def reads_tables(self) -> bool:
        """True if tables of the call say which blocks are visited."""
        return any(name in ("ranges_ptr", "spans_ptr") for group in self.args for name in group.names)

    @property
    def is_band(self) -> bool:
        """True if a block visits the tiles of a band, or several ranges of tiles. Blocks near an end of the sequence
        visit fewer tiles of a band."""
        return self.bounds is not None and (self.bounds.two_sided or bool(self.bounds.jumps))

    @property
    def work_order(self) -> str:
        """The device function that orders the blocks of keys of a dense call; empty if programs take them in turn."""
        if self.packed:
            return ""
        return "longest_first" if self.orders_work else "first_blocks_first" if self.starts_long else ""

    @property
    def _bounds_are_loaded(self) -> bool:
        """True if the loop bounds depend on numbers read from memory, such as the lengths of batch rows."""
        loads = [statement for statement in (*self.prologue, *self.head_prologue) if statement.reads_memory]
        return self.bounds is not None and not uses(self.bounds.statements).isdisjoint(defines(loads))

    @property
    def flags(self) -> dict[str, str]:
        """Constant that says whether a call wants a gradient -> the op's parameter for it."""
        return {t.flag: t.flag.lower() for t in self.gradients if t.flag}

    @property
    def far_sides(self) -> list[str]:
        """The sides on which blocks are far."""
        return [] if self.far is None else self.far.sides

    @property
    def row_sums(self) -> list[GradientTerm]:
        """The terms of a row that a kernel whose programs own blocks of keys gathers by products with ones."""
        return [t for t in self.gradients if self.sums_by_products and t.kind is GradientKind.ROW and t.is_sum]

    @property
    def row_adds(self) -> list[GradientTerm]:
        """The other terms of a row in such a kernel, which it adds in float32 from ds before the score's derivative."""
        return [t for t in self.gradients if not self.sums_by_products and t.kind is GradientKind.ROW]

    @property
    def column_sums(self) -> list[GradientTerm]:
        """The terms that are sums of ds over rows, gathered as products."""
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
        """The arguments that are pointers, or may be pointers."""
        return [g for g in self.args if g.loadable or any(n.endswith("_ptr") or n == "q_offset" for n in g.names)]

    @property
    def numbers(self) -> list[ArgGroup]:
        """The other arguments."""
        return [group for group in self.args if group not in self.inputs]

    @property
    def has_offset(self) -> bool:
        """True if the kernel reads query positions, so that it takes a query offset."""
        return "Q_OFFSET_PER_BATCH" in self.constants

    @property
    def has_positions(self) -> bool:
        """True if the kernel reads positions that a segmented call may give."""
        return "POSITIONS" in self.constants

    @property
    def tile(self) -> str:
        """The name of the score tile: a purely scaled score stays the raw product and is scaled inside the exp2."""
        return "qk" if self.linear else "logit"

    @property
    def tile_reads(self) -> list[str]:
        """The parameters of a function of `partial`'s statements: the kernel's arguments, and what a program
        computes."""
        assert self.partial is not None
        read = uses(self.prologue, self.partial.parts)
        own = [name for group in self.args for name in group.names]
        return [x for x in (*own, "b", "h", "hkv", "q_shift", *self.constants) if x in read - {"BLOCK_M", "BLOCK_N"}]

    @property
    def row_term_reads(self) -> frozenset[str]:
        """The names that `row_term` reads, and the statements from which it is computed."""
        return uses(self.prologue, self.row_term)

    @property
    def compiled(self) -> list[str]:
        """Arguments compiled in: the strides between rows. They depend on layout and head count, not on lengths, and as
        literals they leave the tiles' addresses to the instructions' immediate fields."""
        return [name for group in self.args for name in group.row_strides]

    @property
    def types(self) -> dict[str, str]:
        """Argument with a type annotation -> the type of the kernel language in it."""
        typed = {name: group.dtype for group in self.args if group.dtype for name in group.names}
        return typed | dict.fromkeys(self.compiled, "constexpr")

    @property
    def loadable(self) -> list[str]:
        """Numbers that the kernel loads if SCALARS_LOADED is set: they are pointers then."""
        return [name for group in self.args if group.loadable for name in group.names]

    @property
    def varying(self) -> list[str]:
        """Arguments that Triton must not specialise on: they change from call to call."""
        return [name for group in self.args if group.varies for name in group.names]
