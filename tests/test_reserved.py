"""No name that generated code uses is free for a variant's own arguments, which would be overwritten or hide it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.checks import argument_problem

GENERATED = Path(__file__).resolve().parent.parent / "generated"
VARIANTS: dict[str, Any] = json.loads((GENERATED / "MANIFEST.json").read_text(encoding="utf-8"))["variants"]

# The files that see a variant's own tensors and scalars; decay does not.
KERNELS = ("fwd.py", "bwd_dq.py", "bwd_dkdv.py", "torch_launch.py", "jax_launch.py")
MODES = [f"{mode}/{file}" for mode in ("packed", "segmented") for file in KERNELS]
FILES = (
    *KERNELS,
    *MODES,
    "hopper_fwd.py",
    "hopper_bwd.py",
    "hopper_bwd_wide.py",
    "packed/hopper_fwd.py",
    "packed/hopper_bwd.py",
    "segmented/hopper_fwd.py",
    "segmented/hopper_bwd.py",
    "segmented/hopper_bwd_wide.py",
    "torch_op.py",
    "torch_reference.py",
    "jax_op.py",
    "jax_reference.py",
)


def module_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def local_names(tree: ast.Module, own: list[str]) -> Iterator[str]:
    """Parameters and variables of the functions that take the variant's own arguments, or could."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and {"k", "k_ring"} & {
            a.arg.removesuffix("_ptr").strip("_") for a in node.args.args
        }:
            yield from (a.arg for a in [*node.args.args, *node.args.kwonlyargs] if a.arg not in own)
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from (name.id for name in stored if name.id not in own)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_generated_code_are_refused(variant: str, file: str) -> None:
    entry = VARIANTS[variant]
    own = [*entry["tensors"], *entry["scalars"], "g", "sink"]
    tree = ast.parse((GENERATED / variant / file).read_text(encoding="utf-8"))
    used = {*module_names(tree), *local_names(tree, own)}
    derived = re.compile(rf"(.*_)?d?({'|'.join(own)})(_.*)?|{variant}_\w+|{variant}|_.*")
    free = sorted(name for name in used if not derived.fullmatch(name) and argument_problem(name, {}) is None)
    assert not free, f"a variant could have an argument of these names; add them to codegen/reserved.py: {free}"
    assert len(used) > 10
