"""A folder for builds, in memory if there is one, since a build syncs every file to its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = "/dev/shm"


def _folder() -> Iterator[Path]:
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30
    with tempfile.TemporaryDirectory(prefix="chatmill-test-", dir=MEMORY if usable else None) as folder:
        yield Path(folder)


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder on a file system that syncs quickly."""
    yield from _folder()


@pytest.fixture(scope="module")
def fast_module() -> Iterator[Path]:
    """The same for all tests of a module."""
    yield from _folder()
