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
    if args.package == Path(PACKAGE):
        args.package = installed(PACKAGE, default=args.package)
    package, out = args.package, args.out
    if out.resolve() == package.resolve():
        raise CodegenError(f"--out: expected a folder beside the package, got the package {out} itself")
    kernel = Kernel(name=args.name, owner=args.owner, version=args.version)
    done = files.write(out, tree(package, kernel))
    builds = ", ".join(f"build/torch-{backend}" for backend in kernel.backends)
    return f"{out}: {done}; builds: {builds}"
