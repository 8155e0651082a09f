"""The inspector beside what `golden` holds: every container, JSON, choosing, and 80 columns whatever the content."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from chatmill.errors import ChatmillError, ConfigError, DataError, FormatError
from chatmill.look.dataset import open_for_looking
from chatmill.look.item_lines import item_lines
from chatmill.look.packed_rows import packed_files
from chatmill.look.packed_split import PackedSplit
from chatmill.look.terminal import screen, show
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import invoke
from tests.compiler.builds import write_jsonl
from tests.data.tokenizer_files import unpacked
from tests.look.sets import folder, view_block

run = partial(invoke, "inspect")
TEXTS = ["Hello there.", "Zwei Zeilen\nund mehr", "three", "vier", "x" * 50]


def packed() -> dict[str, list[list[int]]]:
    made = block_tokenize_fn({"t": TEXTS}, byte_tokenizer(), "t", max_length=48, packed=True)
    assert [len(block) for block in made["input_ids"]] == [48, 48, 7]
    return made


def test_every_container_shows_the_same(tmp_path: Path) -> None:
    import datasets

    table, dataset = pa.table(packed()), datasets.Dataset.from_dict(packed())
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for name, form in (("b.arrow", pa.ipc.new_stream), ("c.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, form(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (tmp_path / "folder").mkdir()
    pq.write_table(table.slice(0, 1), tmp_path / "folder" / "part-0.parquet")
    pq.write_table(table.slice(1), tmp_path / "folder" / "part-1.parquet")
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"val": dataset, "test": dataset.select([2])}).save_to_disk(str(tmp_path / "two"))
    outputs = set()
    for name in ("a.parquet", "b.arrow", "c.arrow", "folder", "saved", "splits"):
        result = run(tmp_path / name, "--tokenizer", "bytes")
        outputs.add(result.output)
        assert result.exit_code == 0
        split = PackedSplit(packed_files(tmp_path / name))
        rows = [split.row(number).to_pylist() for number in range(len(split))]
        assert [row["input_ids"] for (row,) in rows] == packed()["input_ids"]
    assert len(outputs) == 1
    with pytest.raises(ConfigError, match="none is 'train': name one with --split: val, test"):
        packed_files(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"unknown split 'dev'.*Known: val, test"):
        packed_files(tmp_path / "two", "dev")
    assert len(PackedSplit(packed_files(tmp_path / "two", "test"))) == 1


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("nothing", None, ConfigError, "does not exist"),
        ("x.txt", b"hello", FormatError, r"x\.txt is not a packed dataset"),
        (".", None, FormatError, "is not a packed dataset"),
        ("a.parquet", b"PAR1 no", DataError, r"a\.parquet cannot be read"),
        ("a.arrow", b"0123456789", DataError, r"a\.arrow cannot be read"),
    ],
)
def test_what_is_no_packed_dataset_is_refused(
    tmp_path: Path, name: str, content: bytes | None, error: type[ChatmillError], words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words):
        PackedSplit(packed_files(tmp_path / name))


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(FormatError, match="no column of token ids: there are none"):
        open_for_looking(tmp_path / "text.parquet")
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]}), tmp_path / "uneven.parquet")
    split = open_for_looking(tmp_path / "uneven.parquet").split()
    for read in (lambda: split.item(1), lambda: list(split.batches())):
        with pytest.raises(DataError, match="row 1: labels and input_ids have different lengths"):
            read()


@pytest.mark.parametrize("text", ["long words " * 40, "字" * 300, "unbroken" * 50, "tab\tseparated\t" * 30])
def test_lines_fit_80_columns_and_lose_nothing(text: str) -> None:
    row = {"input_ids": list(text.encode()), "document_starts": [0]}
    lines = [line.plain for line in item_lines(view_block(row, byte_tokenizer()), width=80)][2:]
    assert len(lines) > 3
    assert max(map(cell_len, lines)) <= 80
    assert "".join(line[2:] for line in lines).replace(" ", "") == text.replace(" ", "").replace("\t", "")


def test_a_terminal_without_unicode_gets_escapes() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(screen(out), item_lines(view_block({"input_ids": list("é".encode()), "labels": [1, 1]}, byte_tokenizer())))
    out.seek(0)
    assert out.read().splitlines()[-1] == "\\u258c \\xe9"


@pytest.mark.parametrize(
    ("name", "key"), [("episodes", "episode"), ("rows", "row"), ("hf", "block"), ("kd", "document")]
)
def test_json_holds_every_token_once_and_lines_fit_whatever_the_content(name: str, key: str) -> None:
    items = [json.loads(line) for line in run(folder() / name, "--json", "-n", 50).output.splitlines()]
    assert items
    assert [item[key] for item in items] == list(range(len(items)))
    for item in items:
        runs = [run for document in item["documents"] for run in document["runs"]]
        assert sum(len(run["ids"]) for run in runs) == item["tokens"]
        assert sum(len(run["ids"]) for run in runs if run["weight"] > 0) == item["trained"]
        assert [run["start"] for run in runs] == sorted({run["start"] for run in runs})
    output = run(folder() / name, "-n", 100, "--full").output
    assert len(output) > 200
    assert max(map(cell_len, output.splitlines())) <= 80
    assert not set("\x00\x1b\x07\x9b\u202e\u2028") & set(output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["episodes", "--episode", 9999], "no episode 9,999 in train: it has .* the nearest is"),
        (["episodes", "--start", 9999], "no episode 9,999"),
        (["episodes", "--row", 0], "not packed into rows: use --episode"),
        (["rows", "--row", 9999], "no row 9,999 in train"),
        (["rows", "--episode", 5000], "no episode 5,000 in train: it has .* the nearest is"),
        (["rows", "--id", "scrip"], "close ones: 'script'"),
        (["hf", "--row", 9999], "no block 9,999 in train"),
        (["kd", "--row", 0], "holds documents that are not packed into rows: use --episode"),
        (["episodes", "--random", 0, "--episode", 1], "--episode and --random are mutually exclusive"),
        (["episodes", "--split", "test"], "unknown split 'test'"),
        (["episodes", "--policy", "all"], "shown as it is stored: remove --policy"),
        (["hf", "-T", "qwen3"], "shown as it is stored: remove --template"),
        (["kd", "--shape", "user=q", "--set", "strict_text=true"], "stored: remove --shape, --set"),
    ],
)
def test_what_is_not_there_is_told(arguments: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        raise run(folder() / arguments[0], *arguments[1:]).exception


def test_another_tokenizer_is_said() -> None:
    result = run(folder() / "episodes", "--tokenizer", unpacked("tiny_torchtune"), "-n", 1)
    assert result.exit_code == 0
    assert "the text may be wrong" in result.stderr


def test_conversations_are_counted_and_not_their_documents(tmp_path: Path) -> None:
    """Qwen3's template takes reasoning out of earlier answers, so each of two answers has a document of its own."""
    answer = {"role": "assistant", "content": "a", "reasoning_content": "since"}
    question = {"role": "user", "content": "q"}
    chats = [{"id": "long", "messages": [question, answer] * 2}, {"id": "short", "messages": [question, answer]}]
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    lines = run(path, "-t", "bytes", "-T", "qwen3").output.splitlines()
    assert "2 conversations in 3 documents" in map(str.strip, lines)
    heads = [line.partition(" \u00b7 ")[0] for line in lines if " tokens \u00b7 " in line]
    assert heads == ["long, document 1 of 2", "long, document 2 of 2", "short"]
    alone = run(path, "-t", "bytes", "-T", "qwen3", "--start", 1).output.splitlines()
    assert "1 conversation" in map(str.strip, alone)
