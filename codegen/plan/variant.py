"""From a variant to everything its templates print: statements, bounds, argument lists, gradients.

All decisions are made here; a template only places text. See templates/README.md for the contract.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from codegen.analysis import schedule as blocks
from codegen.analysis.call_modes import Mode, specialised, split_mask
from codegen.analysis.gradients import GradientKind, GradientTerm, by_lag, decay_load, gradient_terms
from codegen.analysis.indexing import DECAY, PACKED_DECAY
from codegen.analysis.mask_runs import Limits, split_limits
from codegen.analysis.score_split import NOTHING, Sides, split_rows, split_sides
from codegen.ir import expr
from codegen.ir.derive import derivative
from codegen.ir.expr import Expr, Level, Type, const, float_var
from codegen.plan.block_tables import ListsPlan, lists_plan
from codegen.plan.code import (
    ZERO,
    Arange,
    Choice,
    Code,
    Group,
    Infix,
    Literal,
    Name,
    Prefix,
    added,
    builtin,
    product,
    total,
)
from codegen.plan.kernel import Block, BlockGradient, KernelPlan, MaskRun
from codegen.plan.loop_bounds import key_bounds, query_bounds
from codegen.plan.lower import Lowering
from codegen.plan.signature import TABLES, Signatures, legend
from codegen.plan.statements import Assign, uses
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised

LOG2E = const(1.4426950408889634)

_QK, _SCALE = float_var("qk"), float_var("scale")

PRODUCT = expr.mul(expr.mul(LOG2E, _SCALE), _QK)
"""The logit of a score that is the scaled product."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The expressions a kernel evaluates per tile, in terms of `qk` and `scale`."""

    logit: Expr  # times log2(e)
    dscore: Expr | None  # d score expression / d score; None where it is 1
    linear: bool
    terms: tuple[GradientTerm, ...]


def logits(variant: Variant, mode: Mode) -> Logits:
    """Put the raw product in place of `score`, and fold scale and log2(e) into the coefficients."""
    score = float_var(expr.SCORE)
    value = {expr.SCORE: expr.mul(_SCALE, _QK)}
    modified = variant.score if variant.score is not None else score
    logit = expr.scaled(LOG2E, expr.substitute(modified, value))
    linear = logit == PRODUCT and not variant.decay
    if variant.decay:
        difference = expr.sub(decay_load("q", mode), decay_load("kv", mode))
        logit = expr.add(logit, difference)
    dscore = expr.substitute(derivative(modified, score), value)
    terms = tuple(replace(t, local=expr.substitute(t.local, value)) for t in gradient_terms(variant, mode))
    return Logits(logit=logit, dscore=None if expr.is_const(dscore, 1) else dscore, linear=linear, terms=terms)


_ROWS, _KEYS, _Q_SHIFT, _DS = Name("rows"), Name("cols"), Name("q_shift"), Name("ds")


