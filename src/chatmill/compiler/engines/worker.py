"""The life of a worker process: one job after the other; and of the process that workers are forked from."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from chatmill.compiler.engines.executor import run_packed

READY = b"ready"
NEWS = struct.Struct("<cii")
"""What a nursery says: kind, process id, exit status."""
IS_READY, FORKED, DIED = b"R", b"F", b"D"


def worker_main(boot: dict[str, Any]) -> None:
    """A worker that is a fresh interpreter, or a nursery."""
    # Ctrl-C reaches every process of the terminal; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for descriptor in (boot["connection"], boot["lifeline"]):
        os.set_inheritable(descriptor, False)
    _die_with(boot["driver"])
    if boot["nursery"]:
        _Nursery(boot["connection"], boot["lifeline"]).run()
    _serve(boot["connection"], boot["lifeline"])


def _serve(connection: int, lifeline: int) -> None:
    """One job after the other until the pipe ends."""
    _watch(lifeline)
    pipe = Connection(connection)
    with contextlib.suppress(EOFError, OSError):  # the driver has no more work, or is gone
        pipe.send_bytes(READY)
        while True:
            pipe.send_bytes(run_packed(pipe.recv_bytes()))
    _leave()


def _leave() -> None:
    """End this process with its exit handlers, but without taking apart what it has loaded: the driver is waiting."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _die_with(parent: int) -> None:
    """End this process when its parent ends in any way, also in the middle of a job, where the system does that."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before the line above
            os._exit(1)


def _watch(lifeline: int) -> None:
    """End this process when the driver is gone, in a thread."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)  # nothing is ever written: this returns when the last writer is gone
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class _Nursery:
    """Does one job, which loads what the others need, and forks a worker for each descriptor that it is sent.

    It has one thread, since a fork takes along no other, and says so by ending where a library has started some.
    """

    def __init__(self, channel: int, lifeline: int) -> None:
        self._channel = socket.socket(fileno=channel)
        self._lifeline = lifeline

    def run(self) -> None:
        """Until the driver closes the channel; does not return."""
        with contextlib.suppress(EOFError, OSError):
            size = struct.unpack("<q", _exactly(self._channel, 8))[0]
            run_packed(_exactly(self._channel, size))  # what it gives or raises is not looked at
            if len(os.listdir("/proc/self/task")) == 1:
                woken, wake = socket.socketpair()
                wake.setblocking(False)
                signal.signal(signal.SIGCHLD, lambda number, frame: None)
                signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
                self._tell(IS_READY)
                while self._wait(woken):
                    pass
        with contextlib.suppress(ChildProcessError):
            while True:  # so that the time of all workers counts as used by children of the driver
                os.wait()
        os._exit(0)

    def _wait(self, woken: socket.socket) -> bool:
        """Deal with what happens next; whether there is more to come."""
        ready, _, _ = select.select([self._channel, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            self._bury()
        if self._channel not in ready:
            return True
        _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not descriptors:
            return False
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._become_worker(descriptors[0], parent)
        os.close(descriptors[0])
        self._tell(FORKED, child)
        return True

    def _become_worker(self, connection: int, parent: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        _die_with(parent)
        _serve(connection, self._lifeline)

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    return
                self._tell(DIED, child, status)

    def _tell(self, kind: bytes, child: int = 0, status: int = 0) -> None:
        self._channel.sendall(NEWS.pack(kind, child, status))


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = channel.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found
