"""One build at a time in a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from chatmill.errors import ConfigError


@contextlib.contextmanager
def folder_lock(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold a folder; `shared` lets other shared holders in (the shares of one build), else nobody.

    Nothing is written. Where the system or the file system has no such locks, nothing is held.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this platform
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another build is at work in this folder now; wait until it ends, or choose another folder"
            ) from None
        except OSError:  # some network file systems
            pass
        yield
    finally:
        os.close(descriptor)
