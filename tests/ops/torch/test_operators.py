"""torch's own checks of the custom operators on CPU tensors, where the plain reference stands behind them."""

from __future__ import annotations

import pytest
import torch

from codegen.testing import calls
from generated._runtime.core.settings import INTERPRET
from tests.support.operators import OperatorRecorder, check_operators

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(family="reference", framework="torch"),
]


# The checks of a call take seconds. Each mode has a variant with a gradient of its own and one with tables of blocks or
# a sink; with --full every variant runs in every mode.
OPERATORS = [
    pytest.param(variant, mode, marks=[] if variant in chosen else [pytest.mark.full])
    for mode, chosen in {
        "dense": ("alibi", "document", "forgetting", "gpt_oss"),
        "packed": ("document", "forgetting"),
        "segmented": ("alibi", "gpt_oss"),
    }.items()
    for variant in ("alibi", "document", "forgetting", "gpt_oss")
]


@pytest.mark.parametrize(("variant", "mode"), OPERATORS)
def test_opcheck(variant: str, mode: str) -> None:
    """Equal calls return equal values, in every result: the running sum of a log-decay was uninitialised memory."""
    inputs, options = calls.draw_call(variant, mode, "float32", 16, seq=24, device="cpu", batch=2)
    with OperatorRecorder() as recorder:
        calls.evaluate(calls.load_op(variant), inputs, **options)
    name = f"generated::{variant}" + ("" if mode == "dense" else f"_{mode}")
    assert [func.name() for func, _ in recorder.calls] == [f"{name}_fwd", f"{name}_bwd"]
    check_operators(recorder.calls)
    check_operators(recorder.calls[:1], trained=True)


def test_a_backward_under_autocast_is_that_of_one_outside() -> None:
    q, k, v, do = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    op, found = calls.load_op("causal"), []
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            o = op(q, k, v)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(o, leaves, do))
    for outside, under in zip(*found, strict=True):
        torch.testing.assert_close(under, outside, rtol=0, atol=0)


@pytest.mark.parametrize(("size", "text"), [(-5, "of at least 1, got -5"), (2**31, "of at most .*, got 2147483648")])
def test_a_compiled_call_names_a_wrong_number_that_is_a_symbol(size: int, text: str) -> None:
    q, window = torch.zeros(1, 2, 8, 16), calls.load_op("window")
    compiled = torch.compile(lambda n: window(q, q, q, size=n), backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"window: size: expected an int {text}"):
        compiled(size)
