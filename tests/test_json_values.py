"""A key that stands twice, and a number that float64 does not hold, are errors wherever they are in a record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.scan import is_exact_json
from chatmill.errors import DataError, RecordError
from chatmill.json_values import decoded
from chatmill.read.columns import Lines, read_lines
from chatmill.read.files import list_entries, read_records
from chatmill.read.record_shape import conversation_of
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.read.tables import table_batches
from tests.core.native.mutations import OTHER_RECORDS, openai_records
from tests.read.three_ways import batch_of

PAIRS = [{"prompt": "p", "chosen": "c", "rejected": [{"role": "assistant", "content": "r"}], "meta": {"n": 1}}]
RECORDS = {"openai": openai_records(), **OTHER_RECORDS, "pairs": PAIRS}


class Members(list[tuple[str, Any]]):
    """The members of an object, whose keys are written as they are."""


def as_members(value: Any) -> Any:
    """A value with objects that can be changed in any way."""
    if isinstance(value, dict):
        return Members((json.dumps(key), as_members(inner)) for key, inner in value.items())
    return [as_members(inner) for inner in value] if isinstance(value, list) else value


def written(value: Any, between: str = ", ") -> str:
    if isinstance(value, Members):
        return "{" + between.join(f"{key}: {written(inner, between)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + between.join(written(inner, between) for inner in value) + "]"
    return value.text if isinstance(value, Raw) else json.dumps(value)


class Raw:
    """A number as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text


