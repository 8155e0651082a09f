"""Reading one chunk: lines and rows by hand-made ranges, and files that changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from chatmill.errors import DataError
from chatmill.read.files import Raw
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_records

DATA = b'\xef\xbb\xbf{"n": 1}\r\n\n{"n": 3}\n{"n": }\n{"n": 5}'


def chunk(path: Path, kind: ChunkKind, start: int, stop: int, first: int, **changes: Any) -> Chunk:
    status = path.stat()
    given: dict[str, Any] = {
        "path": "in.jsonl",
        "source": "in",
        "shape": "openai",
        "kind": kind,
        "data": str(path),
        "start": start,
        "stop": stop,
        "first": first,
        "count": 0,
        "bytes": stop - start,
        "file_bytes": status.st_size,
        "file_mtime_ns": status.st_mtime_ns,
        **changes,
    }
    return Chunk(**given)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    return path


def test_lines_keep_blanks_and_line_ends_but_not_the_mark_of_the_first(jsonl: Path) -> None:
    whole = chunk(jsonl, ChunkKind.LINES, 0, len(DATA), 1)
    assert chunk_bytes(whole) == b'{"n": 1}\r\n\n{"n": 3}\n{"n": }\n{"n": 5}'
    third = DATA.index(b'{"n": 3}')
    assert chunk_bytes(chunk(jsonl, ChunkKind.LINES, third, third + 9, 3)) == b'{"n": 3}\n'
    assert chunk_bytes(chunk(jsonl, ChunkKind.LINES, 0, 5, 2)) == DATA[:5], "a mark inside of a file stays"
    assert chunk_bytes(chunk(jsonl, ChunkKind.LINES, 4, 4, 1)) == b""


def test_records_are_numbered_as_in_the_file_that_was_named(jsonl: Path) -> None:
    third = DATA.index(b'{"n": 3}')
    first, second, third_ = chunk_records(chunk(jsonl, ChunkKind.LINES, third, len(DATA), 3))
    assert first == Raw("in.jsonl:3", {"n": 3})
    assert second.error is not None
    assert str(second.error).startswith("in.jsonl:4: not JSON")
    assert third_ == Raw("in.jsonl:5", {"n": 5})


def test_entries_of_a_list_are_called_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n":  2}\n3\n')
    part = chunk(path, ChunkKind.LINES, 0, 12, 2, is_list=True)
    assert list(chunk_records(part)) == [Raw("in.jsonl:row 2", {"n": 2}), Raw("in.jsonl:row 3", 3)]


def test_rows_of_parquet_and_of_a_spooled_stream(tmp_path: Path) -> None:
    table = pyarrow.table({"n": list(range(5000))})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=2000)
    for start, stop in ((0, 5000), (0, 1), (1999, 2001), (1500, 4500), (4999, 5000), (3, 3)):
        found = list(chunk_records(chunk(path, ChunkKind.ROWS, start, stop, start + 1)))
        assert found == [Raw(f"in.jsonl:row {n + 1}", {"n": n}) for n in range(start, stop)]
    spooled, borders = tmp_path / "a.arrow", [0]
    with spooled.open("wb") as file:
        for first in (100, 150):
            with pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table.slice(first, 50))
            borders.append(file.tell())
    for start, stop, first in zip(borders, borders[1:], (100, 150), strict=False):
        found = list(chunk_records(chunk(spooled, ChunkKind.ROWS, start, stop, first + 1)))
        assert found == [Raw(f"in.jsonl:row {n + 1}", {"n": n}) for n in range(first, first + 50)]


# --- files that changed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ChunkKind.LINES, ChunkKind.ROWS])
def test_a_file_with_another_size_or_time_is_refused(tmp_path: Path, kind: ChunkKind) -> None:
    path = tmp_path / ("a.parquet" if kind is ChunkKind.ROWS else "a.jsonl")
    if kind is ChunkKind.ROWS:
        pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), path)
    else:
        path.write_bytes(DATA)
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
    with pytest.raises(DataError, match=rf"{path.name} was there when the build began, and now: No such file"):
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
