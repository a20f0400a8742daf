"""Paths of the checkout and of its two spec files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DEFAULT_SPEC = ROOT / "variants.yaml"
"""The spec of the checked-in package, whose values other files inherit."""

LIBRARY = ROOT / "library.yaml"
"""The collection of further variants."""
