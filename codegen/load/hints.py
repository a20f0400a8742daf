"""Hints about specs that are legal but look like a mistake: rendering prints them, and they are no errors."""

from __future__ import annotations

from codegen.ir import expr
from codegen.ir.expr import TensorSpec
from codegen.spec.model import Spec, Variant
from codegen.util.errors import Problem

_OTHER = {"q_idx": "kv_idx", "kv_idx": "q_idx"}


def hints(spec: Spec) -> list[str]:
    """A line for each tensor that has one position as a dim and is only read at the other."""
    return [
        str(
            Problem(
                file=spec.path, line=variant.line, where=f"variants.{variant.name}.tensors.{tensor.name}", message=text
            )
        )
        for variant in spec.variants.values()
        for tensor in variant.tensors.values()
        if (text := _misplaced(variant, tensor))
    ]


def _misplaced(variant: Variant, tensor: TensorSpec) -> str:
    """The hint for a tensor with a dim of one position that is only read at the other; empty for any other tensor."""
    expressions = [e for e in (variant.mask, variant.score) if e is not None]
    reads = [load for load in expr.loads(*expressions) if load.tensor == tensor.name]
    for axis, dim in enumerate(tensor.dims):
        names = frozenset().union(*(expr.names(load.indices[axis]) for load in reads))
        if dim in _OTHER and dim not in names and _OTHER[dim] in names:
            return (
                f"its dim {dim} has the size of that axis, but is only read at {_OTHER[dim]}; "
                f"if it has an element for each {_OTHER[dim]}, declare the dim {_OTHER[dim]}"
            )
    return ""
