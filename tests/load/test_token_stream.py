"""The token-stream loader: windows, masks, shards, and its independence of episode support."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, FormatError
from chatmill.load.token_stream import GPTDataLoader, make_loader
from tests.load.sets import items, same, write_set

CONFIG = {"batch_size": 4, "block_size": 7}


def flat_set(directory: Path, lengths: list[int], *, masks: bool = True) -> list[np.ndarray]:
    folder = directory / "train"
    folder.mkdir(parents=True)
    shards = []
    for i, length in enumerate(lengths):
        tokens = (np.arange(length) + 10_000 * i).astype("<u4")
        tokens.tofile(folder / f"part{i}.bin")
        if masks:
            (tokens % 3 == 0).astype(np.uint8).tofile(folder / f"part{i}_mask.bin")
        shards.append(tokens)
    return shards


def reference(shards: list[np.ndarray], draws: np.ndarray, block: int) -> list[list[int]]:
    windows = [shard[i : i + block + 1].tolist() for shard in shards for i in range(len(shard) - block)]
    return [windows[d] for d in draws]


@pytest.mark.parametrize("world", [1, 2])
def test_windows_equal_the_slow_reference(tmp_path: Path, world: int) -> None:
    shards = flat_set(tmp_path, [30, 3, 8, 50])
    count = sum(max(0, len(s) - 7) for s in shards)
    draws = np.random.RandomState(1337).randint(0, count, 65536)
    ranks = [GPTDataLoader(CONFIG, None, tmp_path, True, rank=r, world_size=world) for r in range(world)]
    for step in range(15):
        for rank, one in enumerate(ranks):
            first = (step * world + rank) * 4
            rows = torch.tensor(reference(shards, draws[first : first + 4], 7))
            mask = (rows[:, 1:] % 3 == 0).float()
            got = one.get_batch()
            assert same(got, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), mask))
            assert all(t.is_contiguous() for t in got)


def test_every_window_is_equally_likely(tmp_path: Path) -> None:
    shards = flat_set(tmp_path, [9, 12, 8], masks=False)
    made = GPTDataLoader({"batch_size": 1000, "block_size": 7}, None, tmp_path)
    counts: dict[int, int] = {}
    for _ in range(30):
        for first in made.get_batch()[0][:, 0].tolist():
            counts[first] = counts.get(first, 0) + 1
    assert sorted(counts) == [int(s[i]) for s in shards for i in range(len(s) - 7)]
    assert max(counts.values()) < 1.1 * min(counts.values())


def test_the_seed_of_the_draws_is_the_configs(tmp_path: Path) -> None:
    shards = flat_set(tmp_path, [40], masks=False)
    made = GPTDataLoader({**CONFIG, "epoch_seed": 5}, None, tmp_path)
    draws = np.random.RandomState(5).randint(0, 33, 65536)[:4]
    assert made.get_batch()[0].tolist() == [row[:-1] for row in reference(shards, draws, 7)]


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


def test_a_policy_is_refused(tmp_path: Path) -> None:
    flat_set(tmp_path, [30])
    with pytest.raises(ConfigError, match="policy 'assistant' chooses what is trained in episodes"):
        GPTDataLoader({**CONFIG, "policy": "assistant"}, None, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "wrong length"])
def test_masks_that_cannot_be_had(tmp_path: Path, damage: str) -> None:
    flat_set(tmp_path, [30, 40])
    mask = tmp_path / "train/part1_mask.bin"
    mask.unlink() if damage == "missing" else mask.write_bytes(b"\0" * 160)
    asked = {**CONFIG, "use_loss_mask": True}
    for make in (
        lambda: GPTDataLoader(CONFIG, None, tmp_path, use_loss_mask=True),
        lambda: GPTDataLoader(asked, None, tmp_path),
        lambda: make_loader(asked, tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"part1_mask.*every token would be trained"):
            make()
    assert len(GPTDataLoader(CONFIG, None, tmp_path).get_batch()) == 2
    flat_set(tmp_path / "whole", [30, 40])
    assert len(GPTDataLoader(asked, None, tmp_path / "whole").get_batch()) == 3, "the config asks for masks"


def test_faults_at_opening(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        GPTDataLoader(CONFIG, None, tmp_path / "nowhere")
    (tmp_path / "empty/train").mkdir(parents=True)
    with pytest.raises(FormatError, match="empty split"):
        GPTDataLoader(CONFIG, None, tmp_path / "empty")
    flat_set(tmp_path / "short", [7, 3])
    with pytest.raises(FormatError, match="block_size \\+ 1 = 8"):
        GPTDataLoader(CONFIG, None, tmp_path / "short")
    flat_set(tmp_path / "odd", [30])
    (tmp_path / "odd/train/part0.bin").write_bytes(b"\0" * 33)
    with pytest.raises(FormatError, match="multiple"):
        GPTDataLoader(CONFIG, None, tmp_path / "odd")
    flat_set(tmp_path / "orphan", [30])
    (tmp_path / "orphan/train/other_mask.bin").write_bytes(b"\0" * 4)
    with pytest.raises(FormatError, match=r"other\.bin"):
        GPTDataLoader(CONFIG, None, tmp_path / "orphan")


SCRIPT = """
import sys, json
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {"chatmill.load.episodes", "chatmill.load.episode_rows",
                    "chatmill.store.episodes", "chatmill.store.episode_shard", "chatmill.store.episode_writer"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from chatmill.load.token_stream import make_loader
made = make_loader({"batch_size": 4, "block_size": 7, "use_loss_mask": True}, sys.argv[1])
print(json.dumps([[t.tolist() for t in made.get_batch()] for _ in range(5)]))
"""


def test_same_batches_whether_or_not_episode_support_is_imported(tmp_path: Path) -> None:
    write_set(tmp_path, items(30, low=8), shards=2)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    without = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name in ("chatmill.load.episodes", "chatmill.store.episode_writer"):
        importlib.import_module(name)
    made = make_loader({"batch_size": 4, "block_size": 7, "use_loss_mask": True}, tmp_path)
    assert [[t.tolist() for t in made.get_batch()] for _ in range(5)] == without
    assert len(without) == 5
    assert len(without[0]) == 3
