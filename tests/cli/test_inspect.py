"""The inspector of packed blocks: every container, exact header lines, 80 columns without colour, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from chatmill.cli import inspect as module
from chatmill.errors import ConfigError, FormatError
from chatmill.look.inspect_packed import block_lines, view_block, visible
from chatmill.look.packed_rows import PackedRow, open_packed
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import ByteTokenizer

APP = typer.Typer()
APP.command(help=module.__doc__)(module.command)
TEXTS = ["Hello there.", "Zwei Zeilen\nund mehr", "three", "vier", "x" * 50]


def packed() -> dict[str, list[list[int]]]:
    made = block_tokenize_fn({"t": TEXTS}, ByteTokenizer(), "t", max_length=48, packed=True)
    assert [len(block) for block in made["input_ids"]] == [48, 48, 7]
    return made


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(APP, [str(a) for a in arguments])


def write_arrow_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


def write_arrow_file(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


@pytest.fixture
def containers(tmp_path: Path) -> dict[str, Path]:
    """The same three blocks in every container there is."""
    import datasets

    table = pa.table(packed())
    paths = {name: tmp_path / name for name in ("a.parquet", "b.arrow", "c.arrow", "folder", "saved", "splits")}
    pq.write_table(table, paths["a.parquet"], row_group_size=2)
    write_arrow_stream(paths["b.arrow"], table)
    write_arrow_file(paths["c.arrow"], table)
    paths["folder"].mkdir()
    pq.write_table(table.slice(0, 1), paths["folder"] / "part-0.parquet")
    pq.write_table(table.slice(1), paths["folder"] / "part-1.parquet")
    dataset = datasets.Dataset.from_dict(packed())
    dataset.save_to_disk(str(paths["saved"]), num_shards=2)
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(paths["splits"]))
    return paths


def test_every_container_shows_the_same(containers: dict[str, Path]) -> None:
    outputs = {name: run(path, "--tokenizer", "bytes") for name, path in containers.items()}
    assert len(outputs) == 6
    assert {result.exit_code for result in outputs.values()} == {0}
    assert len({result.output for result in outputs.values()}) == 1
    assert len(open_packed(containers["saved"])) == 3
    rows = list(open_packed(containers["saved"]).rows())
    assert [row.columns["input_ids"] for row in rows] == packed()["input_ids"]
    for path in containers.values():
        assert [row.index for row in open_packed(path).rows(1, 1)] == [1]
        assert [row.index for row in open_packed(path).rows(2, 5)] == [2]


def test_headers_and_text_with_boundaries(containers: dict[str, Path]) -> None:
    lines = run(containers["a.parquet"], "--examples", 2, "--tokenizer", "bytes").output.splitlines()
    assert lines == [
        "---- 0 Tokens: 48, Documents: 4, Features: input_ids, document_starts ----",
        "[0] tokens 0-13 (14)",
        "| <|bos|>Hello there.<|eos|>",
        "[1] tokens 14-35 (22)",
        "| <|bos|>Zwei Zeilen",
        "| und mehr<|eos|>",
        "[2] tokens 36-42 (7)",
        "| <|bos|>three<|eos|>",
        "[3] tokens 43-47 (5)",
        "| <|bos|>vier",
        "",
        "---- 1 Tokens: 48, Documents: 2, Features: input_ids, document_starts ----",
        "[0] tokens 0-1 (2)",
        "| <|bos|><|eos|>",
        "[1] tokens 2-47 (46)",
        "| <|bos|>" + "x" * 45,
        "",
        "2 of 3 blocks shown.",
    ]


def test_start_and_ids_without_a_tokenizer(containers: dict[str, Path]) -> None:
    output = run(containers["saved"], "--start", 2).output
    assert output.startswith("---- 2 Tokens: 7, Documents: 1, ")
    assert "| 256 120 120" in output
    assert "1 of 3 blocks shown. Ids only: --tokenizer gives the text." in output


def test_json_lines(containers: dict[str, Path]) -> None:
    result = run(containers["b.arrow"], "-n", 2, "--json", "--tokenizer", "bytes")
    blocks = [json.loads(line) for line in result.output.splitlines()]
    assert len(blocks) == 2
    assert blocks[0]["block"] == 0
    assert blocks[0]["tokens"] == 48
    assert blocks[0]["features"] == ["input_ids", "document_starts"]
    assert blocks[0]["documents"][3] == {"start": 43, "tokens": 5, "text": "<|bos|>vier"}
    bare = json.loads(run(containers["b.arrow"], "-n", 1, "--json").output)
    assert [i for document in bare["documents"] for i in document["ids"]] == packed()["input_ids"][0]


def test_splits_must_be_chosen(tmp_path: Path, containers: dict[str, Path]) -> None:
    import datasets

    data = datasets.Dataset.from_dict(packed())
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match="train, test: choose one"):
        open_packed(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"unknown split 'dev'.*Known: train, test"):
        open_packed(tmp_path / "two", "dev")
    assert len(open_packed(tmp_path / "two", "test")) == 1


def test_wrong_boundaries_are_shown_and_fail(tmp_path: Path) -> None:
    rows = {"input_ids": [[65, 66], [67, 68]], "document_starts": [[0], [0, 5]]}
    pq.write_table(pa.table(rows), tmp_path / "bad.parquet")
    result = run(tmp_path / "bad.parquet", "--tokenizer", "bytes")
    assert result.exit_code == 1
    assert "!! document_starts of block 1: entry 1 is 5" in result.output
    assert "| CD" in result.output


def test_what_is_no_packed_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_packed(tmp_path / "nothing")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"x\.txt is no packed dataset"):
        open_packed(tmp_path / "x.txt")
    with pytest.raises(FormatError, match="is no packed dataset"):
        open_packed(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(FormatError, match=r"broken\.parquet cannot be read"):
        next(open_packed(tmp_path / "broken.parquet").rows())
    (tmp_path / "broken.arrow").write_bytes(b"0123456789")
    with pytest.raises(FormatError, match=r"broken\.arrow cannot be read"):
        next(open_packed(tmp_path / "broken.arrow").rows())
    with pytest.raises(FormatError, match="no column input_ids, only: text"):
        view_block(PackedRow(index=0, columns={"text": "a"}))


def test_trained_tokens_and_missing_starts() -> None:
    columns: dict[str, Any] = {"input_ids": [65, 66, 67], "labels": [-100, 66, 67]}
    lines = list(block_lines(view_block(PackedRow(index=3, columns=columns), ByteTokenizer())))
    assert lines == ["---- 3 Tokens: 3, Features: input_ids, labels ----", "[0] tokens 0-2 (3, 2 trained)", "| ABC"]
    columns = {"input_ids": [65, 66, 67], "document_starts": [0, 1], "loss_mask": [1, 1, 0]}
    block = view_block(PackedRow(index=0, columns=columns))
    assert [document.trained for document in block.documents] == [1, 1]


@pytest.mark.parametrize("text", ["long words " * 40, "字" * 300, "unbroken" * 50, "tab\tseparated\t" * 30])
def test_lines_fit_80_columns_and_lose_nothing(text: str) -> None:
    row = PackedRow(index=0, columns={"input_ids": list(text.encode()), "document_starts": [0]})
    lines = list(block_lines(view_block(row, ByteTokenizer()), width=80))[2:]
    assert len(lines) > 3
    assert max(map(cell_len, lines)) <= 80
    assert "".join(line[2:] for line in lines).replace(" ", "") == text.replace(" ", "").replace("\t", "")


def test_the_middle_of_a_long_document_is_left_out() -> None:
    text = "\n".join(f"line {n}" for n in range(100))
    row = PackedRow(index=0, columns={"input_ids": list(text.encode()), "document_starts": [0]})
    block = view_block(row, ByteTokenizer())
    short = list(block_lines(block, most_lines=5))[2:]
    assert short == ["| line 0", "| line 1", "| line 2", "| ... 95 lines left out ...", "| line 98", "| line 99"]
    assert len(list(block_lines(block))) == 102


def test_text_cannot_disturb_the_terminal() -> None:
    assert visible("a\x1b[31mred\r\n\u202ex\x00") == "a\\x1b[31mred\\x0d\n\\u202ex\\x00"


def test_output_has_no_colour_when_it_is_piped(containers: dict[str, Path]) -> None:
    assert "\x1b" not in run(containers["a.parquet"], "--tokenizer", "bytes").output
