"""A temporary folder that lives as long as the objects that read from it, and no longer than its process."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

PREFIX = "chatmill-scratch-"


class Scratch:
    """A new folder in the place for temporary files (`TMPDIR`), removed with the last object that refers to it.

    Pickled, as for a worker of torch's `DataLoader`, it becomes the same folder, which the other process never removes.
    """

    def __init__(self, folder: str | None = None) -> None:
        """`folder` is that of another process; default: a new one."""
        self.folder = Path(folder or tempfile.mkdtemp(prefix=PREFIX))
        if folder is None:
            weakref.finalize(self, _remove, self.folder, os.getpid())

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, (str(self.folder),)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has a copy of the object, not of the folder
        shutil.rmtree(folder, ignore_errors=True)
