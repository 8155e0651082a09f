"""Rows of Arrow: as columns they are what reading them one by one gives; nulls that Arrow has filled in are emptied."""

from __future__ import annotations

import json
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_by_source
from chatmill.core.ledger import Ledger
from chatmill.errors import RecordError
from chatmill.prove.verify import verify
from chatmill.read import rows as reading
from chatmill.read.arrow_nulls import has_arrow_nulls
from chatmill.read.conversations import DETECT_RECORDS, ConversationFile
from chatmill.read.files import batch_records, read_records, without_nulls
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import CHATML, OPEN_GATES, write_jsonl
from tests.conftest import CONVERSATION_FILES, DATA
from tests.read.three_ways import FROM_OPENAI, KEPT, bare, batch_of


def same_as_slow(batch: Any, shape: str) -> float:
    """The share of rows that are read by columns, after a comparison of everything."""
    found, errors = read_rows(batch, first=5, path="f", source="s", shape=find_shape(shape), kept=KEPT)
    raws = batch_records([batch], "f", range(5, 5 + batch.num_rows))
    slow = [conversation_or_error(raw, find_shape(shape), "s") for raw in raws]
    wanted = [item for item in slow if isinstance(item, Conversation)]
    assert list(map(str, errors)) == [str(item) for item in slow if isinstance(item, RecordError)]
    assert list(map(bare, found)) == list(map(bare, wanted))
    assert list(found.keys) == [item.id or item.where for item in wanted]
    assert found.unused == unused_by_source(wanted)
    try:
        _, sure = reading._ArrowRows(batch, find_shape(shape), "s", [""] * len(batch)).conversations()
    except (reading._NotSureError, pa.ArrowInvalid):
        return 0.0
    return float(sure.mean()) if len(sure) else 1.0


def for_arrow(record: dict[str, Any]) -> dict[str, Any]:
    """Without what has no one type over many records: tools and arguments as texts."""
    record = {key: value for key, value in record.items() if value is not None}
    if "tools" in record and not isinstance(record["tools"], str):
        record["tools"] = json.dumps(record["tools"], ensure_ascii=False)
    return record


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["openai", "sharegpt", "harmony"])
def test_every_bundled_source(shape: str, count: int) -> None:
    shares = []
    for path in CONVERSATION_FILES:
        batch = batch_of([for_arrow(FROM_OPENAI[shape](raw.value)) for raw in islice(read_records(path), count)])
        shares.append(same_as_slow(batch, shape))
        same_as_slow(batch.slice(3, 10), shape)
    assert np.mean(shares) > (0.7 if shape == "sharegpt" else 0.95), shares


def test_the_harmony_shards() -> None:
    for path in sorted((DATA / "synth_harmony").glob("*.parquet")):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(100):
            assert same_as_slow(batch, "harmony") == 1
            same_as_slow(batch.slice(7, 5), "harmony")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=3)
MAYBE = st.none() | TEXT
CALL = st.none() | st.fixed_dictionaries(
    {"id": MAYBE, "function": st.none() | st.fixed_dictionaries({"name": MAYBE, "arguments": MAYBE})}
)


def message(role: str, content: str, roles: list[str | None]) -> st.SearchStrategy[Any]:
    return st.none() | st.fixed_dictionaries(
        {role: st.sampled_from(roles), content: MAYBE},
        optional={
            **dict.fromkeys(("name", "tool_call_id", "channel", "reasoning_content", "thinking", "note"), MAYBE),
            **dict.fromkeys(
                ("x", "train_on", "function_call", *({"role", "content", "from"} - {role, content})), MAYBE
            ),
            "at": st.none() | st.fixed_dictionaries({"day": st.none() | st.just(date(2026, 1, 1)), "n": MAYBE}),
            "images": st.none() | st.lists(st.integers(0, 1), max_size=1),
            "prefix": st.none() | st.booleans(),
            "data": st.none() | st.binary(max_size=1),
            "tool_calls": st.none() | st.lists(CALL, max_size=2),
            "weight": st.sampled_from([None, 0.0, 0.5, -1.0, 1e31, float("nan")]),
            "train": st.sampled_from([None, True, False]),
        },
    )


