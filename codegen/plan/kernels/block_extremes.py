"""The extremes that a kernel of block tables stores and reads: their code, their types and their buffers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from codegen.analysis.intervals import Extreme
from codegen.ir.expr import Load, Type
from codegen.plan.code.tree import Cast, Code
from codegen.plan.kernels.kernel import ArgGroup, pointers
from codegen.spec.model import Variant


@dataclass(frozen=True, kw_only=True)
class BlockExtreme:
    """A value whose minimum and maximum over a block are stored in buffers of type `dtype`. The name `minimum` or
    `maximum` is empty if the decision does not read it."""

    value: Code
    minimum: str
    maximum: str
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype == "float32"


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The reduction, `min` or `max`, of the extremes of parts to those of a block; `widened` casts it to 64 bits."""

    name: str
    reduction: str
    widened: str


def block_extreme(x: Extreme, code: Code, dtype: str, decided: Set[str]) -> BlockExtreme:
    minimum, maximum = (v.name if v.name in decided else "" for v in (x.minimum, x.maximum))
    return BlockExtreme(
        value=code if dtype == "float32" else Cast(code, dtype), minimum=minimum, maximum=maximum, dtype=dtype
    )


def extreme_dtype(variant: Variant, x: Extreme) -> str:
    """The type of a value's extremes: 32 bits if its elements have no more, because they are read much more often."""
    value = x.value
    if value.type is Type.FLOAT:
        return "float32"
    narrow = value.type is Type.BOOL or (isinstance(value, Load) and variant.tensors[value.tensor].dtype != "int64")
    return "int32" if narrow else "int64"


def reductions(variant: Variant, reads: Sequence[Extreme], decided: Set[str]) -> list[Reduction]:
    found = []
    for x in reads:
        # Integers are compared in 64 bits: differences of extremes may exceed 32.
        widened = "" if extreme_dtype(variant, x) == "float32" else ".to(tl.int64)"
        found.append(Reduction(name=x.minimum.name, reduction="min", widened=widened))
        found.append(Reduction(name=x.maximum.name, reduction="max", widened=widened))
    return [x for x in found if x.name in decided]


def extreme_pointers(reads: Sequence[Extreme], decided: Set[str]) -> list[ArgGroup]:
    names = [v.name for x in reads for v in (x.minimum, x.maximum) if v.name in decided]
    return [pointers(name) for name in names]
