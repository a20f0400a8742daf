"""Arguments and compile-time constants of the kernels on paged caches, in order."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.analysis.indexing import exact_index
from codegen.analysis.paged_calls import HEAD, PAGE, SLOT
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, int_var
from codegen.plan.code.host import host, listed
from codegen.plan.kernels.kernel import ArgGroup, pointers
from codegen.plan.kernels.signature import axis_sizes, clamped_axes, scalar_numbers, tensor_strides
from codegen.plan.kernels.variant_reads import reads_pairs, tensor_reads, uses_tanh
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


def _of_tensors(variant: Variant, loads: Sequence[Load]) -> tuple[list[ArgGroup], list[ArgGroup]]:
    """The pointers to the tensors that are read; their strides, and the sizes of the axes whose index is clamped."""

    def is_inside(tensor: str, axis: int, index: Expr) -> bool:
        dim = variant.tensors[tensor].dims[axis]
        by_kind = dim in (PAGE, "q_idx") or (dim == "h" and index == HEAD) or (dim == SLOT and index == _KEY)
        return by_kind or exact_index(variant.tensors, tensor, axis, index)

    read = {load.tensor for load in loads}
    specs = [spec for name, spec in variant.tensors.items() if name in read]
    strides = [tensor_strides(spec) for spec in specs if spec.dims]
    return [pointers(spec.name) for spec in specs], [*strides, *axis_sizes(clamped_axes(loads, is_inside))]


def _scalars(variant: Variant, roots: Sequence[Expr]) -> list[ArgGroup]:
    read = expr.names(*roots)
    return scalar_numbers(name for name in variant.scalars if name in read)


def forward_arguments(variant: Variant, roots: Sequence[Expr], *, offset: bool) -> list[ArgGroup]:
    """The arguments of the forward of one split, in order."""
    tensors, strides = _of_tensors(variant, tensor_reads(variant))
    return [
        pointers("q", "k", "v"),
        ArgGroup(names=("k_scale", "v_scale"), host=host("{}.k_scale, {}.value_scale", "call", "call")),
        *([pointers("sink")] if variant.sink else []),
        *tensors,
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
        *strides,
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
    tensors, strides = _of_tensors(variant, expr.loads(*roots))
    return [
        *tensors,
        _of_call("cu_seqlens_q", "kv_lengths"),
        *([ArgGroup(names=("q_offset",), host=host("{}.offset", "call"), varies=True)] if shift else []),
        *_scalars(variant, roots),
        pointers("records", "tiles", "counts"),
        *strides,
        _number("q_rows", "call"),
        _number("num_seqs", "call"),
        _number("most_keys", "call"),
        _number("most_splits", "rows"),
        _number("least_keys", "rows"),
    ]


def plan_constants(variant: Variant, roots: Sequence[Expr], *, shift: bool) -> list[str]:
    """The compile-time constants of the kernel that plans the splits, in order."""
    read = expr.names(*roots)
    return [
        *(["Q_AT_END", "Q_OFFSET_PER_BATCH"] if shift else []),
        *(["SCALARS_LOADED"] if any(name in read for name in variant.scalars) else []),
        "PACKED",
        "BALANCED",
        "PLANNERS",
        "FIRST_ROWS",
        "LAST_ROWS",
        "GROUP",
        "FOLDS",
        "BLOCK_M",
        "BLOCK_N",
    ]


def copied_strides(x: str, of: str) -> ArgGroup:
    """The strides of heads, in units of 16 bytes, and of rows of a tensor that TMA copies, as the call's method `of`
    gives them."""
    names = (f"stride_{x}h", f"stride_{x}s")
    return ArgGroup(
        names=names, host=host(f"*{{}}({{}}.{of}({{}}), {{}})", "copied_strides", "call", x, x), row_strides=names[1:]
    )


def rows_apart(name: str, x: str, of: str) -> ArgGroup:
    """The distance between batch rows, or between pages, in rows."""
    return ArgGroup(names=(name,), host=host(f"{{}}({{}}.{of}({{}}))", "rows_apart", "call", x), varies=True)


def latent_arguments(variant: Variant, roots: Sequence[Expr], *, offset: bool) -> list[ArgGroup]:
    """The arguments of Hopper's forward of one split whose values are the first columns of keys, in order."""
    return [
        pointers("q", "k"),
        ArgGroup(names=("k_scale", "v_scale"), host=host("{}.k_scale, {}.value_scale", "call", "call")),
        _of_call("page_table", "page_starts"),
        pointers("records", "counts"),
        *([ArgGroup(names=("q_offset",), host=host("{}.offset", "call"), varies=True)] if offset else []),
        *_scalars(variant, roots),
        pointers("o", "lse", "partial_o", "partial_sums"),
        _strides("q", "bhs", "query_strides"),
        copied_strides("k", "cache_strides"),
        _strides("o", "bhs", "query_strides"),
        _strides("lse", "bh", "lse_strides"),
        rows_apart("k_page_rows", "k", "cache_strides"),
        _number("table_stride", "call"),
        _number("num_kv_heads", "call"),
        _number("partial_rows", "rows"),
        ArgGroup(names=("softmax_scale",), host=host("{}.scale", "call")),
    ]


def latent_constants(variant: Variant, *, offset: bool) -> list[str]:
    """The compile-time constants of that forward, in order."""
    return [
        *(["Q_AT_END", "Q_OFFSET_PER_BATCH"] if offset else []),
        *(["SCALARS_LOADED"] if variant.scalars else []),
        "K_SCALE",
        "V_SCALE",
        "FLAT_TABLE",
        "PAGE_SIZE",
        "GROUP",
        "HEAD_DIM",
        "HEAD_DIM_V",
    ]
