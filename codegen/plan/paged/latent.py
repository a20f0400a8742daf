"""The plan of Hopper's forward of latent attention on paged caches, whose values are the first columns of the keys.

It computes the splits that the portable plan finds, for tiles of 64 rows: query heads that share a key head, token by
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.analysis import schedule as blocks
from codegen.plan.code.loop_bounds import seen_keys
from codegen.plan.code.statements import Assign, uses, without
from codegen.plan.code.tree import Code
from codegen.plan.hopper.roles import math_imports
from codegen.plan.kernels.kernel import KernelPlan
from codegen.plan.kernels.legend import paged_legend
from codegen.plan.paged.arguments import latent_arguments, latent_constants
from codegen.plan.paged.hopper import has_hopper_forward
from codegen.plan.paged.kernels import PagedLowering, PagedPlan, paged_plan
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised

_ENDS = frozenset({"q_first", "q_last"})
"""The ends of a tile's positions, which the template computes."""


@dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """The kernel. `own`: the plan of the portable kernel, whose mask and bounds it shares. `seen`: statements that find
    the keys that some row of a tile sees."""

    own: PagedPlan
    kernel: KernelPlan
    legend: str
    seen: Sequence[Assign]

    @property
    def scalars(self) -> list[str]:
        """The variant's scalars that the mask reads."""
        named = [name for group in self.kernel.args for name in group.names]
        return [name for name in named if name in self.own.variant.scalars]

    @property
    def offset_constants(self) -> list[str]:
        """The constants that say where the positions of queries come from."""
        return [name for name in self.kernel.constants if name.startswith("Q_")]

    @property
    def full_end(self) -> Code | None:
        """The end of the run of blocks that need no mask; None if there is no such run."""
        return None if self.own.full_bounds is None else self.own.full_bounds.full_end

    @property
    def full_begin(self) -> Code | None:
        """The begin of that run."""
        return None if self.own.full_bounds is None else self.own.full_bounds.full_begin

    @property
    def producer_reads(self) -> frozenset[str]:
        """The ends of positions that the producer of keys reads."""
        return uses(self.seen) & _ENDS

    @property
    def consumer_reads(self) -> frozenset[str]:
        """The ends of positions that the bounds of blocks without a mask read."""
        return uses(self.own.full_statements, self.full_begin, self.full_end) & _ENDS

    @property
    def imports(self) -> dict[str, list[str]]:
        """Module of the device library -> names that the kernel's expressions take from it, if any."""
        own = self.own
        found = math_imports([*self.seen, *own.forward.prologue, *own.full_statements, *own.block.parts])
        return {"gl_math": found} if found else {}


def _is_mask_by_positions(written: Variant) -> bool:
    return written.score is None and not written.sink and not written.tensors and has_hopper_forward(written)


def latent_plan(portable: PagedPlan) -> LatentPlan | None:
    """Decide everything about the kernel.

    None if the variant has none: its score must be the scaled product, and its mask must follow from positions alone,
    with one range of keys for the rows of a tile, in closed form.
    """
    written = portable.written
    if not _is_mask_by_positions(written) or portable.scans_mask or portable.bounds.jumps:
        return None
    variant = portable.variant
    roots = [] if variant.mask is None else [variant.mask]
    offset = portable.forward.has_offset
    args = latent_arguments(variant, roots, offset=offset)
    lowering = PagedLowering(tensors=variant.tensors, query_axis=0)
    return LatentPlan(
        own=portable,
        kernel=KernelPlan(
            name=f"{variant.name}_paged_hopper_latent",
            args=args,
            constants=latent_constants(variant, offset=offset),
            linear=True,
            helpers=frozenset(),
            prologue=portable.forward.prologue,
        ),
        legend=paged_legend(symbolised(written), variant.tensors, args),
        seen=without(seen_keys(blocks.analyse(variant.mask).keys.main, lowering), _ENDS),
    )


def has_latent_kernel(written: Variant) -> bool:
    """Whether a variant has the kernel."""
    portable = paged_plan(written) if _is_mask_by_positions(written) else None
    return portable is not None and latent_plan(portable) is not None
