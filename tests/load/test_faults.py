"""Broken datasets at the loaders: one clear error each, at opening wherever it can be seen there."""

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


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return damage


def index_outside(folder: Path) -> None:
    index = np.fromfile(folder / "episodes.idx", dtype="<u8").reshape(-1, 2)
    index[1] = (40, 10**6)
    index.tofile(folder / "episodes.idx")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated tokens": (cut("tokens.bin", 40), ["tokens.bin has 10 tokens", "record"]),
    "half a token": (cut("tokens.bin", 41), ["tokens.bin", "41 bytes", "4-byte"]),
    "half an index record": (cut("episodes.idx", 30), ["episodes.idx", "30 bytes", "16-byte"]),
    "index outside": (index_outside, ["record 1", "1,000,000"]),
    "no episodes": (cut("episodes.idx", 0), ["empty split"]),
    "no index": (without("episodes.idx"), ["episodes.idx"]),
    "no tokens": (without("tokens.bin"), ["tokens.bin"]),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_opening(tmp_path: Path, fault: str, split: str) -> None:
    write_set(tmp_path, items(12), items(12))
    damage, says = FAULTS[fault]
    damage(tmp_path / split)
    with pytest.raises(FormatError) as caught:
        GPTEpisodeDataLoader(BASE, None, tmp_path)
    for part in [str(tmp_path / split), *says]:
        assert part in str(caught.value)


@pytest.mark.parametrize("fault", ["truncated tokens", "no index", "index outside"])
def test_faults_in_one_shard(tmp_path: Path, fault: str) -> None:
    write_set(tmp_path, items(60, low=10), shards=3)
    damage, _ = FAULTS[fault]
    damage(tmp_path / "train/shard_00001")
    with pytest.raises(FormatError, match="shard_00001"):
        GPTEpisodeDataLoader(BASE, None, tmp_path)


def test_no_episode_is_long_enough(tmp_path: Path) -> None:
    write_set(tmp_path, items(9, high=5))
    with pytest.raises(
        FormatError, match=r"none of its 9 episodes has episode_min_tokens = 6 tokens .*the longest has"
    ):
        GPTEpisodeDataLoader({**BASE, "episode_min_tokens": 6}, None, tmp_path)


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        GPTEpisodeDataLoader(BASE, None, tmp_path / "nowhere")
    (tmp_path / "tain").mkdir()
    with pytest.raises(FormatError, match="holds tain"):
        GPTEpisodeDataLoader(BASE, None, tmp_path)


def test_a_missing_shard_is_seen_without_a_manifest(tmp_path: Path) -> None:
    write_set(tmp_path, items(20), shards=4)
    shutil.rmtree(tmp_path / "train/shard_00001")
    config = {"batch_size": 2, "block_size": 4, "pad_token_id": 1}
    for make in (GPTEpisodeDataLoader, GPTDataLoader):
        with pytest.raises(FormatError, match="shard_00001 is missing, but shard_00003 is there"):
            make(config, None, tmp_path)
    shutil.rmtree(tmp_path / "train/shard_00000")
    with pytest.raises(FormatError, match="shard_00000 is missing and 1 more"):
        GPTEpisodeDataLoader(config, None, tmp_path)
