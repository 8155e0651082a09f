"""Jobs that take very long: noticed while an engine waits, and named with their worker. Nothing is ended for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from chatmill.compiler.engines.executor import EventKind, ExecutorEvent

LATE_SECONDS = 120.0
"""How long a worker may be silent before it is reported; again after two, four, eight times as long."""
TICKS = 8
"""How often an engine looks up while it waits for that long."""

log = logging.getLogger("chatmill.build")


class Patience:
    """Counts how long one job has been waited for.

    Only time in which the driver was waiting counts: not that of its own work, and not that in which it was stopped
    itself, as by Ctrl-Z, which stops the workers with it.
    """

    def __init__(self, late_seconds: float) -> None:
        self.waited = 0.0
        self._report_at = late_seconds

    def wait(self, seconds: float, tick: float) -> bool:
        """Add the seconds that one tick took; whether it is time to report the job, again or for the first time."""
        self.waited += min(seconds, tick)
        if self.waited < self._report_at:
            return False
        self._report_at = 2 * self.waited
        return True


def late_event(waited: float, *, pid: int | None, index: int | None, label: str, detail: str = "") -> ExecutorEvent:
    """The event for a job, or for a worker that does not get ready (`index` None)."""
    state = detail or (process_state(pid) if pid is not None else "")
    detail = f"for {waited:.0f} s{f'; {state}' if state else ''}"
    return ExecutorEvent(kind=EventKind.JOB_LATE, pid=pid, index=index, label=label, detail=detail)


def process_state(pid: int) -> str:
    """What the system says about a process, in words; empty where it says nothing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {
        "T": f"the process is stopped, `kill -CONT {pid}` lets it go on",
        "t": "a debugger has stopped the process",
        "D": "the process waits for a disk or a network drive",
        "R": "the process is running",
        "S": "the process waits for something",
    }.get(state, "")


class LateJobs:
    """What a driver knows of late jobs: each report is logged, and shown until the job is done or given to another."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called when there is something else to show."""
        self._changed = changed
        self._late: dict[int | None, str] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """The late jobs, in words: `chats.jsonl from line 1 (worker 4711, for 120 s)`."""
        return tuple(self._late.values())

    def hear(self, event: ExecutorEvent) -> None:
        """Take an event of the engine."""
        if event.kind is EventKind.JOB_LATE:
            worker = f"worker {event.pid}, " if event.pid is not None else ""
            self._late[event.index] = f"{event.label} ({worker}{event.detail})"
            log.warning("Waiting for %s", self._late[event.index])
            self._changed()
        elif event.kind in (EventKind.JOB_RETRIED, EventKind.JOB_STARTED):
            self.forget(event.index)

    def forget(self, index: int | None) -> None:
        """The job is done, or somebody else does it; a worker that was slow to get ready is, too, once jobs move."""
        found = [self._late.pop(key, None) for key in (index, None)]
        if any(found):
            self._changed()
