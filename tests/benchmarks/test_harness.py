"""The arithmetic of the benchmarks, and that no ratio is given before both sides did the same work."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import (
    Comparison,
    Report,
    Timing,
    WorkDiffersError,
    alternate,
    compare,
    require_equal,
    run_one,
)
from benchmarks.run import rows_of
from benchmarks.table import Row


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {"what": "a / b", "ours": "1", "peer": "2", "value": 2.0, "unit": "x", "target": ""}
    return Row(**{**values, **changes})


def test_contestants_take_turns_and_every_other_round_goes_backwards() -> None:
    calls: list[str] = []
    timings = alternate({name: (lambda name=name: calls.append(name), 3.0) for name in "abc"}, rounds=3)
    assert "".join(calls) == "abccbaabc"
    assert all(len(timing.seconds) == 3 and timing.work == 3.0 for timing in timings.values())


def test_ratios_are_per_unit_of_work() -> None:
    comparison = Comparison(
        ours=Timing(seconds=(2.0, 1.0, 4.0), work=100), peer=Timing(seconds=(10.0, 20.0, 10.0), work=10), checked="ids"
    )
    assert comparison.faster == pytest.approx((100 / 2) / (10 / 10))
    assert comparison.round_ratios == pytest.approx((50.0, 200.0, 25.0))


def test_nothing_is_timed_when_the_work_differs() -> None:
    ran: list[str] = []

    def check() -> str:
        require_equal("ids", [1, 2, 3], [1, 2, 4])
        return "equal"

    sides = {name: (lambda name=name: ran.append(name), 1.0) for name in ("chatmill", "peer")}
    with pytest.raises(WorkDiffersError, match=r"ids: 1 of 3 values differ, first at 2: 3 and 4"):
        compare(sides, ours="chatmill", check=check, rounds=1)
    assert ran == []
    found = compare(sides, ours="chatmill", check=lambda: "equal", rounds=2)
    assert list(found) == ["peer"]
    assert found["peer"].checked == "equal"
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1, 2], [1, 2, 3]), ([], [0]), ([[1, 2]], [1, 2]), (np.array([0.0]), np.array([np.nan])), ([1], [2])],
)
def test_what_differs_is_refused(ours: Any, theirs: Any) -> None:
    with pytest.raises(WorkDiffersError):
        require_equal("column", ours, theirs)


def test_a_cost_is_the_inverse_of_times_faster() -> None:
    comparison = Comparison(
        ours=Timing(seconds=(4.0, 2.0), work=8), peer=Timing(seconds=(1.0, 1.0), work=8), checked="ids equal"
    )
    report = Report()
    report.compared("fast", comparison, unit="tokens", target=">= 40")
    report.compared("cost", comparison, unit="tokens", target="<= 3.5", as_cost=True)
    assert [one.value for one in report.rows] == pytest.approx([1 / 3, 3.0])
    assert [one.met for one in report.rows] == [False, True]
    assert [one.in_chart for one in report.rows] == [True, False]
    assert "2 rounds: 2.00x to 4.00x" in report.rows[1].detail
    assert "ids equal" in report.rows[0].detail
    assert rows_of(json.loads(json.dumps(report.as_json()))) == report.rows


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(40.0, ">= 40", True), (39.9, ">= 40", False), (0.2, "< 0.2", False), (0.19, "< 0.2", True), (1.2, "<= 1.2", True),
     (1.21, "<= 1.2", False), (5.0, "> 5", False), (5.0, "", None)],
)  # fmt: skip
def test_targets(value: float, target: str, met: bool | None) -> None:
    assert row(value=value, target=target).met is met


def test_the_command_line_prints_no_table_when_the_work_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def differs(*, quick: bool) -> Report:
        raise WorkDiffersError(f"ids: 3 of 4 values differ (quick {quick})")

    assert run_one("some", "text", differs, ["--quick"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "some: no ratio: ids: 3 of 4 values differ (quick True)" in err
