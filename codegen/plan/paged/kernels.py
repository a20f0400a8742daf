"""The kernels of a variant on paged caches: one that plans the splits of a step, and the forward of one split.

A tile holds the rows of all query heads that share a key head, token by token, so that the few queries of a decoding
step fill it. A program's keys are a part of those that the mask lets its rows see; `_runtime/device/paged.py` merges
the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from codegen.analysis import schedule as blocks
from codegen.analysis.call_modes import Mode
from codegen.analysis.paged_calls import HEAD, PAGE, SLOT, log_decay, paged
from codegen.analysis.ranges import Range, Union
from codegen.analysis.schedule import Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, int_var
from codegen.plan.code.device import HELPER_FUNCTIONS, device_functions
from codegen.plan.code.logits import LOG2E, Logits, logits
from codegen.plan.code.loop_bounds import LoopBounds, full_bounds, split_bounds
from codegen.plan.code.lower import Lowering
from codegen.plan.code.statements import Part, Statement, calls, needed, uses, without
from codegen.plan.code.tree import ZERO, Broadcast, Code, Infix, Name, builtin, call, total
from codegen.plan.kernels.builder import KernelBuilder
from codegen.plan.kernels.kernel import Block, KernelPlan
from codegen.plan.kernels.legend import paged_legend
from codegen.plan.kernels.variant_reads import reads_query_position
from codegen.plan.paged.arguments import forward_arguments, forward_constants, plan_arguments, plan_constants
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised

_KEY = int_var("kv_idx")

FULL_BLOCKS = "FULL_BLOCKS"
"""The constant that says whether blocks without a mask have a loop of their own."""


class PagedLowering(Lowering):
    """Lowers expressions for tiles of rows of several heads, and tensors that lie in pages."""

    def _is_grid(self, e: Load) -> bool:  # noqa: ARG002  (a tile has rows of several heads)
        return False

    def _exact(self, tensor: str, axis: int, index: Expr, *, tile: bool) -> Code | None:
        dim = self.tensors[tensor].dims[axis]
        if dim == "h" and index == HEAD:
            return Broadcast(Name(HEAD.name), 0) if tile else Name(HEAD.name)
        if dim in (PAGE, SLOT):
            if index == _KEY:
                return Broadcast(Name(str(dim)), 1) if tile else Name(str(dim))
            own, length, page_size = self._code(index, tile=tile), Name("kv_len"), Name("PAGE_SIZE")
            if dim == PAGE:
                return call("page_of", Name("pages"), own, length, page_size)
            return call("slot_of", own, length, Name(f"{tensor}_size_{axis}"), page_size)
        if dim == "q_idx":
            row = Infix("-", builtin("maximum", self._code(index, tile=tile), ZERO), Name("q_shift"))
            return total([Name("q_start"), call("clamp_index", row, Name("q_len"))])
        return super()._exact(tensor, axis, index, tile=tile)


class PagedBuilder(KernelBuilder):
    """Builds the variant-dependent code of the forward."""

    def __init__(self, variant: Variant, of_pair: Logits) -> None:
        super().__init__(variant, Mode.DENSE, of_pair, query_axis=0)
        self.lowering = PagedLowering(tensors=variant.tensors, query_axis=0)


@dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """The kernels of paged calls.

    `block` is the body of the forward's loop. `full` is the body for blocks that need no mask and lie in one run,
    inside `full_bounds`; `full` and `full_bounds` are None if there is no such run. `inside` says of each key whether
    some row may see it; None if the length alone decides. `legend` has the symbols of both kernels. `bound_names` are
    the names that the bounds of the plan read.
    """

    written: Variant
    variant: Variant
    forward: KernelPlan
    plan: KernelPlan
    block: Block
    full: Block | None
    bounds: LoopBounds
    full_bounds: LoopBounds | None
    plan_bounds: LoopBounds
    inside: Code | None
    legend: str
    bound_names: frozenset[str]

    @property
    def decays(self) -> bool:
        """True if the score reads the caches of a log-decay's running sum."""
        return self.written.decay

    @property
    def span(self) -> Code:
        """The end of the visited keys once the gaps between them are taken out."""
        found = self.bounds.end
        for number in range(1, len(self.bounds.jumps) + 1):
            found = Infix("-", found, Name(f"gap_{number}"))
        return found

    @property
    def scans_mask(self) -> bool:
        """True if a program searches for the keys that its rows may see. It does if there is a mask, its bounds exclude
        no key, and it reads no tensor that lies in pages: such reads would cost as much as they save when every key is
        seen."""
        read = uses(self.mask_statements, self.block.keep)
        return self.block.keep is not None and not self.bounds.statements and not read & {str(PAGE), str(SLOT), "pages"}

    @property
    def mask_statements(self) -> list[Statement]:
        """The statements that the mask of a block is computed from."""
        return needed(self.block.statements, uses(self.block.keep))

    @property
    def split_names(self) -> list[str]:
        """The arguments of the plan that the splits of a tile depend on."""
        others = {"records_ptr", "tiles_ptr", "counts_ptr", "num_seqs"}
        return [name for group in self.plan.args for name in group.names if name not in others]

    @property
    def split_constants(self) -> list[str]:
        """The constants of the plan that the splits of a tile depend on. Scalars given by pointer are loaded before."""
        return [name for name in self.plan.constants if name not in ("SCALARS_LOADED", "PLANNERS")]

    @property
    def gap_statements(self) -> list[Statement]:
        """What the forward computes of the bounds: where the gaps between visited keys are."""
        gaps = uses(*(part for jump in self.bounds.jumps for part in (jump.at, jump.by)))
        return needed(self.bounds.statements, gaps)

    @property
    def full_statements(self) -> list[Statement]:
        """The statements that find the run of blocks that need no mask."""
        if self.full_bounds is None:
            return []
        return needed(self.full_bounds.statements, uses(self.full_bounds.full_begin, self.full_bounds.full_end))

    @property
    def forward_reads(self) -> frozenset[str]:
        """The ends of a tile's positions, as far as the forward reads them."""
        return uses(self.gap_statements, self.full_statements, self.inside)

    @property
    def plan_reads(self) -> frozenset[str]:
        """The names that the bounds of the plan of the splits read."""
        return uses(self.plan_bounds.statements)

    @property
    def names_in_block(self) -> frozenset[str]:
        """The names that the forward reads besides the bounds."""
        return uses(self.forward.prologue, self.block.parts, self._full_parts)

    @property
    def _full_parts(self) -> list[Part]:
        return [] if self.full is None else self.full.parts

    @property
    def called(self) -> frozenset[str]:
        """The functions that the expressions of both kernels call."""
        prologues = [*self.forward.prologue, *self.plan.prologue]
        statements = [*prologues, *self.bounds.statements, *self.full_statements, *self.plan_bounds.statements]
        return calls(statements, self.block.parts, self._full_parts, self.inside)

    @property
    def cache_functions(self) -> list[str]:
        """What the kernels import of `device/paged.py`."""
        own = [
            *("FOLDED", "WAVES", "add_values", "dot_keys", "first_columns", "head_scale", "in_columns", "join_parts"),
            *("load_cache", "load_heads", "load_pages", "store_heads", "token_scales", "value_unit", "zero_sums"),
        ]
        return sorted([*own, *(self.called & {"page_of", "slot_of"})])

    @property
    def shared_functions(self) -> dict[str, list[str]]:
        """What the kernels import of modules of `device/` that other kernels share: module -> names."""
        base_two = ["LOG2E"] if self.forward.linear or self.variant.sink else []
        of_scores = device_functions(HELPER_FUNCTIONS)["tl_math"]
        return {"tl": ["LN2", *base_two], "tl_math": sorted(self.called & frozenset(of_scores))}


