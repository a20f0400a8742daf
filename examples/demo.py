"""A demo of the generated attention: `python -m examples.demo`, or `make demo`, which also does the set-up.

1. Runs the kernels of every variant and compares their outputs and gradients with float64 mathematics.
2. Trains a small language model on real text with `generated.torch.causal`, and evaluates it again with PyTorch's own
   attention. `--full` trains a second model with PyTorch's attention and compares the loss curves.

It ends with a page of its results, `build/demo.html` or the file that `--page` names. The exit status is 1 if a
variant is wrong, if the losses of both attentions differ, or if the loss does not fall.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from codegen.testing.golden import Checked, load_op, read_checked
from examples.page import Curve, Findings, write
from examples.train import Attend, Report, Run, Size, held_out_loss, train

CPU_SIZE = Size(layers=2, heads=4, kv_heads=2, head_dim=32, seq=64, batch=16, steps=600, learning_rate=4e-3)
GPU_SIZE = Size(layers=6, heads=8, kv_heads=2, head_dim=64, seq=1024, batch=16, steps=300, learning_rate=1e-3)
SHORT_STEPS = 200
"""Training steps on a CPU without `--full`: enough for the loss of a byte-bigram model."""

EXPECTED = {False: "under a minute on two cores", True: "several minutes on two cores"}
"""The time of both steps without a GPU, without and with `--full`."""

REPORTS = 20
"""Lines of the loss table; each is the mean over 1/20 of the run."""

CURVE_BOUND = {"cpu": 1e-3, "cuda": 5e-2}
"""Largest allowed difference between two reported losses, in nats per byte.

