"""All checks of the set-up, at the same time: `python -m tests.setup "torch==2.13.0"`.

One waits for the network, another computes. What each prints appears when it is done; 1 when one of them fails.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.setup.resolution import torch_argument
from tests.support.paths import ROOT


def checks(torch: str) -> list[list[str]]:
    """The modules to run, with their arguments: the longest first."""
    return [["tests.setup.newest_triton"], ["tests.setup.check_pythons"], ["tests.setup.resolution", torch]]


def run(check: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *check]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def main(torch: str) -> int:
    """Run every check, whatever comes of the others."""
    with ThreadPoolExecutor() as pool:
        started = {pool.submit(run, check): check for check in checks(torch)}
        failed = False
        for done in as_completed(started):
            result = done.result()
            print(f"{started[done][0]}\n{result.stdout.rstrip()}\n", flush=True)
            failed |= result.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(torch_argument("tests.setup", __doc__)))
