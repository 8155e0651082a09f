"""The token-stream loader: windows, masks, shards, and its independence of episode support."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, FormatError
from chatmill.load.token_stream import GPTDataLoader, make_loader
from tests.load.sets import items, same, write_set

CONFIG = {"batch_size": 4, "block_size": 7}


def flat_set(directory: Path, lengths: list[int]) -> list[np.ndarray]:
    folder = directory / "train"
    folder.mkdir(parents=True)
    shards = [(np.arange(length) + 10_000 * i).astype("<u4") for i, length in enumerate(lengths)]
    for i, tokens in enumerate(shards):
        tokens.tofile(folder / f"part{i}.bin")
        (tokens % 3 == 0).astype(np.uint8).tofile(folder / f"part{i}_mask.bin")
    return shards


@pytest.mark.parametrize("world", [1, 2])
def test_windows_equal_the_slow_reference(tmp_path: Path, world: int) -> None:
    shards = flat_set(tmp_path, [30, 3, 8, 50])
    windows = np.array([shard[i : i + 8] for shard in shards for i in range(len(shard) - 7)], dtype=np.int64)
    draws = np.random.RandomState(1337).randint(0, len(windows), 65536)
    ranks = [GPTDataLoader(CONFIG, None, tmp_path, True, rank=r, world_size=world) for r in range(world)]
    for step in range(15):
        for rank, one in enumerate(ranks):
            first = (step * world + rank) * 4
            rows = torch.from_numpy(windows[draws[first : first + 4]])
            mask = (rows[:, 1:] % 3 == 0).float()
            got = one.get_batch()
            assert same(got, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), mask))
            assert all(t.is_contiguous() for t in got)


def test_a_folder_of_episodes_gives_its_token_files_and_no_other(tmp_path: Path) -> None:
    train = items(9, low=8)
    write_set(tmp_path / "flat", train)
    write_set(tmp_path / "sharded", train, shards=2)
    for folder in (tmp_path / "flat/train", *sorted((tmp_path / "sharded/train").iterdir())):
        (folder / "junk.bin").write_bytes(b"\xff" * 400)
        (folder / "kinds.u8").write_bytes(b"\xff" * 400)
    ids = [t for item in train for t in item.ids]
    weights = {t: w for item in train for t, w in zip(item.ids, item.weights, strict=True)}
    for name in ("flat", "sharded"):
        made = GPTDataLoader(CONFIG, None, tmp_path / name, use_loss_mask=True)
        for _ in range(20):
            x, y, mask = made.get_batch()
            for i in range(4):
                at = ids.index(int(x[i, 0]))
                assert x[i].tolist() == ids[at : at + 7]
                assert y[i].tolist() == ids[at + 1 : at + 8]
                assert mask[i].tolist() == [weights[t] for t in y[i].tolist()]


def test_what_is_for_episodes_is_refused_or_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flat_set(tmp_path, [30])
    GPTDataLoader(CONFIG, None, tmp_path)
    assert not caplog.records
    GPTDataLoader({**CONFIG, "batch_sampling_mode": "epoch"}, None, tmp_path)
    assert "windows are drawn at random" in caplog.text
    with pytest.raises(ConfigError, match="policy 'assistant' chooses what is trained in episodes"):
        GPTDataLoader({**CONFIG, "policy": "assistant"}, None, tmp_path)


@pytest.mark.parametrize("damage", ["none", "missing", "wrong length"])
def test_masks_that_cannot_be_had(tmp_path: Path, damage: str) -> None:
    flat_set(tmp_path, [30, 40])
    mask = tmp_path / "train/part1_mask.bin"
    mask.unlink() if damage == "missing" else mask.write_bytes(b"\0" * (160 if damage == "wrong length" else 40))
    asked = {**CONFIG, "use_loss_mask": True}
    for make in (
        lambda: GPTDataLoader(CONFIG, None, tmp_path, use_loss_mask=True),
        lambda: GPTDataLoader(asked, None, tmp_path),
        lambda: make_loader(asked, tmp_path),
    ):
        if damage == "none":
            assert len(make().get_batch()) == 3
            continue
        with pytest.raises(ConfigError, match=r"part1_mask.*every token would be trained"):
            make()
    assert len(GPTDataLoader(CONFIG, None, tmp_path).get_batch()) == 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "no such folder"),
        ({}, "empty split"),
        ({"a.bin": 28, "b.bin": 12}, r"block_size \+ 1 = 8"),
        ({"a.bin": 33}, "multiple"),
        ({"a.bin": 120, "other_mask.bin": 4}, r"other\.bin"),
    ],
)
def test_faults_at_opening(tmp_path: Path, files: dict[str, int] | None, says: str) -> None:
    if files is not None:
        (tmp_path / "set/train").mkdir(parents=True)
        for name, size in files.items():
            (tmp_path / "set/train" / name).write_bytes(b"\0" * size)
    with pytest.raises(FormatError, match=says):
        GPTDataLoader(CONFIG, None, tmp_path / "set")