class KernelBuilder:
    """Builds the variant-dependent code of one kernel."""

    def __init__(
        self,
        variant: Variant,
        mode: Mode,
        *,
        query_axis: int,
        walks_heads: bool = False,
        splits_rows: bool = False,
        splits_sides: bool = False,
        splits_mask: bool = False,
    ) -> None:
        decay = PACKED_DECAY if mode is Mode.PACKED else DECAY
        tensors = {**variant.tensors, **({decay.name: decay} if variant.decay else {})}
        self.variant = variant
        self.logits = logits(variant, mode)
        self.by_position = mode is not Mode.SEGMENTED
        self.row_term: Expr = NOTHING
        if splits_rows:
            logit, self.row_term = split_rows(self.logits.logit, in_order=self.by_position)
            self.logits = replace(self.logits, logit=logit)
        sides = split_sides(self.logits.logit, PRODUCT, in_order=self.by_position) if splits_sides else None
        self.sides = Sides() if sides is None else sides
        if sides is not None:
            self.logits = replace(self.logits, logit=PRODUCT, linear=True)
        self.key = "cols" if mode is Mode.SEGMENTED else "kv_idx"
        self.reads: frozenset[str] = frozenset()
        self.lowering = Lowering(tensors=tensors, query_axis=query_axis, mode=mode, walks_heads=walks_heads)
        self.transposed = query_axis == 1
        self.splits_mask = splits_mask

    def block(self, *, partial: bool, terms: Sequence[GradientTerm], backward: bool) -> Block:
        dscore = self.logits.dscore if backward else None
        keep, same, limits = self._masks() if partial else (None, None, Limits())
        run = self._run(limits)
        locals_ = [t.local for t in terms]
        roots = (self.logits.logit, dscore, keep, same, *locals_)
        statements, codes = self.lowering.block(*roots, whole=not partial)
        logit, dscore_code, keep_code, same_code, *local_codes = codes
        assert logit is not None
        offsets = [self._offsets(t) for t in terms]
        read = frozenset().union(*(expr.names(e) for e in roots if e is not None))
        self.reads |= read
        if partial and not self.transposed and run is None:
            read |= {self.key}  # for the bound of a cut block
        if self.logits.linear:
            logit = product(Name("qk"), Name("qk_scale"))
        elif expr.level(self.logits.logit) is not Level.TILE:
            # A score that reads neither the product nor both positions.
            logit = added(builtin("zeros_like", Name("qk")), logit)
        # An infinite derivative on a masked lane times its zero ds is NaN: such lanes are cleared once more.
        product_of_ds = None if dscore_code is None else product(_DS, _factor(dscore_code))
        return Block(
            statements=[*self.index_statements("q" if self.transposed else "kv", read), *statements],
            logit=logit,
            keep=keep_code,
            same=same_code,
            dscore=_where_kept(product_of_ds) if partial and product_of_ds is not None else product_of_ds,
            gradients=[
                BlockGradient(term=t, value=_gradient(t, code, partial), offset=offset, pair_offset=pair_offset)
                for t, code, (offset, pair_offset) in zip(terms, local_codes, offsets, strict=True)
            ],
            run=run,
        )

    def _masks(self) -> tuple[Expr | None, Expr | None, Limits]:
        """The mask in the parts that the kernel evaluates apart: which pairs it keeps, whether their segments are equal
        or else the limits of a run of positions."""
        mask = self.variant.mask if self.variant.mask is not None else expr.TRUE
        if not self.splits_mask:
            return _unless_true(mask), None, Limits()
        if self.by_position:
            limits = split_limits(mask, "q_idx" if self.transposed else "kv_idx")
            return _unless_true(limits.rest), None, limits
        # Positions that a call gives need not follow each other.
        own, same = split_mask(mask)
        if own == expr.TRUE:
            return _unless_true(same), None, Limits()
        return own, _unless_true(same), Limits()

    def _run(self, limits: Limits) -> MaskRun | None:
        if not limits.found:
            return None
        self.reads |= frozenset().union(*(expr.names(e) for e in limits.all))
        codes = dict(zip(limits.all, self.lowering.own_shape(limits.all), strict=True))

        def along(e: Expr | None) -> Code | None:
            """A limit along the loop, whose rows count from the call's offset on."""
            if e is None:
                return None
            return Infix("-", codes[e], _Q_SHIFT) if self.transposed else codes[e]

        vectors = [e is not None and expr.level(e) is not Level.UNIFORM for e in (limits.first, limits.end)]
        return MaskRun(
            first=along(limits.first),
            end=along(limits.end),
            own=None if limits.own == expr.TRUE else codes[limits.own],
            first_is_vector=vectors[0],
            end_is_vector=vectors[1],
        )

    def term(self, term: Expr) -> Code | None:
        """What the logits of a row, a key or a block share, in the shape that it has; None if that is nothing."""
        if expr.is_const(term, 0):
            return None
        self.reads |= expr.names(term)
        return self.lowering.own_shape([term])[0]

    def index_statements(self, axis: str, reads: Set[str]) -> list[Assign]:
        """The rows (or keys) of a block and their positions, as far as `reads` names them."""
        if axis == "q":
            row = Infix("+", _ROWS, _Q_SHIFT)
            codes: dict[str, Code] = {"q_row": row, "q_idx": row}
        else:
            keys = Infix("+", Name("start_n"), Arange("BLOCK_N"))
            codes = {"cols": keys, "kv_idx": keys if self.by_position else _KEYS}
            if "kv_idx" in reads and not self.by_position:
                reads = {*reads, "cols"}
        own = Level.QUERY if axis == "q" else Level.KEY
        found = []
        for name, code in codes.items():
            if name in reads:
                given = name.endswith("_idx") and not self.by_position
                value = _given_position(axis, code) if given else code
                found.append(Assign(targets=(name,), values=(value,), level=own, type=Type.INT, of_tokens=given))
        return found

    def _offsets(self, term: GradientTerm) -> tuple[Code | None, Code | None]:
        """The offset of a term with atomics in its buffer, and of one along diagonals the same pair by pair where
        positions may not follow each other; None without atomics."""
        if not term.atomic:
            return None, None
        by_pair = self.lowering.offset(term.load, term.accumulator, tile=True)
        if term.kind is GradientKind.SCATTER:
            return by_pair, None
        self.lowering.helpers.add("diagonals")
        along = by_lag(term.load)
        assert along is not None
        return self.lowering.offset(along, term.accumulator, tile=False), None if self.by_position else by_pair


