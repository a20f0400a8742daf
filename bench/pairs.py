"""How many scores a variant keeps, counted from its own mask: for the variants that have no formula in `mods.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codegen.spec import Spec

ROWS = 512
"""Query rows counted at once: at 16k keys an array of 64 MiB."""


@functools.cache
def _spec() -> Spec:
    from codegen.load import library_path, load  # needs PyYAML, which a machine that measures may lack

    return load(library_path())


def count(variant: str, seq: int, batch: int, scalars: Mapping[str, int | float]) -> float:
    """The unmasked scores of one head of a row, the mean over `batch` rows; tensors hold their examples."""
    return _count(variant, seq, batch, tuple(sorted(scalars.items())))


@functools.cache
def _count(variant: str, seq: int, batch: int, scalars: tuple[tuple[str, int | float], ...]) -> float:
    from codegen.block_status import pairs
    from codegen.call import make_call

    spec = _spec().variants[variant]
    if spec.mask is None:
        return float(seq * seq)
    own = {name: str(value) for name, value in scalars if name in spec.scalars}
    total = 0
    for b in range(batch):
        call = make_call(spec, q_len=seq, kv_len=seq, q_offset=0, batch=b, head=0, scalars=own, files={})
        total += sum(int(pairs(spec.mask, call, first, first + ROWS).sum()) for first in range(0, seq, ROWS))
    return total / batch
