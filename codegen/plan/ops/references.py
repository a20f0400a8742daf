"""The plain mathematics of a variant: as lines of a docstring, and as the source of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.analysis.call_modes import POSITIONAL, Mode, packed_axes
from codegen.analysis.indexing import exact_index
from codegen.ir import expr
from codegen.ir.printers import ROWS, ArrayPrinter, FormulaPrinter, jnp_printer, torch_printer
from codegen.plan.ops.frameworks import Framework
from codegen.spec.model import Variant
from codegen.util.text import docstring


@dataclass(frozen=True, kw_only=True)
class ReferenceText:
    """Source of the score and of the mask, empty without one.

    `reads` are the variables and functions that score and mask read. `index_names` are the index names that the whole
    reference reads.
    """

    score: str
    mask: str
    reads: frozenset[str]
    index_names: frozenset[str]


def reference_text(variant: Variant, mode: Mode, framework: Framework) -> ReferenceText:
    """The reference of a variant in one mode of calls."""
    printer = _printer(variant, mode, framework)
    # Both printers gather the names that they read in one set.
    score, mask = _score(variant, printer), _mask(variant, replace(printer, kept=frozenset()))
    known = {"b", "h", "hkv", *ROWS, *ROWS.values(), *expr.LENGTH_NAMES}
    of_decay = {"b", "h", *ROWS.values()} if variant.decay else set()
    return ReferenceText(
        score=score,
        mask=mask,
        reads=frozenset(printer.reads),
        index_names=frozenset(printer.reads & known | of_decay),
    )


def _printer(variant: Variant, mode: Mode, framework: Framework) -> ArrayPrinter:
    def exact(tensor: str, axis: int, index: expr.Expr) -> bool:
        """Whether an index cannot leave its axis. A tensor that was packed has one batch row, whatever `b` is."""
        inside = exact_index(variant.tensors, tensor, axis, index)
        return inside and axis in packed_axes(variant.tensors[tensor].dims)

    def by_row(tensor: str, axis: int) -> bool:
        return variant.tensors[tensor].dims[axis] in POSITIONAL

    def of_tokens(tensor: str, axis: int) -> Sequence[str]:
        """The call that finds the element of packed tokens at a position of the row's sequence."""
        places = {"q_idx": ("cu_seqlens_q", "q_seq", "row_offset"), "kv_idx": ("cu_seqlens_k", "q_seq")}
        found = places.get(str(variant.tensors[tensor].dims[axis]))
        return ("packed_row", *found) if found else ()

    trained = frozenset(name for name, spec in variant.tensors.items() if spec.grad)
    if framework is Framework.TORCH:
        return torch_printer(exact, numbers=frozenset(variant.scalars), row_dims=by_row, kept=trained)
    scalars = frozenset(variant.scalars)
    if mode is Mode.PACKED:
        return jnp_printer(exact, scalars=scalars, placed=of_tokens, kept=trained, choices=True)
    return jnp_printer(exact, scalars=scalars, row_dims=by_row, kept=trained, choices=True)


def _mask(variant: Variant, printer: ArrayPrinter) -> str:
    if variant.mask is None:
        return ""
    text = printer.text(variant.mask)
    if not printer.is_number(variant.mask):
        return text
    return f"torch.tensor({text}, device=q.device)" if printer.module == "torch" else f"jnp.asarray({text})"


def _score(variant: Variant, printer: ArrayPrinter) -> str:
    if variant.score is None:
        return ""
    text = printer.text(variant.score)
    # A score that does not read the product does not have its shape, and no path for zero gradients of q and k.
    return text if expr.SCORE in expr.names(variant.score) else f"0.0 * score + ({text})"


def computes_with(variant: Variant, name: str) -> bool:
    """Whether the number of a batch row or head does more than to pick its own element of a tensor."""

    def hidden(e: expr.Expr) -> expr.Expr | None:
        if not isinstance(e, expr.Load):
            return None
        tensor, indices = e.tensor, enumerate(e.indices)
        kept = [expr.rebuild(i, hidden) for axis, i in indices if not exact_index(variant.tensors, tensor, axis, i)]
        return replace(e, indices=tuple(kept))

    roots = [e for e in (variant.mask, variant.score) if e is not None]
    return any(name in expr.names(expr.rebuild(e, hidden)) for e in roots)


def may_regroup(variant: Variant, *indices: str) -> bool:
    """Whether some batch rows, or heads, of a call may be computed without the others, or together with other calls.

    `indices` are their numbers: `b`, or `h` and `hkv`. Each may only pick its own element along one axis of a tensor.
    A read like `bias[0]` or `bias[q_idx % 4]` of dims `[h]` needs the elements of other heads; of two such axes, as in
    `[h, h]`, only the diagonal is read, and cutting one of them is not enough.
    """

    def picks_own(load: expr.Load) -> bool:
        axes = [axis for axis, dim in enumerate(variant.tensors[load.tensor].dims) if dim in indices]
        return len(axes) <= 1 and all(exact_index(variant.tensors, load.tensor, i, load.indices[i]) for i in axes)

    roots = [e for e in (variant.mask, variant.score) if e is not None]
    return all(picks_own(x) for e in roots for x in expr.loads(e)) and not any(
        computes_with(variant, i) for i in indices
    )


def formula_of(variant: Variant) -> str:
    """The mathematics of the variant, as lines of a docstring."""
    formula = FormulaPrinter(keywords=variant.keywords)
    lines = ["score = scale * q @ k^T"]
    if variant.score is not None:
        lines.append(f"score = {formula.text(variant.score)}")
    if variant.decay:
        lines.append("score = score + G[q_idx] - G[kv_idx], G the cumulative sum of g along the sequence")
    if variant.mask is not None:
        lines.append(f"keep = {formula.text(variant.mask)}")
    total = "(sum(exp(score)) + exp(sink))" if variant.sink else "sum(exp(score))"
    lines.append(f"o = dropout(exp(score) / {total}) @ v" if variant.dropout else f"o = exp(score) @ v / {total}")
    return "\n".join(docstring(line, indent=8, hanging=12) for line in lines)
