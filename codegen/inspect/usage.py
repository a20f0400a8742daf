"""The call of an op in torch and in JAX as a program that runs, with arguments of the right shapes and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from codegen.ir import expr
from codegen.ir.expr import Expr, ScalarType, TensorSpec, Type
from codegen.ir.printers import ArrayPrinter, jnp_printer, torch_printer
from codegen.spec import dims
from codegen.spec.model import Variant

FREE_SIZE = 16
"""Size of a dim that the call is free to choose."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the call that is shown."""

    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    seq: int = 1024
    dim: int = 64

    def named(self, scalars: Mapping[str, int | float]) -> dict[str, int]:
        """The size of each dim that a tensor may have, and the integer scalars that dims are computed from."""
        sizes = {"b": self.batch, "h": self.heads, "hkv": self.kv_heads}
        sizes |= dict.fromkeys(("q_idx", "kv_idx", "q_len", "kv_len"), self.seq)
        return sizes | {name: value for name, value in scalars.items() if isinstance(value, int)}


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """How a framework makes arrays."""

    module: str
    printer: ArrayPrinter
    expand: Callable[[str, str], str]
    cast: Callable[[str, str], str]
    trained: Callable[[str], str]


_TORCH = _Dialect(
    module="torch",
    printer=torch_printer(lambda *_: True, float_cast=lambda x: f"{x}.float()"),
    expand=lambda x, shape: f"{x}.expand({shape})",
    cast=lambda x, dtype: f"{x}.to(torch.{dtype})",
    trained=lambda x: f"{x}.requires_grad_()",
)

_JAX = _Dialect(
    module="jnp",
    printer=jnp_printer(lambda *_: True, float_cast=lambda x: f"jnp.asarray({x}, jnp.float32)"),
    expand=lambda x, shape: f"jnp.broadcast_to({x}, ({shape}))",
    cast=lambda x, dtype: f"{x}.astype(jnp.{'bool_' if dtype == 'bool' else dtype})",
    trained=lambda x: x,
)


def torch_call(variant: Variant, package: str, sizes: Sizes | None = None) -> str:
    """A program that imports the op from `package` and calls it on torch tensors."""
    own = sizes or Sizes()
    b, hq, hkv, s, d = own.batch, own.heads, own.kv_heads, own.seq, own.dim
    lines = [
        "import torch",
        f"from {package}.torch import {variant.name}",
        "",
        f"q = torch.randn({b}, {hq}, {s}, {d}, requires_grad=True)  # [B, Hq, S, D]",
        f"k = torch.randn({b}, {hkv}, {s}, {d}, requires_grad=True)  # [B, Hkv, S, D]",
        f"v = torch.randn({b}, {hkv}, {s}, {d}, requires_grad=True)",
    ]
    extras = {
        "sink": f"sink = torch.zeros({hq}, requires_grad=True)  # [Hq]",
        "decay": f"g = torch.nn.functional.logsigmoid(torch.randn({b}, {s}, {hq})).requires_grad_()  # [B, S, Hq]",
    }
    return "\n".join([*lines, *_arguments(variant, own, _TORCH, extras), f"o = {_call(variant, own)}", ""])


def jax_call(variant: Variant, package: str, sizes: Sizes | None = None) -> str:
    """A program that imports the op from `package` and calls it on JAX arrays."""
    own = sizes or Sizes()
    b, hq, hkv, s, d = own.batch, own.heads, own.kv_heads, own.seq, own.dim
    lines = [
        "import jax",
        "import jax.numpy as jnp",
        f"from {package}.jax import {variant.name}",
        "",
        "keys = jax.random.split(jax.random.key(0), 4)",
        f"q = jax.random.normal(keys[0], ({b}, {s}, {hq}, {d}))  # [B, S, Hq, D]",
        f"k = jax.random.normal(keys[1], ({b}, {s}, {hkv}, {d}))  # [B, S, Hkv, D]",
        f"v = jax.random.normal(keys[2], ({b}, {s}, {hkv}, {d}))",
    ]
    extras = {
        "sink": f"sink = jnp.zeros({hq})  # [Hq]",
        "decay": f"g = jax.nn.log_sigmoid(jax.random.normal(keys[3], ({b}, {s}, {hq})))  # [B, S, Hq]",
    }
    return "\n".join([*lines, *_arguments(variant, own, _JAX, extras), f"o = {_call(variant, own)}", ""])


