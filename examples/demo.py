"""See the generated attention at work: `python -m examples.demo`, or `make demo`, which sets everything up first.

1. Runs the kernels of every variant and compares their outputs and gradients with float64 mathematics.
2. Trains one small language model on real text with `generated.torch.causal`, and evaluates it with PyTorch's own
   attention, too. `--full` trains it a second time, with PyTorch's, and compares the loss curves.

The exit status is 1 when a variant is wrong, the losses with either attention part, or the loss does not fall.
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
"""Steps of a CPU's model without `--full`: enough for the loss to fall to that of a model of pairs of bytes."""

EXPECTED = {False: "2 to 3 minutes on two cores", True: "about 10 minutes on two cores"}
"""How long both steps take without a GPU, by whether all is run."""

REPORTS = 20
"""Lines of the loss table; each is the mean over a twentieth of the run."""

CURVE_BOUND = {"cpu": 1e-3, "cuda": 5e-2}
"""Largest difference between two reported losses, in nats per byte.

Measured with the CPU's model: equal mathematics rounded in another order moves a float32 loss by 3e-6, probabilities
rounded as in bfloat16 by 1e-2 (training amplifies the difference), a softmax scale that is 5% off by 2e-2, a lost dk by
3e-1. The CPU's bound so catches the slightest fault; a GPU's, in bfloat16, the gross ones, and step 1 the others.
"""

FALL = 0.75
"""The last reported loss is to be below this part of the first."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _can_compile() -> bool:
    """Whether there is a GPU that Triton compiles for: NVIDIA's since Ampere, or AMD's."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)


HELD_OUT_BOUND = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest difference of the loss of one model on held-out text with either attention, in nats per byte."""


def _compare_with_golden(device: str, full: bool) -> bool:
    """Step 1, in a process of its own: whether kernels are interpreted is settled when Triton is imported."""
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
    """One run, `train(report, every)`, with a line of progress that ends up as its summary."""
    start = time.perf_counter()

    def report(step: int, loss: float) -> None:
        print(f"\r  {name:24} step {step:4}/{size.steps}  loss {loss:.3f}", end="", flush=True)

    run = train(report, size.steps // REPORTS)
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    return run


def means(losses: Sequence[float]) -> list[float]:
    """The mean of each report's share of the run."""
    every = len(losses) // REPORTS
    return [sum(losses[i : i + every]) / every for i in range(0, every * REPORTS, every)]


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in values)


def print_curves(ours: Sequence[float], theirs: Sequence[float], every: int, peer: str) -> None:
    """Both loss curves as a table and as lines; `peer` names the other."""
    print(f"\n    step   generated   {peer:>7}   difference   (mean training loss, nats per byte)")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        print(f"    {i * every:4}   {a:9.4f}   {b:7.4f}   {abs(a - b):10.1e}")
    print(f"\n  generated  {_sparkline(ours)}\n  {peer:9}  {_sparkline(theirs)}")


def _train(device: str, full: bool) -> bool:
    """Step 2: the same model, seed and batches with either attention; in short one model, evaluated with either."""
    size = GPU_SIZE if device == "cuda" else CPU_SIZE if full else replace(CPU_SIZE, steps=SHORT_STEPS)
    times = "twice " if full else ""
    print(
        f"\nStep 2 of 2: the main job. One byte-level transformer, trained {times}on the text of Python's "
        "documentation."
    )
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
    """Whether two trained models have the same curve."""
    our_means, their_means = means(ours.losses), means(theirs.losses)
    print_curves(our_means, their_means, size.steps // REPORTS, "PyTorch")
    print(f"  on text held out of training: generated {ours.held_out:.4f}, PyTorch {theirs.held_out:.4f}")
    return judge(our_means, their_means, CURVE_BOUND[device])


def _evaluate(size: Size, run: Run, device: str) -> bool:
    """Whether the model's loss fell, and is the same with PyTorch's attention in the place of ours."""
    curve = means(run.losses)
    theirs = held_out_loss(size, run.with_attention(_sdpa), device)
    gap, bound = abs(run.held_out - theirs), HELD_OUT_BOUND[device]
    print(f"\n  training loss, nats per byte: {_sparkline(curve)}")
    print(f"  the same model on text held out of training: generated {run.held_out:.4f}, PyTorch SDPA {theirs:.4f}")
    print(f"  difference {gap:.1e} (bound {bound:.0e}): {'OK' if gap <= bound else 'THEY PART'}")
    return _fell(curve) and gap <= bound


def judge(ours: Sequence[float], theirs: Sequence[float], bound: float) -> bool:
    """Whether the curves stay together and fall, said in two lines."""
    gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    # Each comparison is one that a NaN fails; the largest of several numbers may pass one over.
    together = all(abs(a - b) <= bound for a, b in zip(ours, theirs, strict=True))
    print(f"  largest difference {gap:.1e} (bound {bound:.0e}): {'OK' if together else 'THE CURVES PART'}")
    return _fell(ours) and together


def _fell(curve: Sequence[float]) -> bool:
    """Whether the loss fell, said in a line."""
    fell = curve[-1] <= FALL * curve[0]
    print(f"  the loss went from {curve[0]:.2f} to {curve[-1]:.2f}: {'OK' if fell else 'IT DID NOT FALL'}")
    return fell


def main() -> int:
    """Both steps; 0 when all is well."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="more inputs, and a second model, with PyTorch's attention")
    full: bool = parser.parse_args().full
    # Interpreted kernels are for step 1's process alone: training in the interpreter would take hours.
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
