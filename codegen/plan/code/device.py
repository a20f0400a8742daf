"""The functions of `runtime/device/` that a portable kernel's expressions call."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.plan.code.lower import HELPERS

_TILES, _MATH = "tl", "tl_math"
"""The modules of these functions."""

_FUNCTIONS = {op: (_MATH, (function,)) for op, function in HELPERS.items()} | {
    "tanh": (_MATH, ("tanh",)),
    "clamp_index": (_MATH, ("clamp_index",)),
    "load_grid": (_MATH, ("load_grid",)),
    "load_pairs": (_MATH, ("load_pairs",)),
    "keep_range": (_MATH, ("keep_range",)),
    "diagonals": (_TILES, ("add_diagonals", "diagonal_sums")),
    "distances": (_TILES, ("load_vector", "store_diagonals")),
    "grid_extremes": (_TILES, ("grid_extremes",)),
}
"""Entry of a kernel plan's `helpers` -> the functions to import for it, and their module."""

HELPER_FUNCTIONS = frozenset(_FUNCTIONS)
"""All entries that a plan's `helpers` may have."""


def device_functions(helpers: Iterable[str]) -> dict[str, list[str]]:
    """The functions to import for the `helpers` of a plan: module of `runtime/device/` -> names.

    >>> device_functions({"mod", "diagonals"})
    {'tl': ['add_diagonals', 'diagonal_sums'], 'tl_math': ['floor_mod']}
    """
    found: dict[str, set[str]] = {_TILES: set(), _MATH: set()}
    for helper in helpers:
        module, functions = _FUNCTIONS[helper]
        found[module].update(functions)
    return {module: sorted(names) for module, names in found.items()}
