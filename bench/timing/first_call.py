"""The cost of an op's first call in a fresh process: importing, compiling, loading.

python -m bench.timing.first_call  # prints one line of JSON: the seconds of each phase

This module imports nothing at its top that it times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADS, SEQ, DIM = 8, 2048, 64
CASE = f"causal B1 H{HEADS} S{SEQ} D{DIM}"
STATES = ("cold cache", "warm cache")
LIMIT_S = 150


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


def measured() -> Iterator[tuple[str, dict[str, float]]]:
    """The phases of two processes; the second finds the first one's kernels in Triton's cache on disk."""
    with tempfile.TemporaryDirectory() as cache:
        changed = {"TRITON_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        # Without JAX's cache of compiled programs, which is off by default.
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        for state in STATES:
            done = subprocess.run(
                [sys.executable, "-m", "bench.timing.first_call"],
                env=inherited | changed,
                cwd=Path(__file__).resolve().parents[1],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise RuntimeError(f"{state}: the process ended with {done.returncode}: {last}")
            yield state, json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(phases()))