def _arguments(variant: Variant, sizes: Sizes, dialect: _Dialect, extras: Mapping[str, str]) -> list[str]:
    """The lines that make the variant's own tensors."""
    lines = []
    known = sizes.named(_scalars(variant, sizes))
    for spec in variant.tensors.values():
        lines += _tensor(spec, known, dialect)
    return lines + [line for flag, line in extras.items() if getattr(variant, flag)]


def _call(variant: Variant, sizes: Sizes) -> str:
    own = [f"{name}={name}" for name in variant.tensors]
    own += [f"{name}={value}" for name, value in _scalars(variant, sizes).items()]
    own += [text for flag, text in (("sink", "sink=sink"), ("decay", "g=g")) if getattr(variant, flag)]
    own += ["dropout_p=0.1", "seed=0"] if variant.dropout else []
    return f"{variant.name}({', '.join(['q', 'k', 'v', *own])})"


def _scalars(variant: Variant, sizes: Sizes) -> dict[str, int | float]:
    typical = {name: spec.typical(sizes.seq) for name, spec in variant.scalars.items()}
    return {name: int(x) if variant.scalars[name].type is ScalarType.INT else x for name, x in typical.items()}


def _tensor(spec: TensorSpec, known: Mapping[str, int], dialect: _Dialect) -> list[str]:
    """The lines that make one tensor, with a comment of its dims."""
    shape = [dims.size_of(dim, spec, known, FREE_SIZE) for dim in spec.dims]
    comment = f"  # [{', '.join(map(str, spec.dims))}]" if spec.dims else "  # a single number"
    if spec.example is None or isinstance(spec.example, expr.Const):
        made = _filled(spec, shape, dialect)
        return [f"{spec.name} = {dialect.trained(made) if spec.grad else made}{comment}"]
    axes, lines = _axes(spec, spec.example, shape, dialect)
    text = f"({dialect.printer.text(spec.example)})"
    made = dialect.cast(text, spec.dtype)
    if len(axes) < len(shape):
        made = dialect.expand(made, ", ".join(map(str, shape)))
        made += ".clone()" if dialect.module == "torch" and spec.grad else ""
    return [*lines, f"{spec.name} = {dialect.trained(made) if spec.grad else made}{comment}"]


def _axes(spec: TensorSpec, example: Expr, shape: list[int], dialect: _Dialect) -> tuple[set[int], list[str]]:
    """The axes that an example reads, and lines that make their indices."""
    axes: set[int] = set()
    lines = []
    read = sorted(expr.names(example))
    for name in read:
        axis = int(name[1:]) if name[1:].isdigit() and name[0] == "i" else spec.dims.index(name)
        # If there are several indices, each gets the rank of the tensor: JAX may be set to refuse rank promotion.
        before = axis if len(read) > 1 else 0
        cuts = ["None"] * before + [":"] + ["None"] * (len(shape) - 1 - axis)
        index = f"[{', '.join(cuts)}]" if len(cuts) > 1 else ""
        lines.append(f"{name} = {dialect.module}.arange({shape[axis]}){index}")
        axes.add(axis)
    return axes, lines


def _filled(spec: TensorSpec, shape: list[int], dialect: _Dialect) -> str:
    """A tensor with the same number everywhere."""
    default = {Type.FLOAT: 0.1, Type.INT: 0, Type.BOOL: True}[spec.element]
    value = spec.example.value if isinstance(spec.example, expr.Const) else default
    dtype = f"{dialect.module}.{'bool_' if dialect.module == 'jnp' and spec.dtype == 'bool' else spec.dtype}"
    shown = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    typed = "" if spec.dtype == "float32" else f", dtype={dtype}"
    return f"{dialect.module}.full(({shown}), {value!r}{typed})"
