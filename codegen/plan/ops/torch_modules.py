"""A variant as a module of torch: its trained tensors and sinks as parameters, its scalars as defaults of its calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from keyword import kwlist

from codegen.ir import expr
from codegen.ir.expr import TensorSpec, int_var
from codegen.ir.printers import FormulaPrinter, NumberPrinter, torch_printer
from codegen.spec.model import ScalarSpec, Variant
from codegen.util.text import literal

_HEADS = {"h": ("heads", "query heads, Hq."), "hkv": ("kv_heads", "key heads, Hkv.")}
_LENGTHS = {"q_len": "query rows of every call.", "kv_len": "keys of every call."}
_OF_CALLS = ("b", "q_idx", "kv_idx")

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
    """A size that the constructor takes; it may be a scalar of the op, from which sizes are computed."""

    argument: str
    doc: str
    is_scalar: bool


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A scalar that calls have a default for: the constructor's argument, and the op's. `is_size`: it is required,
    because the size of a parameter depends on it.
    """

    argument: str
    name: str
    type: str
    doc: str
    is_size: bool


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
    def computes_sizes(self) -> bool:
        """True if the size of a parameter is an expression."""
        return any("dim_size(" in parameter.shape for parameter in self.parameters)

    @property
    def signature(self) -> str:
        """The parameters of the constructor."""
        keywords = [f"{s.argument}: {s.type} | None = None" for s in self.scalars if not s.is_size]
        keywords += ["dropout_p: float = 0.0"] if self.dropout else []
        if self.parameters:
            keywords += ["device: torch.device | str | None = None", "dtype: torch.dtype | None = None"]
        sizes = [f"{s.argument}: int" for s in self.sizes]
        return ", ".join(["self", *sizes, *(["*", *keywords] if keywords else [])])

    @property
    def base_arguments(self) -> str:
        """What the constructor of the base class is called with."""
        sizes = ", ".join(f'"{size.argument}": {size.argument}' for size in self.sizes if not size.is_scalar)
        scalars = ", ".join(f'"{scalar.name}": {scalar.argument}' for scalar in self.scalars)
        given = [f"sizes={{{sizes}}}"] if sizes else []
        given += [f"scalars={{{scalars}}}"] if scalars else []
        return ", ".join([*given, *(["dropout_p=dropout_p"] if self.dropout else [])])


def module_plans(variants: Iterable[Variant]) -> list[ModulePlan]:
    """The classes of all variants, each with a name of its own."""
    every = list(variants)
    names = class_names(variant.name for variant in every)
    return [_module_plan(variant, names[variant.name]) for variant in every]


def class_names(variants: Iterable[str]) -> dict[str, str]:
    """The name of each variant's class, each name once.

    A keyword, a name that the op's module has already, or one that another variant has, gets an underscore behind it:

    >>> class_names(["full1", "full_1", "none"])
    {'full1': 'Full1', 'full_1': 'Full1_', 'none': 'None_'}
    """
    found: dict[str, str] = {}
    for variant in variants:
        found[variant] = unused(class_name(variant), {*kwlist, *BESIDE, variant, *found.values()})
    return found


def class_name(variant: str) -> str:
    """The name of a variant's class, unless it is taken.

    >>> class_name("gpt_oss"), class_name("alibi")
    ('GptOss', 'Alibi')
    """
    return "".join(part[:1].upper() + part[1:] for part in variant.split("_"))


def _module_plan(variant: Variant, name: str) -> ModulePlan:
    held = [t for t in variant.tensors.values() if t.grad and not _sizes_of_calls(t)]
    names = dict.fromkeys(name for tensor in held for dim in tensor.dims for name in _names(dim, tensor))
    names |= {"h": None} if variant.sink else {}
    ordered = sorted(names, key=lambda name: name not in _HEADS)
    arguments: dict[str, str] = {}
    for name_ in ordered:
        arguments[name_] = unused(_HEADS.get(name_, (name_,))[0], {*_CONSTRUCTOR, *arguments.values()})
    sizes = [Size(argument=arguments[n], doc=_size_doc(n, variant), is_scalar=n in variant.scalars) for n in ordered]
    scalars: list[Scalar] = []
    for scalar in variant.scalars.values():
        taken = {*_CONSTRUCTOR, *arguments.values(), *(s.argument for s in scalars)}
        own = arguments.get(scalar.name)
        scalars.append(_scalar(scalar, own or unused(scalar.name, taken), is_size=own is not None))
    parameters = [_parameter(tensor, arguments) for tensor in held]
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
        sizes=sizes,
        scalars=scalars,
        parameters=parameters,
        passed=[
            *(f"{t.name} `[{', '.join(map(str, t.dims))}]`" for t in passed),
            *(["g `[B, P, Hq]`"] * variant.decay),
        ],
        dropout=variant.dropout,
    )


def _names(dim: str | int, tensor: TensorSpec) -> list[str]:
    """The names that a dim's size is made of."""
    e = dict(tensor.computed).get(str(dim))
    if e is not None:
        return sorted(expr.names(e))
    return [dim] if isinstance(dim, str) else []


def _sizes_of_calls(tensor: TensorSpec) -> set[str]:
    return {name for dim in tensor.dims for name in _names(dim, tensor)} & set(_OF_CALLS)


def _size_doc(name: str, variant: Variant) -> str:
    if name in _HEADS:
        return _HEADS[name][1]
    if name in variant.scalars:
        return f"int, the `{name}` of calls, on which the sizes of parameters depend."
    return _LENGTHS.get(name, f"size of the dim `{name}`.")


def _scalar(scalar: ScalarSpec, argument: str, *, is_size: bool) -> Scalar:
    kind = scalar.type.value
    doc = f"{kind}, the `{scalar.name}` of calls that give none."
    return Scalar(argument=argument, name=scalar.name, type=kind, doc=doc, is_size=is_size)


def _size(dim: str | int, tensor: TensorSpec, arguments: dict[str, str]) -> tuple[str, str]:
    """Source of a dim's size, and its text."""
    e = dict(tensor.computed).get(str(dim))
    if e is None:
        text = str(dim) if isinstance(dim, int) else arguments[dim]
        return text, text
    own = expr.substitute(e, {name: int_var(arguments[name]) for name in expr.names(e)})
    names = sorted(expr.names(own))
    text = FormulaPrinter().text(own)
    given = ", ".join(f"{name}={name}" for name in names)
    function = f"lambda {', '.join(names)}: {NumberPrinter().text(own)}"
    return f'dim_size(self, "{text}", {function}, {given})', text


def _parameter(tensor: TensorSpec, arguments: dict[str, str]) -> Parameter:
    sources, sizes = (
        zip(*(_size(dim, tensor, arguments) for dim in tensor.dims), strict=True) if tensor.dims else ((), ())
    )
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
        attribute=unused(tensor.name, MODULE_NAMES),
        name=tensor.name,
        shape=f"({', '.join(sources)}{',' * (len(sizes) == 1)})",
        initial=initial,
        axes=axes,
        doc=f"`[{', '.join(sizes)}]`, {at_first}.",
    )


def unused(name: str, taken: Collection[str]) -> str:
    """The name, or one like it that is free."""
    while name in taken:
        name += "_"
    return name
