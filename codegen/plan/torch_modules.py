"""A variant as a module of torch: its trained tensors and sinks as parameters, its scalars as defaults of its calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from keyword import kwlist

from codegen.ir import expr
from codegen.ir.expr import LENGTH_NAMES, TensorSpec, int_var
from codegen.ir.printers import FormulaPrinter, NumberPrinter, torch_printer
from codegen.spec.dims import names_of
from codegen.spec.model import ScalarSpec, Variant
from codegen.util.text import literal

_HEADS = {"h": ("heads", "query heads, Hq."), "hkv": ("kv_heads", "key heads, Hkv.")}
_OF_CALLS = frozenset({"b", "q_idx", "kv_idx", *LENGTH_NAMES})

MODULE_NAMES = frozenset(
    {
        "T_destination",
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "xpu",
        "zero_grad",
        "dropout_p",
        "entry",
        "op",
        "reset_parameters",
        "scalars",
        "sizes",
    }
)
"""Attributes that a module has already, from torch and from the package: a parameter of such a name is renamed."""

BESIDE = frozenset(
    {
        *("Any", "AttentionModule", "ByRow", "Kernels", "Schedule", "Tensor", "Tokens"),
        *("BY_ROW", "DENSE", "FLOAT_DTYPES", "NAME", "PACKED", "PASSES", "SEGMENTED"),
    }
)
"""Other names in the Python module of an op: a class of a variant that would have such a name is renamed."""

_CONSTRUCTOR = ("self", "device", "dtype", "dropout_p")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that the constructor takes."""

    argument: str
    doc: str


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A scalar that calls have a default for: the constructor's argument, and the op's.

    `sizes`: the shape of a parameter depends on it, so the constructor must be given a number.
    """

    argument: str
    name: str
    type: str
    doc: str
    sizes: bool


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter: its attribute, the op's argument, source of its shape, and its initial values.

    `initial` is source over `axes`, variables for the positions along some axes; empty for zeros.
    """

    attribute: str
    name: str
    shape: str
    initial: str
    axes: Sequence[tuple[str, int]]
    doc: str


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """The class of one variant.

    `entry` is its mask and score in the words of the spec, as literals; `passed` are the tensors that calls give.
    """

    name: str
    op: str
    doc: str
    entry: Sequence[tuple[str, str]]
    sizes: Sequence[Size]
    scalars: Sequence[Scalar]
    parameters: Sequence[Parameter]
    passed: Sequence[str]
    dropout: bool

    @property
    def fills_by_axes(self) -> bool:
        """True if the initial value of a parameter depends on the position along an axis."""
        return any(parameter.initial and parameter.axes for parameter in self.parameters)

    @property
    def signature(self) -> str:
        """The parameters of the constructor."""
        keywords = [f"{s.argument}: {s.type}" for s in self.scalars if s.sizes]
        keywords += [f"{s.argument}: {s.type} | None = None" for s in self.scalars if not s.sizes]
        keywords += ["dropout_p: float = 0.0"] if self.dropout else []
        if self.parameters:
            keywords += ["device: torch.device | str | None = None", "dtype: torch.dtype | None = None"]
        sizes = [f"{s.argument}: int" for s in self.sizes]
        return ", ".join(["self", *sizes, *(["*", *keywords] if keywords else [])])

    @property
    def base_arguments(self) -> str:
        """What the constructor of the base class is called with."""
        sizes = ", ".join(f'"{size.argument}": {size.argument}' for size in self.sizes)
        scalars = ", ".join(f'"{scalar.name}": {scalar.argument}' for scalar in self.scalars)
        given = [f"sizes={{{sizes}}}"] if sizes else []
        given += [f"scalars={{{scalars}}}"] if scalars else []
        sizing = [literal(s.name) for s in self.scalars if s.sizes]
        given += [f"sizing=({', '.join(sizing)},)"] if sizing else []
        return ", ".join([*given, *(["dropout_p=dropout_p"] if self.dropout else [])])


def module_plans(variants: Iterable[Variant]) -> list[ModulePlan]:
    """The classes of all variants, each with a name of its own."""
    found: list[ModulePlan] = []
    for variant in variants:
        found.append(
            _module_plan(
                variant,
                _unused(class_name(variant.name), {*kwlist, *BESIDE, variant.name, *(plan.name for plan in found)}),
            )
        )
    return found


def class_name(variant: str) -> str:
    """The name of a variant's class.

    A keyword, a name that the op's module has already, or one that another variant has, gets an underscore behind it:
    `none` is `None_`.

    >>> class_name("gpt_oss"), class_name("alibi")
    ('GptOss', 'Alibi')
    """
    return "".join(part[:1].upper() + part[1:] for part in variant.split("_"))


