"""Raw records from files: every format, where each record stands, and one error for each that cannot be decoded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, DataError
from chatmill.read.files import Raw, decode_line, is_too_deep, read_records

LINES = b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def records(path: Path) -> list[Raw]:
    return list(read_records(path))


def values(path: Path) -> list[Any]:
    found = records(path)
    assert all(raw.error is None for raw in found)
    return [raw.value for raw in found]


def code(line: bytes) -> str | None:
    raw = decode_line(line, "f:1")
    return raw.error.code if raw.error else None


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.ndjson.gz", gzip.compress),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress),
        ("two-members.jsonl.gz", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        (
            "two-frames.jsonl.zst",
            lambda data: b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:12], data[12:])),
        ),
    ],
)
def test_lines_plain_and_packed(tmp_path: Path, name: str, pack: Any) -> None:
    path = tmp_path / name
    path.write_bytes(pack(LINES))
    assert records(path) == [Raw(f"{path}:{n}", {"n": n}) for n in (1, 2, 3)]


def test_a_bad_entry_of_a_json_list_is_one_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"n": "\\ud800"}, {"messages": [], "messages": []}, {"n": 3}]')
    first, second, third = records(path)
    assert first.value == {"n": "\ud800"}
    assert second.value == {"messages": []}, "read by the standard library because of the surrogate"
    assert third == Raw(f"{path}:row 3", {"n": 3})
    path.write_bytes(b'[{"n": "\xff"}, {"messages": [], "messages": []}, {"n": 3}]')
    assert [raw.error and raw.error.code for raw in records(path)] == ["not_utf8", "duplicate_key", None]
    assert str(records(path)[0].error).startswith(f"{path}:row 1: not UTF-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"text"', "must hold a list of records"),
        (b'{"messages": []', "line 1 is not JSON"),
        (b'[{"n": 1}', "not JSON.*name it .jsonl"),
        (b"", "not JSON"),
    ],
)
def test_a_json_file_that_is_no_list_is_an_error_with_a_way_out(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        records(path)
    assert str(path) in str(caught.value)


def test_parquet_rows_and_null_fields_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "q", "tool_calls": None}]},
        {"id": None, "messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "id": None}]}]},
        {"id": "c", "messages": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert records(path) == [
        Raw(f"{path}:row 1", {"id": "a", "messages": [{"role": "user", "content": "q"}]}),
        Raw(f"{path}:row 2", {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}),
        Raw(f"{path}:row 3", {"id": "c"}),
    ]


def test_parquet_text_that_is_not_utf8_is_one_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pyarrow.array([b"ok", b"b\xffd", b"z"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    first, second, third = records(path)
    assert (first.value, third.value) == ({"text": "ok"}, {"text": "z"})
    assert second.error is not None
    assert second.error.code == "not_utf8"
    assert str(second.error) == f"{path}:row 2: a text is not UTF-8: byte 0xFF at byte 1 of it"


# --- files that cannot be read -------------------------------------------------------------------------------------


def test_a_missing_file_and_an_unknown_ending_are_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"cannot tell the format.*\.jsonl\.zst"):
        read_records(tmp_path / "a.xlsx")
    with pytest.raises(ConfigError, match=r"holds no file of conversations .*It has: a\.xlsx"):
        read_records(tmp_path)


# --- lines ---------------------------------------------------------------------------------------------------------


def test_bom_crlf_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n   \t\n\n{"n": 2}\n{"n": 3}')
    assert [(raw.where, raw.value) for raw in records(path)] == [
        (f"{path}:1", {"n": 1}),
        (f"{path}:5", {"n": 2}),
        (f"{path}:6", {"n": 3}),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_files_without_records(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert records(path) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a": 1}', None),
        (b'{"a": "truncated', "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"a": 1} {"b": 2}', "invalid_json"),
        (b'{"a": 1,}', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": "raw \t tab"}', "invalid_json"),
        (b"[" * 5000 + b"]" * 5000, "invalid_json"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\xff"}', "not_utf8"),
        (b'{"a": "\xed\xa0\x80"}', "not_utf8"),
        (b'{"messages": 1, "messages": 2}', "duplicate_key"),
        (b'{"conversations": 1, "a": 2, "conversations": 2}', "duplicate_key"),
        (b'{"messages": "\\ud800", "messages": 2}', "duplicate_key"),
        (b'{"messages": 1, "a": {"messages": 2}}', None),
        (b'{"a": {"messages": 1, "messages": 2}}', None),
        (b'{"a": "\\"messages\\" \\"messages\\""}', None),
        (b'{"a": "\\ud800"}', None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_lines_and_their_codes(line: bytes, expected: str | None) -> None:
    assert code(line) == expected
    raw = decode_line(line, "f:1")
    assert (raw.value is None) == (raw.error is not None)
    if raw.error is not None:
        assert str(raw.error).startswith("f:1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, ascii_only=st.booleans())
@settings(max_examples=100)
def test_what_json_writes_is_read_as_json_reads_it(value: Any, ascii_only: bool) -> None:
    assert decode_line(json.dumps(value, ensure_ascii=ascii_only).encode(), "") == Raw("", value)


@pytest.mark.parametrize("form", ["list", "lines", "objects"])
def test_records_are_nested_up_to_one_limit(form: str, tmp_path: Path) -> None:
    """Whatever Python decodes them: 3.11 gives up at a thousand levels less those of its own calls, others later."""
    entries = [json.dumps({"n": 1, "deep": None}).replace("null", "[" * d + "]" * d) for d in (3, 499, 500, 900)]
    entries.append(json.dumps({"text": "[" * 900}))
    path = tmp_path / ("a.jsonl" if form == "lines" else "a.json")
    path.write_text({"list": f"[{','.join(entries)}]"}.get(form, "\n".join(entries)))
    assert [raw.error and raw.error.code for raw in records(path)] == [None, None, "invalid_json", "invalid_json", None]


def levels(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(levels, value.values() if isinstance(value, dict) else value), default=0)
    return 0


TRICKY = st.text(alphabet='[]{}"\\a', max_size=6)
NESTED = st.recursive(
    TRICKY, lambda one: st.lists(one, min_size=1, max_size=3) | st.dictionaries(TRICKY, one, max_size=2), max_leaves=12
)


@given(NESTED, st.integers(0, 5))
def test_levels_of_json_are_counted_outside_of_strings(value: Any, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatmill.read.files.MAX_NESTING", limit)
        assert is_too_deep(json.dumps(value).encode()) == (levels(value) > limit)
