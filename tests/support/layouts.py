"""Causal layouts of one long row, for the tests of plans over several GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from codegen.testing.calls import load_op
from generated.torch_parallel import Layout, plan

LONG: dict[str, Any] = {"seq": 131072, "heads": (32, 8), "head_dim": 128}


def documents(seed: int, seq: int, count: int = 12) -> list[int]:
    """The rows at which documents of random lengths begin, and the end of the last one."""
    rng = np.random.default_rng(seed)
    return [0, *np.sort(rng.choice(np.arange(1, seq), count - 1, replace=False)).tolist(), seq]


def causal(ranks: int, **options: Any) -> Layout:
    return plan(load_op("causal"), ranks, **{**LONG, "strategy": "gather", **options})
