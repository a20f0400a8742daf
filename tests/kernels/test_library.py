"""Every variant of library.yaml, rendered for the tests: its reference against a formula written by hand, and its
kernels against its reference, forward and every gradient, in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from tests.kernels.conftest import LIBRARY_PACKAGE as PACKAGE
from tests.support.cases import DEVICE, INTERPRET, tiles
from tests.support.judge import FEWEST, MEAN_RATIO, OWN_RATIO
from tests.support.library_formulas import BATCH, FORMULAS, HEADS, KV_HEADS, Grid
from tests.support.paths import LIBRARY, ROOT
from tests.support.rendering import lint_problems

pytest.importorskip("jinja2", reason="rendering needs jinja2")
pytest.importorskip("yaml", reason="rendering needs pyyaml")
pytest.importorskip("ruff", reason="rendering needs ruff, the formatter")

DIM = 16

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.covers(variant="name", mode="dense", family="portable", dtype="float32", framework="torch"),
]
with_names = pytest.mark.parametrize("name", FORMULAS)


def _op(name: str) -> Callable[..., Any]:
    op: Callable[..., Any] = getattr(importlib.import_module(f"{PACKAGE}.torch"), name)
    return op


def _reference(name: str) -> Callable[..., Any]:
    reference: Callable[..., Any] = importlib.import_module(f"{PACKAGE}.{name}.torch_reference").reference
    return reference


def _inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v, and the variant's own arguments; trained arguments require gradients."""
    formula = FORMULAS[name]
    shapes = ((HEADS, formula.q_len), (KV_HEADS, formula.kv_len), (KV_HEADS, formula.kv_len))
    q, k, v = (torch.randn(BATCH, *shape, DIM, device=DEVICE).to(dtype) for shape in shapes)
    if formula.positive:
        q, k = q.abs(), k.abs()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    own = {key: draw() for key, draw in formula.own.items()}
    own = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in own.items()}
    for key in _trained(name):
        own[key].requires_grad_()
    return inputs, own


@cache
def _variants() -> Any:
    from codegen.load.spec_file import load

    return load(LIBRARY).variants


def _trained(name: str) -> list[str]:
    """The arguments with a gradient."""
    spec = _variants()[name]
    return [tensor.name for tensor in spec.tensors.values() if tensor.grad] + ["g"] * spec.decay


