"""The share of computed scores that a mask keeps; `python -m bench.cases.block_shares` prints it for all variants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench.cases.case import Case
from bench.cases.flex_mods import MODS
from bench.cases.pairs import library_spec, row_call
from bench.cases.suites import Sizes, variants
from codegen.inspect.block_status import Grid, counted

BLOCK = 128
"""Rows and keys of a tile of the Hopper forward at head_dims up to 128."""


def share_of_blocks(case: Case, block: int = BLOCK) -> float:
    """Unmasked pairs divided by all pairs of the blocks that have any, in the first batch row.

    A kernel that computes whole blocks can reach this share of its rate without a mask.
    """
    mask, mods = library_spec().variants[case.variant].mask, MODS.get(case.variant)
    if mask is None:
        return 1.0
    call = row_call(case.variant, case.shape.seq, 0, case.scalars)
    if mods is not None and mods.tensors is not None:
        drawn = mods.tensors(replace(case.shape, batch=1), "cpu")
        call = replace(call, tensors={**call.tensors, **{name: x.detach().numpy() for name, x in drawn.items()}})
    kept = counted(mask, Grid(call=call, block_m=block, block_n=block))
    return float(kept.sum() / ((kept > 0).sum() * block * block))


def shares_by_name(cases: Iterable[Case]) -> dict[str, float]:
    """`share_of_blocks` of each case by its name; heads and head_dims do not change it."""
    known: dict[str, float] = {}
    found = {}
    for case in cases:
        mask = replace(case, shape=replace(case.shape, batch=1, heads=1, kv_heads=1, dim=64))
        if mask.name not in known:
            known[mask.name] = share_of_blocks(mask)
        found[case.name] = known[mask.name]
    return found


def main() -> None:
    for case in variants(Sizes(dims=(128,))):
        print(f"{share_of_blocks(case):7.1%}  {case.name}")


if __name__ == "__main__":
    main()
