"""Block-sparse attention beside FlexAttention's block masks and beside attention to all keys."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.cases.sparse import ENTRY, VARIANT, SparseCase, cases, choose
from bench.record import OURS, PASSES
from bench.timing.measure import DTYPE
from codegen.cli.main import main as codegen
from codegen.testing.golden import BOUND, load_op, relative_errors
from codegen.tune import timing

FLEX, FULL = "Flex", "all keys"
FLEX_BLOCK = 128
"""The length of the blocks in FlexAttention's block masks, its default."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One implementation. `forward` uses the table that `prepare` makes; `prepare` is None if there is none."""

    forward: Callable[[], Tensor]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """q, k, v and the gradient of o, `[B, H, S, D]`, and the chosen blocks, bool `[B, H, S / size, S / size]`."""

    case: SparseCase
    leaves: tuple[Tensor, Tensor, Tensor]
    do: Tensor
    chosen: Tensor

    def results(self, o: Tensor) -> tuple[Tensor, ...]:
        """o and the gradients of q, k and v. The graph is kept, so that the backward can run again."""
        return o, *self.gradients(o)

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k and v."""
        return torch.autograd.grad(o, self.leaves, self.do, retain_graph=True)


def run(budget_ms: float = 300.0) -> bool:
    """Print the table. True if the results are right."""
    print(f"\nblock-sparse attention, {torch.cuda.get_device_name()}, times in ms, TFLOP/s of the chosen pairs\n")
    print(f"{'case':44} {'':9} {'table':>7} {'fwd':>8} {'TFLOP/s':>8} {'bwd':>8} {'TFLOP/s':>8}")
    with package() as name:
        op = load_op(VARIANT, name)
        right = [_case(op, case, budget_ms) for case in cases()]
    return all(right)


@contextmanager
def package() -> Iterator[str]:
    """The name of a package with the variant of the cases, rendered into a temporary folder."""
    name = f"{VARIANT}_ops"
    with TemporaryDirectory() as folder:
        spec = Path(folder) / "variants.yaml"
        spec.write_text(ENTRY, encoding="utf-8")
        if codegen(["render", "--variants", str(spec), "--out", str(Path(folder) / name)]) != 0:
            raise RuntimeError("bench: the variant of the suite sparse was not rendered")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield name
        finally:
            sys.path.remove(folder)


def draw(case: SparseCase, device: str) -> Inputs:
    """Random inputs, the same in every run."""
    shape, generator = case.shape, torch.Generator(device).manual_seed(1)
    sizes = (4, shape.batch, shape.heads, shape.seq, shape.dim)
    q, k, v, do = torch.randn(sizes, generator=generator, device=device, dtype=DTYPE)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    return Inputs(case=case, leaves=(q, k, v), do=do, chosen=choose(case, device))


def ours(op: Any, inputs: Inputs) -> Runner:
    """The variant's op with a table that is made once."""
    own = {"chosen": inputs.chosen, "size": inputs.case.size}
    prepare = partial(op.schedule, *inputs.leaves, **own)
    return Runner(forward=partial(op, *inputs.leaves, **own, schedule=prepare()), prepare=prepare)


def flex(inputs: Inputs) -> Runner:
    """FlexAttention with a block mask that is made once. It reads the chosen blocks as ours does."""
    chosen, shape, size = inputs.chosen, inputs.case.shape, inputs.case.size

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return chosen[b, h, q_idx // size, kv_idx // size]

    prepare = partial(
        torch.compile(create_block_mask, dynamic=False),
        kept,
        shape.batch,
        shape.heads,
        shape.seq,
        shape.seq,
        device=chosen.device,
        BLOCK_SIZE=FLEX_BLOCK,
    )
    attend = torch.compile(flex_attention, dynamic=False)
    return Runner(forward=partial(attend, *inputs.leaves, block_mask=prepare()), prepare=prepare)


def fault(inputs: Inputs, found: tuple[Tensor, ...]) -> str:
    """What is wrong with the results of the first head beside float64; "" if nothing is."""
    q, k, v, do = (x[0, 0].detach().double() for x in (*inputs.leaves, inputs.do))
    size = inputs.case.size
    mask = inputs.chosen[0, 0].repeat_interleave(size, 0).repeat_interleave(size, 1)
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill_(~mask, float("-inf")).softmax(-1)
    o = p @ v
    dv = p.mT @ do
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    names = ("o", "dq", "dk", "dv")
    wanted = dict(zip(names, (o, ds @ k, ds.mT @ q, dv), strict=True))
    errors = relative_errors(dict(zip(names, (x[0, 0] for x in found), strict=True)), wanted)
    worst = max(errors, key=lambda name: errors[name])
    return "" if errors[worst] <= BOUND[DTYPE] else f"{worst} is off by {errors[worst]:.1e}"


def _case(op: Any, case: SparseCase, budget_ms: float) -> bool:
    torch.compiler.reset()
    inputs = draw(case, "cuda")
    runners: dict[str, Runner] = {}
    notes: dict[str, str] = {}
    outputs: dict[str, Tensor] = {}
    builders: dict[str, Callable[[], Runner]] = {
        OURS: lambda: ours(op, inputs),
        FLEX: lambda: flex(inputs),
        FULL: lambda: Runner(forward=partial(load_op("full"), *inputs.leaves)),
    }
    for name, build in builders.items():
        try:
            runners[name] = build()
            outputs[name] = runners[name].forward()
            results = inputs.results(outputs[name])
            notes[name] = "" if name == FULL else fault(inputs, results)
            del results
        except Exception as error:  # a peer may fail in any way; its row says so
            notes[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
            outputs.pop(name, None)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "table": {name: prepare for name in outputs if (prepare := runners[name].prepare)},
        "fwd": {name: runners[name].forward for name in outputs},
        "bwd": {name: partial(inputs.gradients, o) for name, o in outputs.items()},
    }
    times = {what: timing.in_turn(each, budget_ms)[0] for what, each in calls.items()}
    for name in builders:
        print(f"{row(case, name, {what: each[name].ms for what, each in times.items() if name in each})} {notes[name]}")
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
