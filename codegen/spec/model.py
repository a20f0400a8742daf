"""The frozen model of a spec file. `load.py` builds it; nothing after the loader sees a dict or a YAML node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from codegen.arch.tile_rules import TileConfig
from codegen.ir.expr import Expr, ScalarType, TensorSpec

DTYPES = ("float16", "bfloat16", "float32")
"""Element types of q, k and v."""

TENSOR_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "bool")
"""Element types a variant's own tensor may declare."""


class Pass(StrEnum):
    """The kernels that have block sizes of their own."""

    FWD = "fwd"
    DKDV = "dkdv"
    DQ = "dq"


KERNEL_ENDINGS = {Pass.FWD: "_fwd", Pass.DKDV: "_bwd_dkdv", Pass.DQ: "_bwd_dq"}
"""How the name of the kernel of each pass ends; all others are small ones, which have no config."""


PassConfigs = Mapping[Pass, Mapping[int, TileConfig]]
"""pass -> largest head_dim the entry serves -> config"""


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """Default configs of one architecture: for 16-bit inputs, and for float32, whose tiles take twice the memory.

    `short` holds what 16-bit calls of short sequences run with instead: longest sequence served -> configs.
    """

    name: str
    half: PassConfigs
    float32: PassConfigs
    short: Mapping[int, PassConfigs] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a variant is rendered and tuned for when it does not say otherwise."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    head_dims: tuple[int, ...] = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class ScalarSpec:
    """A number given at each call, from `minimum` to `maximum` where they are given; `example` is a typical one."""

    name: str
    type: ScalarType
    minimum: float | None = None
    maximum: float | None = None
    example: float | None = None

    def typical(self, kv_len: int) -> int | float:
        """The example, or a value for a scalar that has none: a quarter of the keys, or 1."""
        if self.example is not None:
            return self.example
        value = kv_len // 4 if self.type is ScalarType.INT else 1.0
        at_least = value if self.minimum is None else max(value, self.minimum)
        return at_least if self.maximum is None else min(at_least, self.maximum)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One attention variant.

    `mask` is a boolean expression (None: every pair attends), `score` a float expression of `score` (None: unchanged).
    `archs` holds the architectures for which it has block sizes of its own. `entry` is the rest of the variant's spec
    as one line of YAML; `mask_text` and `score_text` are as the user wrote them. `keywords` has the op's arguments for
    those tensors and scalars that have another name here: `codegen.spec.symbols`.
    """

    name: str
    line: int
    entry: str
    doc: str = ""
    mask: Expr | None = None
    score: Expr | None = None
    mask_text: str = ""
    score_text: str = ""
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    scalars: Mapping[str, ScalarSpec] = field(default_factory=dict)
    sink: bool = False
    decay: bool = False
    dropout: bool = False
    archs: Mapping[str, ArchSpec] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole spec file, library values filled in."""

    path: str
    defaults: Defaults
    archs: Mapping[str, ArchSpec]
    variants: Mapping[str, Variant]


def describe_tensor(tensor: TensorSpec) -> str:
    """A declared tensor in one phrase: `slope[h] float32 (grad)`."""
    dims = ", ".join(str(dim) for dim in tensor.dims)
    return f"{tensor.name}[{dims}] {tensor.dtype}" + (" (grad)" if tensor.grad else "")
