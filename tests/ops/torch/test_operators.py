"""torch's own checks of the custom operators on CPU tensors, where the plain reference stands behind them."""

from __future__ import annotations

import pytest

from codegen.testing import calls
from generated._runtime.core.settings import INTERPRET
from tests.support.operators import OperatorRecorder, check_operators

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(family="reference", framework="torch"),
]


@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
@pytest.mark.parametrize("variant", ["alibi", "document", "forgetting", "gpt_oss"])
def test_opcheck(variant: str, mode: str) -> None:
    """Equal calls return equal values, in every result: the running sum of a log-decay was uninitialised memory."""
    inputs, options = calls.draw_call(variant, mode, "float32", 16, seq=24, device="cpu", batch=2)
    with OperatorRecorder() as recorder:
        calls.evaluate(calls.load_op(variant), inputs, **options)
    name = f"generated::{variant}" + ("" if mode == "dense" else f"_{mode}")
    assert [func.name() for func, _ in recorder.calls] == [f"{name}_fwd", f"{name}_bwd"]
    check_operators(recorder.calls)
