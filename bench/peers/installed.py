"""Finds out which peers are installed, without importing them, and the pip names of the others."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {
    "fla": ("fla", "fla-core"),
    "fa4": ("flash_attn.cute", "flash-attn-4"),
    "jax": ("jax", "jax[cuda13]"),
    "kvax": ("kvax", "kvax jax-triton==0.3.1"),
    "flashinfer": ("flashinfer", "flashinfer-python==0.6.1"),
    "fa3": ("flash_attn3_jax", "flash-attn3-jax==0.2.3"),
    "transformers": ("transformers", "transformers==5.17.0"),
    "flax": ("flax", "flax optax"),
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
    "flashinfer-python",
    "flash-attn3-jax",
    "transformers",
    "flax",
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


def revision(folder: Path) -> dict[str, str]:
    """The commit of a checkout, and its date as ISO 8601; empty if there is no git or no checkout."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h %cI"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(("revision", "revision_date"), found, strict=True))


def machine() -> dict[str, str]:
    """The GPU, versions and revision that results depend on. `kernels`: a hash of the kernels' manifest."""
    import torch

    import generated

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, on a CPU"
    found = {"gpu": gpu, "python": sys.version.split()[0]}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    manifest = Path(generated.__path__[0]) / "MANIFEST.json"
    kernels = hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
    found |= {"cudnn": str(torch.backends.cudnn.version()), "kernels": kernels}
    return found | revision(manifest.parent)
