"""Code run by another process, which has imported nothing of the package yet."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.paths import ROOT

_SERVER = """
import importlib, json, os, sys, traceback
for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        importlib.invalidate_caches()
        failed = False
        try:
            exec(request["code"], vars(sys.modules["__main__"]))
        except BaseException:
            failed = True
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports modules once, then forks a process for each request."""


def python(code: str, cwd: Path = ROOT, *, interpret: bool = False) -> str:
    """The output of a fresh interpreter that runs `code` in `cwd`. With `interpret`, Triton interprets its kernels."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=_environment() | _interpreted(interpret),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def warm_python(code: str, cwd: Path = ROOT, *, interpret: bool = False, imported: str = "torch jax") -> str:
    """As `python`, but forked from a process that has imported some modules: importing torch alone takes two seconds.

    For code that imports torch anyway, and whose result does not depend on which frameworks are imported.
    """
    server = _server(imported)
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"code": code, "cwd": str(cwd), "environment": _interpreted(interpret)}
        server.stdin.write(json.dumps({**request, "out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        returned = server.stdout.readline()
        assert returned == "0\n", err.read_text() if err.exists() else "the server of forked processes has ended"
        return out.read_text()


@cache
def _server(imported: str) -> subprocess.Popen[str]:
    """A process that forks another process for each request."""
    # A process with threads must not fork.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER, *imported.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment() | one_thread,
        text=True,
    )
    atexit.register(server.communicate)  # closes its standard input, and waits until it ends
    return server


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}


def _interpreted(interpret: bool) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if interpret else {}
