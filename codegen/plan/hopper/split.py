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
from codegen.plan.hopper.roles import Role, role
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan, pointers
from codegen.plan.kernels.signature import Signatures

_OF_WIDE_FORWARD = ("begin_scores", "no_half_sums")
"""What both kernels take from the device library of the forward for as many columns."""


def split_keys_kernel(backward: KernelPlan, sign: Signatures) -> KernelPlan:
    """The kernel of dk or dv, from the backward for more than 128 columns, whose warpgroups also hold all keys.

    A launch has one output, `dkv`: XLA would take the dk of a launch that computes dv as computed.
    """
    of_dv = ("dv_ptr", "stride_dv")
    kept = [group for group in backward.args if not group.names[0].startswith(of_dv)]
    args = [_of_either(group, sign) for group in kept]
    name = f"{sign.symbol}_hopper_split_keys"
    return replace(backward, name=name, args=args, legend=sign.legend(args), leaves_runs=False)


def _of_either(group: ArgGroup, sign: Signatures) -> ArgGroup:
    """The arguments that describe `dkv`, in place of those that describe dk."""
    if group.names == ("dk_ptr",):
        return pointers("dkv")
    return sign.strides("dkv") if group.names[0].startswith("stride_dk") else group


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
    def imports(self) -> dict[str, list[str]]:
        found = super().imports
        dropped = {"make_row_ring", "make_hand_over", "store_tile"}
        split = ["CHUNK", "CHUNK_STAGES", "add_weighted", "begin_dp", "end_dp", "make_row_stream", "make_weights"]
        split += ["send_chunks", "store_sums", "wait_for_scores"]
        kept = {name: names for name, names in found.items() if name != "gl_backward_steps"}
        kept["gl_backward"] = [name for name in kept["gl_backward"] if name not in dropped]
        kept["gl"] = [*kept["gl"], "count_pieces"]
        return kept | {"gl_forward_wide": ["ADDERS", *_OF_WIDE_FORWARD], "gl_split": split, "gl_versions": ["concat"]}


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
        dropped = {"LN2", "no_sums", "piece_columns", "sum_parts"}
        shared = [name for name in found["gl"] if name not in dropped and name != "describe_rows"]
        split = ["CHUNK", "add_weighted", "begin_dp", "end_dp", "make_split_key_ring", "make_weights", "send_keys"]
        split += ["store_sums", "wait_for_scores"]
        kept = {
            name: names for name, names in found.items() if name not in ("gl_forward", "gl_forward_wide", "gl_capped")
        }
        kept |= {
            "gl": [*shared, "LOG2E", "count_pieces"],
            "gl_forward": ["ROWS"],
            "gl_forward_wide": [*_OF_WIDE_FORWARD],
            "gl_split": split,
        }
        return kept if self.kernel.packed else kept | {"gl_backward": ["describe_input"]}
