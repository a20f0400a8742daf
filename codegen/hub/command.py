"""`codegen hub`: writes the files of a kernel for Hugging Face's hub. Nothing is sent anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from codegen import PACKAGE
from codegen.compile.packages import installed
from codegen.hub.tree import Kernel, tree
from codegen.render import files
from codegen.util.errors import CodegenError


def write_kernel(args: argparse.Namespace) -> str:
    """Write the kernel of the package of `args` into the folder of `args`; returns a line on what was done.

    Raises:
        CodegenError: no rendered package, a folder of other files, or a file there that was edited by hand.
    """
    if args.package == Path(PACKAGE) and not (args.package / files.MANIFEST).is_file():
        args.package = installed(PACKAGE, default=args.package)
    package, out = args.package, args.out
    if package.resolve() in (out.resolve(), *out.resolve().parents):
        where = "the package itself" if out.resolve() == package.resolve() else "a folder inside of it"
        raise CodegenError(f"--out: expected a folder beside the package {package}, got {out}, {where}")
    kernel = Kernel(name=args.name, owner=args.owner, version=args.version)
    done = files.write(
        out,
        tree(package, kernel),
        keep_edits="move the change into the package, or delete the folder",
        keep_foreign="move them elsewhere, or delete the folder",
    )
    builds = ", ".join(f"build/torch-{backend}" for backend in kernel.backends)
    return f"{out}: {done}; builds: {builds}"
