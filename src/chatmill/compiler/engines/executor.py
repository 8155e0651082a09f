"""Running many small jobs somewhere: the protocol every engine keeps, its events, and its errors.

A job is a module-level function from a small picklable spec to a small picklable receipt. What a job makes, it writes
to files; no tokens travel between processes.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from chatmill.errors import ChatmillError, ConfigError, SlowEngineWarning

Spec = TypeVar("Spec")
Receipt = TypeVar("Receipt")

MAX_KILLS = 3
"""How many workers one job may kill before the run ends."""


class EventKind(StrEnum):
    """What happened inside an engine."""

    WORKER_STARTED = "worker_started"
    """A worker is ready for jobs (local engine only: Ray starts its workers itself)."""
    WORKER_DIED = "worker_died"
    """A worker ended without being asked to; `detail` says how."""
    JOB_STARTED = "job_started"
    """A job was handed to a worker, or to the cluster."""
    JOB_RETRIED = "job_retried"
    """A job whose worker died stands in line again."""
    JOB_LATE = "job_late"
    """A worker has not answered for long; `detail` says how long and what the system says about the process."""
    WAITING = "waiting"
    """Nothing can run at the moment; `detail` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorEvent:
    """One thing that a progress display may want to show; results never depend on events."""

    kind: EventKind
    pid: int | None = None
    """Process id of the worker, where the engine knows it."""
    index: int | None = None
    """Position of the job in `specs`."""
    label: str = ""
    """The job in words."""
    attempt: int = 1
    """1 for the first try of the job."""
    detail: str = ""
    """How a worker died, or what is being waited for."""


OnEvent = Callable[[ExecutorEvent], None]


class Executor(Protocol):
    """An engine: runs jobs in other processes, survives killed workers, and leaves none behind."""

    def run(
        self,
        job: Callable[[Spec], Receipt],
        specs: Sequence[Spec],
        on_done: Callable[[int, Receipt], None],
        on_event: OnEvent | None = None,
    ) -> None:
        """Run `job` once for each spec; returns when all are done.

        `on_done(index, receipt)` is called in this process as jobs finish: in any order, once for each index. The first
        job (or callback) that raises ends the run: the other jobs are cancelled, the workers end, and the same error is
        raised here. A job whose worker is killed is tried again; after `MAX_KILLS` dead workers `JobKilledWorkers` is
        raised. A job may therefore run more than once, and must not mind what an earlier try left behind.
        """
        ...


@contextlib.contextmanager
def kept(executor: Executor) -> Iterator[Executor]:
    """While this is open, an engine keeps between its runs what takes long to get: the connection to a cluster, say."""
    keep: Callable[[], contextlib.AbstractContextManager[None]] | None = getattr(executor, "kept", None)
    with contextlib.nullcontext() if keep is None else keep():
        yield executor


