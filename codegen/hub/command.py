"""`codegen hub`: writes the files of a kernel for Hugging Face's hub. Nothing is sent anywhere."""

from __future__ import annotations

from pathlib import Path

from codegen.hub.tree import Kernel, tree
from codegen.render import files
from codegen.util.errors import CodegenError


def write_kernel(package: Path, out: Path, kernel: Kernel) -> str:
    """Write the kernel of a rendered package into a folder; what was done, in a line.

    Raises:
        CodegenError: no rendered package, a folder of other files, or a file there that was edited by hand.
    """
    if out.resolve() == package.resolve():
        raise CodegenError(f"--out: expected a folder beside the package, got the package {out} itself")
    done = files.write(out, tree(package, kernel))
    builds = ", ".join(f"build/torch-{backend}" for backend in kernel.backends)
    return f"{out}: {done}; builds: {builds}"
