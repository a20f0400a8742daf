"""How the gradient of each trained tensor is gathered: one term per read, of a kind that its indices decide."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from codegen.analysis.call_modes import POSITIONAL, Mode, decay_positions, specialised
from codegen.analysis.distances import POSITIONS, ROWS, added_by_distance, by_lag
from codegen.analysis.indexing import exact_index
from codegen.ir import expr
from codegen.ir.derive import derivative
from codegen.ir.expr import (
    KEY_NAMES,
    QUERY_NAMES,
    Expr,
    Level,
    Load,
    TensorSpec,
    Type,
    Var,
    const,
    int_var,
    is_const,
    names,
)
from codegen.spec.model import Variant

DISTANCE_SUMS = "ds_distances"
"""The buffer of the sums of ds by distance, from which the gradients of all tensors read by distance are made."""


FAR_SUMS = "ds_far"
"""The buffer of the sums of ds over blocks whose pairs all read one element, as their distances are beyond a limit."""


class GradientKind(StrEnum):
    """How the gradient through one read of a tensor is gathered."""

    HEAD = "heads"  # one sum per query head, from the dq kernel
    ROW = "rows"  # row sums, from the dq kernel
    COLUMN = "cols"  # column sums, from the dkdv kernel
    PAIR = "pairs"  # every element is read by one pair of a query and a key: stored by the dq kernel
    DISTANCE = "distances"  # sums along the diagonals of all scores, from a kernel of their own
    DIAGONAL = "diagonals"  # sums along the diagonals of a tile, added by the dq kernel with atomics
    SCATTER = "scatter"  # one addition per pair, by the dq kernel with atomics


@dataclass(frozen=True, kw_only=True)
class GradientTerm:
    """The gradient through one read of a tensor: `local` is d score / d element.

    `dims` are the tensor's dims; `number` counts the tensor's terms of one kind, from 1. Sums are stored by head, row
    or key. The sums of a `direct` term have the layout of the tensor's elements. The gradient of a `trained` tensor is
    gathered only if a call asks for it.
    """

    tensor: str
    kind: GradientKind
    local: Expr
    load: Load
    dims: tuple[str | int, ...] = ()
    number: int = 1
    direct: bool = False
    trained: bool = False

    @property
    def accumulator(self) -> str:
        """Name of the kernel's accumulator and of its buffer. Terms added with atomics share one buffer per tensor, and
        all terms by distance of all tensors share one."""
        if self.by_distance:
            return DISTANCE_SUMS
        if self.atomic:
            return f"d{self.tensor}_atomic"
        return f"d{self.tensor}_{self.kind}" + (f"_{self.number}" if self.number > 1 else "")

    @property
    def buffer(self) -> str:
        return f"{self.accumulator}_ptr"

    @property
    def flag(self) -> str:
        """The constexpr that says whether a call asks for the gradient; empty if every call does."""
        return f"GRAD_{self.tensor.upper()}" if self.trained else ""

    @property
    def sign(self) -> int:
        """1 or -1 if that is the factor on each pair's ds; otherwise 0."""
        return next((sign for sign in (1, -1) if is_const(self.local, sign)), 0)

    @property
    def is_sum(self) -> bool:
        """True if the term is a plain sum of ds over a row or a key in every call: an MMA with ones computes it.

        A term that only some calls ask for stays apart, so that it costs the other calls nothing.
        """
        return self.kind in (GradientKind.ROW, GradientKind.COLUMN) and self.sign != 0 and not self.trained

    @property
    def atomic(self) -> bool:
        return self.kind in (GradientKind.DIAGONAL, GradientKind.SCATTER)

    @property
    def by_distance(self) -> bool:
        return self.kind is GradientKind.DISTANCE

    @property
    def in_dq(self) -> bool:
        """True if the dq kernel gathers it."""
        return self.kind not in (GradientKind.COLUMN, GradientKind.DISTANCE)

    @property
    def summed(self) -> bool:
        """True if a program keeps a vector of sums over its loop."""
        return self.kind in (GradientKind.HEAD, GradientKind.ROW, GradientKind.COLUMN)

    @property
    def per_row(self) -> bool:
        return self.kind is GradientKind.ROW

    @property
    def axis(self) -> int:
        """The positional axis of a direct term."""
        return next(i for i, index in enumerate(self.load.indices) if names(index) & (QUERY_NAMES | KEY_NAMES))


