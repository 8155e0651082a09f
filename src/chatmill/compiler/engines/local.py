"""The local engine: worker processes that we start, watch and end ourselves.

Each worker is a fresh Python interpreter with one pipe of its own. There is no queue or lock that a killed worker could
leave in a bad state, and the script that calls us is not run again in the workers (no `if __name__ == "__main__"`
needed). A worker is noticed to be dead by its process handle and by the end of its pipe, whichever comes first.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
    OnEvent,
    Receipt,
    Spec,
    Strikes,
    WorkerStartError,
    check_job,
    describe_exit,
    label_of,
    pack_job,
    unpack_outcome,
)
from chatmill.compiler.engines.late import LATE_SECONDS, TICKS, Patience, late_event
from chatmill.compiler.engines.nursery import ForkedProcess, Nursery, can_fork
from chatmill.errors import ConfigError

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Set to 1 in workers, unless the user has set them: a worker is meant to use one core."""
BOOT_VARIABLE = "CHATMILL_WORKER"
BOOT = (
    f"import json, os, sys; boot = json.loads(os.environ.pop({BOOT_VARIABLE!r})); sys.path[:] = boot['path']; "
    "from chatmill.compiler.engines.worker import worker_main; worker_main(boot)"
)
MAX_FAILED_STARTS = 3
GOODBYE_SECONDS = 5.0
"""How long a worker that is idle, or whose pipe has ended, may take to end by itself."""


