"""All forms of a set give the same audit, and what is no set gives one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chatmill import audit
from chatmill.auditor.open import open_tokenized
from chatmill.core.trainer_columns import read_columns
from chatmill.errors import ChatmillError, ConfigError, DataError, FormatError
from chatmill.store.megatron import MegatronWriter
from tests.audit.sets import Row, bound_template, clean_rows, trained_of


@pytest.fixture
def rows() -> list[Row]:
    return clean_rows(bound_template("chatml"))


def written(rows: list[Row], form: str, folder: Path) -> Any:
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
        return folder / "set.parquet"
    if form == "jsonl":
        path = folder / "set.jsonl"
        path.write_text("".join(json.dumps(row | {"text": "?"}) + "\n" for row in rows))
        return path
    if form in ("datasets folder", "splits", "dataset"):
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_list(rows)
        if form == "dataset":
            return made
        target = datasets.DatasetDict({"train": made, "test": made.select([0])}) if form == "splits" else made
        target.save_to_disk(folder / "saved")
        return folder / "saved"
    lengths = np.array([len(row["input_ids"]) for row in rows])
    with MegatronWriter(folder / "set_tokens", "int32") as tokens:
        tokens.append(np.concatenate([row["input_ids"] for row in rows]), lengths)
    with MegatronWriter(folder / "set_lossmask", "uint8") as mask:
        mask.append(np.concatenate([np.append(trained_of(row)[1:], False) for row in rows]), lengths)
    return folder / "set_tokens"


@pytest.mark.parametrize("form", ["parquet", "jsonl", "datasets folder", "splits", "dataset", "megatron"])
def test_every_form_gives_the_same_audit(rows: list[Row], form: str, tmp_path: Path) -> None:
    report = audit(written(rows, form, tmp_path), bound_template("chatml"))
    assert report.findings == ()
    assert report.rows == len(rows)
    assert report.tokens == sum(len(row["input_ids"]) for row in rows)
    assert report.trained == sum(int(trained_of(row).sum()) for row in rows)


def test_masks_are_read_by_name(rows: list[Row]) -> None:
    named = [
        {"input_ids": row["input_ids"], "mine": [1] * len(row["labels"]), "loss_mask": trained_of(row).astype(int)}
        for row in rows
    ]
    assert audit(named, bound_template("chatml")).mask_name == "loss_mask"
    report = audit(named, bound_template("chatml"), mask="mine")
    assert report.mask_name == "mine"
    assert [one.code for one in report.findings] == ["mask_full"]
    with pytest.raises(ConfigError, match="no column 'other'"):
        audit(named, bound_template("chatml"), mask="other")


def test_shifted_labels_are_right_where_the_trainer_does_not_shift(rows: list[Row]) -> None:
    shifted = [row | {"labels": [*row["labels"][1:], -100]} for row in rows]
    assert not audit(shifted, bound_template("chatml")).passed
    assert audit(shifted, bound_template("chatml"), shifted=True).passed


def test_labels_that_nobody_shifts_are_a_fault(rows: list[Row]) -> None:
    report = audit(rows, bound_template("chatml"), shifted=True)
    assert [one.code for one in report.findings] == ["labels_shifted"]


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("set.csv", "a,b", FormatError, "not a packed dataset"),
        ("set.jsonl", '{"messages": []}', DataError, "no column of token ids"),
        ("set.jsonl", '{"input_ids": [1, 2]', FormatError, "line 1: not JSON"),
        ("set.jsonl", '{"input_ids": [1, 2], "labels": [1]}', DataError, "row 0: labels and input_ids"),
        (
            "set.jsonl",
            '{"input_ids": [1]}\n{"input_ids": [1], "labels": [1]}',
            FormatError,
            "set.jsonl: item 1 has input_ids, labels",
        ),
        ("set.parquet", "no parquet", DataError, "set.parquet"),
    ],
)
def test_what_is_no_set_is_one_clear_error(
    name: str, content: str, error: type[ChatmillError], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=says):
        read_columns(open_tokenized(tmp_path / name)[0])


def test_records_of_the_source_that_cannot_be_read_are_counted(rows: list[Row], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records = [{"messages": messages}, {"messages": [{"role": "nobody", "content": 1}]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = audit(rows[:1], bound_template("chatml"), source=path).source
    assert source is not None
    assert (source["records"], sum(source["refused"].values())) == (2, 1)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_tokenized(tmp_path / "nothing")


def test_a_row_without_a_list_is_named_by_its_place_in_the_whole_set() -> None:
    parts = [pa.table({"input_ids": rows}) for rows in ([[1], [2]], [[3], None])]
    with pytest.raises(DataError, match="'input_ids': row 3 is null"):
        open_tokenized(pa.concat_tables(parts))


@pytest.mark.parametrize("shift", [0, 1, -1])
@pytest.mark.parametrize("place", [0, 3, None])
def test_a_row_without_tokens_changes_nothing(rows: list[Row], shift: int, place: int | None) -> None:
    if shift:
        moved = [[-100, *row["labels"]] if shift < 0 else [*row["labels"][1:], -100] for row in rows]
        rows = [row | {"labels": labels[: len(row["labels"])]} for row, labels in zip(rows, moved, strict=True)]
    bound, empty = bound_template("chatml"), {name: [] for name in rows[0]}
    expected = audit(rows, bound)
    found = audit([*rows[:place], empty, *rows[len(rows) if place is None else place :]], bound)
    assert [(one.code, one.count) for one in found.findings if one.code != "labels_shifted"] == [
        (one.code, one.count) for one in expected.findings if one.code != "labels_shifted"
    ]
    assert (found.documents, found.tokens, found.trained) == (expected.documents, expected.tokens, expected.trained)


def test_a_length_below_zero_is_a_wrong_boundary(rows: list[Row]) -> None:
    packed: dict[str, Any] = {name: [value for row in rows for value in row[name]] for name in rows[0]}
    lengths = [len(row["input_ids"]) for row in rows]
    assert audit([packed | {"seq_lengths": lengths}], bound_template("chatml")).passed
    broken = audit([packed | {"seq_lengths": [lengths[0] + 5, -5, *lengths[1:]]}], bound_template("chatml"))
    assert "wrong_boundaries" in [one.code for one in broken.findings]
