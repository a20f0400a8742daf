"""Calls run by the ops of a package, and what is wrong with them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.cases import INTERPRET
from tests.support.interpreter import keep_truth_values

from .attention import Entry, Results
from .calls import Call, Inputs, build, flatten, flatten_lse
from .judge import mismatches, wanted
from .order import Verdict, verdict
from .package import Package

if INTERPRET:
    keep_truth_values()

DISORDER = "q_positions: expected positions that"
"""What the error of a call says whose positions do not agree with its rows."""

PROGRAMS = 3
"""Multiprocessors that an emulated device has."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A call that went wrong: `kind` is "render", "empty", "error", "accepted" or "mismatch"; `text` says how."""

    variant: str
    entry: Entry
    call: Call | None
    kind: str
    text: str

    def describe(self) -> str:
        """What is wrong, and the options of `python -m tests.fuzz` that repeat it."""
        lines = [*self.text.splitlines()[:12], f"--entry '{json.dumps(self.entry)}'"]
        lines += [f"--call '{self.call.text()}'"] if self.call is not None else []
        return "\n".join(f"  {line}" for line in lines)

    @property
    def label(self) -> str:
        """What failures of one cause have in common."""
        if self.kind == "mismatch":
            return "mismatch of " + " ".join(re.findall(r"^(\w+):", self.text, re.MULTILINE))
        return f"{self.kind}: " + re.sub(r"\d+", "0", self.text.strip().splitlines()[-1])[:100]


def run_call(package: Package, variant: str, call: Call, device: str = "cpu") -> Failure | None:
    """One call, o, lse and every gradient, against its evaluation in float64; None where all is right.

    Where the portable kernels are interpreted, the plain reference has to give the same. A call whose positions the op
    may not accept has to be refused.
    """
    entry = package.entries[variant]
    inputs = build(entry, call, device)
    want = wanted(inputs.problem, call.dtype, call.with_lse, tanh=device == "cuda")
    plain = replace(call, family="reference", tiles=None)
    for each in (call, plain) if (call.family, device) == ("portable", "cpu") else (call,):
        kind, found = "mismatch", verdict(entry, call)
        try:
            text = "\n".join(map(str, mismatches(results(package, variant, replace(inputs, call=each)), want)))
            if found is Verdict.ILLEGAL:
                kind, text = "accepted", "positions that do not rise by 1 were accepted"
        except Exception as error:  # whatever it is, but for a refusal the call was legal
            kind, text = "error", _error_text(error)
            if found is not Verdict.LEGAL and DISORDER in text:
                text = ""
        if text:
            return Failure(variant=variant, entry=entry, call=each, kind=kind, text=text)
    return None


def _error_text(error: BaseException) -> str:
    """The error and what caused it, in few lines."""
    found = [f"{type(error).__name__}: {error}"]
    while error.__cause__ is not None:
        error = error.__cause__
        found.append(f"{type(error).__name__}: {error}")
    return "\n".join(" ".join(line.split())[:300] for line in found)


def results(package: Package, variant: str, inputs: Inputs) -> Results:
    """What an op gives, in the layout of `Attention.results`."""
    call = inputs.call
    with ExitStack() as stack:
        stack.enter_context(_poisoned())
        if inputs.q.device.type == "cpu":
            stack.enter_context(_without_overflow_checks())
        if call.family == "reference":
            module = importlib.import_module(f"{package.name}.{variant}.torch_op")
            stack.enter_context(mock.patch.object(module, "runs_reference", return_value=True))
        if call.family == "hopper" and inputs.q.device.type == "cpu":
            stack.enter_context(emulated(package.name, variant, call))
        found = _run(package.op(variant), inputs)
    layouts = {"lse": flatten_lse, **dict.fromkeys(("o", "dq", "dk", "dv"), flatten)}
    return {name: layouts[name](x, call) if name in layouts else x for name, x in found.items()}


def _run(op: Any, inputs: Inputs) -> Results:
    call = inputs.call
    options: dict[str, Any] = {"deterministic": call.deterministic}
    if call.family != "reference":
        options["family"] = call.family
    if call.tiles is not None:
        options["config"] = configs(call.tiles)
    output = op(inputs.q, inputs.k, inputs.v, **inputs.arguments, **options, return_lse=True)
    o, lse = output
    found = {"o": o.detach(), "lse": lse.detach()}
    leaves = inputs.leaves
    if leaves:
        outputs, weights = ((o, lse), (inputs.do, inputs.dlse)) if call.with_lse else ((o,), (inputs.do,))
        grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def configs(tiles: tuple[int, int]) -> dict[str, dict[str, int]]:
    """The `config` of these blocks for every pass."""
    tile = {"block_m": tiles[0], "block_n": tiles[1], "num_warps": 4, "num_stages": 1}
    return {name: dict(tile) for name in ("fwd", "dkdv", "dq")}


@contextmanager
def _poisoned() -> Iterator[None]:
    """torch fills what it allocates with NaN: a part of its deterministic mode, in which nothing else is wanted."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _without_overflow_checks() -> Iterator[None]:
    """Triton's interpreter computes every integer sum twice, to see that it fits: a third of its time."""
    from triton.runtime.interpreter import interpreter_builder

    options = replace(interpreter_builder.options, sanitize_overflow=False)
    with mock.patch.object(interpreter_builder, "options", options):
        yield


@contextmanager
def emulated(package: str, variant: str, call: Call) -> Iterator[None]:
    """Hopper's kernels run in the emulation of Gluon, as on an sm_90 of few multiprocessors."""
    from emulator import Kernel, Timing, device_sources

    timing = list(Timing)[call.seed % len(list(Timing))]
    mode = "" if call.mode == "dense" else call.mode
    folder = f"{package}.{variant}.{mode}".rstrip(".")
    with ExitStack() as stack:
        stems = {"hopper_fwd": "hopper_fwd", "hopper_fwd_wide": "hopper_fwd"}
        stems |= {"hopper_bwd": "hopper_bwd", "hopper_bwd_wide": "hopper_bwd"}
        if importlib.util.find_spec(f"{folder}.hopper_split") is not None:
            stems |= {"hopper_split_keys": "hopper_split", "hopper_split_rows": "hopper_split"}
        for stem, file in stems.items():
            module = importlib.import_module(f"{folder}.{file}")
            assert module.__file__ is not None
            name = f"{variant}_{mode}".rstrip("_") + f"_{stem}"
            path = Path(module.__file__)
            kernel = Kernel(path.read_text(encoding="utf-8"), name, timing, device_sources(path))
            stack.enter_context(mock.patch.object(module, name, kernel))
        backend = importlib.import_module(f"{package}._runtime.torch.backend")
        stack.enter_context(mock.patch.object(backend, "multiprocessors", return_value=PROGRAMS))
        # The portable dq runs in the interpreter, which has no instructions.
        for choice in ("is_nvidia", "has_tanh_instruction"):
            stack.enter_context(mock.patch.object(backend, choice, return_value=False))
        stack.enter_context(mock.patch(f"{package}._runtime.torch.devices.arch_of", return_value="sm_90"))
        yield


def with_hopper(package: Package, variant: str, mode: str) -> bool:
    """Whether the variant has kernels of Hopper's family in the call's mode."""
    folder = f"{package.name}.{variant}" + ("" if mode == "dense" else f".{mode}")
    return importlib.util.find_spec(f"{folder}.hopper_fwd") is not None


def summary(failures: list[Failure]) -> Mapping[str, int]:
    """How many failures have each label."""
    found: dict[str, int] = {}
    for failure in failures:
        found[failure.label] = found.get(failure.label, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))
