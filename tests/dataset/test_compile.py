"""`chatmill.compile`: everything that people hold goes in, and the files are those of a build."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import chatmill
from chatmill.core.scratch import PREFIX
from chatmill.errors import ConfigError, DataError, MissingExtraError, RecordError, TokenizerError, UnknownNameError
from tests.compiler.builds import OPEN_GATES, chats, digest, talk, write_jsonl
from tests.data.tokenizer_files import HERE as TOKENIZERS

BYTES: dict[str, Any] = {"template": "chatml", "add_control_tokens": True}
"""The model `bytes` loads at once."""
RECORDS = chats(40, 7)
WHOLE = [{"messages": [{**message, "weight": None} for message in record["messages"]]} for record in RECORDS]
"""The same without fractions of weights, which labels cannot hold."""
SHORT = {"messages": talk("2+2?", "4")}
LONG = {"messages": talk("u" * 90, "a" * 90)}
POPE = {"messages": [{"role": "pope", "content": "x"}]}


def compiled(source: Any, **options: Any) -> Any:
    return chatmill.compile(source, "bytes", **BYTES | options)


def ids_of(data: Any) -> list[list[int]]:
    return [episode.ids.tolist() for episode in data]


@pytest.fixture(scope="module")
def data() -> Any:
    return compiled(RECORDS, max_length=4096)


@pytest.mark.parametrize("shard_bytes", [32 << 20, 2000])
def test_a_saved_dataset_is_that_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["chats.jsonl", "more.jsonl.gz"]
    for name, records in zip(files, ([*RECORDS, "{broken"], chats(9, 8)), strict=True):
        write_jsonl(tmp_path / name, records)
    options = {"overflow": "windows", "on_error": "quarantine", "gates": OPEN_GATES, "val_fraction": 0.2}
    made = compiled(files, max_length=200, shard_bytes=shard_bytes, **options)
    made.save("saved")
    chatmill.build(made.recipe, "built", workers=0)
    assert digest(tmp_path / "saved") == digest(tmp_path / "built")
    assert ((tmp_path / "saved/train/shard_00001").is_dir()) == (shard_bytes == 2000)
    assert [entry["reason"] for entry in made.rejected] == ["invalid_json"]


def test_a_list_is_its_records_in_a_file(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data.save("saved", records=".")
    assert [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()] == RECORDS
    chatmill.build(data.recipe, "built", workers=0)
    assert digest(tmp_path / "saved") == digest(tmp_path / "built")
    report = chatmill.verify_dataset("saved", deep=True)
    assert report.passed, report


class Polars:
    """A frame as polars has it, which is not among the packages of the tests: a stream of Arrow, large strings."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        table = pa.Table.from_pylist(rows)
        place = table.schema.get_field_index("id")
        self._table = table.set_column(place, "id", table["id"].cast(pa.large_string()))

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(schema)


HELD: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "iterator": iter,
    "pandas": pd.DataFrame,
    "datasets": datasets.Dataset.from_list,
    "streaming datasets": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "arrow": pa.Table.from_pylist,
    "polars": Polars,
}


@pytest.mark.parametrize("kind", HELD)
def test_what_people_hold_gives_the_same_tokens(data: Any, kind: str) -> None:
    rows = [{**record, "source": record.get("source")} for record in RECORDS]  # tables have all columns
    found = compiled(HELD[kind](rows), max_length=4096)
    assert ids_of(found) == ids_of(data)
    assert [list(one.weights) for one in found] == [list(one.weights) for one in data]
    assert [one.source for one in found] == [one.source for one in data]


