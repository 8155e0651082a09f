"""Pictures of datasets and of rows for trainers, seen from another folder than that of the build."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

import chatmill
from chatmill.export.export import export_dataset
from chatmill.look.dataset import open_for_looking
from chatmill.look.viewer.opened import OpenedSplit, open_splits
from chatmill.look.viewer.thumbnails import thumbnail
from chatmill.store.named_paths import find_image_folder
from tests.images.model_folders import write_model

SIZES = ((64, 200), (120, 90))


def make_sets(home: Path) -> None:
    """Two pictures as episodes whose build was in `home`, and rows with stored bytes; each exported."""
    (home / "shots").mkdir()
    records = []
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (40 * number, 90, 200)).save(home / f"shots/{number}.png")
        messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": f"Number {number}."}]
        records.append(json.dumps({"messages": messages, "images": [f"shots/{number}.png"]}))
    (home / "chats.jsonl").write_text("\n".join(records))
    recipe = {
        "sources": [{"path": "chats.jsonl"}],
        "tokenizer": str(write_model(home / "qwen2_5_vl", "qwen2_5_vl")),
        "template": str(home / "qwen2_5_vl"),
    }
    chatmill.build(recipe, "built", workers=0)
    chatmill.build({**recipe, "store_images": True, "pack": {"length": 512}}, "stored", workers=0)
    export_dataset("built", "hf", "built-hf")
    export_dataset("stored", "hf", "stored-hf")


def opened(path: Path) -> OpenedSplit:
    return next(iter(open_splits(open_for_looking(path)).values()))


def test_pictures_are_shown_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.chdir(home)
    make_sets(home)
    monkeypatch.chdir(other)

    for name in ("built", "built-hf", "stored", "stored-hf"):
        split = opened(home / name)
        shown = []
        for number in range(len(split.split)):
            item = split.item(number)
            for which, picture in enumerate(item.pictures):
                with Image.open(io.BytesIO(thumbnail(split, number, which))) as image:
                    assert image.size == (picture.width, picture.height)
                assert picture.words.startswith(f"[image {picture.width}x{picture.height}, ")
                shown.append((picture.width, picture.height))
        assert sorted(shown) == sorted(SIZES), name

    # The line for the trainer names the folder, too, also where `.` means another one by now.
    recipe = {"sources": [{"path": "chats.jsonl"}]}
    assert find_image_folder(recipe, home / "built") == str(home)
    assert find_image_folder({**recipe, "images": "shots"}, home / "built") == str(home / "shots")
    assert find_image_folder({"sources": [{"path": "a/*.jsonl"}, {"path": "b/c.jsonl"}]}, home) is None
