"""A demo of the generated attention in JAX: `python -m examples.demo_jax`, or `make demo-jax`, which also sets it up.

1. Runs the kernels of every variant and compares their outputs and gradients with float64 mathematics.
2. Trains a small Flax model twice on real text, once with `generated.jax.causal` as its `attention_fn` and once with
   Flax's own attention (from `jax.nn`), and compares the loss curves.

It ends with a page of its results, `build/demo-jax.html` or the file that `--page` names. The exit status is 1 if a
variant is wrong, if the curves differ, or if the loss does not fall. `--table` runs step 1 only; with
`TRITON_INTERPRET=1 JAX_PLATFORMS=cpu` the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import torch
from flax import nnx

from codegen.testing import golden, golden_jax
from codegen.testing.golden import Checked, Shape
from examples import demo
from examples.page import Curve
from examples.train_jax import Attend, train
from generated import jax as ops
from generated.jax_nn import attention_fn

CPU_SIZE = replace(demo.CPU_SIZE, steps=400)
"""Enough steps for the loss to depend on attention. Measured for `demo.CURVE_BOUND`: another order of rounding moves a
loss by 4e-6, q, k and v rounded to bfloat16 by 7e-3, a softmax scale that is 5% off by 6e-3, a missing dk by 3e-1."""

PAGE = Path("build/demo-jax.html")
"""The page that the demo writes; `build/` is not checked in."""

# Odd lengths, grouped heads, a head_dim that is no power of two.
CPU_SHAPES = ((Shape(batch=2, heads=4, kv_heads=2, seq=75, dim=40), torch.float32),)
GPU_SHAPES = (
    (Shape(batch=2, heads=6, kv_heads=2, seq=1023, dim=64), torch.bfloat16),
    (Shape(batch=2, heads=4, kv_heads=1, seq=257, dim=80), torch.float16),
)


# ------------------------------------------------------------------------------------------------------ against float64


def errors(variant: str, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """The errors of one JAX op against its reference in float64."""
    inputs = golden.draw_inputs(golden.load_manifest()[variant], shape, dtype=dtype, device="cpu")
    want = golden.evaluate(golden.load_reference(variant), inputs.double())
    got = golden_jax.evaluate(variant, inputs)
    return golden.relative_errors({name: x.cpu() for name, x in got.items()}, want)


def print_table() -> list[Checked]:
    """Print the errors of every variant, and return them."""
    shapes = GPU_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES
    variants = list(golden.load_manifest())
    return [row for each in shapes for row in golden.print_errors(*each, variants, errors)]


def _compare_with_golden(device: str) -> tuple[bool, list[Checked]]:
    """Step 1; without a GPU in a new process, because importing Triton decides whether kernels are interpreted."""
    print("Step 1 of 2: every variant's kernels, as JAX ops, against float64 mathematics, forward and all gradients.")
    print("  o is the output, lse the log of the softmax denominator; dq, dk, dv and the rest are gradients.")
    if importlib.util.find_spec("triton") is None:
        print("  Skipped: the kernels need Triton, which is not installed. Step 2 runs on the plain reference.")
        return True, []
    if device == "cuda":
        print(f"  Compiled for {jax.devices()[0].device_kind}; the first run of a kernel includes its compilation.")
        rows = print_table()
        return all(row.is_right for row in rows), rows
    print("  No GPU here, so Triton's interpreter runs the kernels, on small inputs.", flush=True)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "errors.json"
        command = [sys.executable, "-m", "examples.demo_jax", "--table", "--json", str(table)]
        is_right = subprocess.run(command, env=environment, check=False).returncode == 0
        return is_right, golden.read_checked(table)


# ------------------------------------------------------------------------------------------------------------- training


def _train_twice(device: str) -> demo.Training:
    """Step 2: two models with the same seed and batches, one with each attention."""
    size = demo.GPU_SIZE if device == "cuda" else CPU_SIZE
    print("\nStep 2 of 2: one byte-level transformer in Flax, trained twice on the text of Python's documentation.")
    print(f"  {demo.model_of(size)} Same seed, same batches.")
    if device == "cpu":
        print("  On the CPU the generated op computes its plain reference; on a GPU this step runs the kernels.")

    def trained(name: str, attend: Attend) -> Curve:
        return demo.curve_of(
            name, *demo.train_shown(name, size, lambda report, every: train(size, attend, report, every))
        )

    ours = trained("generated.jax.causal", attention_fn(ops.causal))
    theirs = trained("flax.nnx's own", nnx.dot_product_attention)
    is_right = demo.compare_curves(size, ours, theirs, "Flax", demo.CURVE_BOUND[device])
    model = f"A byte-level transformer in Flax on the text of Python's documentation. {demo.model_of(size)}"
    return demo.Training(is_right=is_right, model=model, steps=size.steps, curves=[ours, theirs])


def main() -> int:
    """Run both steps; returns 0 if both pass."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_jax", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table", action="store_true", help="only compare the kernels with float64, on the GPU if there is one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --table: also write the table to FILE")
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help=f"file for the page of results (default: {PAGE})"
    )
    args = parser.parse_args()
    if args.table:
        rows = print_table()
        golden.write_checked(args.json, rows)
        return int(not all(row.is_right for row in rows))
    start = time.perf_counter()
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    right, checked = _compare_with_golden(device)
    between = time.perf_counter()
    training = _train_twice(device)
    right = training.is_right and right
    seconds = {"kernels": between - start, "training": time.perf_counter() - between}
    machine = jax.devices()[0].device_kind if device == "cuda" else "the CPU"
    demo.finish(args.page, "Generated attention: JAX", machine, right, checked, training, seconds)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
