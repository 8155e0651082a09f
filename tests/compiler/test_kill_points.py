"""Builds that are killed in forked processes: at a named step, before an operation on a file, at a seeded moment."""

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
from tests.compiler.kill_reports import check, check_points, reports_of

POINTS = [
    "after_spool_write:1",
    "before_spool_receipt_rename:1",
    "before_spool_folder_rename:1",
    "after_spool_folder_rename:1",
    "after_state_write:1",
    "before_state_rename:1",
    "after_state_rename:1",
    "after_shard_write:1",
    "after_shard_write:3",
    "after_shard_receipt_write:2",
    "before_shard_receipt_rename:2",
    "after_shard_receipt_rename:2",
    "before_shard_folder_rename:2",
    "after_shard_folder_rename:3",
    "after_chunk:2",
    "after_val_receipt_write:1",
    "before_val_folder_rename:1",
    "after_val_folder_rename:1",
    "before_publish:1",
    "before_moves_rename:1",
    "after_moves_rename:1",
    "after_shard_move:1",
    "after_shard_move:3",
    "after_split_manifest_write:1",
    "after_split_manifest_rename:1",
    "after_split_manifest_rename:2",
    "after_pack_array_write:1",
    "after_pack_array_rename:1",
    "after_pack_array_rename:2",
    "before_pack_plan_rename:1",
    "after_pack_plan_rename:1",
    "after_pack_plan_rename:2",
    "before_rejected_file_rename:1",
    "after_rejected_file_rename:1",
    "before_move:1",
    "after_move:1",
    "after_move:2",
    "after_move:3",
    "before_manifest:1",
    "after_manifest_file_write:1",
    "before_manifest_file_rename:1",
    "after_manifest_file_rename:1",
    "after_manifest:1",
]
"""Every step that leaves something on the disk, in the order in which a build takes them; name and hit."""


def kills(home: Path, **order: Any) -> list[dict[str, Any]]:
    """The reports of `tests.compiler.killing`."""
    write_inputs(home / "in", 12)
    # Records without an id are split by the name of their file, which is another one in every run.
    write_jsonl(home / "in" / "packed.jsonl.gz", [{**one, "id": f"p{i}"} for i, one in enumerate(chats(12, 2))])
    recipe = mixed_recipe(home / "in", shard_bytes=4500)
    recipe["sources"] = recipe["sources"][:2]  # a plain and a packed file are enough here
    return reports_of("tests.compiler.killing", {"home": str(home), "recipe": recipe, **order})


def test_killed_at_every_named_step(fast: Path) -> None:
    reports = kills(fast, points=POINTS)
    check_points(reports, POINTS)
    check(reports)


@pytest.mark.parametrize("which", ["kinds", pytest.param("renames", marks=pytest.mark.slow)])
def test_killed_before_and_after_every_rename(fast: Path, which: str) -> None:
    """Also the renames inside of the writers of the store, which have no names of their own; or one of each kind."""
    reports = kills(fast, kill=which)
    renames = [report for report in reports if report["operation"][0] == "os.rename"]
    assert reports[0]["renames"] >= (20 if which == "renames" else 10)
    assert len(renames) == reports[0]["renames"] or which == "kinds"  # where one may follow right behind another
    targets = {Path(report["operation"][2]).name for report in renames}
    assert targets >= {"state.json", "receipt.json", "000000", "shard_00000", "episodes.json", "train", "manifest.json"}
    assert {"moves.json", "val", "rejected.jsonl"} <= targets
    assert len(reports) > 1.5 * reports[0]["renames"]
    check(reports)


@pytest.mark.slow
def test_killed_before_every_operation_on_a_file(fast: Path) -> None:
    reports = kills(fast, kill="everywhere")
    assert len(reports) == reports[0]["operations"] >= 150
    check(reports)


@pytest.mark.parametrize("first", ["after_shard_move:4", "before_manifest:1"])
def test_killed_again_while_it_is_resumed(fast: Path, first: str) -> None:
    reports = kills(fast, kill="kinds", first=first)
    assert len(reports) >= 4
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["after_shard_folder_rename:4", "after_shard_move:4", "before_manifest:1"])
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
