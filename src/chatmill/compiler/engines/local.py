"""The local engine: jobs in worker processes of this machine, under a foreman process that watches them.

Each worker has one pipe of its own: there is no queue or lock that a killed one could leave in a bad state. The script
that calls us is not run again in the workers (no `if __name__ == "__main__"` needed).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
    OnEvent,
    Receipt,
    Spec,
    WorkerStartError,
    check_job,
    describe_exit,
    label_of,
    pack_job,
    unpack_outcome,
)
from chatmill.compiler.engines.foreman import (
    ALIVE,
    GOODBYE_SECONDS,
    MAX_FAILED_STARTS,
    READY,
    Done,
    Order,
    Orders,
    failed_starts,
    handle_of,
)
from chatmill.compiler.engines.late import LATE_SECONDS, TICKS, Patience, late_event
from chatmill.errors import ChatmillError, ConfigError

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Set to 1 in workers, unless the user has set them: a worker is meant to use one core."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Has workers keep what they free for their next batch (with glibc), unless the user has set it: new pages cost."""
NO_OTHER_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""The same for a thread of pyarrow's memory (x86-64) which does nothing here: a process with one cannot be forked."""
BOOT_VARIABLE = "CHATMILL_WORKER"
BOOT = (
    f"import json, os, sys; boot = json.loads(os.environ.pop({BOOT_VARIABLE!r})); sys.path[:] = boot['path']; "
    "from chatmill.compiler.engines.foreman import foreman_main; foreman_main(boot)"
)


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
        self._first_job: bytes | None = None
        self._foreman: _Foreman | None = None

    def prepare(self, job: Callable[[Spec], object], spec: Spec) -> None:
        """Let a process do this job now, from which the workers of the next `run` are forked, if there will be any.

        Where the system cannot fork, each worker does it first.

        What the job gives or raises is not looked at: it is there to load what the jobs of the run will need, while
        the driver is busy with something else. Call `close` in the end, in case there is no run.
        """
        check_job(job)
        if self.workers and self._foreman is None:
            self._first_job = pack_job(job, spec)
            self._foreman = _Foreman(self._first_job)

    def close(self) -> None:
        """End workers that were prepared and not used, or kept."""
        foreman, self._foreman, self._first_job = self._foreman, None, None
        if foreman is not None:
            foreman.end()

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
            return
        is_done = False
        try:
            self._run_in_workers(job, specs, on_done, tell)
            is_done = True
        finally:
            if not (self._keep and is_done):
                self.close()

    def _run_in_workers(
        self, job: Callable[[Any], Any], specs: Sequence[Any], on_done: Callable[[int, Any], None], tell: OnEvent
    ) -> None:
        """Give the jobs to a foreman; to another one where it dies, which takes its workers along."""
        left = dict.fromkeys(range(len(specs)))
        deaths = 0
        while left:
            foreman = self._foreman = self._foreman or _Foreman(self._first_job)
            jobs = {index: Order(label_of(specs[index]), pack_job(job, specs[index])) for index in left}
            orders = Orders(jobs=jobs, workers=self.workers, late_seconds=self.late_seconds)
            for message in foreman.carry_out(orders, tell):
                if isinstance(message, ExecutorEvent):
                    tell(message)
                elif isinstance(message, Done):
                    receipt = unpack_outcome(message.outcome)
                    del left[message.index]
                    deaths = 0
                    on_done(message.index, receipt)
                    if not left:
                        return
                else:
                    raise message
            self._foreman = None
            cause = describe_exit(foreman.end(is_gone=True))
            tell(ExecutorEvent(kind=EventKind.WORKER_DIED, pid=foreman.pid, detail=cause))
            deaths += 1
            if deaths >= MAX_FAILED_STARTS:
                if not foreman.has_loaded:
                    raise failed_starts(cause)
                raise WorkerStartError(
                    f"the process that hands out the jobs died {deaths} times, and no job was done in between (the "
                    f"last time: {cause}). If memory ran out: use smaller chunks, fewer workers, or more memory"
                )


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


class _Foreman:
    """The driver's side of a foreman. It ends when it is told to, and with this process, however that ends."""

    def __init__(self, first_job: bytes | None) -> None:
        """Start one; `first_job` is what it does before anything else."""
        try:
            with contextlib.ExitStack() as opened:
                self._connection, theirs = map(opened.enter_context, Pipe())
                with _interrupts_held():
                    self._process = _start_process(theirs.fileno())
                    opened.pop_all()
                    theirs.close()
        except OSError as error:
            raise WorkerStartError(
                f"worker processes cannot be started: {error}; raise the limit on processes or open files"
            ) from error
        self.pid = self._process.pid
        self._handle = handle_of(self.pid)
        self.has_loaded = False
        """Whether it has done the first job and taken orders."""
        with contextlib.suppress(OSError):  # it has died already: that is noticed when it is waited for
            self._connection.send(first_job)

    def carry_out(self, orders: Orders, tell: OnEvent) -> Iterator[ExecutorEvent | Done | ChatmillError]:
        """Give it orders; what it reports, until it is gone."""
        while True:
            message = self._receive(orders.late_seconds, tell)
            if message is None:
                return
            if message == READY:
                self.has_loaded = True
                with contextlib.suppress(OSError):  # as above
                    self._connection.send(orders)
            elif message != ALIVE:
                yield message

    def _receive(self, late_seconds: float, tell: OnEvent) -> Any:
        """The next message; None when it is gone and has left none. A foreman that is silent for long is reported."""
        sources: list[Any] = [self._connection] if self._handle is None else [self._connection, self._handle]
        tick = late_seconds / TICKS
        patience = Patience(late_seconds)
        while True:
            started = time.monotonic()
            ready = wait(sources, timeout=tick)
            if ready:
                try:
                    return self._connection.recv() if self._connection.poll() else None
                except (EOFError, OSError):
                    return None
            if patience.wait(time.monotonic() - started, tick):
                label = "the process that hands out the jobs" if self.has_loaded else "a worker that is getting ready"
                tell(late_event(patience.waited, pid=self.pid, index=None, label=label))

    def end(self, *, is_gone: bool = False) -> int:
        """End it and its workers; its exit code. `is_gone`: its pipe has ended, which it does a moment before."""
        self._connection.close()
        try:  # its workers may take a while to leave; while it loads it has none
            self._process.wait(timeout=2 * GOODBYE_SECONDS if self.has_loaded or is_gone else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        finally:
            if self._handle is not None:
                os.close(self._handle)
        return self._process.wait()


def worker_environment() -> dict[str, str]:
    """The environment of workers: what the user has set counts."""
    return dict.fromkeys(ONE_THREAD, "1") | KEEP_MEMORY | NO_OTHER_THREADS | os.environ


def _start_process(connection: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter that becomes a foreman; the script that calls us is not run again in it."""
    boot = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "connection": connection,
        "driver": os.getpid(),
    }
    command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-c", BOOT, "chatmill-worker"]
    return subprocess.Popen(
        command,
        env=worker_environment() | {BOOT_VARIABLE: json.dumps(boot)},
        pass_fds=(connection,),
        stdin=subprocess.DEVNULL,
        stdout=2,  # a job that prints must not get into what the driver prints
    )


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back for a moment; a process started meanwhile begins life with it held back, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
