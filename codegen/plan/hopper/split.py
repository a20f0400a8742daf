"""The plans of Hopper's backward for more than 256 columns: one kernel for dk or dv, and one for dq.

They exist for variants whose score is the scaled product, without dropout: all gradients are then those of q, k and v,
and of a sink, which the kernel before the backward computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from codegen.plan.code.statements import Part, uses
from codegen.plan.code.tree import Name
from codegen.plan.hopper.backward import BackwardPlan
from codegen.plan.hopper.forward import ForwardPlan
from codegen.plan.hopper.roles import Role, role, sorted_names
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan
from codegen.plan.kernels.signature import Signatures


def split_keys_kernel(backward: KernelPlan, sign: Signatures) -> KernelPlan:
    """The kernel of dk or dv, from the backward for more than 128 columns, whose warpgroups also hold all keys.

    A launch has one output, `dkv`: XLA would take the dk of a launch that computes dv as computed.
    """
    args: list[ArgGroup] = []
    for group in backward.args:
        if group.names[0].startswith(("dv_ptr", "stride_dv")):
            continue
        is_output = group.names[0].startswith(("dk_ptr", "stride_dk"))
        args.append(sign.output("dkv", is_pointer="dk_ptr" in group.names) if is_output else group)
    name = f"{sign.symbol}_hopper_split_keys"
    return replace(backward, name=name, args=args, legend=sign.legend(args), leaves_runs=False)


def split_rows_kernel(forward: KernelPlan, sign: Signatures) -> KernelPlan:
    """The kernel of dq, which visits the same blocks as the forward."""
    args = sign.split_rows()
    return replace(
        forward,
        name=f"{sign.symbol}_hopper_split_rows",
        args=args,
        legend=sign.legend(args),
        fixed_reference=None,
        leaves_runs=False,
    )


@dataclass(frozen=True)
class SplitKeysPlan(BackwardPlan):
    """The roles of the warps of the kernel of dk or dv."""

    @property
    def shares_producer(self) -> bool:
        return False

    @property
    def extra(self) -> list[str]:
        return self.counts + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @property
    def constants(self) -> list[str]:
        return [*self.kernel.constants, "STAGES", "SUMS_DK"]

    @cached_property
    def scorer(self) -> Role:
        """The warpgroup that computes probabilities and ds."""
        own = "start_n k_lap kv_len RAGGED scale HEAD_DIM"
        own += "" if self.one_loop else " start_m q_len"
        parts: list[Part] = [*self.prologue, *self.head_prologue]
        parts += [part for step in self._steps for part in step.parts]
        return self._role(own, *parts, *map(Name, self._tables))

    @cached_property
    def summer(self) -> Role:
        """The warpgroups that add up dk or dv."""
        place = "kv_start" if self.kernel.packed else "b stride_dkvb"
        own = f"{place} head_group start_n kv_len dkv_ptr stride_dkvh stride_dkvs scale"
        return self._role(f"{own} HEAD_DIM HEAD_DIM_V BLOCK_D BLOCK_DV", counts_only=True)

    @property
    def _tables(self) -> frozenset[str]:
        return uses(self.masked_start, self.plain_start) & {"block_list_ptr"}

    @property
    def imports(self) -> dict[str, list[str]]:
        found = super().imports
        dropped = {"make_row_ring", "make_hand_over", "store_tile"}
        split = [
            "CHUNK",
            "CHUNK_STAGES",
            "add_weighted",
            "count_chunks",
            "begin_dp",
            "begin_scores",
            "end_dp",
            "fill_tile",
        ]
        split += ["make_row_stream", "make_weights", "send_chunks", "store_sums", "wait_for_scores"]
        kept = {name: names for name, names in found.items() if name != "gl_backward_steps"}
        kept["gl_backward"] = [name for name in kept["gl_backward"] if name not in dropped]
        return kept | {"gl_forward_wide": ["ADDERS", "no_half_sums"], "gl_split": split}


@dataclass(frozen=True)
class SplitRowsPlan(ForwardPlan):
    """The roles of the warps of the kernel of dq."""

    @property
    def split(self) -> bool:
        return True

    @property
    def wide(self) -> bool:
        return False

    @property
    def counts(self) -> list[str]:
        """The numbers that the launch passes beside the kernel's own arguments."""
        return ["num_seqs" if self.kernel.packed else "batch"]

    @property
    def extra(self) -> list[str]:
        return self.counts + (["work_counter_ptr"] if self.kernel.shares_work else [])

    @cached_property
    def _reads(self) -> frozenset[str]:
        # The place of a row in the padded vectors of rows.
        return super()._reads | {"b"}

    @cached_property
    def work_fields(self) -> list[str]:
        return [name for name in super().work_fields if name != "lse_start"]

    @property
    def scored_fields(self) -> list[str]:
        """The fields that the warpgroup of ds reads by name."""
        reads = self._reads | {"h", "q_start", "q_len", "kv_len"}
        return [name for name in self.unpacked_fields if name in reads]

    @property
    def reads_key_layout(self) -> bool:
        """True if a vector of keys, in the layout of scores, is read at all."""
        steps = (self.masked, self.plain)
        return any(step.exchanged or step.run or "KEY" in uses(step.parts) for step in steps) or self.may_be_ragged

    @property
    def may_be_ragged(self) -> bool:
        """True if the last block of keys is masked by a comparison."""
        return self.masked.run is None

    @cached_property
    def keys(self) -> Role:
        """The producer of keys and values."""
        tables = uses(self._block_starts) & {"block_list_ptr", "kv_len"}
        own = "BLOCK_N" if self.kernel.shares_work else "BLOCK_N batch"
        return self._producer(tables | {"hkv", "kv_start"}, own)

    @cached_property
    def scorer(self) -> Role:
        """The warpgroup that computes ds."""
        own = "lse_ptr delta_ptr q_len kv_len scale RAGGED HEAD_DIM BLOCK_M BLOCK_N"
        own += " q_total num_seqs" if self.kernel.packed else " num_heads"
        own += " group_size" if self.reads_key_head else ""
        reads = self._reads | uses(self.masked.parts, self.plain.parts)
        return role(self.kernel, self._args, self.constants, reads, own)

    @cached_property
    def adder(self) -> Role:
        own = "dq_ptr stride_dqs q_len scale HEAD_DIM BLOCK_D BLOCK_M"
        return role(self.kernel, self._args, self.constants, self._o_reads, own)

    @property
    def _args(self) -> list[str]:
        return [name for name in super()._args if name not in ("do_ptr", "stride_dob", "stride_doh", "stride_dos")]

    @property
    def _o_reads(self) -> frozenset[str]:
        return uses(self.kernel.layout.head_offset("dq", "h", "q"))

    @property
    def imports(self) -> dict[str, list[str]]:
        found = super().imports
        dropped = {"LN2", "no_sums", "piece_columns", "pieces_of", "sum_parts"}
        shared = [name for name in found["gl"] if name not in dropped and name != "describe_rows"]
        split = [
            "CHUNK",
            "add_weighted",
            "begin_dp",
            "count_chunks",
            "begin_scores",
            "end_dp",
            "fill_tile",
            "make_key_stream",
        ]
        split += ["make_weights", "store_sums", "wait_for_scores"]
        kept = {
            name: names for name, names in found.items() if name not in ("gl_forward", "gl_forward_wide", "gl_capped")
        }
        kept |= {
            "gl": [*shared, "LOG2E"],
            "gl_forward": ["ROWS"],
            "gl_forward_wide": ["no_half_sums"],
            "gl_split": split,
        }
        return kept if self.kernel.packed else kept | {"gl_backward": ["describe_input"]}


def split_imports(keys: SplitKeysPlan, rows: SplitRowsPlan) -> dict[str, list[str]]:
    """Module of the device library -> the names that the file of both kernels takes from it."""
    found: dict[str, set[str]] = {}
    for plan in (keys, rows):
        for module, names in plan.imports.items():
            found.setdefault(module, set()).update(names)
    return {module: sorted_names(found[module]) for module in sorted(found)}
