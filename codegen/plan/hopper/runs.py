"""The mask of a block, if it keeps one run of keys for each row, or one run of rows for each key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from codegen.plan.code.statements import Assign, Part, uses
from codegen.plan.code.tree import Code, Infix, Name, Prefix
from codegen.plan.kernels.kernel import MaskRun

ZEROS = "run_zeros"
"""A vector of zeros. A limit that is one number for all rows, or all keys, is added to it to make a vector."""


@dataclass(frozen=True, kw_only=True)
class RunStatements:
    """Statements that compute `keep`. `ragged` is for a cut last block, and stands between `before` and `after`."""

    before: Sequence[Assign]
    ragged: Assign
    after: Sequence[Assign]

    @property
    def parts(self) -> list[Part]:
        return [*self.before, self.ragged, *self.after]

    @property
    def reads_zeros(self) -> bool:
        """True if a limit that is one number for all rows or keys is made a vector."""
        return ZEROS in uses(self.parts)


def bits_of_run(run: MaskRun, limits: Sequence[Code], start: Name, before: Callable[[Code], Code]) -> Code:
    """The bits of the positions within all limits and outside of the gap. `before` gives the bits of the positions that
    lie before a place in the block, which begins at `start`."""
    bits = list(limits)
    if run.gap_end is not None:
        ahead, behind = (before(Infix("-", Name(name), start)) for name in ("run_gap_first", "run_gap_end"))
        bits.append(Infix("|", ahead, Prefix("~", behind)))
    return reduce(lambda x, y: Infix("&", x, y), bits)
