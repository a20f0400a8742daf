"""The time of imports and of the first call of an op in a fresh process.

python -m bench.timing.first_call                # one process, in JAX: a line of JSON with the seconds of each phase
python -m bench.timing.first_call imports        # a table of what each import takes, of fresh processes, with its bar
python -m bench.timing.first_call imports torch  # one process: a line of JSON with the seconds of each import
python -m bench.timing.first_call torch          # a table, in torch: cold cache, warm cache, after `codegen warm`
python -m bench.timing.first_call torch one      # one process, in torch: a line of JSON with the seconds of each phase

The top of this module imports none of the modules that it times.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADS, SEQ, DIM = 8, 2048, 64
CASE = f"causal B1 H{HEADS} S{SEQ} D{DIM}"
TORCH_HEADS, TORCH_SEQ, TORCH_DIM = 16, 4096, 128
STATES = ("cold cache", "warm cache")
LIMIT_S = 150

FRAMEWORKS = {
    "torch": ("torch", "torch.library", "triton", "triton.compiler"),
    "jax": ("jax", "jax.numpy"),
}
"""Modules that are imported before the package. Their time does not count as the package's."""

FIRST_STEP_BAR_S = 4.0
"""Seconds that a first forward and backward may take with a cold cache, in torch."""

IMPORT_BARS_S = {"package": 0.1, "first variant": 0.3}
"""Seconds that an import may take, beyond those of the framework and Triton."""

PROCESSES = 5


def phases(seq: int = SEQ) -> dict[str, float]:
    """Seconds of each phase, in this process."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    import jax
    import jax.numpy as jnp

    lap("import jax")
    x = jax.block_until_ready(jnp.ones((1, seq, HEADS, DIM), jnp.bfloat16))
    lap("first array")
    from generated.jax import causal

    lap("import causal")
    jax.block_until_ready(causal(x, x, x))
    lap("first forward")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.asarray(causal(q, k, v), jnp.float32).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    jax.block_until_ready(gradient(x, x, x))
    lap("first gradient")
    jax.block_until_ready(gradient(x, x, x))
    lap("second gradient")
    return seconds


def torch_phases(device: str = "cuda", heads: int = TORCH_HEADS, seq: int = TORCH_SEQ) -> dict[str, float]:
    """Seconds of each phase of a first forward and backward in torch, in this process."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    import torch

    lap("import torch")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    q, k, v = torch.ones(3, 1, heads, seq, TORCH_DIM, device=device, dtype=torch.bfloat16).requires_grad_()
    do = torch.ones_like(q)
    wait()
    lap("first tensors")
    # The first backward of a process imports more modules of torch, whatever it differentiates.
    torch.autograd.grad(q[:, :1, :1] * 2, q, do[:, :1, :1])
    wait()
    lap("torch's backward")
    from generated.torch import causal

    lap("import causal")
    for order in ("first", "second"):
        o = causal(q, k, v)
        wait()
        lap(f"{order} forward")
        torch.autograd.grad(o, (q, k, v), do)
        wait()
        lap(f"{order} backward")
    return seconds


def torch_table() -> bool:
    """Print the phases of fresh processes with a cold cache, a warm one, and one that `codegen warm` has filled.

    Returns true if the first step with a cold cache is within its bar.
    """
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as ahead:
        for state in STATES:
            found[state] = in_process(["torch", "one"], {"TRITON_CACHE_DIR": cache})
        start = time.perf_counter()
        heads = f"{TORCH_HEADS}/{TORCH_HEADS}"
        options = ["--heads", heads, "--seqs", str(TORCH_SEQ), "--head-dims", str(TORCH_DIM)]
        subprocess.run(
            [sys.executable, "-m", "codegen", "warm", "causal", *options],
            env=os.environ | {"TRITON_CACHE_DIR": ahead},
            cwd=Path(__file__).resolve().parents[2],
            timeout=LIMIT_S,
            check=True,
        )
        print(f"codegen warm: {time.perf_counter() - start:.1f} s", flush=True)
        found["after codegen warm"] = in_process(["torch", "one"], {"TRITON_CACHE_DIR": ahead})
    print(f"causal B1 H{TORCH_HEADS} S{TORCH_SEQ} D{TORCH_DIM}, torch, seconds: {', '.join(found)}")
    for phase in found[STATES[0]]:
        print(f"  {phase:16}" + "".join(f" {seconds[phase]:8.2f}" for seconds in found.values()))
    cold = found[STATES[0]]
    step = cold["first forward"] + cold["first backward"]
    holds = step <= FIRST_STEP_BAR_S
    print(f"  first step, {STATES[0]}: {step:.2f} of {FIRST_STEP_BAR_S:.1f} s: {'OK' if holds else 'TOO SLOW'}")
    return holds


def import_seconds(framework: str) -> dict[str, float]:
    """Seconds of each import, in this process."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()
    for module in FRAMEWORKS[framework]:
        importlib.import_module(module)
    seconds["framework"], last = time.perf_counter() - last, time.perf_counter()
    ops = importlib.import_module(f"generated.{framework}")
    seconds["package"], last = time.perf_counter() - last, time.perf_counter()
    _ = ops.causal
    seconds["first variant"] = time.perf_counter() - last
    return seconds


def import_table() -> bool:
    """Print the median time of each import over some fresh processes; returns whether all are within their bars."""
    right = True
    for framework in FRAMEWORKS:
        runs = [in_process(["imports", framework], {}) for _ in range(PROCESSES + 1)]
        # The first process is not counted, because it may have written bytecode.
        found = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
        for name, seconds in found.items():
            bar = IMPORT_BARS_S.get(name)
            holds = bar is None or seconds <= bar
            verdict = "" if bar is None else f"of {bar:.1f} s: {'OK' if holds else 'TOO SLOW'}"
            print(f"  {framework:6} {name:14} {seconds:8.3f} s  {verdict}".rstrip(), flush=True)
            right = right and holds
    return right


def in_process(arguments: list[str], changed: dict[str, str]) -> dict[str, float]:
    """The seconds that this module prints as JSON in a fresh process."""
    # Leave out JAX's own cache of programs, which is off by default.
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.timing.first_call", *arguments],
        env=inherited | changed,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"the process ended with {done.returncode}: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured() -> Iterator[tuple[str, dict[str, float]]]:
    """The phases of two processes; the second finds the first one's kernels in Triton's cache on disk."""
    with tempfile.TemporaryDirectory() as cache:
        changed = {"TRITON_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for state in STATES:
            try:
                yield state, in_process([], changed)
            except RuntimeError as error:
                raise RuntimeError(f"{state}: {error}") from None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["imports"]:
            sys.exit(not import_table())
        case ["imports", named]:
            print(json.dumps(import_seconds(named)))
        case ["torch"]:
            sys.exit(not torch_table())
        case ["torch", "one"]:
            print(json.dumps(torch_phases()))
        case _:
            print(json.dumps(phases()))
