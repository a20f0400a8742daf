"""Random variants and calls against an evaluator of their own.

    TRITON_INTERPRET=1 python -m tests.fuzz --seed 7 --variants 200 --what dense,packed,portable,hopper
    python -m tests.fuzz --device cuda --variants 300 --jobs 14 --out DIR
    TRITON_INTERPRET=1 python -m tests.fuzz --entry '{"mask": "causal", "score": "0.5 * score"}' --what dense
    TRITON_INTERPRET=1 python -m tests.fuzz --entry '{...}' --call '{"q_lens": [20], "kv_lens": [40]}'

Variant n of a seed is always the same: `--seed 7 --first 130 --variants 1` repeats it. The exit status is 1 where
anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from codegen.cli.options import at_least

from .calls import Call
from .draw_calls import MODES
from .processes import outcomes
from .running import Failure, summary
from .session import FAMILIES, Outcome, Plan, as_json, run_one
from .shrink import shrunk


def main() -> int:
    options = _options()
    plan = _plan(options)
    if plan.device == "cpu":
        _need_interpreter(plan)
    if options.entry:
        return _one_entry(options, plan)
    numbers = range(options.first, options.first + options.variants)
    outcome, started = Outcome(), time.monotonic()
    for part in outcomes(plan, numbers, chunk=options.chunk, jobs=options.jobs):
        outcome.add(part)
        _progress(outcome, len(numbers), started)
        for number, failure in part.failures:
            print(f"\r\033[K\n{_report(plan, number, failure)}", flush=True)
    failures = [failure for _, failure in outcome.failures]
    if failures and options.shrink:
        _print_shrunk(failures, plan, options.shrink)
    _print_summary(outcome, time.monotonic() - started)
    if options.out:
        _write(Path(options.out), outcome)
    return int(bool(failures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument(
        "--first", type=at_least(0), default=0, metavar="N", help="number of the first variant (default: 0)"
    )
    parser.add_argument(
        "--variants", type=at_least(1), default=100, metavar="N", help="number of variants (default: 100)"
    )
    parser.add_argument(
        "--calls",
        type=at_least(0),
        metavar="N",
        help="calls of a variant in each mode and family; 0: one call in total",
    )
    parser.add_argument(
        "--what", default="", help=f"modes and families to run, some of {', '.join((*MODES, *FAMILIES))}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where kernels run (default: cpu)")
    parser.add_argument(
        "--jobs",
        type=at_least(0),
        default=1,
        metavar="N",
        help="worker processes (default: 1); 0: run in this process",
    )
    parser.add_argument(
        "--chunk", type=at_least(1), default=10, metavar="N", help="variants rendered together (default: 10)"
    )
    parser.add_argument("--entry", metavar="JSON", help="run only this variant")
    parser.add_argument("--call", metavar="JSON", help="run only this call of the variant of --entry")
    parser.add_argument(
        "--shrink",
        type=float,
        default=60,
        metavar="S",
        help="seconds to reduce a failure to a small case (default: 60); 0: do not",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write failures.json to")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    words = tuple(word for word in options.what.split(",") if word)
    unknown = [word for word in words if word not in (*MODES, *FAMILIES)]
    if unknown:
        sys.exit(f"--what: expected some of {', '.join((*MODES, *FAMILIES))}, got {', '.join(unknown)}")
    usual = ("portable", "hopper") if options.device == "cuda" else ("portable",)
    return Plan(
        seed=options.seed,
        modes=tuple(word for word in words if word in MODES) or MODES,
        families=tuple(word for word in words if word in FAMILIES) or usual,
        calls=options.calls if options.calls is not None else 0 if options.device == "cuda" else 1,
        device=options.device,
    )


def _need_interpreter(plan: Plan) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if plan.families != ("reference",) and not interpreted:
        sys.exit("set TRITON_INTERPRET=1: kernels run in Triton's interpreter; or --what reference, or --device cuda")


# --------------------------------------------------------------------------------------------------------------- prints


def _progress(outcome: Outcome, total: int, started: float) -> None:
    done = outcome.variants + len(outcome.refused)
    seconds = time.monotonic() - started
    line = f"{done} of {total} variants, {outcome.calls} calls, {len(outcome.failures)} wrong, {seconds:.0f} s"
    print(f"\r\033[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def _report(plan: Plan, number: int, failure: Failure) -> str:
    return f"{failure.kind}, --seed {plan.seed} --first {number} --variants 1\n{failure.describe()}"


def _print_shrunk(failures: Sequence[Failure], plan: Plan, seconds: float) -> None:
    """The first failure of each kind, made small."""
    first: dict[str, Failure] = {}
    for failure in failures:
        first.setdefault(failure.label, failure)
    for label, failure in list(first.items())[:8]:
        print(f"\n{label}, made small:", flush=True)
        print(shrunk(failure, plan.device, seconds).describe(), flush=True)


def _print_summary(outcome: Outcome, seconds: float) -> None:
    print(f"\n\n{outcome.variants} variants, {outcome.calls} calls, {seconds:.0f} s; {len(outcome.refused)} refused")
    for label, count in summary([failure for _, failure in outcome.failures]).items():
        print(f"  {count:5} {label}")
    print("nothing wrong" if not outcome.failures else f"{len(outcome.failures)} wrong")


def _write(folder: Path, outcome: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    failures = [as_json(number, failure) for number, failure in outcome.failures]
    found = {"variants": outcome.variants, "calls": outcome.calls, "refused": outcome.refused, "failures": failures}
    (folder / "failures.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def _one_entry(options: argparse.Namespace, plan: Plan) -> int:
    """One entry: the call given, or drawn ones."""
    entry, wrong = json.loads(options.entry), 0
    if options.call:
        calls = [Call.of(options.call)]
    else:
        from random import Random

        from .draw_calls import draw_call

        random = Random(f"{plan.seed} calls")
        kinds = [(mode, family) for mode in plan.modes for family in plan.families] * max(plan.calls, 1)
        calls = [draw_call(random, entry, mode=mode, family=family, device=plan.device) for mode, family in kinds]
    for call in calls:
        failure = run_one(entry, call, plan.device)
        wrong += failure is not None
        print(f"{'right' if failure is None else failure.kind}: {call.text()}")
        if failure is not None:
            print("\n".join(f"  {line}" for line in failure.text.splitlines()))
            if options.shrink and not options.call:
                print(f"made small:\n{shrunk(failure, plan.device, options.shrink).describe()}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
