"""A demo of the generated attention: `python -m examples.demo`, or `make demo`, which also does the set-up.

1. Runs the kernels of every variant and compares their outputs and gradients with float64 mathematics.
2. Trains a small language model on real text with `generated.torch.causal`, and evaluates it again with PyTorch's own
   attention. `--full` trains a second model with PyTorch's attention and compares the loss curves.

The exit status is 1 if a variant is wrong, if the losses of both attentions differ, or if the loss does not fall.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from codegen.testing.golden import load_op
from examples.train import Attend, Report, Run, Size, held_out_loss, train

CPU_SIZE = Size(layers=2, heads=4, kv_heads=2, head_dim=32, seq=64, batch=16, steps=600, learning_rate=4e-3)
GPU_SIZE = Size(layers=6, heads=8, kv_heads=2, head_dim=64, seq=1024, batch=16, steps=300, learning_rate=1e-3)
SHORT_STEPS = 200
"""Training steps on a CPU without `--full`: enough for the loss of a byte-bigram model."""

EXPECTED = {False: "2 to 3 minutes on two cores", True: "about 10 minutes on two cores"}
"""The time of both steps without a GPU, without and with `--full`."""

REPORTS = 20
"""Lines of the loss table; each is the mean over 1/20 of the run."""

CURVE_BOUND = {"cpu": 1e-3, "cuda": 5e-2}
"""Largest allowed difference between two reported losses, in nats per byte.

Measured with the CPU's model: another order of rounding moves a float32 loss by 3e-6, probabilities rounded to bfloat16
move it by 1e-2 (training amplifies the difference), a softmax scale that is 5% off by 2e-2, a missing dk by 3e-1. The
CPU's bound therefore catches any error; the GPU's bound, in bfloat16, catches large ones, and step 1 the others.
"""

FALL = 0.75
"""The last reported loss must be at most this fraction of the first."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _can_compile() -> bool:
    """True if there is a GPU that Triton compiles for: NVIDIA Ampere or newer, or AMD."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)


HELD_OUT_BOUND = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest allowed difference of one model's held-out loss between both attentions, in nats per byte."""


def _compare_with_golden(device: str, full: bool) -> bool:
    """Step 1, in a new process: importing Triton decides whether kernels are interpreted."""
    print("Step 1 of 2: every variant's kernels against float64 mathematics, forward and all gradients.")
    if importlib.util.find_spec("triton") is None:
        print("  Skipped: the kernels need Triton, which is not installed. Step 2 runs on the plain reference.")
        return True
    environment = dict(os.environ)
    if device == "cpu":
        print("  No GPU here, so Triton's interpreter runs the kernels, on small inputs.")
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        print(f"  Compiled for {torch.cuda.get_device_name()}; the first run of a kernel includes its compilation.")
    sys.stdout.flush()
    command = [sys.executable, "-m", "codegen.testing.golden", *([] if full else ["--quick"])]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def train_shown(name: str, size: Size, train: Callable[[Report, int], Run]) -> Run:
    """Call `train(report, every)` and show its progress on one line, which ends as the summary."""
    start = time.perf_counter()

    def report(step: int, loss: float) -> None:
        print(f"\r  {name:24} step {step:4}/{size.steps}  loss {loss:.3f}", end="", flush=True)

    run = train(report, size.steps // REPORTS)
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    return run


def means(losses: Sequence[float]) -> list[float]:
    """The mean loss of each of the `REPORTS` parts of the run."""
    every = len(losses) // REPORTS
    return [sum(losses[i : i + every]) / every for i in range(0, every * REPORTS, every)]


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in values)


def print_curves(ours: Sequence[float], theirs: Sequence[float], every: int, peer: str) -> None:
    """Print both loss curves as a table and as sparklines; `peer` is the title of the other attention."""
    print(f"\n    step   generated   {peer:>7}   difference   (mean training loss, nats per byte)")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        print(f"    {i * every:4}   {a:9.4f}   {b:7.4f}   {abs(a - b):10.1e}")
    print(f"\n  generated  {_sparkline(ours)}\n  {peer:9}  {_sparkline(theirs)}")