def _given_position(axis: str, otherwise: Code) -> Code:
    """The position of each row or key where a segmented call gives it, else `otherwise`."""
    lies, length = (_ROWS, Name("q_len")) if axis == "q" else (_KEYS, Name("kv_len"))
    batch = product(Name("b"), Name(f"stride_{axis}_positions_b"))
    pointers = total([Name(f"{axis}_positions_ptr"), batch, lies])
    given = builtin("load", pointers, mask=Infix("<", lies, length), other=ZERO)
    return Choice(given, Name("POSITIONS"), otherwise)


def _unless_true(mask: Expr) -> Expr | None:
    return None if mask == expr.TRUE else mask


def _factor(code: Code) -> Code:
    """A factor of ds: in parentheses, unless it is a name or an integer."""
    plain = isinstance(code, Name) or (isinstance(code, Literal) and isinstance(code.value, int))
    return code if plain else Group(code)


def _where_kept(code: Code) -> Code:
    return builtin("where", Name("keep"), code, Literal(0.0))


def _gradient(term: GradientTerm, local: Code | None, partial: bool) -> Code:
    """The gradient of each pair, 0 where the mask keeps none."""
    if term.sign:
        return _DS if term.sign > 0 else Prefix("-", _DS)
    assert local is not None
    code = product(_DS, _factor(local))
    return _where_kept(code) if partial else code


# ------------------------------------------------------------------------------------------------------------ kernels


@dataclass(frozen=True, kw_only=True)
class VariantPlan:
    """All kernels of a variant in one mode, and what its ops need to know. Their names begin with `symbol`.

    `variant` is what the mode makes of the one that was `written`.
    """

    written: Variant
    variant: Variant
    mode: Mode
    symbol: str
    analysis: blocks.BlockAnalysis
    fwd: KernelPlan
    dq: KernelPlan
    dkdv: KernelPlan
    hopper_fwd: KernelPlan
    hopper_bwd: KernelPlan
    hopper_bwd_wide: KernelPlan
    hopper_delta: KernelPlan
    lists: ListsPlan | None
    terms: tuple[GradientTerm, ...]


def plan(written: Variant, mode: Mode = Mode.DENSE) -> VariantPlan:
    """Decide everything about a variant's kernels for one mode of calls."""
    variant = specialised(symbolised(written), mode)
    analysis = _analysis(variant, mode)
    terms = gradient_terms(variant, mode)
    sign = Signatures(variant, mode, terms, analysis)
    hopper_bwd = _key_kernel(variant, analysis, sign, hopper=True)
    return VariantPlan(
        written=written,
        variant=variant,
        mode=mode,
        symbol=sign.symbol,
        analysis=analysis,
        fwd=_query_kernel(variant, analysis, sign, backward=False),
        dq=_query_kernel(variant, analysis, sign, backward=True),
        dkdv=_key_kernel(variant, analysis, sign),
        hopper_fwd=_query_kernel(variant, analysis, sign, backward=False, hopper=True),
        hopper_bwd=hopper_bwd,
        # Pairs of a long and a short block leave more programs without work at the end: blocks take longer here.
        hopper_bwd_wide=replace(hopper_bwd, orders_work=hopper_bwd.longest_first and not hopper_bwd.shares_work),
        hopper_delta=_delta_kernel(variant, sign),
        lists=lists_plan(variant, analysis, sign),
        terms=terms,
    )


def _analysis(variant: Variant, mode: Mode) -> blocks.BlockAnalysis:
    """The schedule in a mode. Segmented calls read tables that a kernel makes of their ids, whatever the mask keeps."""
    found = blocks.analyse(variant.mask)
    if mode is Mode.SEGMENTED and found.schedule not in TABLES and variant.mask is not None:
        return blocks.analyse(split_mask(variant.mask)[1])
    return found


def _query_kernel(
    variant: Variant, analysis: blocks.BlockAnalysis, sign: Signatures, *, backward: bool, hopper: bool = False
) -> KernelPlan:
    """The kernel of o or of dq, or the forward of Hopper's family, which adds to a row at once what its keys share."""
    builder = KernelBuilder(variant, sign.mode, query_axis=0, splits_rows=hopper, splits_mask=hopper)
    terms = [t for t in builder.logits.terms if backward and t.kind is not GradientKind.COLUMN]
    full = builder.block(partial=False, terms=terms, backward=backward)
    partial = builder.block(partial=True, terms=terms, backward=backward)
    row_term = builder.term(builder.row_term)
    bounds = key_bounds(analysis, builder.lowering)
    lowering = builder.lowering
    hoisted = uses(lowering.prologue, bounds.statements)
    args = sign.dq() if backward else sign.fwd()
    return KernelPlan(
        name=f"{sign.symbol}_{'bwd_dq' if backward else 'hopper_fwd' if hopper else 'fwd'}",
        mode=sign.mode,
        args=args,
        constants=sign.dq_constants() if backward else sign.constants(),
        legend=legend(variant, sign.mode, args, terms),
        also=_also(terms),
        linear=builder.logits.linear,
        longest_first=analysis.keys.main.end is not None and analysis.keys.main.first is None,
        helpers=frozenset(lowering.helpers),
        prologue=[*builder.index_statements("q", builder.reads | hoisted), *lowering.prologue],
        bounds=bounds,
        full=full,
        partial=partial,
        row_term=row_term,
        gradients=terms,
    )


