"""The plan of Hopper's forward: what each of its warps reads, and the statements of each, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from codegen.ir.expr import Level
from codegen.plan.code import (
    Arange,
    Broadcast,
    Choice,
    Code,
    Infix,
    Literal,
    Name,
    Prefix,
    added,
    builtin,
    call,
    product,
    rebuilt,
)
from codegen.plan.hopper_roles import Role, math_imports, role, sorted_names
from codegen.plan.hopper_runs import ZEROS, RunStatements
from codegen.plan.hopper_visits import full_start, partial_start, visit_counts
from codegen.plan.kernel import Block, KernelPlan
from codegen.plan.loop_bounds import LoopBounds
from codegen.plan.statements import (
    Assign,
    Part,
    Statement,
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
from codegen.plan.thread_reads import by_distance, exchanged, thread_reads
from codegen.spec.model import Variant

_EXCHANGED_WHERE_USED = ("own_key", "own_col", "own_segment")
"""Vectors of one element a thread that each reader exchanges for itself."""

_ROWS, _KEYS = Arange("ROWS", "ROW"), Arange("BLOCK_N", "KEY")
_OWN_KEYS = Arange("BLOCK_N", "OWN_KEY")
_START_N = Name("start_n")
_FIRST_ROW = Infix("+", Name("start_m"), product(Name("PART"), Name("ROWS")))


@dataclass(frozen=True, kw_only=True)
class ScoreStep:
    """The scores of one block of keys, between their product and the online softmax.

    `ahead`: of keys alone, computed ahead of the product; of these, threads then exchange the `exchanged`. Behind it,
    `score` leads to the scores, in the variable `tile`. `of_score`, `of_mask` and `of_segments` are what the call gives
    of tokens, each read ahead of its use. `keep` and `same` are the conditions of the mask; of a mask that leaves each
    row one run of keys, `run` finds `keep`.
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
        """All code of it."""
        statements = (self.ahead, self.of_score, self.score, self.of_mask, self.of_segments)
        run = [] if self.run is None else self.run.parts
        return [*(s for each in statements for s in each), self.keep, self.same, *run]


