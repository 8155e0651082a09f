"""LLaMA-Factory is given the pictures of rows, and to which document each belongs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import chatmill
from chatmill.errors import DataError
from tests.images.model_folders import picture, write_model

ROOT = Path(__file__).parents[2]


def built(folder: Path, pictures: dict[str, bytes], **more: Any) -> Path:
    write_model(folder / "model", "qwen3_vl")
    answer = {"role": "assistant", "content": "Yes."}
    rows = [{"messages": [{"role": "user", "content": "Hello"}, answer]}]
    for name, data in pictures.items():
        (folder / name).write_bytes(data)
        rows.append({"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": [name]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"sources": [{"path": str(folder / "chats.jsonl")}], "tokenizer": str(folder / "model"), **more}
    chatmill.build(recipe, folder / "built", workers=0)
    return folder / "built"


def test_rows_have_their_pictures_and_whose_they_are(tmp_path: Path) -> None:
    shown = {"a.png": picture(64, 200), "b.jpg": picture(120, 70, "JPEG")}
    data = built(tmp_path, shown, store_images=True)
    alone = chatmill.export_dataset(data, "llamafactory", tmp_path / "alone")
    assert "image_max_pixels: 178956970" in alone.config
    rows = datasets.load_from_disk(str(tmp_path / "alone"))["train"]
    by_name = {own["path"]: own["bytes"] for row in rows for own in row["images"]}
    assert by_name == shown
    chatmill.export_dataset(data, "llamafactory", tmp_path / "packed", max_length=600)
    (row,) = datasets.load_from_disk(str(tmp_path / "packed"))["train"]
    about = row["packing_params"]
    ends = np.array(about["sequence_boundaries"])
    assert ends[-1] == len(row["input_ids"]) == 601
    assert ends[-1] - ends[-2] == about["right_padding_length"]
    mask = np.array(row["attention_mask"])
    assert [set(mask[a:b].tolist()) for a, b in itertools.pairwise(ends)] == [{1}, {2}, {3}, {0}]
    pads = chatmill.load_tokenizer(str(tmp_path / "model")).control_ids["<|image_pad|>"]
    places = [(np.array(row["input_ids"])[a:b] == pads).any() for a, b in itertools.pairwise(ends)]
    assert about["image_subseq_ids"] == np.flatnonzero(places).tolist()
    order = [by_name[own["path"]] for own in row["images"]]
    assert order == [own["bytes"] for own in row["images"]]


@pytest.mark.parametrize(
    ("name", "data", "stores", "wrong"),
    [
        ("a.png", picture(64, 200), False, "--store-images"),
        ("a.jpg", picture(64, 200, "JPEG", 6), True, "turned by EXIF"),
        ("a.png", picture(20, 200), True, "side under 28"),
    ],
)
def test_what_llamafactory_would_show_otherwise_is_refused(
    name: str, data: bytes, stores: bool, wrong: str, tmp_path: Path
) -> None:
    made = built(tmp_path, {name: data}, store_images=stores)
    with pytest.raises(DataError, match=wrong):
        chatmill.export_dataset(made, "llamafactory", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.trainers
def test_its_own_collator_makes_the_same_batch(tmp_path: Path) -> None:
    package = ROOT / ".trainers" / "llamafactory"
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    command = [sys.executable, "-m", "tests.images.llamafactory_collator", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(package)])
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip().endswith("equal"), ran.stderr
