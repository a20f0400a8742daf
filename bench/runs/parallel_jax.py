"""The JAX part of the parallel suite, one process for all GPUs: `python -m bench.runs.parallel_jax SPEC 0`.

It says what it found as `bench.runs.parallel_ranks` does. A time is that of one of many calls enqueued at once, in
rounds that take the implementations in turn.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.cases.parallel import ParallelCase, causal, documents, tiny
from bench.peers.parallel_jax_peers import Program, draw, kvax, one_device, ours
from bench.record import ParallelMeasurement
from bench.timing.loops import loops_ms
from bench.timing.ranks import reason
from generated._runtime.core.costs import Machine

BATCH, SEQ_PER_GPU = 4, 32768
STRATEGIES = ("auto", "gather")
ERROR = {"bfloat16": 3e-2, "float32": 2e-5}
"""The largest error beside one device, of o and dq, as a share of their size; a peer's may be twice that."""


def measure(spec: dict[str, Any], say: Callable[..., None]) -> None:
    """Every case, ours first."""
    ranks = len(jax.devices())
    machine = Machine(**spec["machine"])
    is_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if is_gpu else "float32"
    cases = [make(SEQ_PER_GPU * ranks) for make in (causal, documents)]
    for case in [tiny(case) for case in cases] if spec["tiny"] else cases:
        if spec["deadline"] and time.time() > spec["deadline"]:
            say(skipped=f"jax {case}")
            continue
        arrays = draw(case, BATCH, dtype)
        programs: dict[str, Program] = {}
        rows: list[ParallelMeasurement] = []
        builders: dict[str, Callable[[], Program]] = {"one GPU": lambda: one_device(case, arrays)}
        builders |= {
            f"ours, {name}": functools.partial(ours, case, arrays, name, machine)
            for name in STRATEGIES
        }
        builders |= {name: functools.partial(_kvax, case, arrays) for name in spec["peers"]}
        want: dict[str, Any] = {}
        for name, build in builders.items():
            say(doing=f"jax {case} by {name}")
            if spec["deadline"] and time.time() > spec["deadline"]:
                rows.append(_row(case, name, ranks, note="out of time"))
                continue
            try:
                program = build()
                o, dq, *_ = jax.block_until_ready(program.both())
                found = {"o": _whole(program, o), "dq": _whole(program, dq)}
                del o, dq, _
                jax.block_until_ready(program.forward())
            except Exception as error:  # a peer may be missing or fail in any way; its row says so
                rows.append(_row(case, name, ranks, note=reason(error)))
                continue
            if not want:
                want, programs[name] = found, program
                continue
            same = {key: bool(jnp.array_equal(found[key], want[key])) for key in want}
            bound = ERROR[dtype] * (1 if name.startswith("ours") else 2)
            wrong = _fault(found, want, bound)
            planned = {} if program.layout is None else _planned(program)
            rows.append(_row(case, name, ranks, note=wrong, bits=same, **planned))
            if not wrong:
                programs[name] = program
        say(doing=f"jax {case}, timing")
        say(rows=[asdict(row) for row in _timed(case, rows, programs, ranks)])
        del arrays, programs, builders
        gc.collect()


def _row(case: ParallelCase, name: str, ranks: int, **more: Any) -> ParallelMeasurement:
    title = f"{case.label} B{BATCH} S{case.seq} P{ranks}"
    return ParallelMeasurement(section="jax", case=title, implementation=name, ranks=ranks, **more)


def _planned(program: Program) -> dict[str, Any]:
    assert program.layout is not None
    layout = program.layout
    return {
        "planned": layout.imbalance,
        "predicted_ms": BATCH * layout.predicted * 1e3,
        "remark": layout.strategy,
    }


def _kvax(case: ParallelCase, arrays: dict[str, Any]) -> Program:
    """Kvax with jax-triton's hints restored, compiled."""
    if importlib.util.find_spec("kvax") is None or importlib.util.find_spec("jax_triton") is None:
        raise ModuleNotFoundError("kvax or jax-triton: pip install kvax jax-triton==0.3.1")
    from bench.peers import kvax_peer

    with kvax_peer.compiling(hints=True):
        program = kvax(case, arrays)
        jax.block_until_ready((program.forward(), program.both()))
    return program


def _whole(program: Program, x: Any) -> Any:
    """A result with all rows in order, on the first device."""
    return jax.device_put(jax.jit(program.in_order)(x), jax.devices()[0])


@jax.jit
def _error(x: Any, wanted: Any) -> Any:
    return jnp.linalg.norm((x.astype(jnp.float32) - wanted).ravel()) / jnp.linalg.norm(wanted.astype(jnp.float32).ravel())


def _fault(found: dict[str, Any], want: dict[str, Any], bound: float) -> str:
    errors = {name: float(_error(x, want[name])) for name, x in found.items()}
    bad = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= bound]
    return f"WRONG: {', '.join(bad)}" if bad else ""


def _timed(
    case: ParallelCase, rows: list[ParallelMeasurement], programs: dict[str, Program], ranks: int
) -> list[ParallelMeasurement]:
    """The rows with times. One GPU is a column of theirs."""
    names = list(programs)
    ms: dict[str, dict[str, float]] = {name: {} for name in names}
    for which in ("fwd", "fwd+bwd"):
        calls = [programs[name].forward if which == "fwd" else programs[name].both for name in names]
        for name, each in zip(names, loops_ms(*((call, jax.block_until_ready) for call in calls)), strict=True):
            ms[name][which] = each
    one = ms.get("one GPU", {})
    found = []
    for row in rows:
        times = ms.get(row.implementation, {})
        flops = {which: BATCH * case.flops(which) for which in times}
        found.append(
            replace(
                row,
                ms=times,
                one_ms=one if times else {},
                scaling={which: one[which] / ranks / each for which, each in times.items() if which in one},
                tflops={which: flops[which] / each / 1e9 for which, each in times.items()},
            )
        )
    return found


def main(arguments: list[str]) -> int:
    """Exit status 0."""
    path = Path(arguments[0])
    with Path(f"{path}.{arguments[1]}").open("w", encoding="utf-8") as file:

        def say(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        say(begin="jax")
        measure(json.loads(path.read_text(encoding="utf-8")), say)
        say(end="jax")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
