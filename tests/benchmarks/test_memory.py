"""Watching the memory of processes: children are found, and what they take is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
SIZE = 120_000_000
CHILD = """
import os, sys, time
block = bytearray({size})
block[::4096] = b'x' * len(block[::4096])
until = time.monotonic() + 300
while not os.path.exists({seen!r}) and time.monotonic() < until:
    time.sleep(0.01)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"


def test_the_memory_of_children_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, resident = tmp_path / "seen", memory.resident

    def watched(pid: int) -> tuple[int, int]:
        found = resident(pid)
        if found[0] > SIZE:
            seen.touch()  # the child ends when it has been looked at
        return found

    monkeypatch.setattr(memory, "resident", watched)
    child = CHILD.format(size=SIZE, seen=str(seen))
    peak = memory.peak_of([sys.executable, "-c", PARENT.format(child=child)])
    assert seen.exists()
    assert SIZE < peak.largest < SIZE + 100_000_000
    assert peak.together > peak.largest


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        memory.peak_of([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
