"""Pruned calls of `forgetting` beside plain ones: the pairs that they visit, their differences and their times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases.pruning import PRUNE, cases, decays, share_visited
from bench.timing.measure import DTYPE
from codegen.testing import golden
from codegen.testing.golden import Shape
from codegen.tune import timing
from generated._runtime.torch.pruning import first_keys

DIFFERENCE_LIMIT = 2.0**-7
"""The largest difference between both results, relative to their norms: they are rounded to bfloat16 in different
orders."""


def run(budget_ms: float = 300.0) -> bool:
    """Print the table. True if all results agree."""
    print(f"\nforgetting with prune={PRUNE:.1e} beside the plain call, {torch.cuda.get_device_name()}, times in ms\n")
    heads = ("fwd", "pruned", "bwd", "pruned", "both")
    print(
        f"{'case':26} {'pairs':>6} {'keys ms':>8}"
        + "".join(f"{head:>9}" for head in heads)
        + f" {'largest difference':>20}"
    )
    right = [_case(shape, budget_ms) for shape in cases()]
    return all(right)


def _case(shape: Shape, budget_ms: float) -> bool:
    op = golden.load_op("forgetting")
    torch.manual_seed(0)
    inputs = golden.draw_inputs(golden.load_manifest()["forgetting"], shape, dtype=DTYPE, device="cuda")
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    g = decays(shape, "cuda").requires_grad_()

    def keys() -> Tensor:
        return first_keys("forgetting", q, k, v, g, PRUNE)

    def forward(prune: float | None) -> Tensor:
        o: Tensor = op(q, k, v, g=g, prune=prune)
        return o

    def gradients(o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, (q, k, v, g), do, retain_graph=True)

    share = share_visited(keys(), shape.seq)
    outputs = {"plain": forward(None), "pruned": forward(PRUNE)}
    results = {name: (o, *gradients(o)) for name, o in outputs.items()}
    difference = max(_difference(x, y) for x, y in zip(*results.values(), strict=True))
    del results
    calls: list[dict[str, Callable[[], Any]]] = [
        {"keys": keys},
        {"plain": functools.partial(forward, None), "pruned": functools.partial(forward, PRUNE)},
        {name: functools.partial(gradients, o) for name, o in outputs.items()},
    ]
    (of_keys, fwd, bwd) = (
        {name: each.ms for name, each in timing.in_turn(each, budget_ms)[0].items()} for each in calls
    )
    gain = (fwd["plain"] + bwd["plain"]) / (fwd["pruned"] + bwd["pruned"])
    times = "".join(f"{each[name]:9.3f}" for each in (fwd, bwd) for name in ("plain", "pruned"))
    print(f"{shape!s:26} {share:6.1%} {of_keys['keys']:8.3f}{times}{gain:8.2f}x {difference:20.1e}", flush=True)
    return difference <= DIFFERENCE_LIMIT


def _difference(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())
