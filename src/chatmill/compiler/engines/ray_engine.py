"""The Ray engine: one job is one Ray core task; specs and receipts travel, data never does.

Ray's own retries are off, so that a job that kills its workers is counted and named here as it is in the local engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import chatmill
from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
    OnEvent,
    Receipt,
    Spec,
    Strikes,
    WorkerStartError,
    check_job,
    label_of,
    pack_job,
    run_packed,
    unpack_outcome,
)
from chatmill.compiler.engines.late import LATE_SECONDS, TICKS, Patience, late_event
from chatmill.errors import ConfigError, MissingExtraError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""The environment in which we start a local Ray, where the user has not set these."""
KNOCK_SECONDS = 10.0
WAIT_SECONDS = 1.0
RESIZE_SECONDS = 10.0
"""How often the size of the cluster is asked for: it may grow while we run."""


class RayExecutor:
    """Runs jobs as tasks on a Ray cluster.

    The cluster is, in this order: the one this process is connected to already, the one at `address`, the one named by
    `RAY_ADDRESS` (as inside a Ray job), or a local one that is started for the run and shut down after it (`"local"`
    asks for that). Every node needs this version of Chatmill and the same view of the files.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        in_flight: int | None = None,
        task_options: Mapping[str, Any] | None = None,
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        """`workers` is the size of a local Ray that we start (None: all cores).

        `in_flight`: tasks submitted and not finished, at most; None keeps two for each CPU of the cluster.
        `task_options` are Ray's own for each task, e.g. `{"num_cpus": 2, "memory": 4 * 2**30}`.
        When no task ends for `late_seconds`, the one that was submitted first is reported as an event.
        """
        for name, value in (("workers", workers), ("in_flight", in_flight)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more, or None for the default")
        self.address, self.workers, self.in_flight = address, workers, in_flight
        self.task_options = dict(task_options or {})
        self.late_seconds = late_seconds
        self._kept: contextlib.ExitStack | None = None
        self._kept_own: bool | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Connect once for all runs inside, when the first of them begins; a build takes several."""
        try:
            with contextlib.ExitStack() as self._kept:
                yield
        finally:
            self._kept = self._kept_own = None

    def run(
        self,
        job: Callable[[Spec], Receipt],
        specs: Sequence[Spec],
        on_done: Callable[[int, Receipt], None],
        on_event: OnEvent | None = None,
    ) -> None:
        """See `Executor.run`."""
        check_job(job)
        ray = _import_ray()
        if not specs:
            return
        with self._connection(ray) as own_cluster:
            tasks = _Tasks(ray, job, specs, on_done, on_event or (lambda event: None), self)
            tasks.check_room(own_cluster)
            tasks.run()

    def _connection(self, ray: Any) -> contextlib.AbstractContextManager[bool]:
        if self._kept is None:
            return self._connected(ray)
        if self._kept_own is None:
            self._kept_own = self._kept.enter_context(self._connected(ray))
        return contextlib.nullcontext(self._kept_own)

    @contextlib.contextmanager
    def _connected(self, ray: Any) -> Iterator[bool]:
        """Connect where that is needed, and undo exactly that; gives whether we started the cluster."""
        if ray.is_initialized():
            yield False
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {"address": address}
        if address == "local":
            options |= {"num_cpus": self.workers, "include_dashboard": False}
        terminate = signal.getsignal(signal.SIGTERM)
        with _quiet(ray):
            try:
                _knock(address)
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                if address == "local":
                    raise WorkerStartError(f"cannot start a local Ray: {error}") from error
                raise WorkerStartError(
                    f"cannot connect to the Ray cluster at {address}: {error}. Check the address and that the "
                    "cluster is up (`ray status`), or give the address 'local' to start a Ray on this machine"
                ) from error
            try:
                with _terminate_handled(terminate):
                    yield address == "local"
            finally:
                ray.shutdown()


def _knock(address: str) -> None:
    """See that something listens at host:port; Ray itself would wait there for many minutes without a word."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


@contextlib.contextmanager
def _terminate_handled(before: Any) -> Iterator[None]:
    """Replace the SIGTERM handler that Ray installs, which prints a C++ stack and aborts, by one that lets us clean up.

    `before` is the handler that was there before Ray; one of the user stays in charge.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end if before in (signal.SIG_DFL, None) else before)
    try:
        yield
    except SystemExit:
        if received:  # on its way through Ray the exit status becomes 1
            raise SystemExit(128 + received[0]) from None
        raise


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "the Ray engine") from error
    return ray


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """The surroundings of a Ray that we start: few words, and environment and signal handling restored after it."""
    environment = dict(os.environ)
    logger = logging.getLogger("ray")
    level = logger.level
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    # Ray prints what raylets report (a dead worker, say) on the standard output of the driver, where it would end up
    # inside a receipt printed as JSON. Our events say the same.
    printer = ray._private.worker
    printing = getattr(printer, "_worker_logs_enabled", True)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logger.setLevel(logging.ERROR)
    printer._worker_logs_enabled = False
    try:
        yield
    finally:
        printer._worker_logs_enabled = printing
        logger.setLevel(level)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        if in_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def remote_job(version: str, payload: bytes) -> bytes:
    """In a Ray worker: run a packed job; refuses another version of this package, which could write other bytes."""
    if version != chatmill.__version__:
        raise ConfigError(
            f"a Ray worker on {os.uname().nodename} has chatmill {chatmill.__version__}, but the driver has {version}; "
            "install the same version on every node"
        )
    return run_packed(payload)


