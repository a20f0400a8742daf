"""How a paged call rewrites a variant's expressions.

A tile of a paged call holds the rows of all query heads that share a key head, so that the head differs by row. Keys
and values lie in pages, and so does each of the variant's own tensors that has an element for every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.ir import expr
from codegen.ir.expr import Expr, Load, TensorSpec, Type, Var, float_var, int_var
from codegen.spec.model import Variant

HEAD = int_var("q_head")
"""The query head of each row of a tile."""

PAGE, SLOT = "kv_page", "kv_slot"
"""The two axes of a tensor that lies in pages: the page, and the key's place in it."""


LOCAL, BASE = "g", "g_base"
"""The caches of a log-decay's running sum: its difference from the page's base at each key, and each page's base."""

_DECAY_CACHES = {
    LOCAL: TensorSpec(name=LOCAL, dims=(PAGE, SLOT, "h")),
    BASE: TensorSpec(name=BASE, dims=(PAGE, "h")),
}


def paged(variant: Variant) -> Variant:
    """The variant with its expressions rewritten for paged calls; a log-decay is a part of its score.

    A tensor with a dim `kv_idx` gets the two axes of pages in its place and loses its batch axis. One with an element
    for each pair of a query and a key keeps its axis of keys: it is made for a call and lies in no cache.
    """
    axes = {name: _kept(spec.dims) for name, spec in variant.tensors.items()}
    tensors = {name: replace(spec, dims=paged_dims(spec.dims)) for name, spec in variant.tensors.items()}

    def replaced(e: Expr) -> Expr | None:
        if isinstance(e, Load):
            indices = [expr.rebuild(index, replaced) for index in e.indices]
            dims = variant.tensors[e.tensor].dims
            kept = [
                (indices[axis],) * (2 if _in_pages(dims) and dims[axis] == "kv_idx" else 1) for axis in axes[e.tensor]
            ]
            return replace(e, indices=tuple(index for pair in kept for index in pair))
        return HEAD if isinstance(e, Var) and e.name == "h" else None

    def whole(e: Expr | None) -> Expr | None:
        return None if e is None else expr.rebuild(e, replaced)

    score = whole(variant.score)
    if variant.decay:
        tensors |= _DECAY_CACHES
        score = expr.add(score or float_var(expr.SCORE), log_decay())
    return replace(variant, mask=whole(variant.mask), score=score, tensors=tensors, decay=False)


def log_decay() -> Expr:
    """The running sum of a log-decay at the query less that at the key, from the caches.

    A page's base is a float32 number, and a key's sum differs little from its page's base. For keys near the query,
    the difference of the two bases is exact in float32, so that no digit is lost however long the sequence is.
    """
    q, kv = int_var("q_idx"), int_var("kv_idx")
    bases = expr.sub(Load(Type.FLOAT, BASE, (q, HEAD)), Load(Type.FLOAT, BASE, (kv, HEAD)))
    rest = expr.sub(Load(Type.FLOAT, LOCAL, (q, q, HEAD)), Load(Type.FLOAT, LOCAL, (kv, kv, HEAD)))
    return expr.add(bases, rest)


def paged_dims(dims: Sequence[str | int]) -> tuple[str | int, ...]:
    """The dims of one of the variant's own tensors in a paged call.

    >>> paged_dims(["b", "kv_idx"]), paged_dims(["b", "q_idx", "kv_idx"])
    (('kv_page', 'kv_slot'), ('b', 'q_idx', 'kv_idx'))
    """
    found: list[str | int] = []
    for axis in _kept(dims):
        found += [PAGE, SLOT] if _in_pages(dims) and dims[axis] == "kv_idx" else [dims[axis]]
    return tuple(found)


def _in_pages(dims: Sequence[str | int]) -> bool:
    """True if a tensor has an element for each key of a cache."""
    return list(dims).count("kv_idx") == 1 and "q_idx" not in dims


def _kept(dims: Sequence[str | int]) -> list[int]:
    """The axes that a tensor keeps. A tensor in pages has no batch axis, because a page may belong to any sequence."""
    return [axis for axis, dim in enumerate(dims) if not (dim == "b" and _in_pages(dims))]
