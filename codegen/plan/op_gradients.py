"""What an op makes of gathered gradients: the buffers that the kernels fill, and the gradient as source over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.analysis.call_modes import Mode, has_tokens
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.analysis.indexing import exact_index
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, ScalarType, Type, Var, int_var
from codegen.ir.printers import jnp_printer, torch_printer
from codegen.plan.frameworks import Framework
from codegen.spec.model import Variant


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that kernels gather gradients in, and the source that allocates it."""

    name: str
    allocate: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of an index name as a tensor with the axes of `[B, Hq, S]`, of length 1 where it has one value.

    All have three axes, since JAX may be told to refuse operands of different ranks.
    """

    name: str
    source: str


def buffers(terms: Sequence[GradientTerm], mode: Mode, *, in_keys: bool = False) -> list[Buffer]:
    """One per term, those with atomics of one tensor together; of no elements where a call does not want them.

    `in_keys`: programs of blocks of keys may leave the sums of a head, of which there are `head_parts` then.
    """
    found = {t.accumulator: _allocation(t, mode, in_keys=in_keys) for t in terms}
    return [Buffer(name=name, allocate=source) for name, source in found.items()]


def _allocation(term: GradientTerm, mode: Mode, *, in_keys: bool) -> str:
    if term.atomic:
        shape, none = f"{term.tensor}.shape", f"(0,) * {term.tensor}.dim()"
    else:
        batch = "1" if mode is Mode.PACKED else "batch"
        shape, none = f"({batch}, num_heads, {_sizes(term, mode, in_keys=in_keys)})", "(0,)"
    wanted = f"{shape} if {term.flag.lower()} else {none}" if term.trained else shape
    # Every program stores the sums of its own rows or keys, but there may be more entries than blocks of packed
    # sequences, and programs of keys add to those of rows. Pairs in blocks that a mask leaves out are never visited.
    added = term.kind is GradientKind.ROW and in_keys
    whole = term.summed and not added and not (term.kind is GradientKind.HEAD and mode is Mode.PACKED)
    return f"q.{'new_empty' if whole else 'new_zeros'}({wanted}, dtype=FP32)"


def _sizes(term: GradientTerm, mode: Mode, *, in_keys: bool) -> str:
    if term.kind is GradientKind.HEAD:
        if in_keys:
            return "head_parts"
        packed = mode is Mode.PACKED
        return "block_seqs.shape[0]" if packed else 'cdiv(q_len, tiles["dq"].block_m)'
    return {GradientKind.ROW: "q_len", GradientKind.COLUMN: "kv_len", GradientKind.PAIR: "q_len, kv_len"}[term.kind]


def gradients(
    variant: Variant, terms: Sequence[GradientTerm], mode: Mode, framework: Framework, *, in_keys: bool = False
) -> dict[str, str]:
    """Source of each tensor's gradient, where a call wants it, from its buffers."""
    found = {}
    for spec in variant.tensors.values():
        if spec.grad:
            own = [t for t in terms if t.tensor == spec.name]
            parts = {_part(variant, t, mode, framework, in_keys=in_keys): None for t in own}
            total = " + ".join(parts) or framework.zeros(spec.name)
            found[spec.name] = framework.cast(f"({total})" if len(parts) > 1 else total, f"{spec.name}.dtype")
    if variant.decay:
        found["g"] = "dg"
    if variant.sink:
        found["sink"] = f"{framework.filled('dsink_heads')}.sum((0, 2))"
    return found


def _part(variant: Variant, term: GradientTerm, mode: Mode, framework: Framework, *, in_keys: bool) -> str:
    """Source of the gradient through one read, float32 of the tensor's shape."""
    sums = framework.filled(term.accumulator)
    if term.atomic:
        return sums
    if term.kind is GradientKind.PAIR:
        return f'place_pairs({sums}, {term.tensor}.shape, "{_axes(term)}", q_offset)'
    if term.kind is GradientKind.HEAD:
        by_sequence = mode is Mode.PACKED and _SEQUENCE[term.kind] in _names(variant, term, mode)
        table = "head_seqs" if in_keys else "block_seqs"
        sums = f"sums_by_sequence({sums}, {table}, num_seqs)" if by_sequence else f"{sums}.sum(-1)"
    if term.direct:
        length = f", {term.tensor}.shape[{term.axis}]" if term.kind is GradientKind.COLUMN else ""
        return f'reduce_gradient({sums}, "{_axes(term)}", num_kv_heads{length})'
    total = f"{sums}[..., None]" if term.kind is GradientKind.HEAD else sums
    return f"place_sums({total}, {term.tensor}.shape, ({_places(variant, term, mode, framework)},))"


def _axes(term: GradientTerm) -> str:
    """What each axis of the tensor is, a letter each."""
    return "".join(_letter(i) for i in term.load.indices)


def _letter(index: Expr) -> str:
    assert isinstance(index, Var)
    return {"b": "b", "h": "h", "hkv": "k", "q_idx": "q", "q_row": "q", "kv_idx": "s", "cols": "s"}[index.name]


_SEQUENCE = {GradientKind.HEAD: "b", GradientKind.ROW: "q_seq", GradientKind.COLUMN: "kv_seq"}
"""The grid with the sequence that a packed sum belongs to."""

_OWNERS = {"b": "seq", "q_seq": "row", "kv_seq": "key"}
"""What has the lengths of its sequence in a grid: of a sequence, of a query row or of a key."""


def _own_lengths(sequence: str) -> dict[str, str]:
    """Length of a sequence -> the grid that has it, for each of the sequences of a grid."""
    return {name: f"{_OWNERS[sequence]}_{name}" for name in expr.LENGTH_NAMES}


