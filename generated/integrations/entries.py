# SPDX-License-Identifier: Apache-2.0
"""The entry of a spec that declares the variant of another library's call."""

from dataclasses import dataclass, field
from typing import Any

_KEEP = "keep[b, h, q_idx, kv_idx]"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What a call computes, apart from the values of q, k and v and the assignment of tokens to sequences.

    `before`, `after`: how many positions before and after its own a query sees; None without a bound. `chunk`: a query
    sees only its own chunk of this many positions. `images`: tokens of one image see each other whatever the bounds.
    `cap`: `cap * tanh(score / cap)` replaces the score. `alibi`: `slope * |distance|` is subtracted from the (capped)
    score; the string names the axes of the slopes, "h" or "b, h". `sink`: a logit per head in the softmax denominator.
    `bias`: added to scores, per batch row, head and pair. `mask`: a boolean of the same axes, True where a query sees a
    key. `dropout`: the probabilities have dropout.
    """

    before: int | None = None
    after: int | None = None
    chunk: int | None = None
    images: bool = False
    cap: float | None = None
    alibi: str | None = None
    sink: bool = False
    bias: bool = False
    mask: bool = False
    dropout: bool = False


def constant(number: Any) -> float:
    """A number as a constant of a trace. With `dynamic=True` torch.compile takes a float of a config for a symbol."""
    numerator, denominator = float(number).as_integer_ratio()
    return numerator / denominator


def entry(attention: Attention, *, constants: bool = False) -> str:
    """The lines of a spec that declare a variant for a call. With `constants`, bounds and caps are not scalars.

    >>> print(entry(Attention(before=127, after=0, sink=True, dropout=True)))
    variants:
      causal_window_sink_dropout:
        mask: "q_idx >= kv_idx and q_idx - kv_idx < size"
        sink: true
        dropout: true
        scalars: {size: {type: int, min: 1}}
    >>> print(entry(Attention(before=127, after=0, cap=50.0), constants=True))
    variants:
      causal_window_128_softcap_50:
        mask: "q_idx >= kv_idx and q_idx - kv_idx < 128"
        score: 50.0 * tanh(score / 50.0)
    """
    parts = _Parts(constants=constants)
    mask, score = _mask(attention, parts), _score(attention, parts)
    extras = [name for name in ("sink", "dropout") if getattr(attention, name)]
    lines = ["variants:", f"  {'_'.join([*(parts.names or ['full']), *extras])}:"]
    lines += [f'    mask: "{mask}"'] if mask else []
    lines += [f"    score: {score}"] if score != "score" else []
    lines += [f"    {name}: true" for name in extras]
    lines += [f"    scalars: {{{', '.join(parts.scalars)}}}"] if parts.scalars else []
    lines += [f"    tensors: {{{', '.join(parts.tensors)}}}"] if parts.tensors else []
    return "\n".join(lines)


@dataclass(kw_only=True)
class _Parts:
    """What formulas need beside themselves: the words of the variant's name, and declared scalars and tensors."""

    constants: bool
    names: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)

    def number(self, word: str, name: str, value: float, kind: str) -> str:
        """A number in a formula: a scalar of the op, or a constant, which then becomes part of the variant's name."""
        if self.constants:
            self.names.append(f"{word or name}_{value:g}".replace(".", "_").replace("+", "").replace("-", "_"))
            return str(value)
        self.names += [word] if word else []
        self.scalars.append(f"{name}: {{type: {kind}}}")
        return name

    def tensor(self, word: str, declaration: str) -> None:
        """Declare a tensor that a formula reads."""
        self.names.append(word)
        self.tensors.append(declaration)


def _mask(attention: Attention, parts: _Parts) -> str:
    """The formula of a mask; "" if every query sees every key."""
    found = []
    before, after = attention.before, attention.after
    if after == 0:
        parts.names.append("causal")
        found.append("q_idx >= kv_idx")
    elif after is not None:
        found.append(f"kv_idx - q_idx <= {parts.number('', 'after', after, 'int, min: 0')}")
    if before is not None:
        found.append(f"q_idx - kv_idx < {parts.number('window', 'size', before + 1, 'int, min: 1')}")
    if attention.chunk is not None:
        length = parts.number("chunk", "length", attention.chunk, "int, min: 1")
        found.append(f"q_idx // {length} == kv_idx // {length}")
    if attention.images:
        parts.tensor("images", "image: {dims: [b, kv_idx], dtype: int32}")
        same_image = "(image[b, q_idx] == image[b, kv_idx] and image[b, q_idx] >= 0)"
        found = [f"({' and '.join(found)}) or {same_image}"] if found else []
    if attention.mask:
        parts.tensor("mask", "keep: {dims: [b, h, q_idx, kv_idx], dtype: bool}")
        found = [*([f"({found[0]})"] if attention.images and found else found), _KEEP]
    return " and ".join(found)


def _score(attention: Attention, parts: _Parts) -> str:
    """The formula of a score."""
    score = "score"
    if attention.cap is not None:
        cap = parts.number("softcap", "cap", attention.cap, "float")
        score = f"{cap} * tanh(score / {cap})"
    if attention.alibi is not None:
        # The library's `alibi` is causal: an entry for keys on both sides needs another name.
        word = ("alibi" if attention.alibi == "h" else "alibi_rows") + ("" if attention.after == 0 else "_both_sides")
        parts.tensor(word, f"slope: {{dims: [{attention.alibi}]}}")
        score += f" - slope[{attention.alibi}] * abs(q_idx - kv_idx)"
    if attention.bias:
        parts.tensor("bias", "bias: {dims: [b, h, q_idx, kv_idx], grad: true}")
        score += " + bias[b, h, q_idx, kv_idx]"
    return score


def described(attention: Attention) -> str:
    """An attention in words, for errors."""
    parts = []
    if attention.before is not None or attention.after is not None:
        sides = (("before", attention.before), ("after", attention.after))
        bounds = (f"{'any' if reach is None else reach} {side}" for side, reach in sides)
        parts.append(f"keys in reach of a query ({', '.join(bounds)})")
    else:
        parts.append("no bound of positions")
    parts += [f"chunks of {attention.chunk}"] if attention.chunk is not None else []
    parts += [f"scores capped at {attention.cap}"] if attention.cap is not None else []
    parts += [f"ALiBi slopes [{attention.alibi}]"] if attention.alibi is not None else []
    words = {
        "images": "images that see themselves whole",
        "sink": "sinks",
        "bias": "a bias per pair",
        "mask": "a mask per pair",
        "dropout": "dropout",
    }
    parts += [text for name, text in words.items() if getattr(attention, name)]
    return ", ".join(parts)
