"""A variant's own arguments as its op takes them: annotations, checks and documentation, in dense and packed calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from codegen.analysis.call_modes import PADDING, Mode, has_tokens, packed_axes
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, TensorSpec, Type, Var, int_var, level
from codegen.ir.printers import FormulaPrinter
from codegen.plan.code.host import NONE, HostCode, host, listed
from codegen.plan.kernels.variant_reads import tensor_reads
from codegen.plan.ops.parameters import Parameter
from codegen.spec import dims
from codegen.spec.model import ScalarSpec, Variant


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One of the variant's own arguments: a tensor, the sink, the log-decay, or a scalar.

    `public` is the keyword that the op's callers use, if generated code uses another name. `shape` is a tuple of
    expected sizes; an entry `at_least(n)` admits larger sizes. `packed_shape` is the shape in a packed call. `limits`
    are further arguments of a scalar's check. `doc` is the argument's line in the op's docstring. A `trained` tensor
    has a flag that tells the backward whether a call wants its gradient; `no_gradient` is the reason why a float tensor
    has no gradient, under the name that the runtime's `refuse_gradient` knows. The index into each of the `tile_axes`
    differs between pairs of query and key.
    """

    name: str
    required: str  # the annotation if the argument is given: Tensor, int or float
    dims: tuple[str | int, ...] = ()
    shape: HostCode = NONE
    packed_shape: HostCode = NONE
    dtype: str = ""  # the element type of a tensor; empty if any float dtype is admitted
    is_float: bool = False  # a tensor of floats, which kernels and references widen to the dtype they compute in
    limits: str = ""
    trained: bool = False
    no_gradient: str = ""
    tile_axes: tuple[int, ...] = ()
    doc: str = ""
    public: str = ""

    @property
    def keyword(self) -> str:
        """The op's keyword argument."""
        return self.public or self.name

    @property
    def is_tensor(self) -> bool:
        return self.required == "Tensor"

    @property
    def dtypes(self) -> HostCode:
        """The element types that its check admits."""
        return HostCode(f'("{self.dtype}",)') if self.dtype else host("{}", "FLOAT_DTYPES")

    @property
    def annotation(self) -> str:
        """The annotation of the op's keyword argument, None by default."""
        return f"{self.required} | None"

    @property
    def parameter(self) -> Parameter:
        """The parameter by which a launch takes the argument. JAX may pass a scalar as an array of one element."""
        by_pointer = not self.is_tensor and self.name != PADDING.name
        annotation = f"{self.required} | Tensor" if by_pointer else self.required
        return Parameter(self.name, annotation, is_tensor=self.is_tensor)

    @property
    def flag(self) -> str:
        """The parameter that says whether a call wants the gradient of this argument."""
        return f"grad_{self.name.lower()}"

    @property
    def check(self) -> str:
        """The statement that checks the argument in a dense call of torch."""
        return f"{self.name} = {self._checked(self.shape, self.tile_axes, ', q', self._refusal)}"

    @property
    def packed_check(self) -> str:
        """The statement that checks the argument in a packed call of torch."""
        return f"{self.name} = {self._checked(self.packed_shape, self._packed_tile_axes, ', q', self._refusal)}"

    @property
    def _refusal(self) -> str:
        return f', no_gradient="{self.no_gradient}"' if self.no_gradient else ""

    @property
    def checked(self) -> str:
        """Source of the checked argument in JAX. It checks no device: arrays of one program are on one device."""
        return self._checked(self._of_arguments(self.shape), self.tile_axes)

    @property
    def packed_checked(self) -> str:
        return self._checked(self._of_arguments(self.packed_shape), self._packed_tile_axes)

    @staticmethod
    def _of_arguments(shape: HostCode) -> HostCode:
        """A shape in terms of the arguments that JAX's op has checked already."""
        return shape.renamed({name: f"arguments.{name}" for name in ("q", "k", "row_offset", "cu_seqlens_q")})

    @property
    def check_functions(self) -> frozenset[str]:
        """The names that the argument's checks use; of a tensor, those beside `check_tensor`."""
        if not self.is_tensor:
            return frozenset((f"check_{self.required}",))
        return self.shape.names | self.packed_shape.names | self.dtypes.names

    @property
    def jax_annotation(self) -> str:
        """The annotation in JAX. There a scalar may also be an array."""
        return "Array | None" if self.is_tensor else f"{self.required} | Array | None"

    @property
    def _packed_tile_axes(self) -> tuple[int, ...]:
        kept = packed_axes(self.dims)
        return tuple(kept.index(axis) for axis in self.tile_axes if axis in kept)

    def _checked(self, shape: HostCode, tile_axes: tuple[int, ...], like: str = "", refusal: str = "") -> str:
        if self.is_tensor:
            narrow = f", tile_axes={tile_axes}" if tile_axes else ""
            return f'check_tensor(NAME, "{self.keyword}", {self.name}, {shape}, {self.dtypes}{like}{narrow}{refusal})'
        return f'check_{self.required}(NAME, "{self.keyword}", {self.name}{self.limits})'

    @property
    def of_sequence(self) -> str:
        """Source of the argument as the reference of one packed `sequence` takes it."""
        if not has_tokens(self.dims):
            return self.name
        return f"sequence.own({', '.join([self.name, *(_quoted(d) for d in self.dims)])})"


