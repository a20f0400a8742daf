"""Adaptive pruning (arXiv:2504.06949): a mask leaves out keys of which the log-decay proves that they weigh little.

`prune: true` gives a variant a companion, whose queries attend to the keys from `first_key` on. The op finds these
from q, k and g, and calls the companion, so forward and backward leave out the same pairs, whatever their tiles are.
The bound holds only if every query attends to the key at its own position and the score is the scaled product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from codegen.analysis.affine import linear
from codegen.ir import expr
from codegen.ir.expr import TRUE, Const, Expr, Load, Op, TensorSpec, Type, Var, int_var
from codegen.spec.model import ScalarSpec, Variant

FIRST_KEY = "first_key"
"""The companion's tensor: the position of the first key that each query attends to."""


def companion_name(name: str) -> str:
    """The name of the companion of a variant."""
    return f"{name}_pruned"


def refusal(variant: Variant) -> str:
    """Why a variant cannot be pruned; empty if it can."""
    if not variant.decay:
        return "pruning follows from a log-decay: add 'decay: true'"
    if variant.score is not None:
        return "pruning bounds the scaled product of query and key: it needs a variant without 'score'"
    if variant.dropout:
        return "pruning bounds each row's probabilities, which dropout changes: it needs a variant without 'dropout'"
    if not keeps_own_key(variant.mask, variant.scalars):
        return "pruning compares keys with the one at the query's own position: the mask must keep it for every query"
    return ""


def companion(variant: Variant) -> Variant:
    """The variant whose queries attend to the keys from `first_key` on."""
    indices = tuple(map(int_var, ("b", "h", "q_idx")))
    first = Load(Type.INT, FIRST_KEY, indices)
    since = expr.compare("ge", int_var("kv_idx"), first)
    text, own = f"kv_idx >= {FIRST_KEY}[b, h, q_idx]", variant.mask_text.strip()
    if {"or", "if"} & set(own.split()):
        own = f"({own})"
    mask_text = f"{own} and {text}" if own else text
    spec = TensorSpec(name=FIRST_KEY, dims=("b", "h", "q_idx"), dtype="int32", example=_example())
    name = companion_name(variant.name)
    tensors = {**variant.tensors, FIRST_KEY: spec}
    return replace(
        variant,
        name=name,
        entry=f"{name}: {{{', '.join(_written(variant, mask_text, tensors))}}}",
        doc=f"{variant.name} from `{FIRST_KEY}` on, which its `prune` finds (Lin et al., 2025, arXiv:2504.06949).",
        mask=since if variant.mask is None else expr.logical_and(variant.mask, since),
        mask_text=mask_text,
        tensors=tensors,
        pruned="",
    )


def _written(variant: Variant, mask: str, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """The keys of the companion's entry, in YAML."""
    yield f"mask: {json.dumps(mask)}"
    declared = [
        f"{x.name}: {{dims: [{', '.join(map(str, x.dims))}], dtype: {x.dtype}{', grad: true' if x.grad else ''}}}"
        for x in tensors.values()
    ]
    yield f"tensors: {{{', '.join(declared)}}}"
    if variant.scalars:
        ranges = {x.name: {"type": x.type.value, "min": x.minimum, "max": x.maximum} for x in variant.scalars.values()}
        numbers = (
            f"{name}: {{{', '.join(f'{key}: {value}' for key, value in limits.items() if value is not None)}}}"
            for name, limits in ranges.items()
        )
        yield f"scalars: {{{', '.join(numbers)}}}"
    if variant.sink:
        yield "sink: true"
    yield "decay: true"


def keeps_own_key(mask: Expr | None, scalars: Mapping[str, ScalarSpec]) -> bool:
    """True if every query provably attends to the key of its own position.

    >>> keeps_own_key(expr.compare("ge", int_var("q_idx"), int_var("kv_idx")), {})
    True
    """
    return mask is None or _holds(expr.substitute(mask, {"kv_idx": int_var("q_idx")}), scalars)


def _holds(e: Expr, scalars: Mapping[str, ScalarSpec]) -> bool:
    """True if a condition on one position provably holds."""
    if not isinstance(e, Op):
        return e == TRUE
    if e.op in ("and", "or"):
        return (all if e.op == "and" else any)(_holds(part, scalars) for part in e.args)
    if e.op not in expr.COMPARISONS or e.args[0].type is Type.FLOAT:
        return False
    low, high = e.args if e.op in ("lt", "le") else e.args[::-1]
    if e.op in ("eq", "ge", "le") and low == high:
        return True
    if e.op in ("eq", "ne") or e.args[0].type is not Type.INT:
        return False
    gap = linear(expr.sub(high, low))
    least = None if gap is None or gap.q or gap.kv else _least(gap.rest, scalars)
    return least is not None and least >= (e.op in ("lt", "gt"))


def _least(e: Expr, scalars: Mapping[str, ScalarSpec]) -> float | None:
    """The least value of a number or of a scalar."""
    if isinstance(e, Const):
        return float(e.value)
    return scalars[e.name].minimum if isinstance(e, Var) and e.name in scalars else None


def _example() -> Expr:
    """`first_key` in examples and tests: the multiple of 32 that is 96 to 127 keys ahead of the query, or 0."""
    position = int_var("i2")
    start = expr.sub(expr.mul(expr.floordiv(position, expr.const(32)), expr.const(32)), expr.const(96))
    return expr.maximum(start, expr.const(0))
