"""The foreman: the process between a driver and its workers. It starts them, hands out jobs and replaces the dead.

It loads once what all workers need and forks them, so that they share it: a vocabulary takes a second of processor time
and a quarter of a gigabyte. It has one thread, since a fork copies no other. Where it cannot fork, each worker is a
fresh interpreter and loads for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
    Strikes,
    WorkerStartError,
    describe_exit,
    run_packed,
)
from chatmill.compiler.engines.late import TICKS, Patience, late_event
from chatmill.errors import ChatmillError

READY = b"ready"
"""Said by a foreman before each set of orders, and by a worker before its first job."""
ALIVE = b"alive"
"""Said by a foreman when nothing has happened for a while."""
LEAVE = b""
"""Said to a worker that is not needed any more."""
MAX_FAILED_STARTS = 3
GOODBYE_SECONDS = 5.0
"""How long a worker that is told to leave may take."""


class Order(NamedTuple):
    """One job, as a foreman needs to know it."""

    label: str
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The jobs of one run, by index."""

    jobs: dict[int, Order]
    workers: int
    late_seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """A job has ended: `outcome` is what `run_packed` gave."""

    index: int
    outcome: bytes


def foreman_main(boot: dict[str, Any]) -> None:
    """In the foreman's process: carry out orders until the driver closes the connection. Does not return."""
    # Ctrl-C reaches every process of the terminal; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.set_inheritable(boot["connection"], False)
    _die_with(boot["driver"])
    driver = Connection(boot["connection"])
    os.register_at_fork(after_in_child=driver.close)
    crew = None
    try:
        with contextlib.suppress(
            EOFError, BrokenPipeError, ConnectionResetError
        ):  # the driver has ended it, or is gone
            crew = _Crew(driver.recv())
            while True:
                driver.send(READY)
                try:
                    _Run(driver, crew, driver.recv()).run()
                except ChatmillError as error:
                    driver.send(error)
    finally:
        if crew is not None:
            crew.end()
    os._exit(0)


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process as the foreman sees it."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    handle: int
    """A descriptor that becomes readable when the process ends."""
    pid: int
    is_ready: bool = False
    job: int | None = None
    """Index of the job that it has in hand."""
    patience: Patience | None = None
    """Counts how long it has been waited for; None: not yet, or it has said something since."""

    def end(self) -> int:
        """Make sure that it is gone; returns its exit code."""
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        self.connection.close()
        if self.handle != self.process.sentinel:
            os.close(self.handle)
        self.process.close()
        return code or 0


class _Crew:
    """The workers; they stay between runs, with what they have loaded."""

    def __init__(self, first_job: bytes | None) -> None:
        """`first_job` loads what the jobs need; what it gives or raises is not looked at."""
        self.workers: list[_Worker] = []
        self._first_job = first_job
        can_fork = sys.platform == "linux"
        if can_fork and first_job is not None:
            run_packed(first_job)
            can_fork = len(os.listdir("/proc/self/task")) == 1
        if can_fork:
            self._context: Any = multiprocessing.get_context("fork")
            self._first_job = None
        else:
            self._context = multiprocessing.get_context("spawn")

    def start_worker(self, limit: int) -> None:
        """Start one more; `limit` is how many there are to be, for the error."""
        try:
            ours, theirs = Pipe()
            with theirs:
                process = self._context.Process(target=_worker_main, args=(theirs, os.getpid(), self._first_job))
                process.start()
        except OSError as error:
            raise WorkerStartError(
                f"worker process {len(self.workers) + 1} of {limit} cannot be started: {error}; "
                "use fewer workers, or raise the limit on processes or open files"
            ) from error
        self.workers.append(_Worker(process, ours, handle_of(process.pid) or process.sentinel, process.pid))

    def end(self) -> None:
        """Let idle workers leave, so that their exit handlers run; end the others at once."""
        for worker in self.workers:
            if worker.is_ready and worker.job is None:
                with contextlib.suppress(OSError):  # it is gone already
                    worker.connection.send_bytes(LEAVE)
            else:
                worker.process.kill()
        until = time.monotonic() + GOODBYE_SECONDS
        for worker in self.workers:
            wait([worker.handle], max(0.0, until - time.monotonic()))
            worker.end()


