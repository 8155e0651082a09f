"""Datasets from before xxh128 state the sha256 of every file: they open, are checked and verified as new ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import FormatError
from chatmill.prove.verify import verify
from chatmill.store.episode_layout import MANIFEST as SPLIT_MANIFEST
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import receipt_bytes, sealed
from tests.compiler.builds import chats, plain_recipe, write_jsonl
from tests.damage import flip
from tests.hashes import old_entry


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A packed dataset whose three kinds of manifests state sha256."""
    recipe = plain_recipe(write_jsonl(tmp_path / "chats.jsonl", chats(40)), pack={"length": 2048})
    folder = tmp_path / "data"
    run_build({**recipe, "packing": {"max_length": 2048, "overflow": "drop"}, "shard_bytes": 8_000}, folder, workers=0)
    for name in (SPLIT_MANIFEST, "pack/plan.json"):
        path = folder / "train" / name
        content = json.loads(path.read_bytes())
        for place, files in _tables(path.parent, content):
            files |= {file: old_entry((place / file).read_bytes()) for file in files}
        path.write_bytes(receipt_bytes(content))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"] = {name: old_entry((folder / name).read_bytes()) for name in manifest["files"]}
    (folder / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))
    assert not [path for path in folder.rglob("*.json") if b"xxh128" in path.read_bytes()]
    return folder


def _tables(folder: Path, content: dict) -> list[tuple[Path, dict]]:  # type: ignore[type-arg]
    shards = content.get("shards")
    if shards is None:
        return [(folder, content["files"])]
    return [(folder / shard["name"], shard["files"]) for shard in shards]


def test_they_are_sound(old: Path) -> None:
    report = verify(old, deep=True)
    assert not report.findings
    dataset = EpisodeDataset(old, check=True)
    assert len(dataset.shards) > 1
    assert sum(len(episode) for episode in dataset) == dataset.tokens


def test_damage_in_them_is_found(old: Path) -> None:
    shard = EpisodeDataset(old).shards[0].folder
    flip(shard / "tokens.bin", 5)
    (finding,) = [f for f in verify(old).findings if "were changed" in f.message]
    assert "its sha256 is" in finding.message
    with pytest.raises(FormatError, match=r"tokens\.bin: sha256 .*bytes were changed"):
        list(EpisodeDataset(old, check=True))
