"""What the tuner shows: a line that changes while it works, a line for each kernel, and what was gained."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from codegen.tune.record import Outcome, Winner


class Progress:
    """Prints to the terminal; `total` kernels are to be tuned."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.outcomes: list[Outcome] = []
        self._start = time.monotonic()

    def note(self, text: str) -> None:
        """Show what goes on, on a terminal only."""
        if sys.stderr.isatty():
            print(f"\r\033[K{self._count()} {text}  {self._eta()}", end="", file=sys.stderr, flush=True)

    def report(self, outcome: Outcome) -> None:
        """One line for a kernel that is done."""
        self.outcomes.append(outcome)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"{self._count()} {outcome.group}: {summary(outcome)}  {self._eta()}", flush=True)

    def _count(self) -> str:
        return f"[{len(self.outcomes)}/{self.total}]"

    def _eta(self) -> str:
        done = len(self.outcomes)
        if not done:
            return ""
        left = (time.monotonic() - self._start) / done * (self.total - done)
        return f"({clock(left)} left)" if done < self.total else f"({clock(time.monotonic() - self._start)})"


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
