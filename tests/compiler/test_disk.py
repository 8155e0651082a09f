"""Disks that are full or must not be written to: one clear error, no half dataset, and the build can go on."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.publish import StorageError
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import (
    OPEN_GATES,
    chats,
    digest,
    leftovers,
    mixed_recipe,
    plain_recipe,
    write_inputs,
    write_jsonl,
)
from tests.faults import active, faults_hit
from tests.forked import run_forked

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


@pytest.fixture(scope="module")
def expected(fast_module: Path) -> dict[str, str]:
    run_build(mixed_recipe(write_inputs(fast_module / "in", 16), shard_bytes=3000), fast_module / "whole", workers=0)
    return digest(fast_module / "whole")


@pytest.mark.parametrize("point", FULL)
def test_a_full_disk(expected: dict[str, str], fast_module: Path, fast: Path, point: str) -> None:
    recipe = mixed_recipe(fast_module / "in", shard_bytes=3000)
    with (
        active(f"{point}:1:enospc", log=fast / "log"),
        pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\); free some space") as caught,
    ):
        run_build(recipe, fast / "out", workers=0)
    assert caught.value.path.startswith(str(fast / "out"))
    assert faults_hit(fast / "log") == [point]
    assert not (fast / "out" / "manifest.json").exists()
    assert not list((fast / "out").rglob(".tmp-*")), "what takes up space and is of no use was not removed"
    with pytest.raises(FormatError, match=r"unfinished build|no such folder"):
        EpisodeDataset(fast / "out")
    run_build(recipe, fast / "out", workers=0, resume=True)
    assert digest(fast / "out") == expected
    assert leftovers(fast / "out") == []


def test_files_that_may_not_grow(fast: Path) -> None:
    """A real limit of the system, met in the middle of writing."""
    path = write_jsonl(fast / "chats.jsonl", chats(400, 6, words=60))
    recipe = fast / "recipe.yaml"
    recipe.write_text(json.dumps(plain_recipe(path)))
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)); "
        "from chatmill.cli import main; main()"
    )
    (fast / "limited.py").write_text(code)
    done = run_forked(fast / "limited.py", "build", recipe, "-o", fast / "out", "-w", "1")
    assert done.returncode == 2, done.stderr
    assert "File too large" in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not (fast / "out" / "manifest.json").exists()
    run_build(recipe, fast / "out", workers=0, resume=True)
    run_build(recipe, fast / "whole", workers=0)
    assert digest(fast / "out") == digest(fast / "whole")


def test_a_folder_below_a_file(fast: Path) -> None:
    path = write_jsonl(fast / "chats.jsonl", chats(3))
    with pytest.raises(ChatmillError, match=r"cannot create the folder: (Not a directory|File exists)"):
        run_build(plain_recipe(path), path / "out", workers=0)
    with pytest.raises(ChatmillError, match="cannot create the folder: File exists"):
        run_build(plain_recipe(path), path, workers=0)


def test_two_builds_in_one_folder_at_a_time(fast: Path) -> None:
    from chatmill.compiler.work import folder_lock

    path = write_jsonl(fast / "chats.jsonl", chats(3))
    (fast / "out").mkdir()
    for shared in (False, True):
        with (
            folder_lock(fast / "out", shared=shared),
            pytest.raises(ChatmillError, match="another build is at work in this folder now"),
        ):
            run_build(plain_recipe(path), fast / "out", workers=0)
    with folder_lock(fast / "out", shared=True):
        run_build(plain_recipe(path), fast / "out", workers=0, shard=(0, 1))
    run_build(plain_recipe(path), fast / "out", workers=0, resume=True)
    assert leftovers(fast / "out") == []


def test_few_open_files_are_enough_for_many_shards(fast: Path) -> None:
    path = write_jsonl(fast / "chats.jsonl", chats(150))
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); import sys, json; "
        "from chatmill.compiler.run import run_build; "
        "run_build(json.loads(sys.argv[1]), sys.argv[2], workers=0)"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    recipe = plain_recipe(path, packing={"max_length": 400, "overflow": "windows"}, shard_bytes=1000)
    recipe["gates"] = OPEN_GATES
    (fast / "limited.py").write_text(code)
    done = run_forked(fast / "limited.py", json.dumps(recipe), fast / "out")
    assert done.returncode == 0, done.stderr
    assert leftovers(fast / "out") == []


def test_a_work_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Nothing is written or deleted through a link."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".build").symlink_to(tmp_path / "theirs", target_is_directory=True)
    recipe = plain_recipe(write_jsonl(tmp_path / "chats.jsonl", chats(3)))
    with pytest.raises(ConfigError, match=r"out/\.build is no folder, and a build keeps its work there: remove it"):
        run_build(recipe, tmp_path / "out", workers=0)
    assert [path.read_text() for path in (tmp_path / "theirs").iterdir()] == ["precious"]