def is_legal(variant: Variant) -> bool:
    """Whether a variant can be computed on paged caches: there is no dropout at inference."""
    return not variant.dropout


def _logits(written: Variant) -> Logits:
    """The logits of a variant as it is written. The sums of a log-decay are subtracted before they are scaled, because
    scaling would round each sum."""
    found = logits(paged(replace(written, decay=False)), Mode.DENSE)
    if not written.decay:
        return found
    return replace(found, logit=expr.add(found.logit, expr.mul(LOG2E, log_decay())), linear=False)


def paged_plan(written: Variant) -> PagedPlan | None:
    """Decide everything about a variant's kernels on paged caches; None if it has none."""
    if not is_legal(written):
        return None
    variant = paged(symbolised(written))
    union = visited(variant)
    builder = PagedBuilder(variant, _logits(symbolised(written)))
    block = builder.block(partial=True, terms=(), backward=False)
    inside = _within(union)
    (inside_code,) = builder.lowering.own_shape([inside]) if inside is not None else (None,)
    bounds = split_bounds(union, builder.lowering)
    # A program that searches for its keys knows no run of full blocks.
    whole = full_bounds(union, builder.lowering) if bounds.statements or block.keep is None else None
    full = None if whole is None else builder.block(partial=False, terms=(), backward=False)
    of_bounds = [*bounds.statements, *([] if whole is None else whole.statements)]
    reads = builder.reads | uses(builder.lowering.prologue, of_bounds, inside_code)
    roots = [e for e in (variant.mask, variant.score) if e is not None]
    bound_roots = [e for r in _ranges(union) for e in (r.first, r.end) if e is not None]
    planner = PagedLowering(tensors=variant.tensors, query_axis=0)
    plan_bounds = split_bounds(union, planner)
    symbol = f"{variant.name}_paged"
    # A tensor with an element for each query is read by row, which is the position less the first.
    by_row = "q_shift" in reads | uses(block.parts)
    offset = reads_query_position(variant, Mode.DENSE) or by_row
    shift = "q_shift" in uses(planner.prologue) or any(expr.names(e) & {"q_first", "q_last"} for e in bound_roots)
    args = forward_arguments(variant, roots, offset=offset)
    plan_args = plan_arguments(variant, bound_roots, shift=shift)
    return PagedPlan(
        written=written,
        variant=variant,
        forward=KernelPlan(
            name=f"{symbol}_fwd",
            args=args,
            constants=[*forward_constants(variant, offset=offset), *([] if full is None else [FULL_BLOCKS])],
            linear=builder.logits.linear,
            helpers=frozenset(builder.lowering.helpers),
            prologue=[*builder.index_statements("q", reads), *builder.lowering.prologue],
        ),
        plan=KernelPlan(
            name=f"{symbol}_plan",
            args=plan_args,
            constants=plan_constants(variant, bound_roots, shift=shift),
            prologue=planner.prologue,
            helpers=frozenset(planner.helpers),
        ),
        block=_body(block),
        full=None if full is None else _body(full),
        bounds=bounds,
        full_bounds=whole,
        plan_bounds=plan_bounds,
        inside=inside_code,
        legend=paged_legend(symbolised(written), variant.tensors, [*args, *plan_args]),
        bound_names=frozenset(load.tensor for load in expr.loads(*bound_roots)).union(*map(expr.names, bound_roots)),
    )


