"""The number of unmasked (query, key) pairs of a variant without a formula in `flex_mods`, counted on its own mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codegen.inspect.call import Call
    from codegen.spec.model import Spec

ROWS = 512
"""Query rows counted at a time; with 16k keys this takes an array of 64 MiB."""


@functools.cache
def library_spec() -> Spec:
    from codegen.load.spec_file import default_spec_path, load  # needs PyYAML, which a GPU host may lack

    return load(default_spec_path())


def count(variant: str, seq: int, batch: int, scalars: Mapping[str, int | float]) -> float:
    """Unmasked pairs of one head, averaged over `batch` rows, with the tensors of the spec's examples."""
    return _count(variant, seq, batch, tuple(sorted(scalars.items())))


@functools.cache
def _count(variant: str, seq: int, batch: int, scalars: tuple[tuple[str, int | float], ...]) -> float:
    from codegen.inspect.block_status import pairs

    spec = library_spec().variants[variant]
    if spec.mask is None:
        return float(seq * seq)
    total = 0
    for b in range(batch):
        call = row_call(variant, seq, b, dict(scalars))
        total += sum(int(pairs(spec.mask, call, first, first + ROWS).sum()) for first in range(0, seq, ROWS))
    return total / batch


def row_call(variant: str, seq: int, b: int, scalars: Mapping[str, int | float]) -> Call:
    """The call of batch row `b`, with the tensors of the spec's examples."""
    from codegen.inspect.call import make_call

    spec = library_spec().variants[variant]
    own = {name: str(value) for name, value in scalars.items() if name in spec.scalars}
    return make_call(spec, q_len=seq, kv_len=seq, q_offset=0, batch=b, head=0, scalars=own, files={})
