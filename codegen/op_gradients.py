"""What an op makes of gathered gradients: the buffers that the kernels fill, and the gradient as source over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen import expr
from codegen.emit import exact_index
from codegen.expr import Expr, Var
from codegen.model import GradientKind, GradientTerm
from codegen.printers import ArrayPrinter
from codegen.spec import Variant


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that kernels gather gradients in, and the source that allocates it."""

    name: str
    allocate: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of an index name as a tensor that broadcasts to `[B, Hq, S]`."""

    name: str
    source: str


def buffers(terms: Sequence[GradientTerm]) -> list[Buffer]:
    """One per term, those with atomics of one tensor together; of no elements where a call does not want them."""
    found = {t.accumulator: _allocation(t) for t in terms}
    return [Buffer(name=name, allocate=source) for name, source in found.items()]


def _allocation(term: GradientTerm) -> str:
    if term.atomic:
        shape, none = f"{term.tensor}.shape", f"(0,) * {term.tensor}.dim()"
    else:
        shape, none = f"(batch, num_heads, {_sizes(term)})", "(0,)"
    wanted = f"{shape} if {term.flag.lower()} else {none}" if term.trained else shape
    # Every program stores the sums of its own rows or keys. Pairs in blocks that a mask leaves out are never visited,
    # and neither are positions beyond the sequence.
    whole = term.summed and not (term.direct and term.kind is not GradientKind.HEAD)
    return f"q.{'new_empty' if whole else 'new_zeros'}({wanted}, dtype=FP32)"


def _sizes(term: GradientTerm) -> str:
    if term.kind is GradientKind.HEAD:
        return 'cdiv(q_len, tiles["dq"].block_m)'
    if term.direct:
        return f"{term.tensor}.shape[{term.axis}]"
    return {GradientKind.ROW: "q_len", GradientKind.COLUMN: "kv_len", GradientKind.PAIR: "q_len, kv_len"}[term.kind]


def gradients(variant: Variant, terms: Sequence[GradientTerm]) -> dict[str, str]:
    """Source of each tensor's gradient, where a call wants it, from its buffers."""
    found = {}
    for spec in variant.tensors.values():
        if spec.grad:
            parts = {_part(variant, t): None for t in terms if t.tensor == spec.name}
            total = " + ".join(parts) or f"q.new_zeros({spec.name}.shape)"
            found[spec.name] = f"{f'({total})' if len(parts) > 1 else total}.to({spec.name}.dtype)"
    if variant.decay:
        found["g"] = "dg"
    if variant.sink:
        found["sink"] = "dsink_heads.sum((0, 2))"
    return found


def _part(variant: Variant, term: GradientTerm) -> str:
    """Source of the gradient through one read, float32 of the tensor's shape."""
    sums = term.accumulator
    if term.atomic:
        return sums
    if term.kind is GradientKind.PAIR:
        return f'place_pairs({sums}, {term.tensor}.shape, "{_axes(term)}", q_offset)'
    if term.direct:
        total = f"{sums}.sum(-1)" if term.kind is GradientKind.HEAD else sums
        return f'reduce_gradient({total}, "{_axes(term)}", num_kv_heads)'
    total = f"{sums}.sum(-1, keepdim=True)" if term.kind is GradientKind.HEAD else sums
    return f"place_sums({total}, {term.tensor}.shape, ({_places(variant, term)},))"


def _axes(term: GradientTerm) -> str:
    """What each axis of the tensor is, a letter each."""
    return "".join(_letter(i) for i in term.load.indices)


def _letter(index: Expr) -> str:
    assert isinstance(index, Var)
    return {"b": "b", "h": "h", "hkv": "k", "q_idx": "q", "kv_idx": "s"}[index.name]


def _places(variant: Variant, term: GradientTerm) -> str:
    """The indices as the kernels read: clamped to the tensor."""
    printer = ArrayPrinter(
        float_cast=lambda x: f"{x}.to(FP32)",
        exact_dims=lambda tensor, axis, index: exact_index(variant.tensors, tensor, axis, index),
        numbers=frozenset(variant.scalars),
    )
    return ", ".join(printer.indices(term.load))


def grids(terms: Sequence[GradientTerm]) -> list[Grid]:
    """The index names that the places of sums are computed from."""
    read = frozenset().union(*(expr.names(t.load) for t in terms if _is_placed(t)))
    shift = "(row_offset if row_offsets is None else row_offsets.view(-1, 1, 1))"
    sources = {
        "b": "torch.arange(batch, device=q.device).view(-1, 1, 1)",
        "h": "torch.arange(num_heads, device=q.device).view(-1, 1)",
        "hkv": "torch.arange(num_heads, device=q.device).view(-1, 1) // group_size",
        "q_idx": f"torch.arange(q_len, device=q.device) + {shift}",
        "kv_idx": "torch.arange(kv_len, device=q.device)",
    }
    return [Grid(name=name, source=source) for name, source in sources.items() if name in read]


def placed(terms: Sequence[GradientTerm]) -> list[str]:
    """The parameters for the tensors with a term whose sums are placed."""
    return list(dict.fromkeys(t.flag.lower() for t in terms if _is_placed(t)))


def _is_placed(term: GradientTerm) -> bool:
    return term.summed and not term.direct
