"""Compiles the kernels of a call with drawn inputs, for a GPU that this machine need not have."""

from __future__ import annotations

import importlib
from typing import Any

from codegen.compile.offline import Compiled, compile_launches
from codegen.testing.golden import Inputs, evaluate


def compile_call(
    variant: str, arch: str, inputs: Inputs, *, package: str = "generated", **options: Any
) -> dict[str, Compiled]:
    """The compiled kernels of a forward and backward, by name; they do not run, so the results are not computed."""
    op = getattr(importlib.import_module(f"{package}.torch"), variant)
    return compile_launches(lambda: evaluate(op, inputs, **options), variant, arch, package)
