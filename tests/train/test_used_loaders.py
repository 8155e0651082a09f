"""Loaders that were used before say so, and bad values are one clear error."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from chatmill.cli.train_recipe import read_recipe
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.make import make_loader
from chatmill.train.gpt import GPT
from chatmill.train.stream_blocks import StreamBlockLoader
from chatmill.train.trainer import fit
from tests.load.sets import write_set
from tests.train.test_resume_counts_data import blocks
from tests.train.test_trainer import loader_over, small_items
from tests.train.tiny import tiny_gpt


def test_a_used_stream_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = StreamBlockLoader(blocks(), batch_size=4, eos_id=0)
    loader.get_batch()
    with caplog.at_level(logging.WARNING, "chatmill.train"):
        assert fit(tiny_gpt(layers=1), loader, post_training=True).step == 5
    assert "was used before: 1 of its 6 batches were given" in caplog.text
    for options in ({"post_training": True}, {"steps": 3}, {"post_training": True, "out": tmp_path}):
        with pytest.raises(ConfigError, match="all of its 6 batches were given"):
            fit(tiny_gpt(layers=1), loader, **options)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "", "gpu0"])
def test_a_device_that_is_not_there_is_one_clear_error(device: str, tmp_path: Path) -> None:
    write_set(tmp_path, small_items(8))
    with pytest.raises(ConfigError, match=f"device is '{device}'"):
        fit(tiny_gpt(layers=1), loader_over(tmp_path), steps=1, device=device)
    config = {"batch_size": 4, "block_size": 16, "dataset_mode": "sft_episode", "pad_token_id": 1}
    if device:
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            make_loader(config, tmp_path, device=device)


def test_other_bad_values_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("out: a\n")
    for name, value in (("LEARNING_RATE", "nan"), ("PRECISION", "fp4"), ("COMPILE", "maybe"), ("BATCH_SIZE", "1.5")):
        with pytest.raises(ConfigError, match=rf"CHATMILL_{name}.*{name.lower()} is"):
            read_recipe(tmp_path / "r.yaml", {f"CHATMILL_{name}": value})
    with pytest.raises(UnknownNameError, match="sdpa"):
        GPT(tiny_gpt().config, attention="paged")
