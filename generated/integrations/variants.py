# SPDX-License-Identifier: Apache-2.0
"""Finds the variant of this package that computes a call of another library, by its mask and score, not by its name.

A package may be rendered from any spec. `find` reads the mask and score of each variant in the manifest. Of the
variants that compute the call it takes the one with the fewest scalars, to prefer compiled-in constants.

>>> find(Attention(after=0)).name
'causal'
>>> found = find(Attention(before=4095, after=0))
>>> found.name, found.scalars
('window', {'size': 4096})
>>> find(Attention(before=4095, after=0, cap=50.0)).name
'gemma2_local'
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .._runtime.core.checks import INT_LIMIT
from .entries import Attention, described, entry

BEYOND = INT_LIMIT - 1
"""More positions than any sequence has: as a bound, it excludes no key."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A variant, its scalars by name, and the names of the tensors that hold images, biases, slopes and masks.

    `sides`: the names of the scalars that set the bounds `before` and `after`, and nothing else, so that a call may
    move them. A bound that is compiled in is not among them.
    """

    name: str
    scalars: Mapping[str, int | float]
    image: str | None = None
    bias: str | None = None
    slope: str | None = None
    mask: str | None = None
    sides: Mapping[str, str] = field(default_factory=dict)


class NotRenderedError(NotImplementedError):
    """The package has no variant for a call. The message has the entry to add."""


@cache
def find(attention: Attention) -> Found:
    """The variant for a call.

    Raises:
        NotRenderedError: there is none; the message has the entry that serves it.
    """
    candidates = (_matched(meaning, attention) for meaning in _meanings())
    matches = [found for found in candidates if found is not None]
    if not matches:
        raise NotRenderedError(
            f"this package has no variant for attention with {described(attention)}. "
            f"Add an entry to the spec and render again:\n\n{entry(attention)}"
        )
    return min(matches, key=lambda found: len(found.scalars))


# ------------------------------------------------------------------------------------------------ what variants compute


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A number of a mask or a score: a constant, or the name of a scalar, to which `more` is added."""

    value: int | float | str
    more: int = 0


@dataclass(kw_only=True)
class _Meaning:
    """What a variant computes, in the terms of `Attention`.

    `behind`: slopes times `kv_idx - q_idx` are added, which is ALiBi if no query sees a key after its own position.
    """

    name: str
    bounds: dict[str, list[_Bound]] = field(default_factory=dict)
    image: str | None = None
    bias: str | None = None
    slope: str | None = None
    alibi: str | None = None
    behind: bool = False
    mask: str | None = None
    sink: bool = False
    dropout: bool = False
    scalars: frozenset[str] = frozenset()


def _matched(meaning: _Meaning, wanted: Attention) -> Found | None:
    """The variant, with the values of its scalars for a call; None if it does not compute the call."""
    same = (meaning.image is not None, meaning.bias is not None, meaning.mask is not None, meaning.sink)
    if same != (wanted.images, wanted.bias, wanted.mask, wanted.sink) or meaning.dropout != wanted.dropout:
        return None
    if meaning.alibi != wanted.alibi or (meaning.behind and wanted.after != 0):
        return None
    scalars: dict[str, int | float] = {}
    for name in ("before", "after", "chunk", "cap"):
        value = getattr(wanted, name)
        bounds = meaning.bounds.get(name, [])
        if not bounds and value is not None:
            return None
        for bound in bounds:
            if value is None and (name not in ("before", "after") or not isinstance(bound.value, str)):
                return None
            needed = BEYOND if value is None else value - bound.more
            if not isinstance(bound.value, str):
                if bound.value != needed:
                    return None
            elif scalars.setdefault(bound.value, needed) != needed:
                return None
    if scalars.keys() != meaning.scalars:
        return None
    tensors = {"image": meaning.image, "bias": meaning.bias, "slope": meaning.slope, "mask": meaning.mask}
    return Found(name=meaning.name, scalars=scalars, sides=_sides(meaning), **tensors)


def _sides(meaning: _Meaning) -> dict[str, str]:
    """As in `Found`."""
    uses = [bound.value for bounds in meaning.bounds.values() for bound in bounds]
    sides = {}
    for name in ("before", "after"):
        bounds = meaning.bounds.get(name, [])
        if len(bounds) == 1 and isinstance(value := bounds[0].value, str) and uses.count(value) == 1:
            sides[name] = value
    return sides


@cache
def _meanings() -> tuple[_Meaning, ...]:
    """The variants of this package that `Attention` can describe completely."""
    path = Path(__file__).parents[1] / "MANIFEST.json"
    variants = json.loads(path.read_text(encoding="utf-8"))["variants"]
    read = (_meaning(name, variant) for name, variant in variants.items())
    return tuple(meaning for meaning in read if meaning is not None)


def _meaning(name: str, variant: dict[str, Any]) -> _Meaning | None:
    """What a variant computes; None if `Attention` cannot describe it."""
    meaning = _Meaning(
        name=name, sink=variant["sink"], dropout=variant["dropout"], scalars=frozenset(variant["scalars"])
    )
    mask = ast.parse(f"({variant['mask'] or 'True'})", mode="eval").body
    score = ast.parse(f"({variant['score'] or 'score'})", mode="eval").body
    if variant["decay"] or not _reads_score(meaning, score) or not _reads_mask(meaning, mask):
        return None
    tensors = {meaning.image, meaning.bias, meaning.slope, meaning.mask} - {None}
    return meaning if tensors == variant["tensors"].keys() else None


