"""The variants as mask_mod and score_mod of FlexAttention, their unmasked pairs, and their tensors in a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codegen.testing.golden import Inputs, Shape

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Scalars = Mapping[str, Any]

DOCUMENTS = 12
CANVAS, KERNEL = 128, 13
DISTANCES = 512


@dataclass(frozen=True, kw_only=True)
class Mods:
    """One variant. `pairs` gives the unmasked (query, key) pairs of one head of one batch row."""

    pairs: Callable[[int, Scalars], int]
    mask: Callable[[Inputs], MaskMod] | None = None
    score: Callable[[Inputs], ScoreMod] | None = None
    tensors: Callable[[Shape, str], dict[str, Tensor]] | None = None


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001 -- FlexAttention's names
    return q_idx >= kv_idx


def _window(size: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)


def _between(before: int, after: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= before) & (kv_idx - q_idx <= after)


def _chunks(size: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx // size == kv_idx // size)


def _prefix(length: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < length)


def _document(doc: Tensor) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (doc[b, q_idx] == doc[b, kv_idx])


def _streaming(size: int, sinks: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx < size) | (kv_idx < sinks))


def _padding(length: Tensor) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: kv_idx < length[b]


def _natten(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    reach = KERNEL // 2
    x = (q_idx % CANVAS).clamp(reach, CANVAS - 1 - reach)
    y = (q_idx // CANVAS).clamp(reach, CANVAS - 1 - reach)
    return ((x - kv_idx % CANVAS).abs() <= reach) & ((y - kv_idx // CANVAS).abs() <= reach)


def _softcap(cap: float) -> ScoreMod:
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def _alibi(inputs: Inputs) -> ScoreMod:
    slope = inputs.tensors["slope"]
    return lambda score, b, h, q_idx, kv_idx: score + slope[h] * (kv_idx - q_idx)


def _relative(inputs: Inputs) -> ScoreMod:
    bias = inputs.tensors["bias"]
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, (q_idx - kv_idx).clamp(0, DISTANCES - 1)]


def _lengths(seq: int) -> list[int]:
    """The lengths of twelve documents; the longest is about five times the shortest."""
    shares = [1 + (5 * i) % DOCUMENTS * 4 / DOCUMENTS for i in range(DOCUMENTS)]
    ends = [round(seq * sum(shares[: i + 1]) / sum(shares)) for i in range(DOCUMENTS)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _documents(shape: Shape, device: str) -> dict[str, Tensor]:
    lengths = torch.tensor(_lengths(shape.seq), device=device)
    doc = torch.repeat_interleave(torch.arange(DOCUMENTS, device=device, dtype=torch.int32), lengths)
    return {"doc": doc.repeat(shape.batch, 1)}


def _kept(seq: int) -> int:
    """The number of keys that are not padding: three quarters of all."""
    return max(1, 3 * seq // 4)


def _key_lengths(shape: Shape, device: str) -> dict[str, Tensor]:
    return {"length": torch.full((shape.batch,), _kept(shape.seq), dtype=torch.int32, device=device)}


def _biases(shape: Shape, device: str) -> dict[str, Tensor]:
    return {"bias": (0.1 * torch.randn(shape.heads, DISTANCES, device=device)).requires_grad_()}


def _windowed(seq: int, size: int) -> int:
    size = min(size, seq)
    return size * (size + 1) // 2 + (seq - size) * size


def _triangle(seq: int, scalars: Scalars) -> int:  # noqa: ARG001 -- the signature of `pairs`
    return _windowed(seq, seq)


def _band(size: int) -> Callable[[int, Scalars], int]:
    return lambda seq, scalars: _windowed(seq, size)


def _in_band(seq: int, scalars: Scalars) -> int:
    # The diagonal is in both parts.
    return _windowed(seq, int(scalars["before"]) + 1) + _windowed(seq, int(scalars["after"]) + 1) - seq


def _in_chunks(seq: int, scalars: Scalars) -> int:
    whole, rest = divmod(seq, int(scalars["size"]))
    return whole * _windowed(int(scalars["size"]), seq) + _windowed(rest, rest)


def _band_of(inputs: Inputs) -> MaskMod:
    return _between(int(inputs.scalars["before"]), int(inputs.scalars["after"]))


def _with_sinks(seq: int, scalars: Scalars) -> int:
    size, sinks = int(scalars["size"]), int(scalars["sinks"])
    return _windowed(seq, size) + sum(min(sinks, q - size + 1) for q in range(size, seq))


def _with_prefix(seq: int, scalars: Scalars) -> int:
    length = min(int(scalars["length"]), seq)
    return _triangle(seq, scalars) + length * (length - 1) // 2


MODS: dict[str, Mods] = {
    "full": Mods(pairs=lambda seq, scalars: seq * seq),
    "causal": Mods(pairs=_triangle, mask=lambda inputs: _causal),
    "causal_dropout": Mods(pairs=_triangle),
    "window": Mods(
        pairs=lambda seq, scalars: _windowed(seq, int(scalars["size"])),
        mask=lambda inputs: _window(int(inputs.scalars["size"])),
    ),
    "prefix_lm": Mods(pairs=_with_prefix, mask=lambda inputs: _prefix(int(inputs.scalars["length"]))),
    "streaming_llm": Mods(
        pairs=_with_sinks, mask=lambda inputs: _streaming(int(inputs.scalars["size"]), int(inputs.scalars["sinks"]))
    ),
    "padding": Mods(
        pairs=lambda seq, scalars: seq * _kept(seq),
        mask=lambda inputs: _padding(inputs.tensors["length"]),
        tensors=_key_lengths,
    ),
    "document": Mods(
        pairs=lambda seq, scalars: sum(_windowed(length, length) for length in _lengths(seq)),
        mask=lambda inputs: _document(inputs.tensors["doc"]),
        tensors=_documents,
    ),
    "natten": Mods(pairs=lambda seq, scalars: seq * KERNEL * KERNEL, mask=lambda inputs: _natten),
    "softcap": Mods(pairs=_triangle, mask=lambda inputs: _causal, score=lambda inputs: _softcap(20.0)),
    "gemma2_local": Mods(pairs=_band(4096), mask=lambda inputs: _window(4096), score=lambda inputs: _softcap(50.0)),
    "alibi": Mods(pairs=_triangle, mask=lambda inputs: _causal, score=_alibi),
    "gpt_oss": Mods(pairs=_band(128), mask=lambda inputs: _window(128)),
    "forgetting": Mods(pairs=_triangle, mask=lambda inputs: _causal),
    "chunked": Mods(pairs=_in_chunks, mask=lambda inputs: _chunks(int(inputs.scalars["size"]))),
    "band": Mods(pairs=_in_band, mask=_band_of),
    "band_softcap": Mods(pairs=_in_band, mask=_band_of, score=lambda inputs: _softcap(float(inputs.scalars["cap"]))),
    "band_sink": Mods(pairs=_in_band, mask=_band_of),
    "relative_bias": Mods(pairs=_triangle, mask=lambda inputs: _causal, score=_relative, tensors=_biases),
}
