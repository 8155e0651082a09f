"""Distillation builds that are killed: resumed, they are equal to builds that nothing disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiler.killing import check, reports_of
from tests.distill.inputs import chat, row, write_input


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