OPENAI = st.lists(message("role", "content", ["user", "assistant", " Tool", "x", None]), max_size=3) | st.none()
SHAREGPT = st.lists(message("from", "value", ["human", "gpt", "function_call", "GPT", None]), max_size=3) | st.none()
TOOLS = st.sampled_from([None, "", "[]", '[{"name": "f"}]', '[{"n": 0.5}]', "[1]", "["])
LABELS = st.sampled_from([None, True, False])
UNKNOWN = {
    "data": st.none() | st.binary(max_size=1),
    "about": st.none() | st.fixed_dictionaries({"n": st.none() | st.integers(0, 1)}),
}
COMMON = {"id": MAYBE, "source": MAYBE, "tools": TOOLS, "note": MAYBE, "label": LABELS, **UNKNOWN}
NESTED = st.sampled_from([None, "", "{}", '{"messages": [{"role": "user", "content": "é"}]}', '{"messages": [1]}'])
PART = {"type": st.sampled_from(["text", "tool_use", "thinking", "reasoning", None])}
PARTS = st.lists(
    st.fixed_dictionaries(PART, optional=dict.fromkeys(("text", "value", "thinking", "id", "name"), MAYBE)), max_size=2
)


def rows_of(columns: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.lists(st.fixed_dictionaries({}, optional=columns | COMMON), min_size=1, max_size=4)


def rows_of_parts() -> st.SearchStrategy[Any]:
    """A column is of one type: all contents are parts, or all are texts."""
    roles = st.sampled_from(["user", "assistant", "x", None])
    items = [
        st.none() | st.fixed_dictionaries({"role": roles, "content": st.none() | content}) for content in (PARTS, TEXT)
    ]
    return st.one_of(rows_of({"messages": st.none() | st.lists(item, max_size=3), "system": MAYBE}) for item in items)


def rows_of_turns() -> st.SearchStrategy[Any]:
    """Texts, or now and then lists of messages in both columns."""
    beside = dict.fromkeys(("input", "system", "thinking", "text"), MAYBE)
    history = st.none() | st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=1)
    listed = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": MAYBE}), max_size=2)
    said = (MAYBE, MAYBE, listed)
    return st.one_of(
        rows_of({"instruction": one, "output": other, **beside, "history": history}) for one in said for other in said
    )


ROWS = {
    "alpaca": rows_of_turns(),
    "openai": rows_of({"messages": OPENAI}),
    "sharegpt": rows_of({"conversations": SHAREGPT, "system": MAYBE}),
    "anthropic": rows_of_parts(),
    "harmony": rows_of({"messages_json": NESTED, "messages": OPENAI}),
}


@pytest.mark.parametrize("shape", sorted(ROWS))
@settings(max_examples=90)
@given(data=st.data())
def test_random_rows(shape: str, data: st.DataObject) -> None:
    batch = batch_of(data.draw(ROWS[shape]))
    for part in (batch, batch.slice(1)):
        same_as_slow(part, shape)