class _Run:
    """One set of orders: hands jobs to workers and replaces dead ones."""

    def __init__(self, driver: Connection, crew: _Crew, orders: Orders) -> None:
        self._driver, self._crew, self._orders = driver, crew, orders
        self._pending = deque(orders.jobs)
        self._last_tries: deque[int] = deque()
        self._left = len(orders.jobs)
        self._strikes = Strikes(orders.jobs)
        self._failed_starts = 0

    def run(self) -> None:
        """Returns when all jobs are done; raises what ends the run, and EOFError when the driver does."""
        while self._left:
            while len(self._crew.workers) < min(self._orders.workers, self._left):
                self._crew.start_worker(self._orders.workers)
            self._dispatch()
            owners = {source: worker for worker in self._crew.workers for source in (worker.connection, worker.handle)}
            for worker in {owners[source]: None for source in self._wait(list(owners))}:
                self._attend(worker)

    def _wait(self, sources: list[Any]) -> list[Any]:
        """Wait until something happens; report workers that are silent for long meanwhile."""
        tick = self._orders.late_seconds / TICKS
        while True:
            started = time.monotonic()
            ready = wait([self._driver, *sources], timeout=tick)
            seconds = time.monotonic() - started
            if self._driver in ready:  # it says nothing during a run
                raise EOFError
            for worker in self._crew.workers:
                if worker.connection in ready or (worker.is_ready and worker.job is None):
                    continue
                worker.patience = worker.patience or Patience(self._orders.late_seconds)
                if worker.patience.wait(seconds, tick):
                    label = "a worker that is getting ready" if worker.job is None else self._label(worker.job)
                    event = late_event(worker.patience.waited, pid=worker.pid, index=worker.job, label=label)
                    self._driver.send(event)
            if ready:
                return ready
            self._driver.send(ALIVE)

    def _attend(self, worker: _Worker) -> None:
        """Take what a worker has said; one that is gone may have left messages, which count."""
        worker.patience = None
        gone = worker.process.exitcode is not None
        while worker.connection.poll():
            try:
                message = worker.connection.recv_bytes()
            except (EOFError, OSError):
                gone = True
                break
            if not worker.is_ready:
                worker.is_ready, self._failed_starts = True, 0
                self._tell(EventKind.WORKER_STARTED, worker)
                continue
            index, worker.job = worker.job, None
            assert index is not None, "a worker speaks only when it has a job"
            self._left -= 1
            self._driver.send(Done(index, message))
        if gone:
            self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        """Take away a dead worker, and put its job in line again."""
        self._crew.workers.remove(worker)
        wait([worker.handle], GOODBYE_SECONDS)  # its pipe ends a moment before it does
        cause = describe_exit(worker.end())
        index = worker.job
        self._tell(EventKind.WORKER_DIED, worker, detail=cause)
        if index is not None:
            attempt = self._strikes.add(index, cause)
            # The last try runs alone: memory that the others held is then free, and the blame is certain.
            (self._last_tries if self._strikes.is_last_try(index) else self._pending).appendleft(index)
            self._driver.send(
                ExecutorEvent(
                    kind=EventKind.JOB_RETRIED, index=index, label=self._label(index), attempt=attempt, detail=cause
                )
            )
        elif not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise failed_starts(cause)

    def _dispatch(self) -> None:
        """Give a job to every worker that is free."""
        for worker in self._crew.workers:
            if not worker.is_ready or worker.job is not None:
                continue
            index = self._take()
            if index is None:
                return
            worker.job, worker.patience = index, None
            self._tell(EventKind.JOB_STARTED, worker, attempt=self._strikes.attempt(index))
            with contextlib.suppress(OSError):  # a worker that has just died is noticed at the next wait
                worker.connection.send_bytes(self._orders.jobs[index].payload)

    def _take(self) -> int | None:
        busy = [worker.job for worker in self._crew.workers if worker.job is not None]
        if self._last_tries:
            return None if busy else self._last_tries.popleft()
        if any(self._strikes.is_last_try(index) for index in busy):
            return None
        return self._pending.popleft() if self._pending else None

    def _tell(self, kind: EventKind, worker: _Worker, *, attempt: int = 1, detail: str = "") -> None:
        label = "" if worker.job is None else self._label(worker.job)
        event = ExecutorEvent(kind=kind, pid=worker.pid, index=worker.job, label=label, attempt=attempt, detail=detail)
        self._driver.send(event)

    def _label(self, index: int) -> str:
        return self._orders.jobs[index].label


def failed_starts(cause: str) -> WorkerStartError:
    """The error for workers that do not live long enough to get a job; `cause` is how the last one ended."""
    return WorkerStartError(
        f"{MAX_FAILED_STARTS} worker processes in a row died before they were ready (the last: {cause}); "
        f"what they wrote is on the error output. The interpreter was {sys.executable}"
    )


def handle_of(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends, whatever its children hold open; None: no such thing."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # a system that does not have it, or no descriptor left
            return os.pidfd_open(pid)
    return None


def _worker_main(driver: Connection, foreman: int, first_job: bytes | None) -> None:
    """In a worker's process: one job after the other. Does not return."""
    _die_with(foreman)
    parent = multiprocessing.parent_process()
    assert parent is not None
    _watch(parent.sentinel)
    if first_job is not None:
        run_packed(first_job)
    with contextlib.suppress(EOFError, OSError):  # the foreman is gone
        driver.send_bytes(READY)
        while (payload := driver.recv_bytes()) != LEAVE:
            driver.send_bytes(run_packed(payload))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # without taking apart what it has loaded: the driver is waiting


def _die_with(parent: int) -> None:
    """End this process when its parent ends in any way, also in the middle of a job, where the system does that."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before the line above
            os._exit(1)


def _watch(sentinel: int) -> None:
    """End this process when its parent is gone, in a thread."""

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
