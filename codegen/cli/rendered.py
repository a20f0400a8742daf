"""The package of a spec in memory, and the command that writes it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import PROGRAM
from codegen.render import files

if TYPE_CHECKING:
    from codegen.spec.model import Spec


def render_package(variants: Path) -> dict[str, str]:
    """Path -> text of the whole package, its manifest included."""
    return rendered(variants)[1]


def rendered(variants: Path) -> tuple[Spec, dict[str, str]]:
    """The spec of a file, and path -> text of its whole package, the manifest included."""
    from codegen.load.spec_file import load
    from codegen.render.package import manifest_entries
    from codegen.render.package import render as render_texts

    spec = load(variants)
    return spec, files.with_manifest(render_texts(spec), manifest_entries(spec), source=variants.name)


def render_command(args: argparse.Namespace) -> str:
    """The `render` command that removes the differences that `check` with `args` found."""
    words = [*PROGRAM.split(), "render"]
    for flag, value in (("--variants", args.variants), ("--out", args.out)):
        words += [] if value is None else [flag, str(value)]
    return shlex.join(words)
