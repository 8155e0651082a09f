"""Rows that the adapters give: those of the export, read one by one; and what is refused."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chatmill.errors import ChatmillError, ConfigError, DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.trainers.rows import SplitRows
from chatmill.trainers.source import dataset_of, split_of
from tests.compiler.builds import chats, plain_recipe, write_jsonl
from tests.files.stores_for_tests import put_folder, s3_server
from tests.trainers.sets import trees, weighted_items, weighted_set


def rows_of(dataset: Path, **options: Any) -> SplitRows:
    return SplitRows(dataset, trainer="a trainer", **options)


@pytest.mark.filterwarnings("ignore:.*another weight")
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_those_of_the_export(packed: bool, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    length = 30 if packed else None
    rows = rows_of(folder, max_length=length)
    exported = to_hf_dataset(folder, max_length=length, packed=packed)
    assert len(rows) == len(exported) > 5
    assert (max(len(row["seq_lengths"]) for row in rows) > 2) == packed
    for number, wanted in enumerate(exported):
        row = rows[number]
        assert row["input_ids"].tolist() == wanted["input_ids"]
        firsts = np.cumsum([0, *row["seq_lengths"][:-1]])
        labels = np.array(wanted["labels"])
        labels[firsts] = -100
        assert row["labels"].tolist() == labels.tolist()
        weights = np.array(wanted["loss_weights"])
        weights[firsts] = 0
        assert row["loss_weights"].tolist() == weights.tolist()
        assert row["seq_lengths"].tolist() == wanted.get("seq_lengths", [len(labels)])
        assert rows.lengths[number] == len(labels)
    assert rows[-1]["input_ids"].tolist() == exported[len(rows) - 1]["input_ids"]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_rows_travel_to_other_processes(tmp_path: Path) -> None:
    rows = rows_of(weighted_set(tmp_path / "set", weighted_items()), max_length=30)
    again = pickle.loads(pickle.dumps(rows))
    assert len(again) == len(rows)
    assert again[3]["input_ids"].tolist() == rows[3]["input_ids"].tolist()


def test_trees_have_positions_and_ends(tmp_path: Path) -> None:
    folder = trees(tmp_path)
    rows, exported = rows_of(folder, max_length=700), to_hf_dataset(folder, packed=True, max_length=700)
    assert len(rows) == len(exported) > 1
    for row, wanted in zip(rows, exported, strict=True):
        for name in ("input_ids", "labels", "position_ids", "ends"):
            assert row[name].tolist() == wanted[name], name
    with pytest.raises(ConfigError, match="holds trees, and a trainer has no mask that keeps branches apart"):
        rows_of(folder, has_trees=False)


def test_rows_of_a_url_are_those_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trees(tmp_path)
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    with s3_server() as bucket:
        put_folder(folder, f"{bucket}/runs/set")
        here, there = rows_of(folder, max_length=700), rows_of(f"{bucket}/runs/set", max_length=700)
        assert len(there) == len(here) > 1
        # Workers of a loader are given the rows, and read them from the cache.
        for wanted, row in zip(here, pickle.loads(pickle.dumps(there)), strict=True):
            assert set(row) == set(wanted)
            for name, values in wanted.items():
                assert row[name].tolist() == values.tolist(), name

        # Trainers that name a dataset and its split by one text.
        assert split_of(f"{bucket}/runs/set/val") == (f"{bucket}/runs/set", "val")
        assert split_of(f"{bucket}/runs/set/") == (f"{bucket}/runs/set/", "train")
        # A recipe is built where it is: one at a URL is copied first.
        with pytest.raises(ChatmillError, match=r"mine\.yaml"):
            rows_of(f"{bucket}/runs/mine.yaml")


def test_what_a_trainer_cannot_take_is_refused(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    with pytest.raises(ConfigError, match="another weight than 0 and 1, and a trainer reads only trained or not"):
        rows_of(folder, has_weights=False)
    with pytest.raises(ConfigError, match="packed rows need max_length"):
        rows_of(folder, packed=True)
    with pytest.raises(DataError, match="longer than a row of 7 tokens"):
        rows_of(folder, max_length=7)


def test_a_recipe_is_built_once_and_another_one_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", chats(12))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump(plain_recipe(path)))
    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(dataset_of, [recipe] * 3))
    assert found == {tmp_path / "mine-built"}
    manifest = tmp_path / "mine-built" / "manifest.json"
    assert manifest.is_file()
    time = os.stat(manifest).st_mtime_ns
    assert len(rows_of(recipe)) == 12
    assert os.stat(manifest).st_mtime_ns == time
    write_jsonl(path, chats(13, seed=1))
    with pytest.raises(ConfigError, match="mine-built"):
        rows_of(recipe)
