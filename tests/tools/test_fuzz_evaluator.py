"""The fuzzer's own parts: its evaluator against Python and SDPA, its bounds, and how it makes a failure small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from generated._runtime.torch.philox import dropout
from tests.fuzz import running, shrink
from tests.fuzz.attention import Attention, Entry
from tests.fuzz.calls import Call, build
from tests.fuzz.draw_calls import MODES, draw_call
from tests.fuzz.expressions import STILL, Nudge, Pairs, Value, evaluate
from tests.fuzz.judge import mismatches, wanted
from tests.fuzz.order import Verdict, verdict
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
        dims={"w": ["h", "n"], "members": ["h", 3]},
        read=read,
        dtype=torch.float64,
        device=torch.device("cpu"),
        nudge=nudge,
    )


class Clamped:
    """The table for expressions that Python evaluates; indices are clamped to its ends."""

    def __getitem__(self, index: tuple[int, int]) -> float:
        i, j = index
        return TABLE[min(max(i, 0), 1), min(max(j, 0), 2)].item()


class Members:
    """The rows of the table as lists."""

    def __getitem__(self, index: int) -> list[float]:
        row: list[float] = TABLE[min(max(index, 0), 1)].tolist()
        return row


INTEGERS = (
    "(q_idx ^ kv_idx) & 3 | ~kv_idx",
    "(q_idx << (kv_idx & 3)) - (-q_idx >> 1) + (3 << (h + 2))",
    "kv_idx in (1, 3) if q_idx not in (h, 2) else kv_idx in members[h - 1]",
    "(kv_idx > 2) == (q_idx > 1) and (kv_idx > 3) != (h == 1)",
)
"""Expressions of integers and booleans, which have the same meaning in Python without a change."""

EXPRESSIONS = (
    "floor(score * 3.0) + ceil(score) / 4 - round(score) * round(q_idx / 2)",
    "exp2(score) + log2(score + 2) - log1p(abs(score)) * tan(score / 3)",
    *INTEGERS,
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
    scope: dict[str, Any] = {"w": Clamped(), "members": Members(), "min": min, "max": max, "abs": abs, "int": int}
    functions = ("exp", "exp2", "log", "log1p", "log2", "sqrt", "tan", "tanh", "floor", "ceil")
    scope |= {name: getattr(math, name) for name in functions}
    scope |= {"relu": lambda x: max(x, 0.0), "clamp": lambda x, low, high: min(max(x, low), high)}
    booleans = text.replace("~(", "(not ").replace(" & ", " and ").replace(" | ", " or ")
    python = text if text in INTEGERS else booleans
    want = [eval(python, {}, scope | dict(zip(("q_idx", "kv_idx", "h", "score"), row, strict=True))) for row in grid]
    got = evaluate(text, pairs_of(names, len(grid)))
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_branches_keep_gradients_apart() -> None:
    """The value of a branch that is not taken, such as log(-1), has no influence on the gradient."""
    score = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    index = torch.arange(3)
    found = evaluate(
        "where(score > 0, log(score), score)", pairs_of({"score": score, "q_idx": index, "kv_idx": index}, 3)
    )
    (grad,) = torch.autograd.grad(found.sum(), score)
    assert grad.tolist() == [1.0, 1.0, 0.5]


def test_shifts_keep_32_bits_and_rounding_has_no_derivative() -> None:
    index = torch.arange(-2, 40)
    found = evaluate("1 << kv_idx", pairs_of({"q_idx": index, "kv_idx": index}, 42))
    assert found.tolist() == [1, 1, *(2**n for n in range(31)), *[2**30] * 9]
    found = evaluate("3 << kv_idx", pairs_of({"q_idx": index, "kv_idx": index}, 42))
    assert found[-1] == -(2**30)
    score = torch.tensor([0.3, 1.7], dtype=torch.float64, requires_grad=True)
    assert not evaluate(
        "floor(score) + round(score)", pairs_of({"score": score, "q_idx": 0, "kv_idx": 0}, 2)
    ).requires_grad


def test_infinite_score_leaves_a_pair_out() -> None:
    call = Call(q_lens=(9,), kv_lens=(12,), batch=2, heads=2)
    masked, infinite = (
        {"mask": "kv_idx < q_idx", "score": "2 * score"},
        {"score": "where(kv_idx < q_idx, 2 * score, -inf)"},
    )
    want, got = (Attention(build(entry, call).problem).results(True) for entry in (masked, infinite))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0)


LENGTHS: dict[str, tuple[Call, list[tuple[int, int]]]] = {
    "dense": (Call(q_lens=(3,), kv_lens=(5,), q_offset=4), [(3, 5)]),
    "packed": (Call(mode="packed", q_lens=(3, 2), kv_lens=(5, 4)), [(3, 5), (2, 4)]),
    "segmented": (Call(mode="segmented", batch=2, q_lens=(3,), kv_lens=(5,), kv_lengths=(4, 2)), [(3, 4), (3, 2)]),
}


@pytest.mark.parametrize("mode", LENGTHS)
def test_lengths_are_those_of_a_sequence(mode: str) -> None:
    """Every query attends only to the last key, and only if both lengths are right."""
    call, lengths = LENGTHS[mode]
    mask = " or ".join(f"(q_len == {q} and kv_len == {kv} and kv_idx == {kv - 1})" for q, kv in lengths)
    found = Attention(build({"mask": mask}, call).problem)
    assert len(found.r) == sum(q for q, _ in lengths)


SHIFTED = {"mask": "causal", "score": "score + w[q_idx - 1]", "tensors": {"w": {"dims": ["q_idx"]}}}
OWN = {"mask": "doc[q_idx] < 2", "score": "score + w[b, kv_idx]"} | {
    "tensors": {"doc": {"dims": ["q_idx"], "dtype": "int32"}, "w": {"dims": ["b", "kv_idx"]}}
}
SEGMENTS = ((3, 3, 3, 5, 5, 5),)
ORDERS: dict[str, tuple[Entry, dict[str, Any], Verdict]] = {
    "own rows": (OWN, {"q_positions": ((5, 3, 1, 0, 2, 4),)}, Verdict.LEGAL),
    "rows": (SHIFTED, {"q_positions": ((0, 1, 2, 3, 4, 5),)}, Verdict.LEGAL),
    "none": (SHIFTED, {"q_segment_ids": SEGMENTS}, Verdict.LEGAL),
    "shifted": (SHIFTED, {"q_positions": ((5, 3, 1, 0, 2, 4),)}, Verdict.EITHER),
    "shuffled decay": ({"decay": True}, {"q_positions": ((5, 3, 1, 0, 2, 4),)}, Verdict.ILLEGAL),
    "restarting": ({"decay": True}, {"q_positions": ((0, 1, 2, 0, 1, 2),)}, Verdict.ILLEGAL),
    "segments": ({"decay": True}, {"q_positions": ((0, 1, 2, 0, 1, 2),), "q_segment_ids": SEGMENTS}, Verdict.LEGAL),
    "padding": (
        {"dropout": True},
        {"q_positions": ((0, 1, 2, 8, 8, 8),), "q_segment_ids": SEGMENTS, "padding_id": 5},
        Verdict.LEGAL,
    ),
    "out of step": (
        {"decay": True},
        {"q_positions": ((0, 1, 2, 3, 4, 5),), "kv_positions": ((1, 2, 3, 4, 5, 6),)},
        Verdict.EITHER,
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_verdict_of_positions(case: str) -> None:
    entry, given, want = ORDERS[case]
    assert verdict(entry, Call(mode="segmented", q_lens=(6,), kv_lens=(6,), **given)) is want


def test_refusals_count_where_a_call_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal call that is accepted counts too: `run_call` judges an op that refuses or accepts all calls."""
    package: Any = SimpleNamespace(entries={"v": {"decay": True}})
    right = Call(
        mode="segmented", family="reference", q_lens=(4,), kv_lens=(4,), q_positions=((3, 4, 5, 6),), tiles=None
    )
    shuffled = replace(right, q_positions=((1, 0, 3, 2),))

    def refuse(*_: Any) -> Any:
        raise ValueError(f"v: {running.DISORDER} rise")

    monkeypatch.setattr(running, "results", refuse)
    found = [running.run_call(package, "v", call) for call in (right, shuffled)]
    assert [failure and failure.kind for failure in found] == ["error", None]
    monkeypatch.setattr(running, "results", lambda _, variant, inputs: Attention(inputs.problem).results(True))
    found = [running.run_call(package, "v", call) for call in (right, shuffled)]
    assert [failure and failure.kind for failure in found] == [None, "accepted"]