@dataclass(frozen=True)
class ForwardPlan:
    """One forward of Hopper's family."""

    kernel: KernelPlan
    variant: Variant

    @property
    def bounds(self) -> LoopBounds:
        assert self.kernel.bounds is not None
        return self.kernel.bounds

    @property
    def _full(self) -> Block:
        assert self.kernel.full is not None
        return self.kernel.full

    @property
    def _partial(self) -> Block:
        assert self.kernel.partial is not None
        return self.kernel.partial

    # -- the blocks of keys that a block of rows visits

    @property
    def visits(self) -> list[Statement]:
        """Statements that count the blocks of keys."""
        return visit_counts(self.bounds, "BLOCK_N", always=True)

    @property
    def may_see_nothing(self) -> bool:
        """True if a row may attend to no key."""
        return self.bounds.masked or self.kernel.packed

    @property
    def masked_start(self) -> list[Assign]:
        """Where the nth block with a mask starts."""
        bounds = self.bounds
        found = partial_start(bounds, "start_n", "BLOCK_N")
        if bounds.jumps or bounds.two_sided or bounds.begins_partial:
            inside = Infix("<", _START_N, Name("kv_len"))
            found.append(assign("start_n", builtin("where", inside, _START_N, Literal(0))))
        if self._first_full_is_zero:
            exists = Infix(">", Name("num_partial"), Literal(0))
            found.append(assign("start_n", builtin("where", exists, _START_N, Literal(0))))
        return found

    @property
    def start_without_masked(self) -> list[Assign]:
        """Where the first block starts if none needs a mask, unless `masked_start` has that."""
        if not self.bounds.has_full or self._first_full_is_zero:
            return []
        return full_start(self.bounds, "start_n", "BLOCK_N", Literal(0))

    @property
    def _first_full_is_zero(self) -> bool:
        bounds = self.bounds
        return bounds.has_full and bounds.full_from_zero and not bounds.full_jumps and not bounds.lists

    @property
    def plain_start(self) -> list[Assign]:
        """Where the nth block without a mask starts."""
        return full_start(self.bounds, "start_n", "BLOCK_N")

    @property
    def first_plain(self) -> Code:
        """The number of the first block that is visited without the mask."""
        taken = Infix("-", Name("num_masked"), Name("num_partial"))
        if self.bounds.full_from_zero:
            return taken
        return added(Infix("//", self.bounds.full_begin, Name("BLOCK_N")), taken)

    # -- the work descriptor

    @cached_property
    def work_fields(self) -> list[str]:
        """The fields of the work descriptor, in order."""
        kernel, reads = self.kernel, self._reads
        fields = ["item"] if kernel.shares_work else []
        fields += ["h"] if kernel.packed and not self.variant.dropout and "b" not in reads else ["h", "b"]
        fields += ["block"]
        fields += ["q_shift"] if kernel.has_offset and "q_shift" in reads else []
        if kernel.packed:
            fields += ["q_start", "q_len", *(["kv_start"] if "kv_start" in reads else []), "kv_len"]
        fields += ["num_masked"] + (["num_plain"] if self.bounds.has_full else [])
        return fields + (["first_plain"] if self.counts_plain_blocks else [])

    @property
    def unpacked_fields(self) -> list[str]:
        """The fields that the statements of a block of rows read by name."""
        return [f for f in self.work_fields if f not in ("item", "block", "num_masked", "num_plain", "first_plain")]

    @property
    def counts_plain_blocks(self) -> bool:
        """True if consumers count the blocks without a mask from the first on, instead of reading each one's number."""
        read = {"start_n", "kv_idx"} & uses(self._full.statements, self._full.logit, self.kernel.row_term)
        return self._is_steady and self.bounds.has_full and (self.variant.dropout or bool(read))

    @property
    def _is_steady(self) -> bool:
        """True if the blocks without a mask follow each other."""
        return not self.bounds.lists and not self.bounds.full_jumps

    @property
    def reads_plain_number(self) -> bool:
        """True if consumers read the number of each block without a mask."""
        return not self._is_steady and (bool(self._full.statements) or self.variant.dropout)

    # -- consumers

    @cached_property
    def _first_position(self) -> Code | None:
        """The position of a warpgroup's first row, if the call gives no positions."""
        found = needed(self.kernel.prologue, {"q_idx"})
        if not found:
            return None
        value = found[-1].value
        value = value.otherwise if isinstance(value, Choice) else value
        return rebuilt(value, lambda node: _FIRST_ROW if node == Name("rows") else None)

    @cached_property
    def _block_reads(self) -> frozenset[str]:
        """The names that consumers read for a block of scores."""
        full, partial = self._full, self._partial
        statements = [rewritten(s, by_distance) for s in (*full.statements, *partial.statements)]
        reads = uses(statements, by_distance(full.logit), by_distance(partial.logit), self.kernel.row_term)
        reads |= uses(partial.keep, partial.same, [] if partial.run is None else partial.run.parts)
        if "apart" in reads:
            reads |= uses(self._first_position) | ({"q_idx"} if self.kernel.segmented else set())
        return reads

    @cached_property
    def prologue(self) -> list[Assign]:
        """Statements of a block of rows."""
        return needed(self.kernel.prologue, self._block_reads)

    @cached_property
    def _reads(self) -> frozenset[str]:
        return self._block_reads | uses(self.prologue)

    @property
    def reads_key_head(self) -> bool:
        return "hkv" in self._reads

    @cached_property
    def masked(self) -> ScoreStep:
        """The scores of a block with the mask."""
        return self._step(self._partial, is_masked=True)

    @cached_property
    def plain(self) -> ScoreStep:
        """The scores of a block without the mask."""
        return self._step(self._full, is_masked=False)

    def _step(self, block: Block, *, is_masked: bool) -> ScoreStep:
        kernel = self.kernel
        keys = vectors(block.statements)
        own = [rewritten(statement, by_distance) for statement in tiles(block.statements)]
        logit = by_distance(block.logit)
        score = own if kernel.linear else [*own, assign("logit", logit, level=Level.TILE)]
        if "apart" in uses(score):
            score = [self._distance(), *score]
        tokens = [exchanged(statement) for statement in of_tokens(keys)]
        of_score = needed(tokens, uses(score))
        of_mask = [s for s in needed(tokens, uses(block.keep)) if s not in of_score]
        of_segments = [s for s in needed(tokens, uses(block.same)) if s not in of_score and s not in of_mask]
        later = uses(own, logit, block.keep)
        read = [name for name in defines(thread_reads(keys)) if name not in _EXCHANGED_WHERE_USED]
        return ScoreStep(
            tile=kernel.tile,
            ahead=self._ahead(block, keys, is_masked=is_masked),
            exchanged=[name for name in read if name in later],
            of_score=of_score,
            score=score,
            of_mask=of_mask,
            keep=block.keep,
            of_segments=of_segments,
            same=block.same,
            run=self._run() if is_masked and block.run is not None else None,
        )

    def _distance(self) -> Assign:
        """How far each pair's row is behind its key: from places in the block, which are the same along a diagonal."""
        assert self._first_position is not None
        places = Infix("-", Broadcast(_ROWS, 0), Broadcast(_KEYS, 1))
        value: Code = Infix("+", places, Infix("-", self._first_position, _START_N))
        if self.kernel.segmented:
            positions = Infix("-", Broadcast(Name("q_idx"), 0), Broadcast(Name("kv_idx"), 1))
            value = Choice(positions, Name("POSITIONS"), value)
        return assign("apart", value, level=Level.TILE)

    def _ahead(self, block: Block, keys: Sequence[Assign], *, is_masked: bool) -> list[Assign]:
        """What is computed of keys alone, ahead of the product: a thread reads one element of a vector."""
        kernel = self.kernel
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
        return found + [rewritten(s, lambda value: with_key_vector(value, _OWN_KEYS)) for s in read]

    def _run(self) -> RunStatements:
        run, keep = self._partial.run, self._partial.keep
        assert run is not None
        zeros = Name(ZEROS)
        first, end, kv_len = Name("run_first"), Name("run_end"), Name("kv_len")

        def of_rows(value: Code, *, is_vector: bool) -> Code:
            return value if is_vector else added(zeros, value)

        before = []
        if run.first is not None:
            before.append(_of_rows("run_first", of_rows(run.first, is_vector=run.first_is_vector)))
        if run.end is not None:
            before.append(_of_rows("run_end", of_rows(run.end, is_vector=run.end_is_vector)))
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
        bits = columns[0] if len(columns) == 1 else Infix("&", *columns)
        run_bits = _of_rows("run_bits", bits)
        kept: Code = call("at_columns", Name("run_bits"), Name("KEY"), Name("BLOCK_N"))
        result = assign("keep", kept if keep is None else Infix("&", kept, keep), level=Level.TILE)
        if run.end is not None:
            ragged = _of_rows("run_end", builtin("minimum", end, kv_len))
            return RunStatements(before=before, ragged=ragged, after=[*own, run_bits, result])
        inside = _columns_before(Infix("-", added(zeros, kv_len), _START_N))
        ragged = _of_rows("run_bits", Infix("&", Name("run_bits"), inside))
        return RunStatements(before=[*before, *own, run_bits], ragged=ragged, after=[result])

    @property
    def row_term_is_name(self) -> bool:
        """True if what all keys of a row share is a vector that has a name."""
        return isinstance(self.kernel.row_term, Name)

    @property
    def row_term_name(self) -> str:
        """The variable of what all keys of a row share."""
        return self.kernel.row_term.name if isinstance(self.kernel.row_term, Name) else "row_term"

    @property
    def reads_own_keys(self) -> bool:
        """True if threads read an element of each vector of keys ahead of the product."""
        steps = (self.plain, self.masked)
        return any(node == _OWN_KEYS for s in steps for a in s.ahead for v in a.values for node in v.walk())

    @property
    def imports(self) -> dict[str, list[str]]:
        """Module of the device library -> the names that the kernel takes from it."""
        shared = ["LN2", "make_ring", "make_work_ring", "product_layout"]
        shared += ["SequenceRows", "describe_packed_rows"] if self.kernel.packed else ["HeadRows", "describe_rows"]
        shared += ["at_columns", "columns_before"] if self._partial.run is not None else []
        parts: list[Part] = [*self.visits, *self._producer_prologue, *self.prologue, self.kernel.row_term]
        parts += [*self.masked.parts, *self.plain.parts]
        shared += ["LOG2E"] if self.kernel.linear or self.variant.sink or "LOG2E" in uses(parts) else []
        forward = ["ROWS", "add_lanes", "begin_block", "begin_pv", "change_turns", "end_pv", "lane_layout"]
        forward += ["make_key_ring", "pack_pairs", "query_stages", "raise_maximum", "rescale", "store_rows"]
        found = {"gl": shared, "gl_forward": [*forward, "unpack_pairs"], "gl_versions": ["aggregate"]}
        if self.variant.dropout:
            found["gl_dropout"] = ["without_dropped"]
        if math := math_imports(parts):
            found["gl_math"] = math
        return {module: sorted_names(found[module]) for module in sorted(found)}

    # -- roles

    @property
    def _args(self) -> list[str]:
        """The kernel's arguments that may be passed on to a role: not those that describe q, k and v."""
        described = {f"{x}_ptr" for x in "qkv"} | {f"stride_{x}{axis}" for x in "qkv" for axis in "bhs"}
        names = [name for group in self.kernel.args for name in group.names]
        return [name for name in names if name not in described] + self.extra

    @property
    def extra(self) -> list[str]:
        """What the launch passes beside the portable kernel's arguments."""
        return ([] if self.kernel.packed else ["batch"]) + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @property
    def constants(self) -> list[str]:
        return [*self.kernel.constants, "STAGES"]

    @cached_property
    def _producer_prologue(self) -> list[Assign]:
        return needed(self.kernel.prologue, uses(self.visits) | set(defines(self.visits)))

    @property
    def producer_prologue(self) -> list[Assign]:
        """What the number of visited blocks is computed of."""
        return self._producer_prologue

    def _producer(self, reads: frozenset[str], own: str) -> Role:
        """A producer computes where a block of rows is, and which blocks of keys it visits."""
        reads |= uses(self.visits, self._producer_prologue)
        own += " BLOCK_M num_heads q_len block_seqs_ptr"
        own += " group_size" if "hkv" in reads else ""
        own += " q_offset Q_OFFSET_PER_BATCH" if "q_shift" in reads and self.kernel.has_offset else ""
        return role(self.kernel, self._args, self.constants, reads, own)

    @cached_property
    def rows(self) -> Role:
        """The producer of query rows, which schedules the work."""
        own = "work_counter_ptr batch" if self.kernel.shares_work else "batch"
        own += " BLOCK_N" if self.counts_plain_blocks and not self.bounds.full_from_zero else ""
        return self._producer(frozenset({"start_m", *self.work_fields}), own)

    @cached_property
    def keys(self) -> Role:
        """The producer of keys and values."""
        starts = [*self.masked_start, *self.start_without_masked, *(self.plain_start if self.bounds.has_full else [])]
        tables = uses(starts) & {"block_list_ptr"}
        return self._producer(
            tables | {"hkv", "kv_start"}, "kv_len BLOCK_N" if self.kernel.shares_work else "kv_len BLOCK_N batch"
        )

    @cached_property
    def consumer(self) -> Role:
        """The warpgroups that compute."""
        kernel, variant = self.kernel, self.variant
        own = "o_ptr lse_ptr stride_ob stride_oh stride_os q_len kv_len HEAD_DIM_V BLOCK_DV BLOCK_M BLOCK_N RAGGED"
        own += " q_total" if kernel.packed else " num_heads"
        own += " scale" if kernel.linear else ""
        own += " sink_ptr" if variant.sink else ""
        own += " seed threshold keep_scale num_heads DROPOUT" if variant.dropout else ""
        own += " group_size" if self.reads_key_head else ""
        reads = self._reads | uses(self.masked.parts, self.plain.parts)
        return role(kernel, self._args, self.constants, reads, own)


def _of_rows(target: str, value: Code) -> Assign:
    return assign(target, value, level=Level.QUERY)


def _columns_before(end: Code) -> Code:
    return call("columns_before", end, Name("KEY"), Name("BLOCK_N"))
