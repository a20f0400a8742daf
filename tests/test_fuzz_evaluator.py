"""The fuzzer's own parts: its evaluator against Python and SDPA, its bounds, and how it makes a failure small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.philox import dropout
from tests.fuzz import shrink
from tests.fuzz.attention import Attention
from tests.fuzz.calls import Call, build
from tests.fuzz.draw_calls import MODES, draw_call
from tests.fuzz.expressions import STILL, Nudge, Pairs, Value, evaluate
from tests.fuzz.judge import mismatches, wanted
from tests.fuzz.philox import kept_factor
from tests.fuzz.running import Failure
from tests.fuzz.specs import draw_entry

TABLE = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]], dtype=torch.float64)


def pairs_of(names: dict[str, Value], count: int, nudge: Nudge = STILL) -> Pairs:
    def read(_: str, indices: Sequence[Value], pairs: Pairs) -> Tensor:
        i, j = (torch.as_tensor(index).expand(pairs.count) for index in indices)
        return TABLE[i.clamp(0, 1), j.clamp(0, 2)]

    names = {**names, "q_row": names["q_idx"], "kv_row": names["kv_idx"]}
    names |= {"q_position": names["q_idx"], "kv_position": names["kv_idx"]}
    return Pairs(
        count=count,
        names=names,
        dims={"w": ["h", "n"]},
        read=read,
        dtype=torch.float64,
        device=torch.device("cpu"),
        nudge=nudge,
    )


class Clamped:
    """The table as Python indexes it."""

    def __getitem__(self, index: tuple[int, int]) -> float:
        i, j = index
        return TABLE[min(max(i, 0), 1), min(max(j, 0), 2)].item()


EXPRESSIONS = (
    "0 <= q_idx - kv_idx < 3 or not q_idx % 3 != 1",
    "(q_idx // -2 == kv_idx // 2) & ~(kv_idx > 4) | (h == 1)",
    "score * w[h, q_idx - kv_idx] - (kv_idx - q_idx) / 3",
    "log(score) if score > 0 else 1 / (score - 1)",
    "min(score, 0.5, w[h, 1]) + max(abs(score), q_idx) ** 2 - clamp(score, -0.5, 0.25)",
    "int(score * 3) + int(kv_idx) % 4 + -q_idx // 3",
    "relu(score) + tanh(score) * exp(-abs(score)) + sqrt(2.0 + score) ** -1",
)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_equal_python(text: str) -> None:
    grid = [(q, k, h, s) for q in range(6) for k in range(6) for h in (0, 1) for s in (-1.5, -0.3, 0.4, 2.0)]
    columns = [torch.tensor(column) for column in zip(*grid, strict=True)]
    names: dict[str, Value] = dict(zip(("q_idx", "kv_idx", "h", "score"), columns, strict=True))
    names["score"] = torch.tensor([row[3] for row in grid], dtype=torch.float64)
    scope: dict[str, Any] = {"w": Clamped(), "min": min, "max": max, "abs": abs, "int": int}
    scope |= {name: getattr(math, name) for name in ("exp", "log", "sqrt", "tanh")}
    scope |= {"relu": lambda x: max(x, 0.0), "clamp": lambda x, low, high: min(max(x, low), high)}
    python = text.replace("~(", "(not ").replace(" & ", " and ").replace(" | ", " or ")
    want = [eval(python, {}, scope | dict(zip(("q_idx", "kv_idx", "h", "score"), row, strict=True))) for row in grid]
    got = evaluate(text, pairs_of(names, len(grid)))
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_branches_keep_gradients_apart() -> None:
    """What a branch is where it is not taken reaches no gradient."""
    score = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    index = torch.arange(3)
    found = evaluate(
        "where(score > 0, log(score), score)", pairs_of({"score": score, "q_idx": index, "kv_idx": index}, 3)
    )
    (grad,) = torch.autograd.grad(found.sum(), score)
    assert grad.tolist() == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("call", [Call(q_lens=(20,), kv_lens=(33,), heads=4, kv_heads=2, batch=2, q_offset="end")])
def test_attention_equals_sdpa(call: Call) -> None:
    inputs = build({"mask": "causal"}, call)
    got = Attention(inputs.problem).results(with_lse=False)
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    keep = torch.ones(20, 33, dtype=torch.bool).tril(13)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
    grads = torch.autograd.grad(o, (q, k, v), inputs.do.double())
    for name, want in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        torch.testing.assert_close(got[name], want.transpose(1, 2).flatten(0, 1), rtol=1e-9, atol=1e-9)


def test_dropout_keeps_what_the_package_keeps() -> None:
    shape, seed = (2, 3, 20, 37), 2**40 + 3
    b, h, row, key = (x.reshape(-1) for x in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    got = kept_factor(0.3, seed, b * shape[1] + h, row, key)
    torch.testing.assert_close(got.view(shape), dropout(torch.ones(shape, dtype=torch.float64), 0.3, seed))


def test_judge_sees_small_errors_and_nan() -> None:
    inputs = build({"mask": "causal", "score": "softcap(5.0)"}, Call(q_lens=(40,), kv_lens=(40,)))
    want = wanted(inputs.problem, "float32", True)
    right = Attention(inputs.problem, torch.float32).results(True)
    assert not mismatches(right, want)
    for name in want.results:
        off = {**right, name: right[name] * 1.001}
        assert [found.name for found in mismatches(off, want)] == [name]
        spoilt = right[name].clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[3] = math.nan
        assert [found.name for found in mismatches({**right, name: spoilt}, want)] == [name]


def test_masked_row_in_the_wrong_place_is_a_mismatch() -> None:
    inputs = build({"mask": "kv_idx < 5 and q_idx > 2"}, Call(q_lens=(8,), kv_lens=(8,)))
    want = wanted(inputs.problem, "float32", True)
    lse = want.results["lse"].roll(1, 1)
    assert [found.name for found in mismatches({**want.results, "lse": lse}, want)] == ["lse"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "device"), [("portable", "cpu"), ("hopper", "cpu"), ("portable", "cuda")])
def test_calls_survive_their_text(mode: str, family: str, device: str) -> None:
    random = Random(5)
    for _ in range(20):
        call = draw_call(random, draw_entry(random), mode=mode, family=family, device=device)
        assert Call.of(call.text()) == call


def test_shrinking_keeps_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that is whatever has a modulo in its mask, three keys and a gradient."""
    tried = itertools.count()

    def run(entry: Any, call: Call, _: str) -> Failure | None:
        next(tried)
        wrong = "%" in entry.get("mask", "") and call.kv_lens[0] >= 3 and call.passes == "all"
        text = "o: off by 1"
        return Failure(variant="v", entry=entry, call=call, kind="mismatch", text=text) if wrong else None

    monkeypatch.setattr(shrink, "run_one", run)
    entry = {
        "mask": "(causal or kv_idx >= 17) and (s[kv_idx] or (q_idx - kv_idx) % 4 == 1)",
        "score": "softcap(3.0) + w[h]",
        "tensors": {"s": {"dims": ["kv_idx"], "dtype": "bool"}, "w": {"dims": ["h"], "grad": True}},
        "sink": True,
    }
    call = Call(mode="packed", q_lens=(9, 30), kv_lens=(40, 7), heads=6, kv_heads=2, layout="bhsd", scale=0.3, dim=64)
    failure = Failure(variant="v", entry=entry, call=call, kind="mismatch", text="o: off by 1")
    found = shrink.shrunk(failure, seconds=20)
    assert list(found.entry) == ["mask"]
    assert len(found.entry["mask"]) <= len("q_idx % 4 == 1")
    assert found.call is not None
    assert (found.call.mode, found.call.heads, found.call.scale) == ("dense", 1, None)
    assert found.call == replace(found.call, kv_lens=(3,), q_lens=(1,))
