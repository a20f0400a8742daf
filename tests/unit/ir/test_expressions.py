"""An expression printed for torch, printed for jnp, and its derivative must compute the same mathematics."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from codegen.ir import expr
from codegen.ir.derive import derivative
from codegen.ir.expr import Expr, ScalarType, TensorSpec, Type
from codegen.ir.parse import Scope, parse
from codegen.ir.printers import FormulaPrinter, jnp_printer, torch_printer
from generated._runtime.core import scalar_math

TABLE = TensorSpec(name="table", dims=("h", "n"), grad=True)
SCOPE = Scope(tensors={"table": TABLE})
HEADS, LENGTH, KEYS = 3, 7, 11

EXPRESSIONS = (
    "score * 2.0 - 1",
    "50.0 * tanh(score / 50.0)",
    "exp(-abs(score)) + log(score ** 2 + 1)",
    "sqrt(score * score + 0.5) / (1 + sigmoid(score))",
    "sin(score) * cos(0.3 * score) - silu(score)",
    "gelu(score) + relu(score - 0.25)",
    "min(score, 0.5) - max(score, -0.5, 0.1) + clamp(score, -1, 1)",
    "where(q_idx >= kv_idx, score, -2.0 * score)",
    "score ** 3 - score ** 6 + (score ** 2 + 1) ** -1.5",
    "score + table[h, kv_idx - q_idx + 3] * score",
    "score * ((q_idx - kv_idx) % 4) + (q_idx - kv_idx) // 3",
    "1.5 if h == 1 and not kv_idx < 2 else score",
    "tanh(table[h, kv_idx] * score) + table[h, q_idx]",
    "score * int(3.0 * score) + int(q_idx / 2 - kv_idx)",
    "score * table[h, int(log(1.0 + abs(q_idx - kv_idx)) * 2)] + table[2, 1]",
    "where(table[h, int(2 * table[h, kv_idx])] > 0, score, int(table[h, 1]) * score)",
    "score * (where(table[h, q_idx] > 0, 1, 2) * kv_idx) + table[h, 2]",
    "exp2(score) - log2(score ** 2 + 1) + log1p(abs(score)) * tan(0.3 * score)",
    "floor(score) * score + ceil(2 * table[h, kv_idx]) * score - round(score * 4) / 4",
    "round(kv_idx / 2) * score + floor(-kv_idx / 2) - ceil(q_idx) * round(q_idx)",
    "score * ((q_idx & 3) | (kv_idx ^ 5)) + (~kv_idx) + (q_idx << 2 >> 1) - (-kv_idx >> 1) + (1 << (q_idx & 3))",
    "score * where((q_idx & 3) == (kv_idx ^ 1) or (kv_idx | 2) < 7, 1 << kv_idx % 5, kv_idx >> h)",
    "where((q_idx >= kv_idx) == (h == 1), score, 2 * score) + where((kv_idx < 3) ^ (h > 0), table[h, 1], 0.5)",
    "where((q_idx >= kv_idx) == (not kv_idx < 3 and h > 0), score, min(score, inf)) - where(score < inf, 1, 2)",
)

NUMBERS = (
    "sqrt(cap) + log(cap) - exp(-cap) * sin(cap) / cos(cap) + tanh(cap) * erf(cap)",
    "sigmoid(-(cap - 3))",
    "abs(-size) ** 2 + min(size, 3, cap) - max(size // 2, size % 3)",
    "1.5 if not cap > 3.0 and size < 9 or cap == size else cap",
    "int(cap * 7.5) / size + int(-cap)",
    "floor(-cap) + ceil(size * cap) - round(2.5 * size) * log1p(cap) + log2(cap) * exp2(-cap) / tan(cap)",
    "(size & 6 | size << 2) + (size ^ 3) - (~size >> 1) + (1.5 if (size > 3) == (cap > 3.0) else -cap)",
)


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_printed_as_python(text: str) -> None:
    """Terms of scalars only are printed with functions of numbers, because torch's functions take only tensors."""
    scalars = {"size": 5, "cap": 0.7}
    kinds = {"size": ScalarType.INT, "cap": ScalarType.FLOAT}
    functions = {name: getattr(math, name) for name in ("sqrt", "log", "exp", "sin", "cos", "tanh", "erf")}
    functions |= {name: getattr(math, name) for name in ("floor", "ceil", "log1p", "log2", "exp2", "tan")}
    want = eval(text, {**functions, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), **scalars})
    printer = torch_printer(_never_exact, numbers=frozenset(scalars))
    score = torch.randn(HEADS, LENGTH, KEYS, dtype=torch.float64)
    for whole, wanted in ((f"score + ({text})", score + want), (f"min(score, {text})", score.clamp(max=want))):
        printed = printer.text(parse(whole, Scope(scalars=kinds), Type.FLOAT))
        names = {"torch": torch, "scalar_math": scalar_math, "score": score, **scalars}
        torch.testing.assert_close(eval(printed, names), wanted)