def _double(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def _scaled(q: Tensor, k: Tensor) -> Tensor:
    """The scaled products `[B, H, Sq, Skv]`, rounded to the dtype of q."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(HEADS // KV_HEADS, 1)
    products: Tensor = q.to(wide) @ keys.mT / DIM**0.5
    return products.to(q.dtype).to(wide)


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
    """Attention by the formula of the variant; lse of an empty row is -inf, its o is 0. Rounds as `plain` does."""
    formula, s = FORMULAS[name], _scaled(q, k)
    positions = torch.arange(formula.q_len, device=q.device)[:, None] + formula.q_offset
    keep, scores = formula.function(Grid(s=s, i=positions, j=torch.arange(formula.kv_len, device=q.device), own=own))
    keep = torch.ones_like(s, dtype=torch.bool) if keep is None else keep.expand(s.shape)
    top = scores.detach().masked_fill(~keep, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.where(keep, torch.exp(torch.where(keep, scores - top, 0.0)), 0.0)
    empty = ~keep.any(-1, keepdim=True)
    total = torch.where(empty, 1.0, weights.sum(-1, keepdim=True))
    lse = torch.where(empty, -torch.inf, total.log() + top)
    probs = (weights / total).to(q.dtype).to(s.dtype)
    return (probs @ v.to(s.dtype).repeat_interleave(HEADS // KV_HEADS, 1)).to(q.dtype), lse.squeeze(-1)


def _results(op: Callable[..., Any], inputs: list[Tensor], own: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """o, lse (its -inf as 0) and the gradient of everything that has one."""
    o, lse = op(*inputs, **own, **options)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    trained = {key: x for key, x in own.items() if isinstance(x, Tensor) and x.requires_grad}
    leaves = dict(zip("qkv", inputs, strict=True)) | trained
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=DEVICE).to(x.dtype) for x in (o, lse)]
    grads = torch.autograd.grad([o, lse], list(leaves.values()), weights)
    return {"o": o, "lse": lse} | {f"d{key}": grad for key, grad in zip(leaves, grads, strict=True)}


def _golden(name: str, inputs: list[Tensor], own: dict[str, Any]) -> dict[str, Tensor]:
    """The results of the reference in float64."""
    double = {key: _double(x) for key, x in own.items()}
    options = {"return_lse": True, "q_offset": FORMULAS[name].q_offset}
    return _results(_reference(name), [_double(x) for x in inputs], double, **options)


def _by_formula(name: str, inputs: list[Tensor], own: dict[str, Any]) -> dict[str, Tensor]:
    return _results(partial(_attend, name), inputs, own)


def _by_kernels(name: str, inputs: list[Tensor], own: dict[str, Any]) -> dict[str, Tensor]:
    formula = FORMULAS[name]
    block = (64, 64) if formula.kv_len > 100 else (32, 32 if INTERPRET else 16)
    return _results(_op(name), inputs, own, return_lse=True, q_offset=formula.q_offset, config=tiles(*block))


def test_the_rendered_library_is_clean() -> None:
    """In every mode, the linter finds nothing by the rules of this repository."""
    assert lint_problems(PACKAGE, settings=ROOT / "pyproject.toml") == ""


def test_every_variant_has_a_formula() -> None:
    assert sorted(importlib.import_module(PACKAGE).VARIANTS) == sorted(FORMULAS)


@with_names
def test_a_reference_is_its_formula(name: str) -> None:
    inputs, own = _inputs(name)
    want = _by_formula(name, [_double(x) for x in inputs], {key: _double(x) for key, x in own.items()})
    for result, got in _golden(name, inputs, own).items():
        error = (got - want[result]).norm() / want[result].norm()
        assert error < 1e-12, f"{result}: relative error {error:.1e}"


@with_names
def test_kernels_agree_with_their_reference(name: str) -> None:
    inputs, own = _inputs(name)
    got = _by_kernels(name, inputs, own)
    for result, wanted in _golden(name, inputs, own).items():
        assert not got[result].isnan().any(), result
        # float32 throughout: a few roundings of terms that may cancel.
        error = (got[result].double() - wanted).norm() / wanted.norm()
        assert error < 2e-6, f"{result}: relative error {error:.1e}"


@pytest.mark.covers(mode="segmented")
@pytest.mark.parametrize("name", [name for name in FORMULAS if FORMULAS[name].kv_len <= 100])  # others take long
def test_positions_in_any_order_are_right_or_refused(name: str) -> None:
    """Queries and keys in other orders, with their positions, give the results of the call in order. An op that reads
    something by row raises one error instead."""
    formula, spec = FORMULAS[name], _variants()[name]
    inputs, own = _inputs(name)
    queries, keys = torch.randperm(formula.q_len), torch.randperm(formula.kv_len)
    # If the lengths allow it, a query and the key of its row are one token: reads by row may then be in any order.
    keys = queries if (formula.q_len, formula.q_offset) == (formula.kv_len, 0) else keys
    positions = {"q_idx": queries + formula.q_offset, "kv_idx": keys}

    def moved(x: Any, dims: Sequence[Any]) -> Any:
        for axis, dim in enumerate(dims):
            if dim in positions:
                x = x.index_select(axis, positions[dim].to(DEVICE).clamp(max=x.shape[axis] - 1))
        return x

    dims = {each.name: each.dims for each in spec.tensors.values()}
    pairs = zip(inputs, (queries, keys, keys), strict=True)
    given = {f"{axis}_positions": positions[f"{axis}_idx"].expand(BATCH, -1).to(DEVICE).int() for axis in ("q", "kv")}
    with torch.no_grad():
        tensors = [x.index_select(2, order.to(DEVICE)) for x, order in pairs]
        moved_own = {key: moved(x, dims.get(key, ())) for key, x in own.items()}
        call = partial(_op(name), *tensors, **moved_own, **given, return_lse=True)
        if hasattr(importlib.import_module(f"{PACKAGE}.{name}.torch_op"), "BY_ROW") and keys is not queries:
            with pytest.raises(ValueError, match=f"^{name}: q_positions: expected positions that "):
                call()
            return
        try:
            o, lse = call()
        except ValueError as error:
            # A read of another token, a log-decay and dropout need rows in order.
            assert _variants()[name].decay or "rise by 1" in str(error) or "the rows themselves" in str(error)  # noqa: PT017
            return
        double = {key: _double(x) for key, x in own.items()}
        options = {"q_offset": formula.q_offset, "return_lse": True}
        want, want_lse = _reference(name)(*map(_double, inputs), **double, **options)
    torch.testing.assert_close(o.double(), want[:, :, queries], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse[:, :, queries].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@with_names
def test_kernels_in_16_bits(name: str) -> None:
    """The bound is the error of the formula in plain PyTorch in float16."""
    inputs, own = _inputs(name, torch.float16)
    got, plains = _by_kernels(name, inputs, own), _by_formula(name, inputs, own)
    for result, wanted in _golden(name, inputs, own).items():
        largest, mean = _errors(got[result], wanted)
        assert largest <= golden.BOUND[torch.float16], f"{result}: largest error {largest:.1e}"
        if result != "lse" and wanted.numel() >= FEWEST:
            ratio = MEAN_RATIO.get(result, OWN_RATIO)
            assert mean <= ratio * _errors(plains[result], wanted)[1], f"{result}: mean error {mean:.1e}"


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest and the mean error, relative to the largest element."""
    error = (got.double() - want).abs() / want.abs().max()
    return error.max().item(), error.mean().item()


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid_attention": lambda s: torch.sigmoid(s - 3.5),
    "relu_attention": torch.relu,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_activations_instead_of_the_softmax(name: str) -> None:
    """`o * exp(lse)` is the activation of the scores times v, with its gradients."""

    def unnormalised(q: Tensor, k: Tensor, v: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
        o, lse = _op(name)(q, k, v, **own, return_lse=True, config=tiles(32, 16))
        return o * lse.exp()[..., None], lse

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = WEIGHTS[name](_scaled(q, k))
        return weights @ v.repeat_interleave(HEADS // KV_HEADS, 1), weights.sum(-1).log()

    inputs, own = _inputs(name)
    want = _results(plain, [_double(x) for x in inputs], {})
    for result, got in _results(unnormalised, inputs, own).items():
        error = (got.double() - want[result]).norm() / want[result].norm()
        assert error < 2e-6, f"{result}: relative error {error:.1e}"
