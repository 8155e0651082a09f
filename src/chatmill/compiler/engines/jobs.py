"""Jobs and the engines that run them: the protocol, the errors, and how a job travels.

A job is a module-level function from a small picklable spec to a small picklable result. What it makes, it writes to
files; no tokens travel between processes.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

from chatmill.errors import ChatmillError, SlowEngineWarning

Spec = TypeVar("Spec")
Result = TypeVar("Result")

MAX_KILLS = 3
"""How many workers one job may kill before the run ends."""


class Executor(Protocol):
    """An engine: runs jobs in other processes, survives killed workers, and leaves none behind.

    Inside its `with` block it keeps between runs what takes long to get: loaded workers, the connection to a cluster.
    """

    def map(self, job: Callable[[Spec], Result], specs: Sequence[Spec]) -> Iterator[tuple[int, Result]]:
        """`(index, job(spec))` as jobs end, in any order, once for each index.

        The first job that raises ends the run, and the same error is raised here; so does a caller that stops taking
        results. A job whose worker is killed runs again, so it must not mind what an earlier try left; after
        `MAX_KILLS` dead workers `JobKilledWorkers` is raised.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def results_of(executor: Executor | None, job: Callable[[Spec], Result], specs: Sequence[Spec]) -> list[Result]:
    """Return what a job gives for each spec, in their order; without an executor it is done in this process."""
    if executor is None:
        return [job(spec) for spec in specs]
    results = dict(executor.map(job, specs))
    return [results[index] for index in range(len(specs))]


class JobKilledWorkers(ChatmillError, RuntimeError):  # noqa: N818 - it names what happened
    """One job ended its worker process `MAX_KILLS` times."""

    def __init__(self, label: str, cause: str) -> None:
        """`cause` says how the last of the workers died."""
        self.label, self.cause = label, cause
        super().__init__(
            f"{label}: this job killed its worker {MAX_KILLS} times ({cause}). "
            "If memory ran out: use smaller chunks, fewer workers, or a machine with more memory. "
            "If it crashes alone as well, a record in it breaks native code: run it with 0 workers to see where."
        )


class WorkerStartError(ChatmillError, RuntimeError):
    """Workers cannot be started, or the process that starts them died."""


class JobError(ChatmillError, RuntimeError):
    """A job raised an exception that could not travel as it was; the message holds its type and text."""


class RemoteTraceback(Exception):  # noqa: N818 - never raised, only shown as a cause
    """Where in the worker an error happened, as text; it is the `__cause__` of the error raised in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def label_of(spec: object) -> str:
    """Return the words for a job in messages: `spec.label`, or a short repr."""
    return str(getattr(spec, "label", None) or repr(spec)[:200])


def describe_exit(code: int | None) -> str:
    """Describe how a process ended; a negative `code` is the signal that killed it."""
    if code is None or code >= 0:
        return f"ended by itself with exit status {code}"
    names = {member.value: member.name for member in signal.Signals}
    hint = {"SIGKILL": ", usually the system ran out of memory", "SIGSEGV": ", a crash in native code"}
    name = names.get(-code, "unknown signal")
    return f"killed by signal {-code} ({name}{hint.get(name, '')})"


def run_job(job: Callable[[Any], Any], spec: Any) -> bytes:
    """Run a job in a worker and pickle its result or error, with warnings. Never raises an `Exception`.

    The driver shows one warning about a slow engine, not one per worker.
    """
    with warnings.catch_warnings(record=True) as caught:
        try:
            done, value = True, pickle.dumps(job(spec))
        except BaseException as error:  # also SystemExit: a job that calls sys.exit must not look like a killed worker
            done, value = False, pickle.dumps(_packed_error(error, label_of(spec)))
    slow = [warning for warning in caught if issubclass(warning.category, SlowEngineWarning)]
    for warning in caught:
        if warning not in slow:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return pickle.dumps((done, value, [str(warning.message) for warning in slow]))


def result_of(outcome: bytes) -> Any:
    """Return, in the driver, what `run_job` got from the job; raise what the job raised."""
    done, value, warned = pickle.loads(outcome)
    for text in warned:
        from chatmill.tokenizer.backends import warn_of_fallback

        warn_of_fallback(text)
    if done:
        return pickle.loads(value)
    packed, text, trace, label = pickle.loads(value)
    error: BaseException = JobError(f"{label}: the job failed: {text}")
    if packed:
        with contextlib.suppress(Exception):  # the class may exist in the worker alone
            error = pickle.loads(packed)
    error.__cause__ = RemoteTraceback(trace)
    error.add_note(f"in the job: {label}")
    raise error


def _packed_error(error: BaseException, label: str) -> tuple[bytes, str, str, str]:
    """Return an exception on its way to the driver; empty bytes where it does not survive the journey."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = "".join(traceback.format_exception_only(error)).strip()
    packed = b""
    if isinstance(error, Exception):  # SystemExit would end the driver without a word
        with contextlib.suppress(Exception):  # a class may fail on pickling, or on the way back, in any way it likes
            packed = pickle.dumps(error)
            packed = packed if str(pickle.loads(packed)) == str(error) else b""
    return packed, text, trace, label
