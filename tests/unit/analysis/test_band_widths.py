"""The number of keys that a row of a band sees."""

from __future__ import annotations

import pytest

from codegen.analysis.band_widths import band_width
from codegen.analysis.schedule import analyse
from codegen.ir.expr import ScalarType, Type, Var
from codegen.ir.parse import Scope, parse
from codegen.load.spec_file import load
from tests.support.paths import LIBRARY, ROOT

SPECS = {**load(ROOT / "variants.yaml").variants, **load(LIBRARY).variants}


def width(mask: str) -> dict[str, int] | None:
    scalars = dict.fromkeys(("size", "before", "after"), ScalarType.INT)
    found = band_width(analyse(parse(mask, Scope(scalars=scalars), Type.BOOL)), scalars)
    return None if found is None else {x.name if isinstance(x, Var) else "1": n for x, n in found.items()}


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        ("q_idx >= kv_idx and q_idx - kv_idx < size", {"size": 1}),
        ("q_idx >= kv_idx and q_idx - kv_idx < 128", {"1": 128}),
        ("abs(q_idx - kv_idx) <= size", {"size": 2, "1": 1}),
        ("q_idx - kv_idx <= before and kv_idx - q_idx <= after", {"before": 1, "after": 1, "1": 1}),
        ("q_idx >= kv_idx and (q_idx - kv_idx < size or kv_idx < 4)", {"size": 1}),
        ("q_idx >= kv_idx", None),
        ("q_idx <= kv_idx", None),
        ("kv_idx < size", None),
        ("q_idx // 64 == kv_idx // 64", None),
        ("q_idx >= kv_idx and q_idx - kv_idx < 4 * (h + 1)", None),
        ("q_idx >= kv_idx and q_idx - kv_idx < kv_len - size", None),
    ],
)
def test_width_of_a_band(mask: str, keys: dict[str, int] | None) -> None:
    assert width(mask) == keys


@pytest.mark.parametrize("variant", ["causal", "full", "document", "natten", "head_windows", "prefix_lm"])
def test_a_width_that_no_scalar_gives_is_not_known(variant: str) -> None:
    assert band_width(analyse(SPECS[variant].mask), SPECS[variant].scalars) is None
