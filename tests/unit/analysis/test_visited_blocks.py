"""The blocks that a kernel's loops visit, compared with the mask at every pair: random masks, along keys and queries.

Masks of affine, step and modular terms, tables and scalars. The loops run as they are printed for both families.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from codegen.analysis.scalar_limits import narrowed
from codegen.analysis.schedule import Schedule, analyse
from codegen.ir.evaluate import Array
from codegen.ir.expr import Expr, ScalarType, TensorSpec, Type
from codegen.ir.parse import Scope, parse
from codegen.spec.model import ScalarSpec
from codegen.util.errors import ExprError
from tests.support.visited_blocks import Int32, Loops, Visit, memory

TENSORS = {
    "limit": TensorSpec(name="limit", dims=("b",), dtype="int32"),
    "span": TensorSpec(name="span", dims=("h", 3), dtype="int32"),
    "seen": TensorSpec(name="seen", dims=("q_idx", "kv_idx"), dtype="bool"),
}
SCOPE = Scope(tensors=TENSORS, scalars={"n": ScalarType.INT, "m": ScalarType.INT})
BLOCKS = (16, 32, 64, 128)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 160, 192, 255, 256, 257, 300)
OFFSETS = (0, 0, 1, -1, 16, 100, -40, -200, 300)


# --------------------------------------------------------------------------------------------------------- random masks


class Masks:
    """Random masks, each as text of the language and as numpy, which has `& | not_` for `and or not`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.plain = False  # whether a mask has few different numbers, so that bounds of its terms often coincide

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def bound(self) -> str:
        """A number that is the same for all pairs."""
        if self.plain:
            return self.pick("3", "17", "40", "128", "300", "320", "n", "limit[b]")
        literal = str(self.rng.choice((0, 1, 3, 16, 17, 40, 63, 64, 127, 128, 200, 320)))
        return self.pick(literal, literal, f"(-{literal})", "n", "m", "(n + 3)", "limit[b]", "span[h, 1]", "(n - m)")

    def position(self) -> str:
        if self.plain:
            return self.pick("q_idx", "kv_idx", "(q_idx - kv_idx)", "(kv_idx - q_idx)")
        factor, divisor = self.rng.choice((2, 3)), self.rng.choice((2, 3, 7, 16, 49, 64))
        return self.pick(
            "q_idx", "kv_idx", "kv_idx", "(q_idx - kv_idx)", "(kv_idx - q_idx)", f"({factor} * kv_idx - q_idx)",
            f"(kv_idx // {divisor})", f"(q_idx // {divisor} - kv_idx // {divisor})", f"(-kv_idx // {divisor})",
            f"(q_idx - {factor} * kv_idx)", f"(kv_idx // {divisor} * {divisor} - q_idx)",
        )  # fmt: skip

    def atom(self) -> str:
        order = self.pick("<", "<=", ">", ">=", ">=", "==", "!=")
        step = f"({self.position()} {order} {self.bound()})"
        modular = f"(({self.pick('q_idx', 'kv_idx', 'q_idx - kv_idx')}) % {self.pick('2', '3', '4', '7')} {order} 1)"
        extreme = f"({self.pick('min', 'max')}({self.position()}, {self.bound()}) {order} {self.bound()})"
        absolute = f"(abs({self.position()}) {order} {self.bound()})"
        uniform = f"({self.bound()} {order} {self.bound()})"
        table = self.pick("seen[q_idx, kv_idx]", "seen[kv_idx, q_idx]")
        return self.rng.choices(
            (step, modular, extreme, absolute, uniform, table, "(q_idx >= kv_idx)"), (8, 2, 1, 1, 1, 2, 2)
        )[0]

    def drawn(self) -> tuple[str, str]:
        self.plain = self.rng.random() < 0.5
        return self.mask(self.rng.choice((1, 2, 2, 3)))

    def mask(self, depth: int) -> tuple[str, str]:
        form = self.rng.choices(("atom", "and", "or", "not", "where"), (2, 3, 4, 1, 1))[0] if depth else "atom"
        if form == "atom":
            text = self.atom()
            return text, text
        parts = [self.mask(depth - 1) for _ in range({"not": 1, "where": 3}.get(form, 2))]
        texts, arrays = zip(*parts, strict=True)
        if form == "not":
            return f"(not {texts[0]})", f"not_({arrays[0]})"
        if form == "where":
            return f"where({', '.join(texts)})", f"where({', '.join(arrays)})"
        return f"({f' {form} '.join(texts)})", f"({(' & ' if form == 'and' else ' | ').join(arrays)})"


