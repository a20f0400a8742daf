"""The plan of Hopper's forward: what each of its warps reads, and the statements of each, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from codegen.plan.gluon_source import (
    by_distance,
    by_vectors,
    exchanged,
    given,
    gluon,
    names,
    needed,
    read_apart,
    targets,
    without,
)
from codegen.plan.hopper_visits import counts, full_start, partial_start
from codegen.plan.kernel import BlockText, KernelPlan, LimitsText
from codegen.plan.loop_bounds import BoundsText
from codegen.spec.model import Variant
from codegen.util.text import words

MATH = ("clamp_index", "floor_div", "floor_mod", "load_pairs", "log1p", "round_even", "sigmoid", "tan", "tanh")
"""The functions of `runtime/device/gl_math.py`."""

_EXCHANGED_WHERE_USED = ("own_key", "own_col", "own_segment")
"""Vectors of one element a thread that each reader exchanges for itself."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A function of a warp-specialised kernel: `reads` are the names that its variant-dependent statements read, `args`
    and `constants` those of the kernel's arguments that it takes."""

    reads: frozenset[str]
    args: Sequence[str]
    constants: Sequence[str]
    compiled: Sequence[str]

    @property
    def tensors(self) -> list[str]:
        """The arguments that are numbers and pointers at run time."""
        return [name for name in self.args if name not in self.compiled]

    @property
    def literals(self) -> list[str]:
        """The arguments and constants that are compiled in."""
        return [name for name in self.args if name in self.compiled] + list(self.constants)


@dataclass(frozen=True, kw_only=True)
class ScoreStep:
    """The scores of one block of keys, between their product and the online softmax.

    `ahead`: of keys alone, computed ahead of the product; of these, threads then exchange the `exchanged`. Behind it,
    `score` leads to the scores, in the variable `tile`. `of_score`, `of_mask` and `of_segments` are what the call gives
    of tokens, each read ahead of its use. `keep` and `same` are the conditions of the mask, of which `run` finds the
    part that keeps one run of columns in each row.
    """

    tile: str
    ahead: Sequence[str]
    exchanged: Sequence[str]
    of_score: Sequence[str]
    score: Sequence[str]
    of_mask: Sequence[str]
    keep: str
    of_segments: Sequence[str]
    same: str
    run: Sequence[str]

    @property
    def lines(self) -> list[str]:
        """All source of it."""
        lists = (self.ahead, self.of_score, self.score, self.of_mask, self.of_segments, self.run)
        return [line for lines in lists for line in lines] + [self.keep, self.same]


