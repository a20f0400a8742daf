"""Whether the set-up resolves with the public index alone: `python -m tests.setup.resolution "torch==2.13.0"`.

For each supported Python pip decides what `make setup` would install, and installs nothing: it reads the metadata of
wheels (a few MB of each). pip's configuration is left out, and with it whatever wheels this machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.setup import pythons

ROOT = Path(__file__).resolve().parents[2]

PIP = "pip>=25.2"
"""Older ones download every wheel, even to install nothing."""

SHOWN = ("torch", "triton", "jax", "numpy")
TRITONS = range(6, 10)
"""Minor versions of Triton 3 that serve."""

UNREACHABLE = (
    "NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "Connection refused", "Network is unreachable",
    "Name or service not known", "name resolution", "ProxyError", "SSLError", "ConnectionResetError", "HTTP error 5",
)  # fmt: skip
"""What pip says where it does not reach the index."""

_KEPT = ("PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
"""Of pip's settings, those that say how an index is reached, not which."""


def requirements(*extras: str) -> list[str]:
    """What the project and some of its extras need; extras that an extra names are resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            found += requirements(*own[1].split(",")) if own else [line]
    return list(dict.fromkeys(found))


def public_environment() -> dict[str, str]:
    """The environment of this process without the settings that name other indices or local wheels."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in _KEPT}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run_pip(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=public_environment(), capture_output=True, text=True, check=False)


def resolve(pip: Path, version: str, interpreter: Path | None, wanted: Sequence[str]) -> tuple[bool | None, str]:
    """Whether `wanted` resolves on a Python, None if the index could not be asked, and what was found.

    Without an interpreter of the version pip is told the version alone, and judges markers by its own Python.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        chosen: list[str | Path] = ["--python", interpreter] if interpreter else []
        target = [] if interpreter else ["--python-version", version, "--target", folder]
        done = run_pip(
            pip, *chosen, "install", "--dry-run", "--ignore-installed", "--quiet", "--no-cache-dir", "--report", report,
            "--use-feature=fast-deps", "--only-binary=:all:", *target, *wanted,
        )  # fmt: skip
        if done.returncode != 0:
            reached = not any(text in done.stderr for text in UNREACHABLE)
            return (False if reached else None), done.stderr.strip()
        return judged(json.loads(report.read_text(encoding="utf-8"))["install"])


def judged(installed: Iterable[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the packages of pip's report hold a Triton that serves, and the versions that matter."""
    versions = {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in installed}
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    triton = versions.get("triton", "none").split(".")
    serves = sys.platform != "linux" or (triton[0] == "3" and int(triton[1]) in TRITONS)
    wrong = "" if serves else "; expected Triton 3.6 to 3.9"
    return serves, f"{shown} and {len(versions)} packages in all{wrong}"


def torch_argument(prog: str, description: str | None, argv: Sequence[str] | None = None) -> str:
    """The one argument of a command, the requirement of torch that `make setup` installs."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("torch", metavar="TORCH", help="what make setup installs, such as torch==2.13.0")
    return str(parser.parse_args(argv).torch)


def main(torch: str) -> int:
    """Resolve what `make setup` installs, then the newest of everything; 1 when one of them fails."""
    start = time.perf_counter()
    there = pythons.found()
    wanted = {
        f"make setup, {torch}": [torch, *requirements("test", "dev")],
        "extras torch and jax": requirements("torch", "jax"),
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = Path(folder) / "bin" / "pip"
        updated = run_pip(Path(folder) / "bin" / "python", "-m", "pip", "install", "--quiet", PIP)
        if updated.returncode != 0:
            print(f"NOT CHECKED: the public index cannot be reached: {updated.stderr.strip().splitlines()[-1]}")
            return 0
        cases = [(name, version) for name in wanted for version in pythons.SUPPORTED]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda case: resolve(pip, case[1], there.get(case[1]), wanted[case[0]]), cases))
    for (name, version), (resolves, text) in zip(cases, results, strict=True):
        by = "" if version in there else ", as judged by another Python"
        verdict = {True: "resolves", False: "DOES NOT RESOLVE", None: "NOT CHECKED, the index cannot be reached"}
        print(f"Python {version}{by}, {name}: {verdict[resolves]}: {text}", flush=True)
    print(f"({time.perf_counter() - start:.0f} s)")
    return int(any(resolves is False for resolves, _ in results))


if __name__ == "__main__":
    sys.exit(main(torch_argument("tests.setup.resolution", __doc__)))
