"""Times block sizes of one kernel, each of them once it is known to compute the right thing.

    python -m bench.sweep --variant causal --pass fwd --dim 128
    python -m bench.sweep --variant window --scalar size=1024 --pass dkdv --heads 32/8 --configs 64,128,8,2 64,64,4,3
    python -m bench.sweep --pass dq --documents 341 --seq 16384

A config is block_m,block_n,num_warps,num_stages. Those of the other passes stay at the default, and a backward pass is
timed as part of the whole backward.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench import golden
from bench.golden import BOUND, Inputs, Shape
from bench.packed import packed_inputs
from bench.pool import DEFAULT_JOBS, spread

DTYPE = torch.bfloat16
GRID = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
CHECK_SEQ = 1040
"""A multiple of 16, as the timed length, so that it is one compilation; of no block size, so that blocks are cut."""


@dataclass(frozen=True, order=True)
class Config:
    """What `config=` takes for one pass; its fields are the op's."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m:4} x {self.block_n:<4} {self.num_warps} warps  {self.num_stages} stages"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config of one kernel; None stands for the default."""

    variant: str
    kernel: str
    config: Config | None
    shape: Shape
    scalars: tuple[tuple[str, float], ...]
    documents: int = 0

    def draw(self, shape: Shape) -> Inputs:
        """Inputs of the given size."""
        entry = golden.load_manifest()[self.variant]
        inputs = golden.draw_inputs(entry, shape, dtype=DTYPE, device="cuda", scalars=dict(self.scalars))
        return packed_inputs(inputs) if self.documents else inputs

    def sequences(self, inputs: Inputs) -> dict[str, Any]:
        """What makes a call a packed one: sequences of `documents` tokens, the last cut short."""
        if not self.documents:
            return {}
        total = inputs.q.shape[0]
        ends = [*range(0, total, self.documents), total]
        return {"cu_seqlens_q": torch.tensor(ends, dtype=torch.int32, device="cuda")}

    @property
    def options(self) -> dict[str, Any]:
        """The op's keyword arguments that choose the config."""
        return {"config": {self.kernel: asdict(self.config)}} if self.config else {}

    def __str__(self) -> str:
        return str(self.config or "the default")


@functools.cache
def _golden(trial: Trial) -> tuple[Inputs, dict[str, Tensor]]:
    shape = Shape(batch=1, heads=trial.shape.heads, kv_heads=trial.shape.kv_heads, seq=CHECK_SEQ, dim=trial.shape.dim)
    inputs = trial.draw(shape)
    reference = golden.load_reference(trial.variant, packed=trial.documents > 0)
    return inputs, golden.evaluate(reference, inputs.double(), **trial.sequences(inputs))


def check(trial: Trial) -> str:
    """Compile the config and compare its results with float64; "" when they are right, else what is wrong."""
    inputs, wanted = _golden(replace(trial, config=None))
    try:
        got = golden.evaluate(golden.load_op(trial.variant), inputs, **trial.options, **trial.sequences(inputs))
        errors = golden.relative_errors(got, wanted)
    except Exception as error:  # out of resources, a compiler's failure: all are reasons not to take it
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
    worst = max(errors, key=lambda name: errors[name])
    return "" if errors[worst] <= BOUND[DTYPE] else f"WRONG: {worst} is off by {errors[worst]:.1e}"


def time_ms(trial: Trial, inputs: Inputs) -> float:
    """Milliseconds of the forward, or of the whole backward for a kernel of the backward."""
    from triton.testing import do_bench

    op = golden.load_op(trial.variant)
    options = trial.options | trial.sequences(inputs)
    o = inputs.call(op, **options)
    leaves = list(inputs.leaves().values())

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)

    def forward() -> Tensor:
        result: Tensor = inputs.call(op, **options)
        return result

    ms: float = do_bench(forward if trial.kernel == "fwd" else backward, warmup=10, rep=50, return_mode="median")
    return ms


def _config(text: str) -> Config:
    try:
        return Config(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected block_m,block_n,num_warps,num_stages, got {text!r}") from None


def _scalar(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=NUMBER, got {text!r}") from None


def _heads(text: str) -> tuple[int, int]:
    heads, _, kv_heads = text.partition("/")
    try:
        return int(heads), int(kv_heads or heads)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 16, or 32/8 for grouped heads, got {text!r}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="causal")
    parser.add_argument("--pass", dest="kernel", choices=("fwd", "dkdv", "dq"), required=True)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=_heads, default=(16, 16), help="16, or 32/8 for grouped heads")
    parser.add_argument("--documents", type=int, default=0, metavar="TOKENS", help="packed sequences of this length")
    parser.add_argument("--scalar", type=_scalar, action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--configs", type=_config, nargs="+", metavar="M,N,WARPS,STAGES", help="instead of the grid")
    parser.add_argument("--jobs", type=int, default=DEFAULT_JOBS, help="processes that compile and check")
    return parser


def _passing(trials: list[Trial], jobs: int) -> list[Trial]:
    """The trials that compute the right thing; the others are printed with the reason."""
    passed = []
    for done, (trial, outcome) in enumerate(spread(check, trials, jobs), start=1):
        if outcome == "":
            passed.append(trial)
        else:
            print(f"[{done}/{len(trials)}] {trial}: {outcome}", flush=True)
    return passed


def main() -> int:
    """Print the table, fastest first; 1 when no config is right."""
    options = _parser().parse_args()
    if not torch.cuda.is_available():
        print("python -m bench.sweep times GPU kernels, and torch finds no GPU here.")
        return 2
    heads, kv_heads = options.heads
    shape = Shape(batch=options.batch, heads=heads, kv_heads=kv_heads, seq=options.seq, dim=options.dim)
    configs = [None, *(options.configs or itertools.starmap(Config, GRID))]
    trial = functools.partial(
        Trial,
        variant=options.variant,
        kernel=options.kernel,
        shape=shape,
        scalars=tuple(options.scalar),
        documents=options.documents,
    )
    passed = _passing([trial(config=config) for config in configs], options.jobs)
    if not passed:
        print("no config is right")
        return 1
    inputs = passed[0].draw(shape)
    timed = sorted((time_ms(each, inputs), str(each)) for each in passed)
    print(f"\n{options.variant} {options.kernel}, {shape}, {torch.cuda.get_device_name()}; fastest first")
    for ms, name in timed:
        print(f"  {ms:9.3f} ms  {timed[0][0] / ms:5.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
