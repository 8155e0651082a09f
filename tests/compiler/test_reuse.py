"""Incremental builds: what an earlier dataset has is linked, and the result has the bytes of a full build."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler import inputs
from chatmill.compiler.run import BuildResult, Outcome, run_build
from chatmill.compiler.sources import LARGEST, SMALLEST, chunk_size
from chatmill.errors import ConfigError, FormatError
from chatmill.prove.verify import verify
from tests.compiler.builds import chats, digest, leftovers, mixed_recipe, plain_recipe, write_inputs, write_jsonl
from tests.damage import flip


def reuse(recipe: Any, home: Path, name: str = "new", old: str = "old", **options: Any) -> BuildResult:
    """Build with and without an earlier dataset; both have the same bytes."""
    result = run_build(recipe, home / name, workers=0, reuse=home / old, **options)
    run_build(recipe, home / f"{name}_full", workers=0)
    assert digest(home / name) == digest(home / f"{name}_full")
    assert leftovers(home / name) == []
    return result


@pytest.fixture
def grown(fast: Path) -> dict[str, Any]:
    """A dataset in `old`, and a recipe over its input, to which records were appended since."""
    records: list[Any] = [*chats(120, 5), "{broken"]
    path = write_jsonl(fast / "chats.jsonl", records)
    recipe = plain_recipe(path, split={"val_fraction": 0.2}, on_error="quarantine", pack={"length": 4096})
    recipe |= {"shard_bytes": path.stat().st_size // 12, "packing": {"max_length": 4096, "overflow": "windows"}}
    run_build(recipe, fast / "old", workers=0)
    with path.open("a") as file:
        file.writelines(json.dumps({**one, "id": f"new{n}"}) + "\n" for n, one in enumerate(chats(9, 6)))
    return recipe


def test_appended_records_cost_the_last_chunks(grown: dict[str, Any], fast: Path) -> None:
    result = reuse(grown, fast)
    assert result.outcome is Outcome.BUILT
    assert result.chunks - result.reused in (1, 2)
    assert result.reused >= 11
    assert os.stat(fast / "new/train/shard_00003/tokens.bin").st_nlink == 2, "linked, not copied"
    assert verify(fast / "new", deep=True).passed
    again = reuse(grown, fast, "third", "new")
    assert again.reused == again.chunks


def test_another_recipe_reuses_nothing(grown: dict[str, Any], fast: Path) -> None:
    assert reuse({**grown, "policy": "all"}, fast).reused == 0
    with pytest.raises(ValueError, match=r"chats\.jsonl:121"):
        run_build({**grown, "on_error": "fail"}, fast / "fails", workers=0, reuse=fast / "old")
    planned_anew = {**grown, "pack": {"length": 8192, "strategy": "greedy"}, "gates": {"records_left_out": 0.5}}
    assert reuse(planned_anew, fast, "planned").reused >= 11


def test_files_that_look_unchanged_are_not_read(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(fast / "in", 40)
    recipe = mixed_recipe(fast / "in")
    run_build(recipe, fast / "old", workers=0)
    read: list[str] = []
    reading = inputs._reading

    def noted(scan: Any) -> Any:
        read.append(Path(scan.path).name)
        return reading(scan)

    monkeypatch.setattr(inputs, "_reading", noted)
    result = run_build(recipe, fast / "new", workers=0, reuse=fast / "old")
    assert result.reused == result.chunks
    assert sorted(read) == ["list.json", "packed.jsonl.gz"], "the lines of their spools are counted"
    read.clear()
    assert run_build(recipe, fast / "sure", workers=0, reuse=fast / "old", rehash=True).reused == result.chunks
    assert sorted(set(read)) == ["list.json", "packed.jsonl.gz", "plain.jsonl", "rows.parquet"]
    assert digest(fast / "new") == digest(fast / "sure") == digest(fast / "old")
    path = fast / "in" / "plain.jsonl"
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 1_000_000))
    read.clear()
    assert run_build(recipe, fast / "touched", workers=0, reuse=fast / "old").reused == result.chunks
    assert "plain.jsonl" in read, "another time: read, and found to be the same"


def test_a_changed_line_in_the_middle_costs_one_chunk(grown: dict[str, Any], fast: Path) -> None:
    path = Path(grown["sources"][0]["path"])
    reuse(grown, fast)
    lines = path.read_text().splitlines(keepends=True)
    lines[40] = lines[40].replace("a", "b")
    path.write_text("".join(lines))
    result = reuse(grown, fast, "changed", "new")
    assert result.chunks - result.reused == 1


def test_resumed_and_shared(grown: dict[str, Any], fast: Path) -> None:
    """A share may reuse, and what is reused is there for the build that joins them."""
    for share in range(2):
        result = run_build(grown, fast / "new", workers=0, shard=(share, 2), reuse=fast / "old")
        assert result.reused >= 5
    shutil.rmtree(fast / "old")
    run_build(grown, fast / "new", workers=0, resume=True)
    run_build(grown, fast / "full", workers=0)
    assert digest(fast / "new") == digest(fast / "full")


def test_what_cannot_be_reused_is_one_clear_error_or_made(grown: dict[str, Any], fast: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere holds no finished build to reuse"):
        run_build(grown, fast / "new", workers=0, reuse=fast / "nowhere")
    (fast / "old/train/shard_00002/tokens.bin").unlink()
    assert reuse(grown, fast).reused == 11, "a shard that is not whole is made"
    for name in ("chunks.jsonl", "rejected.jsonl"):
        data = (fast / "old" / name).read_bytes()
        flip(fast / "old" / name, 30)
        with pytest.raises(FormatError, match=rf"{name} is missing or was changed: build without --reuse"):
            run_build(grown, fast / "other", workers=0, reuse=fast / "old")
        (fast / "old" / name).write_bytes(data)


def test_other_disks(grown: dict[str, Any], fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*given: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    assert reuse(grown, fast).reused >= 11
    assert os.stat(fast / "new/train/shard_00003/tokens.bin").st_nlink == 1


def test_chunks_use_the_cores_and_a_little_more_input_changes_no_border() -> None:
    assert chunk_size(1) == chunk_size(31_000_000) == SMALLEST
    assert 31_000_000 // chunk_size(31_000_000) >= 16
    assert chunk_size(10**10) == chunk_size(10**13) == LARGEST
    for size in (100 << 20, 400 << 20, 900 << 20, 1700 << 20):
        assert 64 <= size // chunk_size(size) <= 128
        assert chunk_size(size) == chunk_size(size * 101 // 100)
