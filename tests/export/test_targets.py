"""Functions in place of a target's name, what configs say, and trees: as trees or as the rows they are."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from chatmill.compiler.run import run_build
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError
from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.export.registry import TARGETS
from chatmill.export.targets import Export
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.prove.compare.diff import diff_datasets
from chatmill.store.documents import open_dataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.tree_rows import RowsOfTrees
from tests.cli.run import invoke
from tests.compiler.builds import thinking_chats, write_jsonl
from tests.pages import DOCS


def lines(export: Export) -> None:
    """Ids as lines of text: all that a target of one's own needs."""
    for split, rows in export.rows().items():
        with (export.folder / f"{split}.txt").open("w") as file:
            for batch in export.batches(split, rows):
                for start, end in pairwise(batch.token_offsets.tolist()):
                    file.write(" ".join(map(str, batch.documents.ids[start:end].tolist())) + "\n")
    export.say("masks are not kept")


def test_a_function_is_a_target_and_packed_rows_come_with_what_the_trainer_must_be_told(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "a", "train") as writer:
        writer.append([5, 6, 7], [0, 1, 1])
        writer.append([8, 9], [0, 1])
    result = export_dataset(tmp_path / "a", lines)
    assert result.directory == tmp_path / "a-lines"
    assert (result.directory / "train.txt").read_text() == "5 6 7\n8 9\n"
    assert result.not_held == ("masks are not kept",)
    assert result.splits["train"] == {"rows": 2, "documents": 2, "tokens": 5, "trained": 3}
    assert json.loads((result.directory / "export.json").read_text())["to"] == "lines"
    assert verify_export(result.directory).passed
    packed = export_dataset(tmp_path / "a", lines, tmp_path / "packed", max_length=5)
    assert (packed.directory / "train.txt").read_text() == "5 6 7 8 9\n"
    for to, said in (("trl", "SFTConfig("), ("hf", "TRL: SFTConfig(")):
        packed = export_dataset(tmp_path / "a", to, tmp_path / f"{to}-packed", max_length=8)
        assert packed.config.startswith(f"{said}padding_free=True, max_length=None)")
        alone = export_dataset(tmp_path / "a", to, tmp_path / f"{to}-alone")
        assert "padding_free" not in alone.config, "rows of one document need no such thing"


def test_docs_name_every_target() -> None:
    table = (DOCS / "commands" / "export.md").read_text().splitlines()
    row = next(line for line in table if line.startswith("| `--to`"))
    page = (DOCS / "trainers.md").read_text()
    assert [name for name in TARGETS if f"`{name}`" not in row or f"--to {name}" not in page] == []


# Trees.


class Special:
    eos_token_id = pad_token_id = 2


def build(folder: Path, name: str, chats: list[dict[str, Any]], **changes: Any) -> Path:
    source = {"path": str(write_jsonl(folder / f"{name}.jsonl", chats)), "name": "chats"}
    recipe = {"sources": [source], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    run_build({**recipe, **changes}, folder / name, workers=0)
    return folder / name


def whole_weights() -> list[dict[str, Any]]:
    chats = thinking_chats(20, seed=5)
    for message in (message for record in chats for message in record["messages"]):
        message.pop("weight", None)
    return chats


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("trees"), "trees", whole_weights(), expand="tree")


def targets(rows: Any) -> Counter[bytes]:
    """Every target with all before it."""
    found: Counter[bytes] = Counter()
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        for at in np.flatnonzero(np.array(labels) != IGNORE_INDEX).tolist():
            found[np.array(ids[: at + 1], dtype=np.int32).tobytes()] += 1
    return found


