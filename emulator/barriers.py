"""mbarriers: partitions and copies arrive at them, and a partition that has waited learns what happened before."""

from __future__ import annotations

from .errors import check
from .partitions import Known, learn
from .values import Operand


class Barrier:
    """An mbarrier: a phase completes once all arrivals and all expected bytes have come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phases = 0  # that are complete
        self.known: Known = {}  # what a partition learns when it has waited for this barrier
        self._arriving: Known = {}
        self._arrivals = self._missing = self._bytes = 0

    def init(self, arrivals: int) -> None:
        check(self._arrivals == 0 and arrivals > 0, f"{self.name}: init({arrivals}) of a barrier with {self._arrivals}")
        self._arrivals = self._missing = arrivals

    def arrive(self, arrivals: int, known: Known, more_bytes: int = 0) -> None:
        self._missing -= arrivals
        check(self._missing >= 0, f"{self.name}: more than {self._arrivals} arrivals in phase {self.phases}")
        self._bytes += more_bytes
        learn(self._arriving, known)
        self._complete()

    def receive(self, landed: int) -> None:
        self._bytes -= landed
        self._complete()

    def _complete(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self.phases += 1
            self._missing = self._arrivals
            learn(self.known, self._arriving)
            self._arriving = {}

    def is_past(self, parity: int) -> bool:
        """Whether the phase before the current phase has this parity."""
        return self.phases % 2 != parity

    def check_wait(self, parity: int) -> None:
        check(self._arrivals > 0, f"{self.name} was not initialised")
        check(parity in (0, 1), f"{self.name}: parity {parity}")

    def __str__(self) -> str:
        return f"{self.name} (phase {self.phases}, {self._missing} arrivals and {self._bytes} bytes short)"


class Barriers:
    """An allocation of barriers."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self._barriers = barriers

    def index(self, i: Operand) -> Barrier:
        place = int(i)
        check(0 <= place < len(self._barriers), f"barrier {place} of {len(self._barriers)}")
        return self._barriers[place]
