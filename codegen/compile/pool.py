"""Work that compiles, spread over processes. A compiler that crashes takes one piece of work with it, not the rest."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from codegen.util.errors import CodegenError

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """A process ended in the middle of its work, as after a failed assertion of a compiler."""


class Pool(Generic[Item, Result]):
    """Processes that do `task` of one item after the other; a context, at whose end all of them are gone.

    `task` and what it takes and returns are pickled.
    """

    def __init__(self, task: Callable[[Item], Result], processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="codegen-pool-")
        self._idle: queue.SimpleQueue[_Worker[Item, Result]] = queue.SimpleQueue()
        self._workers = [_Worker(task, Path(self._folder.name) / str(number)) for number in range(processes)]
        for worker in self._workers:
            self._idle.put(worker)
        # A thread waits for each process.
        self._threads = ThreadPoolExecutor(processes)

    def submit(self, item: Item) -> Future[Result]:
        """The result to come: first come, first served. `WorkerDiedError` is its error where a process died of it."""
        return self._threads.submit(self._do, item)

    def _do(self, item: Item) -> Result:
        worker = self._idle.get()
        try:
            return worker.do(item)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown()
        self._folder.cleanup()


def spread(
    task: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result | Exception]]:
    """`task` of every item, as they finish; in place of a result the error it raised, or that its process died."""
    if not items:
        return
    with Pool(task, min(processes, len(items))) as pool:
        futures = {pool.submit(item): item for item in items}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield futures[future], future.result() if error is None else error


class _Worker(Generic[Item, Result]):
    """A process that does one item after the other, and its successors. What it writes goes to a file."""

    # A forked child would share the threads of torch, and could not use a GPU that its parent has used.
    _context = multiprocessing.get_context("spawn")

    def __init__(self, task: Callable[[Item], Result], output: Path) -> None:
        self._task, self._output = task, output
        self._process: Any = None
        self._ended = False
        self._lock = threading.Lock()

    def do(self, item: Item) -> Result:
        """The result of an item, waited for; raises what the task raised."""
        try:
            connection = self._started()
            connection.send(item)
            received: Result | Exception = connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._kill()
            raise WorkerDiedError(_last_words(self._output)) from None
        if isinstance(received, Exception):
            raise received
        return received

    def _started(self) -> Connection:
        with self._lock:
            if self._ended:
                raise EOFError
            if self._process is None:
                self._connection, other = self._context.Pipe()
                self._process = self._context.Process(target=_work, args=(self._task, other, self._output), daemon=True)
                self._process.start()
                other.close()
            return self._connection

    def end(self) -> None:
        """Kill the process; there is no next."""
        self._ended = True
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.join()
                self._connection.close()
                self._process = None


def _work(task: Callable[[Item], Result], connection: Connection, output: Path) -> None:
    """What a worker process runs, until its parent kills it."""
    # Ctrl-C reaches the workers too: they leave it to their parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One of many: no threads of its own.
    os.environ["OMP_NUM_THREADS"] = "1"
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
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


def _last_words(output: Path) -> str:
    """The line in which a process said why it dies: an error, or a failed assertion without what comes before it."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    for line in text.splitlines():
        if "error: " in line or "Assertion " in line:
            return line[line.find("error: ") if "error: " in line else line.find("Assertion ") :][:200]
    return "it gave no reason"
