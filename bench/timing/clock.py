"""The time limit of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A limit of `minutes` from the clock's creation; None is no limit."""

    minutes: float | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """True if no new case may start."""
        return self.minutes is not None and time.monotonic() - self.start >= 60 * self.minutes

    def at(self, share: float) -> float | None:
        """The time, by `time.monotonic`, at which this share of the remaining time is used; None without a limit."""
        if self.minutes is None:
            return None
        now = time.monotonic()
        return now + share * max(0.0, self.start + 60 * self.minutes - now)
