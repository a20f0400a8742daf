"""Dims of tensors that are computed: `2 * r + 1`, from scalars, the call's sizes and other tensors' dims."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from codegen.ir import expr
from codegen.ir.expr import INDEX_NAMES, LENGTH_NAMES, Expr, ScalarType, TensorSpec, Type, int_var
from codegen.ir.parse import Scope, parse
from codegen.ir.printers import FormulaPrinter, NumberPrinter
from codegen.util.errors import ExprError

SIZES = ("b", "h", "hkv", *LENGTH_NAMES)
"""Sizes of the call: batch rows or sequences, query heads, key heads, query rows and keys."""


def is_computed(dim: str | int, scalars: Mapping[str, ScalarType]) -> bool:
    """Whether a dim as written is computed: it is an expression, a scalar or a length of the call."""
    return isinstance(dim, str) and (not dim.isidentifier() or dim in scalars or dim in LENGTH_NAMES)


def own_names(tensors: Collection[TensorSpec], scalars: Mapping[str, ScalarType]) -> dict[str, tuple[str, int]]:
    """Free name -> the first tensor and axis whose dim is this name alone. That axis gives the size of the name."""
    found: dict[str, tuple[str, int]] = {}
    for tensor in tensors:
        for axis, dim in enumerate(tensor.dims):
            if isinstance(dim, str) and dim not in INDEX_NAMES and not is_computed(dim, scalars):
                found.setdefault(dim, (tensor.name, axis))
    return found


def with_computed(tensor: TensorSpec, scalars: Mapping[str, ScalarType], free: Collection[str]) -> TensorSpec:
    """The tensor with its computed dims parsed; `free`: the keys of `own_names`, names that alone are a tensor's dim.

    Raises `ExprError` for a dim that is no integer expression of free names, int scalars and the call's sizes.
    """
    dims: list[str | int] = []
    computed: dict[str, Expr] = {}
    for dim in tensor.dims:
        if not is_computed(dim, scalars):
            dims.append(dim)
            continue
        e = _read(str(dim), scalars, free)
        if isinstance(e, expr.Const):
            if e.value < 1:
                raise ExprError(f"a dim must be at least 1, got {dim!r} = {e.value}", 1)
            dims.append(int(e.value))
        else:
            dims.append(FormulaPrinter().text(e))
            computed[str(dims[-1])] = e
    return replace(tensor, dims=tuple(dims), computed=tuple(computed.items()))


def _read(text: str, scalars: Mapping[str, ScalarType], free: Collection[str]) -> Expr:
    known = (*(name for name, kind in scalars.items() if kind is ScalarType.INT), *SIZES, *free)
    e = parse(text, Scope(bound={name: int_var(name) for name in known}, axes=()), Type.INT)
    if any(node.type is Type.FLOAT for node in expr.walk(e)):
        raise ExprError(f"a dim is computed of integers alone, got {text!r}; use //", 1)
    return e


def size_of(dim: str | int, tensor: TensorSpec, sizes: Mapping[str, int], other: int) -> int:
    """The size of a dim. `sizes` has the call's sizes and integer scalars by name; a name without an entry has the size
    `other`."""
    e = dict(tensor.computed).get(str(dim))
    if e is None:
        return dim if isinstance(dim, int) else sizes.get(dim, other)
    folded = expr.substitute(e, {name: expr.const(sizes.get(name, other)) for name in expr.names(e)})
    assert isinstance(folded, expr.Const)
    return max(int(folded.value), 1)


def source(e: Expr, text: str, values: Mapping[str, str]) -> str:
    """Source of the expected size in a check of shapes; `values` maps each name to the source of its value."""
    names = sorted(expr.names(e))
    function = f"lambda {', '.join(names)}: {NumberPrinter().text(e)}"
    return f'computed("{text}", {function}, {", ".join(values[name] for name in names)})'


def names_of(tensors: Sequence[TensorSpec]) -> frozenset[str]:
    """The names that computed dims read."""
    return frozenset().union(*(expr.names(e) for tensor in tensors for _, e in tensor.computed))