def _quoted(dim: str | int) -> str:
    return f'"{dim}"' if isinstance(dim, str) else str(dim)


def mask_arguments(variant: Variant, arguments: Sequence[Argument]) -> list[Argument]:
    """The arguments that the mask reads: they decide which blocks are visited.

    A size that is made of other arguments is not checked: a schedule does not take these.
    """
    if variant.mask is None:
        return []
    read = expr.names(variant.mask) | {load.tensor for load in expr.loads(variant.mask)}
    found = [a for a in arguments if a.name in read]
    given = {a.name for a in found}
    shapes = {a.name: _shapes(variant, variant.tensors[a.name], given) for a in found if a.name in variant.tensors}
    return [
        replace(a, shape=shapes[a.name][0], packed_shape=shapes[a.name][1]) if a.name in shapes else a for a in found
    ]


def _axis(tensor: str, axis: int) -> HostCode:
    return host(f"{{}}.shape[{axis}]", tensor)


def _at_least(size: HostCode) -> HostCode:
    return host("{}({})", "at_least", size)


_ANY = _at_least(HostCode("1"))
_SIZES = {"b": _axis("q", 0), "h": _axis("q", 1), "hkv": _axis("k", 1)}
_POSITIONS = {"q_idx": host("{} + {}", "row_offset", _axis("q", 2)), "kv_idx": _axis("k", 2)}
_FURTHEST = host("max({})", listed(_POSITIONS.values()))
# Sizes in a packed call, where q and k are `[total, H, D]`.
_PACKED_SIZES = _SIZES | {
    "b": host("{} - 1", _axis("cu_seqlens_q", 0)),
    "q_idx": _axis("q", 0),
    "kv_idx": _axis("k", 0),
}
_TOTALS = {"q_idx": "total_q", "kv_idx": "total_k"}


def own_arguments(variant: Variant, atomic: Mapping[str, Sequence[Mode]]) -> list[Argument]:
    """A variant's own arguments. `atomic`: tensor -> modes in which atomics add its gradient."""
    found = []
    for spec in variant.tensors.values():
        shape, packed_shape = _shapes(variant, spec, {*variant.tensors, *variant.scalars})
        declared = ", ".join(str(d) for d in spec.dims)
        packed = f", packed `[{_packed_text(spec.dims)}]`" if has_tokens(spec.dims) else ""
        example = f", such as `{FormulaPrinter().text(spec.example)}`" if spec.example is not None else ""
        trained = "; differentiable" if spec.grad else ""
        modes = atomic.get(spec.name, [])
        if modes:
            calls = "" if len(modes) == len(Mode) else f" in {' and '.join(modes)} calls"
            trained += f", its gradient{calls} added with fp32 atomics, in any order: not deterministic"
        found.append(
            Argument(
                name=spec.name,
                required="Tensor",
                dims=spec.dims,
                shape=shape,
                packed_shape=packed_shape,
                dtype=spec.dtype,
                is_float=spec.element is Type.FLOAT,
                trained=spec.grad,
                no_gradient=_no_gradient(variant, spec),
                tile_axes=_tile_axes(variant, spec.name),
                doc=f"{spec.dtype} `[{declared}]`{packed}{example}{trained}.",
                public=variant.keywords.get(spec.name, ""),
            )
        )
    if variant.decay:
        doc = (
            "log-decay `[B, P, Hq]`, packed `[total_k, Hq]`, natural log, any float dtype; P covers all rows and the "
            "offset; differentiable."
        )
        shape = _tuple([_SIZES["b"], _at_least(_FURTHEST), _SIZES["h"]])
        found.append(_float_argument("g", ("b", "kv_idx", "h"), shape, doc))
    if variant.sink:
        doc = "`[Hq]`, any float dtype: a logit per query head in the softmax denominator only; differentiable."
        found.append(_float_argument("sink", ("h",), _tuple([_SIZES["h"]]), doc))
    for scalar in variant.scalars.values():
        kind = scalar.type.value
        limits = "".join(f", {name}={value!r}" for name, value in scalar.limits.items())
        doc = f"{kind}{_range_text(scalar)}."
        public = variant.keywords.get(scalar.name, "")
        found.append(Argument(name=scalar.name, required=kind, limits=limits, doc=doc, public=public))
    return found


def _no_gradient(variant: Variant, spec: TensorSpec) -> str:
    """Why a float tensor has no gradient, as a name of the runtime; empty if it has one, or is no float tensor."""
    if spec.grad or spec.element is not Type.FLOAT:
        return ""
    in_score = variant.score is not None and any(load.tensor == spec.name for load in expr.loads(variant.score))
    return "undeclared" if in_score else "mask"


def _range_text(scalar: ScalarSpec) -> str:
    low, high = scalar.minimum, scalar.maximum
    if low is not None and high is not None:
        text = f" from {low} to {high}"
    else:
        text = f", at least {low}" if low is not None else f", at most {high}" if high is not None else ""
    text += ", not 0" if scalar.divides else ""
    return text if scalar.example is None else f"{text}, such as {scalar.example}"


