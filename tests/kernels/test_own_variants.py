"""Variants that the library does not have, rendered for the tests, against their own reference in float64.

They cover the parts of the expression language that the library's variants do not use: every way of summing a gradient,
masks that bound the blocks only in part, derivatives that are infinite on masked scores.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from codegen.testing import golden, golden_jax
from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, INTERPRET, tiles
from tests.support.rendering import importable

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
  padded:
    mask: causal and ids[b, q_idx] == ids[b, kv_idx] and ids[b, kv_idx] != 1
    tensors: {ids: {dims: [b, 100], dtype: int64}}
  limits: {mask: "kv_idx < 20 * limit[b, h, q_idx]", tensors: {limit: {dims: [b, h, 100], dtype: int32}}}
  ordered: {mask: "time[hkv, kv_idx] <= time[hkv, q_idx]", tensors: {time: {dims: [hkv, 100]}}}
  chunks: {mask: causal and q_idx // size == kv_idx // size, scalars: {size: int}}
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
  t5_trained:
    mask: q_idx - kv_idx < 50
    score: "score + bias[h, bucket(max(q_idx - kv_idx, 0))] - far[b, kv_idx - q_idx + 70]"
    tensors: {bias: {dims: [h, 32], grad: true}, far: {dims: [b, 90], grad: true}}
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
  by_level: {mask: "level[h] >= 0.3 or cap < 0.5", tensors: {level: {dims: [h]}}, scalars: {cap: float}}
  by_choice:
    mask: (kv_idx % 3 != 0 if wide else level[h] < 0.3) or q_idx < 2
    tensors: {level: {dims: [h]}, wide: {dims: [], dtype: bool}}
  union: {mask: "q_idx >= kv_idx - 9 and (kv_idx >= 40 or kv_idx % 4 == 0)"}
  apart: {mask: "(kv_idx >= q_idx + 300 and (kv_idx < 3 or q_idx < 40)) or kv_idx >= first", scalars: {first: int}}
  shared_heads:
    score: score * t[hkv, h // 2] + bias[h % 3, length - 16] + bias[2, b]
    scalars: {length: int}
    tensors: {t: {dims: [hkv, 2], grad: true}, bias: {dims: [3, 2], grad: true}}
  rows:
    mask: q_idx + 30 >= kv_idx
    score: score * place[b, q_idx] + bias[q_idx // 16] * row[offset[q_idx], h]
    tensors:
      place: {dims: [b, n], grad: true}
      bias: {dims: [7], grad: true}
      row: {dims: [3, h], grad: true}
      offset: {dims: [n], dtype: int32}
  keys:
    mask: causal
    score: score + table[b, kv_idx % 7] * key[kv_idx, hkv]
    tensors: {table: {dims: [b, 7], grad: true}, key: {dims: [n, hkv], grad: true}}
  pairs:
    mask: q_idx + 20 >= kv_idx
    score: softcap(20.0) * bias[b, h, q_idx, kv_idx] + other[kv_idx, h, b, q_idx]
    tensors: {bias: {dims: [b, h, n, n], grad: true}, other: {dims: [n, h, b, n], grad: true}}
  relative:
    mask: causal
    score: score + bias[h, q_idx - kv_idx + 3] + far[2 * kv_idx - 2 * q_idx + shift[b] + 40]
    tensors: {bias: {dims: [h, 80], grad: true}, far: {dims: [64], grad: true}, shift: {dims: [b], dtype: int32}}
  clamped:
    mask: window(60)
    score: score * bias[clamp(q_idx - kv_idx + 5, 0, 10)]
    tensors: {bias: {dims: [11], grad: true}}
  buckets:
    score: score + bias[group_of[abs(q_idx - kv_idx)], h] + far[b, q_idx // 1000, (q_idx - kv_idx) // 8 + 8]
    tensors:
      bias: {dims: [3, h], grad: true}
      group_of: {dims: [n], dtype: int32}
      far: {dims: [b, 1, 16], grad: true}
  distances:
    mask: q_idx + 30 >= kv_idx
    score: score + bias[h, dist[b, q_idx, kv_idx]] + both[h, q_idx, kv_idx] * anti[q_idx + kv_idx, b]
    tensors:
      bias: {dims: [h, 3], grad: true}
      dist: {dims: [b, n, n], dtype: int32}
      both: {dims: [h, n, n], grad: true}
      anti: {dims: [130, b], grad: true}
  place_of_scalar:
    score: score + bias[h, int(log(cap))]
    tensors: {bias: {dims: [h, 4], grad: true}}
    scalars: {cap: {type: float, example: 9.0}}
  many_reads:
    mask: causal
    score: >-
      score * t[h, q_idx] + t[h, kv_idx] * u + t[h, q_idx // 2] + t[0, 3] * t[h, b] + t[h, q_idx - kv_idx]
      + t[b, (q_idx * kv_idx) % 5] + t[h, min(kv_idx, 20)]
    tensors: {t: {dims: [h, n], grad: true}, u: {dims: [], grad: true}}
  poles:
    mask: causal
    score: score + (bias[h, q_idx - kv_idx] + t[q_idx, kv_idx] + u[b, kv_idx]) / (q_idx - kv_idx + 1)
    tensors: {bias: {dims: [h, n], grad: true}, t: {dims: [n, n], grad: true}, u: {dims: [b, n], grad: true}}
  # The same wherever the mask keeps a pair: autograd of `poles` itself has 0 / 0 on the masked ones.
  no_poles:
    mask: causal
    score: score + (bias[h, q_idx - kv_idx] + t[q_idx, kv_idx] + u[b, kv_idx]) / (max(q_idx - kv_idx, 0) + 1)
    tensors: {bias: {dims: [h, n], grad: true}, t: {dims: [n, n], grad: true}, u: {dims: [b, n], grad: true}}
  positions: {mask: causal, score: "bias[h, q_idx - kv_idx]", tensors: {bias: {dims: [h, n], grad: true}}}
  uniform: {mask: causal, score: "0.5"}
  condition:
    score: "(score if t[h] > 0 else 0.5 * score) + where(t[b] > 0, 1, 2) * (q_idx % 3) * u[hkv]"
    tensors: {t: {dims: [n]}, u: {dims: [hkv], grad: true}}
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
pytestmark = pytest.mark.covers(variant="name", mode="dense", family="portable", dtype="float32")

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 50, 70, 16
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "q_idx": 100, "kv_idx": 100, "n": 100}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package."""
    folder = tmp_path_factory.mktemp("own") / "tests"  # as that of the library
    with importable(folder, "own_variants", SPEC) as package:
        yield package.name


