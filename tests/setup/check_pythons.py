"""`codegen check` under every supported Python of this machine: `python -m tests.setup.check_pythons`.

Each has a virtual environment of its own in `.pythons/`, with what the generator needs: neither torch nor Triton.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.setup import pythons

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".pythons"


def environment(version: str, interpreter: Path) -> Path | str:
    """The interpreter of a virtual environment with what the generator needs, or why there is none."""
    folder = FOLDER / version
    python = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = "\n".join([str(interpreter), *project["dependencies"]])
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([str(interpreter), "-m", "venv", "--clear", str(folder)], [*pip, *project["dependencies"]]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    stamp.write_text(wanted, encoding="utf-8")
    return python


def check(version: str, interpreter: Path) -> tuple[bool, str]:
    """Whether the package is not known to differ under one Python, and what to print."""
    python = environment(version, interpreter)
    if isinstance(python, str):
        return True, f"Python {version}: NOT CHECKED: its packages could not be installed: {python}"
    command: list[str | Path] = [python, "-m", "codegen", "check"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, f"Python {version}: {done.stdout.rstrip()}"


def main() -> int:
    """Check under each Python, two at a time; 1 when the package differs under one of them."""
    print(pythons.summary(), flush=True)
    there = pythons.found()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(check, there, there.values()))
    print(*(text for _, text in results), sep="\n", flush=True)
    different = [version for version, (same, _) in zip(there, results, strict=True) if not same]
    if different:
        print(f"generated/ is not what Python {', '.join(different)} renders", file=sys.stderr)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
