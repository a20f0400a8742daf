"""Compares every variant with float64 on random inputs: the output and every gradient.

    python -m codegen.testing.golden                     # compiled kernels on the GPU; without one, the reference
    TRITON_INTERPRET=1 python -m codegen.testing.golden  # the kernels, run on the CPU by Triton's interpreter

The golden is the variant's own reference, `generated.<variant>.torch_reference`, in float64. The exit status is 1 when
an error is above its bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
    "OUTPUTS",
    "Checked",
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
    "read_checked",
    "relative_errors",
    "write_checked",
]

OUTPUTS = ("o", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The errors of one variant at one setting, as `--json` writes them."""

    variant: str
    setting: str
    errors: Mapping[str, float]
    bound: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """True if every error is within the bound; a NaN is not."""
        return all(error <= self.bound for error in self.errors.values())


def read_checked(path: Path) -> list[Checked]:
    """The rows that `--json` wrote; none if the file is not there."""
    return [Checked(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []


def write_checked(path: Path | None, rows: Sequence[Checked]) -> None:
    """Write rows for `read_checked`; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


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
    return errors, all(error <= BOUND[dtype] for error in errors.values())


def _settings(device: str, quick: bool) -> list[tuple[Shape, torch.dtype]]:
    """The settings of the table: odd lengths, grouped heads, a head_dim that is no power of two."""
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


def print_errors(shape: Shape, dtype: torch.dtype, variants: Sequence[str], errors_of: ErrorsOf) -> list[Checked]:
    """Print a table of the errors of some variants, and return it."""
    columns = " ".join(f"{name:>8}" for name in OUTPUTS)
    dtype_name = str(dtype).removeprefix("torch.")
    print(f"\n  {dtype_name}, {shape}; largest error / largest element, bound {BOUND[dtype]:.0e}", flush=True)
    width = max(map(len, ("variant", *variants)))
    print(f"  {'variant':{width}} {columns}  {'own gradients':16}", flush=True)
    rows = []
    for variant in variants:
        start = time.perf_counter()
        errors = errors_of(variant, shape, dtype)
        seconds = time.perf_counter() - start
        row = Checked(
            variant=variant,
            setting=f"{dtype_name}, {shape}",
            errors=dict(errors),
            bound=BOUND[dtype],
            seconds=seconds,
        )
        rows.append(row)
        print(f"  {variant:{width}} {_row(errors)} {'OK' if row.is_right else 'WRONG'} ({seconds:.1f} s)", flush=True)
    return rows


def main() -> int:
    """Print the table; 1 when an error is above its bound."""
    parser = argparse.ArgumentParser(prog="python -m codegen.testing.golden", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="variants to check (default: all)")
    parser.add_argument("--quick", action="store_true", help="without a GPU: check one small input per variant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args()
    only: list[str] | None = args.only
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants = [variant for variant in load_manifest() if not only or variant in only]

    def errors_of(variant: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
        return check(variant, shape, dtype, device)[0]

    rows = [
        row for shape, dtype in _settings(device, args.quick) for row in print_errors(shape, dtype, variants, errors_of)
    ]
    write_checked(args.json, rows)
    return int(not all(row.is_right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
