"""A compile pool for tests, which compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from codegen.tune.compiling import Compilation


class InlinePool:
    """Finishes each task at once without compiling. `fault`: the error of a task. `tasks`: all submitted tasks."""

    def __init__(self, fault: Callable[[Any], str] = lambda _: "") -> None:
        self.fault = fault
        self.tasks: list[Any] = []

    def submit(self, task: Any) -> Future[Compilation]:
        self.tasks.append(task)
        done: Future[Compilation] = Future()
        done.set_result(Compilation(fault=self.fault(task), seconds=1.0))
        return done

    def finished(self) -> list[Compilation]:
        return []

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass
