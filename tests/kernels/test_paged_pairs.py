"""Caches of 8-bit floats with queries of 16 bits: the kernels read two columns at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.torch import backend
from generated.torch import full
from tests.kernels.test_paged import Case, Sizes, draw_case
from tests.support.cases import DEVICE, INTERPRET
from tests.support.scaled_caches import FP8, draw_scale, own_scales, quantised_case

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float16", framework="torch")
TOLERANCE = 1.5e-3
"""For the error of o as a whole: queries, weights and results are rounded to float16."""


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each forward that is launched reads columns."""
    found: list[str] = []
    launch = backend.launch

    def noted(*args: Any, **constants: Any) -> None:
        if "PAIRS" in constants:
            found.append(constants["PAIRS"])
        launch(*args, **constants)

    monkeypatch.setattr(backend, "launch", noted)
    return found


def small(variant: str, dim: int, dim_v: int, queries: tuple[int, ...], dtype: torch.dtype, kind: str) -> Case:
    sizes = Sizes(dim=dim, dim_v=dim_v, dtype=torch.float16)
    case = draw_case(variant, 16, queries, sizes=sizes)
    return quantised_case(case, dtype, *own_scales(case, (kind, kind)))


def check_o(case: Case, **others: Any) -> None:
    (o, lse), (want, want_lse) = case.got(**others), case.expected()
    assert float((o.double() - want).norm() / want.norm()) < TOLERANCE
    torch.testing.assert_close(lse.double(), want_lse, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize(
    ("dim", "dim_v", "kind", "are_pairs"),
    [
        (64, 32, "head", True),
        (128, 128, "token", True),
        (96, 64, "number", True),  # two parts
        (192, 96, "token", True),
        (80, 64, "head", False),  # the second part has too few columns
        (33, 32, "head", False),
        (32, 16, "head", False),
    ],
)
def test_columns_in_pairs(
    dtype: torch.dtype, dim: int, dim_v: int, kind: str, are_pairs: bool, pairs: list[str]
) -> None:
    check_o(small("causal", dim, dim_v, (2,) * 5, dtype, kind))
    assert [found != "" for found in pairs] == [are_pairs] * len(pairs)
    assert pairs


@pytest.mark.parametrize("variant", ["alibi", "gpt_oss", "softcap", "natten"])
def test_variants_and_prompts(variant: str, pairs: list[str]) -> None:
    check_o(small(variant, 64, 64, (5, 0, 1, 40, 2), torch.float8_e4m3fn, "token"))
    assert all(pairs)


def test_rows_at_odd_addresses_are_read_one_column_at_a_time(pairs: list[str]) -> None:
    case = small("causal", 64, 64, (1,) * 5, torch.float8_e4m3fn, "head")

    def moved(x: Tensor) -> Tensor:
        pages, size, heads, dim = x.shape
        room = torch.zeros(pages, size, heads, dim + 1, dtype=torch.uint8, device=x.device).view(x.dtype)
        room[..., 1:].view(torch.uint8).copy_(x.view(torch.uint8))
        return room[..., 1:]

    check_o(replace(case, k=moved(case.k), v=moved(case.v)))
    assert set(pairs) == {""}


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_8_bit_float_is_read_as_it_is(dtype: torch.dtype) -> None:
    """The result of a single key is its values, which include infinities and NaN."""
    # All 256 values, as the values of one key in two heads: [1, 1, 2, 128].
    v = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).view(1, 1, 2, 128)
    k = torch.zeros(1, 1, 2, 128, device=DEVICE).to(dtype)
    q = torch.ones(1, 2, 1, 128, dtype=torch.float16, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(1, dtype=torch.int32, device=DEVICE)
    o: Any = full(q, k, v, page_table=table, kv_lengths=lengths, k_scale=1.0, v_scale=1.0)
    torch.testing.assert_close(o[0, :, 0].float(), v[0, 0].float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("factor", [1e-6, 60.0])
def test_queries_of_any_size(factor: float) -> None:
    """Their rows are scaled by a power of two, which loses no digits."""
    case = small("causal", 64, 64, (1,) * 5, torch.float8_e4m3fn, "number")
    q = case.q * factor
    alone = [(one * factor, k, v, own) for one, k, v, own in case.alone]
    check_o(replace(case, q=q, alone=alone))


@pytest.mark.skipif(INTERPRET, reason="the interpreter computes bfloat16 as float32, whose products are not of pairs")
def test_queries_that_float16_does_not_hold() -> None:
    sizes = Sizes(dim=64, dim_v=64, dtype=torch.bfloat16)
    case = draw_case("causal", 16, (1,) * 5, sizes=sizes)
    case = quantised_case(case, torch.float8_e4m3fn, draw_scale("number", case.k), draw_scale("number", case.v))
    q, scale = case.q * 1e6, 1e-7
    want = replace(case, alone=[(one * 1e6, k, v, own | {"scale": scale}) for one, k, v, own in case.alone]).expected()
    o = replace(case, q=q).got(scale=scale)[0].double()
    assert float((o - want[0]).norm() / want[0].norm()) < 1e-2
