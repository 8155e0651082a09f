"""The inspector: every layout and container, exact header lines, 80 columns without colour, JSON, choosing."""

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

from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.look.dataset import open_for_looking
from chatmill.look.item_lines import item_lines
from chatmill.look.item_view import ItemView
from chatmill.look.packed_rows import packed_files
from chatmill.look.packed_split import PackedSplit
from chatmill.look.safe_text import visible
from chatmill.look.terminal import screen, show
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import here, invoke
from tests.compiler.builds import write_jsonl
from tests.data.tokenizer_files import unpacked
from tests.look.sets import folder, view_block

run = partial(invoke, "inspect")
TEXTS = ["Hello there.", "Zwei Zeilen\nund mehr", "three", "vier", "x" * 50]


def packed() -> dict[str, list[list[int]]]:
    made = block_tokenize_fn({"t": TEXTS}, byte_tokenizer(), "t", max_length=48, packed=True)
    assert [len(block) for block in made["input_ids"]] == [48, 48, 7]
    return made


def plain_lines(view: ItemView, **options: Any) -> list[str]:
    return [line.plain for line in item_lines(view, **options)]


@pytest.fixture
def containers(tmp_path: Path) -> dict[str, Path]:
    """The same three blocks in every container there is."""
    import datasets

    table = pa.table(packed())
    paths = {name: tmp_path / name for name in ("a.parquet", "b.arrow", "c.arrow", "folder", "saved", "splits")}
    pq.write_table(table, paths["a.parquet"], row_group_size=2)
    for name, form in (("b.arrow", pa.ipc.new_stream), ("c.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(paths[name]), "wb") as sink, form(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
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
    assert len(PackedSplit(packed_files(containers["saved"]))) == 3
    for path in containers.values():
        split = PackedSplit(packed_files(path))
        rows = [split.row(number).to_pylist() for number in range(len(split))]
        assert [row["input_ids"] for (row,) in rows] == packed()["input_ids"]


def test_splits_must_be_chosen(tmp_path: Path, containers: dict[str, Path]) -> None:
    import datasets

    data = datasets.Dataset.from_dict(packed())
    datasets.DatasetDict({"val": data, "test": data.select([2])}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match="none is 'train': name one with --split: val, test"):
        packed_files(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"unknown split 'dev'.*Known: val, test"):
        packed_files(tmp_path / "two", "dev")
    assert len(PackedSplit(packed_files(tmp_path / "two", "test"))) == 1


def test_what_is_no_packed_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        packed_files(tmp_path / "nothing")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"x\.txt is not a packed dataset"):
        packed_files(tmp_path / "x.txt")
    with pytest.raises(FormatError, match="is not a packed dataset"):
        packed_files(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read"):
        PackedSplit(packed_files(tmp_path / "broken.parquet"))
    (tmp_path / "broken.arrow").write_bytes(b"0123456789")
    with pytest.raises(DataError, match=r"broken\.arrow cannot be read"):
        PackedSplit(packed_files(tmp_path / "broken.arrow"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(FormatError, match="no column of token ids: there are none"):
        open_for_looking(tmp_path / "text.parquet")
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]}), tmp_path / "uneven.parquet")
    split = open_for_looking(tmp_path / "uneven.parquet").split()
    with pytest.raises(DataError, match="row 1: labels and input_ids have different lengths"):
        split.item(1)
    with pytest.raises(DataError, match="row 1: labels and input_ids have different lengths"):
        list(split.batches())


def test_trained_tokens_and_missing_starts() -> None:
    columns: dict[str, Any] = {"input_ids": [65, 66, 67], "labels": [-100, 66, 67]}
    lines = plain_lines(view_block(columns, byte_tokenizer(), 3))
    assert lines == [
        "---- 3 Tokens: 3, Trained: 2, Features: input_ids, labels ----",
        "[0] tokens 0-2 (3, 2 trained)",
        "| A",
        "\u258c BC",
    ]
    columns = {"input_ids": [65, 66, 67], "document_starts": [0, 1], "loss_mask": [1, 1, 0]}
    block = view_block(columns)
    assert [document.trained for document in block.documents] == [1, 1]


@pytest.mark.parametrize("text", ["long words " * 40, "字" * 300, "unbroken" * 50, "tab\tseparated\t" * 30])
def test_lines_fit_80_columns_and_lose_nothing(text: str) -> None:
    row = {"input_ids": list(text.encode()), "document_starts": [0]}
    lines = plain_lines(view_block(row, byte_tokenizer()), width=80)[2:]
    assert len(lines) > 3
    assert max(map(cell_len, lines)) <= 80
    assert "".join(line[2:] for line in lines).replace(" ", "") == text.replace(" ", "").replace("\t", "")