def sums_by_keys(terms: Sequence[GradientTerm]) -> bool:
    """Whether the programs of blocks of keys can gather all gradients: those of a head are sums of sums, and those of a
    row, where they are sums of ds, products as dq is."""
    return all(t.kind in (GradientKind.COLUMN, GradientKind.HEAD) or t.is_sum for t in terms)


def _key_kernel(
    variant: Variant, analysis: blocks.BlockAnalysis, sign: Signatures, *, hopper: bool = False
) -> KernelPlan:
    """The kernel of dk and dv, or that of Hopper's family, which also gathers what dq needs where it can.

    That adds to a key at once what its rows share, and finds with the log of a row's denominator what its keys do.
    """
    builder = KernelBuilder(variant, sign.mode, query_axis=1, walks_heads=True, splits_sides=hopper, splits_mask=hopper)
    gathers_all = hopper and sums_by_keys(builder.logits.terms)
    terms = [t for t in builder.logits.terms if gathers_all or t.kind is GradientKind.COLUMN]
    by_pairs = [t for t in terms if t.kind is not GradientKind.ROW]
    full = builder.block(partial=False, terms=by_pairs, backward=True)
    partial = builder.block(partial=True, terms=by_pairs, backward=True)
    key_term, block_term = builder.term(builder.sides.keys), builder.term(builder.sides.block)
    bounds = query_bounds(analysis, builder.lowering)
    lowering = builder.lowering
    reads = builder.reads | uses(lowering.prologue, lowering.head_prologue)
    if terms or hopper:
        reads |= {builder.key}  # for the place of the sums, and for the bound of a cut block
    prologue = [*builder.index_statements("kv", reads), *lowering.prologue]
    args, constants = sign.dkdv(terms), sign.dkdv_constants(terms)
    if hopper:
        # What a row alone adds to a score is found ahead of it, and with it perhaps what nothing here reads.
        parts = [prologue, lowering.head_prologue, bounds.statements, full.parts, partial.parts, key_term, block_term]
        in_rows = ["q_shift"] if "row_start" in uses(block_term) else []
        args, constants = sign.read_only(args, constants, {*uses(*parts), *in_rows})
    return KernelPlan(
        name=f"{sign.symbol}_{'hopper_bwd' if hopper else 'bwd_dkdv'}",
        mode=sign.mode,
        args=args,
        constants=constants,
        legend=legend(variant, sign.mode, args, terms),
        also=_also(terms),
        linear=builder.logits.linear,
        longest_first=bounds.begins_partial and not bounds.two_sided and not bounds.jumps,
        helpers=frozenset(lowering.helpers),
        prologue=prologue,
        head_prologue=lowering.head_prologue,
        bounds=bounds,
        bounds_per_head=analysis.tables_per_head or _any_reads_head(analysis.queries),
        full=full,
        partial=partial,
        key_term=key_term,
        block_term=block_term,
        gradients=terms,
        sums_by_products=gathers_all and builder.logits.dscore is None,
    )


def _delta_kernel(variant: Variant, sign: Signatures) -> KernelPlan:
    """What runs before the backward of Hopper's family: beside delta it finds what the keys of a row share."""
    builder = KernelBuilder(variant, sign.mode, query_axis=0, splits_sides=True)
    row_term = builder.term(builder.sides.rows)
    lowering = builder.lowering
    hoisted = uses(row_term, lowering.prologue)
    prologue = [*builder.index_statements("q", builder.reads | hoisted), *lowering.prologue]
    args, constants = sign.row_terms(hoisted | uses(prologue))
    return KernelPlan(
        name=f"{sign.symbol}_hopper_delta",
        mode=sign.mode,
        args=args,
        constants=constants,
        linear=builder.logits.linear,
        helpers=frozenset(lowering.helpers),
        prologue=prologue,
        row_term=row_term,
    )


def _any_reads_head(union: blocks.Union) -> bool:
    ranges = [union.main] if union.other is None else [union.main, union.other]
    bounds = [e for r in ranges for e in (r.first, r.end, r.full_first, r.full_end) if e is not None]
    return any(expr.reads_head(e) for e in bounds)


def _also(terms: Sequence[GradientTerm]) -> str:
    names = dict.fromkeys("g" if t.tensor == "decay" else t.tensor for t in terms)
    return "".join(f" and {name}" for name in names)