def gradient_terms(variant: Variant, mode: Mode = Mode.DENSE) -> tuple[GradientTerm, ...]:
    """One term per read of a trained tensor that the score depends on; terms of the log-decay come last.

    The variant is `specialised` to the mode.
    """
    terms: list[GradientTerm] = []
    # Only dense calls sum by distance: a segmented call may give any positions, a packed one has many sequences.
    sums_distances = mode is Mode.DENSE and added_by_distance(variant) is not None
    seen: Counter[tuple[str, GradientKind]] = Counter()
    for load in expr.loads(variant.score) if variant.score is not None else ():
        spec = variant.tensors[load.tensor]
        local = derivative(variant.score, load) if spec.grad and variant.score is not None else const(0.0)
        if expr.is_const(local, 0):
            continue
        kind = gradient_kind(load, spec, mode)
        if kind is GradientKind.DIAGONAL and sums_distances and any(is_const(local, sign) for sign in (1, -1)):
            kind = GradientKind.DISTANCE
        seen[load.tensor, kind] += 1
        terms.append(
            GradientTerm(
                tensor=load.tensor,
                kind=kind,
                local=local,
                load=load,
                dims=spec.dims,
                number=seen[load.tensor, kind],
                # Not ROW: a query position may leave the tensor, and its gradient goes to the element that the clamped
                # index reads.
                direct=kind in (GradientKind.HEAD, GradientKind.COLUMN) and _is_plain(load, spec, mode),
                trained=True,
            )
        )
    if variant.decay:
        for axis, kind, sign in (("q", GradientKind.ROW, 1.0), ("kv", GradientKind.COLUMN, -1.0)):
            terms.append(GradientTerm(tensor="decay", kind=kind, local=const(sign), load=decay_load(axis, mode)))
    return tuple(terms)


def atomic_modes(variant: Variant) -> dict[str, list[Mode]]:
    """Tensor whose gradient is added with atomics -> the modes in which it is."""
    found: dict[str, list[Mode]] = {}
    for mode in Mode:
        atomic = dict.fromkeys(t.tensor for t in gradient_terms(specialised(variant, mode), mode) if t.atomic)
        for tensor in atomic:
            found.setdefault(tensor, []).append(mode)
    return found


def deterministic_modes(variant: Variant) -> list[Mode]:
    """The modes in which no gradient uses atomics, so that equal inputs give equal bits."""
    atomic = atomic_modes(variant).values()
    return [mode for mode in Mode if not any(mode in modes for modes in atomic)]


def decay_load(axis: str, mode: Mode) -> Load:
    """The cumulative log-decay at a query (`q`) or a key (`kv`)."""
    batch = () if mode is Mode.PACKED else (int_var("b"),)
    return Load(Type.FLOAT, "decay", (*batch, int_var("h"), int_var(decay_positions(mode)[axis])))


def gradient_kind(load: Load, spec: TensorSpec, mode: Mode = Mode.DENSE) -> GradientKind:
    """The cheapest way to gather the gradient of `load`."""
    level = expr.level(load)
    if level is not Level.TILE:
        return {Level.UNIFORM: GradientKind.HEAD, Level.QUERY: GradientKind.ROW, Level.KEY: GradientKind.COLUMN}[level]
    pairs = {"b", "h", *(ROWS if mode is Mode.SEGMENTED else POSITIONS)}
    if len(load.indices) == 4 and expr.names(load) == pairs and _is_plain(load, spec, mode):
        return GradientKind.PAIR
    return GradientKind.DIAGONAL if by_lag(load) is not None else GradientKind.SCATTER


def _is_plain(load: Load, spec: TensorSpec, mode: Mode) -> bool:
    """True if the sums per head, row, key or pair have the layout of the tensor's elements.

    Every index then is a name, no two are equal, and each indexes the dim of that name or a dim that `_holds_all`.
    """
    names = [i.name for i in load.indices if isinstance(i, Var)]
    if len(names) < len(load.indices) or len(set(names)) < len(names) or {"h", "hkv"} <= set(names):
        return False
    return all(
        exact_index({spec.name: spec}, spec.name, axis, index) or _holds_all(spec.dims[axis], name, mode)
        for axis, (name, index) in enumerate(zip(names, load.indices, strict=True))
    )


def _holds_all(dim: str | int, name: str, mode: Mode) -> bool:
    """Whether a dim has one element for each row or key of the score matrix, which `name` counts."""
    if mode is Mode.PACKED:
        # A dim of keys has the sequences end to end, like the tokens. Each sequence indexes any other dim from 0 on.
        return dim == name == "kv_idx"
    if mode is Mode.SEGMENTED:
        # A call may give any positions, so that a position does not count rows.
        return name in ROWS and dim in POSITIONAL
    return name in POSITIONS and isinstance(dim, str) and dim not in ("b", "h", "hkv")
