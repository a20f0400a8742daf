"""Probabilities and ds of a block of rows in Hopper's backwards: which statements run when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.ir.expr import Level
from codegen.plan.code.statements import Assign, Part, assign, rewritten, uses
from codegen.plan.code.tree import (
    SUM,
    Arange,
    Broadcast,
    Builtin,
    Code,
    Infix,
    Name,
    Prefix,
    builtin,
    call,
    grouped,
    renamed,
)
from codegen.plan.hopper.runs import ZEROS, RunStatements, bits_of_run
from codegen.plan.hopper.thread_reads import BlockOrder, block_order, by_distance, exchanged
from codegen.plan.kernels.kernel import Block, BlockGradient, MaskRun

_START_M, _Q_LEN = Name("start_m"), Name("q_len")


@dataclass(frozen=True, kw_only=True)
class GradientStep:
    """Probabilities and ds of one block of rows, and the gradients that are summed up pair by pair.

    `reads` run ahead of the products: each thread reads one element of a vector of rows. Threads then exchange the
    elements of the vectors in `exchanged`. `shared`: statements that scores and gradients both need. `score` and
    `segments`: statements that scores need, the latter for the part of the mask that compares segments. `again`:
    statements that gradients need, computed once more after the exponentials.
    """

    reads: Sequence[Assign]
    exchanged: Sequence[str]
    shared: Sequence[Assign]
    score: Sequence[Assign]
    segments: Sequence[Assign]
    again: Sequence[Assign]
    logit: Code
    keep: Code | None
    same: Code | None
    run: RunStatements | None
    gradients: Sequence[BlockGradient]
    dscore: Code | None

    @property
    def gradients_read_keep(self) -> bool:
        return "keep" in uses([part.value for part in self.gradients], self.dscore)

    def p_dscore(self, *, is_bounded: bool) -> Code | None:
        """The probabilities times the score's derivative, None if the derivative is 1. Pairs that the mask drops have a
        probability of 0, so their product needs no condition if the derivative `is_bounded`."""
        if self.dscore is None:
            return None
        code = renamed(self.dscore, {"ds": "p"})
        return code.args[1] if is_bounded and isinstance(code, Builtin) and code.function == "where" else code

    @staticmethod
    def reads_rows(statements: Sequence[Assign]) -> bool:
        """True if statements read the vector `rows`."""
        return "rows" in uses(statements)

    @property
    def parts(self) -> list[Part]:
        """All code of the step."""
        statements = [*self.reads, *self.shared, *self.score, *self.segments, *self.again]
        run = [] if self.run is None else self.run.parts
        gradients = [part.value for part in self.gradients]
        return [*statements, self.logit, self.keep, self.same, *run, *gradients, self.dscore]


def gradient_step(block: Block, *, linear: bool, first_key: Code | None) -> GradientStep:
    """A block's statements, in the order in which a backward runs them. `linear`: a score is the scaled product.

    `first_key`: the position of a warpgroup's first key; None if positions need not follow each other.
    """
    order: BlockOrder = block_order(block)
    score, logit = [exchanged(s) for s in order.score], block.logit
    by_places: list[Part] = [*(rewritten(s, by_distance) for s in score), by_distance(logit)]
    if first_key is not None and "apart" in uses(by_places):
        score, logit = [_distance(first_key), *(rewritten(s, by_distance) for s in score)], by_distance(logit)
        run = [] if block.run is None else block.run.parts
        read = uses(score, order.segments, logit, block.keep, block.same, run)
        score = [s for s in score if s.target in read]
    return GradientStep(
        reads=order.reads,
        exchanged=order.exchanged,
        shared=[exchanged(s) for s in order.shared],
        score=score,
        segments=[exchanged(s) for s in order.segments],
        again=[exchanged(s) for s in order.gradients],
        logit=logit,
        keep=block.keep,
        same=block.same,
        run=None if block.run is None else _run(block.run, block.keep, linear=linear),
        gradients=block.gradients,
        dscore=block.dscore,
    )


def _distance(first_key: Code) -> Assign:
    """Row less key position of each pair, from places in the block, whose difference is equal along a diagonal."""
    places = Infix("-", Broadcast(Arange("BLOCK_M", "ROW"), 1), Broadcast(Arange("KEYS", "KEY"), 0))
    first_row = Infix("+", _START_M, Name("q_shift"))
    return assign("apart", Infix("+", places, Infix("-", first_row, grouped(first_key, SUM))), level=Level.TILE)


def _run(run: MaskRun, keep: Code | None, *, linear: bool) -> RunStatements:
    """Statements that find the kept rows of each key.

    Rows after the last have probabilities of 0, so the run needs no end there if scores are linear. Another score of a
    product of 0 may be inf: then the run ends at the last row."""
    first, end = Name("run_first"), Name("run_end")

    def of_keys(value: Code) -> Code:
        return Infix("+", Name(ZEROS), value)

    has_end = run.end is not None or not linear
    side, nowhere = (end, _START_M) if has_end else (first, Infix("+", _START_M, Name("BLOCK_M")))
    before = []
    if has_end:
        value = _Q_LEN if run.end is None else run.end if linear else builtin("minimum", run.end, _Q_LEN)
        run = replace(run, end=value)
    limits = {name: run.limit(name, of_keys) for name in ("first", "end", "gap_first", "gap_end")}
    before = [_of_keys(f"run_{name}", value) for name, value in limits.items() if value is not None]
    if run.own is not None:
        before.append(_of_keys(side.name, builtin("where", run.own, side, nowhere)))
    inside = Infix("<", Name("kv_idx"), Name("kv_len"))
    ragged = _of_keys(side.name, builtin("where", inside, side, nowhere))
    columns: list[Code] = []
    if has_end:
        columns.append(_rows_before(Infix("-", end, _START_M)))
    if run.first is not None:
        columns.append(Prefix("~", _rows_before(Infix("-", first, _START_M))))
    bits = bits_of_run(run, columns, _START_M, _rows_before)
    kept: Code = call("at_columns", Name("run_bits"), Name("ROW"), Name("BLOCK_M"))
    result = assign("keep", kept if keep is None else Infix("&", kept, keep), level=Level.TILE)
    return RunStatements(before=before, ragged=ragged, after=[_of_keys("run_bits", bits), result])


def _of_keys(target: str, value: Code) -> Assign:
    return assign(target, value, level=Level.KEY)


def _rows_before(end: Code) -> Code:
    return call("columns_before", end, Name("ROW"), Name("BLOCK_M"))
