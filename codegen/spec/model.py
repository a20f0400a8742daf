"""The frozen model of a spec file. `codegen.load` builds it; nothing after the loader sees a dict or a YAML node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from codegen.arch.chips import CHIPS, SAME_TILES
from codegen.arch.paged import PagedPass, PagedTileConfig, default_paged_tiles
from codegen.arch.tile_rules import TileConfig
from codegen.ir.expr import Expr, ScalarType, TensorSpec

DTYPES = ("float16", "bfloat16", "float32")
"""Element types of q, k and v."""

DTYPE_NAMES = {**{name: name for name in DTYPES}, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Spelling of a dtype in an option -> dtype."""

TENSOR_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "bool")
"""Element types that a variant's own tensor may have."""


class Pass(StrEnum):
    """The kernels with block sizes of their own."""

    FWD = "fwd"
    DKDV = "dkdv"
    DQ = "dq"


KERNEL_ENDINGS = {Pass.FWD: "_fwd", Pass.DKDV: "_bwd_dkdv", Pass.DQ: "_bwd_dq"}
"""How the name of the kernel of each pass ends. All other kernels are small and have no config."""

PagedConfigs = Mapping[PagedPass, Mapping[int, PagedTileConfig]]
"""Pass on paged caches -> largest head_dim that the entry serves -> config."""

PassConfigs = Mapping[Pass, Mapping[int, TileConfig]]
"""Pass -> largest head_dim that the entry serves -> config."""


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """Default configs of one architecture: of 16-bit inputs, and of float32, whose tiles take twice the memory.

    `short` holds the configs of 16-bit calls with short sequences: longest sequence served -> configs. `paged_half` and
    `paged_float32` are what a spec says of kernels on paged caches; what it leaves out has the chip's default.
    """

    name: str
    half: PassConfigs
    float32: PassConfigs
    short: Mapping[int, PassConfigs] = field(default_factory=dict)
    paged_half: PagedConfigs = field(default_factory=dict)
    paged_float32: PagedConfigs = field(default_factory=dict)

    def paged_tiles(self, pass_: PagedPass, itemsize: int) -> dict[int, PagedTileConfig]:
        """Largest head_dim served -> config of a kernel on paged caches, for queries of `itemsize` bytes."""
        own = self.paged_float32 if itemsize == 4 else self.paged_half
        found = {**default_paged_tiles(self.name, pass_, itemsize), **own.get(pass_, {})}
        return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The dtypes and head_dims that all variants are rendered and tuned for."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    head_dims: tuple[int, ...] = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class ScalarSpec:
    """A number that each call gives, limited by `minimum` and `maximum` if present. `example` is a typical one.

    `divides`: an integer that divides integers, and in whose range 0 lies: calls may not give 0.
    """

    name: str
    type: ScalarType
    minimum: float | None = None
    maximum: float | None = None
    example: float | None = None
    divides: bool = False

    @property
    def limits(self) -> dict[str, float | bool]:
        """What a call checks of the number besides its type, as arguments of the runtime's checks."""
        ends = {"minimum": self.minimum, "maximum": self.maximum}
        found: dict[str, float | bool] = {name: x for name, x in ends.items() if x is not None}
        return found | ({"nonzero": True} if self.divides else {})

    def has(self, value: float) -> bool:
        """Whether a number lies between the ends of the range."""
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)

    def typical(self, kv_len: int) -> int | float:
        """The example; without one, a quarter of the keys for an integer and 1 for a float."""
        if self.example is not None:
            return self.example
        value = max(kv_len // 4, 1 if self.divides else 0) if self.type is ScalarType.INT else 1.0
        at_least = value if self.minimum is None else max(value, self.minimum)
        return at_least if self.maximum is None else min(at_least, self.maximum)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One attention variant.

    `mask` is a boolean expression (None: every pair attends), `score` a float expression of `score` (None: unchanged).
    `archs` holds block sizes of its own, by architecture. `entry` is the rest of the variant's spec as one line of
    YAML; `mask_text` and `score_text` are as the user wrote them. `keywords` maps the names of tensors and scalars to
    the op's arguments, where the two differ (`codegen.spec.symbols`). `pruned` names the variant that runs if a call
    prunes (`codegen.analysis.pruning`); it is empty if calls cannot prune.
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
    pruned: str = ""
    archs: Mapping[str, ArchSpec] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole spec file, with the inherited values filled in."""

    path: str
    defaults: Defaults
    archs: Mapping[str, ArchSpec]
    variants: Mapping[str, Variant]

    @property
    def chips(self) -> tuple[str, ...]:
        """The chips that the spec has block sizes for: of their own, or of the chip whose tiles they run with."""
        return tuple(chip for chip in CHIPS if SAME_TILES.get(chip, chip) in self.archs)

    def tiles(self, variant: str, chip: str) -> ArchSpec:
        """The default configs with which a variant runs on one of `chips`."""
        like = SAME_TILES.get(chip, chip)
        return self.variants[variant].archs.get(like) or self.archs[like]


def describe_tensor(tensor: TensorSpec) -> str:
    """A declared tensor in one phrase: `slope[h] float32 (grad)`."""
    dims = ", ".join(str(dim) for dim in tensor.dims)
    return f"{tensor.name}[{dims}] {tensor.dtype}" + (" (grad)" if tensor.grad else "")