def test_lists_of_messages_numpy_values_models_of_clients_and_missing_cells_are_records() -> None:
    class Client:
        def model_dump(self) -> dict[str, str]:
            return {"role": "assistant", "content": "4"}

    messages = SHORT["messages"]
    plain = ids_of(compiled([SHORT]))
    for record in (
        *(messages, {"messages": np.array(messages, dtype=object)}, {"messages": [messages[0], Client()]}),
        {**SHORT, "digest": b"\x00\x01", "system": float("nan")},
    ):
        assert ids_of(compiled([record])) == plain


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"content": b"four"}, r"bytes are no text: decode them"),
        ({"content": "four", "weight": np.float32("inf")}, "Out of range float"),
        ({"content": "", "tool_calls": [{"name": "f", "arguments": {"x": [float("nan")]}}]}, "Out of range float"),
        ({"content": object()}, "a object"),
    ],
)
def test_values_that_json_would_change_are_refused(answer: dict[str, Any], says: str) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]
    for record in ({"messages": messages}, messages, {"messages": np.array(messages, dtype=object)}):
        with pytest.raises(RecordError, match=rf"chats\[1\]: the record has no form in JSON: .*{says}"):
            compiled([SHORT, record], name="chats")


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ({"messages": []}, {}, r"one record: give a list, such as \[record\]"),
        (talk("x"), {}, r"one conversation: give a list of conversations, such as \[messages\]"),
        ([chatmill.Conversation(())], {}, "objects of Conversation cannot be read: give dicts"),
        ([[chatmill.Message(chatmill.Role.USER, "x")]], {}, "objects of Message cannot be read: give dicts"),
        ([], {}, "there are no records"),
        (iter([]), {}, "there are no records"),
        (17, {}, "cannot read records from int"),
        (pa.table({"messages": pa.array([], pa.string())}), {}, "the table is empty"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list([SHORT])}),
            {},
            r"choose one, such as source\['train'\]",
        ),
        ([{"prompt": b"?", "completion": "4"}], {}, r"field prompt: 'prompt' must be .*, found an object"),
        ([SHORT, POPE], {}, r"records\[1\], field messages\[0\].role.*quarantine"),
        ([SHORT, LONG], {"max_length": 100}, r'of 100 tokens: records\[1\] \(\d+ tokens\).*, overflow="windows"'),
        ([{"messages": talk("x")}], {}, "1 record trains nothing.*gates={"),
        ([SHORT], {"template": "gpt_oss"}, r"today's date.*compile\(..., date="),
        ([{"messages": talk("\ud800")}], {}, r"records\[0\], field messages\[0\].content.*surrogate"),
        ([SHORT], {"max_length": 64, "packing": {"overflow": "cut"}}, "packing and max_length and overflow say the"),
        ([SHORT], {"overflow": "cut", "packing": {"max_length": 64}}, "packing and max_length and overflow say the"),
        ([SHORT], {"val_fraction": 0.5, "split": {"val_fraction": 0.1}}, "split and val_fraction say the"),
        ([SHORT], {"tokenizer": "o200k"}, "tokenizer and model say the same"),
        ([SHORT], {"sources": [{"path": "chats.jsonl"}]}, "sources and source say the same"),
        ([SHORT], {"template_option": {}}, "did you mean 'template_options'"),
        ([SHORT], {"template": None}, "'template' is missing"),
        ([SHORT], {"name": "../x"}, "letters, digits"),
        ([SHORT], {"model": None}, "model is missing"),
        ([SHORT], {"model": {}}, "a dict is no model"),
        ([SHORT], {"model": "./Qwen3-9B"}, "no tokenizer './Qwen3-9B'"),
        ("none.jsonl", {"model": "./Qwen3-9B"}, r"there is no file 'none\.jsonl'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compiled_is_refused_with_the_way_out(source: Any, options: dict[str, Any], says: str) -> None:
    """A way out that is an option is a note."""
    with pytest.raises((ConfigError, DataError, TokenizerError, chatmill.GateError)) as caught:
        chatmill.compile(source, **{"model": "bytes", **BYTES, **options})
    assert re.search(says, " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())]), re.DOTALL)
    assert len(caught.traceback) <= 3, "no frames from inside of the package"
    assert caught.value.__cause__ is None


def test_what_is_left_out_is_counted_shown_and_listed() -> None:
    data = compiled([*RECORDS[:3], POPE], on_error="quarantine", gates=OPEN_GATES)
    assert len(data) == 3
    assert [(entry["index"], entry["reason"]) for entry in data.rejected] == [(3, "unknown_role")]
    for shown in (repr(data), data._repr_html_()):
        assert "4 records read, 3 built, 1 left out" in shown
        assert "unknown_role" in shown
        assert "first left out: records[3]: " in shown
    data = compiled([LONG], max_length=100, overflow="cut", gates=OPEN_GATES)
    lost = data.counts["tokens"]["records"]["assistant"]["cut_trained"]
    assert f"trained tokens lost by overflow: {lost}\n" in repr(data)
    assert len(data[0]) == 100
    assert len(compiled([SHORT], template="gpt_oss", date="2026-01-31")) == 1
    assert len(compiled([SHORT], packing={"max_length": 25, "overflow": "cut"})[0].ids) == 25


def test_rows_hold_the_longest_episode_and_never_cut_one_without_a_word(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"length is 50, and the longest episode has .* overflow"):
        data.to_torch(2, length=50)
    with pytest.raises(ConfigError, match="length is 50"):
        data.to_hf(length=50)
    whole = compiled(WHOLE)
    longest = max(map(len, whole))
    assert whole.to_torch(2).get_batch()[0].shape == (2, longest - 1)
    assert max(map(len, whole.to_hf(packed=True)["input_ids"])) <= longest


@pytest.mark.parametrize("call", ["to_hf", "to_torch"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pack": True}, "no option 'pack': here it is called 'packed'"),
        ({"max_length": 64}, "no option 'max_length': here it is called 'length'"),
        ({"split": "val"}, r"unknown option of \w+ 'split'"),
        ({"packing": True}, r"unknown option of \w+ 'packing'. Did you mean 'pack"),
    ],
)
def test_an_option_by_another_name_is_one_clear_error(
    data: Any, call: str, options: dict[str, Any], words: str
) -> None:
    sizes = {"batch_size": 2} if call == "to_torch" else {}
    with pytest.raises(ConfigError, match=words):
        getattr(data, call)(**sizes, **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_fewer_rows_than_a_batch_are_one_batch(packed: bool, drop_last: bool) -> None:
    data = compiled(WHOLE[:3])
    loader = data.to_torch(8, packed=packed, drop_last=drop_last)
    rows = loader.rows_per_epoch()
    assert rows <= 3
    trained = [int(loader.get_batch()[2].bool().sum()) for _ in range(2)]
    assert loader.get_batch()[0].shape[0] == rows
    assert trained == [sum(int((episode.weights > 0).sum()) for episode in data)] * 2, "all of them, every time"


def test_the_loader_is_packed_resumable_and_keeps_its_files() -> None:
    loader, again = (compiled(RECORDS, max_length=4096).to_torch(2, packed=True) for _ in range(2))  # data is gone here
    loader.get_batch()
    state = loader.state_dict()
    ahead = [loader.get_batch() for _ in range(5)]
    again.load_state_dict(json.loads(json.dumps(state)))
    for batch in ahead:
        found = again.get_batch()
        assert all(bool((a == b).all()) for a, b in zip(batch, found, strict=True))
    assert ahead[0].x.shape == (2, 4096)
    assert (ahead[0].document_starts >= 0).sum() > 2  # several conversations share a row


def test_rows_for_hugging_face_and_exports_have_the_targets_of_the_episodes(tmp_path: Path) -> None:
    data = compiled(WHOLE, max_length=4096)
    rows = data.to_hf()
    assert rows.column_names == ["input_ids", "labels"]
    assert [row["labels"] for row in rows] == [episode.labels.tolist() for episode in data]
    assert "seq_lengths" in data.to_hf(packed=True).column_names
    assert data.export("parquet", tmp_path / "exported").splits["train"]["documents"] == len(data)
    with pytest.raises(UnknownNameError, match="export target 'paper'"):
        data.export("paper", tmp_path / "paper")


def test_saving_never_overwrites(data: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # the second time the same dataset is there
        assert data.save(tmp_path / "empty") == tmp_path / "empty"
    assert ids_of(chatmill.Dataset(tmp_path / "empty")) == ids_of(data)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    other = compiled(RECORDS[:2])
    for name, says in (("empty", "holds another dataset"), ("full", "holds something else")):
        with pytest.raises(ConfigError, match=says):
            other.save(tmp_path / name)


def test_splits_slices_and_bad_indices() -> None:
    data = compiled(RECORDS, val_fraction=0.3)
    assert len(data) + len(data["val"]) == len(RECORDS)
    assert data["val"][0].record_id != data[0].record_id
    assert [one.index for one in data[1:3]] == [1, 2]
    assert data[-1].index == len(data) - 1
    with pytest.raises(IndexError):
        data[len(data)]
    with pytest.raises(UnknownNameError, match="split 'test'"):
        data["test"]


def test_a_recipe_is_a_source_with_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chats.jsonl", RECORDS)
    given = {"sources": [{"path": "chats.jsonl"}], "tokenizer": "bytes", **BYTES}
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    assert len(chatmill.compile("recipe.yaml")) == len(RECORDS)
    assert len(chatmill.compile(chatmill.Recipe(**given))) == len(RECORDS)
    lost: dict[str, Any] = {"model": "bytes", "max_length": 64, "overflow": "cut", "policy": "all", "gates": {}}
    for beside in (lost | {"val_fraction": 0.5, "on_error": "quarantine"}).items():
        with pytest.raises(ConfigError, match="a recipe holds all options"):
            chatmill.compile("recipe.yaml", **dict([beside]))


def test_a_tokenizer_of_transformers_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    folder = TOKENIZERS / "tiny_torchtitan"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_folder, by_object = (chatmill.compile(RECORDS[:4], model) for model in (folder, tokenizer))
    assert Path(by_object.recipe.tokenizer).is_relative_to(tmp_path / "cache")
    assert ids_of(by_object) == ids_of(by_folder)
    assert [list(one.weights) for one in by_object] == [list(one.weights) for one in by_folder]
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}! {{ m.content }}{{ eos_token }}{% endfor %}"
    changed = chatmill.compile(RECORDS[:4], tokenizer)
    assert Path(changed.recipe.tokenizer).is_relative_to(tmp_path / "cache")
    assert changed[0].text.startswith("user!")
    assert chatmill.compile(RECORDS[:4], tokenizer).recipe == changed.recipe


def test_the_temporary_folder_goes_with_the_last_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = compiled(RECORDS[:3])
    loader = data.to_torch(2)
    (folder,) = tmp_path.glob(f"{PREFIX}*")
    del data
    assert folder.is_dir()
    del loader
    gc.collect()
    assert not folder.exists()


def test_missing_packages_are_named(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"chatmill\[torch\]"):
        data.to_torch(2)
    with pytest.raises(MissingExtraError, match=r"chatmill\[hf\]"):
        data.to_hf()


def test_compiling_loads_no_torch() -> None:
    code = (
        "import sys, chatmill\n"
        "data = chatmill.compile([[{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]], 'bytes',"
        " template='chatml', add_control_tokens=True)\n"
        "repr(data), data._repr_html_(), repr(data[0])\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_model_folder_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    found = []
    for first in ([], ["<|zz|>"]):
        made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(name, special=True) for name in (*first, "<|im_start|>", "<|im_end|>")])
        made.save(str(tmp_path / "tokenizer.json"))
        (ids,) = ids_of(chatmill.compile([SHORT], tmp_path, template="chatml", workers=0))
        ends = chatmill.load_tokenizer(tmp_path).control_ids["<|im_end|>"]
        assert ends == 257 + len(first)
        assert ids.count(ends) == 2
        found.append(ids)
    assert found[0] != found[1]
