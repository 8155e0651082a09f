"""`export --to hf --hub`: a folder that the datasets library opens by itself, with a card that says how it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from tests.export.sets import built, cut, documents_of


def test_the_folder_is_a_dataset_repository(tmp_path: Path) -> None:
    import datasets

    folder = built(tmp_path / "a")
    result = export_dataset(folder, "hf", tmp_path / "out", hub=True, shard_tokens=20_000)
    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.parquet"))
    count = sum(name.startswith("data/train-") for name in names)
    assert names[0] == f"data/train-00000-of-{count:05d}.parquet"
    opened = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert sorted(opened) == ["train", "val"]
    for split in ("train", "val"):
        rows = [row for row in opened[split]]  # noqa: C416
        found = [one for row in rows for one in cut(row["input_ids"], row["labels"], [0])]
        assert found == documents_of(folder, split)
    assert verify_export(tmp_path / "out").passed
    _, head, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    files = yaml.safe_load(head)["configs"][0]["data_files"]
    assert files == [{"split": s, "path": f"data/{s}-*.parquet"} for s in ("train", "val")]
    manifest = json.loads(body.split("```json\n")[1].split("```")[0])
    assert manifest["fingerprint"] == json.loads((folder / "manifest.json").read_text())["fingerprint"]
    assert manifest["template"]["name"] == "chatml"
    assert f"| train | {result.splits['train']['rows']:,} |" in body
    assert result.config == f"hf upload USER/NAME {tmp_path / 'out'} --repo-type dataset"
    assert json.loads((tmp_path / "out" / "export.json").read_text())["options"]["hub"] is True


@pytest.mark.parametrize("hub", [True, False])
def test_one_split_alone(tmp_path: Path, hub: bool) -> None:
    folder = built(tmp_path / "a")
    export_dataset(folder, "hf", tmp_path / "out", hub=hub, split="val")
    assert bool(list((tmp_path / "out").glob("data/val-*"))) == hub
    assert not list((tmp_path / "out").rglob("train*"))
