"""How many scores a variant keeps, counted from its own mask, for variants that have no formula in `mods.py`.

`python -m bench.cases.pairs` prints how many those are of the scores in the blocks that a variant meets.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.cases.case import Case
    from codegen.inspect.call import Call
    from codegen.spec.model import Spec

ROWS = 512
"""Query rows counted at once: at 16k keys an array of 64 MiB."""

BLOCK = 128
"""Rows and keys of a block of Hopper's forward at up to 128 columns."""


@functools.cache
def _spec() -> Spec:
    from codegen.load.spec_file import default_spec_path, load  # needs PyYAML, which a machine that measures may lack

    return load(default_spec_path())


def count(variant: str, seq: int, batch: int, scalars: Mapping[str, int | float]) -> float:
    """The unmasked scores of one head of a row, the mean over `batch` rows; tensors hold their examples."""
    return _count(variant, seq, batch, tuple(sorted(scalars.items())))


@functools.cache
def _count(variant: str, seq: int, batch: int, scalars: tuple[tuple[str, int | float], ...]) -> float:
    from codegen.inspect.block_status import pairs

    spec = _spec().variants[variant]
    if spec.mask is None:
        return float(seq * seq)
    total = 0
    for b in range(batch):
        call = _call(variant, seq, b, dict(scalars))
        total += sum(int(pairs(spec.mask, call, first, first + ROWS).sum()) for first in range(0, seq, ROWS))
    return total / batch


def _call(variant: str, seq: int, b: int, scalars: Mapping[str, int | float]) -> Call:
    """Row `b` of a batch, its tensors holding their examples."""
    from codegen.inspect.call import make_call

    spec = _spec().variants[variant]
    own = {name: str(value) for name, value in scalars.items() if name in spec.scalars}
    return make_call(spec, q_len=seq, kv_len=seq, q_offset=0, batch=b, head=0, scalars=own, files={})


def share_of_blocks(case: Case, block: int = BLOCK) -> float:
    """Unmasked scores over all scores of the blocks that have any, in the first row of a batch of the benchmark: what a
    kernel that computes whole blocks can reach of its rate without a mask."""
    from bench.cases.flex_mods import MODS
    from codegen.inspect.block_status import Grid, counted

    mask, mods = _spec().variants[case.variant].mask, MODS.get(case.variant)
    if mask is None:
        return 1.0
    call = _call(case.variant, case.shape.seq, 0, case.scalars)
    if mods is not None and mods.tensors is not None:
        drawn = mods.tensors(replace(case.shape, batch=1), "cpu")
        call = replace(call, tensors={**call.tensors, **{name: x.detach().numpy() for name, x in drawn.items()}})
    kept = counted(mask, Grid(call=call, block_m=block, block_n=block))
    return float(kept.sum() / ((kept > 0).sum() * block * block))


def main() -> None:
    from bench.cases.suites import Sizes, variants

    for case in variants(Sizes(dims=(128,))):
        print(f"{share_of_blocks(case):7.1%}  {case.name}")


if __name__ == "__main__":
    main()
