"""The writer: exact bytes, shards, columns, mask types, and nothing half-published."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core import publish
from chatmill.core.checksums import FileRecord
from chatmill.core.native.trees import RowColumns, grow_trees
from chatmill.core.publish import GrowingFile, StorageError
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store import episode_writer, shard_writer
from chatmill.store.episode_manifest import read_split_manifest
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.tree_rows import RowsOfTrees
from tests.hashes import file_entry


def files(folder: Path) -> dict[str, str]:
    """Relative name -> sha256 of every file below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_the_three_files_to_the_byte(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([1, 2, 70_000], [False, True, True])
        writer.append([4_294_967_295], [0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]
    folder = tmp_path / "train"
    assert (folder / "tokens.bin").read_bytes().hex() == "010000000200000070110100ffffffff"
    assert (folder / "mask.bin").read_bytes() == bytes([0, 1, 1, 0])
    numbers = [0, 3, 3, 1]
    assert (folder / "episodes.idx").read_bytes() == b"".join(n.to_bytes(8, "little") for n in numbers)
    assert (folder / "trained.u32").read_bytes() == bytes([2, 0, 0, 0, 0, 0, 0, 0])


episodes = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 1, True, 255, 256, 0.5])), min_size=1, max_size=9
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes, st.sampled_from([None, 1, 5, 12, 1000]), st.integers(1, 20))
def test_what_is_read_is_what_was_appended_however_much_is_written_at_a_time(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[list[tuple[int, float]]],
    shard_tokens: int | None,
    held: int,
) -> None:
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    for folder, at_a_time in ((one, episode_writer.HELD), (many, held)):
        with pytest.MonkeyPatch.context() as patch, EpisodeWriter(folder, "train", shard_tokens) as writer:
            patch.setattr(episode_writer, "HELD", at_a_time)
            for i, episode in enumerate(made):
                writer.append(
                    [t for t, _ in episode], [w for _, w in episode], kinds=[i % 40 | i % 4 * 64] * len(episode),
                    source=f"s{i % 3}", turns=i, record_id=f"r{i}é",
                )  # fmt: skip
    assert files(one) == files(many)
    dataset = EpisodeDataset(one)
    assert len(dataset) == len(made)
    for i, (got, wanted) in enumerate(zip(dataset, made, strict=True)):
        assert got.ids.tolist() == [t for t, _ in wanted]
        assert got.weights is not None
        assert got.weights.tolist() == [w for _, w in wanted]
        assert got.kinds is not None
        assert got.kinds.tolist() == [i % 40 | i % 4 * 64] * len(wanted)
        assert (got.source, got.turns, got.record_id) == (f"s{i % 3}", i, f"r{i}é")
        assert got.trained == sum(w > 0 for _, w in wanted)
    for shard, first in zip(dataset.shards, dataset.episode_offsets.tolist(), strict=False):
        weights = {w for episode in made[first : first + shard.episodes] for _, w in episode}
        assert (shard.mask_dtype == np.uint8) == (not weights & {256, 0.5})
    if shard_tokens is not None:
        sizes_on_disk = [(shard.tokens, shard.episodes) for shard in dataset.shards]
        assert all(tokens <= shard_tokens or count == 1 for tokens, count in sizes_on_disk)


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train", 5) as writer:
        for i in range(4):
            writer.append([i, i, i], [0, 1, 1], kinds=[1, 2, 3], source="web" if i % 2 else "books", record_id=str(i))
    value = json.loads((tmp_path / "train/episodes.json").read_text())
    assert (value["format"], value["version"], value["episodes"], value["tokens"]) == ("chatmill-episodes", 4, 4, 12)
    assert value["sources"] == ["books", "web"]
    assert value["columns"]["kinds"] == {"file": "kinds.u8", "dtype": "|u1", "per": "token"}
    assert list(value["columns"]) == ["kinds", "source", "trained", "record_id"]
    names = {name for shard in value["shards"] for name in shard["files"]}
    assert not {n for n in names if n.endswith(".bin")} - {"tokens.bin", "mask.bin"}
    read = read_split_manifest(tmp_path / "train")
    assert read is not None
    assert json.loads(read.to_bytes()) == value
    assert json.loads(writer.close().to_bytes()) == value


@pytest.mark.parametrize("shard_tokens", [None, 4])
def test_a_split_is_there_whole_or_not_at_all(tmp_path: Path, shard_tokens: int | None) -> None:
    (tmp_path / "train").mkdir()  # an empty folder is no split

    def stop() -> None:
        with EpisodeWriter(tmp_path, "train", shard_tokens) as writer:
            writer.append([1, 2])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert not list(tmp_path.iterdir())
    writer = EpisodeWriter(tmp_path, "train", shard_tokens)
    other = EpisodeWriter(tmp_path, "train", shard_tokens)
    for one in (writer, other):
        for i in range(5):
            one.append([i] * 3, [1] * 3)
    assert not (tmp_path / "train").exists()
    writer.close()
    assert len(EpisodeDataset(tmp_path)) == 5
    assert len(EpisodeDataset(tmp_path).shards) == (1 if shard_tokens is None else 5)
    with pytest.raises(ConfigError, match="is there already"):
        other.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]