@cache
def _variants() -> Any:
    from codegen.load.spec_file import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(SPEC)
        return load(path).variants


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
    "nested",
    "toeplitz",
    "document",
    "padded",
    "limits",
    "ordered",
    "chunks",
    "prefix_lm",
    "dilated",
    "strided",
    "shifted",
    "products",
    "temper",
    "poison",
    "t5",
    "t5_trained",
    "mapped",
    "both_heads",
    "grid",
    "morton",
    "numbers",
    "by_head",
    "by_scalar",
    "by_query",
    "by_level",
    "by_choice",
    "union",
    "apart",
    "shared_heads",
    "rows",
    "keys",
    "pairs",
    "relative",
    "clamped",
    "buckets",
    "distances",
    "many_reads",
    "poles",
    "condition",
    "positions",
    "uniform",
    "decay_sink",
    "dropout_bias",
    "dropout_decay",
    "dropout_sink",
    "dropout_decay_sink",
)
REFERENCES = {"poles": "no_poles"}


def check(package: str, name: str, block_m: int, block_n: int, q_offset: int | list[int]) -> None:
    """Every result of a call against the reference."""
    torch.manual_seed(0)
    own = _arguments(_variants()[name])
    shapes = ((HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN))
    inputs = [torch.randn(BATCH, *shape, DIM, device=DEVICE, requires_grad=True) for shape in shapes]
    offset = q_offset if isinstance(q_offset, int) else torch.tensor(q_offset, dtype=torch.int32, device=DEVICE)
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    reference = importlib.import_module(f"{package}.{REFERENCES.get(name, name)}.torch_reference").reference
    got = _results(op, inputs, own, q_offset=offset, config=tiles(block_m, block_n))
    want = _results(reference, [_double(x) for x in inputs], {n: _double(x) for n, x in own.items()}, q_offset=offset)
    for index, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        assert not mine.isnan().any(), index
        # float32 throughout: a few roundings of terms that may cancel. If pairs are added one by one, in any order,
        # the rounding error of the sum is a random walk with a step for each term.
        size = wanted.norm() if wanted.any() else 1.0
        error = (mine.double() - wanted).norm() / size
        terms = BATCH * HEADS * Q_LEN * KV_LEN / max(wanted.numel(), 1) if index >= 5 else 1
        bound = max(2e-6, torch.finfo(torch.float32).eps * math.sqrt(terms))
        assert error < bound, f"result {index}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("name", "q_offset"), [*((name, 20) for name in NAMES), *((name, 0) for name in NAMES[:: 3 if INTERPRET else 1])]
)
def test_own_variant(package: str, name: str, q_offset: int) -> None:
    check(package, name, 32, 32 if INTERPRET and q_offset else 16, q_offset)


