"""Block-sparse attention beside FlexAttention's block masks and beside attention to all keys."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.cases.sparse import VARIANT, SparseCase, cases, choose
from bench.peers import torch_peers
from bench.peers.torch_peers import MAX_AUTOTUNE, Runner
from bench.record import OURS, PASSES, in_one_line
from bench.timing.measure import DTYPE
from codegen.cli.main import main as codegen
from codegen.cli.options import COLLECTION
from codegen.testing.calls import evaluate_plain
from codegen.testing.golden import BOUND, Inputs, draw_inputs, load_manifest, load_op, load_reference, relative_errors
from codegen.tune import timing

LIBRARY = Path(__file__).parents[2] / COLLECTION
FLEX, FULL = "Flex", "all keys"
FLEX_BLOCK = 128
"""FlexAttention's default tiles need blocks of at least this length. For shorter ones it has to search for tiles."""


def run(budget_ms: float = 300.0) -> bool:
    """Print the table. True if the results are right."""
    print(f"\nblock-sparse attention, {torch.cuda.get_device_name()}, times in ms, TFLOP/s of the chosen pairs\n")
    print(f"{'case':44} {'':9} {'table':>7} {'fwd':>8} {'TFLOP/s':>8} {'bwd':>8} {'TFLOP/s':>8}")
    with rendered() as package:
        right = [_case(package, case, budget_ms) for case in cases()]
    return all(right)


@contextmanager
def rendered() -> Iterator[str]:
    """The name of a package with the variant of the cases, rendered into a temporary folder."""
    package = f"{VARIANT}_ops"
    entry = yaml.safe_load(LIBRARY.read_text(encoding="utf-8"))["variants"][VARIANT]
    with TemporaryDirectory() as folder:
        spec = Path(folder) / "variants.yaml"
        spec.write_text(yaml.safe_dump({"variants": {VARIANT: entry}}), encoding="utf-8")
        if codegen(["render", "--variants", str(spec), "--out", str(Path(folder) / package)]) != 0:
            raise RuntimeError("bench: the variant of the suite sparse was not rendered")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield package
        finally:
            sys.path.remove(folder)


def draw(package: str, case: SparseCase, device: str) -> Inputs:
    """Random inputs, the same in every run."""
    entry = load_manifest(package)[VARIANT]
    inputs = draw_inputs(entry, case.shape, dtype=DTYPE, device=device, scalars={"size": case.size})
    return replace(inputs, tensors={"chosen": choose(case, device)})


def flex(inputs: Inputs) -> Runner:
    """FlexAttention with a block mask of the chosen blocks, all of them full."""
    chosen, size = inputs.tensors["chosen"], int(inputs.scalars["size"])

    def prepare() -> BlockMask:
        counts = chosen.sum(3, dtype=torch.int32)
        order = chosen.int().argsort(dim=3, descending=True, stable=True).int()
        return BlockMask.from_kv_blocks(torch.zeros_like(counts), order, counts, order, BLOCK_SIZE=size)

    return torch_peers.flex(inputs, None, prepare, mode=None if size >= FLEX_BLOCK else MAX_AUTOTUNE)


def full(inputs: Inputs) -> Runner:
    """Our op that attends to all keys."""
    return Runner(forward=partial(load_op("full"), inputs.q, inputs.k, inputs.v), do=inputs.do, leaves=inputs.leaves())


def fault(package: str, inputs: Inputs, found: dict[str, Tensor]) -> str:
    """What is wrong with the results of the first head beside float64; "" if nothing is."""
    first = {name: getattr(inputs, name)[:1, :1] for name in ("q", "k", "v", "do", "dlse")}
    head = replace(inputs, **first, tensors={"chosen": inputs.tensors["chosen"][:1, :1]})
    wanted = evaluate_plain(load_reference(VARIANT, package=package), head.double())
    errors = relative_errors({name: x[:1, :1] for name, x in found.items()}, wanted)
    worst = max(errors, key=lambda name: errors[name])
    return "" if errors[worst] <= BOUND[DTYPE] else f"{worst} is off by {errors[worst]:.1e}"


def _case(package: str, case: SparseCase, budget_ms: float) -> bool:
    torch_peers.forget()
    inputs = draw(package, case, "cuda")
    builders: dict[str, Callable[[], Runner]] = {
        OURS: lambda: torch_peers.scheduled(load_op(VARIANT, package), inputs),
        FLEX: lambda: flex(inputs),
        FULL: lambda: full(inputs),
    }
    runners: dict[str, Runner] = {}
    notes = dict.fromkeys(builders, "")
    for name, build in builders.items():
        try:
            runner = build()
            results = runner.results()
            notes[name] = "" if name == FULL else fault(package, inputs, results)
            runners[name] = runner
        except Exception as error:  # a peer may fail in any way; its row says so
            notes[name] = in_one_line(error)
    outputs = {name: runner.forward() for name, runner in runners.items()}
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "table": {name: runner.prepare for name, runner in runners.items() if runner.prepare is not None},
        "fwd": {name: runner.forward for name, runner in runners.items()},
        "bwd": {name: partial(runner.gradients, outputs[name]) for name, runner in runners.items()},
    }
    times = {what: timing.in_turn(each, budget_ms)[0] for what, each in calls.items()}
    for name in builders:
        print(row(case, name, {what: each[name].ms for what, each in times.items() if name in each}), notes[name])
    sys.stdout.flush()
    return not notes[OURS]


def row(case: SparseCase, name: str, times: dict[str, float]) -> str:
    """A row of the table, with the times in ms of what could be timed."""
    text = f"{case.name if name == OURS else '':44} {name:9} "
    text += f"{times['table']:7.3f}" if "table" in times else " " * 7
    for which in PASSES:
        if which not in times:
            text += " " * 18
            continue
        flops = case.flops(which) / (case.share if name == FULL else 1.0)
        text += f" {times[which]:8.3f} {flops / times[which] / 1e9:8.0f}"
    return text
