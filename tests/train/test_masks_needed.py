"""A run that is to train on masks stops where they are missing or cut; the loaders alone warn, as spec 4 says."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.cli.train_data import open_data
from chatmill.cli.train_recipe import read_recipe
from chatmill.errors import ChatmillError, ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.store.episode_writer import EpisodeWriter
from tests.load.sets import PAD, items, write_set
from tests.train.command import run_command


def opened(folder: Path, data: str = "") -> Any:
    recipe = folder.parent / "r.yaml"
    recipe.write_text(
        f"out: {folder.parent / 'out'}\nmodel: {{vocab_size: 64, layers: 1, hidden: 16, heads: 2}}\n"
        f"data: {{dataset: {folder}, batch_size: 2, block_size: 8, overflow: cut, pad_token_id: {PAD}{data}}}\n"
        "train: {steps: 1}\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return open_data(read_recipe(recipe, {}))[0]


def cut(path: Path) -> None:
    """Put a shorter file in its place: a loader of before may be reading ahead, and has the old one mapped."""
    shorter = path.with_suffix(".shorter")
    shorter.write_bytes(path.read_bytes()[:-1])
    shorter.replace(path)


def flat(folder: Path) -> Path:
    """A token stream with masks."""
    (folder / "train").mkdir(parents=True)
    np.arange(100, dtype="<u4").tofile(folder / "train" / "a.bin")
    np.ones(100, dtype="u1").tofile(folder / "train" / "a_mask.bin")
    return folder


def sharded(folder: Path) -> Path:
    return write_set(folder, items(12), items(6, seed=1), shards=2)


@pytest.mark.parametrize("data", ["", ", use_loss_mask: true"], ids=["default", "asked for"])
@pytest.mark.parametrize(
    ("make", "damage", "says"),
    [
        (sharded, lambda f: (f / "train/shard_00001/mask.bin").unlink(), "mask.bin is missing"),
        (sharded, lambda f: cut(f / "train/shard_00000/mask.bin"), "bytes for"),
        (sharded, lambda f: cut(f / "val/shard_00000/mask.bin"), "bytes for"),
        (sharded, lambda f: [p.unlink() for p in (f / "val").rglob("mask.bin")], "there is no mask.bin"),
        (flat, lambda f: cut(f / "train/a_mask.bin"), "bytes for"),
    ],
)
def test_a_missing_or_cut_mask_stops_a_run(tmp_path: Path, make: Any, damage: Any, says: str, data: str) -> None:
    folder = make(tmp_path / "set")
    assert len(opened(folder, ", pack: false" + data).get_batch("train")) == 3
    damage(folder)
    with pytest.raises(ChatmillError, match=says) as caught:
        opened(folder, ", pack: false" + data)
    assert "use_loss_mask: false" in str(caught.value), "the way out"
    assert opened(folder, ", pack: false, use_loss_mask: false") is not None


def test_damage_of_other_files_is_no_reason_to_go_without_masks(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "set")
    cut(folder / "train/shard_00000/tokens.bin")
    with pytest.raises(ChatmillError, match=r"tokens\.bin") as caught:
        opened(folder, ", pack: false, use_loss_mask: true")
    assert "use_loss_mask: false" not in str(caught.value)


@pytest.mark.parametrize("make", [sharded, flat])
def test_a_set_without_masks_stops_only_a_run_that_asks_for_them(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "set")
    for path in folder.rglob("*mask.bin"):
        path.unlink()
    assert len(opened(folder, ", pack: false").get_batch("train")) == 2
    with pytest.raises(ConfigError, match=r"masks are asked for and cannot be had: .*use_loss_mask: false"):
        opened(folder, ", pack: false, use_loss_mask: true")


def test_masks_that_the_manifest_names_and_that_are_all_gone_stop_a_run(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "set", "train") as writer:
        for item in items(6):
            writer.append(np.array(item.ids, dtype=np.uint32), np.array(item.weights))
    assert len(opened(tmp_path / "set", ", pack: false").get_batch("train")) == 3
    for path in (tmp_path / "set").rglob("mask.bin"):
        path.unlink()
    with pytest.raises(ChatmillError, match="mask"):
        opened(tmp_path / "set")


def test_the_command_ends_with_one_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "set")
    opened(folder)
    cut(folder / "train/shard_00000/mask.bin")
    result = run_command("train", tmp_path / "r.yaml")
    assert result.returncode == 2
    assert "mask.bin" in result.stderr
    assert "use_loss_mask: false" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_loaders_alone_warn(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "set")
    shutil.rmtree(folder / "val")
    cut(folder / "train/shard_00000/mask.bin")
    config = {"batch_size": 2, "block_size": 8, "pad_token_id": PAD, "use_loss_mask": True}
    with pytest.warns(UserWarning, match="masks are asked for and cannot be had"):
        loader = GPTEpisodeDataLoader(config, dataset_dir=folder)
    assert len(loader.get_batch("train")) == 2
