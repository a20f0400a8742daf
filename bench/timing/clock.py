"""How long a run may last."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Clock:
    """`minutes` from when it was made, or no limit where that is None."""

    minutes: float | None = None
    start: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether nothing new is to begin."""
        return self.minutes is not None and time.monotonic() - self.start >= 60 * self.minutes

    def at(self, share: float) -> float | None:
        """When this share of what is left from now on will be over, by `time.monotonic`; None without a limit."""
        if self.minutes is None:
            return None
        now = time.monotonic()
        return now + share * max(0.0, self.start + 60 * self.minutes - now)
