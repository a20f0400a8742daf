"""Every variant against float64: inputs drawn from the manifest, the output and every gradient compared.

    python -m codegen.testing.golden                     # compiled kernels on the GPU; without one, the reference
    TRITON_INTERPRET=1 python -m codegen.testing.golden  # the kernels, run on the CPU by Triton's interpreter

The golden is the variant's own reference, `generated.<variant>.torch_reference`, in float64. The exit status is 1 when
an error is above its bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from codegen.testing.calls import (
    BOUND,
    Inputs,
    Shape,
    draw_inputs,
    evaluate,
    load_manifest,
    load_op,
    load_reference,
    relative_errors,
)

__all__ = [
    "BOUND",
    "Inputs",
    "Shape",
    "check",
    "draw_inputs",
    "evaluate",
    "has_tables",
    "kernel_errors",
    "load_manifest",
    "load_op",
    "load_reference",
    "relative_errors",
]

OUTPUTS = ("o", "lse", "dq", "dk", "dv")


def has_tables(variant: str) -> bool:
    """Whether the blocks of a dense call come from tables, which a schedule makes once for many calls."""
    found = (importlib.util.find_spec(f"generated.{variant}.block_{kind}") for kind in ("ranges", "lists"))
    return any(spec is not None for spec in found)


def kernel_errors(variant: str, inputs: Inputs, **options: Any) -> dict[str, float]:
    """The errors of the variant's op against float64; `options` go to the op."""
    golden = evaluate(load_reference(variant), inputs.double())
    return relative_errors(evaluate(load_op(variant), inputs, **options), golden)


def check(variant: str, shape: Shape, dtype: torch.dtype, device: str, **options: Any) -> tuple[dict[str, float], bool]:
    """The errors of one variant at one shape, and whether all of them are within the bound."""
    entry = load_manifest()[variant]
    errors = kernel_errors(variant, draw_inputs(entry, shape, dtype=dtype, device=device), **options)
    return errors, max(errors.values()) <= BOUND[dtype]


def _settings(device: str, quick: bool) -> list[tuple[Shape, torch.dtype]]:
    """What the table covers: odd lengths, grouped heads, a head_dim that is no power of two."""
    if device == "cpu" and quick:
        return [(Shape(batch=1, heads=2, kv_heads=1, seq=75, dim=40), torch.float32)]
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
    parser = argparse.ArgumentParser(prog="python -m codegen.testing.golden", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants alone")
    parser.add_argument("--quick", action="store_true", help="without a GPU, on one small input")
    args = parser.parse_args()
    only: list[str] | None = args.only
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants = [variant for variant in load_manifest() if not only or variant in only]

    def errors_of(variant: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
        return check(variant, shape, dtype, device)[0]

    failed = sum(print_errors(shape, dtype, variants, errors_of) for shape, dtype in _settings(device, args.quick))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
