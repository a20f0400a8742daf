"""The plan of Hopper's forward of prompts on paged caches: that of packed calls, but the producer of keys copies pages.

A program computes a block of rows of one query head. Queries are packed, or a dense batch. Batch rows, like pages of a
cache, are a whole number of rows apart, so that both are copied like packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from codegen.analysis.call_modes import Mode, has_tokens, specialised
from codegen.analysis.schedule import BlockAnalysis, Schedule, analyse
from codegen.plan.code.host import HostCode, host, listed
from codegen.plan.code.loop_bounds import seen_keys
from codegen.plan.code.statements import Assign, uses
from codegen.plan.code.tree import Code, Infix, Name, product, total
from codegen.plan.hopper.forward import ForwardPlan
from codegen.plan.hopper.kernels import forward_kernel
from codegen.plan.hopper.roles import Role, sorted_names
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan, pointers
from codegen.plan.kernels.legend import paged_legend
from codegen.plan.kernels.signature import Signatures
from codegen.plan.kernels.token_layout import PackedLayout, TokenLayout
from codegen.plan.paged.arguments import copied_strides, rows_apart
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised


class PagedLayout(PackedLayout):
    """Queries, o and lse of a paged call: packed, with a stride of 0 between batch rows, or a dense batch."""

    def head_offset(self, x: str, head: str, axis: str) -> Code:
        row = product(Name("b"), Name(f"stride_{x}b"))
        return Infix("+", row, super().head_offset(x, head, axis))

    @property
    def lse_offset(self) -> Code:
        strides = [product(Name("b"), Name("stride_lseb")), product(Name("h"), Name("stride_lseh"))]
        return total([*strides, Name("q_start")])

    @property
    def published_lse_offset(self) -> Code:
        return self.lse_offset


@dataclass(frozen=True, kw_only=True)
class PagedKernelPlan(KernelPlan):
    """The packed kernel for paged caches. `seen`: statements that find the keys to copy for a block of rows."""

    seen: Sequence[Assign]

    @property
    def layout(self) -> TokenLayout:
        return PagedLayout()

    @property
    def paged(self) -> bool:
        return True


@dataclass(frozen=True)
class PagedForwardPlan(ForwardPlan):
    """The roles of the warps of the forward on paged caches."""

    kernel: PagedKernelPlan

    @cached_property
    def _reads(self) -> frozenset[str]:
        return super()._reads | {"b"}

    @property
    def imports(self) -> dict[str, list[str]]:
        found = super().imports
        found["gl_forward"] = [name for name in found["gl_forward"] if name != "make_key_ring"]
        found["gl_forward_wide"] = [name for name in found["gl_forward_wide"] if name != "make_wide_key_ring"]
        found["gl_pages"] = sorted_names(["PageRows", "describe_pages", "make_paged_key_ring", "make_wide_paged_ring"])
        return {module: found[module] for module in sorted(found)}

    @cached_property
    def rows(self) -> Role:
        own = "work_counter_ptr q_batch_rows"
        return self._producer(frozenset({"start_m", *self.work_fields}), own)

    @cached_property
    def keys(self) -> Role:
        pages = "page_table_ptr page_starts_ptr table_stride FLAT_TABLE PAGE_SIZE"
        return self._producer(frozenset({"hkv", "b"}) | uses(self.kernel.seen), f"kv_len BLOCK_N {pages}")


def has_hopper_forward(variant: Variant) -> bool:
    """Whether prompts of a variant have a kernel of Hopper's family: if rows see one range of keys, in closed form, and
    no tensor has an element for each token."""
    if variant.dropout or variant.decay or any(has_tokens(spec.dims) for spec in variant.tensors.values()):
        return False
    found = analyse(variant.mask)
    return found.schedule in (Schedule.DENSE, Schedule.CLOSED_FORM) and found.keys.other is None


def paged_hopper_plan(written: Variant) -> PagedForwardPlan | None:
    """Decide everything about the kernel; None if the variant has none."""
    if not has_hopper_forward(written):
        return None
    variant = specialised(symbolised(written), Mode.PACKED)
    analysis: BlockAnalysis = analyse(variant.mask)
    sign = Signatures(variant, Mode.PACKED, (), analysis)
    args = _arguments(variant, sign)
    constants = [*(["Q_AT_END"] if sign.offset else []), *sign.constants(), "FLAT_TABLE", "PAGE_SIZE"]
    planned, builder = forward_kernel(variant, analysis, sign, constants)
    found = {field.name: getattr(planned, field.name) for field in fields(KernelPlan)}
    found |= {"name": f"{variant.name}_paged_hopper_fwd", "args": args}
    found |= {"legend": paged_legend(symbolised(written), variant.tensors, args)}
    kernel = PagedKernelPlan(**found, seen=seen_keys(analysis.keys.main, builder.lowering))
    return PagedForwardPlan(kernel, variant)


def _arguments(variant: Variant, sign: Signatures) -> list[ArgGroup]:
    roots = [e for e in (variant.mask, variant.score) if e is not None]
    table = ("page_table_ptr", "page_starts_ptr")
    return [
        pointers("q", "k", "v"),
        *([pointers("sink")] if variant.sink else []),
        *sign.own_tensors(roots),
        ArgGroup(names=table, host=listed([host("{}.page_table", "call"), host("{}.page_starts", "call")])),
        ArgGroup(names=("block_seqs_ptr",), host=listed(["records"])),
        *([ArgGroup(names=("q_offset",), host=host("{}.offset", "call"), varies=True)] if sign.offset else []),
        *sign.own_scalars(roots),
        pointers("o", "lse"),
        copied_strides("q", "query_strides"),
        copied_strides("k", "cache_strides"),
        copied_strides("v", "cache_strides"),
        ArgGroup(names=("stride_ob", "stride_oh", "stride_os"), host=_strides("o"), row_strides=("stride_os",)),
        ArgGroup(names=("stride_lseb", "stride_lseh"), host=host("*{}.lse_strides({})", "call", "lse")),
        *sign.own_strides(roots),
        *(rows_apart(name, x, of) for name, x, of in _ROWS_APART),
        _number("table_stride", "call.table_stride"),
        _number("num_heads", "call.q.shape[1]"),
        _number("group_size", "call.group"),
        ArgGroup(names=("scale",), host=host("{}.scale", "call")),
    ]


_ROWS_APART = (
    ("q_batch_rows", "q", "query_strides"),
    ("k_page_rows", "k", "cache_strides"),
    ("v_page_rows", "v", "cache_strides"),
)


def _strides(x: str) -> HostCode:
    return host("*{}.query_strides({})", "call", x)


def _number(name: str, source: str) -> ArgGroup:
    owner, _, rest = source.partition(".")
    return ArgGroup(names=(name,), host=host(f"{{}}.{rest}", owner), varies=True)
