"""Compares the launches of two packages, level by level: only what differs at one level is compared at the next."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, Self

from codegen.compare.calls import Call, variant_of
from codegen.compare.launches import Launch, Level, Request, launches
from codegen.compare.machine import first_difference
from codegen.compile.pool import Pool
from codegen.spec.model import Variant
from codegen.util.errors import CodegenError
from codegen.util.terminal import StatusLine


class Status(Enum):
    """The result of comparing a launch of one package with that of the other."""

    SAME_SOURCE = "same source"
    SAME_IR = "same IR"
    SAME_CODE = "same code"
    DIFFERENT = "different"
    MISSING = "missing"
    FAILED = "failed"

    @property
    def is_equal(self) -> bool:
        return self in _EQUAL.values()


_EQUAL = {Level.SOURCE: Status.SAME_SOURCE, Level.IR: Status.SAME_IR, Level.CODE: Status.SAME_CODE}


@dataclass(frozen=True, kw_only=True)
class Result:
    """A kernel as one call launches it in both packages. `detail`: the first lines that differ, or the errors."""

    call: Call
    old: Launch | None
    new: Launch | None
    status: Status
    detail: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The kernel's name, or both names of a kernel that was renamed."""
        names = dict.fromkeys(launch.name for launch in (self.old, self.new) if launch is not None)
        return " -> ".join(names) or "the call"


@dataclass(frozen=True, kw_only=True)
class Packages:
    """The two packages that are compared. `unchanged`: the kernels whose code is equal in both."""

    old: Path
    new: Path
    variants: Mapping[str, Variant]
    unchanged: frozenset[str] = frozenset()


_Pair = tuple[Launch | None, Launch | None]


@dataclass(frozen=True)
class _Pending:
    """A call whose launches are still to be compared: those of the named kernels, or all if the names are None."""

    call: Call
    old_names: frozenset[str] | None = None
    new_names: frozenset[str] | None = None


class Workers(Protocol):
    """Processes that describe the launches of one package, with the interface of `pool.Pool`; a context manager."""

    def submit(self, item: Request, /) -> Future[list[Launch]]:
        """The launches that a request asks for."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def processes(number: int) -> Workers:
    """Processes of this machine."""
    return Pool(launches, number)


def compare_calls(
    packages: Packages,
    calls: Sequence[Call],
    jobs: int,
    *,
    first: Level = Level.SOURCE,
    workers: Callable[[int], Workers] = processes,
) -> list[Result]:
    """Compare every launch of every call, beginning at the level `first`, in `jobs` processes, but at least two."""
    if not calls:
        return []
    with ExitStack() as stack:
        texts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="codegen-compare-")))
        # A process imports one package: both may have the same name.
        old, new = (stack.enter_context(workers(max(1, jobs // 2))) for _ in range(2))
        rounds = _Rounds(packages, texts, old, new)
        pending = [_Pending(call) for call in calls]
        for level in Level:
            if level >= first:
                pending = rounds.run(pending, level)
        return rounds.results


@dataclass
class _Rounds:
    packages: Packages
    texts: Path
    old: Workers
    new: Workers
    results: list[Result] = field(default_factory=list)

    def run(self, pending: Sequence[_Pending], level: Level) -> list[_Pending]:
        """Compare at one level; returns what is left to compare at a higher level."""
        left = []
        for each, old, new in self._described(pending, level):
            escalated = []
            if isinstance(old, Exception) or isinstance(new, Exception):
                self.results.append(_failure(each.call, old, new))
                continue
            for pair in _pairs(old, new):
                result = self._result(each.call, pair)
                if result.status is Status.DIFFERENT and min(_levels(pair)) < Level.CODE:
                    escalated.append(pair)
                else:
                    self.results.append(result)
            if escalated:
                names = [frozenset(launch.name for launch in side if launch) for side in zip(*escalated, strict=True)]
                left.append(_Pending(each.call, *names))
        return left

    def _described(
        self, pending: Sequence[_Pending], level: Level
    ) -> Iterator[tuple[_Pending, list[Launch] | Exception, list[Launch] | Exception]]:
        futures = [
            (
                each,
                self.old.submit(self._request(each.call, self.packages.old, level, each.old_names)),
                self.new.submit(self._request(each.call, self.packages.new, level, each.new_names)),
            )
            for each in pending
        ]
        with StatusLine(len(futures)) as status:
            for each, old, new in futures:
                status.show(f"calls compared, {level.name}")
                yield each, _outcome(old), _outcome(new)
                status.done += 1

    def _request(self, call: Call, package: Path, level: Level, names: frozenset[str] | None) -> Request:
        return Request(
            call=call,
            variant=self.packages.variants[variant_of(call)],
            package=package,
            level=level,
            texts=self.texts,
            unchanged=self.packages.unchanged,
            names=names,
        )

    def _result(self, call: Call, pair: _Pair) -> Result:
        old, new = pair
        if old is None or new is None:
            launched = old or new
            error = launched.error if launched else ""
            return Result(call=call, old=old, new=new, status=Status.MISSING, detail=(error,) if error else ())
        if old.error or new.error:
            detail = tuple(f"{side}: {x.error}" for side, x in (("old", old), ("new", new)) if x.error)
            return Result(call=call, old=old, new=new, status=Status.FAILED, detail=detail)
        if old.equals(new):
            return Result(call=call, old=old, new=new, status=_EQUAL[old.level])
        return Result(call=call, old=old, new=new, status=Status.DIFFERENT, detail=self._difference(old, new))

    def _difference(self, old: Launch, new: Launch) -> tuple[str, ...]:
        """The first lines that differ: of the launches' facts, or if these are equal, of the assembly."""
        if old.level is not Level.CODE or new.level is not Level.CODE:
            return ()
        differing = (old.facts, new.facts) if old.facts != new.facts else (old.codes[0], new.codes[0])
        before, after = ((self.texts / digest).read_text(encoding="utf-8") for digest in differing)
        return tuple(first_difference(before, after))


def _pairs(old: Sequence[Launch], new: Sequence[Launch]) -> list[_Pair]:
    """Each launch of a call with that of the other package, paired by name; renamed kernels are paired by order."""
    before, after = _numbered(old), _numbered(new)
    both = [(before[key], after[key]) for key in before if key in after]
    removed = [launch for key, launch in before.items() if key not in after]
    added = [launch for key, launch in after.items() if key not in before]
    if len(removed) == len(added):
        return [*both, *zip(removed, added, strict=True)]
    return [*both, *((launch, None) for launch in removed), *((None, launch) for launch in added)]


def _numbered(found: Sequence[Launch]) -> dict[tuple[str, int], Launch]:
    """The launches by name and by the number of earlier launches of that name."""
    counts: Counter[str] = Counter()
    numbered = {}
    for launch in found:
        numbered[launch.name, counts[launch.name]] = launch
        counts[launch.name] += 1
    return numbered


def _levels(pair: _Pair) -> list[Level]:
    return [launch.level for launch in pair if launch is not None]


def _outcome(future: Future[list[Launch]]) -> list[Launch] | Exception:
    """The launches, or the error of a call that failed or crashed its process. Errors of usage are raised."""
    error = future.exception()
    if isinstance(error, CodegenError) or (error is not None and not isinstance(error, Exception)):
        raise error
    return future.result() if error is None else error


def _failure(call: Call, old: list[Launch] | Exception, new: list[Launch] | Exception) -> Result:
    sides = (("old", old), ("new", new))
    detail = tuple(f"{side}: {outcome}" for side, outcome in sides if isinstance(outcome, Exception))
    return Result(call=call, old=None, new=None, status=Status.FAILED, detail=detail)
