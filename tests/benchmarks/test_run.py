"""Benchmarks: their arithmetic, that no ratio is given before both sides did the same work, and the published page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import publish, run
from benchmarks.harness import Comparison, Report, Timing, WorkDiffersError, compare, require_equal, run_one
from benchmarks.run import RESULTS
from benchmarks.table import Row


def two_rounds(ours: tuple[float, float], peer: tuple[float, float]) -> Comparison:
    return Comparison(ours=Timing(seconds=ours, work=100), peer=Timing(seconds=peer, work=10), checked="ids equal")


def report_of(**comparisons: Comparison) -> Report:
    report = Report()
    for target, comparison in comparisons.items():
        report.compared(target, comparison, unit="tokens", target=">= 30", as_cost=target == "cost")
    return report


def test_ratios_are_per_unit_of_work_and_a_cost_is_their_inverse() -> None:
    comparison = two_rounds((2.0, 4.0), (10.0, 20.0))
    assert comparison.faster == pytest.approx((100 / 3) / (10 / 15))
    assert comparison.round_ratios == pytest.approx((50.0, 50.0))
    report = report_of(fast=comparison, cost=comparison)
    assert [one.value for one in report.rows] == pytest.approx([50.0, 1 / 50])
    assert [(one.met, one.in_chart) for one in report.rows] == [(True, True), (False, False)]
    assert report.rows[0].detail.startswith("2 rounds: 50.00x to 50.00x; ")
    assert report.rows[0].detail.endswith("; ids equal")
    assert run.rows_of(json.loads(json.dumps(report.as_json()))) == report.rows


def test_contestants_take_turns_and_nothing_is_timed_when_the_work_differs(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    sides = {name: (lambda name=name: ran.append(name), 1.0) for name in ("chatmill", "peer", "other")}
    with pytest.raises(WorkDiffersError, match=r"ids: 1 of 3 values differ, first at 2: 3 and 4"):
        compare(sides, ours="chatmill", check=lambda: str(require_equal("ids", [1, 2, 3], [1, 2, 4])), rounds=1)
    assert ran == []
    found = compare(sides, ours="chatmill", check=lambda: "equal", rounds=2)
    assert {name: one.checked for name, one in found.items()} == {"peer": "equal", "other": "equal"}
    assert ran[-6:] == ["chatmill", "peer", "other", "other", "peer", "chatmill"], "every other round goes backwards"

    def differs(*, quick: bool) -> Report:
        raise WorkDiffersError(f"ids differ (quick {quick})")

    assert run_one("some", "text", differs, ["--quick"]) == 1
    out, err = capsys.readouterr()
    assert (out, "some: no ratio: ids differ (quick True)" in err) == ("", True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1, 2], [1, 2, 3]), ([], [0]), ([[1, 2]], [1, 2]), (np.array([0.0]), np.array([np.nan])), ([1], [2])],
)
def test_what_differs_is_refused(ours: Any, theirs: Any) -> None:
    with pytest.raises(WorkDiffersError):
        require_equal("column", ours, theirs)


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(40.0, ">= 40", True), (39.9, ">= 40", False), (0.2, "< 0.2", False), (0.19, "< 0.2", True), (1.2, "<= 1.2", True),
     (1.21, "<= 1.2", False), (5.0, "> 5", False), (5.0, "", None)],
)  # fmt: skip
def test_targets(value: float, target: str, met: bool | None) -> None:
    assert Row(what="a / b", ours="1", peer="2", value=value, unit="x", target=target).met is met


def test_a_run_writes_results_that_fill_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = (report_of(**{what: two_rounds((1.0, 1.0), peer)}) for what, peer in
                  (("plan / TRL", (19.5, 19.5)), ("compile / peer", (2.0, 2.0))))  # fmt: skip
    found = {"plan": fast.as_json() | {"seconds": 2.0}, "compile": slow.as_json() | {"seconds": 3.0}}
    monkeypatch.setattr(run, "run_benchmark", lambda name, **_options: found.get(name))
    assert run.main(["--quick", "--only", "plan", "compile", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "plan / TRL" in out
    assert "MISSED" not in out, "quick runs are not judged"
    results, chart = sorted(tmp_path.iterdir())
    assert (results.suffix, chart.suffix) == (".json", ".svg")
    kept = json.loads(results.read_text())
    assert list(kept["benchmarks"]) == ["plan", "compile"]
    assert run.main(["--only", "plan", "startup", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["startup"]

    page = tmp_path / "page.md"
    page.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    for name, value in (("PAGE", page), ("CHART", tmp_path / "images" / "chart.svg"), ("ROOT", tmp_path)):
        monkeypatch.setattr(publish, name, value)
    results.write_text(json.dumps(kept | {"quick": False}))
    assert publish.main([str(results)]) == 0
    text = page.read_text()
    assert (text[:7], text[-7:], "old" in text) == ("before\n", "\nafter\n", False)
    assert "**195.0x** | >= 30 | met" in text
    assert "**20.0x** | >= 30 | missed" in text
    assert publish.published(text) == results.name
    assert publish.CHART.exists()
    assert publish.main([str(results), "--check"]) == 0
    page.write_text(text.replace("**195.0x**", "**295.0x**"))
    assert publish.main([str(results), "--check"]) == 1


def test_every_module_is_known_and_the_docs_say_what_their_results_file_says() -> None:
    written = {path.stem for path in Path(run.__file__).parent.glob("*.py") if "__main__" in path.read_text()}
    assert sorted(written) == sorted([*run.BENCHMARKS, *run.TOOLS])
    name = publish.published(publish.PAGE.read_text())
    assert name is not None
    assert publish.main([str(RESULTS / name), "--check"]) == 0
    assert publish.CHART.exists()