def test_hf_and_parquet_hold_trees(tmp_path: Path, built: Path) -> None:
    result = export_dataset(built, "hf", tmp_path / "hf", max_length=2000)
    assert any("rows are trees" in sentence for sentence in result.not_held)
    rows = datasets.load_from_disk(str(tmp_path / "hf"))["train"]
    assert {"input_ids", "labels", "position_ids", "ends"} <= set(rows.column_names)
    assert not {"seq_lengths", "document_starts"} & set(rows.column_names)
    direct = to_hf_dataset(built, max_length=2000, pack=True)
    collate = DataCollatorForCausalLM(Special(), model="sdpa")
    other = collate(list(direct))
    for name, value in collate(list(rows)).items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
    export_dataset(built, "parquet", tmp_path / "parquet")
    table = pq.read_table(next((tmp_path / "parquet").rglob("*.parquet")))
    assert {"position_ids", "ends", "loss_mask"} <= set(table.column_names)
    assert table.num_rows == 20


OPTIONS: dict[str, dict[str, Any]] = {
    "olmo-core": {"eod_id": 1},
    "levanter": {"max_length": 2000, "packing_strategy": "alone"},
}


@pytest.mark.parametrize("to", [name for name in TARGETS if name not in ("hf", "parquet") and name[:4] != "trl-"])
def test_other_formats_refuse_trees_and_take_their_rows(tmp_path: Path, built: Path, to: str) -> None:
    options = OPTIONS.get(to, {"max_length": 2000} if not TARGETS[to].no_rows else {})
    with pytest.raises(ConfigError, match="--trees expand"):
        export_dataset(built, to, tmp_path / "no", **options)
    result = export_dataset(built, to, tmp_path / "out", trees="expand", **options)
    assert any("times" in sentence for sentence in result.not_held)
    rows = RowsOfTrees(open_dataset(built).splits["train"])
    assert result.splits["train"]["documents"] == len(rows) > 20


def test_the_rows_of_trees_train_what_rows_per_turn_train(tmp_path: Path, built: Path) -> None:
    plain = build(tmp_path, "rows", whole_weights())
    for source, more in ((built, {"trees": "expand"}), (plain, {})):
        export_dataset(source, "hf", tmp_path / f"{source.name}-hf", **more)
    apart, rows = (datasets.load_from_disk(str(tmp_path / f"{name}-hf"))["train"] for name in ("trees", "rows"))
    assert {"position_ids", "ends"}.isdisjoint(apart.column_names)
    assert targets(apart) == targets(rows)
    assert sorted(map(len, apart["input_ids"])) == sorted(map(len, rows["input_ids"]))
    with pytest.raises(ConfigError, match="holds no trees"):
        export_dataset(plain, "hf", tmp_path / "no", trees="expand")


def test_diff_compares_rows_of_trees(tmp_path: Path, built: Path) -> None:
    same = diff_datasets(built, build(tmp_path, "again", whole_weights(), expand="tree"))
    assert same.equal
    assert same.totals_a.records > 20
    chats = whole_weights()
    chats[3]["messages"][0]["content"] += " really"
    changed = diff_datasets(built, build(tmp_path, "changed", chats, expand="tree"))
    rows = RowsOfTrees(open_dataset(built).splits["train"])
    assert changed.counts["ids"] == int((rows.trees_of(np.arange(len(rows))) == 3).sum())


def test_inspect_shows_the_row_of_a_branch(tmp_path: Path, built: Path) -> None:
    export_dataset(built, "parquet", tmp_path / "rows", trees="expand")
    rows = pq.read_table(next((tmp_path / "rows").rglob("*.parquet"))).to_pylist()
    expected = Counter((tuple(row["input_ids"]), sum(row["loss_mask"])) for row in rows)
    shown: Counter[tuple[tuple[int, ...], int]] = Counter()
    trees = open_dataset(built).splits["train"]
    for episode, branches in enumerate(trees.branches(np.arange(len(trees))).counts.tolist()):
        for branch in range(branches + 1):
            result = invoke("inspect", built, "--episode", episode, "--branch", branch, "--json")
            (document,) = json.loads(result.output)["documents"]
            ids = tuple(token for run in document["runs"] for token in run["ids"])
            shown[ids, document["trained"]] += 1
    assert shown == expected
    assert "there is no branch 99" in str(invoke("inspect", built, "--branch", 99).exception)
