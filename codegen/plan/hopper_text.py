"""The plan of a kernel as printed text, for the templates of Hopper's kernels that still analyse text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from codegen.analysis.gradients import GradientTerm
from codegen.plan.code import Code
from codegen.plan.dialects import TL
from codegen.plan.kernel import Block, KernelPlan, MaskRun
from codegen.plan.loop_bounds import Jump, LoopBounds
from codegen.plan.statements import Statement


@dataclass(frozen=True, kw_only=True)
class GradientText:
    term: GradientTerm
    text: str


@dataclass(frozen=True, kw_only=True)
class LimitsText:
    first: str
    end: str
    own: str
    first_is_vector: bool
    end_is_vector: bool

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.first, self.end, self.own) if text]


@dataclass(frozen=True, kw_only=True)
class BlockText:
    statements: Sequence[str]
    logit: str
    keep: str
    same: str
    dscore: str
    gradients: Sequence[GradientText]
    limits: LimitsText | None


def _text(code: Code | None) -> str:
    return "" if code is None else TL.text(code)


def _lines(statements: Sequence[Statement]) -> list[str]:
    return [TL.line(statement) for statement in statements]


def _limits(run: MaskRun | None) -> LimitsText | None:
    if run is None:
        return None
    return LimitsText(
        first=_text(run.first),
        end=_text(run.end),
        own=_text(run.own),
        first_is_vector=run.first_is_vector,
        end_is_vector=run.end_is_vector,
    )


def _block(block: Block | None) -> BlockText | None:
    if block is None:
        return None
    return BlockText(
        statements=_lines(block.statements),
        logit=_text(block.logit),
        keep=_text(block.keep),
        same=_text(block.same),
        dscore=_text(block.dscore),
        gradients=[GradientText(term=part.term, text=_text(part.value)) for part in block.gradients],
        limits=_limits(block.run),
    )


class BoundsText:
    """Bounds whose code is text; what else they say is the plan's."""

    def __init__(self, bounds: LoopBounds) -> None:
        self._bounds = bounds
        self.statements = _lines(bounds.statements)
        self.begin, self.end = _text(bounds.begin), _text(bounds.end)
        self.full_begin, self.full_end = _text(bounds.full_begin), _text(bounds.full_end)
        self.jumps, self.full_jumps = _jumps(bounds.jumps), _jumps(bounds.full_jumps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bounds, name)


def _jumps(jumps: Sequence[Jump]) -> list[dict[str, str]]:
    return [{"at": _text(jump.at), "by": _text(jump.by)} for jump in jumps]


class KernelText:
    """A kernel whose code is text; what else it says is the plan's."""

    def __init__(self, kernel: KernelPlan) -> None:
        self._kernel = kernel
        self.prologue, self.head_prologue = _lines(kernel.prologue), _lines(kernel.head_prologue)
        self.row_term, self.key_term, self.block_term = map(
            _text, (kernel.row_term, kernel.key_term, kernel.block_term)
        )
        self.full, self.partial = _block(kernel.full), _block(kernel.partial)
        self.bounds = None if kernel.bounds is None else BoundsText(kernel.bounds)
        self.key, self.ragged = kernel.layout.keys, TL.text(kernel.layout.ragged)
        self.types = {name: TL.dtype(dtype) for name, dtype in kernel.types.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)
