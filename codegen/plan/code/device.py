"""The functions of `runtime/device/tl.py` that a kernel's expressions call."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.plan.code.lower import HELPERS

_FUNCTIONS = {op: (function,) for op, function in HELPERS.items()} | {
    "tanh": ("tanh",),
    "clamp_index": ("clamp_index",),
    "load_grid": ("load_grid",),
    "load_pairs": ("load_pairs",),
    "diagonals": ("add_diagonals", "diagonal_sums"),
    "distances": ("load_vector", "store_diagonals"),
    "keep_range": ("keep_range",),
    "grid_extremes": ("grid_extremes",),
}
"""Entry of a kernel plan's `helpers` -> the functions to import for it."""

HELPER_FUNCTIONS = frozenset(_FUNCTIONS)
"""All entries that a plan's `helpers` may have."""


def device_functions(helpers: Iterable[str]) -> list[str]:
    """The functions to import for the `helpers` of a plan.

    >>> device_functions({"mod", "diagonals"})
    ['add_diagonals', 'diagonal_sums', 'floor_mod']
    """
    return sorted({function for helper in helpers for function in _FUNCTIONS[helper]})