def test_questions_and_answers_are_read_as_columns() -> None:
    rows = [
        {"id": 1, "instruction": "é", "input": "", "output": "o", "system": "s", "history": []},
        {"id": 2, "instruction": "", "input": "x", "output": "", "system": "", "history": None},
        {"id": 3, "instruction": "i", "input": None, "output": "o", "system": None, "history": []},
    ]
    assert same_as_slow(batch_of(rows), "alpaca") == 1
    assert same_as_slow(batch_of([{**rows[0], "input": b"x"}]), "alpaca") == 0
    wide = pa.schema([("instruction", pa.large_string()), ("input", pa.string()), ("output", pa.string())])
    assert (
        same_as_slow(pa.RecordBatch.from_pylist([{"instruction": "i", "input": "x", "output": "o"}], wide), "alpaca")
        == 0
    )
    assert (
        same_as_slow(batch_of([{**rows[0], "label": False}, {**rows[1], "thinking": "t"}, rows[2]]), "alpaca") == 1 / 3
    )


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "sure"),
    [
        ({"messages": [Q, A]}, 1),
        ({"messages": [Q, A], "id": 7, "chat_template_kwargs": {"enable_thinking": False, "x": None}}, 1),
        ({"messages": [Q, A], "chat_template_kwargs": {"x": None}}, 1),
        ({"messages": [Q, A], "chat_template_kwargs": "x"}, 0),
        ({"messages": [Q, A], "tools": [{"name": "f", "at": None}]}, 1),
        ({"messages": [Q, A], "tools": [{"at": date(2026, 1, 1)}]}, 0),
        ({"messages": [Q, A], "tools": 5}, 0),
        ({"messages": [Q, {**A, "weight": 2}]}, 1),
        ({"messages": [Q, {**A, "weight": "x"}]}, 0),
        ({"messages": [Q, {**A, "train": 1}]}, 0),
        ({"messages": [Q, {**A, "name": 5}]}, 0),
        ({"messages": [Q, {**A, "function_call": {"name": "f", "arguments": "{}"}}]}, 0),
        ({"messages": [Q, {**A, "tool_calls": [{"name": "f", "arguments": "{}"}]}]}, 0),
        ({"messages": [Q, {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]}, 0),
        ({"messages": [Q, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "type": "x"}]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "assistant"}]}, 0),
        ({"messages": "[]"}, 0),
        ({"messages": [1]}, 0),
        ({"text": "x"}, 0),
        ({"messages": [Q, A], "id": 0.5}, 0),
        ({"messages": [Q, A], "source": 3}, 0),
        ({"messages": [Q, A], "images": ["a.png"], "label": True}, 0),
        ({"messages": [Q, A], "label": False}, 0),
    ],
)
def test_types_of_columns(row: dict[str, Any], sure: float) -> None:
    assert same_as_slow(batch_of([row]), "openai") == sure
    assert same_as_slow(batch_of([row, row, row]).slice(1, 1), "openai") == sure


@pytest.mark.parametrize("text", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_types_of_texts(text: Any) -> None:
    item = pa.struct([("role", text), ("content", text)])
    for list_type in (pa.list_(item), pa.large_list(item)):
        schema = pa.schema([("id", text), ("messages", list_type), ("tools", text)])
        rows = [{"id": f"é{i}", "messages": [Q, A], "tools": '[{"name": "f"}]'} for i in range(5)]
        batch = batch_of([*rows, {"id": None, "messages": None, "tools": None}], schema)
        assert same_as_slow(batch, "openai") == pytest.approx(5 / 6)


def test_texts_that_are_not_utf8() -> None:
    broken = pa.array([b"ok", b"\xff", None], type=pa.binary()).view(pa.string())
    items = pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.StructArray.from_arrays([pa.array(["user"] * 3), broken], ["role", "content"])
    )
    assert same_as_slow(pa.RecordBatch.from_arrays([items], ["messages"]), "openai") == 0
    assert same_as_slow(pa.RecordBatch.from_arrays([items, broken], ["messages", "id"]), "openai") == 0


@pytest.mark.parametrize("tools", ["[" * 600 + "]" * 600, '[{"n": ' + "1" * 5000 + "}]"], ids=["deep", "long number"])
def test_tools_that_python_cannot_decode_are_one_bad_record(tools: str) -> None:
    batch = batch_of([{"messages": [Q, A], "tools": tools}, {"messages": [Q, A], "tools": "[]"}])
    found, errors = read_rows(batch, first=1, path="f", source="s", shape=find_shape("openai"))
    assert [item.where for item in found] == ["f:row 2"]
    assert [error.where for error in errors] == ["f:row 1"]
    same_as_slow(batch, "openai")


