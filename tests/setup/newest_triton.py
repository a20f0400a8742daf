"""A part of the kernels, run and compiled with the newest Triton that serves: `python -m tests.setup.newest_triton`.

`make setup` installs the oldest where torch brings none. The newest goes into a folder of its own, `.triton/`, which
hides the other. Where torch brings a Triton, its tests ran with that, and torch would not run with another.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".triton"

NEWEST = "3.9"

TESTS = ("tests/kernels/test_accuracy.py", "tests/kernels/test_random_packings.py", "tests/kernels/test_philox.py")
SELECTED = "(test_lengths_and_groups and not in_jax) or packings or philox"
"""Every variant's forward and gradients at eight lengths, packed calls and random numbers, in about a minute."""

COMPILED = ("lint", "causal", "--fast", "--arch", "sm_90", "--dtype", "bfloat16", "--head-dim", "64,192,320")
"""Hopper's kernels are not interpreted. Of these, some have tiles in three and in five pieces (`gl_pieces.py`)."""

MOST_SPILLS = 400
"""Most bytes of spilled values that a fused backward loads. At head dim 64 they are 232, and 704 where the addresses of
keys and values are held in registers over its loop (`late_zero` in runtime/device/gl_backward_steps.py)."""

UNFUSED = "TRITON_DEFAULT_FP_FUSION"
"""Triton 3.9 warns with these words if a kernel relies on its default to multiply and add in one instruction."""


def brings_triton() -> bool:
    """Whether the installed torch requires a Triton."""
    required = importlib.metadata.requires("torch") or []
    return any(line.startswith("triton") and "extra ==" not in line for line in required)


def install() -> str:
    """Put the newest Triton into `FOLDER`; what went wrong, or an empty text."""
    stamp = FOLDER / NEWEST
    if stamp.exists():
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--upgrade", "--target", FOLDER, f"triton=={NEWEST}.*"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    stamp.touch()
    return ""


def main() -> int:
    """Run the tests; 1 when one fails."""
    if importlib.util.find_spec("triton") is None:
        print("No tests on another Triton: there is none for this machine.")
        return 0
    installed = importlib.metadata.version("triton")
    if brings_triton() or installed.startswith(f"{NEWEST}."):
        owner = f"torch {importlib.metadata.version('torch')} brings its own" if brings_triton() else "installed"
        print(f"Triton {installed} ({owner}): the kernels' tests run with it, and with no other here.")
        return 0
    problem = install()
    if problem:
        print(f"NOT CHECKED on Triton {NEWEST}, which could not be installed: {problem}")
        return 0
    print(f"Tests on Triton {NEWEST}, beside those on {installed}:", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "TRITON_INTERPRET": "1"}
    workers = ["-n", "2"] if importlib.util.find_spec("xdist") else []
    tests = ["pytest", "-q", *workers, *TESTS, "-k", SELECTED]
    compiles = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
    compiles["PYTHONWARNINGS"] = f"error:{UNFUSED}"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "lint.json"
        runs = [(tests, environment), (["codegen", *COMPILED, "--json", str(found)], compiles)]
        # All of them run, whatever failed before.
        failed = max([_run(*each) for each in runs])
        return failed or _check_spills(json.loads(found.read_text(encoding="utf-8"))["kernels"])


def _check_spills(kernels: Sequence[Mapping[str, Any]]) -> int:
    """1 if a fused backward spills more than MOST_SPILLS."""
    backwards = [each for each in kernels if each["kernel"] == "causal_hopper_bwd"]
    spilled = max(each["usage"]["spill_loads"] for each in backwards)
    if spilled > MOST_SPILLS:
        print(f"causal_hopper_bwd loads {spilled} bytes of spilled values, more than {MOST_SPILLS}")
    return int(spilled > MOST_SPILLS)


def _run(module: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a module of Python; 1 when it fails."""
    command = [sys.executable, "-m", *module]
    return int(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
