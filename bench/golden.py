"""Every variant against float64: inputs drawn from the manifest, the output and every gradient compared.

    python -m bench.golden                     # compiled kernels on the GPU, or the plain reference without one
    TRITON_INTERPRET=1 python -m bench.golden  # the kernels, run on the CPU by Triton's interpreter

The golden is the variant's own reference, `generated.<variant>.torch_reference`, in float64. The exit status is 1 when
an error is above its bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codegen.expr import TensorSpec
from codegen.parse import parse_example
from codegen.printers import torch_printer

BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a tensor, relative to its largest element.

16 bits: 4 eps. The result is rounded once (eps / 2); the probabilities, their gradients and the output that the row
sums of the backward start from are rounded too, and those errors average out over the keys. float32: 170 eps, for sums
of some hundred terms and an exp2 of scores around 10. A wrong mask, scale or sign moves the result by 1e-1 and more.
"""

OUTPUTS = ("o", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one self-attention call."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"B{self.batch} H{heads} S{self.seq} D{self.dim}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call in layout "bhsd": q, do `[B, Hq, S, D]`, k, v `[B, Hkv, S, D]`, dlse `[B, Hq, S]`, the variant's own.

    do and dlse are what the loss's gradient with respect to o and lse is taken to be.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | float] = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor]:
        """What a gradient is asked for, by name."""
        own = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        return {"q": self.q, "k": self.k, "v": self.v, **own}

    def call(self, op: Callable[..., Any], **options: Any) -> Any:
        """`op` of these arguments."""
        return op(self.q, self.k, self.v, **self.tensors, **self.scalars, **options)

    def double(self) -> Inputs:
        """The same values in float64, as leaves of their own."""
        q, k, v, do, dlse = (_double(tensor) for tensor in (self.q, self.k, self.v, self.do, self.dlse))
        tensors = {name: _double(tensor) for name, tensor in self.tensors.items()}
        return Inputs(q=q, k=k, v=v, do=do, dlse=dlse, tensors=tensors, scalars=self.scalars)


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def load_manifest() -> dict[str, dict[str, Any]]:
    """The declarations of every generated variant, by name."""
    package = importlib.import_module("generated")
    path = Path(package.__path__[0]) / "MANIFEST.json"
    variants: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["variants"]
    return variants


def load_op(variant: str) -> Callable[..., Any]:
    """`generated.torch.<variant>`."""
    op: Callable[..., Any] = getattr(importlib.import_module("generated.torch"), variant)
    return op


def has_tables(variant: str) -> bool:
    """Whether the blocks of a dense call come from tables, which a schedule makes once for many calls."""
    found = (importlib.util.find_spec(f"generated.{variant}.block_{kind}") for kind in ("ranges", "lists"))
    return any(spec is not None for spec in found)


def load_reference(variant: str, *, packed: bool = False) -> Callable[..., Any]:
    """The plain mathematics of a variant, differentiable and exact to the dtype it is given."""
    module = importlib.import_module(f"generated.{variant}.torch_reference")
    reference: Callable[..., Any] = module.packed_reference if packed else module.reference
    return reference


def draw_inputs(
    entry: Mapping[str, Any],
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str,
    scalars: Mapping[str, int | float] | None = None,
    own_grads: bool = True,
    seed: int = 0,
) -> Inputs:
    """Random arguments for the variant of one manifest entry; scalars that are not given suit the length."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    q = normal(shape.batch, shape.heads, shape.seq, shape.dim, dtype=dtype)
    k = normal(shape.batch, shape.kv_heads, shape.seq, shape.dim, dtype=dtype)
    v = normal(shape.batch, shape.kv_heads, shape.seq, shape.dim, dtype=dtype)
    tensors = {name: _draw_tensor(name, declared, shape, normal) for name, declared in entry["tensors"].items()}
    trained = {name for name, declared in entry["tensors"].items() if declared["grad"]}
    if entry["sink"]:
        tensors["sink"] = normal(shape.heads)
        trained.add("sink")
    if entry["decay"]:
        tensors["g"] = torch.nn.functional.logsigmoid(normal(shape.batch, shape.seq, shape.heads) + 2)
        trained.add("g")
    for leaf in (q, k, v, *(tensors[name] for name in trained if own_grads)):
        leaf.requires_grad_()
    numbers = {name: _suited(entry, name, shape.seq) for name in entry["scalars"]} | dict(scalars or {})
    if entry["dropout"]:
        # A scale of two is exact: the bounds on errors stay those of a call without dropout.
        numbers = {"dropout_p": 0.5, "seed": 2**40 + seed} | numbers
    return Inputs(
        q=q,
        k=k,
        v=v,
        do=normal(*q.shape, dtype=dtype),
        dlse=normal(shape.batch, shape.heads, shape.seq),
        tensors=tensors,
        scalars=numbers,
    )


def _suited(entry: Mapping[str, Any], name: str, seq: int) -> int | float:
    """A scalar's example, or a number that suits most. No int is above a third of the sequence, for a window to cut,
    unless its range asks for more."""
    low, high = entry["scalar_ranges"][name]
    example = entry["scalar_examples"][name]
    value: int | float = 0.5 if example is None else example
    if entry["scalars"][name] == "int":
        value = seq // 3 if example is None else min(example, seq // 3)
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def _draw_tensor(name: str, declared: Mapping[str, Any], shape: Shape, normal: Callable[..., Tensor]) -> Tensor:
    """A tensor of the declared dims, filled with its example; without one, integers are 0 or 1, so that they may index
    a free dim, which has four elements."""
    known = {"b": shape.batch, "h": shape.heads, "hkv": shape.kv_heads, "q_idx": shape.seq, "kv_idx": shape.seq}
    sizes = [dim if isinstance(dim, int) else known.get(dim, 4) for dim in declared["dims"]]
    values = normal(*sizes)
    dtype: torch.dtype = getattr(torch, declared["dtype"])
    if declared["example"]:
        return _example(name, declared, sizes).to(values.device, dtype)
    return (values * 0.1).to(dtype) if dtype.is_floating_point else (values > 0).to(dtype)


def _example(name: str, declared: Mapping[str, Any], sizes: Sequence[int]) -> Tensor:
    """The example of a tensor, computed in int64 and float64."""
    tensor = TensorSpec(name=name, dims=tuple(declared["dims"]), dtype=declared["dtype"])
    printer = torch_printer(lambda *_: True, float_cast=lambda text: f"{text}.double()")
    text = printer.text(parse_example(declared["example"], tensor))
    # Printed from a parsed expression, the text holds arithmetic and functions of torch alone.
    ranks = range(len(sizes))
    axes = [torch.arange(sizes[axis]).view([-1 if other == axis else 1 for other in ranks]) for axis in ranks]
    named = {f"i{axis}": positions for axis, positions in enumerate(axes)}
    named |= {str(dim): positions for dim, positions in zip(tensor.dims, axes, strict=True)}
    return torch.as_tensor(eval(text, {"torch": torch, **named})).expand(sizes).clone()


def evaluate(op: Callable[..., Any], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o, lse and the gradient of every leaf, each named after what it is the gradient of: dq, dk, ..."""
    o, lse = inputs.call(op, return_lse=True, **options)
    leaves = inputs.leaves()
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (inputs.do, inputs.dlse))
    results = {"o": o, "lse": lse} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: result.detach() for name, result in results.items()}


