"""Watching the memory of processes: children are found, and what they take is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.memory import peak_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
CHILD = "import time; block = bytearray({size}); block[::4096] = b'x' * len(block[::4096]); time.sleep(2)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"


def test_the_memory_of_children_counts() -> None:
    child = CHILD.format(size=120_000_000)
    peak = peak_of([sys.executable, "-c", PARENT.format(child=child)])
    assert 120_000_000 < peak.largest < 220_000_000
    assert peak.together > peak.largest


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no such thing"):
        peak_of([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
