"""The package of a spec in memory, and the command that writes it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import PROGRAM
from codegen.render import files
from codegen.render.files import Difference, Status

if TYPE_CHECKING:
    from codegen.spec.model import Spec


def render_package(variants: Path) -> dict[str, str]:
    """Path -> text of the whole package, its manifest included."""
    return rendered(variants)[1]


def rendered(variants: Path) -> tuple[Spec, dict[str, str]]:
    """The spec of a file, and path -> text of its whole package, the manifest included."""
    from codegen.load.spec_file import load
    from codegen.render.manifest import manifest_entries
    from codegen.render.package import render as render_texts

    spec = load(variants)
    return spec, files.with_manifest(render_texts(spec), manifest_entries(spec), source=variants.name)


def render_command(args: argparse.Namespace) -> str:
    """The `render` command that removes the differences that `check` with `args` found."""
    words = [*PROGRAM.split(), "render"]
    for flag, value in (("--variants", args.variants), ("--out", args.out)):
        words += [] if value is None else [flag, str(value)]
    return shlex.join(words)


def advice(args: argparse.Namespace, out: Path, fresh: dict[str, str], differences: Sequence[Difference]) -> list[str]:
    """The lines with which `check` ends: how many files differ, and what to do about them."""
    command, differ = f"`{render_command(args)}`", f"{out}: {len(differences)} of its files differ"
    if reason := files.refusal(out, fresh):
        return [f"{differ}, and {command} refuses the folder:", reason]
    has_edits = any(d.status is Status.EDITED for d in differences)
    has_foreign = any(d.is_foreign for d in differences)
    lines = [
        f"{differ}; {command} refuses to lose some of them" if has_edits or has_foreign else f"{differ}; run {command}"
    ]
    if has_edits:
        lines.append(f"EDITED files were changed by hand: {files.KEEP_EDITS}")
    if has_foreign:
        lines.append(f"ORPHAN files not made by this generator: {files.KEEP_FOREIGN}")
    if any(d.status is Status.CRLF for d in differences):
        lines.append(
            f"CRLF files differ in line ends only: the line `{out.resolve().name}/** text eol=lf` in .gitattributes "
            "beside the folder keeps Git from changing them again"
        )
    return lines
