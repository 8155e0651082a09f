"""Named places where tests make a process die or wait, or a disk fill up; a test device, off unless asked for.

`CHATMILL_FAULTS=after_part_write:2` makes a process kill itself (SIGKILL) when it comes to that point for the second
time; several faults are separated by commas. A third field chooses another kind, e.g. `after_part_write:1:enospc`.
Hits are counted in each process by itself. With `CHATMILL_FAULTS_LOG` a line is appended to that file, and synced,
before the fault happens, so that a test can assert that the point was reached.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from chatmill.errors import ConfigError

FAULTS = "CHATMILL_FAULTS"
FAULTS_LOG = "CHATMILL_FAULTS_LOG"


class FaultKind(StrEnum):
    """What happens at a fault point."""

    KILL = "kill"
    """SIGKILL to the own process, in every process that gets there."""
    KILL_ONCE = "kill_once"
    """The same, but only in the first process that gets there; needs the log, beside which it leaves a mark."""
    ENOSPC = "enospc"
    """`OSError`: no space left on device."""
    WAIT = "wait"
    """Nothing more happens in this process until a signal ends it: a test can send one at a known place."""


_hits: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Do what `CHATMILL_FAULTS` says for this place; without it, one look-up in the environment."""
    plan = os.environ.get(FAULTS)
    if not plan:
        return
    _hits[name] += 1
    for point, hit, kind in _parsed(plan):
        if point == name and hit == _hits[name] and _claimed(name, kind):
            _log(f"{name} {hit} {kind} {os.getpid()}\n")
            if kind is FaultKind.ENOSPC:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while kind is FaultKind.WAIT:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)


def faults_hit(log: str | os.PathLike[str]) -> list[str]:
    """The names of the faults that have happened, in order; for tests."""
    try:
        with open(log, encoding="ascii") as file:
            return [line.split()[0] for line in file]
    except FileNotFoundError:
        return []


def _parsed(plan: str) -> Iterator[tuple[str, int, FaultKind]]:
    for entry in plan.split(","):
        name, _, rest = entry.strip().partition(":")
        hit, _, kind = rest.partition(":")
        if not name or not hit.isdecimal() or int(hit) < 1 or kind not in ("", *FaultKind):
            raise ConfigError(
                f"{FAULTS}: {entry!r} is no fault; write name:hit or name:hit:kind, where hit counts from 1 and "
                f"kind is one of {', '.join(FaultKind)}"
            )
        yield name, int(hit), FaultKind(kind or FaultKind.KILL)


def _claimed(name: str, kind: FaultKind) -> bool:
    """Whether this process may do it: always, but for `kill_once`, where the first to make a mark may."""
    if kind is not FaultKind.KILL_ONCE:
        return True
    if FAULTS_LOG not in os.environ:
        raise ConfigError(f"{FAULTS}: the kind {kind} needs {FAULTS_LOG}")
    try:
        os.close(os.open(f"{os.environ[FAULTS_LOG]}.{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _log(line: str) -> None:
    if FAULTS_LOG not in os.environ:
        return
    descriptor = os.open(os.environ[FAULTS_LOG], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode("ascii"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