@pytest.mark.parametrize(
    "text",
    [
        "exp(score if size > 3 else 0.5)",
        "exp(0.5 if size > 3 else score)",
        "score * abs(q_idx if size > 3 else 3)",
        "score * max(7 if size > 3 else kv_idx, q_idx)",
        "score if not (q_idx >= kv_idx if size > 3 else size < 9) else 0.5",
        "clamp(0.3 if size > 3 else score, score, size)",
    ],
)
@pytest.mark.parametrize("size", [3, 5])
def test_a_choice_that_a_scalar_makes_may_be_a_number(text: str, size: int) -> None:
    """torch's functions must still be called with a tensor, of the dtype of the score."""
    values = {"q_idx": torch.arange(LENGTH)[:, None], "kv_idx": torch.arange(KEYS)}
    printer = torch_printer(_never_exact, numbers=frozenset({"size"}))
    e = parse(text, Scope(scalars={"size": ScalarType.INT}), Type.FLOAT)
    score = torch.randn(HEADS, LENGTH, KEYS, dtype=torch.float64)
    got = eval(printer.text(e), {"torch": torch, "math": math, "score": score, "size": size, **values})
    wanted = torch.empty_like(score)
    functions = {"exp": math.exp, "max": max, "clamp": lambda x, low, high: min(max(x, low), high)}
    for place in np.ndindex(score.shape):
        names = {n: x.expand(score.shape)[place].numpy()[()] for n, x in {"score": score, **values}.items()}
        wanted[place] = eval(text, {**functions, "size": size, **names})
    torch.testing.assert_close(got.expand(score.shape), wanted)


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "score": torch.randn(HEADS, LENGTH, KEYS, dtype=torch.float64),
        "table": torch.randn(HEADS, 9, dtype=torch.float64),
        "h": torch.arange(HEADS).view(-1, 1, 1),
        "q_idx": torch.arange(LENGTH)[:, None],
        "kv_idx": torch.arange(KEYS),
    }


def _never_exact(_tensor: str, _axis: int, _index: Expr) -> bool:
    return False


def _torch(e: Expr, values: dict[str, Any]) -> torch.Tensor:
    result = eval(torch_printer(_never_exact).text(e), {"torch": torch, **values})
    return torch.as_tensor(result, dtype=torch.float64).expand(HEADS, LENGTH, KEYS)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_derivatives_agree_with_autograd(text: str) -> None:
    e, values = parse(text, SCOPE, Type.FLOAT), _values()
    score, table = values["score"].requires_grad_(), values["table"].requires_grad_()
    weights = torch.randn(HEADS, LENGTH, KEYS, dtype=torch.float64)
    value = _torch(e, values)
    dscore, dtable = torch.autograd.grad((value * weights).sum() + 0 * (score.sum() + table.sum()), (score, table))
    torch.testing.assert_close(_torch(derivative(e, expr.float_var("score")), values) * weights, dscore)
    gathered = torch.zeros_like(table)
    for load in expr.loads(e):
        local = (_torch(derivative(e, load), values) * weights).detach()
        index = [eval(torch_printer(_never_exact).text(i), {"torch": torch, **values}) for i in load.indices]
        clamped = [
            torch.as_tensor(i).expand(local.shape).clamp(0, n - 1) for i, n in zip(index, table.shape, strict=True)
        ]
        gathered.index_put_(tuple(clamped), local, accumulate=True)
    torch.testing.assert_close(gathered, dtable)


