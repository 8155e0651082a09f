"""All forms of a set give the same audit, what is no set gives one clear error, and the command says all of it."""

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
from chatmill.render.registry import bind
from chatmill.store.megatron import MegatronWriter
from tests.audit.faults import FAULTS
from tests.audit.sets import Row, bound_template, clean_rows, joined, trained_of
from tests.cli.run import Done, here
from tests.compiler.builds import talk, write_jsonl
from tests.data.tokenizer_files import loaded, unpacked

CHATML = bound_template("chatml")


@pytest.fixture
def rows() -> list[Row]:
    return clean_rows(CHATML)


def written(rows: list[Row], form: str, folder: Path) -> Any:
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
        return folder / "set.parquet"
    if form == "jsonl":
        return write_jsonl(folder / "set.jsonl", [row | {"text": "?"} for row in rows])
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
    report = audit(written(rows, form, tmp_path), CHATML)
    assert report.findings == ()
    assert report.rows == len(rows)
    assert report.tokens == sum(len(row["input_ids"]) for row in rows)
    assert report.trained == sum(int(trained_of(row).sum()) for row in rows)


def test_masks_are_read_by_name(rows: list[Row]) -> None:
    named = [
        {"input_ids": row["input_ids"], "mine": [1] * len(row["labels"]), "loss_mask": trained_of(row).astype(int)}
        for row in rows
    ]
    assert audit(named, CHATML).mask_name == "loss_mask"
    report = audit(named, CHATML, mask="mine")
    assert report.mask_name == "mine"
    assert [one.code for one in report.findings] == ["mask_full"]
    with pytest.raises(ConfigError, match="no column 'other'"):
        audit(named, CHATML, mask="other")


def test_labels_are_shifted_where_the_trainer_does_not_shift(rows: list[Row]) -> None:
    shifted = [row | {"labels": [*row["labels"][1:], -100]} for row in rows]
    assert not audit(shifted, CHATML).passed
    assert audit(shifted, CHATML, shifted=True).passed
    assert [one.code for one in audit(rows, CHATML, shifted=True).findings] == ["labels_shifted"]


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
        ("nothing", None, ConfigError, "no such file"),
    ],
)
def test_what_is_no_set_is_one_clear_error(
    name: str, content: str | None, error: type[ChatmillError], says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=says):
        read_columns(open_tokenized(tmp_path / name))


def test_a_row_without_a_list_is_named_by_its_place_in_the_whole_set() -> None:
    parts = [pa.table({"input_ids": rows}) for rows in ([[1], [2]], [[3], None])]
    with pytest.raises(DataError, match="'input_ids': row 3 is null"):
        open_tokenized(pa.concat_tables(parts))


def test_records_of_the_source_that_cannot_be_read_are_counted(rows: list[Row], tmp_path: Path) -> None:
    records = [{"messages": talk("q", "a")}, {"messages": [{"role": "nobody", "content": 1}]}]
    source = audit(rows[:1], CHATML, source=write_jsonl(tmp_path / "chats.jsonl", records)).source
    assert source is not None
    assert (source["records"], sum(source["refused"].values())) == (2, 1)


@pytest.mark.parametrize("shift", [0, 1, -1])
@pytest.mark.parametrize("place", [0, 3, None])
def test_a_row_without_tokens_changes_nothing(rows: list[Row], shift: int, place: int | None) -> None:
    if shift:
        moved = [[-100, *row["labels"]] if shift < 0 else [*row["labels"][1:], -100] for row in rows]
        rows = [row | {"labels": labels[: len(row["labels"])]} for row, labels in zip(rows, moved, strict=True)]
    with_empty = [*rows]
    with_empty.insert(len(rows) if place is None else place, {name: [] for name in rows[0]})
    expected, found = (
        (
            {one.code: one.count for one in report.findings if one.code != "labels_shifted"},
            (report.documents, report.tokens, report.trained),
        )
        for report in (audit(rows, CHATML), audit(with_empty, CHATML))
    )
    assert found == expected


def test_a_length_below_zero_is_a_wrong_boundary(rows: list[Row]) -> None:
    (packed,) = joined(rows, len(rows), boundaries="seq_lengths")
    assert audit([packed], CHATML).passed
    first, *rest = packed["seq_lengths"]
    broken = audit([packed | {"seq_lengths": [first + 5, -5, *rest]}], CHATML)
    assert "wrong_boundaries" in [one.code for one in broken.findings]


def test_the_command_has_a_verdict_a_page_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unpacked("qwen3")
    bound = bind(model, loaded("qwen3"))

    def run(fault: str, *options: str) -> Done:
        put = next((one.put for one in FAULTS if one.name == fault), lambda rows, _: rows)
        path = write_jsonl(tmp_path / "set.jsonl", put(clean_rows(bound), bound))
        done = here("audit", path, "--model", model, *options, columns=80)
        return Done(done.returncode, done.stdout, done.stderr)

    clean = run("")
    assert (clean.status, "No faults found" in clean.out) == (0, True)
    # the first run has loaded the vocabulary itself
    monkeypatch.setattr("chatmill.auditor.run.load_tokenizer", lambda model, control_tokens: loaded("qwen3"))
    page = tmp_path / "audit.html"
    done = run("newline of the prompt trained", "-o", str(page))
    assert done.status == 1
    assert "prompt trained" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if "answers" in line)
    assert "prompt_trained" in page.read_text()
    assert "<script" not in page.read_text()
    found = json.loads(run("stop not trained", "--json").out)
    assert ([one["code"] for one in found["findings"]], found["passed"]) == (["stop_untrained"], False)
    assert found["findings"][0]["examples"][0]["parts"]
    note = run("newline after the stop trained")
    assert note.status == 0
    assert "text after the stop trained (note)" in note.out
    assert "⏎«<|im_start|>»user⏎" in " ".join(note.out.split()), "examples have marks for line breaks"
