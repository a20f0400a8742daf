"""Finds out which peers are installed, without importing them, and the pip names of the others."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {
    "fla": ("fla", "fla-core"),
    "fa4": ("flash_attn.cute", "flash-attn-4"),
    "jax": ("jax", "jax[cuda13]"),
    "kvax": ("kvax", "kvax jax-triton==0.3.1"),
}
"""Peers that do not come with torch: module and pip name."""

VERSIONS = (
    "torch",
    "triton",
    "fla-core",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "jax",
    "jax-triton",
    "kvax",
)


def is_installed(module: str) -> bool:
    """True if a module can be found, also a submodule."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # the parent package is missing or broken
        return False


def missing(peers: Iterable[str]) -> dict[str, str]:
    """The peers that are not installed, with their pip names."""
    needed = {peer: PACKAGES[peer] for peer in peers if peer in PACKAGES}
    return {peer: package for peer, (module, package) in needed.items() if not is_installed(module)}


def machine() -> dict[str, str]:
    """The GPU and versions that results depend on. `kernels` is a hash of the manifest: equal for equal kernels."""
    import torch

    import generated

    found = {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0]}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    manifest = Path(generated.__path__[0]) / "MANIFEST.json"
    kernels = hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
    return found | {"cudnn": str(torch.backends.cudnn.version()), "kernels": kernels}
