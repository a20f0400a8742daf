"""The plan of Hopper's forward of float8_e4m3fn: that of 16-bit inputs, with a scale per head and v transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from codegen.plan.code.host import host
from codegen.plan.code.statements import rewritten, uses
from codegen.plan.code.tree import Code, renamed
from codegen.plan.hopper.forward import ForwardPlan
from codegen.plan.hopper.roles import Role, role, sorted_names
from codegen.plan.kernels.kernel import ArgGroup, Block, KernelPlan, pointers
from codegen.plan.kernels.signature import Signatures

_OWN = ("begin_block", "begin_pv", "no_sums", "product_layout", "raise_maximum", "rescale")
"""Functions that the kernel takes from `gl_fp8` instead of the functions of these names for 16-bit inputs."""

_SCALES = ("q_scale", "k_scale", "v_scale")


def fp8_kernel(kernel: KernelPlan, sign: Signatures) -> KernelPlan:
    """The kernel of a 16-bit forward, changed for float8_e4m3fn.

    Its weights need the running maxima of their rows, and no packed kernel computes its segmented calls.
    """
    assert kernel.full is not None
    assert kernel.partial is not None
    args = _arguments(kernel.args)
    return replace(
        kernel,
        name=f"{kernel.name}_fp8",
        args=args,
        legend=sign.legend(args),
        full=_scaled_by_head(kernel.full),
        partial=_scaled_by_head(kernel.partial),
        fixed_reference=None,
        leaves_runs=False,
    )


def _arguments(args: Sequence[ArgGroup]) -> list[ArgGroup]:
    """The arguments of the fp8 kernel: v as columns, whose strides follow from their number, and the scales."""
    first, *others = args
    assert first == pointers("q", "k", "v")
    lengths = next(i for i, group in enumerate(others) if "num_heads" in group.names)
    count = ArgGroup(names=("v_columns",), host=host("{}.shape[3]", "columns"), varies=True)
    others.insert(lengths, count)
    kept = [group for group in others if "stride_vs" not in group.names]
    return [pointers("q", "k", "columns"), pointers(*_SCALES), *kept]


def _scaled_by_head(block: Block) -> Block:
    """The block with scores that are scaled by the factor of their head instead of the call's scale."""

    names = {"scale": "head_scale"}

    def change(code: Code) -> Code:
        return renamed(code, names)

    return replace(block, statements=[rewritten(s, change) for s in block.statements], logit=change(block.logit))


@dataclass(frozen=True)
class Fp8ForwardPlan(ForwardPlan):
    """The roles of the warps of the fp8 forward."""

    @property
    def fp8(self) -> bool:
        return True

    @property
    def packed_weights(self) -> str:
        return "p_words"

    @cached_property
    def _reads(self) -> frozenset[str]:
        return super()._reads | {"b"}

    @property
    def _args(self) -> list[str]:
        return [name for name in super()._args if name != "columns_ptr"]

    @property
    def imports(self) -> dict[str, list[str]]:
        packed = self.kernel.packed
        replaced = {*_OWN, "pack_pairs", "unpack_pairs"}
        found = {module: [n for n in names if n not in replaced] for module, names in super().imports.items()}
        own = [*_OWN, "pack_words", "unpack_words"]
        own += ["SequenceColumns", "UNIT", "describe_packed_columns"] if packed else []
        own += [] if packed else ["HeadColumns", "describe_columns"]
        found["gl_fp8"] = sorted_names(own)
        return {module: found[module] for module in sorted(found)}

    @cached_property
    def keys(self) -> Role:
        reads = super().keys.reads | (uses(self._block_starts) & {"kv_len"})
        own = "BLOCK_N"
        if self.kernel.packed:
            reads, own = reads | {"b"}, f"{own} kv_len"
        else:
            own += " v_columns"
        return self._producer(reads, own if self.kernel.shares_work else f"{own} batch")

    @cached_property
    def consumer(self) -> Role:
        found = super().consumer
        own = "num_heads group_size scale q_scale_ptr k_scale_ptr v_scale_ptr"
        return role(
            self.kernel, self._args, self.constants, found.reads, " ".join([own, *found.tensors, *found.literals])
        )
