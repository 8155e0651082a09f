"""The processes of the local engine; after every test none of them is left."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_pids() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed if alive(int(pid))}


def pipes() -> set[tuple[str, str]]:
    """The open descriptors of the kinds that the engine makes: pipes, sockets and handles of processes."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, which was open while it was listed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {(number, what) for number, what in found if what.startswith(("pipe:", "socket:", "anon_inode:[pidfd]"))}


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_others() -> None:
    gc.collect()  # what other modules left must not be closed while these tests count


@pytest.fixture(autouse=True)
def _no_process_left() -> Any:
    before, descriptors = child_pids(), pipes()
    yield
    assert child_pids() <= before
    assert pipes() <= descriptors, "a descriptor was left open"
