"""Builds that are killed, their workers too: resumed, they are equal to builds that nothing disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.engines.jobs import JobKilledWorkers
from chatmill.compiler.run import BuildProgress, Outcome, run_build
from tests.cli.run import forked
from tests.compiler.builds import (
    chats,
    digest,
    leftovers,
    mixed_recipe,
    plain_recipe,
    write_inputs,
    write_jsonl,
)
from tests.compiler.killing import check, reports_of
from tests.damage import flip
from tests.faults import faults, faults_hit

SHARD, RECEIPT = r"train/shard_\d+$", r"receipts/\d+.json"


class Sets:
    """One input of at least 12 chunks with rejected records, and what an undisturbed build makes of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        records: list[Any] = chats(150, 5)
        for place in range(0, len(records), 8):
            records.insert(place, "{broken")
        path = write_jsonl(home / "chats.jsonl", records)
        options = {"split": {"val_fraction": 0.3}, "shard_bytes": path.stat().st_size // 14, "on_error": "quarantine"}
        self.recipe = plain_recipe(path, **options)
        run_build(self.recipe, home / "whole", workers=0)
        self.expected = digest(home / "whole")
        (home / "recipe.yaml").write_text(json.dumps(self.recipe))  # JSON is YAML

    def killed(self, out: Path, fault: str, *more: str) -> None:
        command = ["build", self.home / "recipe.yaml", "-o", out, "-w", "0", *more]
        assert forked(*command, env=faults(fault)).returncode == -signal.SIGKILL

    def check(self, out: Path) -> None:
        assert digest(out) == self.expected
        assert leftovers(out) == []


@pytest.fixture(scope="module")
def sets(fast_module: Path) -> Sets:
    return Sets(fast_module)


def test_a_chunk_that_always_kills_is_named_and_the_rest_stays(
    sets: Sets, fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in faults(f"before:{RECEIPT}:1:kill", log=fast / "log").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobKilledWorkers, match=r"chunk 0 .*chats.jsonl from line 1.*3 times.*SIGKILL"):
        run_build(sets.recipe, fast / "out", workers=1)
    assert len(faults_hit(fast / "log")) == 3
    monkeypatch.delenv("TEST_FAULTS")
    assert run_build(sets.recipe, fast / "out", workers=0, resume=True).outcome is Outcome.BUILT
    sets.check(fast / "out")


@pytest.mark.parametrize("point", [f"before:{SHARD}", f"after:{RECEIPT}"])
def test_one_killed_worker_does_not_even_stop_the_build(
    sets: Sets, fast: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    for name, value in faults(f"{point}:3:kill_once", log=fast / "log").items():
        monkeypatch.setenv(name, value)
    run_build(sets.recipe, fast / "out", workers=2)
    assert faults_hit(fast / "log") == [point]
    sets.check(fast / "out")


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def zeroed(path: Path) -> None:
    """What a disk may show of a file that was written and not synced when the machine went down."""
    size = path.stat().st_size
    os.truncate(path, size * 9 // 10)
    os.truncate(path, size)


def lost(path: Path) -> None:
    path.unlink()


DAMAGES = [
    ("train/shard_00002/tokens.bin", flip_middle),
    ("train/shard_00002/tokens.bin", zeroed),
    ("train/shard_00002/kinds.u8", cut_off),
    ("train/shard_00002/record_id.utf8", lost),
    ("val/shard_00002/mask.bin", flip_middle),
    (".build/receipts/000002.rejected", cut_off),
    (".build/receipts/000002.json", zeroed),
    (".build/receipts/000002.json", lost),
]


@pytest.fixture(scope="module")
def crashed(sets: Sets) -> Path:
    """A build that was killed when four of its shards were there."""
    sets.killed(sets.home / "crashed", f"after:{RECEIPT}:4:kill")
    return sets.home / "crashed"


@pytest.mark.parametrize(("file", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_shard_is_made_again(
    sets: Sets, crashed: Path, fast: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """What a machine that goes down may leave of files that were not on the disk yet."""
    shutil.copytree(crashed, fast / "out")
    damage(fast / "out" / file)
    states: list[BuildProgress] = []
    run_build(sets.recipe, fast / "out", workers=0, resume=True, on_progress=states.append)
    assert states[0].chunks_done == 3
    sets.check(fast / "out")


@pytest.fixture(scope="module")
def shares(sets: Sets) -> Path:
    """Both shares of a build, which nobody has joined."""
    for share in range(2):
        run_build(sets.recipe, sets.home / "shares", workers=0, shard=(share, 2))
    return sets.home / "shares"


@pytest.mark.parametrize("point", ["after:val/episodes.json", "before:chunks.jsonl", "before:manifest.json"])
def test_shares_that_were_killed_while_they_were_joined(sets: Sets, shares: Path, fast: Path, point: str) -> None:
    shutil.copytree(shares, fast / "out")
    sets.killed(fast / "out", f"{point}:1:kill", "--resume")
    run_build(sets.recipe, fast / "out", workers=0, shard=(1, 2))  # for nothing, but somebody may
    assert run_build(sets.recipe, fast / "out", workers=0, resume=True).outcome is Outcome.BUILT
    sets.check(fast / "out")


# In forked processes: before and after operations on files, at a seeded moment.


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