KILLED = """
import sys
from chatmill.store.episode_writer import EpisodeWriter
writer = EpisodeWriter(sys.argv[1], "train", 1000)
for i in range(10**9):
    writer.append([i % 1000] * 50, [1] * 50)
    if i == 300:
        print("ready", flush=True)
"""


def test_a_killed_writer_publishes_nothing_and_a_new_one_starts_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    with pytest.raises(FormatError, match="no such folder"):
        EpisodeDataset(tmp_path)
    with EpisodeWriter(tmp_path, "train", 1000) as writer:
        writer.append([5, 6])
    assert [e.ids.tolist() for e in EpisodeDataset(tmp_path)] == [[5, 6]]


def test_a_published_split_is_never_added_to(tmp_path: Path) -> None:
    for shard_tokens in (None, 10):
        folder = tmp_path / str(shard_tokens)
        with EpisodeWriter(folder, "train", shard_tokens) as writer:
            writer.append([1])
        before = files(folder)
        with pytest.raises(ConfigError, match="already holds files"):
            EpisodeWriter(folder, "train", shard_tokens)
        assert files(folder) == before
        assert sorted(p.name for p in folder.iterdir()) == ["train"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ids": []}, "at least one token"),
        ({"ids": [1, -1]}, "token 1 has the id -1"),
        ({"ids": [2**32]}, "4294967296"),
        ({"ids": [1.5]}, "integers"),
        ({"ids": [[1, 2]]}, "one row"),
        ({"ids": [1, 2], "mask": [1]}, "one value per token"),
        ({"ids": [1, 2], "mask": [1, float("nan")]}, "finite"),
        ({"ids": [1, 2], "mask": [1, -0.5]}, "0 or more"),
        ({"ids": [1, 2], "mask": ["a", "b"]}, "numbers"),
        ({"ids": [1, 2], "kinds": [1, 56]}, "codes from 0 to 55"),
        ({"ids": [1, 2], "kinds": [1, 127]}, "flags 64 and 128"),
        ({"ids": [1, 2], "kinds": [1, 257]}, "codes from 0 to 55"),
        ({"ids": [1, 2], "kinds": [1]}, "one value per token"),
        ({"ids": [1, 2], "turns": -1}, "turns"),
        ({"ids": [1, 2], "turns": 1.5}, "turns"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([9, 9])
        with pytest.raises(DataError, match=says) as caught:
            writer.append(**arguments)
        assert "episode 1" in str(caught.value)
        writer.append([8])
    assert [e.ids.tolist() for e in EpisodeDataset(tmp_path)] == [[9, 9], [8]]


def test_columns_are_there_for_all_or_for_none(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([1], [1], source="a")
        for other in ({}, {"source": "a"}, {"mask": [1]}, {"mask": [1], "source": "a", "turns": 3}):
            with pytest.raises(DataError, match="for all episodes of a split or for none"):
                writer.append([1], **other)  # type: ignore[arg-type]


def test_an_empty_or_closed_writer(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path, "train")
    with pytest.raises(DataError, match="no episode"):
        writer.close()
    assert not list(tmp_path.iterdir())
    writer = EpisodeWriter(tmp_path, "train")
    writer.append([1])
    writer.close()
    writer.close()
    with pytest.raises(DataError, match="closed"):
        writer.append([1])


@pytest.mark.parametrize("split", ["", ".train", "a/b"])
def test_a_split_is_a_plain_name_and_shards_hold_something(tmp_path: Path, split: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        EpisodeWriter(tmp_path, split)
    with pytest.raises(ConfigError, match="shard_tokens is 0"):
        EpisodeWriter(tmp_path, "train", 0)
    with EpisodeWriter(tmp_path, "train", 1) as writer:
        writer.append([7, 8])
    assert [shard.tokens for shard in EpisodeDataset(tmp_path).shards] == [2]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create the folder"):
        EpisodeWriter(tmp_path / "file", "train")

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(StorageError, match="Read-only file system"):
        EpisodeWriter(tmp_path / "new", "train")


def test_a_full_disk_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EpisodeWriter(tmp_path, "train", 4)
    writer.append([1, 2, 3])

    def full(self: Any, values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_writer.GrowingFile, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        writer.append([4, 5, 6])
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="closed"):
        writer.append([4, 5, 6])
    with pytest.raises(DataError, match="stopped, and nothing was published"):
        writer.close()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=5), min_size=1, max_size=4
    )
)
def test_trees_that_are_taken_apart_are_the_rows_they_were_made_of(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[list[int]]]
) -> None:
    rows = [row for group in groups for row in group]
    ids = np.array([one for row in rows for one in row], dtype=np.int32)
    columns = RowColumns(
        ids=ids,
        offsets=offsets_of(np.array([len(row) for row in rows])),
        kinds=np.zeros(len(ids), dtype=np.uint8),
        weights=np.zeros(len(ids), dtype=np.float32),
        kept=np.ones(len(ids), dtype=np.uint8),
        parents=np.full(len(rows), -1),
        begins=np.zeros(len(rows), dtype=np.int64),
    )
    trees = grow_trees(columns, offsets_of(np.array([len(group) for group in groups])), 100)
    ends, firsts = offsets_of(trees.lengths), offsets_of(trees.branches)
    pairs = list(zip(trees.starts.tolist(), trees.depths.tolist(), strict=True))
    branches = [pairs[a:b] for a, b in itertools.pairwise(firsts.tolist())]
    one = tmp_path_factory.mktemp("trees")
    stored = ids[ranges(trees.firsts, trees.sizes)]
    with EpisodeWriter(one, "train") as writer:
        for number, own in enumerate(branches):
            tokens = stored[ends[number] : ends[number + 1]]
            writer.append(tokens, np.zeros(len(tokens)), branches=own)
    found = RowsOfTrees(EpisodeDataset(one))
    apart = [found.gather(np.array([n])).ids.tolist() for n in range(len(found))]
    longest = {
        tuple(row) for group in groups for row in group if not any(o[: len(row)] == row and o != row for o in group)
    }
    assert {tuple(row) for row in apart} >= longest
    assert all(any(row == given[: len(row)] for given in rows) for row in apart)