@dataclass(frozen=True, kw_only=True)
class Call:
    """Lengths and arguments of one call."""

    q_len: int
    kv_len: int
    q_shift: int
    n: int
    m: int
    tensors: dict[str, Array]

    @staticmethod
    def drawn(rng: random.Random) -> Call:
        numbers = (0, 1, 5, 16, 33, 64, 100, 128, 200, 500, -30, 2**30)
        noise = np.random.default_rng(rng.randrange(2**32))
        return Call(
            q_len=rng.choice(LENGTHS),
            kv_len=rng.choice(LENGTHS),
            q_shift=rng.choice(OFFSETS),
            n=rng.choice(numbers),
            m=rng.choice(numbers[:-1]),
            tensors={
                "limit": noise.integers(-5, 200, 2).astype(np.int32),
                "span": noise.integers(-5, 200, (4, 3)).astype(np.int32),
                "seen": noise.random((320, 320)) < 0.5,
            },
        )

    def kept(self, mask: str) -> Array:
        """The mask at every pair, evaluated by numpy: bool, `[q_len, kv_len]`."""
        q_idx = np.arange(self.q_len)[:, None] + self.q_shift
        kv_idx = np.arange(self.kv_len)[None, :]
        uniform = {"b": 1, "h": 2, "n": np.int64(self.n), "m": np.int64(self.m)}
        functions = {"min": np.minimum, "max": np.maximum, "abs": np.abs, "where": np.where, "not_": np.logical_not}
        tensors = {name: _Clamped(values) for name, values in self.tensors.items()}
        names = {"q_idx": q_idx, "kv_idx": kv_idx, **uniform, **functions, **tensors}
        return np.broadcast_to(np.bool_(eval(mask, {"__builtins__": {}}, names)), (self.q_len, self.kv_len))

    def names(self, block_m: int, block_n: int) -> dict[str, Any]:
        """The names that the loops of a kernel read, except the block of the program."""
        numbers = {"q_len": self.q_len, "kv_len": self.kv_len, "q_shift": self.q_shift, "n": self.n, "m": self.m}
        blocks = {"b": 1, "h": 2, "hkv": 1, "BLOCK_M": block_m, "BLOCK_N": block_n}
        arguments = {name: Int32(value) for name, value in {**numbers, **blocks}.items()}
        for name, values in self.tensors.items():
            arguments |= memory(name, values)
        return arguments


@dataclass(frozen=True)
class _Clamped:
    """A tensor whose indices are clamped to its ends, as the language defines it."""

    values: Array

    def __getitem__(self, index: Any) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        found: Array = self.values[tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, self.values.shape, strict=True))]
        return found


def closed_masks(seed: int, count: int) -> Iterator[tuple[str, str, Expr]]:
    """Masks whose bounds have a closed form: text, numpy and tree."""
    masks = Masks(seed)
    found = 0
    while found < count:
        text, array = masks.drawn()
        try:
            mask = parse(text, SCOPE, Type.BOOL)
        except ExprError:  # all its numbers are literals, and it folds to one that is too large
            continue
        if analyse(mask).schedule is Schedule.CLOSED_FORM:
            found += 1
            yield text, array, mask


# ------------------------------------------------------------------------------------------------------------- the test


def problem(visits: list[Visit], kept: Array, block: int) -> str:
    """What is wrong with the visits of a program whose pairs are `kept`, `[own positions, length]`; else empty."""
    length = kept.shape[1]
    for full in (False, True):
        starts = [visit.start for visit in visits if visit.full is full]
        if any(b <= a for a, b in itertools.pairwise(starts)):
            return f"not ascending: {starts}"
    starts = [visit.start for visit in visits]
    if len(set(starts)) < len(starts):
        return f"a block is visited twice: {sorted(starts)}"
    if not all(start % block == 0 and 0 <= start < length for start in starts):
        return f"a block starts behind the length {length}, before 0 or between blocks: {starts}"
    missed = [
        start for start in range(0, length, block) if kept[:, start : start + block].any() and start not in starts
    ]
    if missed:
        return f"blocks with a kept pair are missed: {missed} of {starts}"
    for visit in visits:
        own = kept[:, visit.start : visit.start + block]
        if visit.full and (own.shape[1] < block or not own.all()):
            return f"block {visit.start} is visited without the mask and is not full"
    return ""


