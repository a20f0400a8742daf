"""The mathematics of every variant of library.yaml, by hand.

Each function has the name of its variant and was written from the paper the variant's `doc` cites, not from its entry.
It says which keys a query sees and what becomes of the scaled score. Its decorator gives a call that shows the variant:
lengths at which windows, frames and canvases end within the sequence, and arguments of its own.
"""

from tests.support.library_formulas import biases, canvases, documents, masks, scores
from tests.support.library_formulas.formula import BATCH, HEADS, KV_HEADS, REGISTERED, Formula, Grid

__all__ = ["BATCH", "FORMULAS", "HEADS", "KV_HEADS", "Grid"]

FORMULAS: dict[str, Formula] = {
    name: formula
    for family in (masks, canvases, documents, biases, scores)
    for name, formula in REGISTERED.items()
    if formula.function.__module__ == family.__name__
}