@pytest.mark.parametrize(
    ("mask", "branches", "said"),
    [
        ([0, 0, 1, 0, 1], [(3, 0)], "episode 0: the branch at 3 must begin with a copy of token 0"),
        ([0, 0, 1, 1, 1], [(3, 1)], "with the weight 0"),
        ([0, 0, 1, 0, 1], [(3, 7)], "a branch does not fit its tree"),
        ([0, 0, 1, 0, 1], [(9, 1)], "a branch does not fit its tree"),
        ([0, 0, 1, 0, 1], [3], "branches are pairs"),
    ],
)
def test_a_branch_begins_with_a_copy_of_the_last_token_it_shares(
    tmp_path: Path, mask: list[int], branches: Any, said: str
) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        with pytest.raises(DataError, match=said):
            writer.append([1, 2, 3, 2, 5], mask, branches=branches)
        writer.append([1, 2, 3, 2, 5], [0, 0, 1, 0, 1], branches=[(3, 1)])
    tree = RowsOfTrees(EpisodeDataset(tmp_path))
    assert [tree.gather(np.array([n])).ids.tolist() for n in range(2)] == [[1, 2, 3], [1, 2, 5]]


def test_a_caller_may_write_over_its_arrays(tmp_path: Path) -> None:
    ids, mask, kinds = (np.ones(3, dtype=dtype) for dtype in ("<u4", np.uint8, np.uint8))
    with EpisodeWriter(tmp_path, "train") as writer:
        for number in range(2):
            for one in (ids, mask, kinds):
                one[:] = number
            writer.append(ids, mask, kinds=kinds)
    first, second = EpisodeDataset(tmp_path)
    assert [first.ids.tolist(), first.weights.tolist(), first.kinds.tolist()] == [[0] * 3] * 3
    assert [second.ids.tolist(), second.weights.tolist(), second.kinds.tolist()] == [[1] * 3] * 3


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=12), st.booleans())
def test_files_grow_piece_by_piece(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], arrays: bool) -> None:
    """The hash and the bytes of what was written, for pieces of any size and arrays that do not lie in a row."""
    path, whole = tmp_path_factory.mktemp("grows") / "file", b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": 7, "BUFFER": 4}.items():
            patch.setattr(publish, name, value)
        file = GrowingFile(path)
        for part in parts:
            file.write(np.frombuffer(part, dtype=np.uint8).repeat(2)[::2] if arrays else part)
        assert file.finish() == FileRecord.from_json(file_entry(whole))
        assert path.read_bytes() == whole


def test_a_split_whose_disk_failed_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports an error of the disk only once."""
    writer = EpisodeWriter(tmp_path, "train", 10_000)
    writer.append([1, 2, 3])
    fsync, errors = os.fsync, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def sync(descriptor: int) -> None:
        if errors:
            raise errors.pop()
        fsync(descriptor)

    monkeypatch.setattr(publish.os, "fsync", sync)
    with pytest.raises(StorageError, match="Input/output error"):
        writer.close()
    assert not errors
    assert files(tmp_path) == {}
