"""What the tuner shows: a line that changes while it works, a line for each kernel, and what was gained."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from codegen.tune.record import Judgement, Outcome, Verdict, Winner


class Progress:
    """Prints to the terminal; `total` kernels are to be tuned, or as many comparisons of families to be judged."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.outcomes: list[Outcome] = []
        self.judgements: list[Judgement] = []
        self._start = time.monotonic()

    def note(self, text: str) -> None:
        """Show what goes on, on a terminal only."""
        if sys.stderr.isatty():
            print(f"\r\033[K{self._count()} {text}  {self._eta()}", end="", file=sys.stderr, flush=True)

    def report(self, outcome: Outcome) -> None:
        """One line for a kernel that is done."""
        self.outcomes.append(outcome)
        self._line(f"{outcome.group}: {summary(outcome)}")

    def judged(self, judgement: Judgement) -> None:
        """One line for a comparison that is done."""
        self.judgements.append(judgement)
        self._line(f"{judgement.comparison}: {judgement_text(judgement)}")

    def _line(self, text: str) -> None:
        self.done += 1
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"{self._count()} {text}  {self._eta()}", flush=True)

    def _count(self) -> str:
        return f"[{self.done}/{self.total}]"

    def _eta(self) -> str:
        if not self.done:
            return ""
        left = (time.monotonic() - self._start) / self.done * (self.total - self.done)
        return f"({clock(left)} left)" if self.done < self.total else f"({clock(time.monotonic() - self._start)})"


def clock(seconds: float) -> str:
    """A duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def summary(outcome: Outcome) -> str:
    """The gain over the defaults, the tiles chosen, and how many did not count."""
    if not outcome.winners:
        reason = next(iter(outcome.failed.values()), "no candidate")
        return f"no tile is right: {reason}"
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
    """The default's time over the tile's; None where the default does not run."""
    return winner.default_ms / winner.ms if winner.default_ms else None


def totals(outcomes: Sequence[Outcome]) -> str:
    """The geometric mean of all gains, with the least and the greatest, over the cases that were timed."""
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
    """Where a comparison overrules the rule, with what gain, and which contenders did not count."""
    if not judgement.verdicts:
        return f"no verdict: {judgement.undecided}"
    others = [verdict for verdict in judgement.verdicts if verdict.taken != verdict.ruled]
    parts = [f"{len(judgement.verdicts) - len(others)} of {len(judgement.verdicts)} as a rule"]
    parts += [
        f"{verdict.taken} for {verdict.ruled} at seq {verdict.workload.seq} group {verdict.workload.group}"
        + (f", {ratio:.2f} times as fast" if (ratio := overruled(verdict)) else ", which does not run")
        for verdict in others
    ]
    failed = {name: reason for verdict in judgement.verdicts for name, reason in verdict.failed.items()}
    parts += [f"{name} failed: {reason}" for name, reason in failed.items()]
    return "; ".join([*parts, *([f"others not timed: {judgement.undecided}"] if judgement.undecided else [])])


def overruled(verdict: Verdict) -> float | None:
    """The time of the rule's contender over that of the one taken; None where the rule's does not run."""
    return verdict.ms[verdict.ruled] / verdict.ms[verdict.taken] if verdict.ruled in verdict.ms else None


def family_totals(judgements: Sequence[Judgement]) -> str:
    """In how many cases families were compared, and what was gained where the rule does not hold."""
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
