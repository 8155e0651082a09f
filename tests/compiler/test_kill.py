"""Builds whose workers or drivers are killed, or whose disk is full: resumed, they equal builds that nothing disturbed.

Killed at operations on files or at seeded moments, in forked processes, see `tests.compiler.killing`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from chatmill.compiler.engines.jobs import JobKilledWorkers
from chatmill.compiler.run import BuildProgress, Outcome, run_build
from chatmill.compiler.work import folder_lock
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import forked
from tests.compiler.builds import chats, digest, leftovers, mixed_recipe, plain_recipe, write_inputs, write_jsonl
from tests.compiler.killing import check, reports_of
from tests.damage import flip
from tests.faults import active, faults, faults_hit
from tests.forked import run_forked

RECEIPT = r"receipts/\d+.json"


class Sets:
    """An input of at least 12 chunks with rejected records, and what an undisturbed build makes of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        records: list[Any] = chats(150, 5)
        for place in range(0, len(records), 8):
            records.insert(place, "{broken")
        path = write_jsonl(home / "chats.jsonl", records)
        packed = write_jsonl(home / "packed.jsonl.gz", [{**one, "id": f"p{n}"} for n, one in enumerate(chats(9, 2))])
        options = {"split": {"val_fraction": 0.3}, "shard_bytes": path.stat().st_size // 14, "on_error": "quarantine"}
        self.recipe = plain_recipe(path, sources=[{"path": str(path)}, {"path": str(packed)}], **options)
        run_build(self.recipe, home / "whole", workers=0)
        self.expected = digest(home / "whole")
        (home / "recipe.yaml").write_text(json.dumps(self.recipe))  # JSON is YAML

    def killed(self, out: Path, fault: str, *more: str) -> None:
        command = ["build", self.home / "recipe.yaml", "-o", out, "-w", "0", *more]
        assert forked(*command, env=faults(fault)).returncode == -signal.SIGKILL

    def resume(self, out: Path) -> BuildProgress:
        """Resume a build and compare it with the undisturbed one; gives what was there at the begin."""
        states: list[BuildProgress] = []
        result = run_build(self.recipe, out, workers=0, resume=True, on_progress=states.append)
        assert result.outcome is Outcome.BUILT
        self.check(out)
        return states[0]

    def check(self, out: Path) -> None:
        assert digest(out) == self.expected
        assert leftovers(out) == []


@pytest.fixture(scope="module")
def sets(fast_module: Path) -> Sets:
    return Sets(fast_module)


def test_a_chunk_that_always_kills_is_named_and_the_rest_stays(sets: Sets, fast: Path) -> None:
    environment = mock.patch.dict(os.environ, faults(f"before:{RECEIPT}:1:kill", log=fast / "log"))
    words = r"chunk 0 .*chats.jsonl from line 1.*3 times.*SIGKILL"
    with environment, pytest.raises(JobKilledWorkers, match=words):
        run_build(sets.recipe, fast / "out", workers=1)
    assert len(faults_hit(fast / "log")) == 3
    sets.resume(fast / "out")


SPOOL = r"spool/\w+-jsonl.jsonl"


@pytest.mark.parametrize(
    ("point", "hit"),
    [(r"before:train/shard_\d+$", 3), (f"after:{RECEIPT}", 3), (f"before:{SPOOL}", 1), (f"after:{SPOOL}", 1)],
)
def test_one_killed_worker_does_not_even_stop_the_build(sets: Sets, fast: Path, point: str, hit: int) -> None:
    with mock.patch.dict(os.environ, faults(f"{point}:{hit}:kill_once", log=fast / "log")):
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


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("train/shard_00002/tokens.bin", flip_middle),
    ("train/shard_00002/tokens.bin", zeroed),
    ("train/shard_00002/kinds.u8", cut_off),
    ("train/shard_00002/record_id.utf8", Path.unlink),
    ("val/shard_00002/mask.bin", flip_middle),
    (".build/receipts/000002.rejected", cut_off),
    (".build/receipts/000002.json", zeroed),
    (".build/receipts/000002.json", Path.unlink),
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
    assert sets.resume(fast / "out").chunks_done == 3


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
    sets.resume(fast / "out")


def kills(home: Path, **order: Any) -> list[dict[str, Any]]:
    write_inputs(home / "in", 12)
    # Records without an id are split by the name of their file, which is another one in every run.
    write_jsonl(home / "in" / "packed.jsonl.gz", [{**one, "id": f"p{i}"} for i, one in enumerate(chats(12, 2))])
    recipe = mixed_recipe(home / "in", shard_bytes=4500)
    recipe["sources"] = recipe["sources"][:2]  # a plain and a packed file are enough here
    return reports_of({"home": str(home), "recipe": recipe, **order})


FIRST = [f"after:{RECEIPT}:4:kill", "before:manifest.json:1:kill", "after:train/shard_:4:kill"]


@pytest.mark.parametrize(
    ("kill", "first"),
    [
        *(("kinds", None), ("kinds", FIRST[0]), ("kinds", FIRST[1])),
        *(pytest.param(kill, None, marks=pytest.mark.slow) for kill in ("renames", "everywhere")),
        *(pytest.param("everywhere", first, marks=pytest.mark.slow) for first in FIRST),
    ],
)
def test_killed_before_operations_on_files_also_while_it_is_resumed(fast: Path, kill: str, first: str | None) -> None:
    """One of each kind, before and after every rename and sync, or before every one; `first` is a kill before that."""
    reports = kills(fast, kill=kill, **({"first": first} if first else {}))
    assert reports[0]["operations"] >= (20 if first else 150)
    assert len(reports) >= 4
    check(reports)
    if kill == "everywhere":
        assert len(reports) == reports[0]["operations"]
    if first is None:
        targets = {Path(report["operation"][-1]).name for report in reports if report["operation"][0] == "os.rename"}
        assert targets >= {"state.json", "000000.json", "000000.rejected", "shard_00000", "episodes.json"}
        assert targets >= {"rejected.jsonl", "chunks.jsonl", "manifest.json"}
        assert {report["operation"][0] for report in reports} >= {"os.rename", "os.fsync"}
        before = [report for report in reports if not report["manifest_before"]]
        assert len(before) > 0.8 * len(reports), "the manifest comes last"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_two_hundred_seeded_signals(fast: Path, first: int) -> None:
    """SIGKILL, SIGTERM, and SIGSTOP with SIGCONT or SIGKILL after it, to drivers and to the processes below them.

    Every build goes on where the one before it was stopped. Seeds 0 to 199, one signal each.
    """
    reports = kills(fast, seeds=list(range(first, first + 50)))
    assert len(reports) == 51
    assert sum(report["hit"] for report in reports) >= 25
    assert reports[-1]["finished"], "the last one is left alone"
    assert all(report["equal"] and not report["leftovers"] for report in reports if report["finished"])
    hit = [report for report in reports if report["hit"]]
    assert {report["is_worker"] for report in hit} == {True, False}
    assert all(report["finished"] for report in hit if report["is_worker"]), "the end of a worker ends no build"
    assert len({report["signal"] for report in hit}) == 3


# Disks that are full or must not be written to: one clear error, no half dataset, and the build can go on.

FULL = [
    "before:spool/.*jsonl",
    "before:state.json",
    "before:train/shard_",
    "after:val/shard_",
    "before:receipts/.*rejected",
    "before:receipts/.*json",
    "sync:train/shard_.*/tokens.bin",
    "before:train/episodes.json",
    "before:/rejected.jsonl",
    "before:chunks.jsonl",
    "before:/manifest.json",
]


@pytest.mark.parametrize("point", FULL)
def test_a_full_disk(sets: Sets, fast: Path, point: str) -> None:
    full = pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\); free some space")
    with active(f"{point}:1:enospc", log=fast / "log"), full as caught:
        run_build(sets.recipe, fast / "out", workers=0)
    assert caught.value.path.startswith(str(fast / "out"))
    assert faults_hit(fast / "log") == [point]
    assert not (fast / "out" / "manifest.json").exists()
    assert not list((fast / "out").rglob(".tmp-*")), "what takes up space and is of no use was not removed"
    with pytest.raises(FormatError, match=r"unfinished build|no such folder"):
        EpisodeDataset(fast / "out")
    sets.resume(fast / "out")


