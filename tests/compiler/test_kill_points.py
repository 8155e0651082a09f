"""Builds that are killed in forked processes: before and after operations on files, at a seeded moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiler.builds import (
    chats,
    mixed_recipe,
    write_inputs,
    write_jsonl,
)
from tests.compiler.killing import check, reports_of


def kills(home: Path, **order: Any) -> list[dict[str, Any]]:
    """The reports of `tests.compiler.killing`."""
    write_inputs(home / "in", 12)
    # Records without an id are split by the name of their file, which is another one in every run.
    write_jsonl(home / "in" / "packed.jsonl.gz", [{**one, "id": f"p{i}"} for i, one in enumerate(chats(12, 2))])
    recipe = mixed_recipe(home / "in", shard_bytes=4500)
    recipe["sources"] = recipe["sources"][:2]  # a plain and a packed file are enough here
    return reports_of({"home": str(home), "recipe": recipe, **order})


@pytest.mark.parametrize("which", ["kinds", pytest.param("renames", marks=pytest.mark.slow)])
def test_killed_before_and_after_every_rename_and_sync(fast: Path, which: str) -> None:
    """Or one of each kind."""
    reports = kills(fast, kill=which)
    targets = {Path(report["operation"][-1]).name for report in reports if report["operation"][0] == "os.rename"}
    assert targets >= {"state.json", "000000.json", "000000.rejected", "shard_00000", "episodes.json", "manifest.json"}
    assert targets >= {"rejected.jsonl", "chunks.jsonl"}
    assert {report["operation"][0] for report in reports} >= {"os.rename", "os.fsync"}
    before = [report for report in reports if not report["manifest_before"]]
    assert len(before) > 0.8 * len(reports), "the manifest comes last"
    check(reports)


@pytest.mark.slow
def test_killed_before_every_operation_on_a_file(fast: Path) -> None:
    reports = kills(fast, kill="everywhere")
    assert len(reports) == reports[0]["operations"] >= 150
    check(reports)


@pytest.mark.parametrize("first", ["after:receipts/\\d+.json:4:kill", "before:manifest.json:1:kill"])
def test_killed_again_while_it_is_resumed(fast: Path, first: str) -> None:
    reports = kills(fast, kill="kinds", first=first)
    assert len(reports) >= 4
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["after:train/shard_:4:kill", "after:receipts/\\d+.json:4:kill", "before:manifest.json:1:kill"]
)
def test_killed_before_every_operation_of_a_resumed_build(fast: Path, first: str) -> None:
    reports = kills(fast, kill="everywhere", first=first)
    assert len(reports) == reports[0]["operations"] >= 20
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_two_hundred_seeded_signals(fast: Path, first: int) -> None:
    """SIGKILL, SIGTERM, and SIGSTOP with SIGCONT or SIGKILL after it, to drivers and to the processes below them.

    Every build goes on where the one before it was stopped. Seeds 0 to 199, one signal each.
    """
    reports = kills(fast, seeds=list(range(first, first + 50)))
    assert len(reports) == 51
    assert sum(report["hit"] for report in reports) >= 25
    finished = [report for report in reports if report["finished"]]
    assert reports[-1]["finished"], "the last one is left alone"
    assert all(report["equal"] and not report["leftovers"] for report in finished)
    hit = [report for report in reports if report["hit"]]
    assert {report["driver"] for report in hit} == {True, False}
    assert all(report["finished"] for report in hit if not report["driver"]), "only a driver's end ends a build"
    assert len({report["signal"] for report in hit}) == 3
