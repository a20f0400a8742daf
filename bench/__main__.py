"""The command `python -m bench`. Its options are in `bench.options`; README.md says how it measures."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from bench import record
from bench.cases.case import Case
from bench.options import PRINTED, SPEED, SUITES, parser
from bench.record import Results
from bench.report.parallel import report as parallel_report
from bench.report.tables import STYLES, report
from bench.timing.clock import Clock
from codegen.util.terminal import print_coloured

EXIT_OK, EXIT_WRONG, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

Keep = Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every suite passed, 1 if one failed, 2 if bench cannot run here, 130 if interrupted."""
    made = parser()
    options = made.parse_args(arguments)
    if options.stored:
        given = (name for name, value in vars(options).items() if value != made.get_default(name))
        unread = [name for name in given if name not in ("stored", "csv", "plots")]
        if unread:
            made.error(f"--from reports a stored run: --{unread[0]} has no effect beside it")
    if options.plots and importlib.util.find_spec("matplotlib") is None:
        return _refuse("--plots needs matplotlib: pip install matplotlib")
    try:
        if not options.list:
            _prepare_outputs(options)
        if options.stored:
            results = record.load(options.stored)
            _print_stored(results)
            _present(options, results)
            return EXIT_OK
        if options.list:
            return _list(options)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    import torch

    on_cpu = options.quick and set(options.suite) <= {"models", "parallel"}
    if not torch.cuda.is_available() and not on_cpu:
        return _refuse(
            "python -m bench measures GPU kernels, and torch finds no GPU here. On a CPU: python -m examples.demo, "
            "or python -m bench --suite models --quick"
        )
    return _measure(options)


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return EXIT_ERROR


def _prepare_outputs(options: argparse.Namespace) -> None:
    """Raise `ValueError` for a file or folder that cannot be written: a run would end in that error after hours."""
    for option, file in (("--json", options.json), ("--csv", options.csv)):
        if file is not None:
            record.prepare_file(option, file)
    if options.plots is not None:
        record.prepare_folder("--plots", options.plots)


def _list(options: argparse.Namespace) -> int:
    from bench.selection import listed

    lines = listed(options)
    if not lines:
        select = "--only matches" if options.only else "the options select"
        print(f"{select} no case of the suites {', '.join(options.suite)}", file=sys.stderr)
        return EXIT_WRONG
    print("\n".join(lines))
    return EXIT_OK


def _measure(options: argparse.Namespace) -> int:
    from bench.peers.installed import machine
    from bench.timing.measure import GpuLostError
    from bench.timing.warm_compile import share_caches

    share_caches()
    clock, results = Clock(minutes=options.minutes), Results(machine=machine())
    results.settings = {"arguments": sys.argv[1:], "jobs": options.jobs, "minutes": options.minutes}
    keep = functools.partial(keep_results, options, results)
    print(", ".join(f"{name} {what}" for name, what in results.machine.items()), flush=True)
    keep()
    code = EXIT_OK
    try:
        right = run_suites(options, results, keep, clock)
        code = EXIT_OK if right else EXIT_WRONG
    except KeyboardInterrupt:
        print("\ninterrupted; these are the measurements so far", flush=True)
        code = EXIT_INTERRUPTED
    except GpuLostError as error:
        print(f"\nthe GPU is lost, so no other case can run: {error}", flush=True)
        code = EXIT_WRONG
    keep()
    try:
        _present(options, results)
    except OSError as error:
        return _refuse(str(error))
    return code


