"""Faults at renames and syncs, put into processes from outside: they kill themselves, wait, or find their disk full.

`TEST_FAULTS=after:train/shard_:2:kill` ends a process with SIGKILL after its second rename to a path that holds this
pattern; `before` is before such a rename, `sync` before a sync of such a file or folder. Several are separated by
commas. The kinds are `kill` (in every process that gets there), `kill_once` (in the first one; needs the log), `enospc`
(no space left on device) and `wait` (for a signal). Before a fault happens, it is noted in the file `TEST_FAULTS_LOG`.

Fresh interpreters find this by `sitecustomize` in the folder `shim`, which `faults` puts into PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

VARIABLE, LOG = "TEST_FAULTS", "TEST_FAULTS_LOG"
SHIM = Path(__file__).parent / "shim"


def faults(*plan: str, log: Path | None = None) -> dict[str, str]:
    """Variables of the environment that bring faults into a process and all that it starts."""
    path = os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])])
    noted = {} if log is None else {LOG: str(log)}
    return {VARIABLE: ",".join(plan), "PYTHONPATH": path, **noted}


def faults_hit(log: Path) -> list[str]:
    """The faults that have happened, in order."""
    return log.read_text().splitlines() if log.exists() else []


@contextlib.contextmanager
def active(*plan: str, log: Path | None = None) -> Iterator[None]:
    """Faults in this process, for as long as this is open."""
    calls = _Calls(",".join(plan), log)
    with (
        mock.patch.object(os, "rename", calls.rename),
        mock.patch.object(os, "replace", calls.rename),
        mock.patch.object(os, "fsync", calls.fsync),
    ):
        yield


def install() -> None:
    """Faults in this process from now on, if its environment says so."""
    if plan := os.environ.get(VARIABLE):
        calls = _Calls(plan, Path(os.environ[LOG]) if LOG in os.environ else None)
        os.rename, os.replace, os.fsync = calls.rename, calls.rename, calls.fsync


class _Calls:
    def __init__(self, plan: str, log: Path | None) -> None:
        self._plan = [entry.split(":") for entry in plan.split(",")]
        self._log, self._hits = log, Counter[int]()
        self._replace, self._fsync = os.replace, os.fsync

    def rename(self, source: Any, target: Any, **more: Any) -> None:
        self._reached("before", os.fspath(target))
        self._replace(source, target, **more)
        self._reached("after", os.fspath(target))

    def fsync(self, descriptor: int) -> None:
        self._reached("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        self._fsync(descriptor)

    def _reached(self, moment: str, path: str) -> None:
        for number, (when, pattern, hit, kind) in enumerate(self._plan):
            if when != moment or not re.search(pattern, path):
                continue
            self._hits[number] += 1
            if self._hits[number] == int(hit) and (kind != "kill_once" or self._is_first(number)):
                self._do(f"{when}:{pattern}", kind)

    def _is_first(self, number: int) -> bool:
        assert self._log is not None
        try:
            os.close(os.open(f"{self._log}.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _do(self, name: str, kind: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{name}\n")
        if kind == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while kind == "wait":
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
