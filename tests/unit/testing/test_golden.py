"""What `codegen.testing.golden` draws: scalars within their ranges, tensors of their examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.testing.golden import Inputs, Shape, draw_inputs

SHAPE = Shape(batch=2, heads=4, kv_heads=2, seq=9, dim=16)


def tensor(dims: list[str | int], dtype: str = "float32", example: str = "", grad: bool = False) -> dict[str, Any]:
    return {"dims": dims, "dtype": dtype, "example": example, "grad": grad}


def drawn(**entry: Any) -> Inputs:
    nothing: dict[str, Any] = {"tensors": {}, "scalars": {}, "scalar_ranges": {}, "scalar_examples": {}}
    return draw_inputs(
        {**nothing, "sink": False, "decay": False, "dropout": False, **entry},
        SHAPE,
        dtype=torch.float32,
        device="cpu",
        seed=1,
    )


def test_examples_fill_tensors() -> None:
    tensors = drawn(
        tensors={
            "doc": tensor(["b", "kv_idx"], "int32", "kv_idx // 4 + 10 * b"),
            "seen": tensor(["hkv", 3], "bool", "i1 != hkv"),
            "table": tensor(["n", "n"], "float32", "exp(-i0 / 2) * tanh(i1)", grad=True),
            "one": tensor([], "int64", "7"),
        }
    ).tensors
    assert tensors["doc"].tolist() == [[0] * 4 + [1] * 4 + [2], [10] * 4 + [11] * 4 + [12]]
    assert tensors["seen"].tolist() == [[False, True, True], [True, False, True]]
    rows, cols = torch.arange(4.0)[:, None], torch.arange(4.0)
    torch.testing.assert_close(tensors["table"].detach(), torch.exp(-rows / 2) * torch.tanh(cols))
    assert tensors["table"].requires_grad
    assert tensors["table"].is_contiguous()
    assert tensors["one"].item() == 7
    assert [x.dtype for x in tensors.values()] == [torch.int32, torch.bool, torch.float32, torch.int64]


def test_tensors_without_an_example_are_random() -> None:
    tensors = drawn(tensors={"doc": tensor(["b", "kv_idx"], "int32"), "slope": tensor(["h"])}).tensors
    assert sorted(tensors["doc"].unique().tolist()) == [0, 1]
    assert len(tensors["slope"].unique()) == 4


@pytest.mark.parametrize(
    ("kind", "example", "limits", "value"),
    [
        ("int", None, [None, None], 3),  # a third of the sequence
        ("int", 2, [1, None], 2),
        ("int", 256, [1, None], 3),
        ("int", 256, [128, 512], 128),
        ("int", None, [None, 1], 1),
        ("float", None, [None, None], 0.5),
        ("float", None, [2.0, 4.0], 2.0),
        ("float", 50.0, [2.0, None], 50.0),
        ("float", None, [None, 0.25], 0.25),
    ],
)
def test_scalars(kind: str, example: float | None, limits: list[float | None], value: float) -> None:
    scalars = drawn(scalars={"x": kind}, scalar_examples={"x": example}, scalar_ranges={"x": limits}).scalars
    assert scalars == {"x": value}
