"""The driver's side of a nursery: a process that loads once what all workers need, and forks them.

Loading a vocabulary takes a second of processor time and a quarter of a gigabyte. Workers that are forked from a
process that has done it share both. Where the system cannot do it (Linux can), every worker loads for itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from chatmill.compiler.engines.worker import DIED, FORKED, IS_READY, NEWS

ANSWER_SECONDS = 10.0
"""How long a nursery that is ready may take for an answer."""


def can_fork() -> bool:
    """Whether this system has what a nursery needs."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")


class Nursery:
    """A nursery process, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, first_job: bytes) -> None:
        """`channel` is our end of the socket that the process listens to."""
        self._process, self._channel = process, channel
        self._is_ready = False
        self._is_lost = False
        self._forked: list[int] = []
        self._statuses: dict[int, int] = {}
        self._heard = b""
        with contextlib.suppress(OSError):  # it has died already: noticed when it is waited for
            channel.sendall(struct.pack("<q", len(first_job)) + first_job)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it has loaded what it should; one that takes longer, or has died, is given up."""
        if not self._hear_until(lambda: self._is_ready, seconds):
            self._give_up()
        return not self._is_lost

    def fork(self, connection: int) -> ForkedProcess | None:
        """A new worker that speaks through this descriptor; None: start one another way."""
        if self._is_lost:
            return None
        try:
            socket.send_fds(self._channel, [b"."], [connection])
            if self._hear_until(lambda: bool(self._forked), ANSWER_SECONDS):
                return ForkedProcess(self._forked.pop(), self)
        except OSError:
            pass
        self._give_up()
        return None

    def status_of(self, pid: int) -> int:
        """The exit status of a worker that has ended; that of a killed one where the nursery is gone, too."""
        self._hear_until(lambda: pid in self._statuses, ANSWER_SECONDS)
        return self._statuses.pop(pid, signal.SIGKILL)

    def _hear_until(self, heard: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not heard() and not self._is_lost:
            left = until - time.monotonic()
            ready = left > 0 and wait([self._channel], left)
            if not ready:
                return False
            try:
                data = self._channel.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._is_lost = True
            self._heard += data
            whole = len(self._heard) // NEWS.size * NEWS.size
            for kind, pid, status in NEWS.iter_unpack(self._heard[:whole]):
                if kind == FORKED:
                    self._forked.append(pid)
                elif kind == DIED:
                    self._statuses[pid] = status
                self._is_ready |= kind == IS_READY
            self._heard = self._heard[whole:]
        return heard()

    def _give_up(self) -> None:
        """End it; its workers end with it."""
        self._is_lost = True
        self._process.kill()

    def end(self, seconds: float) -> None:
        """Let it end when its workers have, or end it."""
        self._channel.close()
        try:
            self._process.wait(timeout=0 if self._is_lost or not self._is_ready else seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A worker that was forked from a nursery, with those methods of `subprocess.Popen` that an engine needs."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def kill(self) -> None:
        """End it; does nothing to one that has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code."""
        if self.returncode is None:
            if not wait([self._handle], timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            os.close(self._handle)
            self.returncode = os.waitstatus_to_exitcode(self._nursery.status_of(self.pid))
        return self.returncode