class LocalExecutor:
    """Runs jobs in processes of this machine.

    With `workers=0` the jobs run one after the other in this very process, which helps with debuggers and profilers;
    nothing can be retried there. One worker or more are real processes, so that a killed one is survived.
    """

    def __init__(self, workers: int | None = None, *, late_seconds: float = LATE_SECONDS, keep: bool = False) -> None:
        """`workers`: processes; None takes one for each core that this process may use.

        A worker that is silent for `late_seconds` is reported as an event. It is not ended: it may be stopped, or slow.
        With `keep` the workers stay after a run, with what they have loaded, for the next one; call `close` in the end.
        """
        if workers is not None and workers < 0:
            raise ConfigError(f"workers is {workers}; give 1 or more processes, 0 to run in this process, or None")
        self.workers = available_cores() if workers is None else workers
        self.late_seconds = late_seconds
        self._keep = keep
        self._prepared: _Crew | None = None
        """Workers that were started before a run, or stayed after one."""

    def prepare(self, job: Callable[[Spec], object], spec: Spec, *, most: int | None = None) -> None:
        """Start the workers (`most` of them) now and let each do this job first; the next `run` takes them over.

        Where the system can fork, one process does the job, and the workers of the run are forked from it.

        What the job gives or raises is not looked at: it is there to load what the jobs of the run will need, while
        the driver is busy with something else. Call `close` in the end, in case there is no run.
        """
        check_job(job)
        count = self.workers if most is None else min(self.workers, most)
        if count and self._prepared is None:
            self._prepared = _Crew(first_job=pack_job(job, spec), late_seconds=self.late_seconds)
            try:
                if count > 1 and can_fork():
                    self._prepared.start_nursery()
                else:
                    for _ in range(count):
                        self._prepared.start_worker(self.workers)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End workers that were prepared and not used, or kept."""
        crew, self._prepared = self._prepared, None
        if crew is not None:
            try:
                crew.dismiss()
            finally:
                crew.end()

    def run(
        self,
        job: Callable[[Spec], Receipt],
        specs: Sequence[Spec],
        on_done: Callable[[int, Receipt], None],
        on_event: OnEvent | None = None,
    ) -> None:
        """See `Executor.run`."""
        check_job(job)
        tell = on_event or (lambda event: None)
        if self.workers == 0:
            _run_here(job, specs, on_done, tell)
        else:
            crew, self._prepared = self._prepared or _Crew(), None
            late = self.late_seconds
            _Supervisor(job, specs, on_done, tell, limit=self.workers, crew=crew, late_seconds=late).run(self._keep)
            self._prepared = crew if self._keep else None


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, and the CPU quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _run_here(
    job: Callable[[Spec], Receipt], specs: Sequence[Spec], on_done: Callable[[int, Receipt], None], tell: OnEvent
) -> None:
    """Run in this process, with specs and receipts copied as they would be on the way to a worker."""
    for index, spec in enumerate(specs):
        label = label_of(spec)
        tell(ExecutorEvent(kind=EventKind.JOB_STARTED, pid=os.getpid(), index=index, label=label))
        try:
            receipt = job(pickle.loads(pickle.dumps(spec)))
        except Exception as error:
            error.add_note(f"in the job: {label}")
            raise
        on_done(index, pickle.loads(pickle.dumps(receipt)))


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process as the driver sees it."""

    process: subprocess.Popen[bytes] | ForkedProcess
    connection: Connection
    preparing: bool
    """Whether it has a job in hand that was given before the run; its outcome is not looked at."""
    handle: int | None = None
    """A descriptor that becomes readable when the process ends, where the system has that."""
    ready: bool = False
    job: int | None = None
    """Index of the job that it has in hand."""
    patience: Patience | None = None
    """Counts how long it has been waited for; None: not yet, or it has said something since."""

    def sources(self) -> list[Any]:
        """What to wait for."""
        return [self.connection] if self.handle is None else [self.connection, self.handle]

    def receive(self) -> bytes | None:
        """The next message, or None when the pipe has come to its end."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def end(self) -> int:
        """Make sure that it is gone; returns its exit code."""
        self.process.kill()
        self.connection.close()
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
        return self.process.wait()


class _Crew:
    """The worker processes of one run; they end when this object is told to, and with this process, however it ends."""

    def __init__(self, first_job: bytes | None = None, late_seconds: float = LATE_SECONDS) -> None:
        """`first_job`: what every worker does before anything else, or the process that they are forked from."""
        self.workers: list[_Worker] = []
        self._first_job, self._late_seconds = first_job, late_seconds
        self._nursery: Nursery | None = None
        # The workers hold the reading end and end themselves when the writing end goes.
        self._lifeline = os.pipe()

    def start_nursery(self) -> None:
        """Start the process that loads what the workers need."""
        assert self._first_job is not None
        try:
            ours, theirs = socket.socketpair()
            with theirs, _interrupts_held():
                self._nursery = Nursery(self._start_process(theirs.fileno(), nursery=True), ours, self._first_job)
        except OSError as error:
            raise WorkerStartError(f"no worker process can be started: {error}") from error

    def start_worker(self, limit: int) -> None:
        """Start one more; `limit` is how many there are to be, for the error."""
        forking = self._nursery is not None and self._nursery.wait_ready(self._late_seconds)
        try:
            with contextlib.ExitStack() as opened:
                ours, theirs = map(opened.enter_context, Pipe())
                with _interrupts_held():
                    forked = self._nursery.fork(theirs.fileno()) if self._nursery is not None and forking else None
                    worker = _Worker(
                        process=forked or self._start_process(theirs.fileno()),
                        connection=ours,
                        preparing=self._first_job is not None and forked is None,
                    )
                    self.workers.append(worker)
                    opened.pop_all()
                    theirs.close()
                    worker.handle = _handle_of(worker.process.pid)
        except OSError as error:
            raise WorkerStartError(
                f"worker process {len(self.workers) + 1} of {limit} cannot be started: {error}; "
                "use fewer workers, or raise the limit on processes or open files"
            ) from error
        if worker.preparing and self._first_job is not None:
            with contextlib.suppress(OSError):  # it has died already: that is noticed when it is waited for
                worker.connection.send_bytes(self._first_job)

    def _start_process(self, connection: int, *, nursery: bool = False) -> subprocess.Popen[bytes]:
        boot = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "connection": connection,
            "lifeline": self._lifeline[0],
            "driver": os.getpid(),
            "nursery": nursery,
        }
        command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-c", BOOT, "chatmill-worker"]
        return subprocess.Popen(
            command,
            env=dict.fromkeys(ONE_THREAD, "1") | os.environ | {BOOT_VARIABLE: json.dumps(boot)},
            pass_fds=(connection, self._lifeline[0]),
            stdin=subprocess.DEVNULL,
            stdout=2,  # a job that prints must not get into what the driver prints
        )

    def dismiss(self) -> None:
        """Let the idle workers end by themselves, so that their exit handlers run."""
        for worker in self.workers:
            worker.connection.close()
            if worker.preparing:  # for nothing: there was no job for it
                worker.process.kill()
        until = time.monotonic() + GOODBYE_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End all workers at once."""
        try:
            for worker in self.workers:
                worker.process.kill()
            for worker in self.workers:
                worker.end()
            if self._nursery is not None:
                self._nursery.end(GOODBYE_SECONDS)
        finally:
            for descriptor in self._lifeline:
                os.close(descriptor)


