"""Pages that are generated when the site is built: each module here with a function `pages` adds pages."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generated_pages() -> dict[str, str | bytes]:
    """Path below docs/ -> content, of all modules of this folder that have a function `pages`."""
    found: dict[str, str | bytes] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if not hasattr(module, "pages"):
            continue
        for path, content in module.pages().items():
            if path in found or (ROOT / "docs" / path).exists():
                raise ValueError(f"{module.__name__}: docs/{path} is there already")
            found[path] = content
    return found
