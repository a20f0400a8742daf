"""Variants the library does not have: rendered on the spot, against their own reference in float64.

They cover what the library's variants leave untouched of the expression language: every way a gradient is gathered,
masks that only partly bound the blocks, derivatives that are infinite on masked scores.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .cases import DEVICE, tiles

pytest.importorskip("jinja2", reason="rendering needs jinja2")
pytest.importorskip("yaml", reason="rendering needs pyyaml")
pytest.importorskip("ruff", reason="rendering needs ruff, the formatter")

SPEC = """
variants:
  toeplitz: {mask: causal, score: "score + bias[h, q_idx - kv_idx]", tensors: {bias: {dims: [h, 100]}}}
  document: {mask: "causal and doc[b, q_idx] == doc[b, kv_idx]", tensors: {doc: {dims: [b, 100], dtype: int32}}}
  prefix_lm: {mask: causal or prefix(length), scalars: {length: int}}
  dilated: {mask: "causal and (q_idx - kv_idx) % 4 == 0"}
  strided: {mask: "2 * kv_idx <= q_idx and kv_idx >= b and q_idx != 7"}
  shifted: {mask: "q_idx + offset[b] >= kv_idx", tensors: {offset: {dims: [b], dtype: int32}}}
  products:
    mask: causal
    score: softcap(30.0) + key[h, kv_idx] * query[b, q_idx]
    tensors: {key: {dims: [h, n], grad: true}, query: {dims: [b, n], grad: true}}
  temper: {score: "score * t[hkv] + u", tensors: {t: {dims: [hkv], grad: true}, u: {dims: [], grad: true}}}
  poison: {mask: causal, score: "where(score > 0, log(score), 1 / score)"}
  dropout_bias:
    mask: q_idx != kv_idx
    score: score + bias[h, kv_idx]
    tensors: {bias: {dims: [h, n], grad: true}}
    dropout: true
  dropout_decay: {mask: causal, decay: true, dropout: true}
  dropout_sink: {mask: causal and window(40), score: softcap(20.0), sink: true, dropout: true}
  dropout_decay_sink: {mask: causal, score: "score * abs(score)", decay: true, sink: true, dropout: true}
  decay_sink: {mask: causal and window(40), score: "relu(score) - 0.1 * abs(score) ** 1.5", decay: true, sink: true}
"""
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 70, 90, 16
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "n": 100}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package."""
    from codegen import cli

    folder = tmp_path_factory.mktemp("own")
    (folder / "spec.yaml").write_text(SPEC)
    name = "own_variants"
    assert cli.main(["render", "--variants", str(folder / "spec.yaml"), "--out", str(folder / name)]) == 0
    sys.path.insert(0, str(folder))
    yield name
    sys.path.remove(str(folder))


def _arguments(spec: Any) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for tensor in spec.tensors.values():
        shape = [SIZES.get(dim, dim) for dim in tensor.dims]
        if tensor.dtype == "int32":
            own[tensor.name] = torch.randint(0, 3, shape, dtype=torch.int32, device=DEVICE)
        else:
            own[tensor.name] = torch.randn(shape, device=DEVICE, requires_grad=tensor.grad)
    own |= dict.fromkeys(spec.scalars, 17)
    own |= {"dropout_p": 0.3, "seed": 5} if spec.dropout else {}
    if spec.decay:
        own["g"] = (-0.2 * torch.rand(BATCH, 100, HEADS, device=DEVICE)).requires_grad_()
    if spec.sink:
        own["sink"] = torch.randn(HEADS, device=DEVICE, requires_grad=True)
    return own


def _results(op: Callable[..., Any], inputs: list[Tensor], own: dict[str, Any], **options: Any) -> list[Tensor]:
    """o, lse (its -inf as 0) and the gradient of everything that has one."""
    o, lse = op(*inputs, **own, return_lse=True, **options)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    wanted = [*inputs, *(x for x in own.values() if isinstance(x, Tensor) and x.requires_grad)]
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=DEVICE).to(x.dtype) for x in (o, lse)]
    return [o, lse, *torch.autograd.grad([o, lse], wanted, weights)]


def _double(x: Any) -> Any:
    return x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x


NAMES = (
    "toeplitz",
    "document",
    "prefix_lm",
    "dilated",
    "strided",
    "shifted",
    "products",
    "temper",
    "poison",
    "decay_sink",
    "dropout_bias",
    "dropout_decay",
    "dropout_sink",
    "dropout_decay_sink",
)


@pytest.mark.parametrize("q_offset", [0, 20])
@pytest.mark.parametrize("name", NAMES)
def test_own_variant(package: str, tmp_path: Path, name: str, q_offset: int) -> None:
    from codegen.load import load

    (tmp_path / "spec.yaml").write_text(SPEC)
    torch.manual_seed(0)
    own = _arguments(load(tmp_path / "spec.yaml").variants[name])
    shapes = ((HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN))
    inputs = [torch.randn(BATCH, *shape, DIM, device=DEVICE, requires_grad=True) for shape in shapes]
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    reference = importlib.import_module(f"{package}.{name}.torch_reference").reference
    got = _results(op, inputs, own, q_offset=q_offset, config=tiles(32, 16))
    want = _results(reference, [_double(x) for x in inputs], {n: _double(x) for n, x in own.items()}, q_offset=q_offset)
    for index, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        assert not mine.isnan().any(), index
        # float32 throughout: a few roundings of terms that may cancel.
        error = (mine.double() - wanted).norm() / wanted.norm()
        assert error < 2e-6, f"result {index}: relative error {error:.1e}"
