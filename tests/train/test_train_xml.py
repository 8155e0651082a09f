"""The XML config of the loaders drives `chatmill train`: the same loader, and everything else of a recipe."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.cli.train_data import open_data
from chatmill.cli.train_recipe import read_recipe
from chatmill.errors import ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.make import make_loader
from chatmill.load.token_stream import GPTDataLoader
from tests.load.sets import same, write_set
from tests.train.test_trainer import PAD, small_items

CONFIG = """<config>
  <out>OUT</out>
  <model><layers>1</layers><hidden>16</hidden><heads>2</heads><vocab_size>128</vocab_size><norm_eps>1e-5</norm_eps></model>
  <training>
    <batch_size>4</batch_size> <block_size>12</block_size> <dataset_dir>SET</dataset_dir>
    <pad_token_id>96</pad_token_id> <use_loss_mask>true</use_loss_mask>
    <learning_rate>1e-3</learning_rate> <steps>3</steps> <log_every>1</log_every> <flavour>mint</flavour>
    MORE
  </training>
  <other>left alone</other>
</config>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path / "set", small_items(21), small_items(6, seed=1))
    return tmp_path


def written(folder: Path, more: str = "") -> Path:
    path = folder / "config.xml"
    path.write_text(
        CONFIG.replace("OUT", str(folder / "run")).replace("SET", str(folder / "set")).replace("MORE", more)
    )
    return path


EPISODES = "<dataset_mode>sft_episode</dataset_mode>"


@pytest.mark.filterwarnings("ignore:.*not options of the loaders")
@pytest.mark.parametrize(
    "more",
    [
        "",
        EPISODES,
        EPISODES + "<batch_sampling_mode>random</batch_sampling_mode><epoch_seed>5</epoch_seed>",
        EPISODES + "<epoch_shuffle>false</epoch_shuffle><epoch_drop_last>false</epoch_drop_last>",
        EPISODES + "<pack>true</pack><packing_strategy>first_fit</packing_strategy>",
        EPISODES + "<episode_min_tokens>6</episode_min_tokens><val><batch_size>2</batch_size></val>",
    ],
)
def test_the_loader_is_the_one_that_make_loader_gives(folder: Path, more: str) -> None:
    path = written(folder, more)
    given, _, _ = open_data(read_recipe(path, {}))
    wanted = make_loader(path)
    assert type(given) is type(wanted) is (GPTEpisodeDataLoader if more else GPTDataLoader)
    for split in ("train", "val"):
        for _ in range(7):
            assert same(tuple(given.get_batch(split)), tuple(wanted.get_batch(split)))


@pytest.mark.filterwarnings("ignore:.*not options of the loaders")
def test_the_command_trains_by_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chatmill.train")
    done = CliRunner().invoke(app, ["train", str(written(folder, EPISODES)), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["outcome"], said["step"]) == ("finished", 3)
    assert "not used: flavour" in caplog.text
    stored = json.loads((folder / "run" / "run.json").read_text())
    assert stored["train"]["learning_rate"] == 1e-3
    assert stored["data"]["dataset_mode"] == "sft_episode"
    assert stored["model"]["norm_eps"] == 1e-5


def test_sections_of_a_recipe_may_be_beside_it_and_the_environment_counts(folder: Path) -> None:
    path = folder / "bare.xml"
    path.write_text("<training><batch_size>4</batch_size><block_size>12</block_size></training>")
    with pytest.raises(ConfigError, match="--out"):
        read_recipe(path, {})
    read = read_recipe(path, {"CHATMILL_BATCH_SIZE": "2"}, out=folder / "o", dataset=folder / "set")
    assert (read.out, read.data.dataset, read.data.batch_size) == (folder / "o", str(folder / "set"), 2)
    path.write_text(
        "<config><out>o</out><train><epochs>2</epochs></train><data><isolate>false</isolate></data>"
        "<training><batch_size>4</batch_size><block_size>12</block_size><device>cpu</device></training></config>"
    )
    read = read_recipe(path, {})
    assert (read.train.epochs, read.train.device, read.data.isolate, read.data.pack) == (2, "cpu", False, False)
    path.write_text(
        "<config><train>5</train><training><batch_size>4</batch_size><block_size>2</block_size></training></config>"
    )
    with pytest.raises(ConfigError, match="<train> must hold elements"):
        read_recipe(path, {})


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("dataset_mode: token_stream", GPTDataLoader),
        ("batch_sampling_mode: random", GPTEpisodeDataLoader),
    ],
)
def test_both_modes_are_reachable_from_yaml(folder: Path, options: str, kind: Any) -> None:
    path = folder / "r.yaml"
    path.write_text(
        f"out: a\ndata: {{dataset: {folder / 'set'}, batch_size: 2, block_size: 8, overflow: cut, {options}, "
        f"pad_token_id: {PAD}}}"
    )
    loader, _, _ = open_data(read_recipe(path, {}))
    assert type(loader) is kind
    if kind is GPTEpisodeDataLoader:
        assert loader.config.batch_sampling_mode == "random"
    assert len(loader.get_batch()) >= 3


def test_pack_and_policy_may_be_in_a_config(folder: Path) -> None:
    config = {"batch_size": 2, "block_size": 16, "pad_token_id": PAD, "pack": True, "packing_strategy": "greedy"}
    loader = GPTEpisodeDataLoader(config, None, folder / "set")
    assert loader.config.packing_strategy == "greedy"
    with pytest.raises(ConfigError, match="needs the kinds"):
        GPTEpisodeDataLoader(config | {"policy": "assistant"}, None, folder / "set")
    flat = folder / "flat" / "train"
    flat.mkdir(parents=True)
    (flat / "a.bin").write_bytes(bytes(400))
    path = folder / "r.yaml"
    for data, says in (("dataset_mode: sft_episode", "no episodes.idx"), ("policy: assistant", "by episode")):
        path.write_text(f"out: a\ndata: {{dataset: {folder / 'flat'}, block_size: 8, {data}}}")
        with pytest.raises(ConfigError, match=says):
            open_data(read_recipe(path, {}))
