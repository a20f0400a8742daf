"""Arguments and compile-time constants of the kernels on paged caches, in order."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.analysis.indexing import exact_index
from codegen.analysis.paged_calls import HEAD, PAGE, SLOT
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, int_var
from codegen.plan.host_code import host, listed
from codegen.plan.kernel import ArgGroup, numbers, pointers
from codegen.plan.variant_reads import reads_pairs, tensor_reads, uses_tanh
from codegen.spec.model import Variant

_KEY = int_var("kv_idx")


def _strides(x: str, axes: str, of: str, compiled: str = "") -> ArgGroup:
    """The strides of a tensor, one for each letter of `axes`, as the call's method `of` gives them. The strides of the
    axes in `compiled` are literals of the kernel."""
    names = tuple(f"stride_{x}{axis}" for axis in axes)
    rows = tuple(f"stride_{x}{axis}" for axis in compiled)
    return ArgGroup(names=names, host=host(f"*{{}}.{of}({{}})", "call", x), row_strides=rows)


def _of_call(*tensors: str) -> ArgGroup:
    """The pointers to tensors that the call holds."""
    names = tuple(f"{name}_ptr" for name in tensors)
    return ArgGroup(names=names, host=listed(host(f"{{}}.{name}", "call") for name in tensors))


def _number(name: str, owner: str) -> ArgGroup:
    """A number that the call, or the class of rows, holds."""
    return ArgGroup(names=(name,), host=host(f"{{}}.{name}", owner), varies=True)


def _own_strides(variant: Variant, names: Sequence[str]) -> list[ArgGroup]:
    return [
        ArgGroup(
            names=tuple(f"stride_{name}_{axis}" for axis in range(len(variant.tensors[name].dims))),
            host=host("*{}.stride()", name),
        )
        for name in names
        if variant.tensors[name].dims
    ]


def _own_sizes(variant: Variant, loads: Sequence[Load]) -> list[ArgGroup]:
    """The sizes of the axes whose index is clamped to them."""
    found: dict[str, set[int]] = {}
    for load in loads:
        dims = variant.tensors[load.tensor].dims
        for axis, index in enumerate(load.indices):
            if not _has_element(dims[axis], index) and not exact_index(variant.tensors, load.tensor, axis, index):
                found.setdefault(load.tensor, set()).add(axis)
    return [
        ArgGroup(
            names=tuple(f"{name}_size_{axis}" for axis in sorted(axes)),
            host=listed(host(f"{{}}.shape[{axis}]", name) for axis in sorted(axes)),
            varies=True,
        )
        for name, axes in found.items()
    ]


def _has_element(dim: str | int, index: Expr) -> bool:
    """True if an axis always has an element for an index, whatever the size of the axis."""
    by_kind = dim in (PAGE, "q_idx") or (dim == "h" and index == HEAD)
    return by_kind or (dim == SLOT and index == _KEY)


def _scalars(variant: Variant, roots: Sequence[Expr]) -> list[ArgGroup]:
    read = frozenset().union(*map(expr.names, roots))
    return [numbers(name, loadable=True) for name in variant.scalars if name in read]


def forward_arguments(variant: Variant, roots: Sequence[Expr], *, offset: bool) -> list[ArgGroup]:
    """The arguments of the forward of one split, in order."""
    loads = tensor_reads(variant)
    own = [name for name in variant.tensors if name in {load.tensor for load in loads}]
    return [
        pointers("q", "k", "v"),
        ArgGroup(names=("k_scale", "v_scale"), host=host("{}.k_scale, {}.value_scale", "call", "call")),
        *([pointers("sink")] if variant.sink else []),
        *(pointers(name) for name in own),
        _of_call("page_table", "page_starts"),
        pointers("records", "counts"),
        *([ArgGroup(names=("q_offset",), host=host("{}.offset", "call"), varies=True)] if offset else []),
        *_scalars(variant, roots),
        pointers("o", "lse", "partial_o", "partial_sums"),
        _strides("q", "bhs", "query_strides"),
        _strides("k", "phs", "cache_strides", compiled="s"),
        _strides("v", "phs", "cache_strides", compiled="s"),
        _strides("o", "bhs", "query_strides"),
        _strides("lse", "bh", "lse_strides"),
        *_own_strides(variant, own),
        *_own_sizes(variant, loads),
        _number("table_stride", "call"),
        _number("num_kv_heads", "call"),
        _number("partial_rows", "rows"),
        ArgGroup(names=("softmax_scale",), host=host("{}.scale", "call")),
    ]


def forward_constants(variant: Variant, *, offset: bool) -> list[str]:
    """The compile-time constants of the forward of one split, in order."""
    return [
        *(["Q_AT_END", "Q_OFFSET_PER_BATCH"] if offset else []),
        *(["SCALARS_LOADED"] if variant.scalars else []),
        *(["PTX"] if reads_pairs(variant) else []),
        *(["HARDWARE_TANH"] if uses_tanh(variant) else []),
        "K_SCALE",
        "V_SCALE",
        "PAIRS",
        "SHARED_KV",
        "FLAT_TABLE",
        "PAGE_SIZE",
        "GROUP",
        "FOLDS",
        "OVERLAPS",
        "HEAD_DIM",
        "HEAD_DIM_V",
        "BLOCK_D",
        "BLOCK_DV",
        "BLOCK_M",
        "BLOCK_N",
    ]


def plan_arguments(variant: Variant, roots: Sequence[Expr], *, shift: bool) -> list[ArgGroup]:
    """The arguments of the kernel that plans the splits, in order."""
    loads = expr.loads(*roots)
    own = [name for name in variant.tensors if name in {load.tensor for load in loads}]
    return [
        *(pointers(name) for name in own),
        _of_call("cu_seqlens_q", "kv_lengths"),
        *([ArgGroup(names=("q_offset",), host=host("{}.offset", "call"), varies=True)] if shift else []),
        *_scalars(variant, roots),
        pointers("records", "tiles", "counts"),
        *_own_strides(variant, own),
        *_own_sizes(variant, loads),
        _number("q_rows", "call"),
        _number("num_seqs", "call"),
        _number("most_keys", "call"),
        _number("most_splits", "rows"),
        _number("least_keys", "rows"),
    ]


def plan_constants(variant: Variant, roots: Sequence[Expr], *, shift: bool) -> list[str]:
    """The compile-time constants of the kernel that plans the splits, in order."""
    read = frozenset().union(*map(expr.names, roots))
    return [
        *(["Q_AT_END", "Q_OFFSET_PER_BATCH"] if shift else []),
        *(["SCALARS_LOADED"] if any(name in read for name in variant.scalars) else []),
        "PACKED",
        "BALANCED",
        "FIRST_ROWS",
        "LAST_ROWS",
        "GROUP",
        "FOLDS",
        "BLOCK_M",
        "BLOCK_N",
    ]
