"""`chatmill.compile`: everything that people hold goes in, and the files are those of a build."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import chatmill
from chatmill.core.scratch import PREFIX
from chatmill.errors import ConfigError, DataError, MissingExtraError, RecordError, TokenizerError, UnknownNameError
from tests.compiler.builds import OPEN_GATES, chats, digest, write_jsonl
from tests.data.tokenizer_files import HERE as TOKENIZERS

BYTES: dict[str, Any] = {"template": "chatml", "add_control_tokens": True}
"""The model `bytes` loads at once."""
RECORDS = chats(40, 7)
WHOLE = [{"messages": [{**message, "weight": None} for message in record["messages"]]} for record in RECORDS]
"""The same without fractions of weights, which labels cannot hold."""
SHORT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def ids_of(data: Any) -> list[list[int]]:
    return [episode.ids.tolist() for episode in data]


@pytest.fixture(scope="module")
def data() -> Any:
    return chatmill.compile(RECORDS, "bytes", max_length=4096, **BYTES)


@pytest.mark.parametrize("shard_bytes", [32 << 20, 2000])
def test_a_saved_dataset_is_byte_for_byte_that_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"shard_bytes": shard_bytes, "gates": OPEN_GATES, **BYTES}
    files = ["chats.jsonl", "more.jsonl.gz"]
    for name, records in zip(files, ([*RECORDS, "{broken"], chats(9, 8)), strict=True):
        write_jsonl(tmp_path / name, records)
    compiled = chatmill.compile(
        files, "bytes", max_length=200, overflow="windows", val_fraction=0.2, on_error="quarantine", **options
    )
    compiled.save("saved")
    chatmill.build(compiled.recipe, "built", workers=0)
    assert digest(tmp_path / "saved") == digest(tmp_path / "built")
    assert ((tmp_path / "saved/train/shard_00001").is_dir()) == (shard_bytes == 2000)
    assert [entry["reason"] for entry in compiled.rejected] == ["invalid_json"]


def test_a_list_gives_the_bytes_of_the_same_records_in_a_file(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def hugging_face(rows: list[dict[str, Any]]) -> Any:
    return import_module("datasets").Dataset.from_list(rows)


HELD: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "iterator": iter,
    "pandas": lambda rows: import_module("pandas").DataFrame(rows),
    "datasets": hugging_face,
    "streaming datasets": lambda rows: hugging_face(rows).to_iterable_dataset(),
    "arrow": pa.Table.from_pylist,
    "polars": Polars,
}


@pytest.mark.parametrize("kind", HELD)
def test_what_people_hold_gives_the_same_tokens(data: Any, kind: str) -> None:
    rows = [{**record, "source": record.get("source")} for record in RECORDS]  # tables have all columns
    found = chatmill.compile(HELD[kind](rows), "bytes", max_length=4096, **BYTES)
    assert ids_of(found) == ids_of(data)
    assert [list(one.weights) for one in found] == [list(one.weights) for one in data]
    assert [one.source for one in found] == [one.source for one in data]


def test_lists_of_messages_numpy_values_and_models_of_clients_are_records() -> None:
    class Client:
        def model_dump(self) -> dict[str, str]:
            return {"role": "assistant", "content": "four"}

    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    plain = chatmill.compile([{"messages": messages}], "bytes", **BYTES)
    for record in (messages, {"messages": np.array(messages, dtype=object)}, {"messages": [messages[0], Client()]}):
        assert ids_of(chatmill.compile([record], "bytes", **BYTES)) == ids_of(plain)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"content": b"four"}, r"the record has no form in JSON: bytes are no text: decode them"),
        ({"content": "four", "weight": float("nan")}, "the record has no form in JSON: Out of range float"),
        ({"content": "four", "weight": np.float32("inf")}, "the record has no form in JSON: Out of range float"),
        ({"content": "", "tool_calls": [{"name": "f", "arguments": {"x": [float("nan")]}}]}, ".* Out of range float"),
    ],
)
def test_values_that_json_would_change_are_refused(answer: dict[str, Any], says: str) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]
    for record in ({"messages": messages}, messages, {"messages": np.array(messages, dtype=object)}):
        with pytest.raises(RecordError, match=rf"records\[1\]: {says}"):
            chatmill.compile([SHORT, record], "bytes", **BYTES)


def test_bytes_are_no_text_and_a_missing_cell_is_no_field() -> None:
    more = {"digest": b"\x00\x01", "system": float("nan")}
    assert ids_of(chatmill.compile([{**SHORT, **more}], "bytes", **BYTES)) == ids_of(
        chatmill.compile([SHORT], "bytes", **BYTES)
    )
    with pytest.raises(RecordError, match=r"field prompt: 'prompt' must be a string, found an object"):
        chatmill.compile([{"prompt": b"2+2?", "completion": "4"}], "bytes", **BYTES)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"messages": []}, r"one record: give a list, such as \[record\]"),
        ([{"role": "user", "content": "x"}], r"one conversation: give a list of conversations, such as \[messages\]"),
        ([chatmill.Conversation(())], "objects of Conversation cannot be read: give dicts"),
        ([[chatmill.Message(chatmill.Role.USER, "x")]], "objects of Message cannot be read: give dicts"),
        ([], "there are no records"),
        (iter([]), "there are no records"),
        (17, "cannot read records from int"),
        (pa.table({"messages": pa.array([], pa.string())}), "the table is empty"),
    ],
)
def test_what_is_no_list_of_records_is_refused_with_the_way_out(source: Any, says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        chatmill.compile(source, "bytes", **BYTES)


def test_a_dataset_dict_asks_for_a_split() -> None:
    import datasets

    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)})
    with pytest.raises(ConfigError, match=r"choose one, such as source\['train'\]"):
        chatmill.compile(both, "bytes", **BYTES)


def test_errors_name_the_record_as_python_counts_it() -> None:
    records = [*RECORDS[:3], {"messages": [{"role": "pope", "content": "x"}]}]
    with pytest.raises(RecordError, match=r"records\[3\], field messages\[0\].role") as caught:
        chatmill.compile(records, "bytes", **BYTES)
    assert any("quarantine" in note for note in caught.value.__notes__)
    with pytest.raises(RecordError, match=r"chats\[1\]: the record has no form in JSON: a object"):
        chatmill.compile([RECORDS[0], {"messages": object()}], "bytes", name="chats", **BYTES)
    with pytest.raises(RecordError, match=r"records\[0\], field messages\[0\].content.*surrogate"):
        chatmill.compile([{"messages": [{"role": "user", "content": "\ud800"}]}], "bytes", **BYTES)


def test_a_mistake_shows_no_frames_from_inside_of_the_package() -> None:
    for given in ([{"messages": [{"role": "nobody", "content": "q"}]}], [{"no": "messages"}]):
        with pytest.raises(DataError) as stopped:
            chatmill.compile(given, "bytes", template="chatml", add_control_tokens=True)
        assert len(stopped.traceback) <= 3
        assert stopped.value.__cause__ is None


def test_what_is_left_out_is_counted_shown_and_listed() -> None:
    records = [*RECORDS[:3], {"messages": [{"role": "pope", "content": "x"}]}]
    data = chatmill.compile(records, "bytes", on_error="quarantine", gates=NO_GATES, **BYTES)
    assert len(data) == 3
    assert [(entry["index"], entry["reason"]) for entry in data.rejected] == [(3, "unknown_role")]
    for shown in (repr(data), data._repr_html_()):
        assert "4 records read, 3 built, 1 left out" in shown
        assert "unknown_role" in shown
        assert "first left out: records[3]: " in shown


def test_overflow_names_the_records_and_is_a_choice_that_is_counted() -> None:
    long = {"messages": [{"role": "user", "content": "u" * 90}, {"role": "assistant", "content": "a" * 90}]}
    with pytest.raises(DataError, match=r"the row of 100 tokens: records\[1\] \(\d+ tokens\).*windows") as caught:
        chatmill.compile([SHORT, long], "bytes", max_length=100, **BYTES)
    assert any('overflow="windows"' in note for note in caught.value.__notes__)
    data = chatmill.compile([long], "bytes", max_length=100, overflow="cut", gates=NO_GATES, **BYTES)
    lost = data.counts["tokens"]["records"]["assistant"]["cut_trained"]
    assert f"trained tokens lost by overflow: {lost}\n" in repr(data)
    assert len(data[0]) == 100


NO_GATES = OPEN_GATES


def test_a_gate_says_how_python_turns_it_off() -> None:
    question = [{"messages": [{"role": "user", "content": "x"}]}]
    with pytest.raises(chatmill.GateError, match="1 records train nothing") as caught:
        chatmill.compile(question, "bytes", **BYTES)
    assert any("gates={" in note for note in caught.value.__notes__)


def test_a_template_that_asks_for_the_date_says_how_python_gives_it() -> None:
    options = {"template": "gpt_oss", "add_control_tokens": True}
    with pytest.raises(ConfigError, match="today's date") as caught:
        chatmill.compile([SHORT], "bytes", **options)
    assert any("compile(..., date=" in note for note in caught.value.__notes__)
    assert len(chatmill.compile([SHORT], "bytes", date="2026-01-31", **options)) == 1


def test_rows_never_cut_an_episode_without_a_word(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"length is 50, and the longest episode has .* overflow"):
        data.to_torch(2, length=50)
    with pytest.raises(ConfigError, match="length is 50"):
        data.to_hf(length=50)


def test_without_max_length_rows_hold_the_longest_episode() -> None:
    data = chatmill.compile(WHOLE, "bytes", **BYTES)
    longest = max(map(len, data))
    assert data.to_torch(2).get_batch()[0].shape == (2, longest - 1)
    assert max(map(len, data.to_hf(packed=True)["input_ids"])) <= longest


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_fewer_rows_than_a_batch_are_one_batch(packed: bool, drop_last: bool) -> None:
    data = chatmill.compile(WHOLE[:3], "bytes", **BYTES)
    loader = data.to_torch(8, packed=packed, drop_last=drop_last)
    rows = loader.rows_per_epoch()
    assert rows <= 3
    trained = [int(loader.get_batch()[2].bool().sum()) for _ in range(2)]
    assert loader.get_batch()[0].shape[0] == rows
    assert trained == [sum(int((episode.weights > 0).sum()) for episode in data)] * 2, "all of them, every time"


def test_the_loader_is_packed_resumable_and_keeps_its_files() -> None:
    loader = chatmill.compile(RECORDS, "bytes", max_length=4096, **BYTES).to_torch(2, packed=True)  # data is gone here
    loader.get_batch()
    state = loader.state_dict()
    ahead = [loader.get_batch() for _ in range(5)]
    again = chatmill.compile(RECORDS, "bytes", max_length=4096, **BYTES).to_torch(2, packed=True)
    again.load_state_dict(json.loads(json.dumps(state)))
    for batch in ahead:
        found = again.get_batch()
        assert all(bool((a == b).all()) for a, b in zip(batch, found, strict=True))
    assert ahead[0].x.shape == (2, 4096)
    assert (ahead[0].document_starts >= 0).sum() > 2  # several conversations share a row


def test_rows_for_hugging_face_have_the_targets_of_the_episodes() -> None:
    data = chatmill.compile(WHOLE, "bytes", max_length=4096, **BYTES)
    rows = data.to_hf()
    assert rows.column_names == ["input_ids", "labels"]
    assert [row["labels"] for row in rows] == [episode.labels.tolist() for episode in data]
    assert "seq_lengths" in data.to_hf(packed=True).column_names


def test_it_exports_by_the_names_of_chatmill_export(data: Any, tmp_path: Path) -> None:
    result = data.export("parquet", tmp_path / "exported")
    assert result.splits["train"]["documents"] == len(data)
    with pytest.raises(UnknownNameError, match="export target 'paper'"):
        data.export("paper", tmp_path / "paper")


def test_saving_never_overwrites(data: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert data.save(tmp_path / "empty") == tmp_path / "empty"
    assert data.save(tmp_path / "empty") == tmp_path / "empty"  # the same dataset is there
    opened = chatmill.Dataset(tmp_path / "empty")
    assert ids_of(opened) == ids_of(data)
    other = chatmill.compile(RECORDS[:2], "bytes", **BYTES)
    with pytest.raises(ConfigError, match="holds another dataset"):
        other.save(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        other.save(tmp_path / "full")


def test_splits_slices_and_bad_indices() -> None:
    data = chatmill.compile(RECORDS, "bytes", val_fraction=0.3, **BYTES)
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 64, "packing": {"overflow": "cut"}}, "packing and max_length and overflow say the same"),
        ({"overflow": "cut", "packing": {"max_length": 64}}, "packing and max_length and overflow say the same"),
        ({"val_fraction": 0.5, "split": {"val_fraction": 0.1}}, "split and val_fraction say the same"),
        ({"tokenizer": "o200k"}, "tokenizer and model say the same"),
        ({"sources": [{"path": "chats.jsonl"}]}, "sources and source say the same"),
    ],
)
def test_what_is_given_twice_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chatmill.compile([SHORT], "bytes", **BYTES, **options)
    data = chatmill.compile([SHORT], "bytes", packing={"max_length": 25, "overflow": "cut"}, **BYTES)
    assert len(data[0].ids) == 25


def test_options_that_are_wrong_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        chatmill.compile(RECORDS)
    with pytest.raises(ConfigError, match="did you mean 'template_options'"):
        chatmill.compile(RECORDS, "bytes", template_option={}, **BYTES)
    with pytest.raises(ConfigError, match="'template' is missing"):
        chatmill.compile(RECORDS, "bytes")
    with pytest.raises(TokenizerError, match="no tokenizer 'Qwen3-9B'"):
        chatmill.compile(RECORDS, "./Qwen3-9B")
    with pytest.raises(ConfigError, match=r"there is no file 'none\.jsonl'"):
        chatmill.compile("none.jsonl", "./Qwen3-9B")
    with pytest.raises(ConfigError, match="letters, digits"):
        chatmill.compile(RECORDS, "bytes", name="../x", **BYTES)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_tokenizer_of_transformers_is_kept_as_it_is(cache: Path) -> None:
    from transformers import AutoTokenizer

    folder = TOKENIZERS / "tiny_torchtitan"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_folder = chatmill.compile(RECORDS[:4], folder)
    by_object = chatmill.compile(RECORDS[:4], tokenizer)
    assert Path(by_object.recipe.tokenizer).is_relative_to(cache)
    assert ids_of(by_object) == ids_of(by_folder)
    assert [list(one.weights) for one in by_object] == [list(one.weights) for one in by_folder]
    shout = "{% for m in messages %}{{ m.role }}! {{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.chat_template = shout
    changed = chatmill.compile(RECORDS[:4], tokenizer)
    assert Path(changed.recipe.tokenizer).is_relative_to(cache)
    assert changed[0].text.startswith("user!")
    assert chatmill.compile(RECORDS[:4], tokenizer).recipe == changed.recipe
    with pytest.raises(ConfigError, match="a dict is no model"):
        chatmill.compile(RECORDS[:4], {})


def test_the_temporary_folder_goes_with_the_last_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = chatmill.compile(RECORDS[:3], "bytes", **BYTES)
    loader = data.to_torch(2)
    (folder,) = tmp_path.glob(f"{PREFIX}*")
    del data
    assert folder.is_dir()
    del loader
    gc.collect()
    assert not folder.exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = chatmill.compile(RECORDS[:3], "bytes", max_length=4096, **BYTES)
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


def model_with(folder: Path, *first: str) -> Path:
    """A model folder whose tokenizer has these special tokens before those of the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in (*first, "<|im_start|>", "<|im_end|>")])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def test_a_model_folder_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model")
    compiled = {}
    for more in ((), ("<|zz|>",)):
        model_with(model, *more)
        data = chatmill.compile([SHORT], model, template="chatml", workers=0)
        ends = chatmill.load_tokenizer(model).control_ids["<|im_end|>"]
        compiled[more] = ids_of(data)[0]
        assert ends == 257 + len(more)
        assert compiled[more].count(ends) == 2
    assert len(set(map(tuple, compiled.values()))) == 2