class JobKilledWorkers(ChatmillError, RuntimeError):  # noqa: N818 - it names what happened
    """One job ended its worker process `MAX_KILLS` times."""

    def __init__(self, label: str, causes: Sequence[str]) -> None:
        """`causes` says how each of the workers died, in order."""
        self.label, self.causes = label, tuple(causes)
        distinct = list(dict.fromkeys(self.causes))
        super().__init__(
            f"{label}: this job killed its worker {len(self.causes)} times ({'; then '.join(distinct)}). "
            "If memory ran out: use smaller chunks, fewer workers, or a machine with more memory. "
            "If it crashes alone as well, a record in it breaks native code: run it with 0 workers to see where."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (JobKilledWorkers, (self.label, self.causes))


class WorkerStartError(ChatmillError, RuntimeError):
    """Workers cannot be started at all."""


class JobError(ChatmillError, RuntimeError):
    """A job raised an exception that could not travel as it was; the message holds its type and text."""


class RemoteTraceback(Exception):  # noqa: N818 - never raised, only shown as a cause
    """Where in the worker an error happened, as text; it is the `__cause__` of the error raised in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def label_of(spec: object) -> str:
    """The words for a job in messages: `spec.label`, `spec.label()`, `spec["label"]`, or a short repr."""
    label = spec.get("label") if isinstance(spec, Mapping) else getattr(spec, "label", None)
    if callable(label):
        label = label()
    if label is not None:
        return str(label)
    text = repr(spec)
    return text if len(text) <= 100 else text[:97] + "..."


def describe_exit(code: int) -> str:
    """How a process ended, in words: a negative `code` is the signal that killed it."""
    if code >= 0:
        return f"ended by itself with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown signal"
    hint = {
        "SIGKILL": ", usually the system ran out of memory",
        "SIGSEGV": ", a crash in native code",
        "SIGBUS": ", a crash in native code or a file that shrank while it was mapped",
        "SIGABRT": ", native code gave up",
        "SIGILL": ", native code built for another processor",
    }.get(name, "")
    return f"killed by signal {-code} ({name}{hint})"


class Strikes:
    """Counts the workers that each job has killed."""

    def __init__(self, specs: Sequence[object] | Mapping[int, object]) -> None:
        self._specs = specs
        self._causes: dict[int, list[str]] = {}

    def add(self, index: int, cause: str) -> int:
        """Note one more dead worker; returns the number of the next try, or raises `JobKilledWorkers`."""
        causes = self._causes.setdefault(index, [])
        causes.append(cause)
        if len(causes) >= MAX_KILLS:
            raise JobKilledWorkers(label_of(self._specs[index]), causes)
        return len(causes) + 1

    def attempt(self, index: int) -> int:
        """The number of the try that is due: 1 for a job that has killed nothing."""
        return len(self._causes.get(index, ())) + 1

    def is_last_try(self, index: int) -> bool:
        """Whether one more dead worker ends the run."""
        return self.attempt(index) >= MAX_KILLS


def check_job(job: Callable[..., object]) -> None:
    """Refuse a function that a worker could not import by name."""
    function = job.func if isinstance(job, functools.partial) else job
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) == "__main__" or "<" in name:
        raise ConfigError(
            f"the job {name!r} cannot be imported by a worker process: it must be a function at the top level of a "
            "module (not a lambda, not inside another function, not in the script that is being run)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception on its way from a worker to the driver."""

    parts: bytes
    """The pickled exception, or its pickled (class, args, state); empty where neither survives the journey."""
    text: str
    """Type and message, for an exception that cannot be rebuilt."""
    trace: str
    label: str

    def rebuild(self) -> BaseException:
        """The exception, with the worker's traceback as its cause and a note that names the job."""
        error: BaseException = JobError(f"{self.label}: the job failed: {self.text}")
        if self.parts:
            with contextlib.suppress(Exception):  # the class may exist in the worker alone
                error = _from_parts(self.parts)
        error.__cause__ = RemoteTraceback(self.trace)
        error.add_note(f"in the job: {self.label}")
        return error


def failure_of(error: BaseException, label: str) -> Failure:
    """Pack an exception so that it arrives with its type and message, whatever its class does on pickling."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = "".join(traceback.format_exception_only(error)).strip()
    if not isinstance(error, Exception):  # SystemExit would end the driver without a word
        return Failure(parts=b"", text=text, trace=trace, label=label)
    state = {name: value for name, value in error.__dict__.items() if name != "__notes__"}
    for candidate in (error, (type(error), error.args, state)):
        with contextlib.suppress(Exception):  # a class may fail on pickling, or on the way back, in any way it likes
            parts = pickle.dumps(candidate)
            if _same(_from_parts(parts), error):
                return Failure(parts=parts, text=text, trace=trace, label=label)
    return Failure(parts=b"", text=text, trace=trace, label=label)


def _from_parts(parts: bytes) -> BaseException:
    """An exception from its pickle, or made of class, args and state without its `__init__`."""
    value = pickle.loads(parts)
    if isinstance(value, BaseException):
        return value
    kind, args, state = value
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _same(first: BaseException, second: BaseException) -> bool:
    return type(first) is type(second) and str(first) == str(second)


def pack_job(job: Callable[[Spec], Any], spec: Spec) -> bytes:
    """What is sent to a worker: the name of the function, and the spec."""
    return pickle.dumps((job, spec))


def run_packed(payload: bytes) -> bytes:
    """In a worker: run a packed job; returns a pickled receipt or `Failure`. Never raises an `Exception`."""
    label = "(a job that could not be unpacked)"
    with _passed_on() as warned:
        try:
            job, spec = pickle.loads(payload)
            label = label_of(spec)
            return pickle.dumps((True, job(spec), warned))
        except BaseException as error:  # also SystemExit: a job that calls sys.exit must not look like a killed worker
            return pickle.dumps((False, failure_of(error, label), warned))


@contextlib.contextmanager
def _passed_on() -> Iterator[list[str]]:
    """Collects warnings of a slow engine for the driver, which shows one of them and not one for each worker."""
    texts: list[str] = []
    show = warnings.showwarning

    def keep(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, SlowEngineWarning):
            texts.append(str(message))
        else:
            show(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.showwarning = keep
        yield texts


def unpack_outcome(outcome: bytes) -> Any:
    """In the driver: the receipt; raises what the job raised."""
    done, value, warned = pickle.loads(outcome)
    for text in warned:
        from chatmill.tokenizer.backends import warn_of_fallback

        warn_of_fallback(text)
    if done:
        return value
    raise value.rebuild()
