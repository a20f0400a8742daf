"""From a variant to everything its templates print: statements, bounds, argument lists, gradients.

All decisions are made here; a template only places text. See templates/README.md for the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen import blocks, expr
from codegen.bounds import key_bounds, query_bounds
from codegen.derive import derivative
from codegen.emit import DECAY, Emitter
from codegen.expr import Expr, Load, TensorSpec, Var, const, float_var
from codegen.lists import ListsPlan, lists_plan
from codegen.model import BlockText, GradientKind, GradientTerm, GradientText, KernelPlan
from codegen.printers import FormulaPrinter
from codegen.signature import Signatures, legend
from codegen.spec import Variant

LOG2E = const(1.4426950408889634)


def gradient_kind(load: Load, spec: TensorSpec) -> tuple[GradientKind, int | None] | None:
    """How to gather the gradient of `load`, with its positional axis; None if the templates cannot.

    Every index must be a plain name, each at most once, over a dim of the same name (a position over any
    positional or free dim).
    """
    indices = [i.name for i in load.indices if isinstance(i, Var)]
    if len(indices) < len(load.indices) or len(set(indices)) < len(indices):
        return None
    if "h" in indices and "hkv" in indices:
        return None
    positional = [axis for axis, name in enumerate(indices) if name in ("q_idx", "kv_idx")]
    for axis, name in enumerate(indices):
        if axis not in positional and spec.dims[axis] != name:
            return None
        if axis in positional and (isinstance(spec.dims[axis], int) or spec.dims[axis] in ("b", "h", "hkv")):
            return None
    if not positional:
        return GradientKind.HEAD, None
    if len(positional) > 1:
        return None
    axis = positional[0]
    return (GradientKind.ROW if indices[axis] == "q_idx" else GradientKind.COLUMN), axis


def unsupported(variant: Variant) -> list[tuple[str, str]]:
    """Combinations the templates cannot render, as (field, message); the loader reports them with the spec's line."""
    found = []
    for name, spec in variant.tensors.items():
        if not spec.grad:
            continue
        reads = [x for x in expr.loads(variant.score) if x.tensor == name] if variant.score is not None else []
        kinds = [gradient_kind(x, spec) for x in reads]
        if None in kinds or len(set(kinds)) < len(kinds):
            got = " and ".join(FormulaPrinter().text(x) for x, kind in zip(reads, kinds, strict=True) if kind is None)
            rule = (
                "a gradient is gathered where every index is one of b h hkv q_idx kv_idx, over the dim of that name, "
                "with one position at most, and in one read per kind of index"
            )
            found.append((f"tensors.{name}.grad", f"{rule}, got {got or 'two reads of one kind'}; set grad: false"))
    return found


def gradient_terms(variant: Variant) -> tuple[GradientTerm, ...]:
    """One term per read of a tensor that wants a gradient, those of the log-decay last."""
    terms = []
    if variant.score is not None:
        for load in expr.loads(variant.score):
            spec = variant.tensors[load.tensor]
            if spec.grad:
                found = gradient_kind(load, spec)
                assert found is not None, "the loader refuses such a variant"
                local = derivative(variant.score, load)
                terms.append(GradientTerm(tensor=load.tensor, kind=found[0], local=local, load=load, axis=found[1]))
    if variant.decay:
        for name, kind, sign in (("q_idx", GradientKind.ROW, 1.0), ("kv_idx", GradientKind.COLUMN, -1.0)):
            terms.append(
                GradientTerm(tensor="decay", kind=kind, local=const(sign), load=_decay_load(name), axis=2),
            )
    return tuple(terms)


