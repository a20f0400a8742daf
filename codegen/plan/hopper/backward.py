"""The plan of Hopper's backwards: what each of their warps reads, and the statements of each, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from codegen.analysis.gradients import FAR_SUMS, GradientKind, GradientTerm
from codegen.plan.code.loop_bounds import LoopBounds
from codegen.plan.code.statements import (
    Assign,
    Part,
    Statement,
    assign,
    needed,
    rewritten,
    uses,
    with_key_vector,
)
from codegen.plan.code.tree import ZERO, Arange, Code, Infix, Name, builtin, product
from codegen.plan.hopper.gradients import GradientStep, gradient_step
from codegen.plan.hopper.roles import Role, VisitFunction, math_imports, role, visit_function
from codegen.plan.hopper.visits import full_start, partial_start, visit_counts
from codegen.plan.kernels.far_blocks import BEFORE, BEHIND, SUMS
from codegen.plan.kernels.kernel import Block, KernelPlan
from codegen.spec.model import Variant


@dataclass(frozen=True)
class BackwardPlan:
    """A backward of Hopper's family. `is_wide`: for more than 128 columns; each warpgroup then owns all keys."""

    kernel: KernelPlan
    variant: Variant
    is_wide: bool

    @property
    def bounds(self) -> LoopBounds:
        assert self.kernel.bounds is not None
        return self.kernel.bounds

    @property
    def _blocks(self) -> list[Block]:
        return [block for block in (self.kernel.full, self.kernel.partial) if block is not None]

    # -- the blocks of rows that a block of keys visits

    @property
    def one_loop(self) -> bool:
        """True if no block needs a mask: rows beyond the last have probabilities of 0."""
        assert self.kernel.full is not None
        return not self.bounds.masked and self.kernel.full.dscore is None

    @property
    def visits(self) -> list[Statement]:
        """Statements that count the blocks of rows."""
        if self.one_loop:
            return [assign("num_full", Name("num_blocks"))]
        return visit_counts(self.bounds, "BLOCK_M")

    @cached_property
    def visited_rows(self) -> VisitFunction | None:
        """The function that counts the blocks of rows, if that takes more than two statements."""
        counts = map(Name, ("num_partial", "num_full"))
        return visit_function(self.visits, [*counts, *self.masked_start, *self.plain_start])

    def visits_read_by(self, *, plain: bool, masked: bool = True) -> frozenset[str]:
        """The results of `visited_rows` that loops over blocks read; `plain`, `masked`: also where blocks without, or
        with, a mask start."""
        starts = uses(self.masked_start if masked else (), self.plain_start if plain else ())
        return starts | {"num_partial", "num_full"}

    @property
    def masked_start(self) -> list[Assign]:
        """Where the nth block with a mask starts."""
        return partial_start(self.bounds, "start_m", "BLOCK_M")

    @property
    def shares_producer(self) -> bool:
        """True if both backwards share one producer, because they take their work in the same order."""
        kernel = self.kernel
        return not kernel.orders_work and (kernel.shares_work or not kernel.longest_first)

    @property
    def shared_plain_start(self) -> list[Assign]:
        """Where block `row_turn` without a mask starts, in a producer that both backwards share."""
        return self.plain_start if self.one_loop else full_start(self.bounds, "start_m", "BLOCK_M", Name("row_turn"))

    @property
    def plain_start(self) -> list[Assign]:
        """Where the nth block without a mask starts; in a wide kernel, block `row_turn`."""
        if self.one_loop:
            return [assign("start_m", product(Name("nth"), Name("BLOCK_M")))]
        return full_start(self.bounds, "start_m", "BLOCK_M", Name("row_turn" if self.is_wide else "nth"))

    @property
    def far_loops(self) -> bool:
        """True if far blocks without a mask have loops of their own, before and after the loop over the others."""
        bounds, far = self.bounds, self.kernel.far
        return far is not None and bounds.has_full and not (self.is_wide or bounds.lists or bounds.full_jumps)

    def plain_blocks_before(self, row: str) -> Code:
        """How many blocks without a mask start before a row; of a kernel with `far_loops`."""
        rows = (
            Name(row) if self.one_loop or self.bounds.full_from_zero else Infix("-", Name(row), self.bounds.full_begin)
        )
        blocks = builtin("cdiv", builtin("maximum", rows, ZERO), Name("BLOCK_M"))
        return builtin("minimum", blocks, Name("num_full"))

    @property
    def visit_prologue(self) -> list[Assign]:
        """Statements that the number of visited blocks is computed from, once for each block of keys."""
        return needed(self.kernel.prologue, self._visit_names)

    @property
    def visit_head_prologue(self) -> list[Assign]:
        """Statements that the number of visited blocks is computed from, once for each query head."""
        return needed(self.kernel.head_prologue, self._visit_names)

    @property
    def _visit_names(self) -> frozenset[str]:
        return uses(self.visits).union(*(statement.defines for statement in self.visits))

    # -- the warpgroups that compute probabilities and ds

    @property
    def _keys(self) -> Code:
        """The keys of a warpgroup, counted from the block's first key: half of the block, or all of it if `is_wide`."""
        keys = Arange("KEYS", "KEY")
        return keys if self.is_wide else Infix("+", product(Name("PART"), Name("KEYS")), keys)

    def _of_keys(self, statements: Sequence[Assign]) -> list[Assign]:
        return [rewritten(s, lambda value: with_key_vector(value, self._keys)) for s in statements]

    @property
    def prologue(self) -> list[Assign]:
        """Statements that run once for each block of keys."""
        return self._of_keys(self._without_far(self.kernel.prologue))

    @property
    def head_prologue(self) -> list[Assign]:
        """Statements that run once for each block of keys and query head."""
        return self._of_keys(self._without_far(self.kernel.head_prologue))

    def _without_far(self, statements: Sequence[Assign]) -> Sequence[Assign]:
        """The statements without those that only scores of far blocks read, unless far blocks have their own loops."""
        kernel = self.kernel
        if kernel.far is None or self.far_loops:
            return statements
        blocks = [part for block in self._blocks for part in block.parts]
        others = uses(kernel.prologue, kernel.head_prologue, blocks, kernel.key_term, kernel.block_term)
        far = uses(list(kernel.far.logits.values())) - others
        return [s for s in statements if not s.defines & far]

    @property
    def key_term(self) -> Code | None:
        """The part of a score that all rows of a key share."""
        return None if self.kernel.key_term is None else with_key_vector(self.kernel.key_term, self._keys)

    @property
    def block_term_of_rows(self) -> bool:
        """True if the part that all scores of a block share changes from one block of rows to the next."""
        return "row_start" in uses(self.kernel.block_term)

    @cached_property
    def masked(self) -> GradientStep:
        assert self.kernel.partial is not None
        return gradient_step(self.kernel.partial, linear=self.kernel.linear, first_key=self.first_key)

    @cached_property
    def plain(self) -> GradientStep:
        assert self.kernel.full is not None
        return gradient_step(self.kernel.full, linear=self.kernel.linear, first_key=self.first_key)

    @property
    def first_key(self) -> Code | None:
        """The position of a warpgroup's first key; None if a call may give any positions."""
        if self.kernel.segmented:
            return None
        start = Name("start_n")
        return start if self.is_wide else Infix("+", start, product(Name("PART"), Name("KEYS")))

    @property
    def derivative_first(self) -> bool:
        """True if probabilities are multiplied by the score's derivative before dp is computed. The values that both
        are computed from are then no longer live while dp is. It is False if anything is summed pair by pair: such sums
        read ds without the derivative, and later."""
        sums = self.kernel.row_adds or self.plain.gradients or self.masked.gradients or self.variant.dropout
        return self.plain.dscore is not None and not sums

    @property
    def _steps(self) -> list[GradientStep]:
        return [self.plain] if self.one_loop else ([self.plain] if self.bounds.has_full else []) + [self.masked]

    @property
    def reads_own_rows(self) -> bool:
        """True if each thread reads one element of a vector of rows ahead of the products."""
        return any(step.reads for step in self._steps)

    @property
    def reads_row_layout(self) -> bool:
        """True if a vector of rows, in the layout of scores, is read at all."""
        kernel = self.kernel
        if not kernel.linear or kernel.row_adds or any(step.exchanged for step in self._steps):
            return True
        if not self.one_loop and self.masked.run is None and self.masked.keep is None:
            return True
        return any(
            "ROW" in uses(s.parts) or GradientStep.reads_rows([*s.shared, *s.score, *s.segments, *s.again])
            for s in self._steps
        )

    @property
    def plain_reads_rows(self) -> bool:
        """True if consumers read where a block of rows without a mask starts."""
        kernel, step = self.kernel, self.plain
        own = bool(kernel.row_adds) or self.variant.dropout or not kernel.linear
        own = own or bool(step.reads) or self.block_term_of_rows or kernel.far is not None
        return own or "start_m" in uses(step.parts) or GradientStep.reads_rows([*step.shared, *step.again])

    # -- what is stored for each query head

    @property
    def head_sums(self) -> list[GradientTerm]:
        """The terms that are stored after the loop over a head's rows."""
        return [term for term in self.kernel.stores if term.kind is not GradientKind.ROW]

    # -- arguments

    @property
    def counts(self) -> list[str]:
        """The numbers that the launch passes beside the portable kernel's arguments."""
        if not self.kernel.packed:
            return ["batch"]
        per_head = any(term.kind is GradientKind.HEAD for term in self.kernel.stores)
        return ["num_seqs", *(["num_entries"] if per_head else [])]

    @property
    def extra(self) -> list[str]:
        runs = ["run_keys_ptr"] if self.kernel.leaves_runs else []
        return self.counts + runs + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @property
    def constants(self) -> list[str]:
        return [*self.kernel.constants, "STAGES", "WITH_DQ"]

    @property
    def _args(self) -> list[str]:
        return [name for group in self.kernel.args for name in group.names] + self.extra

    @property
    def _head_rows(self) -> str:
        """The names from which the place of a head's first block of rows is computed."""
        return "h num_row_blocks row_first" if self.kernel.packed else "h b num_heads num_blocks"

    @property
    def _own_rows(self) -> str:
        """The names from which the place of a head's first row in a buffer of row sums is computed."""
        return "h q_total q_start q_len" if self.kernel.packed else "h b num_heads q_len"

    def _role(self, own: str, *parts: Part, counts_only: bool = False) -> Role:
        """A role loops over blocks of keys, and for each over the blocks of rows of all query heads of a group.

        `counts_only`: it reads how many blocks there are, and not where they start.
        """
        kernel = self.kernel
        reads = uses(parts, self.visits, self.visit_prologue) | frozenset(own.split())
        reads |= uses(self.visit_head_prologue) if kernel.bounds_per_head else frozenset()
        own += " num_heads group_size BLOCK_N"
        own += " block_seqs_ptr" if kernel.packed else " kv_len batch"
        own += " BLOCK_D BLOCK_DV q_len" if kernel.orders_work else ""
        own += " HEAD_GROUPS" if "hkv" in reads else ""
        reads |= frozenset({"num_blocks", "q_len"}) if "num_blocks" in reads else frozenset()
        if "num_row_blocks" in reads:
            own += " q_total num_seqs BLOCK_M"
        if "row_first" in reads:
            reads |= {"q_start", "b"}
        if "q_shift" in reads and kernel.has_offset:
            own += " q_offset Q_OFFSET_PER_BATCH"
            reads |= {"b"}
        own += "" if counts_only and "num_blocks" not in reads else " BLOCK_M"
        return role(kernel, self._args, self.constants, reads, own)

    @property
    def _tables(self) -> frozenset[str]:
        """The tables that say where blocks of rows start."""
        return uses(self.masked_start, self.plain_start) & {"block_list_ptr"}

    @cached_property
    def producer(self) -> Role:
        """The warp that schedules the work and copies its tiles."""
        own = f"start_n start_m k_lap hkv {self._head_rows}"
        own += " q_start q_len kv_start kv_len" if self.kernel.packed else " b"
        own += " work_counter_ptr" if self.kernel.shares_work else ""
        return self._role(own, *map(Name, self._tables))

    def _sums(self, own: str) -> Role:
        """A role that adds sums of rows to memory."""
        own += f" start_m {self._head_rows}"
        if self.kernel.row_sums:
            own += f" {self._own_rows} " + " ".join(term.buffer for term in self.kernel.row_sums)
        return self._role(own, *map(Name, self._tables))

    @cached_property
    def adder(self) -> Role:
        """The warp that adds tiles of dq to memory."""
        return self._sums("")

    @cached_property
    def summer(self) -> Role:
        """The warpgroup of a wide backward that sums dv and dq."""
        place = "kv_start" if self.kernel.packed else "b stride_dvb"
        own = f"{place} head_group start_n k_lap kv_len dv_ptr stride_dvh stride_dvs "
        own += "HEAD_DIM HEAD_DIM_V BLOCK_D BLOCK_DV WITH_DQ"
        return self._sums(own)

    @cached_property
    def consumer(self) -> Role:
        """The warpgroups that compute probabilities and ds."""
        kernel, packed = self.kernel, self.kernel.packed
        own = "start_n k_lap head_group kv_len WITH_DQ RAGGED scale HEAD_DIM HEAD_DIM_V BLOCK_D "
        own += "dk_ptr stride_dkh stride_dks "
        own += "kv_start" if packed else "b stride_dkb"
        if not self.is_wide:
            own += " dv_ptr stride_dvh stride_dvs BLOCK_DV" + ("" if packed else " stride_dvb")
        if self.variant.dropout:
            own += " b h seed first_head all_heads row_origin key_origin q_shift threshold start_m DROPOUT"
        if not self.one_loop or (not kernel.linear and self.plain.score):
            own += " start_m q_len"
        if kernel.row_adds:
            own += f" {self._own_rows} start_m " + " ".join(term.buffer for term in kernel.row_adds)
        for term in self.head_sums:
            own += f" h {term.buffer} "
            if term.kind is GradientKind.HEAD:
                own += "num_entries first_entry" if packed else "b num_heads"
            else:
                own += "kv_total kv_start" if packed else "b num_heads"
        own += " " + " ".join(flag for flag in kernel.flags)
        own += " q_shift start_m" if self.block_term_of_rows else ""
        if kernel.far is not None:
            own += f" q_shift start_m h b num_heads {FAR_SUMS}_ptr {SUMS} {BEFORE} {BEHIND}"
        parts: list[Part] = [*self.prologue, *self.head_prologue, self.key_term, kernel.block_term]
        parts += [part for step in self._steps for part in step.parts]
        parts += list(kernel.far.logits.values()) if self.far_loops and kernel.far is not None else []
        return self._role(own, *parts, *map(Name, self._tables))

    # -- what the kernel file takes from the device library

    @property
    def imports(self) -> dict[str, list[str]]:
        """Module of the device library -> the names that the kernel takes from it."""
        kernel = self.kernel
        parts: list[Part] = [*self.visits, *self.prologue, *self.head_prologue, self.key_term, kernel.block_term]
        parts += [part for step in self._steps for part in step.parts]
        shared = ["make_ring", "product_layout"]
        shared += ["SequenceRows", "describe_packed_rows"] if kernel.packed else ["HeadRows"]
        shared += ["make_work_ring"] if kernel.shares_work else []
        shared += ["longest_first"] if kernel.orders_work else []
        shared += ["at_columns", "columns_before"] if any(step.run is not None for step in self._steps) else []
        shared += ["LOG2E"] if kernel.linear or "LOG2E" in uses(parts) else []
        own = ["describe_vector", "make_row_ring"]
        own += ["locate_keys"] if kernel.packed else ["describe_input"]
        own += ["heads_in_cache"] if kernel.orders_work else []
        own += ["count_key_items", "locate_key_blocks"] if kernel.longest_first and not kernel.shares_work else []
        own += ["fetch_first_blocks_first", "first_blocks_first"] if kernel.work_order == "first_blocks_first" else []
        if self.is_wide:
            own += ["make_hand_over", "store_tile"]
        else:
            own += ["describe_parts", "make_exchange", "store_second", "store_through"]
        own += ["make_ones", "of_lines", "sums_layout"] if kernel.row_sums or kernel.column_sums else []
        own += ["add_rows"] if kernel.row_sums or kernel.row_adds else []
        steps = ["begin_dropped_block" if self.variant.dropout else "begin_block"]
        steps += ["send_packed_rows" if kernel.packed else "send_rows"]
        if self.is_wide:
            steps += ["add_block", "end_wide_block"]
        else:
            steps += ["begin_addition" if kernel.row_sums else "add_tiles"]
            steps += ["begin_exchange", "end_block", "drain_dq"]
        found = {"gl": shared, "gl_backward": own, "gl_backward_steps": steps, "gl_math": math_imports(parts)}
        if not self.is_wide:
            shared += ["as_operand", "begin_sums", "make_barriers", "no_sums"]
            found["gl_versions"] = ["concat"]
            (own if kernel.row_sums else shared).append("RowRing" if kernel.row_sums else "Ring")
        if kernel.packed or kernel.leaves_runs:
            found["block_seqs"] = ["NUM_BLOCKS"]
        if kernel.far is not None:
            found |= {"gl_capped": ["add_columns"], "gl_forward": ["lane_layout"]}
        if self.variant.dropout:
            found["gl_dropout"] = ["dropped_signs", "kept_gradients", "kept_weights"]
        return {module: names for module, names in found.items() if names}
