"""Broken datasets at the loaders: one clear error each, at opening; `tests/store` has every fault of the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chatmill.errors import FormatError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.token_stream import GPTDataLoader
from tests.load.sets import PAD, items, write_set

BASE = {"batch_size": 2, "block_size": 6, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


def cut_tokens(folder: Path) -> None:
    path = folder / "tokens.bin"
    path.write_bytes(path.read_bytes()[:40])


def index_outside(folder: Path) -> None:
    index = np.fromfile(folder / "episodes.idx", dtype="<u8").reshape(-1, 2)
    index[1] = (40, 10**6)
    index.tofile(folder / "episodes.idx")


def no_index(folder: Path) -> None:
    (folder / "episodes.idx").unlink()


@pytest.mark.parametrize("part", ["train", "val", "train/shard_00001"])
@pytest.mark.parametrize("damage", [cut_tokens, index_outside, no_index])
def test_faults_at_opening(tmp_path: Path, damage: Callable[[Path], None], part: str) -> None:
    write_set(tmp_path, items(60, low=10), items(12), shards=3 * ("shard" in part))
    damage(tmp_path / part)
    with pytest.raises(FormatError, match=f"{tmp_path / part}.*(tokens.bin has 10 tokens|record 1 is|episodes.idx)"):
        GPTEpisodeDataLoader(BASE, None, tmp_path)


def test_no_episode_is_long_enough(tmp_path: Path) -> None:
    write_set(tmp_path, items(9, high=5))
    with pytest.raises(
        FormatError, match=r"none of its 9 episodes has episode_min_tokens = 6 tokens .*the longest has"
    ):
        GPTEpisodeDataLoader({**BASE, "episode_min_tokens": 6}, None, tmp_path)


def test_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "tain").mkdir()
    with pytest.raises(FormatError, match="holds tain"):
        GPTEpisodeDataLoader(BASE, None, tmp_path)


def test_a_missing_shard_is_seen_without_a_manifest(tmp_path: Path) -> None:
    write_set(tmp_path, items(20), shards=4)
    shutil.rmtree(tmp_path / "train/shard_00001")
    for make in (GPTEpisodeDataLoader, GPTDataLoader):
        with pytest.raises(FormatError, match="shard_00001 is missing, but shard_00003 is there"):
            make(BASE, None, tmp_path)
    shutil.rmtree(tmp_path / "train/shard_00000")
    with pytest.raises(FormatError, match="shard_00000 is missing and 1 more"):
        GPTEpisodeDataLoader(BASE, None, tmp_path)