class _Tasks:
    """One run: keeps a bounded number of tasks in flight, and submits those again whose worker died."""

    def __init__(
        self,
        ray: Any,
        job: Callable[[Any], Any],
        specs: Sequence[Any],
        on_done: Callable[[int, Any], None],
        tell: OnEvent,
        options: RayExecutor,
    ) -> None:
        self._ray, self._job, self._specs, self._on_done, self._tell = ray, job, specs, on_done, tell
        self._options = {"num_cpus": 1} | options.task_options | {"max_retries": 0, "retry_exceptions": False}
        self._bound = options.in_flight
        self._resized = float("-inf")
        self._limit = 1
        self._remote = ray.remote(remote_job).options(**self._options)
        self._pending = deque(range(len(specs)))
        self._flying: dict[Any, int] = {}
        self._strikes = Strikes(specs)
        self._late_seconds = options.late_seconds
        self._patience = Patience(self._late_seconds)

    def check_room(self, own_cluster: bool) -> None:
        """A task that fits no node would wait without a word: refuse it in our own cluster, tell about it in others."""
        needed = float(self._options["num_cpus"])
        largest = max((node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]), default=0.0)
        if needed <= largest:
            return
        text = f"a task needs {needed:g} CPUs, but the largest node has {largest:g}"
        if own_cluster:
            raise ConfigError(f"{text}; ask for fewer CPUs per task, or give the local Ray more workers")
        self._tell(ExecutorEvent(kind=EventKind.WAITING, detail=f"{text}: waiting for the cluster to grow"))

    def run(self) -> None:
        """Run all jobs; no task of ours is left when this returns."""
        try:
            while self._pending or self._flying:
                while self._pending and len(self._flying) < self._room():
                    self._submit(self._pending.popleft())
                for reference in self._wait():
                    self._finish(reference)
        finally:
            for reference in self._flying:
                with contextlib.suppress(Exception):  # the cluster may be what failed
                    self._ray.cancel(reference, force=True)

    def _wait(self) -> list[Any]:
        """The tasks that have ended in the next moment; reports one where none has ended for long."""
        tick, started = min(WAIT_SECONDS, self._late_seconds / TICKS), time.monotonic()
        ready, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=tick)
        if ready:
            self._patience = Patience(self._late_seconds)
        elif self._patience.wait(time.monotonic() - started, tick):
            index = next(iter(self._flying.values()))
            detail = "`ray list tasks` says where it runs, or that it still waits for a node"
            label = label_of(self._specs[index])
            self._tell(late_event(self._patience.waited, pid=None, index=index, label=label, detail=detail))
        return list(ready)

    def _room(self) -> int:
        """How many tasks may be in flight now."""
        if self._bound is not None:
            return self._bound
        now = time.monotonic()
        if now - self._resized > RESIZE_SECONDS:
            self._limit = max(4, 2 * int(self._ray.cluster_resources().get("CPU", 0)))
            self._resized = now
        return self._limit

    def _submit(self, index: int) -> None:
        spec = self._specs[index]
        self._flying[self._remote.remote(chatmill.__version__, pack_job(self._job, spec))] = index
        attempt = self._strikes.attempt(index)
        self._tell(ExecutorEvent(kind=EventKind.JOB_STARTED, index=index, label=label_of(spec), attempt=attempt))

    def _finish(self, reference: Any) -> None:
        index = self._flying.pop(reference)
        errors = self._ray.exceptions
        try:
            outcome = self._ray.get(reference)
        except (
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.ObjectLostError,
        ) as error:
            self._retry(index, error)
            return
        except errors.RayTaskError as error:
            raise _understood(error) from error
        receipt = unpack_outcome(outcome)
        if self._pending:
            self._submit(self._pending.popleft())  # the cluster goes on while the driver commits
        self._on_done(index, receipt)

    def _retry(self, index: int, error: Exception) -> None:
        cause = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        label = label_of(self._specs[index])
        self._tell(ExecutorEvent(kind=EventKind.WORKER_DIED, index=index, label=label, detail=cause))
        attempt = self._strikes.add(index, cause)
        self._pending.appendleft(index)
        self._tell(ExecutorEvent(kind=EventKind.JOB_RETRIED, index=index, label=label, attempt=attempt, detail=cause))


def _understood(error: Any) -> Exception:
    """What a task outside of the job raised: our own complaint about versions, or a worker without Chatmill."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ConfigError):
        return cause
    if "No module named" in str(error):
        return ConfigError(
            f"a Ray worker cannot import what it needs: {str(error).strip().splitlines()[-1]}. Install the same "
            "version of chatmill on every node of the cluster"
        )
    return WorkerStartError(f"a Ray task failed outside of its job: {error}")