def _places(variant: Variant, term: GradientTerm, mode: Mode, framework: Framework) -> str:
    """The indices as the kernels read: clamped to the tensor."""

    def exact(tensor: str, axis: int, index: Expr) -> bool:
        return exact_index(variant.tensors, tensor, axis, index)

    def of_tokens(tensor: str, axis: int, index: str) -> str:
        """The element of packed tokens that an index of this term's sequence reads."""
        begins = {"q_idx": ("cu_seqlens_q", ", q_offset"), "kv_idx": ("cu_seqlens_k", "")}
        found = begins.get(str(variant.tensors[tensor].dims[axis])) if mode is Mode.PACKED else None
        return f"packed_row({index}, {found[0]}, {_SEQUENCE[term.kind]}{found[1]})" if found else ""

    sequence = _SEQUENCE[term.kind] if mode is Mode.PACKED else ""
    own = {"b": sequence, **_own_lengths(sequence)} if sequence else {}
    changed: dict[str, Expr] = {name: int_var(grid) for name, grid in own.items()}
    if framework is Framework.JAX:
        printer = jnp_printer(exact, float_cast=lambda x: f"jnp.asarray({x}, FP32)", placed=of_tokens)
        changed |= _as_arrays(variant)
    else:
        numbers = frozenset((*variant.scalars, *expr.LENGTH_NAMES))
        printer = torch_printer(exact, float_cast=lambda x: f"{x}.to(FP32)", numbers=numbers, placed=of_tokens)
    load = term.load
    indices = tuple(expr.substitute(i, changed) for i in load.indices)
    return ", ".join(printer.indices(Load(load.type, load.tensor, indices)))


def _names(variant: Variant, term: GradientTerm, mode: Mode) -> frozenset[str]:
    """The names that the places of a term's sums are computed from."""
    read = expr.names(term.load)
    if mode is not Mode.PACKED:
        return read
    sequence = _SEQUENCE[term.kind]
    own = {"b": sequence, **_own_lengths(sequence)}
    by_sequence = read & own.keys() or any(has_tokens(variant.tensors[x.tensor].dims) for x in expr.loads(term.load))
    return frozenset((*(own.get(name, name) for name in read), *([sequence] if by_sequence else [])))


def _as_arrays(variant: Variant) -> dict[str, Expr]:
    """The variant's scalars by the names of arrays: JAX's launches are given numbers or tensors."""
    kinds = {ScalarType.INT: Type.INT, ScalarType.FLOAT: Type.FLOAT}
    return {name: Var(kinds[scalar.type], f"{name}_val") for name, scalar in variant.scalars.items()}


def grids(variant: Variant, terms: Sequence[GradientTerm], mode: Mode, framework: Framework) -> list[Grid]:
    """The index names that the places of sums are computed from; in JAX also the scalars."""
    placed = [t for t in terms if _is_placed(t)]
    read = frozenset().union(*(_names(variant, t, mode) for t in placed))
    scalars = [name for name in variant.scalars if name in read] if framework is Framework.JAX else []
    rows, keys = (framework.reshaped(framework.arange(size), (1, 1, -1)) for size in ("q_len", "kv_len"))
    heads = framework.reshaped(framework.arange("num_heads"), (1, -1, 1))
    shift = f"(row_offset if row_offsets is None else {framework.reshaped('row_offsets', (-1, 1, 1))})"
    sources = {
        "b": framework.reshaped(framework.arange("batch"), (-1, 1, 1)),
        "h": heads,
        "hkv": f"{heads} // group_size",
        "q_idx": f"{rows} + {shift}",
        "kv_idx": keys,
    }
    if mode is Mode.PACKED:
        shift = "(row_offset if row_offsets is None else row_offsets[q_seq])"
        sources |= {
            "b": framework.reshaped(framework.arange("num_seqs"), (-1, 1, 1)),
            "q_seq": framework.reshaped("sequence_of_rows(cu_seqlens_q, q_len)", (1, 1, -1)),
            "kv_seq": framework.reshaped("sequence_of_rows(cu_seqlens_k, kv_len)", (1, 1, -1)),
            "q_idx": f"{rows} - cu_seqlens_q[q_seq] + {shift}",
            "kv_idx": f"{keys} - cu_seqlens_k[kv_seq]",
        }
        for sequence in _OWNERS:
            for name, grid in _own_lengths(sequence).items():
                begins = f"cu_seqlens_{'q' if name == 'q_len' else 'k'}"
                sources[grid] = f"{begins}[{sequence} + 1] - {begins}[{sequence}]"
        read |= {f"{axis}_seq" for axis in ("q", "kv") if f"{axis}_idx" in read}
    if mode is Mode.SEGMENTED:
        sources |= {
            "q_row": f"{rows} + {shift}",
            "cols": keys,
            "q_idx": f"{rows} + {shift} if q_positions is None else q_positions[:, None]",
            "kv_idx": f"{keys} if kv_positions is None else kv_positions[:, None]",
        }
    order = ["b", "h", "hkv", "q_seq", "kv_seq", "q_row", "cols", "q_idx", "kv_idx"]
    order += [grid for sequence in _OWNERS for grid in _own_lengths(sequence).values()]
    found = [Grid(name=name, source=sources[name]) for name in order if name in read]
    return [*found, *(Grid(name=f"{name}_val", source=f"scalar_array({name})") for name in scalars)]


def placed(terms: Sequence[GradientTerm]) -> list[str]:
    """The parameters for the tensors with a term whose sums are placed."""
    return list(dict.fromkeys(t.flag.lower() for t in terms if _is_placed(t)))


def _is_placed(term: GradientTerm) -> bool:
    return term.trained and term.summed and not term.direct
