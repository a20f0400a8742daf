# SPDX-License-Identifier: Apache-2.0
"""What the process was started with, and what is installed. No framework is imported."""

import importlib.util
import os
from threading import Lock

# Triton reads the variable when a kernel is defined, so it cannot change later either.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")

INTERPRETER = Lock()
"""Held while Triton's interpreter runs a kernel: it replaces functions of Triton's language, for all threads."""

if INTERPRET and hasattr(os, "register_at_fork"):
    # No kernel runs in a process that begins.
    os.register_at_fork(
        before=INTERPRETER.acquire, after_in_parent=INTERPRETER.release, after_in_child=INTERPRETER.release
    )

# The plain reference needs no Triton: models can be tested on systems for which Triton does not exist.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def require_triton(what: str) -> None:
    """Raise an error if kernels are to run, compiled or interpreted, and Triton is not installed."""
    if not HAS_TRITON:
        asked = "TRITON_INTERPRET=1 asks for" if INTERPRET else "on a GPU run"
        raise ModuleNotFoundError(
            f"{what}: {asked} kernels, which need Triton: pip install 'triton>=3.6,<3.10'; without it ops compute "
            "their references on the CPU, where TRITON_INTERPRET is unset"
        )


# If set, the values of cu_seqlens are checked on a GPU too, and each check waits for the device.
DEBUG = os.environ.get("ATTENTION_DEBUG", "0") == "1"
