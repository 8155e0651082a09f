"""Datasets of packed blocks, which 0.1.0 could write: every way in is one clear error with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import FormatError
from chatmill.export.export import export_dataset
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.token_stream import GPTDataLoader
from chatmill.look.dataset import open_for_looking
from chatmill.prove.compare.diff import diff_datasets
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import receipt_bytes, sealed
from tests.compiler.builds import chats, plain_recipe, write_jsonl

CONFIG = {"batch_size": 1, "block_size": 8, "pad_token_id": 0}
WAYS_IN: dict[str, Callable[[Path], Any]] = {
    "verify": verify,
    "look": open_for_looking,
    "look_at_one_split": lambda folder: open_for_looking(folder / "train"),
    "diff": lambda folder: diff_datasets(folder, folder),
    "export": lambda folder: export_dataset(folder, "parquet"),
    "read": EpisodeDataset,
    "episode_loader": lambda folder: GPTEpisodeDataLoader(CONFIG, dataset_dir=folder),
    "token_stream": lambda folder: GPTDataLoader(CONFIG, dataset_dir=folder),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that says of itself what one of blocks did."""
    folder = tmp_path_factory.mktemp("old")
    run_build(plain_recipe(write_jsonl(folder / "chats.jsonl", chats(3))), folder / "built", workers=0)
    manifest = json.loads((folder / "built" / "manifest.json").read_bytes())
    manifest["recipe"]["format"] = "blocks"
    (folder / "built" / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))
    (folder / "built" / "train" / "episodes.json").rename(folder / "built" / "train" / "blocks.json")
    return folder / "built"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "exported"
    (folder / "train" / "shard_00000").mkdir(parents=True)
    (folder / "train" / "shard_00000" / "ids.u32").write_bytes(b"")
    (folder / "train" / "blocks.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", WAYS_IN)
@pytest.mark.parametrize("origin", ["built", "exported"])
def test_every_way_in_names_the_way_out(name: str, origin: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(origin)
    if (name, origin) == ("verify", "exported"):
        pytest.skip("verify takes what a build has finished")
    with pytest.raises(FormatError) as caught:
        WAYS_IN[name](folder)
    text = str(caught.value)
    assert "packed blocks, which this version no longer reads" in text
    assert "pack: {length: N}" in text
    assert "chatmill 0.1.0 can still read" in text
