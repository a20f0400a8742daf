"""The files that the options of the command line name: the spec, and the folder of the package."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import PACKAGE, PROGRAM
from codegen.cli.options import COLLECTION, DEFAULT_OUT, DEFAULT_VARIANTS
from codegen.render import files
from codegen.util.errors import CodegenError

if TYPE_CHECKING:
    from codegen.spec.model import Variant

_LIBRARIES = ("torch", "jax", "triton", "numpy", "codegen", "yaml", "jinja2", "ruff")
"""Libraries that a package or the generator imports."""

_NAMESPACES = ("prim",)
"""Namespaces of operators that torch keeps for itself: an op of such a package could not be registered."""


def variants_path(args: argparse.Namespace) -> Path:
    """The spec that `args` name, or the one of this folder, which has to be there."""
    given: Path | None = args.variants
    if given is None and not DEFAULT_VARIANTS.is_file():
        raise CodegenError(f"no {DEFAULT_VARIANTS} in this folder: write one, or name a spec with --variants FILE")
    return spec_path(args)


def spec_path(args: argparse.Namespace) -> Path:
    """The spec that `args` name, the one of this folder, or where there is none the library's.

    `--variants library.yaml` names the collection of variants that comes with the generator where no such file is here.
    """
    from codegen.load.spec_file import default_spec_path
    from codegen.util.shipped import shipped_path

    given: Path | None = args.variants
    if given is None:
        return DEFAULT_VARIANTS if DEFAULT_VARIANTS.is_file() else default_spec_path()
    return shipped_path(COLLECTION) if given == Path(COLLECTION) and not given.exists() else given


def out_path(args: argparse.Namespace) -> Path:
    """The folder of the package: by default beside the spec as it was named."""
    given: Path | None = args.out
    return given or (args.variants or DEFAULT_VARIANTS).parent / DEFAULT_OUT


def check_importable(out: Path) -> None:
    """Raise if the folder's name is none that Python can import a package by, or that of a library it imports."""
    from codegen.spec.names import package_problem

    try:
        name = out.resolve().name
    except (OSError, RuntimeError) as error:
        raise CodegenError(f"--out: {out} is no folder: {error}") from None
    if name in _NAMESPACES:
        raise CodegenError(f"--out: torch keeps the name {name!r} for operators of its own; choose another name")
    if name in _LIBRARIES or name in sys.stdlib_module_names:
        raise CodegenError(
            f"--out: a package {name!r} would hide the library {name} from all code; choose another name"
        )
    problem = package_problem(name)
    if problem is not None:
        raise CodegenError(f"--out: no Python can import a package from {str(out)!r}: {problem}")


def package_path(args: argparse.Namespace, *, of_spec: bool = False) -> Path:
    """The package that `args` name, the one beside the spec, or where there is none the installed one.

    `of_spec`: a spec that `args` name must have its package, as the installed one has other variants.
    """
    from codegen.compile.packages import installed

    beside = out_path(args)
    if args.package is not None:
        if args.out is not None:
            raise CodegenError("--package and --out both name a package: leave one out")
        return installed(args.package)
    if (beside / files.MANIFEST).is_file():
        return beside
    if args.out is not None:
        # Without a spec in this folder, `render` has to be given one.
        named = args.variants or (None if DEFAULT_VARIANTS.is_file() else "SPEC")
        words = ["--out", str(beside)] if named is None else ["--variants", str(named), "--out", str(beside)]
        command = f"{PROGRAM} render {shlex.join(words)}"
        raise CodegenError(f"{beside}: no generated package there; `{command}` makes one")
    if of_spec and args.variants not in (None, Path(COLLECTION), DEFAULT_VARIANTS):
        raise CodegenError(f"{beside}: no generated package there; render {args.variants}, or give --out or --package")
    return installed(PACKAGE, default=beside)


def rendered_variant(args: argparse.Namespace, out: Path) -> Variant | None:
    """The variant `args.name` of the spec, if the package in `out` is rendered from it.

    An error for another variant of a spec that `args` name; None for one of a spec that is only a default.
    """
    from codegen.inspect.origin import check_origin, is_origin
    from codegen.load.spec_file import load

    spec = load(spec_path(args))
    if is_origin(spec, out, args.name):
        return spec.variants[args.name]
    if args.variants is not None and args.name in spec.variants:
        check_origin(spec, out, [args.name])
    return None  # also for a name that is misspelt, which the package's answer reports