def _decay_load(position: str) -> Load:
    return Load(expr.Type.FLOAT, "decay", (expr.int_var("b"), expr.int_var("h"), expr.int_var(position)))


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The expressions a kernel evaluates per tile, in terms of `qk` and `scale`."""

    logit: Expr  # times log2(e)
    dscore: Expr | None  # d score expression / d score; None where it is 1
    linear: bool
    terms: tuple[GradientTerm, ...]


def logits(variant: Variant) -> Logits:
    """Put the raw product in place of `score`, and fold scale and log2(e) into the coefficients."""
    score, qk, scale = float_var(expr.SCORE), float_var("qk"), float_var("scale")
    value = {expr.SCORE: expr.mul(scale, qk)}
    modified = variant.score if variant.score is not None else score
    logit = expr.scaled(LOG2E, expr.substitute(modified, value))
    linear = logit == expr.mul(expr.mul(LOG2E, scale), qk) and not variant.decay
    if variant.decay:
        difference = expr.sub(_decay_load("q_idx"), _decay_load("kv_idx"))
        logit = expr.add(logit, difference)
    dscore = expr.substitute(derivative(modified, score), value)
    terms = tuple(replace(t, local=expr.substitute(t.local, value)) for t in gradient_terms(variant))
    return Logits(logit=logit, dscore=None if expr.is_const(dscore, 1) else dscore, linear=linear, terms=terms)


class KernelBuilder:
    """Builds the variant-dependent text of one kernel."""

    def __init__(self, variant: Variant, *, query_axis: int, walks_heads: bool = False) -> None:
        tensors = {**variant.tensors, **({"decay": DECAY} if variant.decay else {})}
        self.variant = variant
        self.logits = logits(variant)
        self.emitter = Emitter(tensors=tensors, query_axis=query_axis, walks_heads=walks_heads)
        self.transposed = query_axis == 1

    def block(self, *, partial: bool, terms: Sequence[GradientTerm], backward: bool) -> BlockText:
        dscore = self.logits.dscore if backward else None
        mask = self.variant.mask if self.variant.mask is not None else expr.TRUE
        keep = mask if partial and mask != expr.TRUE else None
        locals_ = [t.local for t in terms]
        statements, texts = self.emitter.block(self.logits.logit, dscore, keep, *locals_, whole=not partial)
        logit, dscore_text, keep_text, *local_texts = texts
        read = frozenset().union(*(expr.names(e) for e in (self.logits.logit, dscore, keep, *locals_) if e is not None))
        if self.logits.linear:
            logit = "qk * qk_scale"
        # An infinite derivative on a masked lane times its zero ds is NaN: such lanes are cleared once more.
        guard = partial and dscore is not None
        product = f"ds * {_factor(dscore_text)}" if dscore is not None else ""
        return BlockText(
            statements=statements,
            logit=logit,
            keep=keep_text,
            dscore=f"tl.where(keep, {product}, 0.0)" if guard else product,
            gradients=[_gradient_text(t, text, partial) for t, text in zip(terms, local_texts, strict=True)],
            reads_key_index="kv_idx" in read or (partial and not self.transposed),
            reads_query_index="q_idx" in read,
        )


def _factor(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f"({text})"


def _gradient_text(term: GradientTerm, local: str, partial: bool) -> GradientText:
    if expr.is_const(term.local, 1):
        text = "ds"
    elif expr.is_const(term.local, -1):
        text = "-ds"
    else:
        text = f"ds * {_factor(local)}"
        if partial:
            text = f"tl.where(keep, {text}, 0.0)"
    return GradientText(accumulator=term.accumulator, text=text)


# ------------------------------------------------------------------------------------------------------------ kernels


@dataclass(frozen=True, kw_only=True)
class VariantPlan:
    """All kernels of a variant, and what its ops need to know."""

    variant: Variant
    fwd: KernelPlan
    delta: KernelPlan
    dq: KernelPlan
    dkdv: KernelPlan
    lists: ListsPlan | None
    terms: tuple[GradientTerm, ...]


def plan(variant: Variant) -> VariantPlan:
    """Decide everything about a variant."""
    analysis = blocks.analyse(variant.mask)
    sign = Signatures(variant, gradient_terms(variant), analysis)
    return VariantPlan(
        variant=variant,
        fwd=_query_kernel(variant, analysis, sign, backward=False),
        delta=_delta_kernel(variant, sign),
        dq=_query_kernel(variant, analysis, sign, backward=True),
        dkdv=_key_kernel(variant, analysis, sign),
        lists=lists_plan(variant, analysis, sign),
        terms=gradient_terms(variant),
    )


def _delta_kernel(variant: Variant, sign: Signatures) -> KernelPlan:
    args = sign.delta()
    return KernelPlan(
        name=f"{variant.name}_bwd_delta", args=args, constants=sign.delta_constants(), legend=legend(variant, args)
    )


def _query_kernel(variant: Variant, analysis: blocks.BlockAnalysis, sign: Signatures, *, backward: bool) -> KernelPlan:
    builder = KernelBuilder(variant, query_axis=0)
    terms = [t for t in builder.logits.terms if backward and t.kind is not GradientKind.COLUMN]
    full = builder.block(partial=False, terms=terms, backward=backward)
    partial = builder.block(partial=True, terms=terms, backward=backward)
    bounds = key_bounds(analysis, builder.emitter)
    emitter = builder.emitter
    hoisted = " ".join([*emitter.prologue, *bounds.statements])
    args = sign.dq() if backward else sign.fwd()
    return KernelPlan(
        name=f"{variant.name}_{'bwd_dq' if backward else 'fwd'}",
        args=args,
        constants=sign.dq_constants() if backward else sign.constants(),
        legend=legend(variant, args),
        also=_also(terms),
        linear=builder.logits.linear,
        longest_first=analysis.keys.main.end is not None and analysis.keys.main.first is None,
        helpers=frozenset(emitter.helpers),
        prologue=emitter.prologue,
        bounds=bounds,
        full=full,
        partial=partial,
        gradients=terms,
        reads_query_index=partial.reads_query_index or "q_idx" in hoisted or any(t.per_row for t in terms),
    )


def _key_kernel(variant: Variant, analysis: blocks.BlockAnalysis, sign: Signatures) -> KernelPlan:
    builder = KernelBuilder(variant, query_axis=1, walks_heads=True)
    terms = [t for t in builder.logits.terms if t.kind is GradientKind.COLUMN]
    full = builder.block(partial=False, terms=terms, backward=True)
    partial = builder.block(partial=True, terms=terms, backward=True)
    bounds = query_bounds(analysis, builder.emitter)
    emitter = builder.emitter
    hoisted = " ".join([*emitter.prologue, *emitter.head_prologue])
    args = sign.dkdv()
    return KernelPlan(
        name=f"{variant.name}_bwd_dkdv",
        args=args,
        constants=sign.constants(),
        legend=legend(variant, args),
        also=_also(terms),
        linear=builder.logits.linear,
        helpers=frozenset(emitter.helpers),
        prologue=emitter.prologue,
        head_prologue=emitter.head_prologue,
        bounds=bounds,
        bounds_per_head=analysis.lists_per_head or _any_reads_head(analysis.queries),
        full=full,
        partial=partial,
        gradients=terms,
        reads_key_index=partial.reads_key_index or "kv_idx" in hoisted or bool(terms),
    )


def _any_reads_head(union: blocks.Union) -> bool:
    ranges = [union.main] if union.other is None else [union.main, union.other]
    bounds = [e for r in ranges for e in (r.first, r.end, r.full_first, r.full_end) if e is not None]
    return any(expr.reads_head(e) for e in bounds)


def _also(terms: Sequence[GradientTerm]) -> str:
    names = dict.fromkeys("g" if t.tensor == "decay" else t.tensor for t in terms)
    return "".join(f" and {name}" for name in names)
