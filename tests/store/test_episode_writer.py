"""The writer: exact bytes, shards, columns, mask types, trees, and nothing half-published."""

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
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.core import publish
from chatmill.core.checksums import FileRecord
from chatmill.core.publish import GrowingFile, StorageError
from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.store import episode_writer
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


TOKENS = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 1, True, 255, 256, 0.5]))
EPISODES = st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=12)


@settings(max_examples=40)
@given(EPISODES, st.sampled_from([None, 1, 5, 12, 1000]), st.integers(1, 20))
@example([[(5, 1), (6, 0)], [(7, 1)], [(8, 0.5)], [(9, 1)]], None, 1)  # a fraction after whole weights are written
def test_what_is_read_is_what_was_appended_however_much_is_written_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, made: list[Any], shard_tokens: int | None, held: int
) -> None:
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    columns: list[dict[str, Any]] = [
        {"kinds": [i % 40 | i % 4 * 64] * len(episode), "source": f"s{i % 3}", "turns": i, "record_id": f"r{i}é"}
        for i, episode in enumerate(made)
    ]
    for folder, at_a_time in ((one, episode_writer.HELD), (many, held)):
        with pytest.MonkeyPatch.context() as patch, EpisodeWriter(folder, "train", shard_tokens) as writer:
            patch.setattr(episode_writer, "HELD", at_a_time)
            for episode, its in zip(made, columns, strict=True):
                writer.append([t for t, _ in episode], [w for _, w in episode], **its)
    assert files(one) == files(many)
    dataset = EpisodeDataset(one)
    for got, wanted, its in zip(dataset, made, columns, strict=True):
        assert got.weights is not None
        assert got.kinds is not None
        assert list(zip(got.ids.tolist(), got.weights.tolist(), strict=True)) == wanted
        assert {**its, "kinds": got.kinds.tolist()} == its
        assert (got.source, got.turns, got.record_id) == (its["source"], its["turns"], its["record_id"])
        assert got.trained == sum(w > 0 for _, w in wanted)
    for shard, first in zip(dataset.shards, dataset.episode_offsets.tolist(), strict=False):
        weights = {w for episode in made[first : first + shard.episodes] for _, w in episode}
        assert (shard.mask_dtype == np.uint8) == (not weights & {256, 0.5})
        assert shard_tokens is None or shard.tokens <= shard_tokens or shard.episodes == 1


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
    assert json.loads(read.to_bytes()) == json.loads(writer.close().to_bytes()) == value


