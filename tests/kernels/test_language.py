"""Every name and function of the expression language against formulas written by hand in float64: values and gradients
of the kernels, dense, packed and with lengths, and of the references of both frameworks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

from emulator import Timing
from tests.kernels.hopper.test_hopper_backward_emulated import emulate_backward
from tests.kernels.hopper.test_hopper_emulated import emulate
from tests.support.cases import DEVICE, INTERPRET, tiles
from tests.support.rendering import importable

SPEC = """
variants:
  exponentials:
    score: score * exp2(-abs(t[h])) + log2(1.5 + score * score) + log1p((t[h] * score) ** 2)
    tensors: &trained {t: {dims: [h], grad: true}}
  tangents: {mask: causal, score: "tan(0.2 * score) + tan(0.3 * t[h])", tensors: *trained}
  roundings:
    score: score + round(2 * score) * t[h] + floor(score) - 0.5 * ceil(t[h] * score) + round(kv_idx / 2)
    tensors: *trained
  bits:
    mask: (q_idx >> 2) >= (kv_idx & ~3) - 8 and (kv_idx ^ q_idx) != 5
    score: score + 0.1 * ((q_idx & 7) | (kv_idx << 1)) - 0.2 * (~kv_idx >> (1 + h)) + t[h] * (1 << (kv_idx & 3))
    tensors: *trained
  booleans: {mask: (q_idx < 20) == (kv_idx < n) and (causal ^ (h == 1)), scalars: {n: int}}
  infinite:
    mask: causal
    score: where(kv_idx % 3 == 0 or q_idx < 9, score * t[h], -inf) + 0.5 * where(kv_idx < 30, 0, -inf)
    tensors: *trained
  last_keys: {mask: causal and (kv_idx >= kv_len - n or kv_idx < 4), scalars: {n: int}}
  log_lengths:
    mask: q_idx < q_len - 1
    score: score * log(kv_len) / log(16) + t[h] * (kv_idx / kv_len - q_idx / q_len)
    tensors: *trained
  length_reads:
    mask: place[kv_len - 1 - kv_idx] < 3
    score: score + w[q_len - 1 - q_idx]
    tensors: {place: {dims: [n], dtype: int32}, w: {dims: [n], grad: true}}
  chosen_blocks:
    mask: causal and kv_idx // 8 in chosen[b, hkv, q_idx // 16]
    tensors: {chosen: {dims: [b, hkv, blocks, 3], dtype: int32}}
  avoided: {mask: "kv_idx not in (3, 5) and h not in barred", tensors: {barred: {dims: [2], dtype: int32}}}
  no_limits:
    mask: >-
      q_idx - kv_idx <= where(kv_idx % 16 == 0, far[h], 5) and (far[h] | kv_idx) > 5 and kv_idx // 4 >= least[h] // 3
    tensors: {far: {dims: [h], dtype: int32}, least: {dims: [h], dtype: int32}}
  least_dividends: {mask: (kv_idx - 2147483647) // 10 % 2 == 0}
  widths_by_head: {mask: causal and q_idx - kv_idx < 8 * (h + 1)}
  launch_options:
    mask: causal and q_idx - kv_idx < num_warps
    score: score * debug + 0.25 * (num_stages - maxnreg) * (kv_idx & 1)
    scalars: {num_warps: int, num_stages: int, maxnreg: int, debug: float}
  widths_by_length: {mask: causal and q_idx - kv_idx < kv_len - n, scalars: {n: int}}
  steps_by_distance:
    mask: causal
    score: score + floor(score) + w[q_idx - kv_idx]
    tensors: {w: {dims: [n], grad: true}}
"""
HEADS, KV_HEADS, DIM = 2, 1, 16
HOPPER_DIM = 48
"""The fewest columns that Hopper's kernels take."""

LENGTHS = ((30, 36), (17, 27))
"""Query rows and keys of two sequences."""


class At(NamedTuple):
    """One sequence: its scores, positions and lengths, shaped to broadcast."""

    score: Tensor
    b: int
    h: Tensor
    q: Tensor
    k: Tensor
    q_len: int
    kv_len: int


def _left_out(at: At) -> Tensor:
    return (at.q >= at.k) & ((at.k % 3 == 0) | (at.q < 9)) & (at.k < 30)


def _element(x: Tensor, index: Tensor) -> Tensor:
    return x[index.clamp(0, len(x) - 1)]


def _named(at: At, chosen: Tensor) -> Tensor:
    lists = chosen[at.b, at.h // (HEADS // KV_HEADS), at.q // 16]
    return (at.q >= at.k) & (at.k[..., None] // 8 == lists).any(-1)


KEPT: dict[str, Callable[..., Tensor]] = {
    "tangents": lambda at, t: at.q >= at.k,
    "bits": lambda at, t: (at.q // 4 >= at.k // 4 * 4 - 8) & (torch.bitwise_xor(at.k, at.q) != 5),
    "booleans": lambda at, n: ((at.q < 20) == (at.k < n)) & ((at.q >= at.k) != (at.h == 1)),
    "infinite": lambda at, t: _left_out(at),
    "last_keys": lambda at, n: (at.q >= at.k) & ((at.k >= at.kv_len - n) | (at.k < 4)),
    "log_lengths": lambda at, t: at.q < at.q_len - 1,
    "length_reads": lambda at, place, w: _element(place, at.kv_len - 1 - at.k) < 3,
    "chosen_blocks": _named,
    "no_limits": lambda at, far, least: (at.q - at.k <= 5) | (at.k % 16 == 0),
    "least_dividends": lambda at: (at.k - (2**31 - 1)) // 10 % 2 == 0,
    "widths_by_head": lambda at: (at.q >= at.k) & (at.q - at.k < 8 * (at.h + 1)),
    "launch_options": lambda at, num_warps, **_: (at.q >= at.k) & (at.q - at.k < num_warps),
    "widths_by_length": lambda at, n: (at.q >= at.k) & (at.q - at.k < at.kv_len - n),
    "steps_by_distance": lambda at, w: at.q >= at.k,
    "avoided": lambda at, barred: (at.k != 3) & (at.k != 5) & (at.h[..., None] != barred).all(-1),
}
SCORES: dict[str, Callable[..., Tensor]] = {
    "launch_options": lambda at, num_stages, maxnreg, debug, **_: (
        at.score * debug + 0.25 * (num_stages - maxnreg) * (at.k % 2).double()
    ),
    "exponentials": lambda at, t: (
        at.score * 2 ** -t[at.h].abs() + torch.log2(1.5 + at.score**2) + torch.log1p((t[at.h] * at.score) ** 2)
    ),
    "tangents": lambda at, t: torch.tan(0.2 * at.score) + torch.tan(0.3 * t[at.h]),
    "roundings": lambda at, t: (
        at.score
        + (2 * at.score).round() * t[at.h]
        + at.score.floor()
        - 0.5 * (t[at.h] * at.score).ceil()
        + (at.k.double() / 2).round()
    ),
    "bits": lambda at, t: (
        at.score
        + 0.1 * (at.q % 8 | 2 * at.k).double()
        - 0.2 * ((-1 - at.k) // 2 ** (1 + at.h)).double()
        + t[at.h] * 2 ** (at.k % 4)
    ),
    "infinite": lambda at, t: at.score * t[at.h],
    "log_lengths": lambda at, t: (
        at.score * math.log(at.kv_len) / math.log(16) + t[at.h] * (at.k.double() / at.kv_len - at.q.double() / at.q_len)
    ),
    "length_reads": lambda at, place, w: at.score + _element(w, at.q_len - 1 - at.q),
    "steps_by_distance": lambda at, w: at.score + at.score.floor() + _element(w, at.q - at.k),
}


def _arguments(name: str, sequences: int = 2) -> dict[str, Any]:
    """The variant's own arguments. No score lies at a step of a rounding function, where float errors would decide."""
    t = torch.tensor([0.7, -1.3], device=DEVICE)
    if name == "chosen_blocks":
        chosen = torch.randint(-1, 7, (sequences, KV_HEADS, 3, 3), device=DEVICE)
        return {"chosen": torch.where(torch.arange(3, device=DEVICE) == 0, 0, chosen).int()}
    if name == "length_reads":
        place = torch.randint(0, 5, (40,), dtype=torch.int32, device=DEVICE)
        return {"place": place, "w": torch.randn(40, device=DEVICE).requires_grad_()}
    if name == "no_limits":
        far = torch.tensor([2**31 - 1, 2**31 - 40], dtype=torch.int32, device=DEVICE)
        return {"far": far, "least": -1 - far}
    if name == "steps_by_distance":
        return {"w": torch.randn(40, device=DEVICE).requires_grad_()}
    if name == "avoided":
        return {"barred": torch.tensor([2, -7], dtype=torch.int32, device=DEVICE)}
    if name == "launch_options":
        return {"num_warps": 9, "num_stages": 5, "maxnreg": 7, "debug": 0.5}
    if name in ("widths_by_head", "least_dividends"):
        return {}
    return {"n": 13} if name in ("booleans", "last_keys", "widths_by_length") else {"t": t.requires_grad_()}


def _inputs(sequences: int, dim: int) -> list[Tensor]:
    """q, k and v of packed sequences, rounded to a coarse grid, so that sums of their products are exact."""
    q_total, kv_total = (sum(x) for x in zip(*LENGTHS[:sequences], strict=True))
    shapes = ((q_total, HEADS), (kv_total, KV_HEADS), (kv_total, KV_HEADS))
    return [(torch.randn(*shape, dim, device=DEVICE) * 8).round().div(8).requires_grad_() for shape in shapes]


def _golden(name: str, inputs: list[Tensor], own: dict[str, Any], sequences: int, scale: float) -> list[Tensor]:
    """o and lse of packed sequences, each on its own."""
    q, k, v = inputs
    found, q_start, kv_start = [], 0, 0
    for b, (q_len, kv_len) in enumerate(LENGTHS[:sequences]):
        keys, values = (
            x[kv_start : kv_start + kv_len].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v)
        )
        score = q[q_start : q_start + q_len].transpose(0, 1) @ keys.mT * scale
        rows, columns = torch.arange(q_len, device=DEVICE)[:, None], torch.arange(kv_len, device=DEVICE)[None, :]
        h = torch.arange(HEADS, device=DEVICE).view(-1, 1, 1)
        at = At(score, b, h, rows, columns, q_len, kv_len)
        score = SCORES[name](at, **own) if name in SCORES else score
        keep = KEPT[name](at, **own).expand(score.shape) if name in KEPT else torch.ones_like(score, dtype=torch.bool)
        score = score.masked_fill(~keep, -1e9)
        top = score.detach().amax(-1, keepdim=True)
        weights = torch.where(keep, (score - top).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        empty = total == 0
        o = (weights / torch.where(empty, 1.0, total)) @ values
        lse = torch.where(empty, 0.0, top + torch.where(empty, 1.0, total).log())[..., 0]
        found.append((o.transpose(0, 1), lse))
        q_start, kv_start = q_start + q_len, kv_start + kv_len
    return [torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)]


def _gradients(results: list[Tensor], inputs: list[Tensor], own: dict[str, Any]) -> list[Tensor]:
    """o, lse (its -inf as 0) and the gradient of everything that has one."""
    o, lse = results
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    wanted = [*inputs, *(x for x in own.values() if isinstance(x, Tensor) and x.requires_grad)]
    weights = [(torch.arange(x.numel(), device=DEVICE) % 11 - 5).view(x.shape).to(x.dtype) for x in (o, lse)]
    return [o, lse, *torch.autograd.grad([o, lse], wanted, weights)]


def _double(x: Any) -> Any:
    return x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x


def _agree(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for index, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        error = (mine.double() - wanted).norm() / (wanted.norm() if wanted.any() else 1.0)
        assert error < tolerance, f"result {index}: relative error {error:.1e}"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package."""
    folder = tmp_path_factory.mktemp("language") / "tests"
    with importable(folder, "language_variants", SPEC) as package:
        yield package.name


NAMES = sorted({*KEPT, *SCORES})
OF_SEQUENCES = ("last_keys", "log_lengths", "length_reads", "chosen_blocks", "widths_by_length")
"""Variants whose value depends on the sequence, by its lengths or its number."""

FLOAT32 = 32 * torch.finfo(torch.float32).eps
"""Scores reach 32, so an error in their last bit changes a probability by this share."""

SCALE = 0.25
"""A power of two, so that scores stay exact."""


def _case(name: str, sequences: int, dim: int = DIM) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Inputs, the variant's own arguments, and the expected results."""
    torch.manual_seed(3)
    inputs, own = _inputs(sequences, dim), _arguments(name, sequences)
    doubles, own_doubles = [_double(x) for x in inputs], {n: _double(x) for n, x in own.items()}
    want = _gradients(_golden(name, doubles, own_doubles, sequences, SCALE), doubles, own_doubles)
    return inputs, own, want


def _cu_seqlens() -> dict[str, Tensor]:
    sums = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in zip(*LENGTHS, strict=True)]
    names = ("cu_seqlens_q", "cu_seqlens_k")
    return {n: torch.tensor(x, dtype=torch.int32, device=DEVICE) for n, x in zip(names, sums, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_dense_call(package: str, name: str) -> None:
    inputs, own, want = _case(name, 1)
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    o, lse = op(*(x[None] for x in inputs), **own, scale=SCALE, layout="bshd", return_lse=True, config=tiles(32, 16))
    _agree(_gradients([o[0], lse[0]], inputs, own), want, FLOAT32)


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_packed_call(package: str, name: str) -> None:
    inputs, own, want = _case(name, 2)
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    results = op(*inputs, **own, scale=SCALE, return_lse=True, config=tiles(16, 16), **_cu_seqlens())
    _agree(_gradients(list(results), inputs, own), want, FLOAT32)


@pytest.mark.parametrize("name", NAMES)
def test_torch_references(package: str, name: str) -> None:
    inputs, own, want = _case(name, 2)
    inputs, own = [_double(x) for x in inputs], {n: _double(x) for n, x in own.items()}
    reference = importlib.import_module(f"{package}.{name}.torch_reference").packed_reference
    results = reference(*inputs, **own, scale=SCALE, return_lse=True, **_cu_seqlens())
    _agree(_gradients(list(results), inputs, own), want, 1e-12)


@pytest.mark.parametrize(
    ("name", "dense"), [*((name, False) for name in NAMES), *((name, True) for name in OF_SEQUENCES)]
)
def test_jax_references(package: str, name: str, dense: bool) -> None:
    inputs, own, want = _case(name, 1 if dense else 2)
    module = importlib.import_module(f"{package}.{name}.jax_reference")
    arrays = {n: jnp.asarray(x.detach().cpu().numpy()) if isinstance(x, Tensor) else x for n, x in own.items()}
    qkv = [jnp.asarray(x.detach().cpu().numpy()) for x in inputs]
    trained = [n for n, x in own.items() if isinstance(x, Tensor) and x.requires_grad]
    options: dict[str, Any] = {"scale": SCALE, "return_lse": True}
    sequences = {n: jnp.asarray(x.cpu().numpy()) for n, x in _cu_seqlens().items()}

    def call(qkv: list[jax.Array], own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if dense:
            o, lse = module.reference(*(x[None] for x in qkv), **arrays | own, **options)
            o, lse = o[0], lse[0]
        else:
            o, lse = module.packed_reference(*qkv, **arrays | own, **options, **sequences)
        return o, jnp.where(jnp.isfinite(lse), lse, 0.0)

    results, pullback = jax.vjp(call, qkv, {n: arrays[n] for n in trained})
    weights = tuple((jnp.arange(x.size) % 11 - 5.0).reshape(x.shape).astype(x.dtype) for x in results)
    (dq, dk, dv), downs = pullback(weights)
    got = [torch.tensor(x.tolist()) for x in (*results, dq, dk, dv, *(downs[n] for n in trained))]
    _agree(got, [x.cpu() for x in want], FLOAT32)


@pytest.mark.parametrize("framework", ["kernels", "hopper", "reference", "jax"])
@pytest.mark.parametrize("name", ["last_keys", "log_lengths", "length_reads"])
def test_lengths_of_rows(monkeypatch: pytest.MonkeyPatch, package: str, name: str, framework: str) -> None:
    """With `kv_lengths`, `kv_len` is the length of the batch row, and `q_len` the number of query rows."""
    if framework == "reference" and INTERPRET:
        op = importlib.import_module(f"{package}.{name}.torch_reference").reference
    else:
        op = getattr(importlib.import_module(f"{package}.{'jax' if framework == 'jax' else 'torch'}"), name)
    torch.manual_seed(5)
    own = _arguments(name)
    q_len, lengths, longest = 30, (19, 36), 36
    dim = HOPPER_DIM if framework == "hopper" else DIM
    q = torch.randn(2, q_len, HEADS, dim, device=DEVICE)
    k, v = torch.randn(2, 2, longest, KV_HEADS, dim, device=DEVICE).unbind()
    given: dict[str, Any] = {**own, "kv_lengths": torch.tensor(lengths, dtype=torch.int32, device=DEVICE)}
    options = {"scale": SCALE, "return_lse": True, "layout": "bshd"}
    if framework == "jax":
        given = {n: jnp.asarray(x.detach().cpu().numpy()) if isinstance(x, Tensor) else x for n, x in given.items()}
        o, lse = op(*(jnp.asarray(x.cpu().numpy()) for x in (q, k, v)), **given, **options)
        o, lse = torch.tensor(o.tolist()), torch.tensor(lse.tolist())
    elif framework == "reference" and INTERPRET:
        ids = torch.zeros(2, q_len, dtype=torch.int32)
        key_ids = torch.where(torch.arange(longest) < given["kv_lengths"][:, None], 0, -1)
        o, lse = op(q, k, v, **given, **options, q_segment_ids=ids, kv_segment_ids=key_ids)
    elif framework == "hopper" and INTERPRET:
        emulate(monkeypatch, name, Timing.LATE_PRODUCTS, package=package, mode="segmented")
        q, k, v = q.half(), k.half(), v.half()
        o, lse = op(q, k, v, **given, **options, family="hopper")
    else:
        o, lse = op(q, k, v, **given, **options)
    close: dict[str, Any] = dict.fromkeys(("rtol", "atol"), 2e-3 if framework == "hopper" else 3e-5)
    op = importlib.import_module(f"{package}.{name}.torch_reference").reference
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        o_row, lse_row = op(q[row].double(), k[row, :length].double(), v[row, :length].double(), **own, **options)
        torch.testing.assert_close(o[b].double().cpu(), o_row[0].double().cpu(), **close)
        torch.testing.assert_close(lse[b].double().cpu(), lse_row[0].double().cpu(), **close)


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the kernels themselves run")
# Packed calls of the other names: their values do not depend on the sequence, so both modes compute them alike.
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *(pytest.param(name, False, id=f"{name}-dense") for name in NAMES),
        *(
            pytest.param(name, True, id=f"{name}-packed", marks=() if name in OF_SEQUENCES else pytest.mark.full)
            for name in NAMES
        ),
    ],
)
def test_hopper_kernels(monkeypatch: pytest.MonkeyPatch, package: str, name: str, packed: bool) -> None:
    """The same names and functions in Gluon, with 16-bit inputs: products are exact, weights are rounded to 11 bits."""
    mode = "packed" if packed else ""
    backward = emulate_backward(monkeypatch, name, Timing.LATE_PRODUCTS, package=package, mode=mode)
    inputs, own, want = _case(name, 2 if packed else 1, HOPPER_DIM)
    inputs = [x.detach().half().requires_grad_() for x in inputs]
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    options = {"scale": SCALE, "return_lse": True, "family": "hopper", "deterministic": False}
    if packed:
        results = list(op(*inputs, **own, **options, **_cu_seqlens()))
    else:
        o, lse = op(*(x[None] for x in inputs), **own, **options, layout="bshd")
        results = [o[0], lse[0]]
    # The gradient of `t` is a sum of terms some ten times as large.
    _agree(_gradients(results, inputs, own), want, 16 * torch.finfo(torch.float16).eps)
    assert backward.launches == 1