# Expressions of values with ties, and torch's own functions of these values: `t` is a table of -1, 0 and 1, and `s` are
# the scores, which have the same values.
KINKS = {
    "relu(score)": lambda s, t: torch.relu(s),
    "abs(score) * table[h, q_idx]": lambda s, t: torch.abs(s) * t,
    "max(score, table[h, q_idx])": torch.maximum,
    "min(score, table[h, q_idx])": torch.minimum,
    "max(score, 1)": lambda s, t: torch.maximum(s, torch.ones_like(s)),
    "min(0.0, score)": lambda s, t: torch.minimum(torch.zeros_like(s), s),
    "max(table[h, q_idx], score, 0)": lambda s, t: torch.maximum(torch.maximum(t, s), torch.zeros_like(s)),
    "clamp(score, -1, 1)": lambda s, t: torch.clamp(s, -1, 1),
    "clamp(score, table[h, q_idx], 1.5)": lambda s, t: torch.clamp(s, t, torch.full_like(t, 1.5)),
    "clamp(score, 0.5, table[h, q_idx])": lambda s, t: torch.clamp(s, torch.full_like(t, 0.5), t),
    "clamp(0.0, table[h, q_idx], score + 0.5)": lambda s, t: torch.clamp(torch.zeros_like(s), t, s + 0.5),
    "clamp(score, 0, 0)": lambda s, t: torch.clamp(s, 0, 0),
    "relu(clamp(score, 0, table[h, q_idx]))": lambda s, t: torch.relu(torch.clamp(s, torch.zeros_like(t), t)),
}


def _with_ties() -> dict[str, torch.Tensor]:
    values = _values()
    for name in ("score", "table"):
        values[name] = torch.randint(-1, 2, values[name].shape).double()
    return values


@pytest.mark.parametrize("text", KINKS)
def test_kinks_have_the_derivatives_of_torch(text: str) -> None:
    """Both the derivatives of `derivative` and those of autograd through the printed code."""
    e, values = parse(text, SCOPE, Type.FLOAT), _with_ties()
    score = values["score"].requires_grad_()
    table = values["table"][values["h"], values["q_idx"].clamp(0, 8)].expand_as(score).clone().requires_grad_()
    want_value = KINKS[text](score, table)
    want = torch.autograd.grad(want_value.sum() + 0 * table.sum(), (score, table))
    values["table"].requires_grad_()
    value = _torch(e, values)
    torch.testing.assert_close(value, want_value)
    got = torch.autograd.grad(value.sum() + 0 * values["table"].sum(), (score, values["table"]))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].sum(1), want[1].sum((1, 2)))
    torch.testing.assert_close(_torch(derivative(e, expr.float_var("score")), values), want[0])
    for load in expr.loads(e):
        torch.testing.assert_close(_torch(derivative(e, load), values), want[1])


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_jnp_says_the_same(text: str) -> None:
    """numpy stands in for jnp: the printer uses only functions that both have, and sigmoid, relu and erf of jax."""
    e, values = parse(text, SCOPE, Type.FLOAT), _values()
    erf = np.vectorize(lambda x: torch.erf(torch.tensor(x, dtype=torch.float64)).item())
    jax = SimpleNamespace(
        nn=SimpleNamespace(sigmoid=lambda x: 1 / (1 + np.exp(-x)), relu=lambda x: np.maximum(x, 0)),
        scipy=SimpleNamespace(special=SimpleNamespace(erf=erf)),
    )
    arrays = {name: value.numpy() for name, value in values.items()}
    names = {
        "jnp": np,
        "jax": jax,
        **{n: a.astype(np.float64) if a.dtype == np.float64 else a for n, a in arrays.items()},
    }
    got = eval(jnp_printer(_never_exact).text(e), names)
    want = _torch(e, values).numpy()
    np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_formulas_read_back(text: str) -> None:
    """Docstrings show formulas in the expression language: parsed again, each is the same expression."""
    e, values = parse(text, SCOPE, Type.FLOAT), _values()
    again = parse(FormulaPrinter().text(e), SCOPE, Type.FLOAT)
    torch.testing.assert_close(_torch(again, values), _torch(e, values))
    assert FormulaPrinter().text(again) == FormulaPrinter().text(e)
