"""The Ray engine: one job is one Ray task; specs and results travel, data never does. Ray itself retries lost tasks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import chatmill
from chatmill.compiler.engines.jobs import (
    MAX_KILLS,
    JobKilledWorkers,
    Result,
    Spec,
    WorkerStartError,
    label_of,
    result_of,
    run_job,
)
from chatmill.errors import ConfigError, MissingExtraError, UnknownNameError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_oom_retries": str(MAX_KILLS - 1),
}
"""The environment of a local Ray that we start, where the user has not set these."""
KNOCK_SECONDS = 10.0
ENGINES = ("local", "ray")


def named_executor(engine: str, workers: int | None = None) -> RayExecutor | None:
    """Return the engine of a name; None for the local one, which every build makes for itself."""
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, list(ENGINES))
    return RayExecutor(workers=workers) if engine == "ray" else None


class RayExecutor:
    """Runs jobs as tasks on a Ray cluster.

    The cluster is, in this order: the one this process is connected to already, the one at `address`, the one named by
    `RAY_ADDRESS` (as inside a Ray job), or a local one that is started for the run and shut down after it (`"local"`
    asks for that). Every node needs this version of Chatmill and the same view of the files.
    """

    def __init__(self, address: str | None = None, *, workers: int | None = None) -> None:
        """`workers` is the size of a local Ray that we start (None: all cores)."""
        if workers is not None and workers < 1:
            raise ConfigError(f"workers is {workers}; Ray needs 1 or more, or None for all cores")
        self.address, self.workers = address, workers
        self._kept: contextlib.ExitStack | None = None

    def __enter__(self) -> Self:
        self._kept = contextlib.ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def map(self, job: Callable[[Spec], Result], specs: Sequence[Spec]) -> Iterator[tuple[int, Result]]:
        """See `Executor.map`."""
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray", "the Ray engine") from error
        if not specs:
            return
        with contextlib.ExitStack() as stack:
            if not ray.is_initialized():
                (self._kept or stack).enter_context(self._connected(ray))
            yield from _run(ray, job, specs)

    @contextlib.contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        """Connect, and disconnect at the end; do not print what raylets report, as it may end up in a receipt."""
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        options = {"num_cpus": self.workers, "include_dashboard": False} if address == "local" else {}
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        in_main = threading.current_thread() is threading.main_thread()
        terminate = signal.getsignal(signal.SIGTERM) if in_main else None
        ray._private.worker._worker_logs_enabled = False
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise WorkerStartError(
                f"cannot connect to the Ray cluster at {address}: {error}. Check the address and that the cluster is "
                "up (`ray status`), or give the address 'local' to start a Ray on this machine"
            ) from error
        try:
            if in_main:  # Ray's own handler prints a stack of its C++ code
                signal.signal(signal.SIGTERM, signal.SIG_DFL if terminate is None else terminate)
            yield
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """See that something listens at host:port; Ray itself would wait there for many minutes without a word."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def remote_job(version: str, job: Callable[[Any], Any], spec: Any) -> bytes:
    """Run a job in a Ray worker; refuse another version of this package, which could write other bytes."""
    if version != chatmill.__version__:
        raise ConfigError(
            f"a Ray worker on {os.uname().nodename} has chatmill {chatmill.__version__}, but the driver has {version}; "
            "install the same version on every node"
        )
    return run_job(job, spec)


def _run(ray: Any, job: Callable[[Any], Any], specs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Keep two tasks for each CPU in flight, and no more: the cluster may grow or shrink, and others use it too."""
    task = ray.remote(remote_job).options(num_cpus=1, max_retries=MAX_KILLS - 1, retry_exceptions=False)
    todo, flying = deque(enumerate(specs)), dict[Any, int]()
    try:
        while todo or flying:
            room = max(4, 2 * int(ray.cluster_resources().get("CPU", 0)))
            while todo and len(flying) < room:
                index, spec = todo.popleft()
                flying[task.remote(chatmill.__version__, job, spec)] = index
            for reference in ray.wait(list(flying), num_returns=1)[0]:
                index = flying.pop(reference)
                yield index, result_of(_outcome(ray, reference, label_of(specs[index])))
    finally:
        for reference in flying:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                ray.cancel(reference, force=True)


def _outcome(ray: Any, reference: Any, label: str) -> bytes:
    """Return what a task gave; errors of Ray in our words."""
    try:
        return bytes(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        if "No module named" in str(error):
            raise ConfigError(
                f"a Ray worker cannot import what it needs: {str(error).strip().splitlines()[-1]}. Install the same "
                "version of chatmill on every node of the cluster"
            ) from error
        raise WorkerStartError(f"a Ray task failed outside of its job: {error}") from error
    except ray.exceptions.RayError as error:  # its worker or node was lost, more often than Ray retries
        raise JobKilledWorkers(label, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
