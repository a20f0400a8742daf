"""Many variants: drawn by their numbers, rendered some at a time, and each called in every way that was asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from .attention import Attention, Entry
from .calls import Call, build
from .draw_calls import MODES, draw_call
from .package import Package, name_of, rendered
from .running import Failure, run_call, with_hopper
from .specs import draw_entry

FAMILIES = ("portable", "hopper", "reference")
FATAL = ("CUDA error", "illegal memory access", "device-side assert", "launch failure", "misaligned address")
"""Words of an error after which a process can launch nothing more."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run. Variant number n of a seed is the same whatever the rest.

    modes and families: which of them calls are drawn of. calls: of each variant in each of its modes and families; 0
    for one call in all, of a mode and family that the variant's number chooses.
    """

    seed: int = 0
    modes: tuple[str, ...] = MODES
    families: tuple[str, ...] = ("portable",)
    calls: int = 1
    device: str = "cpu"


@dataclass(kw_only=True)
class Outcome:
    """What came of some variants: `refused` by the loader, calls made, failures; `left` were not reached."""

    variants: int = 0
    calls: int = 0
    refused: list[tuple[int, str]] = field(default_factory=list)
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.variants += other.variants
        self.calls += other.calls
        self.refused += other.refused
        self.failures += other.failures


def entry_of(seed: int, number: int) -> Entry:
    return draw_entry(Random(f"{seed} {number} entry"))


def calls_of(plan: Plan, number: int, entry: Entry, package: Package) -> Iterator[Call]:
    """The calls of a variant. Those of a GPU run in both settings of `deterministic`, where the variant has both."""
    random = Random(f"{plan.seed} {number} calls")
    kinds = [(mode, family) for mode in plan.modes for family in plan.families]
    kinds = [random.choice(kinds)] if plan.calls == 0 else kinds * plan.calls
    for mode, family in kinds:
        if family == "hopper" and not with_hopper(package, name_of(number), mode):
            family = "portable"
        call = draw_call(random, entry, mode=mode, family=family, device=plan.device)
        atomic = package.is_atomic(name_of(number))
        if plan.device == "cuda" and not atomic:
            yield from (replace(call, deterministic=each) for each in (False, True))
        else:
            yield replace(call, deterministic=call.deterministic and not atomic)


def run_variants(plan: Plan, numbers: Sequence[int]) -> Outcome:
    """Render these variants into one package and run their calls."""
    entries = {name_of(number): entry_of(plan.seed, number) for number in numbers}
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder, rendered(Path(folder), entries) as package:
        outcome.refused = [(number_of(name), reason) for name, reason in package.refused.items()]
        for name, text in package.broken.items():
            unrendered = Failure(variant=name, entry=entries[name], call=None, kind="render", text=text)
            outcome.failures.append((number_of(name), unrendered))
        for name, entry in package.entries.items():
            if "mask" in entries[name] and "mask" not in entry:
                outcome.failures += [(number_of(name), found) for found in _kept(plan, name, entries[name])]
        names = list(package.entries)
        for place, name in enumerate(names):
            outcome.variants += 1
            for call in calls_of(plan, number_of(name), package.entries[name], package):
                outcome.calls += 1
                failure = run_call(package, name, call, plan.device)
                if failure is None:
                    if plan.device == "cuda":
                        torch.cuda.empty_cache()  # the processes beside this one need memory, too
                    continue
                outcome.failures.append((number_of(name), failure))
                if any(word in failure.text for word in FATAL):
                    outcome.left = [number_of(each) for each in names[place + 1 :]]
                    return outcome
    return outcome


def _kept(plan: Plan, name: str, entry: Entry) -> Iterator[Failure]:
    """A call in which a mask keeps a pair that the loader says keeps none."""
    random = Random(f"{plan.seed} {name} empty")
    for _ in range(5):
        call = draw_call(random, entry, mode="dense")
        if len(Attention(build(entry, call).problem).r):
            text = "the loader says that no query attends to any key"
            yield Failure(variant=name, entry=entry, call=call, kind="empty", text=text)
            return


def drawn(plan: Plan, number: int) -> tuple[Entry, list[Call]]:
    """A variant and its calls."""
    name, entry = name_of(number), entry_of(plan.seed, number)
    with tempfile.TemporaryDirectory() as folder, rendered(Path(folder), {name: entry}) as package:
        return entry, list(calls_of(plan, number, package.entries[name], package)) if name in package.entries else []


def number_of(name: str) -> int:
    return int(name.split("_")[-1])


def run_one(entry: Entry, call: Call, device: str = "cpu") -> Failure | None:
    """One call of one entry; also what keeps it from being rendered."""
    name = name_of(0)
    with tempfile.TemporaryDirectory() as folder, rendered(Path(folder), {name: entry}) as package:
        for kind, found in (("refused", package.refused), ("render", package.broken)):
            if name in found:
                return Failure(variant=name, entry=entry, call=call, kind=kind, text=found[name])
        return run_call(package, name, call, device)


def as_json(number: int, failure: Failure) -> dict[str, Any]:
    call = None if failure.call is None else failure.call.text()
    return {"number": number, "kind": failure.kind, "text": failure.text, "entry": failure.entry, "call": call}