def _train(device: str, full: bool) -> bool:
    """Step 2: one model, evaluated with both attentions; in full, a second model trained with the other attention."""
    size = GPU_SIZE if device == "cuda" else CPU_SIZE if full else replace(CPU_SIZE, steps=SHORT_STEPS)
    times = "twice " if full else ""
    print(f"\nStep 2 of 2: one byte-level transformer, trained {times}on the text of Python's documentation.")
    print(
        f"  {size.layers} layers, {size.heads} query heads on {size.kv_heads} key heads of {size.head_dim} channels, "
        f"{size.batch} x {size.seq} bytes a step."
    )
    if device == "cpu":
        print("  On CPU tensors the generated op computes its plain reference; on a GPU this step runs the kernels.")

    def trained(name: str, attend: Attend) -> Run:
        return train_shown(name, size, lambda report, every: train(size, attend, device, report, every))

    ours = trained("generated.torch.causal", load_op("causal"))
    return (
        _compare_curves(size, ours, trained("PyTorch SDPA", _sdpa), device) if full else _evaluate(size, ours, device)
    )


def _compare_curves(size: Size, ours: Run, theirs: Run, device: str) -> bool:
    """True if two trained models have the same loss curve."""
    our_means, their_means = means(ours.losses), means(theirs.losses)
    print_curves(our_means, their_means, size.steps // REPORTS, "PyTorch")
    print(f"  on text held out of training: generated {ours.held_out:.4f}, PyTorch {theirs.held_out:.4f}")
    return judge(our_means, their_means, CURVE_BOUND[device])


def _evaluate(size: Size, run: Run, device: str) -> bool:
    """True if the loss fell, and is the same with PyTorch's attention in place of ours."""
    curve = means(run.losses)
    theirs = held_out_loss(size, run.with_attention(_sdpa), device)
    gap, bound = abs(run.held_out - theirs), HELD_OUT_BOUND[device]
    print(f"\n  training loss, nats per byte: {_sparkline(curve)}")
    print(f"  the same model on text held out of training: generated {run.held_out:.4f}, PyTorch SDPA {theirs:.4f}")
    print(f"  difference {gap:.1e} (bound {bound:.0e}): {'OK' if gap <= bound else 'TOO LARGE'}")
    return _fell(curve) and gap <= bound


def judge(ours: Sequence[float], theirs: Sequence[float], bound: float) -> bool:
    """True if both curves are equal within `bound` and fall; prints two lines."""
    gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    # Compared one by one, because max() may ignore a NaN.
    together = all(abs(a - b) <= bound for a, b in zip(ours, theirs, strict=True))
    print(f"  largest difference {gap:.1e} (bound {bound:.0e}): {'OK' if together else 'THE CURVES DIFFER'}")
    return _fell(ours) and together


def _fell(curve: Sequence[float]) -> bool:
    """True if the loss fell; prints one line."""
    fell = curve[-1] <= FALL * curve[0]
    print(f"  the loss went from {curve[0]:.2f} to {curve[-1]:.2f}: {'OK' if fell else 'IT DID NOT FALL'}")
    return fell


def main() -> int:
    """Run both steps; returns 0 if both pass."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full",
        action="store_true",
        help="more inputs in step 1, and a second model, trained with PyTorch's attention",
    )
    full: bool = parser.parse_args().full
    # Only the process of step 1 interprets kernels; training in the interpreter would take hours.
    os.environ.pop("TRITON_INTERPRET", None)
    start = time.perf_counter()
    device = "cuda" if _can_compile() else "cpu"
    if device == "cpu":
        print(f"Both steps together take {EXPECTED[full]}.")
    right = _compare_with_golden(device, full)
    right = _train(device, full) and right
    print(f"\n{'All is well' if right else 'FAILED, see above'} ({time.perf_counter() - start:.0f} s).")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