def relative_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest error of each tensor over the largest element wanted; infinite where a NaN turned up."""
    errors = {}
    for name, wanted in want.items():
        worst = ((got[name].double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
        errors[name] = math.inf if math.isnan(worst) else worst
    return errors


def kernel_errors(variant: str, inputs: Inputs, **options: Any) -> dict[str, float]:
    """The errors of the variant's op against float64; `options` go to the op."""
    golden = evaluate(load_reference(variant), inputs.double())
    return relative_errors(evaluate(load_op(variant), inputs, **options), golden)


def check(variant: str, shape: Shape, dtype: torch.dtype, device: str, **options: Any) -> tuple[dict[str, float], bool]:
    """The errors of one variant at one shape, and whether all of them are within the bound."""
    entry = load_manifest()[variant]
    errors = kernel_errors(variant, draw_inputs(entry, shape, dtype=dtype, device=device), **options)
    return errors, max(errors.values()) <= BOUND[dtype]


def _settings(device: str) -> list[tuple[Shape, torch.dtype]]:
    """What the table covers: odd lengths, grouped heads, a head_dim that is no power of two."""
    if device == "cpu":
        small = Shape(batch=2, heads=4, kv_heads=2, seq=150, dim=40)
        return [(small, torch.float32), (small, torch.float16)]
    return [
        (Shape(batch=2, heads=6, kv_heads=2, seq=1023, dim=64), torch.bfloat16),
        (Shape(batch=2, heads=4, kv_heads=1, seq=257, dim=80), torch.bfloat16),
        # Longer than the widest window of the library, 4096.
        (Shape(batch=1, heads=2, kv_heads=2, seq=4609, dim=128), torch.bfloat16),
    ]


def _row(errors: Mapping[str, float]) -> str:
    shared = " ".join(f"{errors[name]:8.1e}" for name in OUTPUTS)
    own = " ".join(f"{name} {error:.1e}" for name, error in errors.items() if name not in OUTPUTS)
    return f"{shared}  {own or '-':16}"


ErrorsOf = Callable[[str, Shape, torch.dtype], Mapping[str, float]]
"""The error of each result of a variant's op."""


def print_errors(shape: Shape, dtype: torch.dtype, variants: Sequence[str], errors_of: ErrorsOf) -> int:
    """A table of the errors of some variants; how many of them are wrong."""
    columns = " ".join(f"{name:>8}" for name in OUTPUTS)
    dtype_name = str(dtype).removeprefix("torch.")
    print(f"\n  {dtype_name}, {shape}; largest error / largest element, bound {BOUND[dtype]:.0e}", flush=True)
    print(f"  {'variant':14} {columns}  {'own gradients':16}", flush=True)
    failed = 0
    for variant in variants:
        start = time.perf_counter()
        errors = errors_of(variant, shape, dtype)
        ok = max(errors.values()) <= BOUND[dtype]
        failed += not ok
        seconds = time.perf_counter() - start
        print(f"  {variant:14} {_row(errors)} {'OK' if ok else 'WRONG'} ({seconds:.1f} s)", flush=True)
    return failed


def main() -> int:
    """Print the table; 1 when an error is above its bound."""
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants alone")
    only = parser.parse_args().only
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants = [variant for variant in load_manifest() if not only or variant in only]

    def errors_of(variant: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
        return check(variant, shape, dtype, device)[0]

    failed = sum(print_errors(shape, dtype, variants, errors_of) for shape, dtype in _settings(device))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
