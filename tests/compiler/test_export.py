"""Exports: round trips give the same bytes, other libraries read the same rows, and what is lost is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chatmill.core.checksums import Hash
from chatmill.core.publish import StorageError
from chatmill.errors import ConfigError, DataError, FormatError, UnknownNameError
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.export.registry import TARGETS
from chatmill.pack.plan import Plan
from chatmill.store import split as split_module
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import here
from tests.export.sets import CAPACITY, built
from tests.faults import active


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = built(tmp_path_factory.mktemp("built") / "episodes", shard_bytes=30_000)
    assert len(EpisodeDataset(out).shards) > 2
    return out


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "rows", pack={"length": CAPACITY}, shard_bytes=32 << 20)


def plan_of(folder: Path, split: str = "train") -> Plan:
    found = EpisodeDataset(folder, split).plan
    assert found is not None
    return found


def files_of(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): Hash.SHA256.of_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


# --- hf -----------------------------------------------------------------------------------------------------------


def labels_of(ids: list[int], weights: Any) -> list[int]:
    return [i if w > 0 else -100 for i, w in zip(ids, weights.tolist(), strict=True)]


def test_hf_rows_are_the_episodes(episodes: Path, tmp_path: Path) -> None:
    import datasets

    result = export_dataset(episodes, "hf", tmp_path / "out")
    assert result.not_held == ()
    opened = datasets.load_from_disk(str(tmp_path / "out"))
    assert list(opened) == ["train", "val"]
    for split, rows in opened.items():
        wanted = facts(episodes, split)
        assert [{name: row[name] for name in wanted[0]} for row in rows] == wanted
        assert rows["labels"][:] == [
            labels_of(episode.ids.tolist(), episode.weights) for episode in EpisodeDataset(episodes, split)
        ]
        same = to_hf_dataset(episodes, split)
        assert same["input_ids"][:] == rows["input_ids"][:]
        assert same["labels"][:] == rows["labels"][:]


def facts(dataset: Path, split: str) -> list[dict[str, Any]]:
    """What each row says of its episode, besides what is trained."""
    found = [
        {
            "input_ids": episode.ids.tolist(),
            "kinds": episode.kinds.tolist(),  # type: ignore[union-attr]
            "record_id": episode.record_id,
            "source": episode.source,
            "turns": episode.turns,
        }
        for episode in EpisodeDataset(dataset, split)
    ]
    assert len(found) > 20
    return found


def test_hf_rows_are_the_packed_rows(rows: Path, tmp_path: Path) -> None:
    import datasets

    result = export_dataset(rows, "hf", tmp_path / "out", split="train")
    found = datasets.load_from_disk(str(tmp_path / "out"))
    names = ["input_ids", "labels", "kinds", "document_starts", "documents", "seq_lengths"]
    names += ["record_id", "source", "turns"]
    assert found.column_names == names
    stored, plan = EpisodeDataset(rows), plan_of(rows)
    assert len(found) == len(plan) > 3
    for number, row in enumerate(found):
        episodes = [stored[episode] for episode in plan.bin(number).tolist()]
        assert row["documents"] == [episode.index for episode in episodes]
        assert row["record_id"] == [episode.record_id for episode in episodes]
        assert row["input_ids"] == [token for episode in episodes for token in episode.ids.tolist()]
        assert row["seq_lengths"] == [len(episode) for episode in episodes]
        assert row["document_starts"] == np.cumsum([0, *row["seq_lengths"][:-1]]).tolist()
        labels = [labels_of(episode.ids.tolist(), episode.weights) for episode in episodes]
        assert row["labels"] == [label for one in labels for label in (-100, *one[1:])]
    assert any(f"{CAPACITY:,} tokens, is in export.json" in sentence for sentence in result.not_held)
    assert result.manifest["source"]["layout"] == {"train": "rows"}


def test_packing_on_the_way_gives_the_rows_of_a_packed_build(episodes: Path, rows: Path, tmp_path: Path) -> None:
    export_dataset(episodes, "parquet", tmp_path / "a", max_length=CAPACITY)
    export_dataset(rows, "parquet", tmp_path / "b")
    for split in ("train", "val"):
        a, b = (pq.read_table(tmp_path / name / split) for name in "ab")
        assert a.equals(b)
        assert len(a) == len(plan_of(rows, split))
    export_dataset(rows, "parquet", tmp_path / "c", max_length=2 * CAPACITY)
    assert len(pq.read_table(tmp_path / "c" / "train")) < len(plan_of(rows))


@pytest.fixture(scope="module")
def fractional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fractional") / "a"
    with EpisodeWriter(out, "train", shard_tokens=6) as writer:
        writer.append([5, 6, 7, 8], [1, 0, 1, 1])
        writer.append([9, 10, 11], [0.25, 0, 1])
        writer.append([12, 13], [0, 3])
    return out


def test_weights_that_labels_cannot_hold(fractional: Path, tmp_path: Path) -> None:
    import datasets

    result = export_dataset(fractional, "hf", tmp_path / "hf", split="train")
    rows = datasets.load_from_disk(str(tmp_path / "hf"))
    assert rows["loss_weights"][:] == [[1, 0, 1, 1], [0.25, 0, 1], [0, 3]]
    assert rows["labels"][:] == [[5, -100, 7, 8], [9, -100, 11], [-100, 13]]
    assert [s for s in result.not_held if "2 tokens have another weight than 0 and 1" in s]
    packed = export_dataset(fractional, "hf", tmp_path / "packed", max_length=9)
    assert any("2 trained tokens are the first of a document" in s for s in packed.not_held)


# --- parquet ------------------------------------------------------------------------------------------------------


def test_parquet_holds_everything(episodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "BATCH_TOKENS", 10_000)
    result = export_dataset(episodes, "parquet", tmp_path / "out", shard_tokens=5_000)
    assert result.not_held == ()
    names = sorted(path.name for path in (tmp_path / "out" / "train").iterdir())
    assert names[:2] == ["shard_00000.parquet", "shard_00001.parquet"]
    files = [pq.read_table(tmp_path / "out" / "train" / name)["input_ids"].to_pylist() for name in names]
    assert all(len(rows) == 1 or sum(map(len, rows)) <= 5_000 for rows in files), "also where a batch has more"
    for split in ("train", "val"):
        rows = pq.read_table(tmp_path / "out" / split).to_pylist()
        masks = [episode.weights.tolist() for episode in EpisodeDataset(episodes, split)]  # type: ignore[union-attr]
        assert [row.pop("loss_mask") for row in rows] == masks
        assert rows == facts(episodes, split)


def test_parquet_holds_other_weights(fractional: Path, tmp_path: Path) -> None:
    assert export_dataset(fractional, "parquet", tmp_path / "out").not_held == ()
    table = pq.read_table(tmp_path / "out" / "train")
    assert table.column_names == ["input_ids", "loss_mask", "weights"]
    assert table["weights"].to_pylist() == [[1, 0, 1, 1], [0.25, 0, 1], [0, 3]]
    assert table["loss_mask"].to_pylist() == [[1, 0, 1, 1], [1, 0, 1], [0, 1]]


# --- the whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [name for name in sorted(TARGETS) if not name.startswith("trl-")])
def test_every_target_gives_the_same_bytes_again(episodes: Path, tmp_path: Path, to: str) -> None:
    options: dict[str, Any] = {"levanter": {"packing_strategy": "alone"}, "olmo-core": {"eod_id": 0}}.get(to, {})
    options |= {"max_length": CAPACITY} if to in ("levanter", "torchtitan") else {}
    first = export_dataset(episodes, to, tmp_path / "one", **options)
    export_dataset(episodes, to, tmp_path / "two", **options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    manifest = json.loads((tmp_path / "one" / "export.json").read_text())
    assert manifest == first.manifest
    built = json.loads((episodes / "manifest.json").read_text())
    assert manifest["source"]["fingerprint"] == built["fingerprint"]
    assert manifest["source"]["about"]["tokenizer"] == built["tokenizer"]
    found = {k: v for k, v in files_of(tmp_path / "one").items() if k != "export.json"}
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == found
    stored = EpisodeDataset(episodes)
    assert first.splits["train"]["documents"] == len(stored)
    assert first.splits["train"]["tokens"] == stored.tokens == built["splits"]["train"]["tokens"]
    assert first.splits["train"]["trained"] == int(stored.column("trained").sum())
    assert not list(tmp_path.glob(".tmp-*"))


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("tfrecord", {}, UnknownNameError, r"Known: hf, trl, .*parquet, megatron, .*olmo-core"),
    ("parquet", {"max_length": 500}, DataError, r"longer than a row of 500 tokens: \w+-\d+ \([\d,]+\), .* an overflow"),
    ("parquet", {"max_length": CAPACITY, "packing_strategy": "best"}, UnknownNameError, "packing strategy"),
    ("parquet", {"packing_strategy": "greedy"}, ConfigError, r"packed anew.*give max_length"),
    ("parquet", {"packing_strategy": "gredy"}, ConfigError, r"packed anew.*give max_length"),
    ("parquet", {"eod_id": 1}, ConfigError, "exports to megatron"),
    ("megatron", {"max_length": 100}, ConfigError, "sequence_length"),
    ("megatron", {"eod_id": 2**31}, ConfigError, "int32"),
    ("hf", {"split": "test"}, UnknownNameError, "unknown split 'test'"),
]


@pytest.mark.parametrize(("to", "options", "error", "words"), REFUSED)
def test_what_is_refused(
    episodes: Path, tmp_path: Path, to: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        export_dataset(episodes, to, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_refused(episodes: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside the dataset"):
        export_dataset(episodes, "hf", episodes / "hf")
    with pytest.raises(FormatError, match="no such folder"):
        export_dataset(tmp_path / "none", "hf", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        export_dataset(episodes, "hf", tmp_path / "out")


def test_a_full_disk_is_one_clear_error(episodes: Path, tmp_path: Path) -> None:
    with active("before:/out$:1:enospc"), pytest.raises(StorageError, match=r"out: cannot .*No space left"):
        export_dataset(episodes, "parquet", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command(episodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = here("export", episodes, "--to", "skyrl", "--out", "here", columns=100)
    assert done.returncode == 0, done.stderr
    assert "Not held by this export (skyrl):" in done.stdout
    assert "kinds: SkyRL reads none of them" in done.stdout
    done = here("export", episodes, "--to", "parquet", "--split", "val", "--json", "--out", "here-parquet")
    manifest = json.loads(done.stdout)
    assert (manifest["not_held"], list(manifest["splits"])) == ([], ["val"])
    assert manifest["source"]["about"]["template"]["name"] == "chatml"
