"""The plan of Hopper's forward: what each of its warps reads, and the statements of each, in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codegen.plan.code import tree
from codegen.plan.code.loop_bounds import LoopBounds
from codegen.plan.code.statements import (
    Assign,
    Part,
    Statement,
    assign,
    calls,
    defines,
    needed,
    renamed,
    rewritten,
    uses,
    with_key_vector,
)
from codegen.plan.code.tree import (
    Choice,
    Code,
    Infix,
    Literal,
    Name,
    added,
    builtin,
    product,
    rebuilt,
)
from codegen.plan.hopper.kernels import wide_forward_name
from codegen.plan.hopper.roles import Role, VisitFunction, math_imports, role, sorted_names, visit_function
from codegen.plan.hopper.scores import OWN_KEYS, ScoreStep, score_step
from codegen.plan.hopper.tanh import exponentials
from codegen.plan.hopper.thread_reads import OWN, by_distance
from codegen.plan.hopper.visits import full_start, partial_start, visit_counts
from codegen.plan.kernels.kernel import Block, KernelPlan
from codegen.spec.model import Variant

_START_N = Name("start_n")
_FIRST_ROW = Infix("+", Name("start_m"), product(Name("PART"), Name("ROWS")))


@dataclass(frozen=True)
class ForwardPlan:
    """One forward of Hopper's family.

    `kernel_of_terms`: the kernel as its consumers compute it, if products add the terms of keys to their scores.
    """

    kernel: KernelPlan
    variant: Variant
    kernel_of_terms: KernelPlan | None = None

    @cached_property
    def consumers(self) -> ForwardPlan:
        """The plan of the warpgroups that compute up to 256 columns."""
        return self if self.kernel_of_terms is None else TermForwardPlan(self.kernel_of_terms, self.variant, whole=self)

    @property
    def has_terms(self) -> bool:
        """True if products add the terms of keys."""
        return False

    @property
    def plain_maximum_is_finite(self) -> bool:
        """True if a block without the mask has a finite score for each row."""
        return self.kernel.linear

    @property
    def term_prologue(self) -> list[Assign]:
        """Statements that the terms need once for each block of rows."""
        return []

    @property
    def term_statements(self) -> list[Assign]:
        """Statements that read the terms of a block of keys."""
        return []

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

    @property
    def fp8(self) -> bool:
        """True if q, k and v are float8_e4m3fn."""
        return False

    @property
    def split(self) -> bool:
        """True if the kernel computes dq for more than 256 columns, not o."""
        return False

    @property
    def packed_weights(self) -> str:
        """The variable of the weights that the loop carries, several in a word."""
        return "p_pairs"

    @property
    def has_fixed_reference(self) -> bool:
        """True if bfloat16 weights need no maximum of their row."""
        return self.kernel.fixed_reference is not None

    @property
    def exponentials(self) -> Code | None:
        """The weights of a block without the mask, if one call computes them all from the block's product."""
        if not self.has_fixed_reference or self.kernel.row_term is not None or self.plain.of_score:
            return None
        return exponentials(self._full.logit, Name("REFERENCE"))

    # -- the blocks of keys that a block of rows visits

    @property
    def visits(self) -> list[Statement]:
        """Statements that count the blocks of keys."""
        return visit_counts(self.bounds, "BLOCK_N", always=True)

    @cached_property
    def visited_keys(self) -> VisitFunction | None:
        """The function that counts the blocks of keys, if that takes more than two statements."""
        counts = [Name("num_partial"), Name("num_full")]
        return visit_function(self.visits, [*counts, *self._block_starts, *self._first_plain])

    def visits_read_by(self, role: str) -> frozenset[str]:
        """The results of `visited_keys` that the producer of `rows` or of `keys` reads."""
        counts = frozenset({"num_masked"} | ({"num_partial", "num_full"} if self.bounds.has_full else set()))
        return counts | uses(self._block_starts if role == "keys" else self._first_plain)

    @property
    def _block_starts(self) -> list[Assign]:
        found = [*self.masked_start, *self.start_without_masked]
        return [*found, *self.plain_start] if self.bounds.has_full else found

    @property
    def _first_plain(self) -> list[Code]:
        return [self.first_plain] if self.counts_plain_blocks else []

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
        """Where the first block starts if no block needs a mask; empty if `masked_start` covers this case."""
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
            fields += sorted(uses(kernel.layout.published_lse_offset) & {"lse_start"})
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
        """Statements that run once for each block of rows."""
        return needed(self.kernel.prologue, self._block_reads)

    @cached_property
    def _reads(self) -> frozenset[str]:
        own = {"q_shift"} if self.variant.dropout else set()
        return self._block_reads | uses(self.prologue) | own

    @property
    def reads_key_head(self) -> bool:
        return "hkv" in self._reads

    @cached_property
    def masked(self) -> ScoreStep:
        """The scores of a block with the mask."""
        return score_step(self.kernel, self._partial, self._first_position, is_masked=True)

    @cached_property
    def plain(self) -> ScoreStep:
        """The scores of a block without the mask."""
        return score_step(self.kernel, self._full, self._first_position, is_masked=False)

    @property
    def row_term_is_name(self) -> bool:
        """True if the part of a score that all keys of a row share is a vector that has a name."""
        return isinstance(self.kernel.row_term, Name)

    @property
    def row_term_name(self) -> str:
        """The variable with the part of a score that all keys of a row share."""
        return self.kernel.row_term.name if isinstance(self.kernel.row_term, Name) else "row_term"

    @property
    def reads_own_keys(self) -> bool:
        """True if each thread reads one element of a vector of keys ahead of the product."""
        steps = (self.plain, self.masked)
        return any(node == OWN_KEYS for s in steps for a in s.ahead for v in a.values for node in v.walk())

    @property
    def in_pieces(self) -> bool:
        """True if tiles of q, k and v may be copied and stored in pieces, which leave out columns that pad them."""
        return not (self.fp8 or self.kernel.paged)

    @property
    def wide(self) -> bool:
        """True if the file also has the kernel for more than 256 columns."""
        return not self.fp8

    @property
    def wide_name(self) -> str:
        """The name of the kernel for more than 256 columns."""
        return wide_forward_name(self.kernel)

    @property
    def imports(self) -> dict[str, list[str]]:
        """Module of the device library -> the names that the kernels take from it."""
        shared = ["LN2", "make_ring", "make_work_ring", "no_sums", "product_layout"]
        if self.in_pieces:
            shared += ["piece_columns"]
        if self.kernel.longest_first and not self.kernel.shares_work:
            shared += ["balanced_blocks", "count_items"]
        packed = ["SequenceRows", "describe_packed_rows", "load_sequence"]
        shared += packed if self.kernel.packed else ["HeadRows", "describe_rows"]
        shared += ["at_columns", "columns_before"] if self._partial.run is not None else []
        parts: list[Part] = [*self.visits, *self.producer_prologue, *self.prologue, self.kernel.row_term]
        parts += [*self.masked.parts, *self.plain.parts]
        shared += ["LOG2E"] if self.kernel.linear or self.variant.sink or "LOG2E" in uses(parts) else []
        forward = ["ROWS", "add_lanes", "begin_block", "begin_pv", "change_turns", "end_pv", "lane_layout"]
        forward += ["make_key_ring", "pack_pairs", "query_stages", "raise_maximum", "rescale", "store_rows"]
        if not self.fp8:
            shared += ["sum_parts"]
            forward += ["store_rest"]
        found = {"gl": shared, "gl_forward": [*forward, "unpack_pairs"], "gl_versions": ["aggregate", "concat"]}
        if self.consumers.has_terms:
            found["gl_terms"] = ["make_key_terms", "term_layout"]
        if self.wide:
            shared += ["SWIZZLE_COLS", "count_pieces"]
            wide = ["compute_scores", "make_weight_ring", "make_wide_key_ring", "no_half_sums"]
            found["gl_forward_wide"] = wide
        if self.kernel.packed or self.kernel.leaves_runs:
            found["block_seqs"] = ["NUM_BLOCKS"]
        if self.variant.dropout:
            found["gl_dropout"] = ["without_dropped"]
        if math := math_imports(parts):
            found["gl_math"] = math
        if self.has_fixed_reference:
            found["gl_capped"] = ["add_columns", *sorted(calls(self.exponentials))]
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
        """The arguments that the launch passes beside those of the portable kernel."""
        batch = [] if self.kernel.packed else ["batch"]
        runs = ["run_blocks_ptr"] if self.kernel.leaves_runs else []
        return batch + runs + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @property
    def constants(self) -> list[str]:
        return [*self.kernel.constants, "STAGES"]

    @cached_property
    def producer_prologue(self) -> list[Assign]:
        """Statements that the number of visited blocks is computed from."""
        return needed(self.kernel.prologue, uses(self.visits) | set(defines(self.visits)))

    def _producer(self, reads: frozenset[str], own: str) -> Role:
        """A producer's role. Producers compute where a block of rows is, and which blocks of keys it visits."""
        reads |= uses(self.visits, self.producer_prologue)
        own += " BLOCK_M num_heads q_len block_seqs_ptr"
        own += " group_size" if "hkv" in reads else ""
        own += " q_offset Q_OFFSET_PER_BATCH Q_AT_END" if "q_shift" in reads and self.kernel.has_offset else ""
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
        tables = uses(self._block_starts) & {"block_list_ptr"}
        return self._producer(
            tables | {"hkv", "kv_start"}, "kv_len BLOCK_N" if self.kernel.shares_work else "kv_len BLOCK_N batch"
        )

    @cached_property
    def consumer(self) -> Role:
        """The warpgroups that compute."""
        kernel, variant = self.kernel, self.variant
        own = "o_ptr lse_ptr stride_ob stride_oh stride_os q_len kv_len HEAD_DIM_V BLOCK_DV BLOCK_M BLOCK_N RAGGED"
        own += " stride_lseb stride_lseh" if kernel.paged else " q_total" if kernel.packed else " num_heads"
        own += " HEAD_DIM" if not self.fp8 else ""
        own += " scale" if kernel.linear else ""
        own += " sink_ptr" if variant.sink else ""
        own += (
            " seed threshold keep_scale first_head all_heads row_origin key_origin DROPOUT" if variant.dropout else ""
        )
        own += " group_size" if self.reads_key_head else ""
        reads = self._reads | uses(self.masked.parts, self.plain.parts)
        return role(kernel, self._args, self.constants, reads, own)

    # -- warpgroups for more than 256 columns

    @cached_property
    def weigher(self) -> Role:
        """The warpgroup that computes weights: of what consumers take, all but what describes o."""
        found = self.consumer
        of_o = {"o_ptr", "stride_ob", "stride_oh", "stride_os", "HEAD_DIM_V", "BLOCK_DV"}
        own = [name for name in (*found.tensors, *found.literals) if name not in of_o]
        return role(self.kernel, self._args, self.constants, found.reads, " ".join(own))

    @cached_property
    def adder(self) -> Role:
        """The warpgroups that add up values."""
        return role(
            self.kernel, self._args, self.constants, self._o_reads, "o_ptr stride_os q_len HEAD_DIM_V BLOCK_DV BLOCK_M"
        )

    @property
    def _o_reads(self) -> frozenset[str]:
        return uses(self.kernel.layout.head_offset("o", "h", "q"))

    @property
    def weighed_fields(self) -> list[str]:
        """The fields that the statements of the warpgroup of weights read by name."""
        reads = self._reads | uses(self.kernel.layout.published_lse_offset)
        return [f for f in self.unpacked_fields if f != "q_start" or f in reads]

    @property
    def stored_fields(self) -> list[str]:
        """The fields of the work descriptor that say where o is stored."""
        return [f for f in self.work_fields if f in self._o_reads or f == "q_len"]

    @property
    def reads_part(self) -> bool:
        """True if the statements of a block name the warpgroup."""
        steps = (*self.masked.parts, *self.plain.parts)
        return self.variant.dropout or "PART" in uses(steps, self.prologue)


