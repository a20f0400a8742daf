"""The process pool of lint, tune, bench and fuzz: a task that crashes or hangs its process costs only itself.

It is written by hand because these commands run on GPU hosts without a network, which have only torch's dependencies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from codegen.util.errors import CodegenError

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """The process ended before its task did: a compiler crashed, or the task ran longer than its limit."""


class Pool(Generic[Item, Result]):
    """Worker processes that call `task` on one item after the other; leaving the context kills all of them.

    `task`, its items and its results must be picklable. A task that runs longer than `limit` seconds is killed.
    """

    def __init__(self, task: Callable[[Item], Result], processes: int, *, limit: float | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="codegen-pool-")
        self._idle: queue.SimpleQueue[_Worker[Item, Result]] = queue.SimpleQueue()
        folder = Path(self._folder.name)
        self._workers = [_Worker(task, folder / str(number), limit) for number in range(processes)]
        for worker in self._workers:
            self._idle.put(worker)
        # One thread waits for each process.
        self._threads = ThreadPoolExecutor(processes)

    def submit(self, item: Item) -> Future[Result]:
        """Start a task as soon as a worker is free, in order of submission.

        The future raises `WorkerDiedError` if the process dies, a `CodegenError` as it was raised, and any other error
        as a `RuntimeError` that names it.
        """
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
        for worker in self._workers:
            worker.kill()
        self._folder.cleanup()


def spread(
    task: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    limit: float | None = None,
    until: float | None = None,
) -> Generator[tuple[Item, Result | Exception], None, None]:
    """Yield each item with its result, or with its error, in the order in which they finish.

    `limit`: seconds after which one task is killed. `until`: the time by `time.monotonic` at which all unfinished work
    is killed and the iteration ends.
    """
    if not items:
        return
    with Pool(task, min(processes, len(items)), limit=limit) as pool:
        futures = {pool.submit(item): item for item in items}
        try:
            for future in as_completed(futures, None if until is None else max(0.0, until - time.monotonic())):
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield futures[future], future.result() if error is None else error
        except TimeoutError:
            return


_turn: Path | None = None
"""In a worker: the file whose lock `my_turn` holds, shared by the workers of one pool."""


@contextlib.contextmanager
def my_turn() -> Iterator[None]:
    """A section that one worker of a pool runs at a time, such as timing on a GPU; outside a pool it does nothing."""
    if _turn is None:
        yield
        return
    import fcntl  # POSIX, as Triton is

    with _turn.open("wb") as file:
        # The system releases the lock of a process that dies, so that the other workers go on.
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


class _Worker(Generic[Item, Result]):
    """One worker process, replaced by a new one when it dies. Its stdout and stderr go to the file `output`."""

    # A forked child would share torch's threads, and could not use a GPU that its parent has used.
    _context = multiprocessing.get_context("spawn")

    def __init__(self, task: Callable[[Item], Result], output: Path, limit: float | None) -> None:
        self._task, self._output, self._limit = pickle.dumps(task), output, limit
        self._process: Any = None
        self._ended = False
        self._lock = threading.Lock()

    def do(self, item: Item) -> Result:
        """Run the task and wait for its result; raises what the task raised."""
        try:
            connection = self._started()
            connection.send(item)
            if not connection.poll(self._limit):
                self.kill()
                raise WorkerDiedError(f"it took longer than {self._limit:g} s")
            received: Result | Exception = connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.kill()
            raise WorkerDiedError(_cause_of_death(self._output)) from None
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
        """Kill the process, wait for nothing, and start no other."""
        self._ended = True
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def kill(self) -> None:
        """Kill the process and wait until it is gone; the next task starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.join()
                self._connection.close()
                self._process = None


def _work(pickled_task: bytes, connection: Connection, output: Path) -> None:
    """The main loop of a worker process, which its parent ends by killing it."""
    global _turn
    # Ctrl-C reaches the workers too; only their parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool's processes are the parallelism: each has one thread. Both variables are read when torch is imported,
    # which unpickling the task may do.
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _turn = output.with_name("turn")
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    task: Callable[[Any], Any] = pickle.loads(pickled_task)
    while True:
        try:
            item = connection.recv()
        except EOFError:  # the parent has died
            return
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        result: Any
        try:
            result = task(item)
        except CodegenError as error:
            result = error
        except Exception as error:  # its class may not survive pickling
            result = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(result)


def _cause_of_death(output: Path) -> str:
    """The first error or failed assertion that a process printed during its last task."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    found = re.search(r"(\w*[Ee]rror: |Assertion ).*", text)
    return found[0][:200] if found else "it gave no reason"