def run_suites(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    """Run every selected suite; true if all passed."""
    rest: dict[str, Callable[[], bool]] = {
        "packed": lambda: _packed(options, results, keep, clock),
        "decode": lambda: _decode(options, results, keep, clock),
        "models": lambda: _models(options, results, keep, clock),
        "parallel": lambda: _parallel(options, results, keep, clock),
        "jax": lambda: run_jax(options, results, keep, clock),
        **{suite: functools.partial(_printed, suite) for suite in PRINTED},
        "host": lambda: _host(results, keep),
    }
    right = True
    if "front" in options.suite and "packed" not in options.suite:
        right = _guarded(rest["packed"])
    if set(SPEED) & set(options.suite):
        right = _speed(options, results, keep, clock) and right
    for name in SUITES:
        if name in rest and name in options.suite:
            if clock.over:
                print(f"{name}: skipped, out of time", flush=True)
                continue
            right = _guarded(rest[name]) and right
    return right


def _guarded(suite: Callable[[], bool]) -> bool:
    """Run a suite; if it raises, the other suites still run."""
    try:
        return suite()
    except Exception:
        traceback.print_exc()
        return False


def _speed(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    from bench.runs import speed

    chosen = speed.plan(options)
    _say_missing(results, chosen.missing)
    if not chosen.cases:
        # --only may select cases of the other suites.
        print("--only matches no case of the speed suites", file=sys.stderr)
        return not set(options.suite) <= set(SPEED)
    results.settings["budget_ms"] = speed.budget_of(options)
    speed.run(options, chosen, results, keep, clock)
    if "front" in options.suite:
        _keep_block_shares(results, chosen.cases, keep)
    return results.right()


def _keep_block_shares(results: Results, chosen: Sequence[Case], keep: Keep) -> None:
    """Store for each case the share of the scores in computed blocks that its mask keeps."""
    front = set(results.panels().get("front", ()))
    try:
        from bench.cases.block_shares import shares_by_name

        results.settings["block_shares"] = shares_by_name(case for case in chosen if case.name in front)
    except ModuleNotFoundError as error:
        print(f"no shares of computed blocks: {error.name} is not installed", flush=True)
    keep()


def _say_missing(results: Results, gone: Mapping[str, str]) -> None:
    """Print once for each missing peer how to install it."""
    for peer, name in gone.items():
        if peer not in results.missing:
            print(f"{peer} is not installed: pip install {name}", flush=True)
    results.missing |= gone


def _packed(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    from bench.peers.installed import missing
    from bench.runs import packed
    from bench.selection import packed_cases

    gone = missing(peer for peer in ("fa4", "fla") if options.peers is None or peer in options.peers)
    _say_missing(results, gone)
    chosen = packed_cases(options, gone)
    if not chosen and "packed" not in options.suite:
        return True
    if not chosen:
        print("--only matches no case of the packed suite", file=sys.stderr)
        return len(options.suite) > 1

    def keep_packed(measurements: Sequence[packed.PackedMeasurement]) -> None:
        results.others["packed"] = [asdict(m) for m in measurements]
        keep()

    return packed.run(10 if options.quick else 30, options.jobs, chosen, keep_packed, clock)


def _decode(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    from bench.cases.decode import PEERS
    from bench.peers.installed import missing
    from bench.runs import decode
    from bench.selection import decode_cases

    gone = missing(["jax", *(peer for peer in PEERS if options.peers is None or peer in options.peers)])
    _say_missing(results, gone)
    chosen = decode_cases(options, gone)
    if not chosen:
        print("--only matches no case of the decode suite", file=sys.stderr)
        return len(options.suite) > 1

    def keep_decode(rows: list[dict[str, Any]], copy_tb_per_s: float) -> None:
        results.others["decode"] = rows
        results.settings["copy_tb_per_s"] = copy_tb_per_s
        keep()

    return decode.run(chosen, keep_decode, clock, options.jobs)


def _models(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    import torch

    from bench.peers.installed import missing
    from bench.runs import models
    from bench.selection import model_cases

    wanted = model_cases(options)
    if not wanted:
        print("--only matches no case of the suite models", file=sys.stderr)
        return len(options.suite) > 1
    needs = {case.name: "flax" if case.architecture == "Flax" else "transformers" for case in wanted}
    gone = missing(dict.fromkeys(needs.values()))
    _say_missing(results, gone)

    def keep_models(rows: list[dict[str, Any]]) -> None:
        results.others["models"] = rows
        keep()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    effort = models.QUICK if options.quick else models.Effort()
    return models.run([case for case in wanted if needs[case.name] not in gone], keep_models, clock, device, effort)


def _parallel(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    import torch

    from bench.peers.installed import missing
    from bench.runs import parallel
    from bench.selection import parallel_plan
    from generated._runtime.core.parallel.costs import Machine

    known = {each.name for each in fields(Machine)}
    if unknown := set(options.machine) - known:
        print(
            f"--machine: no such rate: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}",
            file=sys.stderr,
        )
        return False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count() if device == "cuda" else 2
    ranks = options.ranks or there
    least = 1 if options.replay else 2
    if not least <= ranks <= max(there, 0 if device == "cuda" else ranks):
        print(f"parallel: skipped: {ranks} ranks on {there} GPUs; --replay N needs one GPU alone", file=sys.stderr)
        return len(options.suite) > 1
    if "jax" in options.parts and not options.replay:
        _say_missing(results, missing(peer for peer in ("kvax",) if options.peers is None or peer in options.peers))
    what = parallel_plan(options, ranks, device)
    if not what.jobs and not what.with_jax:
        print("--only matches no case of the suite parallel", file=sys.stderr)
        return len(options.suite) > 1
    results.settings |= {"ranks": ranks, "replay": list(options.replay), "machine": options.machine}

    def keep_parallel(rows: list[dict[str, Any]]) -> None:
        results.others["parallel"] = rows
        keep()

    right, skipped = parallel.run(what, keep_parallel, clock)
    results.skipped += skipped
    return right


def run_jax(options: argparse.Namespace, results: Results, keep: Keep, clock: Clock) -> bool:
    """Run the suite `jax`; true if it passed."""
    from bench.peers.installed import missing

    try:
        from bench.runs import in_jax

        in_jax.require_gpu()
    except (ImportError, RuntimeError) as error:
        _say_missing(results, missing(["jax"]))
        print(f"the jax suite cannot run: {error}", file=sys.stderr)
        return len(options.suite) > 1

    def keep_jax(measurements: Sequence[Any]) -> None:
        results.others["jax"] = [asdict(m) for m in measurements]
        keep()

    peers = {"cudnn", "pallas", "kvax"}
    wanted = peers if options.peers is None else peers & set(options.peers)
    gone = missing(wanted & set(options.cases))
    _say_missing(results, gone)
    sections = [name for name in options.cases if name not in peers or name in wanted - set(gone)]
    return in_jax.run(sections, keep_jax, clock)


def _host(results: Results, keep: Keep) -> bool:
    from bench.runs import host

    right, rows = host.run()
    results.others["host"] = [asdict(row) for row in rows]
    keep()
    return right


def _printed(suite: str) -> bool:
    """Run a suite that only prints its table."""
    right: bool = importlib.import_module(f"bench.runs.{suite}").run()
    return right


def keep_results(options: argparse.Namespace, results: Results) -> None:
    """Write the results so far to the file of `--json`."""
    if options.json:
        record.save(options.json, results)


def _print_stored(results: Results) -> None:
    """Print the tables that suites print themselves when they run."""
    for suite, rows in results.others.items():
        if suite == "packed":
            from bench.cases.packed import cases, front_cases
            from bench.runs import packed

            print(f"\n{packed.table([packed.PackedMeasurement(**row) for row in rows], cases() + front_cases())}")
        elif suite == "decode":
            from bench.runs import decode

            copy = results.settings["copy_tb_per_s"]
            print(f"\n{decode.table([decode.DecodeMeasurement(**row) for row in rows], copy)}")
        elif suite == "models":
            from bench.runs import models

            print(f"\n{models.table([models.ModelMeasurement(**row) for row in rows])}")
        elif suite != "parallel":  # `_present` prints its tables
            print(f"\nno table of: {suite}")


def _present(options: argparse.Namespace, results: Results) -> None:
    """Print the tables, and write the files that the options name."""
    if results.measurements:
        print_coloured(f"\n{report(results)}", STYLES)
    if "parallel" in results.others:
        print(f"\n{parallel_report(results.others['parallel'])}", flush=True)
    if options.csv:
        record.write_csv(options.csv, results)
    if options.plots:
        from bench.report import plots

        for path in plots.save_all(results, options.plots):
            print(f"drawn: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