@dataclass(frozen=True)
class TermForwardPlan(ForwardPlan):
    """The warps of a forward whose products add the terms of keys. The producer of keys computes the terms.

    `whole`: the plan of the other warps, and of the kernel for more than 256 columns.
    """

    whole: ForwardPlan | None = None

    @property
    def visited_keys(self) -> VisitFunction | None:
        assert self.whole is not None
        return self.whole.visited_keys

    @property
    def has_terms(self) -> bool:
        return True

    @property
    def plain_maximum_is_finite(self) -> bool:
        return self.kernel.key_term_is_finite

    @property
    def term(self) -> Code:
        """The terms of a block of keys, from what `term_prologue` and `term_statements` define."""
        assert self.kernel.key_term is not None
        return tree.renamed(self.kernel.key_term, OWN)

    @property
    def term_prologue(self) -> list[Assign]:
        return needed(self.kernel.prologue, uses(self.term_statements, self.term))

    @property
    def term_statements(self) -> list[Assign]:
        own = [renamed(statement, OWN) for statement in self.kernel.key_statements]
        return [rewritten(statement, lambda value: with_key_vector(value, OWN_KEYS)) for statement in own]

    @cached_property
    def keys(self) -> Role:
        """The producer of keys, values and terms."""
        found = super().keys
        reads = found.reads | uses(self.term_prologue, self.term_statements, self.term)
        return self._producer(reads, " ".join(["scale", *found.tensors, *found.literals]))