Measured with the CPU's model: another order of rounding moves a float32 loss by 3e-6, probabilities rounded to bfloat16
move it by 1e-2 (training amplifies the difference), a softmax scale that is 5% off by 2e-2, a missing dk by 3e-1. The
CPU's bound therefore catches any error; the GPU's bound, in bfloat16, catches large ones, and step 1 the others.
"""

PAGE = Path("build/demo.html")
"""The page that the demo writes; `build/` is not checked in."""

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


@dataclass(frozen=True, kw_only=True)
class Training:
    """The results of step 2: whether they are as expected, what was trained, and how."""

    is_right: bool
    model: str
    steps: int
    curves: Sequence[Curve]


def _compare_with_golden(device: str, full: bool, table: Path) -> bool:
    """Step 1, in a new process: importing Triton decides whether kernels are interpreted."""
    print("Step 1 of 2: every variant's kernels against float64 mathematics, forward and all gradients.")
    print("  o is the output, lse the log of the softmax denominator; dq, dk, dv and the rest are gradients.")
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
    command = [sys.executable, "-m", "codegen.testing.golden", "--json", str(table), *([] if full else ["--quick"])]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def train_shown(name: str, size: Size, train: Callable[[Report, int], Run]) -> tuple[Run, float]:
    """Call `train(report, every)` and show its progress; returns its result and the seconds that it took.

    On a terminal the progress is one line that ends as the summary; elsewhere four lines.
    """
    start = time.perf_counter()

    def report(step: int, loss: float) -> None:
        line = f"  {name:24} step {step:4}/{size.steps}  loss {loss:.3f}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="", flush=True)
        elif step % (5 * (size.steps // REPORTS)) == 0:
            print(line, flush=True)

    run = train(report, size.steps // REPORTS)
    seconds = time.perf_counter() - start
    print(f"{'' if sys.stdout.isatty() else '  '}  ({seconds:.1f} s)", flush=True)
    return run, seconds


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


def _train(device: str, full: bool) -> Training:
    """Step 2: one model, evaluated with both attentions; in full, a second model trained with the other attention."""
    size = GPU_SIZE if device == "cuda" else CPU_SIZE if full else replace(CPU_SIZE, steps=SHORT_STEPS)
    times = "twice " if full else ""
    print(f"\nStep 2 of 2: one byte-level transformer, trained {times}on the text of Python's documentation.")
    print(f"  {model_of(size)}")
    if device == "cpu":
        print("  On CPU tensors the generated op computes its plain reference; on a GPU this step runs the kernels.")

    def trained(name: str, attend: Attend) -> tuple[Run, float]:
        return train_shown(name, size, lambda report, every: train(size, attend, device, report, every))

    ours, seconds = trained("generated.torch.causal", load_op("causal"))
    curve = curve_of("generated.torch.causal", ours, seconds)
    if full:
        theirs, their_seconds = trained("PyTorch SDPA", _sdpa)
        other = curve_of("PyTorch SDPA", theirs, their_seconds)
        is_right = compare_curves(size, curve, other, "PyTorch", CURVE_BOUND[device])
    else:
        is_right, held_out = _evaluate(size, ours, device)
        other = Curve(name="the same model with PyTorch SDPA", losses=(), held_out=held_out, seconds=None)
    model = f"A byte-level transformer on the text of Python's documentation. {model_of(size)}"
    return Training(is_right=is_right, model=model, steps=size.steps, curves=[curve, other])


def model_of(size: Size) -> str:
    """A model and its batches in a sentence."""
    return (
        f"{size.layers} layers, {size.heads} query heads on {size.kv_heads} key heads of {size.head_dim} channels, "
        f"{size.batch} x {size.seq} bytes a step."
    )


def curve_of(name: str, run: Run, seconds: float) -> Curve:
    """A run as the page draws it."""
    return Curve(name=name, losses=means(run.losses), held_out=run.held_out, seconds=seconds)


def compare_curves(size: Size, ours: Curve, theirs: Curve, peer: str, bound: float) -> bool:
    """True if two trained models have the same loss curve; `peer` is the title of the other attention."""
    print_curves(ours.losses, theirs.losses, size.steps // REPORTS, peer)
    print(f"  on text held out of training: generated {ours.held_out:.4f}, {peer} {theirs.held_out:.4f}")
    return judge(ours.losses, theirs.losses, bound)


def _evaluate(size: Size, run: Run, device: str) -> tuple[bool, float]:
    """Whether the loss fell and is the same with PyTorch's attention in place of ours, and PyTorch's loss."""
    curve = means(run.losses)
    theirs = held_out_loss(size, run.with_attention(_sdpa), device)
    gap, bound = abs(run.held_out - theirs), HELD_OUT_BOUND[device]
    print(f"\n  training loss, nats per byte: {_sparkline(curve)}")
    print(f"  the same model on text held out of training: generated {run.held_out:.4f}, PyTorch SDPA {theirs:.4f}")
    print(f"  difference {gap:.1e} (bound {bound:.0e}): {'OK' if gap <= bound else 'TOO LARGE'}")
    return _fell(curve) and gap <= bound, theirs


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


def finish(
    page: Path,
    title: str,
    machine: str,
    is_right: bool,
    checked: Sequence[Checked],
    training: Training,
    seconds: dict[str, float],
) -> None:
    """Print the verdict, and write the page."""
    print(f"\n{'All is well' if is_right else 'FAILED, see above'} ({sum(seconds.values()):.0f} s).")
    findings = Findings(
        title=title,
        device=machine,
        is_right=is_right,
        checked=checked,
        model=training.model,
        steps=training.steps,
        curves=training.curves,
        seconds=seconds,
    )
    write(page, findings)
    print(f"The errors, the loss curve and the masks are on a page: {page.resolve().as_uri()}")


def main() -> int:
    """Run both steps; returns 0 if both pass."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full",
        action="store_true",
        help="check more inputs, and train a second model with PyTorch's attention for comparison",
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help=f"file for the page of results (default: {PAGE})"
    )
    args = parser.parse_args()
    full: bool = args.full
    # Only the process of step 1 interprets kernels; training in the interpreter would take hours.
    os.environ.pop("TRITON_INTERPRET", None)
    start = time.perf_counter()
    device = "cuda" if _can_compile() else "cpu"
    if device == "cpu":
        print(f"Both steps together take {EXPECTED[full]}.")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "errors.json"
        right = _compare_with_golden(device, full, table)
        checked = read_checked(table)
    between = time.perf_counter()
    training = _train(device, full)
    right = training.is_right and right
    seconds = {"kernels": between - start, "training": time.perf_counter() - between}
    machine = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    finish(args.page, "Generated attention: torch", machine, right, checked, training, seconds)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
