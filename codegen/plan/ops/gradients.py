"""The gradients of a variant's own tensors: the buffers that kernels fill, and the gradients computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.analysis.call_modes import Mode, has_tokens
from codegen.analysis.distances import LAG, by_lag
from codegen.analysis.far_distances import LagLine, lag_line
from codegen.analysis.gradients import DISTANCE_SUMS, FAR_SUMS, GradientKind, GradientTerm
from codegen.analysis.indexing import exact_index
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, ScalarType, Type, Var, int_var
from codegen.ir.printers import jnp_printer, torch_printer
from codegen.plan.code.host import HostCode, host, joined, listed, printed
from codegen.plan.kernels.far_blocks import host_limits
from codegen.plan.ops.frameworks import Framework
from codegen.spec.model import Variant


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that kernels gather gradients in, and the source that allocates it."""

    name: str
    allocate: HostCode


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of an index name as a tensor with the axes of `[B, Hq, S]`, of length 1 if the name does not vary
    along an axis.

    All have three axes, since JAX may be told to refuse operands of different ranks.
    """

    name: str
    source: HostCode


@dataclass(frozen=True, kw_only=True)
class OwnGradients:
    """How an op computes the gradients of a variant's own tensors in one mode and framework, from their `terms`.

    `in_keys`: programs that own blocks of keys may leave the sums of a head; each head then has `head_parts` sums.
    """

    variant: Variant
    terms: Sequence[GradientTerm]
    mode: Mode
    framework: Framework
    in_keys: bool

    def buffers(self) -> list[Buffer]:
        """One buffer per term, one per tensor for terms with atomics; a buffer that a call does not want is empty."""
        found = {t.accumulator: self._allocation(t) for t in self.terms if not t.by_distance}
        flags = dict.fromkeys(t.flag.lower() for t in self.terms if t.by_distance)
        if flags:
            # Pieces of blocks that a mask or the lengths leave out are never written.
            for name, own in (
                (DISTANCE_SUMS, host("{}.pieces, {}.size", "bands", "lags")),
                (FAR_SUMS, host("2, far_parts")),
            ):
                wanted = host("({}, {}, {}) if {} else (0,)", "batch", "num_heads", own, joined(" or ", flags))
                found[name] = host("{}.new_zeros({}, dtype={}.FP32)", "q", wanted, "backend")
        return [Buffer(name=name, allocate=source) for name, source in found.items()]

    def _allocation(self, term: GradientTerm) -> HostCode:
        if term.atomic:
            shape, none = host("{}.shape", term.tensor), host("(0,) * {}.dim()", term.tensor)
        else:
            batch = host("1") if self.mode is Mode.PACKED else host("{}", "batch")
            shape = host("({}, {}, {})", batch, "num_heads", self._sizes(term))
            none = host("(0,)")
        wanted = host("{} if {} else {}", shape, term.flag.lower(), none) if term.trained else shape
        # Every program stores the sums of its own rows or keys. But there may be more entries than blocks of packed
        # sequences, programs that own keys add to sums of rows, and pairs in blocks that a mask leaves out are never
        # visited: these buffers start as zeros.
        is_added = term.kind is GradientKind.ROW and self.in_keys
        whole = term.summed and not is_added and not (term.kind is GradientKind.HEAD and self.mode is Mode.PACKED)
        return host(f"{{}}.{'new_empty' if whole else 'new_zeros'}({{}}, dtype={{}}.FP32)", "q", wanted, "backend")

    def _sizes(self, term: GradientTerm) -> HostCode:
        if term.kind is GradientKind.PAIR:
            return host("{}, {}", "q_len", "kv_len")
        if term.kind is not GradientKind.HEAD:
            return host("{}", "q_len" if term.kind is GradientKind.ROW else "kv_len")
        if self.in_keys:
            return host("{}", "head_parts")
        if self.mode is Mode.PACKED:
            return host("{}.shape[0]", "block_seqs")
        return host('{}({}, {}["dq"].block_m)', "cdiv", "q_len", "tiles")

    def gradients(self) -> dict[str, HostCode]:
        """Tensor -> its gradient, computed from its buffers in calls that want it."""
        found = {}
        for spec in self.variant.tensors.values():
            if spec.grad:
                own = [t for t in self.terms if t.tensor == spec.name]
                parts = list(dict.fromkeys(self._part(t) for t in own))
                whole = joined(" + ", parts) if parts else self.framework.zeros(spec.name)
                found[spec.name] = self.framework.cast(host("({})", whole) if len(parts) > 1 else whole, spec.name)
        if self.variant.decay:
            found["g"] = host("{}", "dg")
        if self.variant.sink:
            found["sink"] = self.framework.head_sums("dsink_heads")
        return found

    def _part(self, term: GradientTerm) -> HostCode:
        """The gradient through one read, in float32 and of the tensor's shape."""
        sums = self.framework.filled(term.accumulator)
        if term.atomic:
            return sums
        if term.kind is GradientKind.PAIR:
            return host(f'{{}}({{}}, {{}}.shape, "{_axes(term)}", {{}})', "place_pairs", sums, term.tensor, "q_offset")
        if term.kind is GradientKind.HEAD:
            by_sequence = self.mode is Mode.PACKED and _SEQUENCE[term.kind] in self._names(term)
            if by_sequence:
                table = "head_seqs" if self.in_keys else "block_seqs"
                sums = host("{}({}, {}, {})", "sums_by_sequence", sums, table, "num_seqs")
            else:
                sums = host("{}.sum(-1)", sums)
        if term.by_distance:
            # A tensor may have several reads, of either sign.
            sign = "-" if term.sign < 0 else ""
            line = self._table_line(term)
            if line is not None:
                return host(
                    f"{sign}{{}}({{}}, {{}}, {{}}, {{}}.shape[1], {line.factor}, {line.rest})",
                    "distance_sums",
                    sums,
                    self.framework.filled(FAR_SUMS),
                    self._lag_axis(),
                    term.tensor,
                )
            sums = host(f"{sign}{{}}({{}}, {{}})", "lag_sums", sums, self.framework.filled(FAR_SUMS))
        if term.direct:
            length = [host(f"{{}}.shape[{term.axis}]", term.tensor)] if term.kind is GradientKind.COLUMN else []
            arguments = joined(", ", [sums, host(f'"{_axes(term)}"'), "num_kv_heads", *length])
            return host("{}({})", "reduce_gradient", arguments)
        parts = host("{}[..., None]", sums) if term.kind is GradientKind.HEAD else sums
        places = self._places(term)
        return host("{}({}, {}.shape, ({},))", "place_sums", parts, term.tensor, places)

    def _table_line(self, term: GradientTerm) -> LagLine | None:
        """The index by distance into a table of heads and distances, in which neighbouring distances are neighbouring
        elements. None for other tensors, and in JAX, where XLA makes one kernel of a gradient."""
        if not term.by_distance or self.framework is Framework.JAX:
            return None
        head, *others = _read(term).indices
        line = lag_line(others[0]) if head == int_var("h") and len(others) == 1 else None
        return line if line is not None and abs(line.factor) == 1 else None

    def _own_grids(self, term: GradientTerm) -> dict[str, str]:
        """Name that differs between packed sequences -> the grid that holds it for each sum of a term."""
        if self.mode is not Mode.PACKED:
            return {}
        sequence = _SEQUENCE[term.kind]
        return {"b": sequence, **_own_lengths(sequence)}

    def _places(self, term: GradientTerm) -> HostCode:
        """The indices of the elements that a term's sums belong to, clamped to the tensor like the kernels' reads."""

        def exact(tensor: str, axis: int, index: Expr) -> bool:
            return exact_index(self.variant.tensors, tensor, axis, index)

        def of_tokens(tensor: str, axis: int) -> Sequence[str]:
            """The call that finds the element of packed tokens that an index of this term's sequence reads."""
            begins = {"q_idx": ("cu_seqlens_q", "q_offset"), "kv_idx": ("cu_seqlens_k",)}
            found = begins.get(str(self.variant.tensors[tensor].dims[axis])) if self.mode is Mode.PACKED else None
            return ("packed_row", found[0], _SEQUENCE[term.kind], *found[1:]) if found else ()

        changed: dict[str, Expr] = {name: int_var(grid) for name, grid in self._own_grids(term).items()}
        if self.framework is Framework.JAX:
            printer = jnp_printer(exact, float_cast=lambda x: f"jnp.asarray({x}, jnp.float32)", placed=of_tokens)
            changed |= self._as_arrays()
        else:
            numbers = frozenset((*self.variant.scalars, *expr.LENGTH_NAMES))
            own: dict[str, str] = {"like": "q", "float_dtype": "torch.float32"}
            printer = torch_printer(
                exact, float_cast=lambda x: f"{x}.float()", numbers=numbers, placed=of_tokens, **own
            )
        load = _read(term)
        indices = tuple(expr.substitute(i, changed) for i in load.indices)
        text = ", ".join(printer.indices(Load(load.type, load.tensor, indices)))
        return printed(text, printer.reads)

    def _names(self, term: GradientTerm) -> frozenset[str]:
        """The names from which the indices of a term's sums are computed."""
        read, own = expr.names(_read(term)), self._own_grids(term)
        if not own:
            return read
        by_sequence = read & own.keys() or any(
            has_tokens(self.variant.tensors[x.tensor].dims) for x in expr.loads(term.load)
        )
        return frozenset((*(own.get(name, name) for name in read), *([own["b"]] if by_sequence else [])))

    def _as_arrays(self) -> dict[str, Expr]:
        """Scalar -> its array. JAX's launches get numbers or tensors."""
        kinds = {ScalarType.INT: Type.INT, ScalarType.FLOAT: Type.FLOAT}
        return {name: Var(kinds[scalar.type], f"{name}_val") for name, scalar in self.variant.scalars.items()}

    def grids(self) -> list[Grid]:
        """The index names from which the indices of sums are computed; in JAX also the scalars."""
        read = frozenset().union(*(self._names(t) for t in self._placed_terms))
        scalars = [name for name in self.variant.scalars if name in read] if self.framework is Framework.JAX else []
        sources = self._grid_sources()
        if self.mode is Mode.PACKED:
            read |= {f"{axis}_seq" for axis in ("q", "kv") if f"{axis}_idx" in read}
        found = [Grid(name=name, source=source) for name, source in sources.items() if name in read]
        return [*found, *(Grid(name=f"{name}_val", source=host("{}({})", "scalar_array", name)) for name in scalars)]

    def _grid_sources(self) -> dict[str, HostCode]:
        """Index name -> its grid, in an order in which each grid reads only earlier grids."""
        rows, keys = (self.framework.reshaped(self.framework.arange(size), (1, 1, -1)) for size in ("q_len", "kv_len"))
        heads = self.framework.reshaped(self.framework.arange("num_heads"), (1, -1, 1))
        batch = self.framework.reshaped(
            self.framework.arange("num_seqs" if self.mode is Mode.PACKED else "batch"), (-1, 1, 1)
        )
        found = {"b": batch, "h": heads, "hkv": host("{} // {}", heads, "group_size")}
        if self.mode is Mode.PACKED:
            return found | self._packed_sources(rows, keys)
        by_batch = self.framework.reshaped("row_offsets", (-1, 1, 1))
        shift = host("({} if {} is None else {})", "row_offset", "row_offsets", by_batch)
        shifted = host("{} + {}", rows, shift)
        if self.mode is Mode.DENSE:
            lag = host("{}({})", "lag_grid", self._lag_axis())
            return found | {"q_idx": shifted, "kv_idx": keys, LAG.name: lag}
        return found | {
            "q_row": shifted,
            "cols": keys,
            "q_idx": host("{} if {} is None else {}[:, None]", shifted, "q_positions", "q_positions"),
            "kv_idx": host("{} if {} is None else {}[:, None]", keys, "kv_positions", "kv_positions"),
        }

    def _lag_axis(self) -> HostCode:
        """The arguments from which the axis of a call's sums by distance follows."""
        return listed(("q", "k", "row_offset", "row_offsets", *host_limits(self.variant)))

    def _packed_sources(self, rows: HostCode, keys: HostCode) -> dict[str, HostCode]:
        """The grids of packed tokens: the sequence of each, its position there, and the lengths of sequences."""
        found = {}
        for axis, tensor, size in (("q", "cu_seqlens_q", "q_len"), ("kv", "cu_seqlens_k", "kv_len")):
            sequences = host("{}({}, {})", "sequence_of_rows", tensor, size)
            found[f"{axis}_seq"] = self.framework.reshaped(sequences, (1, 1, -1))
        shift = host("({} if {} is None else {}[{}])", "row_offset", "row_offsets", "row_offsets", "q_seq")
        found["q_idx"] = host("{} - {}[{}] + {}", rows, "cu_seqlens_q", "q_seq", shift)
        found["kv_idx"] = host("{} - {}[{}]", keys, "cu_seqlens_k", "kv_seq")
        for sequence in _OWNERS:
            for name, grid in _own_lengths(sequence).items():
                begins = f"cu_seqlens_{'q' if name == 'q_len' else 'k'}"
                found[grid] = host("{}[{} + 1] - {}[{}]", begins, sequence, begins, sequence)
        return found

    def placed(self) -> list[str]:
        """The flags of the tensors with a term whose sums are scattered to computed indices."""
        return list(dict.fromkeys(t.flag.lower() for t in self._placed_terms))

    @property
    def _placed_terms(self) -> list[GradientTerm]:
        """The terms whose sums are scattered to computed indices."""
        return [t for t in self.terms if _is_placed(t) and self._table_line(t) is None]


