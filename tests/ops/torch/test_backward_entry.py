"""`op.backward` by itself: autograd's gradients, with dk and dv in float32, computed from the given o and lse."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated._runtime.core.checks import ArgumentError
from generated.torch import alibi, causal
from tests.support.cases import VARIANTS

pytestmark = pytest.mark.covers(family="reference", framework="torch")

SHAPE = calls.Shape(batch=2, heads=4, kv_heads=2, seq=40, dim=16)


def by_itself(op: Any, inputs: calls.Inputs, o: Tensor, lse: Tensor, **options: Any) -> dict[str, Tensor]:
    tensors = {name: x.detach() for name, x in inputs.tensors.items()}
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    found = op.backward(inputs.do, q, k, v, o, lse, dlse=inputs.dlse, **tensors, **inputs.scalars, **options)
    named = {"dq": found.dq, "dk": found.dk, "dv": found.dv} | {f"d{name}": x for name, x in found.own.items()}
    assert found.dk.dtype == found.dv.dtype == torch.float32
    assert found.dq.dtype == inputs.q.dtype
    return named


def without_empty_rows(inputs: calls.Inputs, lse: Tensor) -> calls.Inputs:
    """Inputs with a dlse of 0 in rows without keys: their lse is -inf, which no loss can read."""
    return replace(inputs, dlse=torch.where(torch.isinf(lse), 0.0, inputs.dlse))


@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gives_the_gradients_of_autograd(variant: str, mode: str) -> None:
    entry, op = calls.load_manifest()[variant], calls.load_op(variant)
    inputs = calls.draw_inputs(entry, SHAPE, dtype=torch.float32, device="cpu")
    options: dict[str, Any] = {}
    if mode == "packed":
        inputs = calls.packed(entry, inputs)
        options = {"cu_seqlens_q": torch.tensor([0, 40, 80], dtype=torch.int32)}
    elif mode == "segmented":
        options = {"q_segment_ids": (torch.arange(40) // 17).expand(2, -1).to(torch.int32)}
    with torch.no_grad():
        o, lse = inputs.call(op, return_lse=True, **options)
    inputs = without_empty_rows(inputs, lse)
    want = calls.evaluate(op, inputs, **options)
    found = by_itself(op, inputs, o, lse, **options)
    assert {name for name in want if name.startswith("d")} == set(found)
    for name, x in found.items():
        torch.testing.assert_close(x.float(), want[name].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
def test_is_compiled_whole(mode: str) -> None:
    entry = calls.load_manifest()["alibi"]
    inputs = calls.draw_inputs(entry, SHAPE, dtype=torch.float32, device="cpu")
    options: dict[str, Any] = {}
    if mode == "packed":
        inputs, options = calls.packed(entry, inputs), {"cu_seqlens_q": torch.tensor([0, 40, 80], dtype=torch.int32)}
    elif mode == "segmented":
        options = {"q_segment_ids": (torch.arange(40) // 17).expand(2, -1).to(torch.int32)}
    with torch.no_grad():
        o, lse = inputs.call(alibi, return_lse=True, **options)
    compiled = torch.compile(by_itself, fullgraph=True, backend="aot_eager")
    found, want = compiled(alibi, inputs, o, lse, **options), by_itself(alibi, inputs, o, lse, **options)
    assert list(found) == ["dq", "dk", "dv", "dslope"]
    for name, x in found.items():
        assert torch.equal(x, want[name]), name


def test_rounds_no_gradient_of_16_bit_keys() -> None:
    inputs = calls.draw_inputs(calls.load_manifest()["causal"], SHAPE, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        o, lse = inputs.call(causal, return_lse=True)
    found, want = by_itself(causal, inputs, o, lse), calls.evaluate(causal, inputs)
    tensors = (inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), o, lse)
    wide = causal.backward(inputs.do, *tensors, dlse=inputs.dlse, wide_dq=True)
    assert wide.dq.dtype == torch.float32
    found["dq"] = wide.dq
    for name in ("dq", "dk", "dv"):
        assert torch.equal(found[name].to(torch.bfloat16), want[name])
        assert not torch.equal(found[name], want[name].float())


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.7])
def test_takes_any_scale_and_layout(scale: float) -> None:
    inputs = calls.draw_inputs(calls.load_manifest()["alibi"], SHAPE, dtype=torch.float32, device="cpu")
    swapped = {name: getattr(inputs, name).detach().transpose(1, 2) for name in ("q", "k", "v", "do")}
    for name in ("q", "k", "v"):
        swapped[name].requires_grad_()
    inputs = replace(inputs, **swapped)
    options: dict[str, Any] = {"layout": "bshd", "scale": scale}
    with torch.no_grad():
        o, lse = inputs.call(alibi, return_lse=True, **options)
    found = by_itself(alibi, inputs, o, lse, **options)
    for name, x in calls.evaluate(alibi, inputs, **options).items():
        if name in found:
            assert found[name].shape == x.shape
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-5)


def test_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(causal.backward)) is causal.backward


def test_two_halves_of_the_keys_add_up() -> None:
    """A ring computes in this way: each part of the keys by itself, with o and lse of all keys."""
    inputs = calls.draw_inputs(calls.load_manifest()["full"], SHAPE, dtype=torch.float32, device="cpu")
    op: Any = calls.load_op("full")
    want = calls.evaluate(op, inputs)
    o, lse = want["o"], want["lse"]
    parts = []
    for half in (slice(0, 24), slice(24, 40)):
        k, v = inputs.k.detach()[:, :, half], inputs.v.detach()[:, :, half]
        parts.append(op.backward(inputs.do, inputs.q.detach(), k, v, o, lse, dlse=inputs.dlse))
    torch.testing.assert_close(parts[0].dq + parts[1].dq, want["dq"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.dk for part in parts], 2), want["dk"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.dv for part in parts], 2), want["dv"], rtol=1e-5, atol=1e-5)


def test_computes_the_gradients_that_are_wanted() -> None:
    inputs = calls.draw_inputs(calls.load_manifest()["alibi"], SHAPE, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        o, lse = inputs.call(alibi, return_lse=True)
    assert set(by_itself(alibi, inputs, o, lse, wanted=[])) == {"dq", "dk", "dv"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.zeros(2, 4, 39, 16)}, r"o: expected as the op returns it, floats \[2, 4, 40, 16\], got .*39"),
        ({"lse": torch.zeros(2, 4, 39)}, r"lse: expected as the op returns it, float32 \[2, 4, 40\], got .*39"),
        ({"lse": torch.zeros(2, 4, 40).double()}, r"lse: expected as the op returns it, float32 .* got torch.float64"),
        ({"o": torch.zeros(2, 4, 40, 16).int()}, r"o: expected as the op returns it, floats .*, got torch.int32"),
        ({"o": torch.zeros(2, 4, 40, 16).to("meta")}, "o: expected device cpu, that of q, got meta"),
        ({"lse": np.zeros((2, 4, 40), np.float32)}, r"lse: expected a torch.Tensor, got ndarray"),
        ({"do": torch.zeros(2, 4, 40, 16).to("meta")}, "do: expected device cpu, that of q, got meta"),
        (
            {"do": torch.zeros(2, 4, 40, 16).to(torch.complex64)},
            "do: expected as the op returns it, floats .*complex64",
        ),
        ({"do": torch.zeros(2, 4, 40, 16).to_sparse()}, "do: expected layout torch.strided, got torch.sparse_coo"),
        ({"dlse": 1.0}, "dlse: expected a torch.Tensor, got float"),
        ({"wanted": ["slope"]}, "wanted: expected names among none, got 'slope'"),
        ({"wanted": [["slope"]]}, r"wanted: expected names among none, got \['slope'\]"),
        ({"wanted": "slope"}, "wanted: expected None or a sequence of names among none, got 'slope'"),
        ({"wanted": 3}, "wanted: expected None or a sequence of names among none, got 3"),
        ({"page_table": None}, "page_table: expected one of .*, got an argument of that name"),
    ],
)
def test_bad_arguments_raise_an_error(change: dict[str, Any], message: str) -> None:
    inputs = calls.draw_inputs(calls.load_manifest()["causal"], SHAPE, dtype=torch.float32, device="cpu")
    given: dict[str, Any] = {"do": inputs.do, "o": torch.zeros(2, 4, 40, 16), "lse": torch.zeros(2, 4, 40)} | change
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    with pytest.raises(ArgumentError, match=f"causal.backward: {message}"):
        causal.backward(q=q, k=k, v=v, **given)


def test_arguments_of_the_op_are_checked_as_by_the_op() -> None:
    q = torch.zeros(1, 2, 8, 16)
    lse = torch.zeros(1, 2, 8)
    with pytest.raises(ArgumentError, match=r"^causal: q: expected a torch.Tensor, got list$"):
        causal.backward(q, [1.0], q, q, q, lse)
    with pytest.raises(
        ArgumentError, match=r"^causal: layout: expected 'bhsd' or 'bshd', got ndarray of float32 \[2, 2\]$"
    ):
        causal.backward(q, q, q, q, q, lse, layout=np.zeros((2, 2), np.float32))
