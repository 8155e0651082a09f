"""The reader: random access, columns, fingerprints, and every fault one clear error."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chatmill.errors import ConfigError, FormatError
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.token_files import TokenFiles


def write(directory: Path, shard_tokens: int | None = None, count: int = 12) -> Path:
    with EpisodeWriter(directory, "train", shard_tokens) as writer:
        for i in range(count):
            n = 2 + i % 5
            writer.append(
                [10 * i + t for t in range(n)], [t % 2 for t in range(n)], kinds=[34] * n,
                source=f"s{i % 2}", turns=i, record_id=f"id-{i}",
            )  # fmt: skip
    return directory


@pytest.mark.parametrize("shard_tokens", [None, 9])
def test_random_access(tmp_path: Path, shard_tokens: int | None) -> None:
    dataset = EpisodeDataset(write(tmp_path, shard_tokens))
    assert len(dataset) == 12
    assert len(dataset.shards) == (1 if shard_tokens is None else 7)
    for i in (0, 11, 5, 3, -1, -12):
        episode = dataset[i]
        assert episode.index == i % 12
        assert episode.ids.tolist() == [10 * (i % 12) + t for t in range(2 + i % 12 % 5)]
        assert len(episode) == 2 + i % 12 % 5
        assert episode.record_id == f"id-{i % 12}"
        assert not episode.ids.flags.writeable
    for i in (12, -13):
        with pytest.raises(IndexError, match="of 12"):
            dataset[i]
    assert [e.index for e in dataset] == list(range(12))
    assert dataset.lengths.tolist() == [2 + i % 5 for i in range(12)]
    assert dataset.column("turns").tolist() == list(range(12))
    assert dataset.source_names == ("s0", "s1")
    assert dataset.column("trained").tolist() == [(2 + i % 5) // 2 for i in range(12)]
    with pytest.raises(ConfigError, match="turns"):
        dataset.column("no such column")
    assert "12 episodes" in repr(dataset)


def test_three_files_are_a_split_and_its_index_has_any_order_and_overlaps(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    np.arange(10, dtype="<u4").tofile(folder / "tokens.bin")
    np.array([[7, 3], [0, 4], [2, 5], [10, 0]], dtype="<u8").tofile(folder / "episodes.idx")
    np.arange(10, dtype="u1").tofile(folder / "mask.bin")
    for episode, wanted in zip(EpisodeDataset(tmp_path), ([7, 8, 9], [0, 1, 2, 3], [2, 3, 4, 5, 6], []), strict=True):
        assert episode.weights is not None
        assert episode.ids.tolist() == episode.weights.tolist() == wanted
        assert (episode.kinds, episode.source) == (None, None)


def test_a_copy_in_another_process_maps_the_files_itself(tmp_path: Path) -> None:
    dataset = EpisodeDataset(write(tmp_path, 9))
    dataset[3]
    data = pickle.dumps(dataset)
    assert len(data) < 40_000
    assert [e.ids.tolist() for e in pickle.loads(data)] == [e.ids.tolist() for e in dataset]
    assert pickle.loads(data).manifest == dataset.manifest
    assert not dataset.lengths.flags.writeable
    assert "lengths" not in pickle.loads(pickle.dumps(dataset)).__dict__


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    one, same, sharded = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", 9)
    prints = [EpisodeDataset(d).fingerprint for d in (one, same, sharded)]
    assert prints[0] == prints[1] != prints[2]
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        changed = write(tmp_path / name)
        data = bytearray((changed / "train" / name).read_bytes())
        data[-8] ^= 1
        (changed / "train" / name).write_bytes(data)
        assert EpisodeDataset(changed).fingerprint != prints[0]


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train", 2) as writer:
        for i in range(400):
            writer.append([10 * i, 1])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limit[1]))
    try:
        dataset = EpisodeDataset(tmp_path)
        assert len(dataset.shards) == 400
        order = np.random.RandomState(0).permutation(400).tolist()
        assert all(dataset[i].ids[0] == 10 * i for i in order)
        files = TokenFiles(tmp_path / "train")
        assert all(files.shards[i].token_ids[0] == 10 * i for i in order)
        assert dataset.lengths.sum() == files.tokens.sum()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def truncated(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-size])


def indexed(number: int, start: int, length: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        index = np.fromfile(folder / "episodes.idx", dtype="<u8").reshape(-1, 2)
        index[number] = (start, length)
        index.tofile(folder / "episodes.idx")

    return damage


def stated(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "episodes.json").write_text(
        (folder / "episodes.json").read_text().replace(old, new)
    )


def emptied(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).write_bytes(b"") for name in names]


FAULTS: dict[str, tuple[int | None, Callable[[Path], object], list[str]]] = {
    "cut tokens": (
        None,
        lambda f: [truncated("tokens.bin", 4)(f), truncated("mask.bin", 1)(f)],
        ["episodes.idx", "record 11", "tokens.bin has 44 tokens"],
    ),
    "tokens in half": (
        None,
        lambda f: (f / "tokens.bin").write_bytes(b"123"),
        ["tokens.bin", "3 bytes", "multiple"],
    ),
    "index cut": (None, truncated("episodes.idx", 5), ["episodes.idx", "16-byte", "11 bytes"]),
    "start outside": (None, indexed(5, 1_000_000, 2), ["record 5", "1,000,000"]),
    "sum that wraps around": (None, indexed(3, 2**63, 2**63), ["record 3", "9,223,372,036,854,775,808"]),
    "length that wraps around": (
        None,
        indexed(3, 9, 2**64 - 8),
        ["record 3", "ends at token 18,446,744,073,709,551,617"],
    ),
    "mask too short": (None, lambda f: (f / "mask.bin").write_bytes(b"1" * 44), ["44 bytes for 45 tokens"]),
    "no index": (None, lambda f: (f / "episodes.idx").unlink(), ["episodes.idx is missing"]),
    "no tokens": (None, lambda f: (f / "tokens.bin").unlink(), ["tokens.bin is missing"]),
    "no column": (None, lambda f: (f / "kinds.u8").unlink(), ["kinds.u8 is missing"]),
    "column cut": (None, lambda f: (f / "turns.u32").write_bytes(b"1234"), ["turns.u32", "4 bytes"]),
    "another format": (None, stated("chatmill-episodes", "x"), ["episodes.json", "found 'x'"]),
    "another version": (3, stated('"version": 4', '"version": 9'), ["found 9"]),
    "broken manifest": (None, lambda f: (f / "episodes.json").write_text("{"), ["episodes.json", "not JSON"]),
    "a column elsewhere": (None, stated("kinds.u8", "../x"), ["plain file name"]),
    "a file elsewhere": (3, stated('"tokens.bin"', '"../tokens.bin"'), ["plain file name"]),
    "a shard elsewhere": (3, stated('"name": "shard_00001"', '"name": "../elsewhere"'), ["plain file name"]),
    "two layouts": (None, lambda f: (f / "shard_00000").mkdir(), ["both"]),
    "no episodes": (None, emptied("tokens.bin", "episodes.idx", "mask.bin"), []),
    "nothing": (None, lambda f: [path.unlink() for path in f.iterdir()], ["empty split"]),
    "no folder": (None, shutil.rmtree, ["no such folder"]),
    "no dataset": (None, lambda f: shutil.rmtree(f.parent), ["no such folder"]),
    "no index in a shard": (9, lambda f: (f / "shard_00002/episodes.idx").unlink(), ["shard_00002"]),
    "no mask in a shard": (9, lambda f: (f / "shard_00001/mask.bin").unlink(), ["shard_00001", "mask.bin is missing"]),
    "no shard": (9, lambda f: shutil.rmtree(f / "shard_00002"), ["shard_00002 is missing"]),
    "no last shard": (
        9,
        lambda f: shutil.rmtree(f / "shard_00006"),
        ["names 7 shards, 6 are there; different: shard_00006"],
    ),
    "a shard more": (
        9,
        lambda f: shutil.copytree(f / "shard_00006", f / "shard_00007"),
        ["names 7 shards, 8 are there; different: shard_00007"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_clear_error(tmp_path: Path, fault: str) -> None:
    shard_tokens, damage, says = FAULTS[fault]
    write(tmp_path, shard_tokens)
    damage(tmp_path / "train")
    with pytest.raises(FormatError) as caught:
        list(EpisodeDataset(tmp_path))
    for part in says:
        assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_reader_that_is_not_strict_does_without_masks(tmp_path: Path) -> None:
    (write(tmp_path, 9) / "train" / "shard_00001" / "mask.bin").unlink()
    loose = EpisodeDataset(tmp_path, strict=False)
    assert not loose.has_masks
    assert "shard_00001" in loose.mask_problem
    assert loose[0].weights is None


@pytest.mark.parametrize("offsets", [(9, 4), (4, 2**63), (2**64 - 5, 4), (59, 59)])
def test_texts_whose_offsets_do_not_fit_are_refused(tmp_path: Path, offsets: tuple[int, int]) -> None:
    """Offsets that run backwards would give each text the bytes of others."""
    path = write(tmp_path) / "train" / "record_id.offsets"
    assert [EpisodeDataset(tmp_path)[number].record_id for number in (2, 11)] == ["id-2", "id-11"]
    stored = np.fromfile(path, dtype="<u8")
    assert stored[-1] == 50
    stored[2:4] = offsets
    stored.tofile(path)
    with pytest.raises(FormatError, match="the offsets of record_id do not fit its 50 bytes"):
        EpisodeDataset(tmp_path)[2]


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    """A rename puts another file in place; what was mapped stays as it was."""
    dataset = EpisodeDataset(write(tmp_path))
    before = [e.ids.tolist() for e in dataset]
    (tmp_path / "new").write_bytes(b"\0" * 4)
    os.replace(tmp_path / "new", tmp_path / "train/tokens.bin")
    assert [e.ids.tolist() for e in dataset] == before


def test_a_source_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "train" / "source.u32").write_bytes(np.full(12, 7, dtype="<u4").tobytes())
    with pytest.raises(FormatError, match="source code 7"):
        EpisodeDataset(tmp_path)[0]
    with pytest.raises(FormatError, match="source code 7"):
        EpisodeDataset(tmp_path).facts("source", np.arange(3))


def test_the_reader_needs_numpy_and_msgspec_alone(tmp_path: Path) -> None:
    write(tmp_path)
    script = (
        "import sys, json\n"
        "from chatmill.store.episodes import EpisodeDataset\n"
        f"dataset = EpisodeDataset({str(tmp_path)!r})\n"
        "ids = [e.ids.tolist() for e in dataset]\n"
        "print(json.dumps([ids[3], sorted(m for m in sys.modules if m in "
        "{'torch', 'pydantic', 'pyarrow', 'rich', 'yaml'})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[30, 31, 32, 33, 34], []]


def test_a_shard_may_have_source_codes_of_its_own(tmp_path: Path) -> None:
    """As shards have that were written by workers who did not know of each other."""
    write(tmp_path, 3)
    path = tmp_path / "train" / "episodes.json"
    manifest = json.loads(path.read_bytes())
    before = [one.source for one in EpisodeDataset(tmp_path)]
    shard = manifest["shards"][1]
    names = manifest["sources"]
    codes = np.fromfile(tmp_path / "train" / shard["name"] / "source.u32", "<u4")
    own = [names[code] for code in dict.fromkeys(codes.tolist())]
    shard["sources"] = ["unused", *own]
    recoded = np.array([shard["sources"].index(names[code]) for code in codes.tolist()], dtype="<u4")
    recoded.tofile(tmp_path / "train" / shard["name"] / "source.u32")
    manifest |= {"version": 4, "sources": [*names, "unused"]}
    path.write_text(json.dumps(manifest))
    dataset = EpisodeDataset(tmp_path)
    assert [one.source for one in dataset] == before
    assert [dataset.source_names[code] for code in dataset.column("source").tolist()] == before
    np.array([9] * len(codes), dtype="<u4").tofile(tmp_path / "train" / shard["name"] / "source.u32")
    with pytest.raises(FormatError, match="source code"):
        [one.source for one in EpisodeDataset(tmp_path)]