@dataclass(frozen=True)
class ForwardPlan:
    """One forward of Hopper's family."""

    kernel: KernelPlan
    variant: Variant

    # -- the blocks of keys that a block of rows visits

    @property
    def bounds(self) -> BoundsText:
        assert self.kernel.bounds is not None
        return self.kernel.bounds

    @property
    def full(self) -> BlockText:
        assert self.kernel.full is not None
        return self.kernel.full

    @property
    def partial(self) -> BlockText:
        assert self.kernel.partial is not None
        return self.kernel.partial

    @property
    def limits(self) -> LimitsText | None:
        return self.partial.limits

    @property
    def visits(self) -> list[str]:
        """Statements that count the blocks of keys."""
        return counts(self.bounds, "BLOCK_N", always=True)

    @property
    def may_see_nothing(self) -> bool:
        """True if a row may attend to no key."""
        return self.bounds.masked or self.kernel.packed

    @property
    def masked_start(self) -> list[str]:
        """Where the nth block with a mask starts; without any, the first one of those without is taken with it."""
        bounds = self.bounds
        lines = partial_start(bounds, "start_n", "BLOCK_N", "nth")
        if bounds.jumps or bounds.two_sided or bounds.begins_partial:
            lines.append("start_n = gl.where(start_n < kv_len, start_n, 0)")
        if bounds.has_full and bounds.full_begin == "0" and not bounds.full_jumps and not bounds.lists:
            lines.append("start_n = gl.where(num_partial > 0, start_n, 0)")
        elif bounds.has_full:
            first = full_start(bounds, "start_n", "BLOCK_N", "0")
            lines += ["if num_partial == 0:", *(f"    {line}" for line in first)]
        return lines

    @property
    def plain_start(self) -> list[str]:
        """Where the nth block without a mask starts."""
        return full_start(self.bounds, "start_n", "BLOCK_N", "nth")

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
        return fields + (["first_plain"] if self._plain_blocks_are_counted else [])

    @property
    def unpacked_fields(self) -> list[str]:
        """The fields that the statements of a block of rows read by name; the batch row, head and places in 64 bits."""
        return [f for f in self.work_fields if f not in ("item", "block", "num_masked", "num_plain", "first_plain")]

    @property
    def _plain_blocks_are_counted(self) -> bool:
        """True if consumers count the blocks without a mask from the first on, instead of reading each one's number."""
        needs = {"start_n", "kv_idx"} & words(" ".join([*self.full.statements, self.full.logit, self.kernel.row_term]))
        return self._is_steady and self.bounds.has_full and (self.variant.dropout or bool(needs))

    @property
    def _is_steady(self) -> bool:
        """True if the blocks without a mask follow each other."""
        return not self.bounds.lists and not self.bounds.full_jumps

    @property
    def reads_plain_number(self) -> bool:
        """True if consumers read the number of each block without a mask."""
        needs = bool(self.full.statements) or self.variant.dropout
        return not self._plain_blocks_are_counted and not self._is_steady and needs

    # -- consumers

    @cached_property
    def first_row(self) -> str:
        """The position of a warpgroup's first row, where the call gives none."""
        lines = needed(self.kernel.prologue, "q_idx")
        line = lines[-1].replace("q_idx = ", "") if lines else ""
        return line.split(" else ")[-1].replace("rows", "start_m + PART * ROWS")

    @cached_property
    def _folds(self) -> str:
        """What consumers do with the scores of a block."""
        kernel, full, partial = self.kernel, self.full, self.partial
        texts = [*full.statements, *partial.statements, full.logit, partial.logit]
        limits = self.limits.texts if self.limits else []
        folds = by_distance(" ".join([*texts])) + " " + " ".join([kernel.row_term, partial.keep, partial.same, *limits])
        if "apart" in words(folds):
            folds += f" {self.first_row}" + (" q_idx" if kernel.segmented else "")
        return folds

    @cached_property
    def prologue(self) -> list[str]:
        """Statements of a block of rows."""
        return needed(self.kernel.prologue, self._folds)

    @cached_property
    def _reads(self) -> frozenset[str]:
        return words(" ".join([self._folds, *self.prologue]))

    @property
    def reads_key_head(self) -> bool:
        return "hkv" in self._reads

    def step(self, block: BlockText) -> ScoreStep:
        """The scores of a block with the mask (`partial`), or without (`full`)."""
        kernel, is_partial = self.kernel, block is self.partial
        keys = by_vectors(block.statements)
        lines = [by_distance(gluon(line)) for line in block.statements if line not in keys]
        logit = by_distance(gluon(block.logit))
        scoring = [*lines, *([] if kernel.linear else [f"logit = {logit}"])]
        if "apart" in words(" ".join(scoring)):
            scoring = [self._distance(), *scoring]
        of_tokens = [gluon(line) for line in exchanged(given(keys))]
        of_score = needed(of_tokens, "\n".join(scoring))
        of_mask = [line for line in needed(of_tokens, block.keep) if line not in of_score]
        known = [*of_score, *of_mask]
        later = words(" ".join([*lines, logit, block.keep]))
        own = [name for name in targets(read_apart(keys)) if name not in _EXCHANGED_WHERE_USED]
        return ScoreStep(
            tile=kernel.tile,
            ahead=self._ahead(block, keys, is_partial=is_partial),
            exchanged=[name for name in own if name in later],
            of_score=of_score,
            score=scoring,
            of_mask=of_mask,
            keep=gluon(block.keep),
            of_segments=[line for line in needed(of_tokens, block.same) if line not in known],
            same=gluon(block.same),
            run=self._run() if is_partial and self.limits else [],
        )

    def _distance(self) -> str:
        """How far the row of each pair is behind its key: by places in the block, which diagonals share."""
        by_places = (
            "gl.arange(0, ROWS, layout=ROW)[:, None] - gl.arange(0, BLOCK_N, layout=KEY)[None, :] + "
            f"({self.first_row} - start_n)"
        )
        given_positions = "q_idx[:, None] - kv_idx[None, :] if POSITIONS else " if self.kernel.segmented else ""
        return f"apart = {given_positions}{by_places}"

    def _ahead(self, block: BlockText, keys: Sequence[str], *, is_partial: bool) -> list[str]:
        """What is computed of keys ahead of the product, which takes as long: a thread reads an element of each vector."""
        kernel = self.kernel
        apart = read_apart(keys)
        others = [line for line in block.statements if line not in keys]
        later = by_distance(" ".join([*others, block.logit])) + f" {block.keep}"
        if is_partial and not self.limits:
            later += f" {kernel.key}"
        if kernel.segmented and "apart" in words(later):
            later += " kv_idx"
        if not apart:
            later += " " + " ".join(without(keys, [kernel.key]))
        needs_key = bool({kernel.key, "kv_idx"} & words(later))
        found = [x for x in keys if (needs_key if x.startswith(f"{kernel.key} = ") else not apart)]
        return [gluon(x) for x in found] + [gluon(x, "gl.arange(0, BLOCK_N, layout=OWN_KEY)") for x in apart]

    def _run(self) -> list[str]:
        """Statements for `keep`: the run of columns of each row that the mask's limits leave, and the rest of the mask."""
        limits, keep = self.limits, self.partial.keep
        assert limits is not None
        of_rows = "gl.zeros([ROWS], gl.int32, ROW) + "
        lines = []
        if limits.first:
            lines.append(f"run_first = {'' if limits.first_is_vector else of_rows}{gluon(limits.first)}")
        if limits.end:
            lines.append(f"run_end = {'' if limits.end_is_vector else of_rows}{gluon(limits.end)}")
            lines += self.if_ragged("run_end = gl.minimum(run_end, kv_len)")
        if limits.own:
            side, nowhere = ("run_end", "start_n") if limits.end else ("run_first", "start_n + BLOCK_N")
            lines.append(f"{side} = gl.where({gluon(limits.own)}, {side}, {nowhere})")
        ends = ["columns_before(run_end - start_n, KEY, BLOCK_N)"] if limits.end else []
        begins = ["~columns_before(run_first - start_n, KEY, BLOCK_N)"] if limits.first else []
        lines.append(f"run_bits = {' & '.join(ends + begins)}")
        if not limits.end:
            lines += self.if_ragged(f"run_bits = run_bits & columns_before({of_rows}kv_len - start_n, KEY, BLOCK_N)")
        return [*lines, "keep = at_columns(run_bits, KEY, BLOCK_N)" + (f" & ({gluon(keep)})" if keep else "")]

    def if_ragged(self, statement: str) -> list[str]:
        """A statement for a cut last block: packed sequences may end anywhere, otherwise the call knows."""
        return [statement] if self.kernel.packed else ["if RAGGED:", f"    {statement}"]

    @property
    def reads_own_keys(self) -> bool:
        """True if threads read an element of each vector of keys ahead of the product."""
        return any("OWN_KEY" in line for block in (self.full, self.partial) for line in self.step(block).ahead)

    @property
    def imports(self) -> dict[str, list[str]]:
        """Module of the device library -> the names that the kernel takes from it."""
        kernel, packed = self.kernel, self.kernel.packed
        shared = ["LN2", "make_ring", "make_work_ring", "product_layout"]
        shared += ["SequenceRows", "describe_packed_rows"] if packed else ["HeadRows", "describe_rows"]
        shared += ["LOG2E"] if "LOG2E" in self._every_word else []
        shared += ["at_columns", "columns_before"] if self.limits else []
        forward = ["ROWS", "add_lanes", "begin_block", "begin_pv", "change_turns", "end_pv", "lane_layout"]
        forward += ["make_key_ring", "pack_pairs", "query_stages", "raise_maximum", "rescale", "store_rows"]
        found = {"gl": shared, "gl_forward": [*forward, "unpack_pairs"], "gl_versions": ["aggregate"]}
        if self.variant.dropout:
            found["gl_dropout"] = ["without_dropped"]
        if math := [name for name in MATH if name in self._every_word]:
            found["gl_math"] = math
        return {module: sorted(found[module]) for module in sorted(found)}

    @cached_property
    def _every_word(self) -> frozenset[str]:
        """The names in the statements of the kernel that depend on the variant."""
        steps = [self.step(self.full), self.step(self.partial)]
        lines = [*self.visits, *self.producer_prologue, *map(gluon, self.prologue), gluon(self.kernel.row_term)]
        lines += [line for step in steps for line in step.lines]
        lines += ["LOG2E"] if self.kernel.linear or self.variant.sink else []
        return words(" ".join(lines))

    # -- roles

    @property
    def args(self) -> list[str]:
        """The kernel's arguments that may be passed on to a role."""
        inputs = ["q_ptr", "k_ptr", "v_ptr", *names(self.kernel.args, "stride_[qkv][bhs]")]
        return [name for name in names(self.kernel.args) if name not in inputs] + self.extra

    @property
    def extra(self) -> list[str]:
        """What the launch passes beside the portable kernel's arguments."""
        return ([] if self.kernel.packed else ["batch"]) + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @property
    def constants(self) -> list[str]:
        return [*self.kernel.constants, "STAGES"]

    def _role(self, own: str, reads: frozenset[str], *, is_producer: bool = True) -> Role:
        """`own`: the names that the template's own text of the role reads. Producers find where a block of rows is."""
        every = {*own.split(), *reads}
        if is_producer and "q_shift" in reads and self.kernel.has_offset:
            every |= {"q_offset", "Q_OFFSET_PER_BATCH"}
        if "hkv" in every:
            every.add("group_size")
        args = [name for name in self.args if name in every]
        args.sort(key=lambda name: name in self.kernel.compiled)
        constants = [name for name in self.constants if name in every]
        return Role(reads=reads, args=args, constants=constants, compiled=self.kernel.compiled)

    @cached_property
    def producer_prologue(self) -> list[str]:
        """What the number of visited blocks is computed of."""
        return [gluon(line) for line in needed(self.kernel.prologue, "\n".join(self.visits))]

    @cached_property
    def rows(self) -> Role:
        """The producer of query rows, which schedules the work."""
        own = "BLOCK_M BLOCK_N num_heads q_len batch block_seqs_ptr"
        own += " work_counter_ptr" if self.kernel.shares_work else ""
        if self.bounds.lists and "first_plain" not in self.work_fields:
            own = own.replace("BLOCK_N", "")
        reads = words(" ".join([*self.visits, *self.producer_prologue, "start_m", *self.work_fields]))
        return self._role(own, reads)

    @cached_property
    def keys(self) -> Role:
        """The producer of keys and values."""
        own = "BLOCK_M BLOCK_N num_heads q_len kv_len batch block_seqs_ptr hkv"
        starts = words(" ".join(self.masked_start + (self.plain_start if self.bounds.has_full else [])))
        reads = words(" ".join([*self.visits, *self.producer_prologue, "hkv", "kv_start"]))
        role = self._role(own, reads | (starts & {"block_list_ptr"}))
        return role

    @cached_property
    def consumer(self) -> Role:
        """The warpgroups that compute."""
        kernel, variant = self.kernel, self.variant
        own = "o_ptr lse_ptr stride_ob stride_oh stride_os q_len kv_len HEAD_DIM_V BLOCK_DV BLOCK_M BLOCK_N RAGGED"
        own += " q_total" if kernel.packed else " num_heads"
        own += " scale" if kernel.linear else ""
        own += " sink_ptr" if variant.sink else ""
        own += " seed threshold keep_scale num_heads DROPOUT" if variant.dropout else ""
        steps = [self.step(self.full), self.step(self.partial)]
        lines = [line for step in steps for line in step.lines]
        return self._role(own, self._reads | words(" ".join(lines)), is_producer=False)