def objects_of(value: Any, path: str = "") -> Iterator[tuple[Members, str]]:
    """The objects of a value that have keys, and their places."""
    if isinstance(value, Members):
        if value:
            yield value, path
        for key, inner in value:
            yield from objects_of(inner, f"{path}.{json.loads(key)}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from objects_of(inner, f"{path}[{number}]")


def escaped(key: str) -> str:
    """The same key in another spelling."""
    units = key.encode("utf-16-be")
    return '"' + "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)) + '"'


def errors_of(line: bytes, shape: str) -> list[RecordError]:
    batch, errors = read_lines(line, Lines(0, len(line), 1, 1), before="f:", source="s", shape=find_shape(shape))
    assert not len(batch) or not errors
    return errors


@pytest.mark.parametrize("shape", sorted(RECORDS))
@settings(max_examples=60)
@given(data=st.data())
def test_a_key_that_stands_twice_is_an_error_at_every_level_in_every_spelling(shape: str, data: st.DataObject) -> None:
    record = as_members(data.draw(st.sampled_from(RECORDS[shape])))
    members, path = data.draw(st.sampled_from(list(objects_of(record))))
    key, value = data.draw(st.sampled_from(members))
    assert not [one for one in errors_of(written(record).encode(), shape) if one.code == "duplicate_key"]
    name = json.loads(key)
    members.insert(data.draw(st.integers(0, len(members))), (data.draw(st.sampled_from([key, escaped(name)])), value))
    line = written(record).encode()
    assert not is_exact_json(line)
    assert [(one.code, one.path) for one in errors_of(line, shape)] == [("duplicate_key", f"{path}.{name}".lstrip("."))]
    for entry in list_entries(written([record], ",\n").encode(), "f"):
        with pytest.raises(RecordError, match="is there twice, and only one of the two could be kept"):
            decoded(entry)


BEYOND = ["1e400", "-1e400", "1E+999", "-0.1e-400", "1e-99999", "0.0001e-0330", f"{'9' * 309}.5"]
WITHIN = ["1e99", "1e308", "-1e-300", "5e-324", "0e-400", "0.0E999", "1E0007", "0." + "0" * 70 + "1", "9" * 400, "-0"]


@pytest.mark.parametrize("shape", sorted(RECORDS))
@settings(max_examples=60)
@given(data=st.data())
def test_a_number_beyond_float64_is_an_error_wherever_it_is(shape: str, data: st.DataObject) -> None:
    record = as_members(data.draw(st.sampled_from(RECORDS[shape])))
    members, path = data.draw(st.sampled_from(list(objects_of(record))))
    text = data.draw(st.sampled_from(BEYOND + WITHIN))
    members.append(('"xyz"', Raw(text)))
    line = written(record).encode()
    codes = [(one.code, one.path) for one in errors_of(line, shape) if one.code == "number_range"]
    assert codes == ([("number_range", f"{path}.xyz".lstrip("."))] if text in BEYOND else [])
    if text in WITHIN:
        assert decoded(line) == json.loads(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([None, 2]))
def test_what_is_exact_is_read_as_the_standard_library_reads_it(value: Any, indent: int | None) -> None:
    data = json.dumps(value, indent=indent).encode()
    assert decoded(data) == json.loads(data)


def test_objects_with_many_keys_are_read_and_a_key_twice_among_them_is_found() -> None:
    for count in (10, 1000, 1100, 5000):
        keys = [f'"k{number}": {number}' for number in range(count)]
        line = f'{{"meta": {{{", ".join(keys)}}}, "messages": [{{"role": "user", "content": "hi"}}]}}'.encode()
        assert not errors_of(line, "openai")
        assert is_exact_json(line) == (count <= 1000)
        (error,) = errors_of(line.replace(b'"k7":', b'"k8":', 1), "openai")
        assert (error.code, error.path) == ("duplicate_key", "meta.k8")


TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TWICE = json.dumps(TALK).replace('"role": "user"', '"role": "system", "r\\u006fle": "user"')
HUGE = json.dumps([{"role": "user", "content": "q", "x": 0.5}]).replace("0.5", "1e400")
TOOLS = '[{"name": "f", "name": "g"}]'


@pytest.mark.parametrize(
    ("shape", "record", "code", "path"),
    [
        ("openai", {"messages": TWICE}, "duplicate_key", "messages"),
        ("openai", {"messages": HUGE}, "number_range", "messages"),
        ("harmony", {"messages_json": f'{{"messages": {TWICE}}}'}, "duplicate_key", "messages_json"),
        ("harmony", {"messages_json": f'{{"messages": {HUGE}}}'}, "number_range", "messages_json"),
        ("openai", {"messages": TALK, "tools": TOOLS}, "duplicate_key", "tools"),
        ("openai", {"messages": TALK, "tools": '[{"n": 1e400}]'}, "number_range", "tools"),
        ("openai", {"messages": TALK, "tools": '[{"n": NaN}]'}, "bad_tools", "tools"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "name": "g"}'}]},
            "duplicate_key",
            "conversations[0].value",
        ),
    ],
)
def test_json_that_a_record_has_as_a_text_is_held_to_the_same(
    shape: str, record: dict[str, Any], code: str, path: str
) -> None:
    named = find_shape(shape)
    with pytest.raises(RecordError) as caught:
        conversation_of(record, named)
    _, (of_rows,) = read_rows(batch_of([record]), first=1, path="f", source="s", shape=named)
    (of_lines,) = errors_of(json.dumps(record).encode(), shape)
    assert {(one.code, one.path) for one in (caught.value, of_rows, of_lines)} == {(code, path)}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("record", "path"),
    [
        ({"tools": [{"name": "f", "n": 0.5}]}, "tools"),
        ({"chat_template_kwargs": {"n": 0.5}}, "chat_template_kwargs"),
        (
            {"messages": [*TALK, {**TALK[1], "tool_calls": [{"name": "f", "arguments": {"n": 0.5}}]}]},
            "messages[2].tool_calls[0].arguments",
        ),
    ],
)
def test_a_number_of_parquet_that_json_has_not_is_an_error_where_a_template_may_show_it(
    record: dict[str, Any], path: str, value: float
) -> None:
    record = {"messages": TALK, **record}
    shape = find_shape("openai")
    assert conversation_of(record, shape)
    wrong = json.loads(json.dumps(record).replace("0.5", str(value).replace("inf", "Infinity").replace("nan", "NaN")))
    with pytest.raises(RecordError) as caught:
        conversation_of(wrong, shape)
    _, (error,) = read_rows(batch_of([wrong]), first=1, path="f", source="s", shape=shape)
    assert (error.code, error.path) == (caught.value.code, caught.value.path) == ("number_range", path)


def test_a_table_with_a_name_twice_is_an_error_also_inside_of_a_column(tmp_path: Path) -> None:
    columns = [pa.array([json.dumps(TALK)]), pa.array([json.dumps(TALK[:1])])]
    fields = [pa.array(["user"]), pa.array(["a"]), pa.array(["b"])]
    struct = pa.StructArray.from_arrays(fields, ["role", "content", "content"])
    inside = pa.ListArray.from_arrays([0, 1], struct)
    tables = {
        "two columns named 'messages'": pa.Table.from_arrays(columns, ["messages", "messages"]),
        "two fields named 'content' in its column 'messages'": pa.Table.from_arrays([inside], ["messages"]),
    }
    for message, table in tables.items():
        pq.write_table(table, tmp_path / "a.parquet")
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
            file.write_table(table)
        for name in ("a.parquet", "a.arrow"):
            with pytest.raises(DataError, match=message):
                list(read_records(tmp_path / name))
    (tmp_path / "a.csv").write_text("messages,messages\nx,y\n")
    with pytest.raises(DataError, match="two columns named 'messages'"):
        list(table_batches(tmp_path / "a.csv"))