def with_objects(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose calls have objects as arguments, keys in the order of the alphabet."""
    for message in record["messages"]:
        for call in message.get("tool_calls") or ():
            given = call["function"]["arguments"]
            parsed = json.loads(given) if isinstance(given, str) else given
            call["function"]["arguments"] = json.loads(json.dumps(parsed, sort_keys=True))
    return record


def called(name: str) -> list[dict[str, Any]]:
    """The records of a file that have calls."""
    read = [raw.value for raw in read_records(DATA / "conversations" / f"{name}.jsonl.gz")]
    return [record for record in read if any(message.get("tool_calls") for message in record["messages"])]


def test_a_round_trip_through_datasets_gives_the_same_rows(tmp_path: Path) -> None:
    records = [with_objects(record) for record in called("tau_airline")][:10]
    first = records[0]["messages"][0]  # Arrow has keys in the order in which it meets them
    calls = [call for one in records for message in one["messages"] for call in message.get("tool_calls") or ()]
    every = sorted({key for call in calls for key in call["function"]["arguments"]})
    empty = {"function": {"arguments": dict.fromkeys(every), "name": ""}, "id": None, "type": None}
    table = datasets.Dataset.from_list([{"messages": [{**first, "tool_calls": [empty]}]}, *records])
    damaged = tmp_path / "d.jsonl"
    table.select(range(1, len(table))).to_json(damaged, force_ascii=False)
    write_jsonl(tmp_path / "c.jsonl", records)
    assert ConversationFile(damaged).shape.name == "arrow openai"
    rows = []
    recipe: dict[str, Any] = {**CHATML, "template": "qwen3", "gates": OPEN_GATES, "expand": "tree"}
    for file, changed in (("c", 0), ("d", len(records))):
        sources = [{"path": str(tmp_path / f"{file}.jsonl"), "name": "x"}]
        made = run_build({**recipe, "sources": sources}, tmp_path / file, workers=0)
        assert Ledger.from_json(made.manifest["ledger"]).total_notes("records_without_arrow_nulls") == changed
        rows.append([(one.ids.tolist(), one.trained) for one in EpisodeDataset(tmp_path / file)])
    assert rows[0] == rows[1]
    shortest = sorted(damaged.read_text().splitlines(), key=len)[:2]  # the slow reference takes seconds for a long one
    recipe["sources"] = [{"path": str(write_jsonl(tmp_path / "few.jsonl", shortest)), "shape": "arrow openai"}]
    run_build(recipe, tmp_path / "few", workers=0)
    assert verify(tmp_path / "few", deep=True).passed


@pytest.mark.parametrize("name", ["bfcl_multi_turn", "glaive_toolcall_en"])
def test_tools_are_what_they_were(name: str, tmp_path: Path) -> None:
    records = called(name)[:60]
    datasets.Dataset.from_list(records).to_json(tmp_path / "d.jsonl", force_ascii=False)
    write_jsonl(tmp_path / "c.jsonl", records)
    clean, read = (list(ConversationFile(tmp_path / f"{file}.jsonl")) for file in "cd")
    assert [one.messages for one in clean] == [one.messages for one in read]
    tools = [[json.dumps(one.tools, sort_keys=True) for one in some] for some in (clean, read)]
    assert tools[0] == tools[1]
    assert all("null" in line for line in (tmp_path / "d.jsonl").read_text().splitlines())


def test_real_conversations_are_not_taken_for_damaged_ones() -> None:
    for path in CONVERSATION_FILES:
        assert not has_arrow_nulls([raw.value for raw in read_records(path)][:DETECT_RECORDS]), path


VALUES = st.integers(-5, 5) | st.none()
ARGUMENTS = st.fixed_dictionaries({}, optional=dict.fromkeys("abcd", VALUES))


@given(st.lists(st.tuples(st.sampled_from(["look", "go"]), ARGUMENTS), min_size=2, max_size=6))
@settings(max_examples=200)
def test_what_arrow_has_filled_is_emptied_and_nothing_else(calls: list[tuple[str, dict[str, Any]]]) -> None:
    answers = ({"role": "assistant", "tool_calls": [{"name": name, "arguments": given}]} for name, given in calls)
    record = {"messages": [{"role": "user", "content": "x"}, *answers]}
    assert has_arrow_nulls([record]) is False  # user and assistant have different keys
    (filled,) = pa.Table.from_pylist([record]).to_pylist()
    keys = {key for _, given in calls for key in given}
    is_full = all(set(given) == keys and None not in given.values() for _, given in calls)
    found = has_arrow_nulls([filled])
    assert found is (len({name for name, _ in calls}) > 1 and bool(keys) and not is_full)
    if found:
        assert without_nulls(filled) == without_nulls(record)


def test_nulls_of_one_function_may_be_its_arguments_and_stay(tmp_path: Path) -> None:
    call = {"name": "look", "arguments": {"at": None}}
    turns = ("user", None), ("assistant", [call])
    record = {"messages": [{"role": role, "content": "x", "tool_calls": calls} for role, calls in turns]}
    path = write_jsonl(tmp_path / "one.jsonl", [record])
    kept, emptied = (next(iter(ConversationFile(path, shape=shape))).messages[1] for shape in (None, "arrow openai"))
    assert [one.tool_calls[0].arguments for one in (kept, emptied)] == ['{"at": null}', "{}"]
