"""Work that compiles, spread over processes. A compiler that crashes takes one piece of work with it, not the rest."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from codegen.errors import CodegenError

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """A process ended in the middle of its work, as after a failed assertion of a compiler."""


def spread(
    task: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result | Exception]]:
    """`task` of every item, as they finish; in place of a result the error it raised, or that its process died.

    `task` and what it takes and returns are pickled. All processes are gone when the iteration ends, however it does.
    """
    waiting = list(reversed(items))
    with tempfile.TemporaryDirectory(prefix="codegen-lint-") as folder:
        workers = [_Worker(task, Path(folder) / str(number)) for number in range(min(processes, len(items)))]
        busy: dict[Any, _Worker[Item, Result]] = {}
        try:
            while waiting or busy:
                for worker in workers:
                    if waiting and worker not in busy.values():
                        busy[worker.start(waiting.pop())] = worker
                for ready in wait(list(busy)):
                    worker = busy.pop(ready)
                    yield worker.item, worker.result()
        finally:
            for worker in workers:
                worker.kill()


class _Worker(Generic[Item, Result]):
    """A process that does one item after the other, and its successors. What it writes to stderr goes to a file."""

    # A forked child would share the threads of torch, and could not use a GPU that its parent has used.
    _context = multiprocessing.get_context("spawn")

    def __init__(self, task: Callable[[Item], Result], stderr: Path) -> None:
        self._task, self._stderr = task, stderr
        self._process: Any = None

    def start(self, item: Item) -> Connection:
        """Begin with an item; what is returned is ready when there is a result."""
        self.item = item
        if self._process is None:
            self._connection, other = self._context.Pipe()
            self._process = self._context.Process(target=_work, args=(self._task, other, self._stderr), daemon=True)
            self._process.start()
            other.close()
        self._connection.send(item)
        return self._connection

    def result(self) -> Result | Exception:
        try:
            received: Result | Exception = self._connection.recv()
            return received
        except (EOFError, ConnectionResetError):
            self.kill()
            return WorkerDiedError(_last_words(self._stderr))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _work(task: Callable[[Item], Result], connection: Connection, stderr: Path) -> None:
    """What a worker process runs, until its parent kills it."""
    # Ctrl-C reaches the workers too: they leave it to their parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    while True:
        try:
            item = connection.recv()
        except EOFError:  # the parent is gone
            return
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        result: Result | Exception
        try:
            result = task(item)
        except CodegenError as error:
            result = error
        except Exception as error:  # which may be one that cannot be pickled
            result = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(result)


def _last_words(stderr: Path) -> str:
    """The line in which a process said why it dies: an error, or a failed assertion without what comes before it."""
    for line in stderr.read_text(encoding="utf-8", errors="replace").splitlines():
        if "error: " in line or "Assertion " in line:
            return line[line.find("error: ") if "error: " in line else line.find("Assertion ") :][:200]
    return "it gave no reason"
