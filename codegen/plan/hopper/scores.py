"""The scores of a block of keys in Hopper's forward: which statements run before the product, and which after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.ir.expr import Level
from codegen.plan.code.statements import (
    Assign,
    Part,
    assign,
    defines,
    needed,
    of_tokens,
    rewritten,
    tiles,
    uses,
    vectors,
    with_key_vector,
    without,
)
from codegen.plan.code.tree import Arange, Broadcast, Choice, Code, Infix, Name, Prefix, added, builtin, call
from codegen.plan.hopper.runs import ZEROS, RunStatements, bits_of_run
from codegen.plan.hopper.thread_reads import by_distance, exchanged, thread_reads
from codegen.plan.kernels.kernel import Block, KernelPlan, MaskRun

_EXCHANGED_WHERE_USED = ("own_key", "own_col", "own_segment")
"""Vectors with one element per thread that threads exchange anew in each statement that reads them."""

_ROWS, _KEYS = Arange("ROWS", "ROW"), Arange("BLOCK_N", "KEY")
OWN_KEYS = Arange("BLOCK_N", "OWN_KEY")
_START_N = Name("start_n")


@dataclass(frozen=True, kw_only=True)
class ScoreStep:
    """The scores of one block of keys, between their product and the online softmax.

    `ahead`: statements on keys alone, which run before the product. Threads then exchange the elements of the vectors
    in `exchanged`. After the product, `score` computes the scores, in the variable `tile`. `of_score`, `of_mask` and
    `of_segments` read data that the call gives for each token, ahead of the statements that need it. `keep` and `same`
    are the conditions of the mask. If the mask keeps one run of keys for each row, `run` computes `keep`.
    """

    tile: str
    ahead: Sequence[Assign]
    exchanged: Sequence[str]
    of_score: Sequence[Assign]
    score: Sequence[Assign]
    of_mask: Sequence[Assign]
    keep: Code | None
    of_segments: Sequence[Assign]
    same: Code | None
    run: RunStatements | None

    @property
    def parts(self) -> list[Part]:
        """All code of the step."""
        statements = (self.ahead, self.of_score, self.score, self.of_mask, self.of_segments)
        run = [] if self.run is None else self.run.parts
        return [*(s for each in statements for s in each), self.keep, self.same, *run]


def score_step(kernel: KernelPlan, block: Block, first_position: Code | None, *, is_masked: bool) -> ScoreStep:
    """The scores of a block, with the mask or without. `first_position`: of a warpgroup's first row."""
    keys = vectors(block.statements)
    own = [rewritten(statement, by_distance) for statement in tiles(block.statements)]
    logit = by_distance(block.logit)
    score = own if kernel.linear else [*own, assign("logit", logit, level=Level.TILE)]
    if "apart" in uses(score):
        score = [_distance(kernel, first_position), *score]
    tokens = [exchanged(statement) for statement in of_tokens(keys)]
    of_score = needed(tokens, uses(score))
    of_mask = [s for s in needed(tokens, uses(block.keep)) if s not in of_score]
    of_segments = [s for s in needed(tokens, uses(block.same)) if s not in of_score and s not in of_mask]
    later = uses(own, logit, block.keep)
    read = [name for name in defines(thread_reads(keys)) if name not in _EXCHANGED_WHERE_USED]
    return ScoreStep(
        tile=kernel.tile,
        ahead=_ahead(kernel, block, keys, is_masked=is_masked),
        exchanged=[name for name in read if name in later],
        of_score=of_score,
        score=score,
        of_mask=of_mask,
        keep=block.keep,
        of_segments=of_segments,
        same=block.same,
        run=None if block.run is None or not is_masked else _run(block.run, block.keep),
    )


def _distance(kernel: KernelPlan, first_position: Code | None) -> Assign:
    """Row less key position of each pair, from places in the block, whose difference is equal along a diagonal."""
    assert first_position is not None
    places = Infix("-", Broadcast(_ROWS, 0), Broadcast(_KEYS, 1))
    value: Code = Infix("+", places, Infix("-", first_position, _START_N))
    if kernel.segmented:
        positions = Infix("-", Broadcast(Name("q_idx"), 0), Broadcast(Name("kv_idx"), 1))
        value = Choice(positions, Name("POSITIONS"), value)
    return assign("apart", value, level=Level.TILE)


def _ahead(kernel: KernelPlan, block: Block, keys: Sequence[Assign], *, is_masked: bool) -> list[Assign]:
    """Statements on keys alone, which run before the product: a thread reads one element of a vector."""
    read = thread_reads(keys)
    later = uses([rewritten(s, by_distance) for s in tiles(block.statements)], by_distance(block.logit), block.keep)
    if is_masked and block.run is None:
        later |= {kernel.layout.keys}
    if kernel.segmented and "apart" in later:
        later |= {"kv_idx"}
    if not read:
        later |= uses(without(keys, [kernel.layout.keys])) | set(defines(without(keys, [kernel.layout.keys])))
    needs_key = bool({kernel.layout.keys, "kv_idx"} & later)
    found = [s for s in keys if (needs_key if kernel.layout.keys in s.defines else not read)]
    return found + [rewritten(s, lambda value: with_key_vector(value, OWN_KEYS)) for s in read]


def _run(run: MaskRun, keep: Code | None) -> RunStatements:
    zeros = Name(ZEROS)
    first, end, kv_len = Name("run_first"), Name("run_end"), Name("kv_len")

    def of_rows(value: Code) -> Code:
        return added(zeros, value)

    limits = {name: run.limit(name, of_rows) for name in ("first", "end", "gap_first", "gap_end")}
    before = [_of_rows(f"run_{name}", value) for name, value in limits.items() if value is not None]
    own = []
    if run.own is not None:
        behind = Infix("+", _START_N, Name("BLOCK_N"))
        side, nowhere = (end, _START_N) if run.end is not None else (first, behind)
        own.append(_of_rows(side.name, builtin("where", run.own, side, nowhere)))
    columns = []
    if run.end is not None:
        columns.append(_columns_before(Infix("-", end, _START_N)))
    if run.first is not None:
        columns.append(Prefix("~", _columns_before(Infix("-", first, _START_N))))
    run_bits = _of_rows("run_bits", bits_of_run(run, columns, _START_N, _columns_before))
    kept: Code = call("at_columns", Name("run_bits"), Name("KEY"), Name("BLOCK_N"))
    result = assign("keep", kept if keep is None else Infix("&", kept, keep), level=Level.TILE)
    if run.end is not None:
        ragged = _of_rows("run_end", builtin("minimum", end, kv_len))
        return RunStatements(before=before, ragged=ragged, after=[*own, run_bits, result])
    inside = _columns_before(Infix("-", added(zeros, kv_len), _START_N))
    ragged = _of_rows("run_bits", Infix("&", Name("run_bits"), inside))
    return RunStatements(before=[*before, *own, run_bits], ragged=ragged, after=[result])


def _of_rows(target: str, value: Code) -> Assign:
    return assign(target, value, level=Level.QUERY)


def _columns_before(end: Code) -> Code:
    return call("columns_before", end, Name("KEY"), Name("BLOCK_N"))
