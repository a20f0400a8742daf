"""The partitions of a program. Each is a thread; one runs at a time, until it waits or lets the others go first.

The order of execution is therefore the same each time, and a deadlock is found at once: no partition can go on.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

from .errors import EmulationError

EMULATED = "<emulated "
"""The prefix of the file names of emulated source."""


class DeadlockError(EmulationError):
    """Every partition waits for another."""


class _Abandoned(BaseException):
    """Ends the partitions of a program that failed."""


@dataclass(frozen=True)
class Wait:
    """A wait of a partition: a function that describes it, whether it is over, and its place in the source."""

    describe: Callable[[], str]
    is_over: Callable[[], bool]
    place: str


Known: TypeAlias = dict["Partition", int]
"""A vector clock: for each partition, the last of its arrivals that happened before, directly or through others."""


def learn(known: Known, more: Known) -> None:
    for partition, arrival in more.items():
        known[partition] = max(known.get(partition, -1), arrival)


class Partition:
    """A function of a program, run by its own `warps` warps."""

    def __init__(self, name: str, warps: int) -> None:
        self.name, self.warps = name, warps
        self.seen: dict[Any, int] = {}
        """For each barrier, how many phases this partition knows to be complete."""
        self.products: list[Any] = []
        """The wgmma in flight, the oldest first."""
        self.additions: list[Any] = []
        """The additions by TMA in flight, the oldest first."""
        self.arrivals = 0
        """The number of its own arrivals. Each of them ends a section of its work."""
        self.known: Known = {}
        self.waits_for: Wait | None = None
        self.is_done = False
        self._turn = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def arrive(self) -> Known:
        """Count an arrival; returns the vector clock that a partition learns when it waits for this arrival."""
        self.known[self] = self.arrivals
        self.arrivals += 1
        return self.known

    def start(self, body: Callable[[], None]) -> None:
        def run() -> None:
            self._turn.acquire()
            body()

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        self._turn.release()

    def sleep(self) -> None:
        self._turn.acquire()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()


def _lines(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The function names and line numbers of the frames that are in emulated source."""
    emulated = [each for each in frames if each[0].f_code.co_filename.startswith(EMULATED)]
    return " > ".join(f"{frame.f_code.co_name}:{line}" for frame, line in emulated)


def emulated_place() -> str:
    """The place of this thread in emulated source, from the outermost function, the kernel's or a partition's."""
    return _lines(reversed(list(traceback.walk_stack(sys._getframe()))))


class Scheduler:
    """Runs the partitions of a program in turns."""

    def __init__(self, land_copy: Callable[[], bool]) -> None:
        """`land_copy` completes a pending copy, or returns False. It is called when no partition can go on."""
        self._land_copy = land_copy
        self._partitions: list[Partition] = []
        self._failure: BaseException | None = None
        self.current: Partition | None = None

    def run(self, partitions: Sequence[Partition], bodies: Sequence[Callable[[], None]]) -> None:
        """Run every partition to its end."""
        self._partitions = list(partitions)
        for partition, body in zip(partitions, bodies, strict=True):
            partition.start(lambda partition=partition, body=body: self._run(partition, body))  # type: ignore[misc]
        self.current = self._partitions[0]
        self.current.go_on()
        for partition in partitions:
            partition.join()
        self.current = None
        if self._failure is not None:
            raise self._failure

    def yield_turn(self, wait: Wait | None = None) -> None:
        """Let the others go first; go on once `wait` is over."""
        me = self.current
        assert me is not None
        me.waits_for = wait
        chosen = self._next(me)
        if chosen is not me:
            chosen.go_on()
            me.sleep()
            if self._failure is not None:
                raise _Abandoned
        me.waits_for = None

    def _run(self, partition: Partition, body: Callable[[], None]) -> None:
        try:
            if self._failure is not None:
                return
            body()
            partition.is_done = True
            if not all(each.is_done for each in self._partitions):
                self._next(partition).go_on()
        except _Abandoned:
            pass
        except BaseException as error:
            lines = _lines(traceback.walk_tb(error.__traceback__))
            if lines and not isinstance(error, DeadlockError):
                error.add_note(f"in partition {partition.name}, {lines}")
            self._failure = error
            for other in self._partitions:
                if other is not partition:
                    other.go_on()

    def _next(self, after: Partition) -> Partition:
        first = self._partitions.index(after) + 1
        order = self._partitions[first:] + self._partitions[:first]
        while True:
            for partition in order:
                if not partition.is_done and (partition.waits_for is None or partition.waits_for.is_over()):
                    self.current = partition
                    return partition
            if not self._land_copy():
                raise DeadlockError(self._stuck())

    def _stuck(self) -> str:
        waits = [(each.name, each.waits_for) for each in self._partitions if not each.is_done]
        lines = [f"  {name} waits for {wait.describe()}, {wait.place}" for name, wait in waits if wait is not None]
        return "\n".join(["no partition can go on:", *lines])