class _Supervisor:
    """One run: hands jobs to workers, replaces dead ones, ends them all."""

    def __init__(
        self,
        job: Callable[[Any], Any],
        specs: Sequence[Any],
        on_done: Callable[[int, Any], None],
        tell: OnEvent,
        *,
        limit: int,
        crew: _Crew,
        late_seconds: float,
    ) -> None:
        self._job, self._specs, self._on_done, self._tell, self._limit = job, specs, on_done, tell, limit
        self._pending = deque(range(len(specs)))
        self._last_tries: deque[int] = deque()
        self._left = len(specs)
        self._strikes = Strikes(specs)
        self._crew, self._workers = crew, crew.workers
        self._failed_starts = 0
        self._late_seconds = late_seconds

    def run(self, keep: bool) -> None:
        """Run all jobs; no worker outlives this call, unless they are to be kept and all went well."""
        is_done = False
        try:
            self._dispatch()  # to those that were kept
            while self._left:
                while len(self._workers) < min(self._limit, self._left):
                    self._crew.start_worker(self._limit)
                self._serve_once()
            if not keep:
                self._crew.dismiss()
            is_done = True
        finally:
            if not (keep and is_done):
                self._crew.end()

    def _serve_once(self) -> None:
        """Wait until something happens, and deal with it."""
        owners = {source: worker for worker in self._workers for source in worker.sources()}
        for worker in {owners[source]: None for source in self._wait(list(owners))}:
            worker.patience = None
            # A worker that is gone may have left messages; they count.
            gone = worker.process.poll() is not None
            while worker.connection.poll():
                message = worker.receive()
                if message is None:
                    gone = True
                    break
                self._hear(worker, message)
            if gone:
                self._bury(worker)
        self._dispatch()

    def _wait(self, sources: list[Any]) -> list[Any]:
        """Wait until something happens; report workers that are silent for long meanwhile."""
        tick = self._late_seconds / TICKS
        while True:
            started = time.monotonic()
            ready = wait(sources, timeout=tick)
            seconds = time.monotonic() - started
            for worker in self._workers:
                if any(source in ready for source in worker.sources()) or (worker.ready and self._is_idle(worker)):
                    continue
                worker.patience = worker.patience or Patience(self._late_seconds)
                if worker.patience.wait(seconds, tick):
                    self._tell_late(worker, worker.patience.waited)
            if ready:
                return ready

    @staticmethod
    def _is_idle(worker: _Worker) -> bool:
        return worker.job is None and not worker.preparing

    def _tell_late(self, worker: _Worker, waited: float) -> None:
        label = "a worker that is getting ready" if worker.job is None else label_of(self._specs[worker.job])
        self._tell(late_event(waited, pid=worker.process.pid, index=worker.job, label=label))

    def _hear(self, worker: _Worker, message: bytes) -> None:
        if not worker.ready:
            worker.ready = True
            self._failed_starts = 0 if not worker.preparing else self._failed_starts
            self._tell(ExecutorEvent(kind=EventKind.WORKER_STARTED, pid=worker.process.pid))
            return
        if worker.preparing:
            worker.preparing, self._failed_starts = False, 0
            return
        index, worker.job = worker.job, None
        assert index is not None, "a worker speaks only when it has a job"
        receipt = unpack_outcome(message)
        self._left -= 1
        self._dispatch()  # the worker goes on while the driver commits
        self._on_done(index, receipt)

    def _bury(self, worker: _Worker) -> None:
        """Take away a dead worker, and put its job in line again."""
        self._workers.remove(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe ends a moment before it does
            worker.process.wait(timeout=GOODBYE_SECONDS)
        cause = describe_exit(worker.end())
        index = worker.job
        label = "" if index is None else label_of(self._specs[index])
        self._tell(
            ExecutorEvent(kind=EventKind.WORKER_DIED, pid=worker.process.pid, index=index, label=label, detail=cause)
        )
        if index is not None:
            attempt = self._strikes.add(index, cause)
            # The last try runs alone: memory that the others held is then free, and the blame is certain.
            (self._last_tries if self._strikes.is_last_try(index) else self._pending).appendleft(index)
            self._tell(
                ExecutorEvent(kind=EventKind.JOB_RETRIED, index=index, label=label, attempt=attempt, detail=cause)
            )
        elif not worker.ready or worker.preparing:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise WorkerStartError(
                    f"{MAX_FAILED_STARTS} worker processes in a row died before they were ready (the last: {cause}); "
                    f"what they wrote is on the error output. The interpreter was {sys.executable}"
                )

    def _dispatch(self) -> None:
        """Give a job to every worker that is free."""
        for worker in self._workers:
            if not worker.ready or worker.preparing or worker.job is not None:
                continue
            index = self._take()
            if index is None:
                return
            payload = pack_job(self._job, self._specs[index])
            worker.job, worker.patience = index, None
            # A worker that has just died is noticed at the next wait.
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(payload)
            self._tell(
                ExecutorEvent(
                    kind=EventKind.JOB_STARTED,
                    pid=worker.process.pid,
                    index=index,
                    label=label_of(self._specs[index]),
                    attempt=self._strikes.attempt(index),
                )
            )

    def _take(self) -> int | None:
        busy = [worker.job for worker in self._workers if worker.job is not None]
        if self._last_tries:
            return None if busy else self._last_tries.popleft()
        if any(self._strikes.is_last_try(index) for index in busy):
            return None
        return self._pending.popleft() if self._pending else None


def _handle_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; without one, the end of its pipe must do."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):  # a system that does not have it, or no descriptor left
        return os.pidfd_open(pid)
    return None


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back for a moment; a process started meanwhile begins life with it held back, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
