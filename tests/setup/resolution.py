"""Whether the set-up resolves with the public index alone: `python -m tests.setup.resolution "torch==2.13.0"`.

For each supported Python uv decides what `make setup` would install, and installs nothing. The configurations of pip
and uv are left out, and with them whatever wheels this machine has.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.setup import pythons

ROOT = Path(__file__).resolve().parents[2]

UV = "uv>=0.9"
"""It resolves for another Python than its own, and reads only the metadata of wheels: pip takes ten times as long."""

SHOWN = ("torch", "triton", "jax", "numpy")
TRITONS = range(6, 10)
"""Minor versions of Triton 3 that serve."""

UNREACHABLE = ("Failed to fetch", "error sending request", "Request failed", "Could not connect")
"""What uv says where it does not reach the index."""

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
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PIP_", "UV_")) or name in _KEPT}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    # uv has no settings of its own for these two.
    shared = {"SSL_CERT_FILE": kept.get("PIP_CERT", ""), "ALL_PROXY": kept.get("PIP_PROXY", "")}
    return {name: x for name, x in shared.items() if x} | kept | own


def run(*command: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in the public environment; `given` is its standard input."""
    return subprocess.run(
        command, env=public_environment(), input=given, cwd=ROOT, capture_output=True, text=True, check=False
    )


def resolve(uv: Path, version: str, wanted: Sequence[str]) -> tuple[bool | None, str]:
    """Whether `wanted` resolves on a Python, None if the index could not be asked, and what was found."""
    options = ["--no-cache", "--no-header", "--no-annotate", "--only-binary=:all:", f"--python-version={version}"]
    done = run(uv, "pip", "compile", "--quiet", *options, "-", given="\n".join(wanted))
    if done.returncode != 0:
        reached = not any(text in done.stderr for text in UNREACHABLE)
        return (False if reached else None), done.stderr.strip()
    return judged(dict(line.split("==") for line in done.stdout.split()))


def judged(versions: Mapping[str, str]) -> tuple[bool, str]:
    """Whether resolved packages hold a Triton that serves, and the versions that matter."""
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
    wanted = {
        f"make setup, {torch}": [torch, *requirements("test", "dev")],
        "extras torch and jax": requirements("torch", "jax"),
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        binaries = Path(folder) / "bin"
        installed = run(binaries / "python", "-m", "pip", "install", "--quiet", UV)
        if installed.returncode != 0:
            print(f"NOT CHECKED: the public index cannot be reached: {installed.stderr.strip().splitlines()[-1]}")
            return 0
        cases = [(name, version) for name in wanted for version in pythons.SUPPORTED]
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda case: resolve(binaries / "uv", case[1], wanted[case[0]]), cases))
    for (name, version), (resolves, text) in zip(cases, results, strict=True):
        verdict = {True: "resolves", False: "DOES NOT RESOLVE", None: "NOT CHECKED, the index cannot be reached"}
        print(f"Python {version}, {name}: {verdict[resolves]}: {text}", flush=True)
    print(f"({time.perf_counter() - start:.0f} s)")
    return int(any(resolves is False for resolves, _ in results))


if __name__ == "__main__":
    sys.exit(main(torch_argument("tests.setup.resolution", __doc__)))
