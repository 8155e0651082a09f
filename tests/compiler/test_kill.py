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
    plain_recipe,
    write_jsonl,
)
from tests.damage import flip
from tests.faults import faults, faults_hit

SHARD, RECEIPT = r"train/shard_\d+$", r"receipts/\d+.json"


class Sets:
    """One input of at least 12 chunks, and what an undisturbed build makes of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.input = write_jsonl(home / "chats.jsonl", chats(150, 5))
        self.shard_bytes = self.input.stat().st_size // 14
        self.recipe = plain_recipe(self.input, split={"val_fraction": 0.1}, shard_bytes=self.shard_bytes)
        run_build(self.recipe, home / "whole", workers=0)
        self.expected = digest(home / "whole")
        (home / "recipe.yaml").write_text(json.dumps(self.recipe))  # JSON is YAML

    def command(self, out: Path, *more: str) -> list[str]:
        return ["build", str(self.home / "recipe.yaml"), "--out", str(out), *more]

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
def crashed(sets: Sets, fast_module: Path) -> Path:
    """A build that was killed when four of its shards were there, with rejected records in all of them."""
    records: list[Any] = chats(150, 5)
    for place in range(0, len(records), 8):
        records.insert(place, "{broken")
    (fast_module / "crash").mkdir()
    path = write_jsonl(fast_module / "crash" / "chats.jsonl", records)
    recipe = plain_recipe(path, split={"val_fraction": 0.3}, shard_bytes=sets.shard_bytes, on_error="quarantine")
    (path.parent / "recipe.yaml").write_text(json.dumps(recipe))
    run_build(recipe, path.parent / "whole", workers=0)
    command = ["build", path.parent / "recipe.yaml", "-o", path.parent / "out", "-w", "0"]
    assert forked(*command, env=faults(f"after:{RECEIPT}:4:kill")).returncode == -signal.SIGKILL
    return path.parent


@pytest.mark.parametrize(("file", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_shard_is_made_again(crashed: Path, fast: Path, file: str, damage: Callable[[Path], None]) -> None:
    """What a machine that goes down may leave of files that were not on the disk yet."""
    shutil.copytree(crashed / "out", fast / "out")
    damage(fast / "out" / file)
    states: list[BuildProgress] = []
    run_build(crashed / "recipe.yaml", fast / "out", workers=0, resume=True, on_progress=states.append)
    assert states[0].chunks_done == 3
    assert digest(fast / "out") == digest(crashed / "whole")
    assert leftovers(fast / "out") == []


@pytest.fixture(scope="module")
def shares(sets: Sets) -> Path:
    """Both shares of a build, which nobody has joined."""
    for share in range(2):
        run_build(sets.recipe, sets.home / "shares", workers=0, shard=(share, 2))
    return sets.home / "shares"


@pytest.mark.parametrize("point", ["after:val/episodes.json", "before:chunks.jsonl", "before:manifest.json"])
def test_shares_that_were_killed_while_they_were_joined(sets: Sets, shares: Path, fast: Path, point: str) -> None:
    shutil.copytree(shares, fast / "out")
    done = forked(*sets.command(fast / "out", "-w", "0", "--resume"), env=faults(f"{point}:1:kill"))
    assert done.returncode == -signal.SIGKILL
    run_build(sets.recipe, fast / "out", workers=0, shard=(1, 2))  # for nothing, but somebody may
    assert run_build(sets.recipe, fast / "out", workers=0, resume=True).outcome is Outcome.BUILT
    sets.check(fast / "out")
