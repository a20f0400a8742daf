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
from codegen.ir.expr import Expr, const, float_var
from codegen.plan.block_tables import ListsPlan, lists_plan
from codegen.plan.kernel import BlockText, GradientText, KernelPlan, LimitsText
from codegen.plan.loop_bounds import key_bounds, query_bounds
from codegen.plan.lower import Emitter
from codegen.plan.signature import TABLES, Signatures, legend
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised
from codegen.util.text import words

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


_LIES = {"q": ("start_m", "BLOCK_M", "rows", "q_len"), "kv": ("start_n", "BLOCK_N", "cols", "kv_len")}
"""Of each axis where a block starts, its size, the vector of its rows or keys, and the length."""


class KernelBuilder:
    """Builds the variant-dependent text of one kernel."""

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
        self.emitter = Emitter(tensors=tensors, query_axis=query_axis, mode=mode, walks_heads=walks_heads)
        self.transposed = query_axis == 1
        self.splits_mask = splits_mask

    def block(self, *, partial: bool, terms: Sequence[GradientTerm], backward: bool) -> BlockText:
        dscore = self.logits.dscore if backward else None
        keep, same, limits = self._masks() if partial else (None, None, Limits())
        limits_text = self._limits_text(limits)
        locals_ = [t.local for t in terms]
        roots = (self.logits.logit, dscore, keep, same, *locals_)
        statements, texts = self.emitter.block(*roots, whole=not partial)
        logit, dscore_text, keep_text, same_text, *local_texts = texts
        places = [self._places(t) for t in terms]
        read = frozenset().union(*(expr.names(e) for e in roots if e is not None))
        self.reads |= read
        if partial and not self.transposed and limits_text is None:
            read |= {self.key}  # for the bound of a cut block
        if self.logits.linear:
            logit = "qk * qk_scale"
        elif expr.level(self.logits.logit) is not expr.Level.TILE:
            logit = f"tl.zeros_like(qk) + {logit}"  # of a score that reads neither the product nor both positions
        # An infinite derivative on a masked lane times its zero ds is NaN: such lanes are cleared once more.
        guard = partial and dscore is not None
        product = f"ds * {_factor(dscore_text)}" if dscore is not None else ""
        return BlockText(
            statements=[*self.index_statements("q" if self.transposed else "kv", read), *statements],
            logit=logit,
            keep=keep_text,
            same=same_text,
            dscore=f"tl.where(keep, {product}, 0.0)" if guard else product,
            gradients=[
                GradientText(term=t, text=_gradient_text(t, text, partial), place=place, scattered=scattered)
                for t, text, (place, scattered) in zip(terms, local_texts, places, strict=True)
            ],
            limits=limits_text,
        )

    def _masks(self) -> tuple[Expr | None, Expr | None, Limits]:
        """Which pairs are kept; and of what else keeps them, apart from that, whether their segments are the same, or
        the run of positions."""
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

    def _limits_text(self, limits: Limits) -> LimitsText | None:
        if not limits.found:
            return None
        self.reads |= frozenset().union(*(expr.names(e) for e in limits.all))
        texts = dict(zip(limits.all, self.emitter.own_shape(limits.all), strict=True))
        # Rows of a block count from the call's offset on.
        shift = " - q_shift" if self.transposed else ""
        first, end = ("" if e is None else texts[e] + shift for e in (limits.first, limits.end))
        own = "" if limits.own == expr.TRUE else texts[limits.own]
        vectors = [e is not None and expr.level(e) is not expr.Level.UNIFORM for e in (limits.first, limits.end)]
        return LimitsText(first=first, end=end, own=own, first_is_vector=vectors[0], end_is_vector=vectors[1])

    def term_text(self, term: Expr) -> str:
        """What the logits of a row, a key or a block share, in the shape that it has; empty if that is nothing."""
        if expr.is_const(term, 0):
            return ""
        self.reads |= expr.names(term)
        return self.emitter.own_shape([term])[0]

    def index_statements(self, axis: str, reads: Set[str]) -> list[str]:
        """Where the rows (or keys) of a block lie and which positions they have, of that what `reads` names."""
        start, size, lies, length = _LIES[axis]
        found = []
        if axis == "q":
            lines = {"q_row": "q_row = rows + q_shift", "q_idx": "q_idx = rows + q_shift"}
        else:
            vector = f"{start} + tl.arange(0, {size})"
            lines = {"cols": f"cols = {vector}", "kv_idx": f"kv_idx = {vector if self.by_position else 'cols'}"}
            if "kv_idx" in reads and not self.by_position:
                reads = {*reads, "cols"}
        for name, line in lines.items():
            if name in reads and name.endswith("_idx") and not self.by_position:
                given = f"{axis}_positions_ptr + b * stride_{axis}_positions_b + {lies}"
                load = f"tl.load({given}, mask={lies} < {length}, other=0)"
                found.append(f"{name} = {load} if POSITIONS else {line.partition(' = ')[2]}")
            elif name in reads:
                found.append(line)
        return found

    def _places(self, term: GradientTerm) -> tuple[str, str]:
        """The offset of a term in its buffer, in the names of the block's statements, and where it is summed along
        diagonals the same pair by pair, for positions that are not one after the other; empty without atomics."""
        if not term.atomic:
            return "", ""
        by_pair = self.emitter.place(term.load, term.accumulator, tile=True)
        if term.kind is GradientKind.SCATTER:
            return by_pair, ""
        self.emitter.helpers.add("diagonals")
        along = by_lag(term.load)
        assert along is not None
        return self.emitter.place(along, term.accumulator, tile=False), "" if self.by_position else by_pair