# Variants whose JAX op differs from the torch op: in gradients from sums, their destinations, and scalars in them.
JAX_NAMES = [
    name
    for name in NAMES
    if not INTERPRET
    or name
    in {"grid", "numbers", "by_scalar", "shared_heads", "rows", "keys", "pairs", "buckets", "padded", "t5_trained"}
]


@pytest.mark.parametrize("q_offset", [-15] if INTERPRET else [20, -15])
@pytest.mark.parametrize("name", JAX_NAMES)
def test_own_variant_in_jax(package: str, name: str, q_offset: int) -> None:
    torch.manual_seed(0)
    own = _arguments(_variants()[name])
    shapes = ((HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN))
    q, k, v = (torch.randn(BATCH, *shape, DIM, device=DEVICE, requires_grad=True) for shape in shapes)
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        do=torch.randn_like(q),
        dlse=torch.randn(BATCH, HEADS, Q_LEN, device=DEVICE),
        tensors={n: x for n, x in own.items() if isinstance(x, Tensor)},
        scalars={n: x for n, x in own.items() if not isinstance(x, Tensor)},
    )
    options = {"q_offset": q_offset, "config": tiles(32, 32 if INTERPRET else 16)}
    want = golden.evaluate(getattr(importlib.import_module(f"{package}.torch"), name), inputs, **options)
    got = golden_jax.evaluate(name, inputs, package=package, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (32, 32), (64, 16)])
@pytest.mark.parametrize("name", ["relative", "clamped", "t5_trained"])
def test_diagonals_of_every_tile(package: str, name: str, block_m: int, block_n: int) -> None:
    check(package, name, block_m, block_n, 3)


@pytest.mark.parametrize("name", ["rows", "pairs", "clamped", "distances"])
def test_gradients_of_clamped_reads(package: str, name: str) -> None:
    """Rows before the first or after the last element of a tensor read that element, and add to its gradient."""
    check(package, name, 32, 32, [-15, 70])


@pytest.mark.parametrize("name", ["shared_heads", "rows", "keys", "pairs", "relative", "distances", "many_reads"])
def test_gradients_that_a_call_does_not_want(package: str, name: str) -> None:
    """Only one tensor is trained: its gradient is the same as with others, and the others' gradients are None."""
    own = _arguments(_variants()[name])
    inputs = [torch.randn(BATCH, heads, 20, DIM, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    trained = [n for n, x in own.items() if isinstance(x, Tensor) and x.requires_grad]
    together = torch.autograd.grad(op(*inputs, **own).square().sum(), [own[n] for n in trained])
    for n, want in zip(trained, together, strict=True):
        alone = {m: x.detach().requires_grad_(m == n) if m in trained else x for m, x in own.items()}
        op(*inputs, **alone).square().sum().backward()
        torch.testing.assert_close(alone[n].grad, want)
        assert all(x.grad is None for m, x in alone.items() if isinstance(x, Tensor) and m != n)


def test_a_span_that_32_bits_cannot_hold(package: str) -> None:
    """Offsets of tiles are 32-bit: a stride too large for them is refused by name."""
    own = _arguments(_variants()["clamped"])
    q = torch.randn(1, 1, 16, DIM, device="meta")
    own["bias"] = torch.empty(1, device="meta").as_strided((11,), (2**28,))
    module = importlib.import_module(f"{package}.clamped.torch_op")
    message = (
        r"^clamped: bias: expected \(size - 1\) \* stride of axis 0 below 2\*\*31, got size 11 and stride 268435456$"
    )
    # Meta tensors need no memory, but autocast does not support them.
    with mock.patch.object(module, "autocast_inputs", lambda *x: x), pytest.raises(ValueError, match=message):
        module.clamped(q, q, q, **own)


@pytest.mark.parametrize("name", ["relative", "pairs", "many_reads"])
def test_gradients_of_the_registered_operator(package: str, name: str) -> None:
    """Fake tensors in traced calls have the shapes of the kernels' results, with and without each gradient."""
    kernels = importlib.import_module(f"{package}.{name}.torch_op").DENSE
    options = importlib.import_module(f"{package}._runtime.core.options").NO_OPTIONS
    own = _arguments(_variants()[name])
    trained = [n for n, x in own.items() if x.requires_grad]
    q = torch.randn(BATCH, HEADS, 20, DIM, device=DEVICE)
    o, lse = kernels.forward(q, q, q, *own.values(), None, 0, 1.0, options)
    for wanted in ([True] * len(trained), [False] * len(trained)):
        arguments = (o, None, q, q, q, *own.values(), None, o, lse, 0, 1.0, options, *wanted)
        real, fake = kernels.backward_op(*arguments), kernels.fake_backward(*arguments)
        assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]
