"""The local engine: jobs in worker processes that share what one helper process has loaded; dead ones are replaced.

The helper is a fresh interpreter with one thread: it loads once (a tokenizer, say) and forks the workers, so the script
that calls is never run again and its threads are never forked. Each worker has a pipe of its own: no lock can be left
behind by one that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Self

from chatmill.compiler.engines.jobs import (
    MAX_KILLS,
    JobKilledWorkers,
    Result,
    Spec,
    WorkerStartError,
    describe_exit,
    label_of,
    result_of,
    run_job,
)
from chatmill.errors import ChatmillError, ConfigError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
MEMORY = {
    # workers keep what they free for their next batch (with glibc): new pages cost
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    # no thread of pyarrow's memory (x86-64): a process with one cannot be forked
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
BOOT = (
    "import sys; sys.path[:] = {path!r}; from chatmill.compiler.engines.local import helper_main; "
    "helper_main({pipe}, {driver})"
)
GOODBYE_SECONDS = 10.0
"""How long a helper may take to end its workers."""
Load = tuple[Callable[[Any], object], Any]


class LocalExecutor:
    """Runs jobs in processes of this machine.

    With `workers=0` the jobs run one after the other in this very process, which helps with debuggers and profilers;
    nothing can be retried there. One worker or more are real processes, so that a killed one is survived.
    """

    def __init__(self, workers: int | None = None) -> None:
        """`workers`: processes; None takes one for each core that this process may use."""
        if workers is not None and workers < 0:
            raise ConfigError(f"workers is {workers}; give 1 or more processes, 0 to run in this process, or None")
        self.workers = available_cores() if workers is None else workers
        self._helper: _Helper | None = None
        self._kept = 0

    def prepare(self, load: Callable[[Spec], object], spec: Spec) -> None:
        """Let the helper do this now, inside a `with` block: what it loads is there for all workers of the next run.

        An error in it is not looked at: the jobs meet it again.
        """
        if self.workers and self._helper is None:
            self._helper = _Helper((load, spec))

    def map(self, job: Callable[[Spec], Result], specs: Sequence[Spec]) -> Iterator[tuple[int, Result]]:
        """See `Executor.map`."""
        if not self.workers:
            for index, spec in enumerate(specs):
                yield index, _run_here(job, spec)
        elif specs:
            self._helper = self._helper or _Helper(None)
            is_done = False
            try:
                yield from self._helper.run(job, specs, self.workers)
                is_done = True
            finally:
                if not (is_done and self._kept):
                    self._end()

    def _end(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def __enter__(self) -> Self:
        self._kept += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._kept -= 1
        if not self._kept:
            self._end()


def _run_here(job: Callable[[Spec], Result], spec: Spec) -> Result:
    """Run a job in this process, with its spec copied as it would be on the way to a worker."""
    try:
        return job(pickle.loads(pickle.dumps(spec)))
    except Exception as error:
        error.add_note(f"in the job: {label_of(spec)}")
        raise


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


class _Helper:
    """The driver's side of the helper process, which ends on request, and whenever this process ends."""

    def __init__(self, load: Load | None) -> None:
        self._pipe, theirs = Pipe()
        self._answers = False
        boot = BOOT.format(
            path=[entry for entry in sys.path if isinstance(entry, str)], pipe=theirs.fileno(), driver=os.getpid()
        )
        # Ctrl-C reaches all processes of a terminal: the helper begins life with it held back, and then ignores it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions), "-c", boot, "chatmill-worker"],
                env=ONE_THREAD | MEMORY | os.environ,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a job prints must not get into what the driver prints
            )
        except OSError as error:
            self._pipe.close()
            raise WorkerStartError(
                f"worker processes cannot be started: {error}; raise the limit on processes or open files"
            ) from error
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(OSError):  # it has died already: the first result says so
            self._pipe.send(load)

    def run(self, job: Callable[[Any], Any], specs: Sequence[Any], workers: int) -> Iterator[tuple[int, Any]]:
        """Give it the jobs of a run; what it reports, until all are done."""
        try:
            self._pipe.send((job, list(specs), workers))
            for _ in specs:
                index, outcome = self._pipe.recv()
                self._answers = True
                if isinstance(outcome, ChatmillError):
                    raise outcome
                yield index, result_of(outcome)
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GOODBYE_SECONDS)
            raise WorkerStartError(
                f"the process that starts the workers {describe_exit(self._process.returncode)}; what it wrote is on "
                "the error output. What is done is kept: resume, with fewer workers if memory ran out"
            ) from None

    def end(self) -> None:
        """End it and its workers; at once where it is still loading, as it has none yet."""
        self._pipe.close()
        try:
            self._process.wait(timeout=GOODBYE_SECONDS if self._answers else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Worker:
    """One worker process as the helper sees it."""

    def __init__(self) -> None:
        single = sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
        self.pipe, theirs = Pipe()
        with theirs:
            context: Any = get_context("fork" if single else "spawn")
            self.process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
            self.process.start()
        self.job: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether it waits for a job; one that was killed meanwhile does not."""
        return self.job is None and self.process.is_alive()


def helper_main(descriptor: int, driver: int) -> None:
    """Run the helper: load, then serve runs until the driver closes the pipe. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver alone decides what Ctrl-C means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.set_inheritable(descriptor, False)
    _die_with(driver)
    pipe, workers = Connection(descriptor), list[_Worker]()
    with contextlib.suppress(EOFError, ConnectionError):  # the driver is done, or gone
        load: Load | None = pipe.recv()
        if load is not None:
            run_job(*load)
        while True:
            job, specs, limit = pipe.recv()
            _run(pipe, workers, job, specs, limit)
    for worker in workers:
        worker.process.kill()
        worker.process.join()
    os._exit(0)


def _run(pipe: Connection, workers: list[_Worker], job: Any, specs: Sequence[Any], limit: int) -> None:
    """Hand out jobs; the last retry of one that has killed its workers runs alone, so that it is surely to blame."""
    todo, deaths = deque(range(len(specs))), Counter[int]()

    def is_last_try(index: int | None) -> bool:
        return index is not None and deaths[index] == MAX_KILLS - 1

    while todo or any(worker.job is not None for worker in workers):
        busy = [worker for worker in workers if worker.job is not None]
        while todo and len(busy) < limit and not any(is_last_try(worker.job) for worker in busy):
            if is_last_try(todo[0]) and busy:
                break
            try:
                worker = next((idle for idle in workers if idle.is_free), None) or _Worker()
            except OSError as error:
                failed = f"worker process {len(workers) + 1} of {limit} cannot be started: {error}; use fewer workers, "
                pipe.send((0, WorkerStartError(f"{failed}or raise the limit on processes or open files")))
                raise EOFError from error
            workers += [] if worker in workers else [worker]
            worker.job = todo.popleft()
            busy.append(worker)
            with contextlib.suppress(OSError):  # it has just died: the next wait says so
                worker.pipe.send((job, specs[worker.job]))
        ready = wait([pipe, *(source for worker in busy for source in (worker.pipe, worker.process.sentinel))])
        if pipe in ready:  # the driver says nothing during a run
            raise EOFError
        for worker in busy:
            assert worker.job is not None
            outcome = None
            if worker.pipe in ready:
                with contextlib.suppress(EOFError, OSError):
                    outcome = worker.pipe.recv_bytes()
            if outcome is not None:
                pipe.send((worker.job, outcome))
                worker.job = None
            elif worker.pipe in ready or worker.process.sentinel in ready:
                _bury(pipe, workers, worker, deaths, specs)
                todo.appendleft(worker.job)


def _bury(
    pipe: Connection, workers: list[_Worker], worker: _Worker, deaths: Counter[int], specs: Sequence[Any]
) -> None:
    """Take away a dead worker; the job that it had gets a strike, and the third ends the run."""
    worker.process.join()
    workers.remove(worker)
    assert worker.job is not None
    deaths[worker.job] += 1
    if deaths[worker.job] == MAX_KILLS:
        cause = describe_exit(worker.process.exitcode)
        pipe.send((worker.job, JobKilledWorkers(label_of(specs[worker.job]), cause)))
        raise EOFError


def _work(pipe: Connection, helper: int) -> None:
    """Run a worker: one job after the other. Does not return."""
    _die_with(helper)
    with contextlib.suppress(EOFError, OSError):  # the helper is gone
        while True:
            outcome = run_job(*pipe.recv())
            sys.stdout.flush()
            pipe.send_bytes(outcome)
    os._exit(0)


def _die_with(parent: int) -> None:
    """End this process when its parent ends in any way, where the system does that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the line above
        os._exit(1)