def _unless_true(mask: Expr) -> Expr | None:
    return None if mask == expr.TRUE else mask


def _factor(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f"({text})"


def _gradient_text(term: GradientTerm, local: str, partial: bool) -> str:
    """The gradient of each pair, 0 where the mask keeps none."""
    if expr.is_const(term.local, 1):
        return "ds"
    if expr.is_const(term.local, -1):
        return "-ds"
    text = f"ds * {_factor(local)}"
    return f"tl.where(keep, {text}, 0.0)" if partial else text


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
    row_term = builder.term_text(builder.row_term)
    bounds = key_bounds(analysis, builder.emitter)
    emitter = builder.emitter
    hoisted = " ".join([*emitter.prologue, *bounds.statements])
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
        helpers=frozenset(emitter.helpers),
        prologue=[*builder.index_statements("q", builder.reads | words(hoisted)), *emitter.prologue],
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
    key_term, block_term = builder.term_text(builder.sides.keys), builder.term_text(builder.sides.block)
    bounds = query_bounds(analysis, builder.emitter)
    emitter = builder.emitter
    reads = builder.reads | words(" ".join([*emitter.prologue, *emitter.head_prologue]))
    if terms or hopper:
        reads |= {builder.key}  # for the place of the sums, and for the bound of a cut block
    prologue = [*builder.index_statements("kv", reads), *emitter.prologue]
    args, constants = sign.dkdv(terms), sign.dkdv_constants(terms)
    if hopper:
        # What a row alone adds to a score is found ahead of it, and with it perhaps what nothing here reads.
        texts = [
            *prologue,
            *emitter.head_prologue,
            *bounds.statements,
            *full.texts,
            *partial.texts,
            key_term,
            block_term,
        ]
        in_rows = ["q_shift"] if "row_start" in words(block_term) else []
        args, constants = sign.read_only(args, constants, {*words(" ".join(texts)), *in_rows})
    return KernelPlan(
        name=f"{sign.symbol}_{'hopper_bwd' if hopper else 'bwd_dkdv'}",
        mode=sign.mode,
        args=args,
        constants=constants,
        legend=legend(variant, sign.mode, args, terms),
        also=_also(terms),
        linear=builder.logits.linear,
        longest_first=bounds.begins_partial and not bounds.two_sided and not bounds.jumps,
        helpers=frozenset(emitter.helpers),
        prologue=prologue,
        head_prologue=emitter.head_prologue,
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
    row_term = builder.term_text(builder.sides.rows)
    emitter = builder.emitter
    hoisted = " ".join([row_term, *emitter.prologue])
    prologue = [*builder.index_statements("q", builder.reads | words(hoisted)), *emitter.prologue]
    args, constants = sign.row_terms(words(" ".join([hoisted, *prologue])))
    return KernelPlan(
        name=f"{sign.symbol}_hopper_delta",
        mode=sign.mode,
        args=args,
        constants=constants,
        linear=builder.logits.linear,
        helpers=frozenset(emitter.helpers),
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
