"""Two implementations of the mathematics agree: the tests' own, and the reference that is rendered from the spec."""

from __future__ import annotations

import pytest
import torch

from codegen.testing import golden
from tests.support import plain
from tests.support.cases import DEVICE, MANIFEST, Shape, draw, variants_where

pytestmark = pytest.mark.covers(mode="dense", family="reference", dtype="float64", framework="torch")


@pytest.mark.parametrize("q_offset", [0, 12, -9, "end", "tensor"])
@pytest.mark.parametrize("variant", variants_where(lambda name: plain.covers(MANIFEST[name])))
def test_the_rendered_reference_is_the_plain_mathematics(variant: str, q_offset: int | str) -> None:
    inputs = draw(variant, Shape(batch=2, kv_heads=2, group=3, q_len=30, kv_len=40, dim=16), positions=60).double()
    offset = torch.tensor([20, -7], dtype=torch.int32, device=DEVICE) if q_offset == "tensor" else q_offset
    want = golden.evaluate(plain.attention(MANIFEST[variant]), inputs, q_offset=offset, scale=0.3)
    got = golden.evaluate(golden.load_reference(variant), inputs, q_offset=offset, scale=0.3)
    for name, wanted in want.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-11, atol=1e-11, msg=f"{name} differs")


def test_the_library_is_covered() -> None:
    """Variants with a mask or score that `plain` does not know get only the looser bounds of `make demo`."""
    own = {"tensors": {}, "scalars": {"size": "int", "length": "int"}}
    assert plain.covers({"mask": "causal and window(size)", "score": "softcap(50.0)", **own})
    assert plain.covers({"mask": "causal or prefix(length)", "score": "", **own})
    assert not plain.covers({"mask": "causal and neighbours", "score": "", **own})
    assert not plain.covers({"mask": "causal", "score": "score * score", **own})
