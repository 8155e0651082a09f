"""Raw records from files and ranges of them: every format, where each record stands, one error for each bad one."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, DataError
from chatmill.json_values import is_too_deep
from chatmill.read.files import Raw, decode_line, read_records
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_records

LINES = b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def records(path: Path) -> list[Raw]:
    return list(read_records(path))


def codes(path: Path) -> list[str | None]:
    return [raw.error and raw.error.code for raw in records(path)]


def in_two(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: pack(data[:12]) + pack(data[12:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.ndjson.gz", gzip.compress),
        ("a.jsonl.zst", zstandard.compress),
        ("two-members.jsonl.gz", in_two(gzip.compress)),
        ("two-frames.jsonl.zst", in_two(zstandard.compress)),
    ],
)
def test_lines_plain_and_packed(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    path.write_bytes(pack(LINES))
    assert records(path) == [Raw(f"{path}:{n}", {"n": n}) for n in (1, 2, 3)]


def test_a_bad_entry_of_a_json_list_is_one_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"n": "\\ud800"} , {"messages": [], "messages": []},\n {"n": 3}] ')
    first, second, third = records(path)
    assert first.value == {"n": "\ud800"}
    assert second.error is not None
    assert second.error.code == "duplicate_key", "though the standard library splits it, because of the surrogate"
    assert third == Raw(f"{path}:row 3", {"n": 3})
    path.write_bytes(b'[{"n": "\xff"}, {"messages": [], "messages": []}, {"n": 3}]')
    assert codes(path) == ["not_utf8", "duplicate_key", None]
    assert str(records(path)[0].error).startswith(f"{path}:row 1: not UTF-8")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'"text"', r"a\.json.* must hold a list of records"),
        ("a.json", b'{"messages": []', r"a\.json.*line 1 is not JSON"),
        ("a.json", b'[{"n": 1}', "not JSON.*name it .jsonl"),
        ("a.json", b"", "not JSON"),
        ("a.xlsx", b"x", r"cannot tell the format.*\.jsonl\.zst"),
        ("a.jsonl", None, "no such file"),
        (".", None, r"holds no file of conversations .*It has: b\.xlsx"),
    ],
)
def test_no_records_are_an_error_with_a_way_out(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    (tmp_path / "b.xlsx").touch()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=message):
        records(tmp_path / name)


def test_parquet_rows_lose_null_fields_and_each_bad_text_is_one_bad_record(tmp_path: Path) -> None:
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
    raw = pyarrow.array([b"ok", b"b\xffd", b"z"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    first, second, third = records(path)
    assert (first.value, third.value) == ({"text": "ok"}, {"text": "z"})
    assert second.error is not None
    assert second.error.code == "not_utf8"
    assert str(second.error) == f"{path}:row 2: a text is not UTF-8: byte 0xFF at byte 1 of it"


def test_bom_crlf_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n   \t\n\n{"n": 2}\n{"n": 3}')
    assert records(path) == [Raw(f"{path}:{line}", {"n": n}) for n, line in ((1, 1), (2, 5), (3, 6))]
    for content in (b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"):
        path.write_bytes(content)
        assert records(path) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a": 1}', None),
        (b'{"a": "truncated', "invalid_json"),
        (b'{"a": 1,}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b"[" * 5000 + b"]" * 5000, "invalid_json"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\xff"}', "not_utf8"),
        (b'{"conversations": 1, "a": 2, "conversations": 2}', "duplicate_key"),
        (b'{"messages": "\\ud800", "messages": 2}', "duplicate_key"),
        (b'{"messages": 1, "a": {"messages": 2}}', None),
        (b'{"a": {"messages": 1, "messages": 2}}', "duplicate_key"),
        (b'{"a": 1e400}', "number_range"),
        (b'{"a": "\\"messages\\" \\"messages\\""}', None),
        (b'{"a": "\\ud800"}', None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_lines_and_their_codes(line: bytes, expected: str | None) -> None:
    """More of them are in `test_nasty.py`."""
    raw = decode_line(line, "f:1")
    assert (raw.error and raw.error.code) == expected
    assert (raw.value is None) == (raw.error is not None)
    assert str(raw.error or "f:1").startswith("f:1")


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
    assert codes(path) == [None, None, "invalid_json", "invalid_json", None]


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
        patch.setattr("chatmill.json_values.MAX_NESTING", limit)
        assert is_too_deep(json.dumps(value).encode()) == (levels(value) > limit)


def chunk(path: Path, kind: ChunkKind, start: int, stop: int, first: int, **changes: Any) -> Chunk:
    """A range of a file, which was spooled from another one."""
    status = path.stat()
    known = {"file_bytes": status.st_size, "file_mtime_ns": status.st_mtime_ns, "bytes": stop - start, "count": 0}
    names = {"path": "in.jsonl", "source": "in", "shape": "openai", "data": str(path)}
    return Chunk(**names, kind=kind, start=start, stop=stop, first=first, **known, **changes)  # type: ignore[arg-type]


def test_a_range_of_lines_has_their_bytes_and_numbers_but_not_the_mark_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = b'\xef\xbb\xbf{"n": 1}\r\n\n{"n": 3}\n{"n": }\n{"n": 5}'
    path.write_bytes(data)
    assert chunk_bytes(chunk(path, ChunkKind.LINES, 0, len(data), 1)) == data[3:]
    third = data.index(b'{"n": 3}')
    assert chunk_bytes(chunk(path, ChunkKind.LINES, third, third + 9, 3)) == b'{"n": 3}\n'
    assert chunk_bytes(chunk(path, ChunkKind.LINES, 0, 5, 2)) == data[:5], "a mark inside of a file stays"
    assert chunk_bytes(chunk(path, ChunkKind.LINES, 4, 4, 1)) == b""
    first, second, last = chunk_records(chunk(path, ChunkKind.LINES, third, len(data), 3))
    assert (first, last) == (Raw("in.jsonl:3", {"n": 3}), Raw("in.jsonl:5", {"n": 5}))
    assert str(second.error).startswith("in.jsonl:4: not JSON")
    path.write_bytes(b'{"n":  2}\n3\n')
    part = chunk(path, ChunkKind.LINES, 0, 12, 2, is_list=True)
    assert list(chunk_records(part)) == [Raw("in.jsonl:row 2", {"n": 2}), Raw("in.jsonl:row 3", 3)]


def test_rows_of_parquet_and_of_a_spooled_stream(tmp_path: Path) -> None:
    table = pyarrow.table({"n": list(range(5000))})
    path, spooled = tmp_path / "a.parquet", tmp_path / "a.arrow"
    pyarrow.parquet.write_table(table, path, row_group_size=2000)
    places = [(0, 5000), (0, 1), (1999, 2001), (1500, 4500), (4999, 5000), (3, 3)]
    parts = [(path, place, place) for place in places]
    with spooled.open("wb") as file:
        for first in (100, 150):
            begin = file.tell()
            with pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table.slice(first, 50))
            parts.append((spooled, (begin, file.tell()), (first, first + 50)))
    for data, (start, stop), rows in parts:
        found = list(chunk_records(chunk(data, ChunkKind.ROWS, start, stop, rows[0] + 1)))
        assert found == [Raw(f"in.jsonl:row {n + 1}", {"n": n}) for n in range(*rows)]


@pytest.mark.parametrize("kind", [ChunkKind.LINES, ChunkKind.ROWS])
def test_a_file_that_changed_is_refused(tmp_path: Path, kind: ChunkKind) -> None:
    path = tmp_path / ("a.parquet" if kind is ChunkKind.ROWS else "a.jsonl")
    if kind is ChunkKind.ROWS:
        pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), path)
    else:
        path.write_bytes(LINES)
    part = chunk(path, kind, 0, 2, 1)
    assert len(list(chunk_records(part))) > 0
    os.utime(path, ns=(0, part.file_mtime_ns - 1_500_000_000))
    with pytest.raises(DataError, match=rf"{path.name} has changed since the build began: .*-1\.500 s"):
        list(chunk_records(part))
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=rf"{path.name} has changed .* it had {part.file_bytes} bytes"):
        list(chunk_records(part))
    path.unlink()
    with pytest.raises(DataError, match=rf"{path.name} was there when the build began, and now, on .*: No such file"):
        list(chunk_records(part))


def test_a_damaged_stream_and_an_unreadable_file_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(b"no stream at all" * 9)
    with pytest.raises(DataError, match=r"a\.arrow is damaged"):
        list(chunk_records(chunk(path, ChunkKind.ROWS, 0, 9, 1)))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.arrow: Permission denied"):
        chunk_bytes(chunk(path, ChunkKind.LINES, 0, 9, 1))
