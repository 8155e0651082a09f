"""One build at a time in a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from chatmill.store.durable import lock


@contextlib.contextmanager
def folder_lock(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold a folder; `shared` lets other shared holders in (the shares of one build), else nobody.

    Nothing is written. Where the system or the file system has no such locks, nothing is held.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = f"{folder}: another build is at work in this folder now; wait until it ends, or choose another folder"
        lock(descriptor, held, shared=shared)
        yield
    finally:
        os.close(descriptor)