def test_the_middle_of_a_long_document_is_left_out() -> None:
    text = "\n".join(f"line {n}" for n in range(100))
    row = {"input_ids": list(text.encode()), "document_starts": [0]}
    block = view_block(row, byte_tokenizer())
    short = plain_lines(block, most_lines=5)[2:]
    assert short == ["| line 0", "| line 1", "| line 2", "| ... 95 lines left out ...", "| line 98", "| line 99"]
    assert len(plain_lines(block)) == 102


def test_text_cannot_disturb_the_terminal() -> None:
    assert visible("a\x1b[31mred\r\n\u202ex\x00", mark_newlines=False) == "a\u241b[31mred\u240d\n\\u202ex\u2400"


# --- episodes, rows and KD sets -------------------------------------------------------------------------------------


def shown(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    assert isinstance(result.output, str)
    return result.output


def test_an_episode_is_found_in_its_row() -> None:
    row = json.loads(shown(folder() / "rows", "--row", 0, "--json"))
    wanted = row["documents"][-1]
    for chosen in (("--episode", wanted["document"]), ("--id", wanted["record_id"])):
        alone = json.loads(shown(folder() / "rows", *chosen, "--json"))
        assert (alone["episode"], alone["record_id"]) == (wanted["document"], wanted["record_id"])
        assert [document["text"] for document in alone["documents"]] == [wanted["text"]]


def test_json_holds_every_token_once() -> None:
    for name, key in (("episodes", "episode"), ("rows", "row"), ("hf", "block"), ("kd", "document")):
        items = [json.loads(line) for line in shown(folder() / name, "--json", "-n", 50).splitlines()]
        assert [item[key] for item in items] == list(range(len(items)))
        assert items
        for item in items:
            runs = [run for document in item["documents"] for run in document["runs"]]
            assert sum(len(run["ids"]) for run in runs) == item["tokens"]
            assert sum(len(run["ids"]) for run in runs if run["weight"] > 0) == item["trained"]
            assert [run["start"] for run in runs] == sorted({run["start"] for run in runs})


@pytest.mark.parametrize("name", ["episodes", "hf", "kd"])
def test_80_columns_without_colour_whatever_the_content(name: str) -> None:
    output = shown(folder() / name, "-n", 100, "--full")
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
        (["episodes", "--id", "scrip"], "close ones: 'script'"),
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


def test_a_terminal_without_unicode_gets_escapes() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = view_block({"input_ids": list("é".encode()), "labels": [1, 1]}, byte_tokenizer())
    show(screen(out), item_lines(view))
    out.seek(0)
    assert out.read().splitlines()[-1] == "\\u258c \\xe9"


def test_control_tokens_are_marked_in_rows_without_kinds() -> None:
    """Text that spells a control token prints otherwise than the token."""
    tokenizer = byte_tokenizer().with_added(["<|im_end|>"])
    spelled = list(tokenizer.encode("<|im_end|>"))
    ids = [*spelled, tokenizer.control("<|im_end|>"), *tokenizer.encode("x")]
    row = {"input_ids": ids, "document_starts": [0]}
    view = view_block(row, tokenizer)
    assert any("<|im_end|>\u00ab<|im_end|>\u00bbx" in line for line in plain_lines(view))
    assert view.as_json()["documents"][0]["control"] == [len(spelled)]


# `chatmill inspect` of raw files: what a person sees, without colour and at 80 columns, and what a script reads.


PAIR = {
    "id": "one",
    "messages": [{"role": "user", "content": "What is <|im_end|>?\n"}, {"role": "assistant", "content": "A token."}],
}


def test_bad_records_are_told_and_the_others_shown(tmp_path: Path) -> None:
    records = ["{broken", {"messages": [{"role": "pope", "content": "x"}]}, PAIR]
    done = here("inspect", write_jsonl(tmp_path / "chats.jsonl", records), "-t", "bytes")
    assert done.returncode == 0
    assert "A token." in done.stdout
    assert "left out [invalid_json]" in done.stderr
    assert "chats.jsonl:2, field messages[0].role: unknown role 'pope'" in done.stderr
    done = here("inspect", write_jsonl(tmp_path / "none.jsonl", [{"messages": []}]), "-t", "bytes")
    assert done.returncode == 2
    assert "no conversation to show" in done.stderr
