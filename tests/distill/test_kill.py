"""Distillation builds that are killed: resumed, they are equal to builds that nothing disturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chatmill.distill.run import build_synth_kd
from tests.compiler.builds import digest
from tests.compiler.kill_reports import check, reports_of
from tests.distill.inputs import chat, leftovers, real_rows, row, write_input


def kills(home: Path, **order: Any) -> list[dict[str, Any]]:
    rows = [row(f"id-{n}", chat(f"question {n}", "x" * n)) for n in range(40)]
    rows[9] = row("bad", [])
    source = write_input(home / "in", [rows[:20], rows[20:]], group=10)
    return reports_of("tests.distill.killing", {"home": str(home), "input": str(source), **order})


def test_killed_at_seeded_moments(fast: Path) -> None:
    reports = kills(fast, kills=20)
    check(reports)
    assert len(reports) == 20
    assert reports[0]["operations"] > 100


@pytest.mark.slow
def test_killed_before_every_operation_on_a_file(fast: Path) -> None:
    reports = kills(fast, kills=None)
    assert len(reports) == reports[0]["operations"] > 100
    check(reports)


DRIVER = """
import sys
from chatmill.compiler import cuts
from chatmill.distill.run import build_synth_kd
cuts.ROW_LIMIT = 20
build_synth_kd(sys.argv[1], sys.argv[2], workers=2, valid_fraction=0.05, resume=True)
"""


@pytest.mark.slow
def test_the_driver_killed_at_seeded_times_with_workers(fast: Path) -> None:
    """A real process group: driver and workers die at any time; the next run goes on from what is there."""
    source = write_input(fast / "in", [real_rows()[:300], real_rows()[300:]], group=50)
    build_synth_kd(source, fast / "whole", workers=0, valid_fraction=0.05)
    command = [sys.executable, "-c", DRIVER, str(source), str(fast / "out")]
    randomly = random.Random(20)
    killed = 0
    for _ in range(2):
        driver = subprocess.Popen(command)
        chunks = fast / "out/.build/dataset/.build/receipts"
        before = len(list(chunks.glob("0*")))
        until = time.monotonic() + 300
        while driver.poll() is None and len(list(chunks.glob("0*"))) < before + randomly.randint(1, 5):
            assert time.monotonic() < until
            time.sleep(0.01)
        driver.send_signal(signal.SIGKILL)
        killed += driver.wait() == -signal.SIGKILL
        assert not (fast / "out" / "manifest.json").exists()
    assert killed == 2
    subprocess.run(command, check=True)
    assert digest(fast / "out") == digest(fast / "whole")
    assert leftovers(fast / "out") == []