@pytest.mark.parametrize("mode", MODES)
def test_given_dtypes_hold_what_tensors_do(mode: str) -> None:
    """A tensor in another dtype holds numbers of the declared dtype, in which they would otherwise be rounded."""
    tensors: dict[str, Any] = {"w": {"dims": ["h"], "dtype": "bfloat16"}, "i": {"dims": ["m"], "dtype": "int32"}}
    call = Call(mode=mode, contents={"i": "runs"})
    for given in ("float64", "float16"):
        built = build(
            {"tensors": tensors, "score": "score * w[h] + i[h]"}, replace(call, given={"w": given, "i": "int16"})
        )
        w, i = (built.arguments[name] for name in ("w", "i"))
        assert (w.dtype, i.dtype) == (getattr(torch, given), torch.int16)
        assert torch.equal(w.to(torch.bfloat16).to(w.dtype), w)


def test_tensors_share_the_size_of_a_free_dim() -> None:
    """Also where a position indexes it in one of them alone, and an op asks for as many elements there."""
    tensors = {"w": {"dims": ["h", "m"]}, "i": {"dims": ["m"], "dtype": "int32"}}
    entry = {"tensors": tensors, "score": "score + w[h, kv_idx] * i[q_idx // 3]"}
    built = build(entry, Call(kv_lens=(40,), free=8))
    assert [built.arguments[name].shape[-1] for name in ("w", "i")] == [40, 40]


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
    """In this test a failure is any call with a modulo in its mask, at least three keys and a gradient."""
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
