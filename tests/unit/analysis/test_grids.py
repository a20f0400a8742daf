"""Block analysis of masks that read a grid: a tensor with an element for each run of queries by run of keys."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.analysis.intervals import decide
from codegen.analysis.schedule import Schedule, analyse
from codegen.inspect.block_status import Grid, counted, decided, measured, proven
from codegen.inspect.call import Call
from codegen.ir.expr import ScalarType, TensorSpec, Type
from codegen.ir.parse import Scope, parse

DIMS = ("rows", "cols")
SCOPE = Scope(
    scalars={"size": ScalarType.INT},
    tensors={
        "chosen": TensorSpec(name="chosen", dims=DIMS, dtype="bool"),
        "rank": TensorSpec(name="rank", dims=DIMS, dtype="int32"),
        "gate": TensorSpec(name="gate", dims=DIMS),
    },
)
MASKS = [
    "chosen[q_idx // size, kv_idx // size]",
    "q_idx >= kv_idx and chosen[kv_idx >> 4, (q_idx + 5) // 16]",
    "not chosen[q_idx // 16, kv_idx // 32] or chosen[q_idx // 32, kv_idx // 16]",
    "rank[q_idx // 16 + 1, kv_idx // size] - 1 < 2",
    "gate[q_idx // 16, kv_idx // 16] > 0.5",
    "not gate[q_idx // 16, kv_idx // 16] <= gate[kv_idx // 16, q_idx // 16]",
]


def _call(seed: int, *, q_offset: int = 0, size: int = 16) -> Call:
    rng = np.random.default_rng(seed)
    gate = rng.random((5, 6)).astype(np.float32)
    gate[2, 3] = np.nan
    tensors = {"chosen": rng.random((5, 6)) < 0.4, "rank": rng.integers(0, 5, (5, 6)).astype(np.int32), "gate": gate}
    return Call(q_len=70, kv_len=90, q_offset=q_offset, b=0, h=0, hkv=0, scalars={"size": size}, tensors=tensors)


@pytest.mark.parametrize("block", [(3, 5), (16, 16), (20, 33), (64, 16)])
@pytest.mark.parametrize("text", MASKS)
def test_nothing_wrong_is_proven(text: str, block: tuple[int, int]) -> None:
    """Also of indices beyond the tensor, and of sizes that are negative, 0 or smaller than a run may be."""
    mask = parse(text, SCOPE, Type.BOOL)
    for seed, (q_offset, size) in enumerate([(0, 16), (-9, 7), (30, 1), (500, -4), (0, 0), (3, 24)]):
        grid = Grid(call=_call(seed, q_offset=q_offset, size=size), block_m=block[0], block_n=block[1])
        found = measured(counted(mask, grid), grid)
        may, must = decided(mask, grid)
        assert not found[~may].any()
        assert (found[must] == 2).all()


@pytest.mark.parametrize("text", MASKS[:1] + MASKS[4:5])
def test_blocks_that_lie_in_one_run_are_decided_by_its_element(text: str) -> None:
    mask = parse(text, SCOPE, Type.BOOL)
    call = _call(1)
    call.tensors["gate"][2, 3] = 0.3  # a NaN leaves its block undecided
    grid = Grid(call=call, block_m=16, block_n=16)
    assert (measured(counted(mask, grid), grid) == proven(mask, grid)).all()
    assert analyse(mask).schedule is Schedule.LISTS


@pytest.mark.parametrize(
    "indices",
    ["q_idx, kv_idx", "q_idx // 16, kv_idx", "q_idx // 8, kv_idx // 8", "(q_idx - kv_idx) // 64, 0", "q_idx // 64, 3"],
)
def test_other_reads_are_no_grids(indices: str) -> None:
    """A block would have too many elements, or they depend on one side or on a distance."""
    assert not decide(parse(f"chosen[{indices}]", SCOPE, Type.BOOL)).grids


def test_a_plan_over_several_gpus_does_not_look_into_grids() -> None:
    mask = parse("q_idx >= kv_idx and chosen[q_idx // 64, kv_idx // 64]", SCOPE, Type.BOOL)
    assert decide(mask).grids
    without = decide(mask, grids=False)
    assert not without.grids
    assert without.may == decide(parse("q_idx >= kv_idx", SCOPE, Type.BOOL)).may
