"""Append-only file of captured calls."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from chatmill.core.publish import lock, storing
from chatmill.errors import ConfigError

OWNER_ONLY = 0o600


class CallFile:
    """An append-only file with one writer.

    A line is in the file, and survives the end of the process, when `append` returns. `sync` makes it survive the
    end of the machine.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: name the file that calls are added to, such as calls.jsonl")
        self.path = path
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, OWNER_ONLY)
        try:
            lock(self._descriptor, f"another capture is adding calls to {path}: give each its own --out")
        except ConfigError:
            os.close(self._descriptor)
            raise
        self._is_torn = self._ends_in_a_torn_line()
        self.lost = 0
        """Calls that could not be written since the last one that was."""

    def append(self, line: bytes) -> None:
        """Add a line.

        Raises:
            OSError: The line could not be written whole. The next one begins on a line of its own.
        """
        data = line + b"\n"
        if self._is_torn:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            self._is_torn = self._is_torn or written > 0
            self.lost += 1
            raise
        self._is_torn = False
        self.lost = 0

    def sync(self) -> None:
        """Wait until the disk has all lines."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close the file."""
        # What could not be synced was warned about when it was written.
        with contextlib.suppress(OSError):
            self.sync()
        os.close(self._descriptor)

    def _ends_in_a_torn_line(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
