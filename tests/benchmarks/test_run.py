"""The run of all benchmarks, the chart, and the page that is made from a results file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import publish, run
from benchmarks.table import Row

FOLDER = Path(run.__file__).parent


def results(**changes: Any) -> dict[str, Any]:
    """What a run of two benchmarks gives."""
    rows = [
        Row(what="plan / TRL bfd", ours="9 M/s", peer="3 k/s", value=195.0, unit="x", target=">= 30", in_chart=True,
            detail="5 rounds: 190.00x to 200.00x; ids equal"),
        Row(what="compile / gigatoken", ours="5 M/s", peer="20 M/s", value=4.0, unit="x", target="<= 2.5"),
    ]  # fmt: skip
    benchmarks = {
        "compile": {"rows": [asdict(rows[1])], "notes": ["a note"], "seconds": 3.0},
        "plan": {"rows": [asdict(rows[0])], "notes": [], "seconds": 2.0},
    }
    values: dict[str, Any] = {
        "date": "2026-11-15", "machine": "m", "cores": 2, "python": "3.11", "versions": {"trl": "1.16.0"},
        "quick": False, "seconds": 360.0, "failed": [], "benchmarks": benchmarks,
    }  # fmt: skip
    return {**values, **changes}


def test_every_module_that_is_run_is_known() -> None:
    written = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert written == {*run.BENCHMARKS, *run.TOOLS}
    assert len(run.BENCHMARKS) == len(set(run.BENCHMARKS))


def test_a_run_writes_results_and_chart_and_fails_with_its_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results()["benchmarks"]
    monkeypatch.setattr(run, "run_benchmark", lambda name, **_options: found.get(name))
    assert run.main(["--quick", "--only", "plan", "compile", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "plan / TRL bfd" in out
    assert "MISSED" not in out, "quick runs are not judged"
    written = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition(".")[2] for name in written] == ["json", "svg"]
    kept = json.loads((tmp_path / written[0]).read_text())
    assert list(kept["benchmarks"]) == ["plan", "compile"]
    assert run.main(["--only", "plan", "startup", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["startup"]


def test_the_page_is_filled_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, chart = tmp_path / "page.md", tmp_path / "images" / "chart.svg"
    page.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    for name, value in (("PAGE", page), ("CHART", chart), ("ROOT", tmp_path)):
        monkeypatch.setattr(publish, name, value)
    path = tmp_path / "2026-11-15-m-2cores.json"
    path.write_text(json.dumps(results()))
    assert publish.main([str(path)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    for part in (
        "**195.0x** | >= 30 | met",
        "**4.00x** | <= 2.5 | missed",
        "a note",
    ):
        assert part in text
    assert publish.published(text) == path.name
    assert chart.exists()
    assert publish.main([str(path), "--check"]) == 0
    page.write_text(text.replace("**195.0x**", "**295.0x**"))
    assert publish.main([str(path), "--check"]) == 1


def test_the_docs_say_what_their_results_file_says() -> None:
    name = publish.published(publish.PAGE.read_text())
    if name is None:
        assert publish.NONE_YET in publish.PAGE.read_text()
    else:
        assert publish.main([str(publish.RESULTS / name), "--check"]) == 0
        assert publish.CHART.exists()
