"""Episodes longer than a row: nothing is cut without a word, and what is lost is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load import episode_rows
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episode_writer import EpisodeWriter
from tests.load.sets import PAD, Item, items, write_set

CONFIG = {"batch_size": 2, "block_size": 8, "pad_token_id": PAD, "use_loss_mask": True, "epoch_shuffle": False}
TRAIN = [
    Item(ids=[1, 2, 3], weights=[0, 1, 1]),
    Item(ids=list(range(10, 30)), weights=[0] * 5 + [1] * 15),  # 20 tokens: 4 of 15 trained ones fit
    Item(ids=list(range(30, 39)), weights=[1] * 9),
    Item(ids=list(range(40, 60)), weights=[0] * 19 + [1]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path, TRAIN)
    return tmp_path


def test_a_shorter_max_length_is_an_error(folder: Path) -> None:
    for pack in (False, True):
        with pytest.raises(DataError, match=r"2 of 4 documents are longer than a row of 9 tokens.*longest has 20"):
            to_hf_dataset(folder, max_length=9, pack=pack)
    assert len(to_hf_dataset(folder, max_length=20)) == 4


@pytest.mark.parametrize("pack", [False, True])
def test_loaders_cut_as_the_format_says_and_warn(folder: Path, caplog: pytest.LogCaptureFixture, pack: bool) -> None:
    loader = GPTEpisodeDataLoader(CONFIG, None, folder, pack=pack)
    assert [r.levelno for r in caplog.records if "and are cut" in r.message] == [logging.WARNING]
    assert "2 of 4 episodes are longer than a row of 9 tokens (the longest has 20) and are cut: 22 of" in caplog.text
    report = loader.data_report()
    assert (report["episodes_cut"], report["tokens_left_out"], report["trained_tokens_left_out"]) == (2, 22, 12)
    assert "Give block_size=19 or more" in caplog.text
    caplog.clear()
    fits = GPTEpisodeDataLoader({**CONFIG, "block_size": 19}, None, folder, pack=pack)
    assert "lost" not in caplog.text
    assert fits.data_report()["trained_tokens_left_out"] == 0


@pytest.mark.parametrize("shards", [0, 3])
def test_counts_equal_the_slow_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    train = items(60, high=40)
    write_set(tmp_path, train, shards=shards)
    monkeypatch.setattr(episode_rows, "TOKENS_AT_A_TIME", 50)  # many groups
    report = GPTEpisodeDataLoader(CONFIG, None, tmp_path).data_report()
    long = [item for item in train if len(item.ids) > 9]
    assert report["trained_tokens_left_out"] == sum(weight > 0 for item in long for weight in item.weights[9:]) > 100
    assert report["tokens_left_out"] == sum(len(item.ids) - 9 for item in long)
    plain: Any = {**CONFIG, "use_loss_mask": False}
    report = GPTEpisodeDataLoader(plain, None, tmp_path).data_report()
    assert report["trained_tokens_left_out"] == report["tokens_left_out"]


def test_a_policy_decides_what_is_lost(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([5, 6, 7, 8], [1, 1, 1, 1], kinds=[26, 34, 34, 37])
    loader = GPTEpisodeDataLoader({**CONFIG, "block_size": 1}, None, tmp_path, policy="assistant")
    assert loader.data_report()["trained_tokens_left_out"] == 2