def _module_plan(variant: Variant, name: str) -> ModulePlan:
    held = [t for t in variant.tensors.values() if t.grad and _OF_CALLS.isdisjoint(_size_names(t))]
    sizing = names_of(held) & variant.scalars.keys()
    dims = {name: None for tensor in held for name in _size_names(tensor) if name not in sizing}
    dims |= {"h": None} if variant.sink else {}
    ordered = sorted(dims, key=lambda dim: dim not in _HEADS)
    arguments: dict[str, str] = {}
    for dim in ordered:
        arguments[dim] = _unused(_HEADS.get(dim, (dim,))[0], {*_CONSTRUCTOR, *arguments.values()})
    docs = {dim: _HEADS[dim][1] if dim in _HEADS else f"size of the dim `{dim}`." for dim in ordered}
    scalars: list[Scalar] = []
    for scalar in variant.scalars.values():
        taken = {*_CONSTRUCTOR, *arguments.values(), *(s.argument for s in scalars)}
        scalars.append(_scalar(scalar, _unused(scalar.name, taken), sizes=scalar.name in sizing))
    numbers = arguments | {scalar.name: scalar.argument for scalar in scalars}
    parameters = [_parameter(tensor, numbers) for tensor in held]
    if variant.sink:
        shape, doc = f"({arguments['h']},)", f"`[{arguments['h']}]`, zeros at first: a logit in the denominator only."
        parameters.append(Parameter(attribute="sink", name="sink", shape=shape, initial="", axes=(), doc=doc))
    passed = [t for t in variant.tensors.values() if t not in held]
    words = (("mask", variant.mask_text), ("score", variant.score_text))
    return ModulePlan(
        name=name,
        op=variant.name,
        doc=variant.doc or "Attention.",
        entry=[(key, literal(text)) for key, text in words if text],
        sizes=[Size(argument=arguments[dim], doc=docs[dim]) for dim in ordered],
        scalars=scalars,
        parameters=parameters,
        passed=[
            *(f"{t.name} `[{', '.join(map(str, t.dims))}]`" for t in passed),
            *(["g `[B, P, Hq]`"] * variant.decay),
        ],
        dropout=variant.dropout,
    )


def _size_names(tensor: TensorSpec) -> list[str]:
    """The names that the sizes of a tensor follow from."""
    computed = dict(tensor.computed)
    named = [dim for dim in tensor.dims if isinstance(dim, str) and dim not in computed]
    return [*named, *sorted(names_of([tensor]))]


def _scalar(scalar: ScalarSpec, argument: str, *, sizes: bool) -> Scalar:
    kind = scalar.type.value
    doc = f"{kind}, {'which sizes a parameter, and ' * sizes}the `{scalar.name}` of calls that give none."
    return Scalar(argument=argument, name=scalar.name, type=kind, doc=doc, sizes=sizes)


def _size(dim: str | int, tensor: TensorSpec, arguments: Mapping[str, str]) -> str:
    """Source of the size of a dim in the constructor, whose arguments are `arguments`, by the names of the spec."""
    e = dict(tensor.computed).get(str(dim))
    if e is None:
        return str(dim) if isinstance(dim, int) else arguments[dim]
    return NumberPrinter().text(expr.substitute(e, {name: int_var(arguments[name]) for name in expr.names(e)}))


def _parameter(tensor: TensorSpec, arguments: Mapping[str, str]) -> Parameter:
    sizes = [_size(dim, tensor, arguments) for dim in tensor.dims]
    initial, axes, at_first = "", [], "zeros at first"
    if tensor.example is not None:
        names = {f"i{axis}": axis for axis in range(len(sizes))}
        names |= {str(dim): axis for axis, dim in enumerate(tensor.dims) if str(dim) in tensor.axes}
        axes = [
            (f"axis_{axis}", axis) for axis in sorted({names[n] for n in expr.names(tensor.example) & names.keys()})
        ]
        over_axes = expr.substitute(tensor.example, {n: int_var(f"axis_{axis}") for n, axis in names.items()})
        initial = torch_printer(lambda *_: True, float_cast=lambda text: f"{text}.float()").text(over_axes)
        at_first = f"at first the entry's example, `{FormulaPrinter().text(tensor.example)}`"
    return Parameter(
        attribute=_unused(tensor.name, MODULE_NAMES),
        name=tensor.name,
        shape=f"({', '.join(sizes)}{',' * (len(sizes) == 1)})",
        initial=initial,
        axes=axes,
        doc=f"`[{', '.join(sizes)}]`, {at_first}.",
    )


def _unused(name: str, taken: Collection[str]) -> str:
    """The name, or one like it that is free."""
    while name in taken:
        name += "_"
    return name