def limited(folder: Path, limit: str, *arguments: str | Path) -> Any:
    """Build in a process with a real limit of the system."""
    code = f"import resource; resource.setrlimit(resource.{limit}); from chatmill.cli import main; main()"
    (folder / "limited.py").write_text(code)
    return run_forked(folder / "limited.py", "build", *arguments, "-o", folder / "out")


def test_files_that_may_not_grow(fast: Path) -> None:
    """Met in the middle of writing."""
    recipe = plain_recipe(write_jsonl(fast / "chats.jsonl", chats(400, 6, words=60)))
    (fast / "recipe.yaml").write_text(json.dumps(recipe))
    done = limited(fast, "RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)", fast / "recipe.yaml", "-w", "1")
    assert done.returncode == 2, done.stderr
    assert "File too large" in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not (fast / "out" / "manifest.json").exists()
    run_build(recipe, fast / "out", workers=0, resume=True)
    run_build(recipe, fast / "whole", workers=0)
    assert digest(fast / "out") == digest(fast / "whole")


def test_few_open_files_are_enough_for_many_shards(sets: Sets, fast: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    recipe = sets.home / "recipe.yaml"
    done = limited(fast, "RLIMIT_NOFILE, (64, 64)", recipe, "-w", "0", "--set", "shard_bytes=1000")
    assert done.returncode == 0, done.stderr
    assert len(list((fast / "out" / "train").glob("shard_*"))) > 64
    assert leftovers(fast / "out") == []


def test_folders_that_cannot_be_made_or_are_links_are_refused(fast: Path) -> None:
    path = write_jsonl(fast / "chats.jsonl", chats(3))
    with pytest.raises(ChatmillError, match=r"cannot create the folder: (Not a directory|File exists)"):
        run_build(plain_recipe(path), path / "out", workers=0)
    with pytest.raises(ChatmillError, match="cannot create the folder: File exists"):
        run_build(plain_recipe(path), path, workers=0)
    for folder in ("theirs", "out"):
        (fast / folder).mkdir()
    (fast / "theirs" / "mine").write_text("precious")
    (fast / "out" / ".build").symlink_to(fast / "theirs", target_is_directory=True)
    with pytest.raises(ConfigError, match=r"out/\.build is no folder, and a build keeps its work there: remove it"):
        run_build(plain_recipe(path), fast / "out", workers=0)
    assert [path.read_text() for path in (fast / "theirs").iterdir()] == ["precious"], "deleted through a link"


def test_two_builds_in_one_folder_at_a_time(fast: Path) -> None:
    path = write_jsonl(fast / "chats.jsonl", chats(3))
    (fast / "out").mkdir()
    refused = "another build is at work in this folder now"
    for shared in (False, True):
        with folder_lock(fast / "out", shared=shared), pytest.raises(ChatmillError, match=refused):
            run_build(plain_recipe(path), fast / "out", workers=0)
    with folder_lock(fast / "out", shared=True):
        run_build(plain_recipe(path), fast / "out", workers=0, shard=(0, 1))
    run_build(plain_recipe(path), fast / "out", workers=0, resume=True)
    assert leftovers(fast / "out") == []
