"""The JAX part of the parallel suite, one process for all GPUs: `python -m bench.runs.parallel_jax SPEC 0`.

It writes its results in the form of `bench.runs.parallel_ranks`. A time is that of one of many calls enqueued at once,
in rounds that take the implementations in turn.
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
from bench.peers.parallel_ours import machine_of
from bench.record import ParallelMeasurement, in_one_line
from bench.timing.loops import loops_ms

BATCH, SEQ_PER_GPU = 4, 32768
STRATEGIES = ("auto", "gather")
ERROR = {"bfloat16": 3e-2, "float32": 2e-5}
"""The largest error of o and dq against one device, relative to their norms; a peer's may be twice that."""


def measure(spec: dict[str, Any], say: Callable[..., None]) -> None:
    """Measure every case, ours first."""
    for make in (documents,) if spec["tiny"] else (causal, documents):
        case = make(SEQ_PER_GPU * len(jax.devices()))
        if spec["tiny"]:
            case = tiny(case)
        if _is_over(spec):
            say(skipped=f"jax {case}")
            continue
        say(rows=[asdict(row) for row in measured(case, spec, say)])
        gc.collect()


def _is_over(spec: dict[str, Any]) -> bool:
    return bool(spec["deadline"]) and time.time() > spec["deadline"]


def measured(case: ParallelCase, spec: dict[str, Any], say: Callable[..., None]) -> list[ParallelMeasurement]:
    """A row for each implementation of a case, checked against one device and timed."""
    ranks = len(jax.devices())
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    arrays = draw(case, BATCH, dtype)
    machine = machine_of(spec["machine"])
    builders: dict[str, Callable[[], Program]] = {
        "one GPU": functools.partial(one_device, case, arrays),
        **{
            f"ours, {name}": functools.partial(ours, case, arrays, name, machine)
            for name in STRATEGIES[: 1 if spec["tiny"] else None]
        },
        **{name: functools.partial(_kvax, case, arrays) for name in spec["peers"]},
    }
    programs: dict[str, Program] = {}
    rows: list[ParallelMeasurement] = []
    want: dict[str, Any] = {}
    for name, build in builders.items():
        say(doing=f"jax {case} by {name}")
        if _is_over(spec):
            rows.append(_row(case, name, ranks, remark="out of time"))
            continue
        try:
            program = build()
            o, dq, _dk, _dv = jax.block_until_ready(program.both())
            found = {"o": _whole(program, o), "dq": _whole(program, dq)}
            jax.block_until_ready(program.forward())
        except Exception as error:  # a peer may be missing or fail in any way; its row says so
            rows.append(_row(case, name, ranks, note=in_one_line(error, 200)))
            continue
        if name == "one GPU":
            want, programs[name] = found, program
            continue
        row = _row(case, name, ranks)
        if program.layout is not None:
            predicted = BATCH * program.layout.predicted * 1e3
            row = replace(row, planned=program.layout.imbalance, predicted_ms=predicted, remark=program.layout.strategy)
        if want:
            same = {key: bool(jnp.array_equal(found[key], want[key])) for key in want}
            wrong = _fault(found, want, ERROR[dtype] * (1 if name.startswith("ours") else 2))
            row = replace(row, bits=same, note=wrong)
        rows.append(row)
        if not row.note:
            programs[name] = program
    say(doing=f"jax {case}, timing")
    return _timed(case, rows, programs, ranks)


def _row(case: ParallelCase, name: str, ranks: int, **more: Any) -> ParallelMeasurement:
    title = f"{case.label} B{BATCH} S{case.seq} P{ranks}"
    return ParallelMeasurement(section="jax", case=title, implementation=name, ranks=ranks, **more)


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
    return jnp.linalg.norm((x.astype(jnp.float32) - wanted).ravel()) / jnp.linalg.norm(
        wanted.astype(jnp.float32).ravel()
    )


def _fault(found: dict[str, Any], want: dict[str, Any], bound: float) -> str:
    errors = {name: float(_error(x, want[name])) for name, x in found.items()}
    bad = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= bound]
    return f"WRONG: {', '.join(bad)}" if bad else ""


def _timed(
    case: ParallelCase, rows: list[ParallelMeasurement], programs: dict[str, Program], ranks: int
) -> list[ParallelMeasurement]:
    """The rows with times. The time of one GPU is a column of each row."""
    names = list(programs)
    ms: dict[str, dict[str, float]] = {name: {} for name in names}
    for which in ("fwd", "fwd+bwd"):
        calls = [_alone(programs[name].forward if which == "fwd" else programs[name].both) for name in names]
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


def _alone(call: Callable[[], Any]) -> Callable[[], Any]:
    """On a CPU, a call that waits for its end: XLA lacks the threads for the collectives of several calls at once."""
    return call if jax.default_backend() == "gpu" else lambda: jax.block_until_ready(call())


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