def _float_argument(name: str, own_dims: tuple[str | int, ...], shape: HostCode, doc: str) -> Argument:
    return Argument(
        name=name,
        required="Tensor",
        dims=own_dims,
        shape=shape,
        packed_shape=_packed_shape(own_dims),
        is_float=True,
        doc=doc,
    )


def _tuple(sizes: Sequence[HostCode]) -> HostCode:
    return host(f"({{}}{',' * (len(sizes) == 1)})", listed(sizes))


def _shapes(variant: Variant, spec: TensorSpec, given: Collection[str]) -> tuple[HostCode, HostCode]:
    """The sizes of a tensor, and those in a packed call. `given`: the arguments from which sizes may be computed."""
    sizes = [_axis_size(variant, spec, axis, dim, given) for axis, dim in enumerate(spec.dims)]
    return _tuple(sizes), _packed_shape(spec.dims, _computed(variant, spec, given, packed=True))


def _packed_shape(own_dims: Sequence[str | int], computed: Mapping[int, HostCode] = MappingProxyType({})) -> HostCode:
    """The sizes in a packed call; any size if positions index an axis: only the device knows how far they reach.

    `computed`: axis -> the size that is computed.
    """
    sizes = [
        HostCode(str(dim)) if isinstance(dim, int) else computed.get(axis, _PACKED_SIZES.get(dim, _ANY))
        for axis, dim in enumerate(own_dims)
    ]
    return _tuple([sizes[axis] for axis in packed_axes(own_dims)])


def _computed(variant: Variant, spec: TensorSpec, given: Collection[str], *, packed: bool) -> dict[int, HostCode]:
    """Axis -> its size, if it is computed or has the name of an earlier axis.

    Any size if it depends on an argument that is not given, or on lengths of packed sequences, which only the device
    knows.
    """
    sizes = _PACKED_SIZES if packed else _SIZES | {"q_len": _axis("q", 2), "kv_len": _axis("k", 2)}
    values = {name: sizes[name] for name in dims.SIZES if name in sizes}
    values |= {name: host("{}", name) for name in variant.scalars if name in given}
    kinds = {name: scalar.type for name, scalar in variant.scalars.items()}
    owners = dims.own_names([t for t in variant.tensors.values() if t.name in given], kinds)
    for name, (tensor, axis) in owners.items():
        kept = packed_axes(variant.tensors[tensor].dims)
        values[name] = host(f"{{}}({{}}, {kept.index(axis) if packed else axis})", "size_of", tensor)
    computed = dict(spec.computed)
    found = {}
    for axis, dim in enumerate(map(str, spec.dims)):
        if dim in owners and owners[dim] != (spec.name, axis):
            found[axis] = _computed_size(int_var(dim), dim, values)
        elif dim in computed:
            is_known = expr.names(computed[dim]) <= values.keys()
            found[axis] = _computed_size(computed[dim], dim, values) if is_known else _ANY
    return found


def _computed_size(e: Expr, text: str, values: Mapping[str, HostCode]) -> HostCode:
    """A size as an expression, checked by the runtime's `computed`; `values`: name -> its source."""
    names = sorted(expr.names(e))
    form = dims.source(e, text, dict.fromkeys(names, "{}"))
    return host(form, *(values[name] for name in names)).calling("computed")


def _packed_text(own_dims: Sequence[str | int]) -> str:
    return ", ".join(str(_TOTALS.get(str(own_dims[axis]), own_dims[axis])) for axis in packed_axes(own_dims))


def _tile_axes(variant: Variant, tensor: str) -> tuple[int, ...]:
    indices = [load.indices for load in tensor_reads(variant) if load.tensor == tensor]
    return tuple(sorted({axis for of in indices for axis, index in enumerate(of) if level(index) is Level.TILE}))


def _axis_size(variant: Variant, spec: TensorSpec, axis: int, dim: str | int, given: Collection[str]) -> HostCode:
    """The size an axis must have: exact for heads and batch, at least the furthest position if positions index it."""
    if isinstance(dim, int):
        return HostCode(str(dim))
    computed = _computed(variant, spec, given, packed=False)
    if axis in computed:
        return computed[axis]
    if dim in _SIZES:
        return _SIZES[dim]
    needed = {_POSITIONS[dim]} if dim in _POSITIONS else set()
    for load in tensor_reads(variant):
        for other, index in enumerate(load.indices):
            # Axes with one free name have one size.
            is_same = (load.tensor, other) == (spec.name, axis) or (
                dim not in _POSITIONS and variant.tensors[load.tensor].dims[other] == dim
            )
            if is_same and isinstance(index, Var) and index.name in _POSITIONS:
                needed.add(_POSITIONS[index.name])
    if not needed:
        return _ANY
    size = needed.pop() if len(needed) == 1 else _FURTHEST
    # If the call gives positions, only the caller knows how far they reach. An axis over rows or keys has an element
    # for each of them in any case.
    return _at_least(size if dim in _POSITIONS else host("{} if {} is None else 1", size, "q_positions"))
