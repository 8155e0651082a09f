"""A temporary folder that lives as long as the objects that read from it, and no longer than its process."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

PREFIX = "chatmill-scratch-"
OLD_SECONDS = 3600
"""A folder that nobody holds is removed from this age on: a younger one may be about to be held."""


class Scratch:
    """A new folder in the place for temporary files (`TMPDIR`), removed with the last object that refers to it.

    The folder is locked while its process lives. What a killed process left behind is removed by the next one.
    """

    def __init__(self) -> None:
        """Also removes the folders of processes that were killed."""
        _sweep(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        weakref.finalize(self, _remove, self.folder, os.getpid(), _locked(self.folder))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process borrows the folder: it belongs to this one."""
        return Borrowed, (str(self.folder),)


class Borrowed:
    """The folder of a `Scratch` in another process; nothing is removed here."""

    def __init__(self, folder: str) -> None:
        """A worker of torch's `DataLoader` gets one by pickling."""
        self.folder = Path(folder)


def _remove(folder: Path, owner: int, lock: int | None) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the object, not of the folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Hold a lock on a folder; None where the system has none, or another process holds it."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(place: Path) -> None:
    """Remove old folders that nobody holds."""
    with contextlib.suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                about = folder.lstat()
                mine = about.st_uid == os.getuid() if hasattr(os, "getuid") else False
                if not mine or folder.is_symlink() or time.time() - about.st_mtime < OLD_SECONDS:
                    continue
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)
