"""Files that appear under their name whole or not at all, and what makes them stay there after a crash."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHOWN = 40
"""Characters of a file's name that are in its hidden name: the file system limits the length of names."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` for the block to write to; the file gets its own name when the block ends well.

    An existing file is replaced. The bytes are on disk before the name is. Threads, and machines that share a folder,
    may write the same file at once: each has a hidden name of its own.
    """
    partial = path.with_name(f".{path.name[:SHOWN]}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # folders cannot be opened on this platform
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync names by themselves
            raise
    finally:
        os.close(descriptor)
