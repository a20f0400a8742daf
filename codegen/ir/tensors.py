"""The declaration of a tensor that belongs to a variant, such as the slopes of ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.nodes import Expr
from codegen.ir.types import INDEX_NAMES, Type


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor argument of a variant.

    A dim is one of `INDEX_NAMES` (the call decides its size), a free name, an integer, or the text of an expression;
    `computed` maps such a text to its expression. `example` is an expression over `axes` that gives typical contents:
    tests, demo and benchmarks fill the tensor with it.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str = "float32"
    grad: bool = False
    example: Expr | None = None
    computed: tuple[tuple[str, Expr], ...] = ()

    @property
    def element(self) -> Type:
        """The type of one element in an expression."""
        if self.dtype == "bool":
            return Type.BOOL
        return Type.INT if self.dtype.startswith("int") else Type.FLOAT

    @property
    def axes(self) -> tuple[str, ...]:
        """The integers that an example may read: `i0`, `i1`, ... for every axis, and the index name of an axis if no
        other axis has the same one."""
        named = (dim for dim in self.dims if dim in INDEX_NAMES and self.dims.count(dim) == 1)
        return (*map(str, named), *(f"i{axis}" for axis in range(len(self.dims))))