def wrong_visits(loops: Loops, call: Call, kept: Array, tiles: tuple[int, int], *, keys: bool) -> str:
    """What is wrong with the visits of either family's loops in any program of a call; else empty."""
    block_m, block_n = tiles
    names = call.names(block_m, block_n)
    own_start, own, block = ("start_m", block_m, block_n) if keys else ("start_n", block_n, block_m)
    names["RAGGED"] = (call.kv_len if keys else call.q_len) % block != 0
    pairs = kept if keys else kept.T
    for first in range(0, len(pairs), own):
        names[own_start] = Int32(first)
        for family in ("portable", "hopper"):
            found = problem(loops.run(family, names), pairs[first : first + own], block)
            if found:
                return f"{family}, {own_start} = {first}: {found}"
    return ""


REPORTED = (
    ("kv_idx >= 128 or kv_idx % 4 == 0", "(kv_idx >= 128) | (kv_idx % 4 == 0)"),
    (
        "q_idx >= kv_idx and (kv_idx >= 128 or seen[q_idx, kv_idx])",
        "(q_idx >= kv_idx) & ((kv_idx >= 128) | seen[q_idx, kv_idx])",
    ),
    ("kv_idx > 1 or (q_idx - kv_idx) % 2 != 0", "(kv_idx > 1) | ((q_idx - kv_idx) % 2 != 0)"),
    ("kv_idx >= 3 or q_idx % 4 != 0", "(kv_idx >= 3) | (q_idx % 4 != 0)"),
    (
        "(kv_idx >= q_idx + 300 and (kv_idx < 3 or q_idx < 40)) or kv_idx >= n",
        "((kv_idx >= q_idx + 300) & ((kv_idx < 3) | (q_idx < 40))) | (kv_idx >= n)",
    ),
    (
        "(kv_idx >= q_idx + 300 and (kv_idx < 320 or q_idx < 40)) or (kv_idx >= n and q_idx % 4 != 0)",
        "((kv_idx >= q_idx + 300) & ((kv_idx < 320) | (q_idx < 40))) | ((kv_idx >= n) & (q_idx % 4 != 0))",
    ),
    ("kv_idx // 7 <= n", "kv_idx // 7 <= n"),
)  # fmt: skip
"""Masks whose loops were wrong before: text and numpy."""


def check(text: str, array: str, mask: Expr, calls: list[tuple[Call, tuple[int, int]]]) -> None:
    for keys in (True, False):
        loops = Loops.of(mask, TENSORS, keys=keys)
        for call, tiles in calls:
            found = wrong_visits(loops, call, call.kept(array), tiles, keys=keys)
            assert not found, f"{text}\nalong {'keys' if keys else 'queries'}, {tiles}, {call}\n{found}\n{loops.text}"


@pytest.mark.parametrize("seed", range(10))
def test_loops_of_random_masks_visit_each_block_with_a_kept_pair_once(seed: int) -> None:
    rng = random.Random(seed)
    for text, array, mask in closed_masks(seed, 30):
        calls = [(Call.drawn(rng), (rng.choice(BLOCKS), rng.choice(BLOCKS))) for _ in range(4)]
        check(text, array, mask, calls)