def _reads_score(meaning: _Meaning, score: ast.expr) -> bool:
    """Whether a score is `score` with an optional cap, ALiBi and bias, which are then written into `meaning`."""
    text = ast.unparse(score)
    if text == "alibi":
        score = ast.parse("score + slope[h] * (kv_idx - q_idx)", mode="eval").body
    if isinstance(score, ast.BinOp) and _reads_alibi(meaning, score):
        return _reads_score(meaning, score.left)
    if isinstance(score, ast.BinOp) and isinstance(score.op, ast.Add):
        meaning.bias = _of_pairs(score.right)
        return meaning.bias is not None and _reads_score(meaning, score.left)
    if text == "score":
        return True
    cap = score.args[0] if isinstance(score, ast.Call) and ast.unparse(score.func) == "softcap" else None
    if isinstance(score, ast.BinOp) and isinstance(score.op, ast.Mult):
        cap = score.left if ast.unparse(score.right) == f"tanh(score / {ast.unparse(score.left)})" else None
    value = None if cap is None else _value(cap)
    if value is None:
        return False
    meaning.bounds["cap"] = [_Bound(value=value)]
    return True


def _reads_alibi(meaning: _Meaning, score: ast.BinOp) -> bool:
    """Whether the last term of a score is ALiBi, and no other term has been ALiBi before."""
    term = ast.unparse(score.right)
    slope, _, axes = term.partition("]")[0].partition("[")
    axes = axes.strip("()")
    behind = isinstance(score.op, ast.Add) and term == f"{slope}[{axes}] * (kv_idx - q_idx)"
    either = isinstance(score.op, ast.Sub) and term in (
        f"{slope}[{axes}] * abs(q_idx - kv_idx)",
        f"{slope}[{axes}] * abs(kv_idx - q_idx)",
    )
    if meaning.alibi is not None or axes not in ("h", "b, h") or not (behind or either):
        return False
    meaning.slope, meaning.alibi, meaning.behind = slope, axes, behind
    return True


def _reads_mask(meaning: _Meaning, mask: ast.expr) -> bool:
    """Whether a mask joins bounds and chunks, optionally `or` one image, `and` a mask tensor; fills in `meaning`."""
    parts = _joined(mask)
    pairs = [name for name in map(_of_pairs, parts) if name is not None]
    if len(pairs) > 1:
        return False
    if pairs:
        meaning.mask = pairs[0]
        parts = [part for part in parts if _of_pairs(part) is None] or [ast.Constant(value=True)]
    if len(parts) == 1 and isinstance(parts[0], ast.BoolOp) and isinstance(parts[0].op, ast.Or):
        either = parts[0].values
        if len(either) != 2 or (image := _image(either[1])) is None:
            return False
        meaning.image = image
        parts = _joined(either[0])
    for part in parts:
        bounds = list(_bounds(part))
        if not bounds:
            return False
        for name, bound in bounds:
            if name:
                meaning.bounds.setdefault(name, []).append(bound)
    return True


def _joined(mask: ast.expr) -> list[ast.expr]:
    """The operands that a mask joins by `and`."""
    return mask.values if isinstance(mask, ast.BoolOp) and isinstance(mask.op, ast.And) else [mask]


def _of_pairs(part: ast.expr) -> str | None:
    """The name of the tensor in `t[b, h, q_idx, kv_idx]`, None for any other expression."""
    if not isinstance(part, ast.Subscript) or not isinstance(part.value, ast.Name):
        return None
    return part.value.id if ast.unparse(part.slice).strip("()") == "b, h, q_idx, kv_idx" else None


def _image(part: ast.expr) -> str | None:
    """The tensor that numbers images in `t[b, q_idx] == t[b, kv_idx] and t[b, q_idx] >= 0`."""
    text = ast.unparse(part)
    name = text.partition("[")[0]
    return name if text == f"{name}[b, q_idx] == {name}[b, kv_idx] and {name}[b, q_idx] >= 0" else None


def _bounds(part: ast.expr) -> Iterator[tuple[str, _Bound]]:
    """The bounds that a part of a mask sets: none if the part is not recognised, an empty name if it is `True`."""
    text = ast.unparse(part)
    if text == "True":
        yield "", _Bound(value=0)
    elif text in ("causal", "q_idx >= kv_idx", "kv_idx <= q_idx"):
        yield "after", _Bound(value=0)
    elif isinstance(part, ast.Call):
        values = [value for value in map(_value, part.args) if value is not None]
        sides = {
            ("window", 1): [("before", -1)],
            ("symmetric_window", 1): [("before", 0), ("after", 0)],
            ("band", 2): [("before", 0), ("after", 0)],
            ("chunk", 1): [("chunk", 0)],
        }.get((ast.unparse(part.func), len(values)), [])
        for i, (bound, shift) in enumerate(sides):
            yield bound, _moved(values[min(i, len(values) - 1)], shift)
    elif (size := _chunk(text)) is not None:
        yield "chunk", _Bound(value=size)
    elif isinstance(part, ast.Compare) and len(part.ops) == 1:
        value, left = _value(part.comparators[0]), ast.unparse(part.left)
        side = {"q_idx - kv_idx": "before", "kv_idx - q_idx": "after"}.get(left)
        more = {ast.Lt: -1, ast.LtE: 0}.get(type(part.ops[0]))
        if value is not None and side is not None and more is not None:
            yield side, _moved(value, more)


def _chunk(text: str) -> int | str | None:
    """The size of chunks in `q_idx // size == kv_idx // size`."""
    size = text.partition(" == ")[0].removeprefix("q_idx // ")
    if text != f"q_idx // {size} == kv_idx // {size}":
        return None
    return int(size) if size.isdigit() else size


def _moved(value: int | float | str, more: int) -> _Bound:
    return _Bound(value=value, more=more) if isinstance(value, str) else _Bound(value=value + more)


def _value(node: ast.expr) -> int | float | str | None:
    """A number, or the name of a scalar."""
    if isinstance(node, ast.Name):
        return node.id
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None
