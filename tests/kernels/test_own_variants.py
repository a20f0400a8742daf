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
masks:
  even_distance(period): (q_idx - kv_idx) % period == 0
  sparse(period): causal and even_distance(2 * period)
scores:
  bucket(n): n if n < 16 else min(16 + int(log(n / 16) / log(8) * 16), 31)
  bits(x): x % 2 + 4 * (x // 2 % 2) + 16 * (x // 4 % 2)
  morton(i): 2 * bits(i // 8) + bits(i % 8)
  kept(factor): where(sparse(factor), score, factor * score)
variants:
  nested: {mask: causal and not sparse(3), score: kept(2) - 0.5}
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
  t5:
    score: "score + bias[h, bucket(max(q_idx - kv_idx, 0))]"
    tensors: {bias: {dims: [h, 32]}}
  mapped:
    mask: seen[b, kv_idx] | (kv_idx < 3)
    score: score + bias[h, dist[b, q_idx, kv_idx]] * where(seen[b, q_idx], 1, 0.5)
    tensors:
      bias: {dims: [h, n]}
      dist: {dims: [b, q_idx, kv_idx], dtype: int64, example: "min(abs(q_idx - kv_idx), 9)"}
      seen: {dims: [b, 100], dtype: bool, example: (i1 + b) % 3 != 0}
  both_heads:
    mask: causal & ~(h == 1 and hkv == 0 and q_idx - kv_idx == 2)
    score: (score if h % 2 == 0 else 0.5 * score) * temper[hkv] + slope[h] * (kv_idx - q_idx) / 64
    tensors: {temper: {dims: [hkv], grad: true}, slope: {dims: [h], grad: true}}
  grid:
    mask: 0 <= q_idx % width - kv_idx % width < 5
    score: score - cap * sqrt((q_idx % width - kv_idx % width) ** 2 + (q_idx // width - kv_idx // width) ** 2 + 0.25)
    scalars: {width: {type: int, min: 1, example: 8}, cap: {type: float, min: 0, max: 1, example: 0.1}}
  morton: {mask: morton(q_idx) >= morton(kv_idx)}
  numbers:
    mask: "causal and not cap > 3.0"
    score: >-
      where(size > 3, score, cap * score) + sqrt(cap) * min(score, cap) * (1 / size) + max(abs(size), 2) * bias[h, size]
      - clamp(score, -cap, cap) * bias[h, 2] + log(4.0) * (1.0 if cap < 0.5 and not size == 4 else int(cap * 7.5) / 2)
    tensors: {bias: {dims: [h, 4]}}
    scalars: {size: {type: int, example: 5}, cap: {type: float, example: 0.7}}
  by_head: {mask: h < 3 or size < 0, scalars: {size: int}}
  by_scalar: {mask: size > 3, scalars: {size: int}}
  by_query: {mask: q_idx < 60}
  decay_sink: {mask: causal and window(40), score: "relu(score) - 0.1 * abs(score) ** 1.5", decay: true, sink: true}
"""
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 70, 90, 16
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "q_idx": 100, "kv_idx": 100, "n": 100}


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
        dtype = getattr(torch, tensor.dtype)
        if not dtype.is_floating_point:
            own[tensor.name] = torch.randint(0, 3, shape, device=DEVICE).to(dtype)
        else:
            own[tensor.name] = torch.randn(shape, device=DEVICE, requires_grad=tensor.grad)
    own |= {name: 17 if s.example is None else s.example for name, s in spec.scalars.items()}
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
    "nested",
    "toeplitz",
    "document",
    "prefix_lm",
    "dilated",
    "strided",
    "shifted",
    "products",
    "temper",
    "poison",
    "t5",
    "mapped",
    "both_heads",
    "grid",
    "morton",
    "numbers",
    "by_head",
    "by_scalar",
    "by_query",
    "decay_sink",
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
