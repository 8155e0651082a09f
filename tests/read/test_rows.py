"""Rows of Arrow become columns, and are what reading them one by one gives: for every shape and type of column."""

from __future__ import annotations

import json
from datetime import date
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_by_source
from chatmill.errors import RecordError
from chatmill.read import rows as reading
from chatmill.read.files import batch_records, read_records
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from tests.conftest import CONVERSATION_FILES, DATA
from tests.read.three_ways import FROM_OPENAI, batch_of


def same_as_slow(batch: Any, shape: str) -> float:
    """The share of rows that are read by columns, after a comparison of everything."""
    found, errors = read_rows(batch, first=5, path="f", source="s", shape=find_shape(shape))
    raws = batch_records([batch], "f", range(5, 5 + batch.num_rows))
    slow = [conversation_or_error(raw, find_shape(shape), "s") for raw in raws]
    wanted = [item for item in slow if isinstance(item, Conversation)]
    assert list(map(str, errors)) == [str(item) for item in slow if isinstance(item, RecordError)]
    assert [item._replace(metadata={}) for item in found] == [item._replace(metadata={}) for item in wanted]
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
            "tool_calls": st.none() | st.lists(CALL, max_size=2),
            "weight": st.sampled_from([None, 0.0, 0.5, -1.0, 1e31, float("nan")]),
            "train": st.sampled_from([None, True, False]),
        },
    )


OPENAI = st.lists(message("role", "content", ["user", "assistant", " Tool", "x", None]), max_size=3) | st.none()
SHAREGPT = st.lists(message("from", "value", ["human", "gpt", "function_call", "GPT", None]), max_size=3) | st.none()
TOOLS = st.sampled_from([None, "", "[]", '[{"name": "f"}]', '[{"n": 0.5}]', "[1]", "["])
LABELS = st.sampled_from([None, True, False])
COMMON = {"id": MAYBE, "source": MAYBE, "tools": TOOLS, "note": MAYBE, "label": LABELS}
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


ROWS = {
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
