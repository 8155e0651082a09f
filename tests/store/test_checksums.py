"""`check=True`: a changed byte is an error before any value of its shard is read; nothing is hashed twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.errors import ConfigError, FormatError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.mixture import MixtureLoader
from chatmill.load.token_stream import GPTDataLoader
from chatmill.store import checksums
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.damage import flip
from tests.load.sets import items, write_set

CONFIG = {"batch_size": 2, "block_size": 4, "pad_token_id": 0, "use_loss_mask": True}


@pytest.fixture
def episodes(tmp_path: Path) -> Path:
    with EpisodeWriter(tmp_path / "episodes", "train", shard_tokens=40) as writer:
        for item in items(12, low=8, high=8):
            writer.append(np.array(item.ids, dtype=np.uint32), np.array(item.weights, dtype=np.uint8))
    assert len(EpisodeDataset(tmp_path / "episodes").shards) == 3
    return tmp_path / "episodes"


@pytest.mark.parametrize("file", ["tokens.bin", "mask.bin", "trained.u32"])
def test_a_changed_byte_is_found_before_its_shard_is_read(episodes: Path, file: str) -> None:
    shards = sorted((episodes / "train").glob("shard_*"))
    path = shards[1] / file
    if not path.exists():
        path = next(p for p in shards[1].iterdir() if p.name not in ("tokens.bin", "mask.bin", "episodes.idx"))
    flip(path, -1)  # sizes and structure stay
    EpisodeDataset(episodes)[6]  # without check nobody sees it
    dataset = EpisodeDataset(episodes, check=True)
    assert len(dataset[0]) == 8, "the first shard is sound"
    for _ in range(2):
        with pytest.raises(FormatError, match=rf"{path.name}: xxh128 .*bytes were changed.*chatmill verify"):
            dataset[6]
    for read in (lambda: dataset.lengths, lambda: dataset.locate(np.array([6])), lambda: list(dataset)):
        with pytest.raises(FormatError, match="bytes were changed"):
            read()


def test_each_shard_is_hashed_once(episodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    original = checksums.Hash.of_file
    monkeypatch.setattr(checksums.Hash, "of_file", lambda kind, path: hashed.append(path) or original(kind, path))
    dataset = EpisodeDataset(episodes, check=True)
    assert hashed == [], "not when it is opened"
    dataset[0], dataset[1]
    assert {path.parent.name for path in hashed} == {"shard_00000"}
    list(dataset)
    list(dataset)
    assert len(hashed) == len(set(hashed))
    assert {path.name for path in hashed} >= {"tokens.bin", "mask.bin", "episodes.idx"}
    EpisodeDataset(episodes)[0]
    assert len(hashed) == len(set(hashed)), "nothing is hashed without check"


LOADERS: dict[str, Callable[[Path], Any]] = {
    "episodes": lambda folder: GPTEpisodeDataLoader(CONFIG, dataset_dir=folder, check=True, prefetch=False),
    "mixture": lambda folder: MixtureLoader(CONFIG, {str(folder): 1.0}, check=True, prefetch=False),
    "stream": lambda folder: GPTDataLoader(CONFIG, None, folder, True, check=True, prefetch=False),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("file", ["tokens.bin", "mask.bin"])
def test_loaders_check_what_they_read(episodes: Path, name: str, file: str) -> None:
    def read() -> None:
        loader = LOADERS[name](episodes)
        for _ in range(40):
            loader.get_batch("train")

    read()
    for path in (episodes / "train").rglob(file):
        flip(path, -1)
    with pytest.raises(FormatError, match="bytes were changed"):
        read()


@pytest.mark.parametrize("name", LOADERS)
def test_a_set_without_hashes_cannot_be_checked(tmp_path: Path, name: str) -> None:
    write_set(tmp_path / "plain", items(6))
    with pytest.raises(ConfigError, match=r"check=True compares .*this split has none"):
        LOADERS[name](tmp_path / "plain")


def test_only_hashing_needs_its_package(episodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert len(EpisodeDataset(episodes)[6]) == 8
    with pytest.raises(ConfigError, match="`pip install xxhash`"):
        EpisodeDataset(episodes, check=True)[6]
