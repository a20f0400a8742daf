"""Positions that a dense batch gives its tokens: in any order, anew in each segment, beside ids and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, DTYPES, VARIANTS, Shape, draw, evaluate, with_variants
from tests.support.judge import check_call
from tests.support.packings import Packing
from tests.support.segmented_batches import (
    BATCH,
    CROSS,
    IDS,
    KEYS,
    LENGTH,
    SELF,
    TILES,
    randomly,
    restarted,
    with_kinds,
)
from tests.support.segments import BY_ROW, ints

pytestmark = pytest.mark.covers(mode="segmented", family="portable", dtype="float16", framework="torch")
with_positions = pytest.mark.parametrize("variant", ["causal", "window", "alibi"])


@with_kinds
def test_segments_of_runs_are_packed_sequences(variant: str) -> None:
    """What makes a packed call of a batch row: ids of runs, and positions that start again with each."""
    packing = Packing.of(9, 40, 70)
    inputs = draw(variant, replace(SELF, batch=1), DTYPES[0])
    lengths = [rows.stop - rows.start for rows in packing.rows]
    ids = ints([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = ints([[place for length in lengths for place in range(length)]])
    got = evaluate(variant, inputs, q_segment_ids=ids, q_positions=positions)
    want = evaluate(variant, packed(inputs), framework="torch", **packing.options())
    errors = golden.relative_errors(packed_results(got), want)
    # Both are rounded, hence twice the bound.
    assert max(errors.values()) <= 2 * golden.BOUND[DTYPES[0]], errors


def packed(inputs: Inputs) -> Inputs:
    """The first batch row as a packed call."""

    def first(x: Tensor) -> Tensor:
        return x.detach()[0].transpose(0, 1).contiguous().requires_grad_(x.requires_grad)

    own = {name: x.detach()[0].requires_grad_() if name == "g" else x for name, x in inputs.tensors.items()}
    return replace(
        inputs,
        q=first(inputs.q),
        k=first(inputs.k),
        v=first(inputs.v),
        do=first(inputs.do),
        dlse=inputs.dlse[0],
        tensors=own,
    )


def packed_results(got: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a batch of one in a packed call's shapes."""
    tokens = {name: got[name][0].transpose(0, 1) for name in ("o", "dq", "dk", "dv")}
    return got | tokens | {name: x[0] for name, x in got.items() if name in ("lse", "dg")}


def shuffled(inputs: Inputs, queries: Tensor, keys: Tensor) -> Inputs:
    """The same tokens in other orders, `[B, Sq]` and `[B, Skv]`."""

    def moved(x: Tensor, order: Tensor) -> Tensor:
        places = order[:, None, :, None].expand_as(x)
        return x.detach().gather(2, places).requires_grad_(x.requires_grad)

    return replace(
        inputs,
        q=moved(inputs.q, queries),
        k=moved(inputs.k, keys),
        v=moved(inputs.v, keys),
        do=moved(inputs.do, queries),
        dlse=inputs.dlse.gather(2, queries[:, None].expand_as(inputs.dlse)),
    )


def orders(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.stack([torch.randperm(length, generator=generator) for _ in range(BATCH)]).to(DEVICE)


@pytest.mark.parametrize("shape", [SELF, CROSS], ids=str)
@with_positions
def test_shuffled_tokens_with_their_positions(variant: str, shape: Shape) -> None:
    """The same as in order, each result where its token went."""
    inputs = draw(variant, shape, DTYPES[0])
    queries = orders(shape.q_len)
    keys = queries if shape is SELF else orders(shape.keys)
    options = {"q_positions": queries.int()} | ({} if shape is SELF else {"kv_positions": keys.int()})
    moved = shuffled(inputs, queries, keys)
    got = check_call(variant, moved, config=TILES, **options)
    want = evaluate(variant, inputs)
    for name in ("o", "lse", "dq", "dk", "dv"):
        order = (keys if name in ("dk", "dv") else queries)[:, None, :]
        places = order.expand_as(want[name]) if name == "lse" else order[..., None].expand_as(want[name])
        want[name] = want[name].gather(2, places)
    errors = golden.relative_errors(got, want)
    # Both are rounded, hence twice the bound.
    assert max(errors.values()) <= 2 * golden.BOUND[DTYPES[0]], errors


POSITIONS: dict[str, Callable[[], Tensor]] = {
    "restarting": lambda: ints([[i % 30 for i in range(LENGTH)], [i % 41 for i in range(LENGTH)]]),
    "falling": lambda: ints([range(LENGTH, 0, -1)] * BATCH),
    "equal": lambda: ints([[3] * LENGTH] * BATCH),
    "apart": lambda: ints([range(0, 5 * LENGTH, 5), range(-20, 3 * LENGTH - 20, 3)]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@with_positions
def test_positions(variant: str, positions: str) -> None:
    check_call(variant, draw(variant, SELF, DTYPES[0]), config=TILES, q_positions=POSITIONS[positions]())


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(BY_ROW)))
def test_positions_of_every_variant(variant: str) -> None:
    options = {"q_positions": POSITIONS["restarting"](), "kv_positions": randomly(0, LENGTH, KEYS)}
    check_call(variant, draw(variant, CROSS, DTYPES[0]), **options)


@pytest.mark.parametrize("variant", BY_ROW)
def test_positions_of_what_is_read_by_row(variant: str) -> None:
    """Each segment's own, in order: a log-decay, documents and dropout stay with the row and the key."""
    ids = IDS["documents"]()
    check_call(variant, draw(variant, SELF, DTYPES[0]), q_segment_ids=ids, q_positions=restarted(ids))


@with_variants
def test_all_together(variant: str) -> None:
    inputs = draw(variant, CROSS, DTYPES[0])
    rows = {"q_positions": ints([range(LENGTH)] * BATCH), "kv_positions": ints([range(KEYS)] * BATCH)}
    any_order = {"q_positions": POSITIONS["apart"](), "kv_positions": randomly(0, 2 * LENGTH, KEYS)}
    check_call(
        variant,
        inputs,
        q_segment_ids=randomly(-1, 2),
        kv_segment_ids=randomly(-1, 2, KEYS),
        **(rows if variant in BY_ROW else any_order),
        kv_lengths=ints([KEYS, 80]),
        padding_id=1,
    )
