"""Blocks so far from the diagonal that all pairs read one table element: the backward sums their ds separately."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen.testing import golden
from emulator import Timing
from tests.kernels.hopper.test_hopper_backward_emulated import WIDE, check_gradients, emulate_backward
from tests.kernels.hopper.test_hopper_emulated import Sources
from tests.support.cases import Shape, draw

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="backward", dtype="float16", framework="torch"),
]

SUM = "far_behind = add_columns(far_behind, ds, lane_layout())"


TILES = {each: {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1} for each in ("fwd", "dq", "dkdv")}


def check(size: int, shape: Shape, q_offset: int | tuple[int, ...] = 0, **options: Any) -> None:
    """Compare the gradients of `relative_bias`, with a table of `size` distances, with float64."""
    inputs = draw("relative_bias", shape)
    bias = inputs.tensors["bias"].detach()[:, :size].contiguous().requires_grad_()
    inputs = replace(inputs, tensors={"bias": bias})
    offset = torch.tensor(q_offset, dtype=torch.int32) if isinstance(q_offset, tuple) else q_offset
    op, reference = golden.load_op("relative_bias"), golden.load_reference("relative_bias")
    got = golden.evaluate(op, inputs, deterministic=False, q_offset=offset, **{"family": "hopper"} | options)
    check_gradients(got, golden.evaluate(reference, inputs.double(), q_offset=offset))


@pytest.mark.parametrize(
    ("stem", "size", "shape", "q_offset"),
    [
        # The square next to the diagonal's begins at distance 1, and one of a cut block of rows at 129.
        ("hopper_bwd", 2, Shape(q_len=300, kv_len=256, group=1), 0),
        ("hopper_bwd", 40, Shape(q_len=200, kv_len=140, batch=2, group=1), (250, -60)),
        # Of 140 rows the gradient of a distance is a small difference of large terms, as small as their rounding.
        (WIDE, 2, Shape(q_len=150, kv_len=100, dim=192, dim_v=128), 40),
    ],
)
def test_far_blocks(
    monkeypatch: pytest.MonkeyPatch, stem: str, size: int, shape: Shape, q_offset: int | tuple[int, ...]
) -> None:
    kernel = emulate_backward(monkeypatch, "relative_bias", Timing.LATE_PRODUCTS, stem=stem)
    check(size, shape, q_offset)
    assert kernel.launches == 1


@pytest.mark.covers(mode="dense", family="portable", direction="backward", dtype="float16", framework="torch")
@pytest.mark.parametrize(("size", "q_offset"), [(2, 0), (12, (20, -9))])
def test_far_blocks_of_the_portable_kernels(size: int, q_offset: int | tuple[int, ...]) -> None:
    shape = Shape(q_len=50, kv_len=40, batch=2, group=1, dim=16)
    check(size, shape, q_offset, family="portable", config=TILES)


def test_their_sums_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(sources: Sources) -> Sources:
        assert SUM in sources["kernel"]
        return {**sources, "kernel": sources["kernel"].replace(SUM, "pass")}

    emulate_backward(monkeypatch, "relative_bias", Timing.LATE_PRODUCTS, without)
    with pytest.raises(AssertionError, match="dbias"):
        check(2, Shape(q_len=256, kv_len=128, group=1))