@pytest.mark.parametrize(("text", "array"), REPORTED)
def test_loops_of_reported_masks_visit_each_block_with_a_kept_pair_once(text: str, array: str) -> None:
    rng = random.Random(text)
    calls = [replace(Call.drawn(rng), n=n, kv_len=kv_len) for n in (1, 2**30) for kv_len in (100, 128, 192)]
    check(text, array, parse(text, SCOPE, Type.BOOL), [(call, (block, block)) for call in calls for block in BLOCKS])


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("q_idx - kv_idx < n - m", 2),
        ("n + q_idx < m + kv_idx", 2),
        ("n + q_idx < m", 2),
        ("kv_idx >= n - m", 2),
        ("abs(q_idx - kv_idx + n) <= m", 2),
        ("q_idx + min(n, 7) < max(m, 3)", 2),
        ("(q_idx + n) // 64 >= (kv_idx + m) // 64", 2),
        ("kv_idx - q_idx <= n + 2 * m", 3),
        ("4 * n >= q_idx - kv_idx", 4),
        ("q_idx - kv_idx < n", 1),
        ("(q_idx + n) // 48 * 48 < kv_idx", 1),
        ("(kv_idx >= n) & (q_idx < m)", 1),
    ],
)
def test_loops_are_right_for_the_largest_scalars_that_a_sum_admits(text: str, share: int) -> None:
    mask = parse(text.replace("&", "and"), SCOPE, Type.BOOL)
    scalars = {name: ScalarSpec(name=name, type=kind) for name, kind in SCOPE.scalars.items()}
    assert set(narrowed(scalars, [mask]).values()) == ({2**30 // share} if share > 1 else set())
    ends = [sign * (2**30 // share) for sign in (1, -1)]
    rng = random.Random(text)
    calls = [replace(Call.drawn(rng), n=n, m=m) for n in (*ends, 40) for m in (*ends, 3)]
    check(text, text, mask, [(call, (64, 64)) for call in calls])


@pytest.mark.parametrize(
    "text",
    [
        "kv_idx <= limit[b]",
        "kv_idx > limit[b]",
        "kv_idx - 3 <= limit[b]",
        "(q_idx >= kv_idx) & (q_idx - kv_idx < span[h, 1])",
        "(q_idx >= kv_idx) & (q_idx - kv_idx <= span[h, 1])",
        "abs(q_idx - kv_idx) <= span[h, 1]",
        "(q_idx <= limit[b]) | (kv_idx < n)",
        "q_idx // 16 - kv_idx // 16 < limit[b]",
        "2 * kv_idx - q_idx <= limit[b]",
    ],
)
def test_loops_are_right_for_the_largest_elements_of_tensors(text: str) -> None:
    mask = parse(text.replace("&", "and").replace("|", "or"), SCOPE, Type.BOOL)
    assert analyse(mask).schedule is Schedule.CLOSED_FORM
    rng = random.Random(text)
    calls = []
    for value in (2**31 - 1, 2**31 - 40, 2**30):
        call = Call.drawn(rng)
        tensors = {**call.tensors, "limit": np.full(2, value, np.int32), "span": np.full((4, 3), value, np.int32)}
        calls.append(replace(call, tensors=tensors))
    check(text, text, mask, [(call, (64, 64)) for call in calls])


@pytest.mark.parametrize(
    "text", ["kv_idx <= limit[b]", "q_idx - kv_idx <= limit[b]", "kv_idx + limit[b] >= 0", "q_idx // 16 >= limit[b]"]
)
def test_loops_are_right_for_the_least_elements_of_tensors(text: str) -> None:
    rng = random.Random(text)
    calls = []
    for value in (-(2**31), -(2**31) + 40, -(2**30)):
        call = Call.drawn(rng)
        calls.append(replace(call, tensors={**call.tensors, "limit": np.full(2, value, np.int32)}))
    check(text, text, parse(text, SCOPE, Type.BOOL), [(call, (64, 64)) for call in calls])


@pytest.mark.parametrize(
    "text",
    [
        "kv_idx + limit[b] <= span[h, 1]",
        "kv_idx >= span[h, 1] - limit[b]",
        "q_idx - kv_idx < span[h, 1] - limit[b]",
        "(q_idx >= kv_idx) & (kv_idx // 16 >= span[h, 1] - limit[b])",
        "kv_idx - n <= span[h, 1] - limit[b]",
    ],
)
@pytest.mark.parametrize("base", [1_700_000_000, -(2**31), 0])
def test_loops_are_right_for_small_differences_of_large_elements(text: str, base: int) -> None:
    mask = parse(text.replace("&", "and"), SCOPE, Type.BOOL)
    assert analyse(mask).schedule is Schedule.CLOSED_FORM
    rng = random.Random(text)
    calls = []
    for difference in (0, 9, 100):
        call = Call.drawn(rng)
        limit, span = np.full(2, base, np.int32), np.full((4, 3), base + difference, np.int32)
        calls.append(replace(call, n=3, tensors={**call.tensors, "limit": limit, "span": span}))
    check(text, text, mask, [(call, (64, 64)) for call in calls])


@pytest.mark.parametrize(
    "text", ["kv_idx // 1000 <= q_idx", "q_idx >= 3 * (kv_idx // 1000)", "kv_idx <= q_idx // 1000"]
)
def test_loops_are_right_for_positions_that_no_period_may_multiply(text: str) -> None:
    rng = random.Random(text)
    calls = [replace(Call.drawn(rng), q_shift=shift) for shift in (0, 2_200_000, 3_000_000, 2**29)]
    check(text, text, parse(text, SCOPE, Type.BOOL), [(call, (64, 64)) for call in calls])


@pytest.mark.parametrize("text", ["q_idx - kv_idx < 2147483647", "kv_idx // 2**29 < 8", "kv_idx >= 2147483647"])
def test_a_literal_whose_bounds_may_not_fit_32_bits_has_no_closed_form(text: str) -> None:
    assert analyse(parse(text, SCOPE, Type.BOOL)).schedule is not Schedule.CLOSED_FORM