def _body(block: Block) -> Block:
    """A block's body, to which the template gives `kv_idx`."""
    return replace(block, statements=without(block.statements, {"kv_idx"}))


def visited(variant: Variant) -> Union:
    """The keys that a tile of rows visits: those inside closed-form bounds.

    If a mask has no exact bounds, a program searches for its keys (`scans_mask`). Where it does not, because the mask
    reads a tensor in pages for each key, the keys are bounded by the rest of the mask.
    """
    found = blocks.analyse(variant.mask)
    bounds = [e for r in _ranges(found.keys) for e in (r.first, r.end) if e is not None]

    def is_known(e: Expr) -> bool:
        """Whether it can be computed before a program knows its head and its pages."""
        return HEAD.name not in expr.names(e) and not any(_in_pages(variant, load) for load in expr.loads(e))

    if found.schedule in (Schedule.DENSE, Schedule.CLOSED_FORM) and all(map(is_known, bounds)):
        return found.keys
    assert variant.mask is not None
    of_keys = [load for load in expr.loads(variant.mask) if expr.level(load) in (Level.KEY, Level.TILE)]
    if any(_in_pages(variant, load) for load in of_keys):
        return blocks.bounds_of_keys(variant.mask, is_known)
    return Union(main=Range(has_full=False))


def _in_pages(variant: Variant, load: Load) -> bool:
    return PAGE in variant.tensors[load.tensor].dims


def _ranges(union: Union) -> list[Range]:
    return [union.main] if union.other is None else [union.main, union.other]


def _within(union: Union) -> Expr | None:
    """Whether a key lies in one of the ranges; None if every key does."""
    found: list[Expr] = []
    for r in _ranges(union):
        first = [] if r.first is None else [expr.compare("ge", _KEY, r.first)]
        end = [] if r.end is None else [expr.compare("lt", _KEY, r.end)]
        found.append(expr.logical_and(*first, *end))
    either = expr.logical_or(*found)
    return None if either == expr.TRUE else either