def _axes(term: GradientTerm) -> str:
    """One letter for each axis of the tensor: what the axis counts."""
    return "".join(_letter(i) for i in term.load.indices)


def _letter(index: Expr) -> str:
    assert isinstance(index, Var)
    return {"b": "b", "h": "h", "hkv": "k", "q_idx": "q", "q_row": "q", "kv_idx": "s", "cols": "s"}[index.name]


_SEQUENCE = {GradientKind.HEAD: "b", GradientKind.ROW: "q_seq", GradientKind.COLUMN: "kv_seq"}
"""The grid with the sequence that a packed sum belongs to."""

_OWNERS = {"b": "seq", "q_seq": "row", "kv_seq": "key"}
"""The prefix of the grids that hold the lengths of a sequence, of a query row's sequence, of a key's sequence."""


def _own_lengths(sequence: str) -> dict[str, str]:
    """Length -> the grid that holds it for each sequence of a grid."""
    return {name: f"{_OWNERS[sequence]}_{name}" for name in expr.LENGTH_NAMES}


def _read(term: GradientTerm) -> Load:
    """The read of a term, indexed by distance if its sums are by distance."""
    found = by_lag(term.load) if term.by_distance else term.load
    assert found is not None
    return found


def _is_placed(term: GradientTerm) -> bool:
    return term.trained and (term.by_distance or (term.summed and not term.direct))
