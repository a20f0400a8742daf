"""The output of the tuner: the current step, a line for each kernel, and the gains in total."""

from __future__ import annotations

import math
from collections.abc import Sequence

from codegen.tune.record import Judgement, Outcome, Verdict, Winner
from codegen.util.terminal import StatusLine


class Progress:
    """The output of a tuning run of `total` kernels, or of as many comparisons of kernel families."""

    def __init__(self, total: int) -> None:
        self.outcomes: list[Outcome] = []
        self.judgements: list[Judgement] = []
        self._status = StatusLine(total)

    @property
    def done(self) -> int:
        """Kernels tuned, or comparisons made."""
        return self._status.done

    def note(self, text: str) -> None:
        """Show the current step, on a terminal only."""
        self._status.show(text)

    def report(self, outcome: Outcome) -> None:
        """Print one line for a tuned kernel."""
        self.outcomes.append(outcome)
        self._line(f"{outcome.group}: {summary(outcome)}")

    def judged(self, judgement: Judgement) -> None:
        """Print one line for a comparison."""
        self.judgements.append(judgement)
        self._line(f"{judgement.comparison}: {judgement_text(judgement)}")

    def close(self) -> None:
        """Erase the current step."""
        self._status.erase()

    def _line(self, text: str) -> None:
        status = self._status
        status.done += 1
        status.erase()
        print(f"{status.count} {text}  {status.time_left}", flush=True)


def summary(outcome: Outcome) -> str:
    """The gain over the default tiles, the chosen tiles, and the number of tiles that failed."""
    if not outcome.winners:
        reason = next(iter(outcome.failed.values()), "no candidate")
        return f"no tile works: {reason}"
    ratios = [ratio for winner in outcome.winners if (ratio := gain(winner))]
    chosen = dict.fromkeys(_tile_text(winner) for winner in outcome.winners)
    gained = (
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as the default" if ratios else "default does not run"
    )
    failed = f", {len(outcome.failed)} tiles failed" if outcome.failed else ""
    return f"{gained}; {' | '.join(chosen)}{failed}"


def _tile_text(winner: Winner) -> str:
    tile = winner.tile
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"


def gain(winner: Winner) -> float | None:
    """The default tile's time divided by the winner's; None if the default does not run."""
    return winner.default_ms / winner.ms if winner.default_ms else None


def totals(outcomes: Sequence[Outcome]) -> str:
    """The geometric mean, the least and the greatest of all gains."""
    ratios = [ratio for outcome in outcomes for winner in outcome.winners if (ratio := gain(winner))]
    if not ratios:
        return "nothing was timed"
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    better = sum(ratio > 1.0 for ratio in ratios)
    return (
        f"tuned tiles against the defaults: {mean:.3f} times as fast on average (geometric), from {min(ratios):.2f} "
        f"to {max(ratios):.2f}; another tile than the default in {better} of {len(ratios)} cases"
    )


def judgement_text(judgement: Judgement) -> str:
    """The workloads in which a comparison overrules the rule, the gain in each, and the contenders that failed."""
    if not judgement.verdicts:
        return f"no verdict: {judgement.undecided}"
    others = [verdict for verdict in judgement.verdicts if verdict.taken != verdict.ruled]
    parts = [f"{len(judgement.verdicts) - len(others)} of {len(judgement.verdicts)} by the default rule"]
    parts += [
        f"{verdict.taken} for {verdict.ruled} at seq {verdict.workload.seq} group {verdict.workload.group}"
        + (f", {ratio:.2f} times as fast" if (ratio := overruled(verdict)) else ", which does not run")
        for verdict in others
    ]
    failed = {name: reason for verdict in judgement.verdicts for name, reason in verdict.failed.items()}
    parts += [f"{name} failed: {reason}" for name, reason in failed.items()]
    return "; ".join([*parts, *([f"others not timed: {judgement.undecided}"] if judgement.undecided else [])])


def overruled(verdict: Verdict) -> float | None:
    """The time of the rule's contender divided by that of the chosen one; None if the rule's does not run."""
    return verdict.ms[verdict.ruled] / verdict.ms[verdict.taken] if verdict.ruled in verdict.ms else None


def family_totals(judgements: Sequence[Judgement]) -> str:
    """The number of comparisons in which the rule holds, and the gain in the others."""
    verdicts = [verdict for judgement in judgements for verdict in judgement.verdicts]
    if not verdicts:
        return "no families were compared"
    others = [verdict for verdict in verdicts if verdict.taken != verdict.ruled]
    text = f"families: the rule holds in {len(verdicts) - len(others)} of {len(verdicts)} cases"
    ratios = [ratio for verdict in others if (ratio := overruled(verdict))]
    if not ratios:
        return text
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return f"{text}; the others gain {mean:.3f} on average (geometric), {max(ratios):.2f} at most"