@pytest.mark.parametrize("shard_tokens", [None, 4])
def test_a_split_is_there_whole_or_not_at_all_and_never_added_to(tmp_path: Path, shard_tokens: int | None) -> None:
    (tmp_path / "train").mkdir()  # an empty folder is no split
    with pytest.raises(ZeroDivisionError), EpisodeWriter(tmp_path, "train", shard_tokens) as writer:
        [writer.append([6 // number] * 3) for number in (1, 2, 0)]
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="no episode"):
        EpisodeWriter(tmp_path, "train", shard_tokens).close()
    assert not list(tmp_path.iterdir())
    writer, other = (EpisodeWriter(tmp_path, "train", shard_tokens) for _ in range(2))
    for one in (writer, other):
        for i in range(5):
            one.append([i] * 3, [1] * 3)
    assert not (tmp_path / "train").exists()
    assert writer.close() == writer.close()
    before = files(tmp_path / "train")
    assert [shard.tokens for shard in EpisodeDataset(tmp_path).shards] == ([15] if shard_tokens is None else [3] * 5)
    with pytest.raises(DataError, match="closed"):
        writer.append([1], [1])
    with pytest.raises(ConfigError, match="is there already"):
        other.close()
    with pytest.raises(ConfigError, match="already holds files"):
        EpisodeWriter(tmp_path, "train", shard_tokens)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]
    assert files(tmp_path / "train") == before


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


PLAIN: dict[str, Any] = {"ids": [1, 2]}
TREE: dict[str, Any] = {"ids": [1, 2, 3, 2, 5], "mask": [0, 0, 1, 0, 1], "branches": [(3, 1)]}


@pytest.mark.parametrize(
    ("sound", "changes", "says"),
    [
        (PLAIN, {"ids": []}, "at least one token"),
        (PLAIN, {"ids": [1, -1]}, "token 1 has the id -1"),
        (PLAIN, {"ids": [2**32]}, "4294967296"),
        (PLAIN, {"ids": [1.5]}, "integers"),
        (PLAIN, {"ids": [[1, 2]]}, "one row"),
        (PLAIN, {"mask": [1]}, "one value per token"),
        (PLAIN, {"mask": [1, float("nan")]}, "finite"),
        (PLAIN, {"mask": [1, -0.5]}, "0 or more"),
        (PLAIN, {"mask": ["a", "b"]}, "numbers"),
        (PLAIN, {"kinds": [1, 56]}, "codes from 0 to 55"),
        (PLAIN, {"kinds": [1, 127]}, "flags 64 and 128"),
        (PLAIN, {"kinds": [1, 257]}, "codes from 0 to 55"),
        (PLAIN, {"kinds": [1]}, "one value per token"),
        (PLAIN, {"turns": -1}, "turns"),
        (PLAIN, {"turns": 1.5}, "turns"),
        (TREE, {"branches": [(3, 0)]}, "episode 1: the branch at 3 must begin with a copy of token 0"),
        (TREE, {"mask": [0, 0, 1, 1, 1]}, "with the weight 0"),
        (TREE, {"branches": [(3, 7)]}, "a branch does not fit its tree"),
        (TREE, {"branches": [(9, 1)]}, "a branch does not fit its tree"),
        (TREE, {"branches": [3]}, "branches are pairs"),
        *(
            ({"ids": [1], "mask": [1], "source": "a"}, dict.fromkeys(left) | more, "for all episodes of a split or for")
            for left, more in ((["mask", "source"], {}), (["mask"], {}), (["source"], {}), ([], {"turns": 3}))
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    tmp_path: Path, sound: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append(**sound)
        with pytest.raises(DataError, match=says) as caught:
            writer.append(**sound | changes)
        assert "episode 1" in str(caught.value)
        writer.append(**sound)
    assert [e.ids.tolist() for e in EpisodeDataset(tmp_path)] == [sound["ids"]] * 2


def test_a_split_is_a_plain_name_and_shards_hold_something(tmp_path: Path) -> None:
    for split in ("", ".train", "a/b"):
        with pytest.raises(ConfigError, match="split"):
            EpisodeWriter(tmp_path, split)
    with pytest.raises(ConfigError, match="shard_tokens is 0"):
        EpisodeWriter(tmp_path, "train", 0)
    with EpisodeWriter(tmp_path, "train", 1) as writer:
        writer.append([7, 8])
    assert [shard.tokens for shard in EpisodeDataset(tmp_path).shards] == [2]


def test_a_disk_that_fails_publishes_nothing(tmp_path: Path) -> None:
    read_only, full, broken = (
        OSError(number, os.strerror(number)) for number in (errno.EROFS, errno.ENOSPC, errno.EIO)
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create the folder"):
        EpisodeWriter(tmp_path / "file", "train")
    (tmp_path / "file").unlink()
    with mock.patch.object(Path, "mkdir", side_effect=read_only), pytest.raises(StorageError, match="Read-only file"):
        EpisodeWriter(tmp_path / "new", "train")
    writer = EpisodeWriter(tmp_path, "train", 4)
    writer.append([1, 2, 3])
    with mock.patch.object(GrowingFile, "write", side_effect=full), pytest.raises(StorageError, match="No space left"):
        writer.append([4, 5, 6])
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="closed"):
        writer.append([4, 5, 6])
    with pytest.raises(DataError, match="stopped, and nothing was published"):
        writer.close()
    writer = EpisodeWriter(tmp_path, "train", 10_000)
    writer.append([1, 2, 3])
    syncs = itertools.chain([broken], itertools.repeat(None))  # the system reports an error of the disk only once
    with mock.patch.object(os, "fsync", side_effect=syncs), pytest.raises(StorageError, match="Input/output error"):
        writer.close()
    assert files(tmp_path) == {}


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A tree as the writer takes it, and its rows: the tokens of each, and which of them no older row has."""
    ids: list[int] = []
    mask: list[int] = []
    path: list[int] = []
    branches: list[tuple[int, int]] = []
    rows: list[list[tuple[int, int]]] = []
    for number in range(draw(st.integers(1, 4))):
        begin, depth = len(ids), draw(st.integers(0, len(path) - 1)) if number else 0
        if number:
            branches.append((begin, depth))
        copy = [ids[path[depth]]] if number else []
        ids += [*copy, *draw(st.lists(st.integers(0, 2), min_size=1 - len(copy), max_size=4))]
        mask += [0] * len(copy) + [1] * (len(ids) - begin - len(copy))
        path = [*path[:depth], *range(begin, len(ids))]
        rows.append([(ids[at], mask[at] if at >= begin else 0) for at in path])
    return {"ids": ids, "mask": mask, "branches": branches, "rows": rows}


@settings(max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=4), st.randoms())
def test_trees_that_are_taken_apart_are_the_rows_they_were_made_of(
    tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]], rng: Any
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    with EpisodeWriter(folder, "train") as writer:
        for tree in made:
            writer.append(tree["ids"], tree["mask"], branches=tree["branches"])
    stored = EpisodeDataset(folder)
    found, wanted = RowsOfTrees(stored), [row for tree in made for row in tree["rows"]]
    assert (len(found), found.lengths.tolist()) == (len(wanted), list(map(len, wanted)))
    order = rng.sample(range(len(wanted)), len(wanted))
    documents = found.gather(np.array(order))
    assert documents.weights is not None
    tokens = zip(documents.ids.tolist(), documents.weights.tolist(), strict=True)
    assert list(tokens) == [token for number in order for token in wanted[number]]
    for has in (True, False):
        stored.has_sides = stored.has_logprobs = stored.has_kinds = has
        rows = RowsOfTrees(stored)
        assert (rows.has_sides, rows.has_logprobs, rows.has_kinds, rows.has_masks) == (has, has, has, True)


def test_a_caller_may_write_over_its_arrays(tmp_path: Path) -> None:
    ids, mask, kinds = (np.ones(3, dtype=dtype) for dtype in ("<u4", np.uint8, np.uint8))
    with EpisodeWriter(tmp_path, "train") as writer:
        for number in range(2):
            for one in (ids, mask, kinds):
                one[:] = number
            writer.append(ids, mask, kinds=kinds)
    found = [[e.ids.tolist(), e.weights.tolist(), e.kinds.tolist()] for e in EpisodeDataset(tmp_path)]  # type: ignore[union-attr]
    assert found == [[[0] * 3] * 3, [[1] * 3] * 3]


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
